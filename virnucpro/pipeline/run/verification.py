"""
``verify``: is what is in a run's folder still what the run wrote, and does it add up to its input?

Every file of the result is compared by its sha256, whatever the kind of run. Then an embedding run's rows are checked
(shape, ids, order, finiteness); of a prediction the lines of its tables are counted, and its embedding runs checked.
Nothing is changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro import durable, run_folders
from virnucpro.choices import Keep
from virnucpro.data.index.file import content_is_intact
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import IndexFormatError, ResultError
from virnucpro.pipeline.shard_aggregator import validate_result
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.store.manifest import COUNTED, FINISHED, PredictionManifest, RunManifest, read_manifest
from virnucpro.store.results.forms import result_of
from virnucpro.this_host import processors_differ

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.store.manifest import AnyManifest, TrainingManifest

_OF_FRAMES = ("chunks", "embedded", "open_chunks", "frames")
"""Counts that a table has where frames were embedded."""
AGAIN = ": start the same command again"
"""What makes the damaged index of a whole run again."""


@dataclass(frozen=True)
class Verification:
    """What was checked and what was found."""

    state: str
    """Of the run, as its manifest has it."""
    num_records: int
    """Records of the input; of a training, files of the classifier."""
    num_rows: int
    """Rows of the result, contigs with a call, or intact files of the classifier."""
    num_skipped: int
    """Records that break a rule and were skipped."""
    problems: list[str] = field(default_factory=list)
    """Everything that does not hold; empty for an intact run."""
    what: str = "sequences"
    notes: list[str] = field(default_factory=list)
    """Why another run gives other bytes, a sentence each."""


def verify_run(output_dir: Path) -> Verification:
    """Check a finished run of any kind; ``ResultError`` where the folder holds no run."""
    if not output_dir.is_dir():
        raise ResultError(output_dir, "is not a folder: give the output folder of a run")
    layout = RunLayout(output_dir)
    if not layout.manifest.exists():
        raise ResultError(output_dir, "holds no run: give the output folder of a run")
    manifest = read_manifest(layout.manifest)
    if isinstance(manifest, RunManifest):
        return _verify_embedding(layout, manifest, remedy=AGAIN)
    if isinstance(manifest, PredictionManifest):
        return _verify_prediction(PredictionLayout(output_dir), manifest)
    return _verify_training(layout, manifest)


def _verify_embedding(layout: RunLayout, manifest: RunManifest, *, remedy: str) -> Verification:
    records, rows, missing, skipped = (
        manifest.counts.get(name, 0) for name in ("records", "rows", "missing", "skipped")
    )
    if problems := _unfinished(layout, manifest):
        return Verification(manifest.state, records, rows, skipped, problems)
    problems = _check_files(layout, manifest)
    if rows + missing + skipped != records:
        problems.append(f"{layout.manifest}: {rows} rows, {missing} missing and {skipped} skipped of {records} records")
    if not problems:  # HDF5 may never come back from a damaged file
        problems = _check_rows(layout, manifest, rows, remedy)
    others = [
        "blocks were computed in smaller batches or cached: another run gives the same numbers, not the same bytes"
    ]
    notes = processors_differ(manifest.processors) or others * (manifest.promise == "tolerance")
    return Verification(manifest.state, records, rows, skipped, problems, notes=notes)


def _verify_prediction(layout: PredictionLayout, manifest: PredictionManifest) -> Verification:
    contigs, skipped, frames, scored_frames = (
        manifest.counts.get(name, 0) for name in ("contigs", "skipped", "frames", "scored_frames")
    )
    if problems := _unfinished(layout, manifest):
        return Verification(manifest.state, contigs + skipped, 0, skipped, problems)
    results = [layout.contigs, layout.viral_fasta]
    if "genes" in manifest.counts:
        results += [layout.genes, layout.gene_proteins]
    if manifest.output_settings.get("keep") != Keep.TABLES:
        results.append(layout.report)
    if manifest.has_frames:
        results += [layout.prediction_results, layout.highest_score]
    problems = [
        f"{layout.manifest}: has no sha256 of {path.name}{AGAIN}" for path in results if path.name not in manifest.files
    ]
    problems += _check_files(layout, manifest, remedy=AGAIN)
    problems = problems or _check_counts(layout, manifest)
    for embedding in (RunLayout(layout.dna_dir), RunLayout(layout.protein_dir)):
        folder = embedding.output_dir
        if folder.is_dir():  # else it was removed for its space: the scores do not depend on it
            remedy = f"scores were made before; remove {folder} if the embeddings are not needed"
            found = _verify_embedding(embedding, RunManifest.read(embedding.manifest), remedy="")
            problems += [f"{problem} ({remedy})" for problem in found.problems]
    scored = f", {scored_frames:,} of {frames:,} open frames scored" if manifest.has_frames else ""
    what = f"{manifest.sequences}{scored}"
    notes = manifest.processors_differ()
    return Verification(manifest.state, contigs + skipped, contigs, skipped, problems, what=what, notes=notes)


def _verify_training(layout: RunLayout, manifest: TrainingManifest) -> Verification:
    num_files = len(manifest.files)
    if problems := _unfinished(layout, manifest):
        return Verification(manifest.state, num_files, 0, 0, problems)
    problems = _check_files(layout, manifest, remedy=": train again with --restart")
    intact = num_files - len(problems)
    return Verification(manifest.state, num_files, intact, 0, problems, what="files of the classifier")


def _unfinished(layout: RunLayout | PredictionLayout, manifest: AnyManifest) -> list[str]:
    if manifest.state in FINISHED:
        return []
    return [f"{layout.manifest}: the run is {manifest.state}{AGAIN} to finish it"]


def _check_files(layout: RunLayout | PredictionLayout, manifest: AnyManifest, *, remedy: str = "") -> list[str]:
    problems = []
    for name, recorded in manifest.files.items():
        path = layout.output_dir / name
        if not path.is_file():
            problems.append(f"{path}: is missing, or no regular file{remedy}")
        elif durable.sha256_of(path) != recorded:
            problems.append(f"{path}: damaged: its sha256 is not the one that run.json recorded{remedy}")
    return problems


def _check_rows(layout: RunLayout, manifest: RunManifest, rows: int, remedy: str) -> list[str]:
    result = result_of(layout, manifest.result_form, is_partial=manifest.state != "complete")
    for name in map(result.name_of, {result.proof, *result.files()}):
        if name not in manifest.files:
            return [f"{layout.manifest}: has no sha256 of {name}: use --restart to compute it again"]
    num_records = manifest.counts.get("records", 0)
    if problems := _check_index(layout.index, manifest.inputs, num_records=num_records, remedy=remedy):
        return problems
    try:
        validate_result(result.path, SequenceIndex.open(layout.index), expected_rows=rows, expected_files=None)
    except (IndexFormatError, ResultError) as error:
        return [str(error)]
    return []


def _check_index(path: Path, inputs: Sequence[Mapping[str, Any]], *, num_records: int, remedy: str) -> list[str]:
    """Return what is wrong with the index of a finished run; *remedy* makes a damaged one again."""
    if not content_is_intact(path):
        return [f"{path}: is missing or damaged{remedy}"]
    try:
        index = SequenceIndex.open(path)
    except IndexFormatError:
        return [f"{path}: damaged{remedy}"]
    if [file.sha256 for file in index.files] != [item["sha256"] for item in inputs]:
        return [f"{path}: is of another input than run.json has"]
    if index.num_records != num_records:
        return [f"{path}: has {index.num_records:,} records, run.json has {num_records:,}"]
    return []


def _check_counts(layout: PredictionLayout, manifest: PredictionManifest) -> list[str]:
    """Recount the tables, and compare the counts with ``run.json``, and these with the index."""
    counts = manifest.counts
    num_records = counts["contigs"] + counts["skipped"]
    if manifest.output_settings.get("only_viral"):
        problems = _check_only_viral(layout, manifest)
        return problems + _check_index(layout.contig_index, manifest.inputs, num_records=num_records, remedy=AGAIN)
    found: Counter[str] = Counter()
    try:
        for one in read_contig_calls(layout.contigs):
            if one.length is None:  # a skipped record
                found["skipped"] += 1
                continue
            found.update({name: getattr(one, name) or 0 for name in _OF_FRAMES})
            found.update(["contigs", one.call.replace(" ", "_")])
            found["by_sequence"] += one.score is not None and one.frames == 0
    except ResultError as error:
        return [str(error)]
    found["genes"] = _count_genes(layout) if "genes" in counts else 0
    if manifest.has_frames:
        with open(layout.prediction_results, "rb", opener=run_folders.only_regular) as file:
            found["scored_frames"] = sum(1 for _ in file) - 1
    found["missing_frames"] = found["frames"] - found["scored_frames"]
    calls = [call.replace(" ", "_") for call in Call]
    further = ("embedded", "open_chunks", "by_sequence", "genes")
    counted = [*COUNTED, *calls, *(name for name in further if name in counts)]
    if not manifest.has_frames:
        counted = [name for name in counted if name not in _OF_FRAMES]
    problems = _differences(layout, counts, found, counted)
    return problems + _check_index(layout.contig_index, manifest.inputs, num_records=num_records, remedy=AGAIN)


def _check_only_viral(layout: PredictionLayout, manifest: PredictionManifest) -> list[str]:
    """Count the tables of a run that lists viral contigs alone."""
    found: Counter[str] = Counter()
    try:
        found.update(one.call.replace(" ", "_") for one in read_contig_calls(layout.contigs))
    except ResultError as error:
        return [str(error)]
    expected = {"virus": manifest.counts["virus"]}
    if "genes" in manifest.counts:
        expected["genes"], found["genes"] = manifest.counts["genes"], _count_genes(layout)
    return _differences(layout, expected, found, sorted(expected.keys() | found.keys()))


def _count_genes(layout: PredictionLayout) -> int:
    with open(layout.gene_proteins, "rb", opener=run_folders.only_regular) as file:
        return sum(line.startswith(b">") for line in file)


def _differences(
    layout: PredictionLayout, expected: Mapping[str, int], found: Mapping[str, int], names: Sequence[str]
) -> list[str]:
    return [
        f"{layout.manifest}: says {expected.get(name, 0):,} {name.replace('_', ' ')}, the tables have {found[name]:,}"
        for name in names
        if found[name] != expected.get(name, 0)
    ]
