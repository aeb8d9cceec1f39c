"""
What happens after the workers: aggregate, list what is missing, prove the result, close the manifest, tidy up.

The outcome of a run follows from missing rows, not from failed ranks.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from virnucpro import durable, run_folders
from virnucpro.data.reading.fasta_scan import COUNTED, OF_FILES
from virnucpro.errors import OutputError, ResultError
from virnucpro.pipeline.run.run import release_space, remove_unpacked
from virnucpro.pipeline.run.run_result import RunResult, first_refused_write
from virnucpro.pipeline.shard_aggregator import Aggregation, aggregate_shards, validate_result, write_failed_sequences
from virnucpro.store.manifest import RunManifest
from virnucpro.store.parts import part_paths
from virnucpro.store.results.forms import remove_results, result_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.hosts.result_passes import ResultPasses
    from virnucpro.pipeline.run.run_preparation import PreparedRun
    from virnucpro.run_layout import RunLayout
    from virnucpro.telemetry.ranks import Rank


class Reasons(Protocol):
    def why_missing(self, position: int, block: int, outcomes: Sequence[Rank], /) -> tuple[str, int]:
        """Return the failure class, and how many processes tried."""
        ...

    def quarantined(self) -> Mapping[int, tuple[str, int]]:
        """Return failure class and attempts of each sequence that is not computed, by index position."""
        ...


def aggregate_run(
    run: PreparedRun, outcomes: Sequence[Rank], reasons: Reasons, *, hosts: ResultPasses | None = None
) -> Aggregation:
    """Write the result and the list of what is missing; *hosts*, where there are others, take part."""
    index = run.open_index()
    plan = run.plan(index)
    config = run.model_config
    try:
        result = aggregate_shards(
            run.layout,
            index,
            plan,
            max_residues=config.most_kept_residues,
            hidden_dim=config.hidden_dim,
            result_form=run.result_form,
            hosts=hosts,
        )
        write_failed_sequences(
            run.layout,
            index,
            result.missing_positions,
            lambda position: reasons.why_missing(position, plan.block_of(position), outcomes),
        )
    except OutputError as error:  # what a worker could not write tells more
        raise first_refused_write(outcomes) or error from None
    return result


def validate_run(run: PreparedRun, aggregation: Aggregation, *, hosts: ResultPasses | None = None) -> None:
    """Raise ``ResultError`` unless rows and listed failures add up to the input, and the result is whole."""
    index = run.open_index()
    if aggregation.output_path is not None:
        validate_result(
            aggregation.output_path,
            index,
            expected_rows=aggregation.num_rows,
            expected_files=aggregation.files,
            hosts=hosts,
        )
    _check_failed_list(run.layout, index, expected=aggregation.num_missing + index.num_skipped)


def close_run(
    run: PreparedRun,
    outcomes: Sequence[Rank],
    aggregation: Aggregation,
    *,
    stages_s: dict[str, float],
    keep_shards: bool = False,
) -> RunResult:
    """Write the outcome into the manifest; when the run is complete, remove what only served to resume it."""
    layout = run.layout
    index = run.open_index()
    copies = len(index) - len(run.plan(index).positions)
    state = "complete" if aggregation.is_complete else "partial" if aggregation.output_path else "failed"
    is_windowed = run.model_config.in_windows & (index.lengths[:] > run.model_config.max_residues)
    noticed = {**index.counts, "windowed": int(is_windowed.sum())}
    result = RunResult(
        output_dir=layout.output_dir,
        output_path=aggregation.output_path,
        state=state,
        num_records=index.num_records,
        num_rows=aggregation.num_rows,
        num_copies=copies,
        num_truncated=aggregation.num_truncated,
        num_resplit_blocks=aggregation.num_resplit_blocks,
        num_cached_blocks=aggregation.num_cached_blocks,
        num_widened_blocks=aggregation.num_widened_blocks,
        processors=aggregation.processors,
        ranks=tuple(outcomes),
        stages_s=stages_s,
        noticed=noticed,
    )
    manifest = RunManifest.read(layout.manifest)
    manifest.end(state)
    manifest.stages_s = {name: round(seconds, 3) for name, seconds in stages_s.items()}
    manifest.ranks = [outcome.to_json() for outcome in outcomes]
    manifest.counts = {
        "records": index.num_records,
        "rows": aggregation.num_rows,
        "missing": aggregation.num_missing,
        "copies": copies,
        **noticed,
        "truncated": aggregation.num_truncated,
        "resplit_blocks": aggregation.num_resplit_blocks,
        "cached_blocks": aggregation.num_cached_blocks,
        "widened_blocks": aggregation.num_widened_blocks,
    }
    manifest.processors = aggregation.processors
    manifest.promise = result.promise if aggregation.output_path is not None else None
    manifest.files = dict(aggregation.files)
    if layout.failed_sequences.exists():
        manifest.files[layout.failed_sequences.name] = durable.sha256_of(layout.failed_sequences)
    release_space(layout)
    manifest.write(layout.manifest)
    if state == "complete":
        _remove_what_resumes(layout, keep_shards=keep_shards)
    return result


def stop_run(run: PreparedRun, outcomes: Sequence[Rank], *, stages_s: dict[str, float]) -> RunResult:
    """Note in the manifest that the run was stopped; parts and shards stay for the next start, nothing is merged."""
    manifest = RunManifest.read(run.layout.manifest)
    manifest.end("stopped")
    manifest.ranks = [outcome.to_json() for outcome in outcomes]
    release_space(run.layout)
    manifest.write(run.layout.manifest)
    rows = sum(outcome.sequences + outcome.sequences_resumed + outcome.sequences_cached for outcome in outcomes)
    return RunResult(
        output_dir=run.output_dir,
        output_path=None,
        state="stopped",
        num_records=manifest.counts["records"],
        num_rows=rows,
        ranks=tuple(outcomes),
        stages_s=stages_s,
        noticed={"skipped": manifest.counts.get("skipped", 0)},
    )


def finished_result(run: PreparedRun, *, keep_shards: bool = False) -> RunResult:
    """Return the result of a run that the folder already holds complete; tidies up if that run was killed there."""
    manifest = RunManifest.read(run.layout.manifest)
    counts = manifest.counts
    _restore_failed_list(run, manifest)
    _remove_what_resumes(run.layout, keep_shards=keep_shards)
    return RunResult(
        output_dir=run.output_dir,
        output_path=result_of(run.layout, run.result_form, is_partial=False).path,
        state="complete",
        num_records=counts["records"],
        num_rows=counts["rows"],
        num_copies=counts["copies"],
        num_truncated=counts["truncated"],
        num_resplit_blocks=counts.get("resplit_blocks", 0),  # older folders have no such count
        num_cached_blocks=counts.get("cached_blocks", 0),
        num_widened_blocks=counts.get("widened_blocks", 0),
        processors=manifest.processors,
        ranks=(),
        stages_s={},
        noticed={name: counts.get(name, 0) for name in (*COUNTED, *OF_FILES, "skipped", "windowed")},
    )


def _restore_failed_list(run: PreparedRun, manifest: RunManifest) -> None:
    """Write the list of skipped records again where it is missing or damaged."""
    path = run.layout.failed_sequences
    recorded = manifest.files.get(path.name)
    if recorded is not None and not (path.is_file() and durable.sha256_of(path) == recorded):
        write_failed_sequences(run.layout, run.open_index(), np.empty(0, np.int64), lambda _: ("", 0))


def _remove_what_resumes(layout: RunLayout, *, keep_shards: bool) -> None:
    """Remove what a complete run no longer needs; what cannot be removed is left for the next start."""
    durable.remove_tree(layout.shared_rows_dir)
    remove_unpacked(layout)
    with suppress(OutputError):
        remove_results(layout, is_partial=True)
    for path in [*part_paths(layout.parts_dir), *([] if keep_shards else layout.shards())]:
        with suppress(OutputError):
            durable.remove(path)
    durable.remove_strays(layout.parts_dir)
    durable.remove_empty(layout.parts_dir)


def _check_failed_list(layout: RunLayout, index: SequenceIndex, *, expected: int) -> None:
    path = layout.failed_sequences
    listed = 0
    if path.exists():
        with open(path, encoding="utf-8", newline="\n", opener=run_folders.only_regular) as file:
            listed = sum(1 for _ in file) - 1
    if listed != expected:
        raise ResultError(path, f"lists {listed} records, but {expected} of {index.num_records} have no row")
