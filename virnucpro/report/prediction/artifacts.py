"""The report for Prefect: a summary in Markdown and a table of the contigs with the highest scores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from virnucpro.errors import printable
from virnucpro.report.formats import percent, whole
from virnucpro.report.prediction import wording
from virnucpro.report.prediction.summary import GROUPS, Summary, summarise

if TYPE_CHECKING:
    from virnucpro.run_layout import PredictionLayout

ARTIFACT_CONTIGS = 100

_MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~&$])")


def report_markdown(layout: PredictionLayout) -> str:
    """Return the summary of a complete prediction in Markdown, with the path of its report."""
    summary = summarise(layout)
    lines = [f"# {wording.lead(summary)}", "", *_paragraphs(summary), *_calls(summary)]
    reasons = [f"| {markdown_text(reason)} | {whole(contigs)} |" for reason, contigs in summary.reasons.most_common()]
    if reasons:
        lines += [f"| Why there is no score | {summary.sequences.capitalize()} |", "| --- | ---: |", *reasons, ""]
    lines += [f"- {markdown_text(note)}" for note in summary.manifest.notes]
    found = ("Report", layout.report) if layout.report.exists() else ("Calls", layout.contigs)
    lines += ["", f"{found[0]}: {markdown_text(str(found[1].resolve()))}", ""]
    return "\n".join(lines)


def report_table(layout: PredictionLayout) -> list[dict[str, Any]]:
    """Return the ``ARTIFACT_CONTIGS`` contigs with the highest scores: the main columns of ``contigs.tsv``."""
    return [
        {
            "contig": contig.found.contig,
            "length": contig.length_nt,
            "score": contig.found.score,
            "posterior": contig.found.posterior,
            "fdr": contig.found.fdr,
            "call": contig.found.call,
            "why": wording.evidence(contig.found),
            "topology": contig.found.topology,
            "viral_regions": len(contig.regions),
            "reason": contig.found.reason,
        }
        for contig in summarise(layout).table[:ARTIFACT_CONTIGS]
    ]


def _paragraphs(summary: Summary) -> list[str]:
    paragraphs = [" ".join(wording.details(summary)), wording.missing(summary) or ""]
    if summary.long_contigs:
        paragraphs.append(wording.regions(summary))
    return [line for text in paragraphs if text for line in (text, "")]


def _calls(summary: Summary) -> list[str]:
    if not summary.contigs:
        return []
    groups = [(call, summary.groups[call].contigs) for call in GROUPS]
    rows = [f"| {call} | {whole(n)} | {percent(n, summary.contigs)} |" for call, n in groups if n]
    return [f"| Call | {summary.sequences.capitalize()} | Share |", "| --- | ---: | ---: |", *rows, ""]


def markdown_text(text: str) -> str:
    """Return foreign text escaped for Markdown, in one line."""
    return _MARKUP.sub(r"\\\1", printable(text))
