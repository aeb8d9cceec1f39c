"""``verify``: is what lies in a run's folder still what the run wrote, and does it add up to its input?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.data.index.file import content_is_intact
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import IndexFormatError, ResultError
from virnucpro.pipeline.result.validation import validate_result
from virnucpro.pipeline.run_preparation import read_manifest_or_fail
from virnucpro.run_layout import RunLayout
from virnucpro.store.results.forms import result_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.store.manifest import RunManifest

AGAIN = ": start the same command again"
"""What makes the damaged index of a whole run again."""


@dataclass(frozen=True)
class Verification:
    """What was checked and what was found."""

    state: str
    """Of the run, as its manifest has it."""
    num_records: int
    """Records of the input."""
    num_rows: int
    """Rows of the result."""
    num_skipped: int
    """Records that break a rule and were left out, as was asked for."""
    problems: list[str] = field(default_factory=list)
    """Everything that does not hold; empty for an intact run."""
    what: str = "sequences"
    """What the records are."""


def verify_run(output_dir: Path, *, remedy: str = AGAIN) -> Verification:
    """
    Check a finished run: whole files by sha256, then rows (shape, ids, order, finiteness), then the counts.

    Args:
        output_dir: The run's folder.
        remedy: What makes a damaged index again; a part of another run has nothing that does.

    Returns:
        What was found; nothing is changed.

    Raises:
        ResultError: The folder holds no run.
    """
    layout = RunLayout(output_dir)
    manifest = read_manifest_or_fail(layout)
    records, rows, missing, skipped = (
        manifest.counts.get(name, 0) for name in ("records", "rows", "missing", "skipped")
    )
    problems: list[str] = []
    if manifest.state not in {"complete", "partial"}:
        problems.append(f"{layout.manifest}: the run is {manifest.state}: start the same command again to finish it")
        return Verification(manifest.state, records, rows, skipped, problems)
    for name, recorded in manifest.files.items():
        path = layout.output_dir / name
        if not path.is_file():
            problems.append(f"{path}: is missing, or no regular file")
        elif durable.sha256_of(path) != recorded:
            problems.append(f"{path}: damaged: its sha256 is not the one that run.json recorded")
    if rows + missing + skipped != records:
        problems.append(
            f"{layout.manifest}: {rows} rows, {missing} missing and {skipped} left out of {records} records"
        )
    if not problems:  # HDF5 may never come back from a damaged file
        problems.extend(_check_rows(layout, manifest, rows, remedy))
    return Verification(manifest.state, records, rows, skipped, problems)


def _check_rows(layout: RunLayout, manifest: RunManifest, rows: int, remedy: str) -> list[str]:
    result = result_of(layout, manifest.result_form, is_partial=manifest.state != "complete")
    for name in map(result.name_of, {result.proof, *result.files()}):
        if name not in manifest.files:
            return [f"{layout.manifest}: has no sha256 of {name}: use --restart to compute it again"]
    problems = check_index(layout.index, manifest.inputs, num_records=manifest.counts.get("records", 0), remedy=remedy)
    if problems:
        return problems
    try:
        validate_result(result.path, SequenceIndex.open(layout.index), expected_rows=rows, expected_files=None)
    except (IndexFormatError, ResultError) as error:
        return [str(error)]
    return []


def check_index(path: Path, inputs: Sequence[Mapping[str, Any]], *, num_records: int, remedy: str) -> list[str]:
    """
    Return what is wrong with the index of a finished run.

    Args:
        path: The index.
        inputs: Of the run's manifest.
        num_records: Records of the input, as the manifest has them.
        remedy: What makes a damaged index again, behind what is said of it.
    """
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
