"""
``report.html``: one file of bounded size that needs neither network nor other files.

Here are also its last sections: sequences without a score, how the result was made, and the files beside the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import printable
from virnucpro.report.html import (
    Html,
    counted,
    cut,
    duration,
    element,
    files_beside,
    joined,
    percent,
    rows_of,
    terms,
    whole,
)
from virnucpro.report.html_page import COLOURS, fill_page
from virnucpro.report.prediction import sections, wording
from virnucpro.report.prediction.summary import NO_SCORE, summarise
from virnucpro.report.prediction.table import contig_section
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.report.prediction.summary import Summary
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import PredictionManifest


_SHOWN_CHARACTERS = 300
_SHOWN_INPUTS = 20
_STAGES = {
    "letters": "composition scores",
    "fragments": "chunks and reading frames",
    "dna": "embedding of DNA",
    "protein": "embedding of proteins",
    "classify": "classification",
    "contigs": "calls",
    "report": "report",
}
_MODELS = {
    "classifier": "classifier",
    "dna": "DNA model",
    "protein": "protein model",
    "letters": "composition",
}
_SHA_DIGITS = 16


def write_report(layout: PredictionLayout) -> Path:
    """Write the report of a complete prediction; return its path."""
    summary = summarise(layout)
    thresholds = _lines(summary.sample_record.not_virus_below, summary.sample_record.virus_from)
    body = joined(
        sections.overview(summary),
        sections.distributions(summary, thresholds),
        sections.along_contigs(summary),
        contig_section(summary),
        left_out(summary),
        how_it_was_made(summary),
    )
    page = fill_page(
        title=f"VirNucPro: {wording.lead(summary)}",
        heading=sections.heading(summary),
        sections=body,
        footer=footer(layout, summary),
        colours=COLOURS,
    )
    durable.write_bytes(layout.report, page.encode("utf-8", "backslashreplace"))
    return layout.report


def _lines(*limits: float | None) -> list[float]:
    """Return the scores at which calls change, as they are drawn: ascending and distinct."""
    return sorted({round(limit, 12) for limit in limits if limit is not None})


def left_out(summary: Summary) -> Html:
    counts = summary.manifest.counts
    without = summary.groups[NO_SCORE].contigs + summary.groups[Call.TOO_SHORT].contigs
    parts = [element("h2", "What has no score, and why")]
    if without:
        parts.append(element("p", f"{counted(without, summary.sequence)} of {whole(summary.contigs)}:", class_="note"))
        rows = [(_short(why), whole(n), percent(n, summary.contigs)) for why, n in summary.reasons.most_common()]
        parts.append(rows_of(("Why", summary.sequences.capitalize(), "Share"), rows, label="Reasons", numbers=(1, 2)))
    elif summary.contigs:
        parts.append(element("p", f"Every {summary.sequence} has a score."))
    else:
        parts.append(element("p", f"There was no {summary.sequence} to score."))
    fragments = summary.manifest.stages.get("fragments")
    if fragments is not None and (chunks := fragments.counts.get("chunks", 0)):
        opened, frames, missing = (counts.get(name, 0) for name in ("open_chunks", "frames", "missing_frames"))
        scored = (
            "none of them could be scored"
            if frames and missing == frames
            else (f"{whole(missing)} of them could not be scored" if missing else "all of them were scored")
        )
        looked_at = counted(chunks, "chunk") + (" of embedded contigs" if chunks < counts["chunks"] else "")
        text = f"{whole(opened)} of {looked_at} ({percent(opened, chunks)}) have an open reading frame"
        ending = f"; there are {counted(frames, 'open frame')}, and {scored}." if frames else "."
        parts.append(element("p", f"{text}{ending}", class_="note"))
    if alone := counts.get("by_sequence"):
        subject = f"{counted(alone, summary.sequence)} without an open frame {'is' if alone == 1 else 'are'}"
        parts.append(
            element("p", f"{subject} scored by {'its' if alone == 1 else 'their'} sequence alone.", class_="note")
        )
    if summary.failed:
        parts.append(_failed(summary))
    return element("section", *parts)


def _failed(summary: Summary) -> Html:
    shown = len(summary.failed)
    which = f"The first {whole(shown)} of {whole(summary.num_failed)}" if shown < summary.num_failed else "All"
    title = f"{which} lines of failed_sequences.tsv: skipped records, and frames without a score"
    rows = [[_short(column) for column in (line + [""] * 3)[:3]] for line in summary.failed]
    return element(
        "details",
        element("summary", title),
        rows_of(("Record or frame", "Why", "Attempts"), rows, label=title, numbers=(2,)),
    )


def how_it_was_made(summary: Summary) -> Html:
    manifest = summary.manifest
    named = [
        (
            title,
            _short(manifest.models[key]["name"]),
            element("code", (manifest.models[key].get("sha256") or "unknown")[:_SHA_DIGITS]),
        )
        for key, title in _MODELS.items()
        if key in manifest.models
    ]
    if summary.has_contig_model:
        classifier = manifest.models["classifier"]
        sha256 = element("code", classifier["contig_model_sha256"][:_SHA_DIGITS])
        named.insert(1, ("its contig model", _short(classifier["name"]), sha256))
    left = joined(
        rows_of(("Model", "Name", "sha256 begins"), named, label="Models"),
        _terms(_facts(manifest)),
        element(
            "details",
            element("summary", "Settings that decide the scores"),
            _terms(_settings(manifest.settings)),
        ),
    )
    taken = [(_STAGES.get(name, name), stage.seconds) for name, stage in manifest.stages.items()]
    total = sum(seconds for _, seconds in taken)
    times = [(name, duration(seconds), _share(seconds, total)) for name, seconds in taken]
    right = rows_of(
        ("Stage", "Time", "Share"), [*times, ("together", duration(total), "")], label="Times", numbers=(1, 2)
    )
    return element(
        "section",
        element("h2", "How this was made"),
        element("div", element("div", left), element("div", right if taken else Html()), class_="facts"),
    )


def _facts(manifest: PredictionManifest) -> list[tuple[str, str]]:
    chunk = f"{manifest.models['classifier']['chunk_nt']} nt"
    facts = [("result fingerprint", manifest.fingerprint), ("chunk length", chunk)]
    asked = dict(manifest.output_settings)
    asked["threshold"] = f"{asked['threshold']} of the posterior where the share of viruses is known, else of the score"
    facts += _settings(asked)
    facts += [(f"{name} version", version) for name, version in manifest.versions.items()]
    shown = ", ".join(manifest.devices[:_SHOWN_INPUTS]) + (" \u2026" if len(manifest.devices) > _SHOWN_INPUTS else "")
    facts += [("devices", shown), ("started", manifest.started), ("run", manifest.run_id)]
    for item in manifest.inputs[:_SHOWN_INPUTS]:
        facts.append(("input", f"{item['path']} (sha256 {item['sha256'][:_SHA_DIGITS]}\u2026)"))
    if len(manifest.inputs) > _SHOWN_INPUTS:
        facts.append(("input", f"and {counted(len(manifest.inputs) - _SHOWN_INPUTS, 'more file')}, in run.json"))
    return facts


def _settings(settings: dict[str, Any]) -> list[tuple[str, str]]:
    return [(_title(key), _plain(value)) for key, value in settings.items() if _is_plain(value)]


def _terms(facts: list[tuple[str, str]]) -> Html:
    return terms((name, _short(value)) for name, value in facts if value)


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str | int | float)
        or (isinstance(value, list) and len(value) <= _SHOWN_INPUTS)
    )


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _title(key: str) -> str:
    """Return a setting's name with its unit in brackets."""
    words = key.split("_")
    return f"{' '.join(words[:-1])} ({words[-1]})" if words[-1] in {"nt", "bytes", "s"} else " ".join(words)


def _share(seconds: float, total_s: float) -> str:
    share = 100 * seconds / total_s if total_s else 0.0
    return f"{share:.0f}%" if share >= 1 or not share else "<1%"


def _short(text: str) -> str:
    return cut(printable(text), _SHOWN_CHARACTERS)


def footer(layout: PredictionLayout, summary: Summary) -> Html:
    files = [
        (layout.contigs, "the viral ones alone" if summary.has_only_viral else "every sequence"),
        (layout.viral_fasta, "those called viral"),
        (layout.genes, "genes"),
        (layout.gene_proteins, "their proteins"),
        (layout.tracks, "P(virus) along long contigs"),
        (layout.viral_regions, "viral regions"),
        (layout.prediction_results, "every reading frame"),
        (layout.highest_score, "every chunk"),
        (layout.failed_sequences, "what has no score"),
        (layout.manifest, "the run"),
    ]
    return files_beside((path.name, what) for path, what in files if path.exists())
