"""``report.html``: one file of bounded size that needs neither network nor other files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.data.reading.input_files import input_name
from virnucpro.errors import printable
from virnucpro.report.formats import counted, cut, nucleotides, percent, probability, whole
from virnucpro.report.html_page import COLOURS, fill_page
from virnucpro.report.prediction import plots, wording
from virnucpro.report.prediction.plots import SHADED_REGIONS, longest_regions
from virnucpro.report.prediction.summary import GROUPS, NO_SCORE, SURE_FROM, summarise
from virnucpro.report.prediction.table import table_values
from virnucpro.report.prediction.viral_records import find_genes
from virnucpro.stage_names import PREDICTION
from virnucpro.store.contig_table import Call
from virnucpro.telemetry.show.wording import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from virnucpro.report.prediction.summary import Region, Summary, Track
    from virnucpro.report.prediction.viral_records import Gene
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import PredictionManifest

_SHOWN_CHARACTERS = 300
_SHOWN_INPUTS = 20
_NAMED_INPUTS = 3
_SHOWN_NOTES = 20
_NAMED_REGIONS = 4
_MODELS = {"classifier": "classifier", "dna": "DNA model", "protein": "protein model", "composition": "composition"}
_SHA_DIGITS = 16


def write_report(layout: PredictionLayout) -> Path:
    """Write the report of a complete prediction; return its path."""
    summary = summarise(layout)
    page = fill_page(
        "prediction/report.html",
        colours=COLOURS,
        title=f"VirNucPro: {wording.lead(summary)}",
        heading=wording.lead(summary).removesuffix("."),
        about=_about(summary),
        beside=_beside(layout, summary),
        summary=summary,
        wording=wording,
        plots=plots,
        thresholds=_lines(summary.sample_record.not_virus_below, summary.sample_record.virus_from),
        captions_of=_captions,
        genes_of=_genes_of,
        facts_of=_facts_of,
        warning=wording.missing(summary),
        groups=[(call, group) for call in GROUPS if (group := summary.groups[call]).contigs],
        figures=_key_figures(summary),
        notes=_notes(summary),
        **(table_values(summary) if summary.table else {}),
        without=summary.groups[NO_SCORE].contigs + summary.groups[Call.TOO_SHORT].contigs,
        reasons=[(_short(why), whole(n), percent(n, summary.contigs)) for why, n in summary.reasons.most_common()],
        frames=_frames(summary),
        failed=_failed(summary) if summary.failed else None,
        models=_models(summary),
        made=_terms(_facts(summary.manifest)),
        settings=_terms(_settings(summary.manifest.settings)),
        times=_times(summary.manifest),
    )
    durable.write_bytes(layout.report, page)
    return layout.report


def _lines(*limits: float | None) -> list[float]:
    """Return the scores at which calls change, as they are drawn: ascending and distinct."""
    return sorted({round(limit, 12) for limit in limits if limit is not None})


def _about(summary: Summary) -> list[str]:
    manifest = summary.manifest
    inputs = [input_name(str(item["path"])).rpartition("/")[2] for item in manifest.inputs]
    named = ", ".join(printable(name) for name in inputs[:_NAMED_INPUTS])
    more = f" and {counted(len(inputs) - _NAMED_INPUTS, 'more file')}" if len(inputs) > _NAMED_INPUTS else ""
    classifier = manifest.models["classifier"]["name"]
    return [one for one in (f"{named}{more}", f"classifier {printable(classifier)}", manifest.started[:10]) if one]


def _notes(summary: Summary) -> list[str]:
    every = [printable(note) for note in summary.manifest.notes]
    more = [f"{whole(len(every) - _SHOWN_NOTES)} more notes are in run.json."] if len(every) > _SHOWN_NOTES else []
    return every[:_SHOWN_NOTES] + more


def _key_figures(summary: Summary) -> list[tuple[str, str]]:
    viral = summary.groups[Call.VIRUS]
    if not summary.scored or not (viral.contigs or summary.regions):
        return []
    figures = [(whole(summary.sure[least]), f"viral with a score \u2265\u00a0{least}") for least in reversed(SURE_FROM)]
    figures.append((nucleotides(viral.nt), f"in viral {summary.sequences}"))
    sample = summary.sample_record
    if sample.share is not None:
        how = "as given" if sample.interval is None else "estimated"
        is_none = sample.interval is not None and not sample.interval[0]
        shown = f"\u2264\u00a0{sample.interval[1]:.2%}" if sample.interval and is_none else f"{sample.share:.2%}"
        figures.append((shown, f"share of viruses, {how}"))
    if viral.contigs and sample.fdr is not None:
        figures.append((f"{sample.fdr:.2%}", f"expected false discovery rate of the viral {summary.sequences}"))
    if summary.long_contigs:
        figures.append((whole(summary.regions), f"viral regions in long {summary.sequences}"))
    return figures


def _captions(summary: Summary, thresholds: Sequence[float]) -> tuple[str, str]:
    """Return the captions of the histogram and of the scatter plot."""
    lines = " and ".join(f"{threshold:g}" for threshold in thresholds)
    dotted = f"otted: the {'threshold' if len(thresholds) == 1 else 'thresholds'} {lines}"
    one = f"viral {summary.sequence}" if summary.has_only_viral else summary.sequence
    count = f"All {counted(summary.scored, one)} with a score" if summary.scored > 1 else f"The one {one} with a score"
    shown = len(summary.sample)
    of = "" if shown == summary.scored else f": {whole(shown)} of {whole(summary.scored)}, {_sampled(summary)}"
    return f"{count}; d{dotted}.", f"Each point is a {one}{of}. D{dotted}."


def _sampled(summary: Summary) -> str:
    viral, shown = summary.groups[Call.VIRUS].contigs, sum(contig.found.call == Call.VIRUS for contig in summary.sample)
    if not viral:
        return "drawn evenly"
    which = "all that are called viral" if viral == shown else f"{whole(shown)} of the {whole(viral)} called viral"
    return f"{which}, and {whole(len(summary.sample) - shown)} of the others, drawn evenly"


def _genes_of(summary: Summary, track: Track) -> Sequence[Gene]:
    record = summary.records.get(track.contig.number)
    return find_genes(record) if record else []


def _facts_of(summary: Summary, track: Track, genes: Sequence[Gene]) -> list[str]:
    contig = track.contig
    found = [nucleotides(contig.length_nt), contig.found.call]
    if contig.found.score is not None:
        found.append(f"score {probability(contig.found.score)}")
    if track.steps and track.is_even:
        least, most = (probability(of(step.p_virus for step in track.steps)) for of in (min, max))
        found.append(f"along it {least}" if least == most else f"along it {least} to {most}")
    if contig.number in summary.records:
        found.append(counted(len(genes), "likely gene"))
    if contig.regions:
        named = longest_regions(contig, _NAMED_REGIONS)
        which = (
            "viral" if len(named) == len(contig.regions) else f"longest of {whole(len(contig.regions))} viral regions:"
        )
        found.append(f"{which} {_places(named)}")
    if len(contig.regions) > SHADED_REGIONS:
        found.append(f"the {SHADED_REGIONS} longest regions are shaded")
    if track.window_nt:
        found.append(f"means over {nucleotides(track.window_nt)}")
    return found


def _places(regions: Iterable[Region]) -> str:
    """Return 1-based, inclusive positions."""
    return ", ".join(f"{region.start + 1:,}\u2013{region.end:,}" for region in regions)


def _frames(summary: Summary) -> list[str]:
    """Return how many chunks have open frames, and how many contigs are scored without one."""
    notes, counts = [], summary.manifest.counts
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
        notes.append(text + (f"; there are {counted(frames, 'open frame')}, and {scored}." if frames else "."))
    if alone := counts.get("by_sequence"):
        subject = f"{counted(alone, summary.sequence)} without an open frame {'is' if alone == 1 else 'are'}"
        notes.append(f"{subject} scored by {'its' if alone == 1 else 'their'} sequence alone.")
    return notes


def _failed(summary: Summary) -> tuple[str, list[list[str]]]:
    shown = len(summary.failed)
    which = f"The first {whole(shown)} of {whole(summary.num_failed)}" if shown < summary.num_failed else "All"
    title = f"{which} lines of failed_sequences.tsv: skipped records, and frames without a score"
    return title, [[_short(column) for column in (line + [""] * 3)[:3]] for line in summary.failed]


def _models(summary: Summary) -> list[tuple[str, str, str]]:
    models = summary.manifest.models
    named = [
        (title, _short(models[key]["name"]), (models[key].get("sha256") or "unknown")[:_SHA_DIGITS])
        for key, title in _MODELS.items()
        if key in models
    ]
    if summary.has_contig_model:
        classifier = models["classifier"]
        sha256 = classifier["contig_model_sha256"][:_SHA_DIGITS]
        named.insert(1, ("its contig model", _short(classifier["name"]), sha256))
    return named


def _times(manifest: PredictionManifest) -> list[tuple[str, str, str]]:
    taken = [
        (PREDICTION[name].label if name in PREDICTION else name, stage.seconds)
        for name, stage in manifest.stages.items()
    ]
    total = sum(seconds for _, seconds in taken)
    times = [(name, duration(seconds), _share(seconds, total)) for name, seconds in taken]
    return [*times, ("together", duration(total), "")] if taken else []


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


def _terms(facts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, _short(value)) for name, value in facts if value]


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


def _beside(layout: PredictionLayout, summary: Summary) -> list[tuple[str, str]]:
    files = [
        (layout.contigs, "the viral ones alone" if summary.has_only_viral else "every sequence"),
        (layout.viral_fasta, "those called viral"),
        (layout.genes, "genes"),
        (layout.gene_proteins, "their proteins"),
        (layout.tracks, "scores along long contigs"),
        (layout.viral_regions, "viral regions"),
        (layout.prediction_results, "every reading frame"),
        (layout.highest_score, "every chunk"),
        (layout.failed_sequences, "what has no score"),
        (layout.manifest, "the run"),
    ]
    return [(path.name, what) for path, what in files if path.exists()]
