"""``verify`` of an identification: files by sha256, a line a contig, a line a scored frame, and both embedding runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.pipeline.training_verification import verify_training
from virnucpro.pipeline.verification import AGAIN, Verification, check_index, verify_run
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.store.prediction_manifest import COUNTED, PredictionManifest, is_prediction
from virnucpro.store.training_manifest import is_training

if TYPE_CHECKING:
    from pathlib import Path


def verify_folder(output_dir: Path) -> Verification:
    """
    Check a finished run of whatever kind.

    Args:
        output_dir: The run's folder.

    Returns:
        What was found; nothing is changed.

    Raises:
        ResultError: The folder holds no run.
    """
    layout = PredictionLayout(output_dir)
    if output_dir.is_dir() and not layout.manifest.exists():
        raise ResultError(output_dir, "holds no run: give the output folder of a run")
    if layout.manifest.exists() and is_training(layout.manifest):
        return verify_training(output_dir)
    if not layout.manifest.exists() or not is_prediction(layout.manifest):
        return verify_run(output_dir)
    manifest = PredictionManifest.read(layout.manifest)
    counts = {name: manifest.counts.get(name, 0) for name in ("contigs", "skipped", "frames", "scored_frames")}
    records = counts["contigs"] + counts["skipped"]
    if manifest.state not in {"complete", "partial"}:
        problem = f"{layout.manifest}: the run is {manifest.state}: start the same command again to finish it"
        return Verification(manifest.state, records, 0, counts["skipped"], [problem])
    problems = _check_files(layout, manifest)
    if not problems:
        problems = _check_counts(layout, manifest)
    for folder in (layout.dna_dir, layout.protein_dir):
        if folder.is_dir():  # else somebody needed the space: the scores do not depend on it
            remedy = f"scores were made before; remove {folder} if nobody needs the embeddings"
            problems += [f"{problem} ({remedy})" for problem in verify_run(folder, remedy="").problems]
    scored = f"{counts['scored_frames']:,} of {counts['frames']:,} open frames scored"
    return Verification(
        manifest.state, records, counts["contigs"], counts["skipped"], problems, what=f"{manifest.sequences}, {scored}"
    )


def _check_files(layout: PredictionLayout, manifest: PredictionManifest) -> list[str]:
    expected = (layout.contigs, layout.prediction_results, layout.highest_score, layout.viral_fasta, layout.report)
    problems = [
        f"{layout.manifest}: has no sha256 of {path.name}: start the same command again"
        for path in expected
        if path.name not in manifest.files
    ]
    for name, recorded in manifest.files.items():
        path = layout.output_dir / name
        if not path.is_file():
            problems.append(f"{path}: is missing, or no regular file{AGAIN}")
        elif durable.sha256_of(path) != recorded:
            problems.append(f"{path}: damaged: its sha256 is not the one that run.json recorded")
    return problems


def _check_counts(layout: PredictionLayout, manifest: PredictionManifest) -> list[str]:
    """Count again what the tables hold, and compare it with what ``run.json`` says, and that with the index."""
    counts = manifest.counts
    found: Counter[str] = Counter()
    try:
        for one in read_contig_calls(layout.contigs):
            if one.length is None:  # a record that was left out
                found["skipped"] += 1
                continue
            found.update({name: getattr(one, name) for name in ("chunks", "open_chunks", "frames")})
            found.update(["contigs", one.call.replace(" ", "_")])
            found["by_sequence"] += one.score is not None and not one.frames
    except ResultError as error:
        return [str(error)]
    with layout.prediction_results.open("rb") as file:
        found["scored_frames"] = sum(1 for _ in file) - 1
    found["missing_frames"] = found["frames"] - found["scored_frames"]
    calls = [call.replace(" ", "_") for call in Call]
    counted = [*COUNTED, *calls, *(name for name in ("open_chunks", "by_sequence") if name in counts)]
    problems = [
        f"{layout.manifest}: says {counts.get(name, 0):,} {name.replace('_', ' ')}, the tables have {found[name]:,}"
        for name in counted
        if found[name] != counts.get(name, 0)
    ]
    num_records = counts["contigs"] + counts["skipped"]
    return problems + check_index(layout.contig_index, manifest.inputs, num_records=num_records, remedy=AGAIN)
