"""Every record comes out exactly once with its own row: the real worker loop over random input, settings and ranks."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import MadeRun, fasta_records
from virnucpro.data.packing import resolve_token_budget
from virnucpro.pipeline.devices import VISIBLE_VARIABLE
from virnucpro.pipeline.gpu_worker import gpu_worker
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.store.parts import part_paths
from virnucpro.store.reader import Embeddings
from virnucpro.telemetry.worker_logging import HANDLER_NAME


class Reports(list):
    """A ``results_queue`` in the same process."""

    put = list.append


@pytest.fixture(autouse=True)
def worker_surroundings(monkeypatch):
    """Workers in this process: they see no GPU, and what they do to logging is undone."""
    monkeypatch.setenv(VISIBLE_VARIABLE, "")
    root = logging.getLogger()
    level, showwarning = root.level, warnings.showwarning
    yield
    for handler in [item for item in root.handlers if item.get_name() == HANDLER_NAME]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    warnings.showwarning = showwarning


def work(run, config, rank, world_size):
    """Run one rank to its end, outside the main thread, where no signal handler is set."""
    reports = Reports()
    arguments = (rank, world_size, reports, str(run.layout.index), str(run.layout.output_dir), config)
    thread = threading.Thread(target=gpu_worker, args=arguments)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return reports


def said(reports, kind):
    """The one message of this kind."""
    (message,) = [report for report in reports if report.get("kind") == kind]
    return message


def aggregate(run):
    return aggregate_shards(
        run.layout, run.index, run.plan, max_residues=run.config.max_residues, hidden_dim=run.config.hidden_dim
    )


def check_all_there(run):
    result = aggregate(run)
    assert result.is_complete
    validate_result(run.layout.embeddings, run.index, expected_rows=len(run.records), expected_files=result.files)
    with Embeddings(run.layout.embeddings) as found:
        assert list(found.ids) == [name for name, _ in run.records]
        for name, _ in run.records:
            assert found[name].tobytes() == run.vector(name).tobytes(), name
    return result.files


@st.composite
def worker_settings(draw, records):
    max_residues = draw(st.integers(1, 40))
    longest = max(len(sequence) for _, sequence in records)
    requested = draw(st.integers(1, 120))
    budget = max(requested, min(longest, max_residues) + 2)
    return {
        "token_budget": budget,
        "max_residues": max_residues,
        "sequences_per_part": draw(st.integers(1, 8)),
    }


@given(records=fasta_records(), data=st.data())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_id_comes_out_exactly_once_with_the_row_of_its_sequence(tmp_path_factory, records, data):
    run = MadeRun(tmp_path_factory.mktemp("run"), records, **data.draw(worker_settings(records)))
    world_size = data.draw(st.integers(1, 4) | st.just(len(records) + 2))
    assert resolve_token_budget(1, run.index.lengths, max_residues=run.config.max_residues) <= run.config.token_budget
    computed = 0
    for rank in data.draw(st.permutations(range(world_size))):
        *telemetry, report = work(run, run.config, rank, world_size)
        mine = sum(len(run.plan.block_positions(block)) for block in run.plan.rank_blocks(rank, world_size))
        assert report == {
            "rank": rank,
            "status": "complete",
            "shard_path": str(run.layout.shard(rank)),
            "num_sequences": mine,
        }
        assert all("kind" in message for message in telemetry)
        computed += max([m["sequences"] for m in telemetry if m["kind"] == "progress"], default=0)
    assert computed == len(run.plan.positions), "each distinct sequence is computed once"
    assert part_paths(run.layout.parts_dir) == []
    check_all_there(run)


@given(records=fasta_records(), data=st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_continued_on_other_ranks_computes_only_what_is_missing_and_gives_the_same_bytes(
    tmp_path_factory, records, data
):
    chosen = data.draw(worker_settings(records))
    folder = tmp_path_factory.mktemp("runs")
    (folder / "a").mkdir()
    reference = MadeRun(folder / "a", records, **chosen)
    work(reference, reference.config, 0, 1)
    sha256 = check_all_there(reference)

    # the same input by name: where a file lies is part of the input's identity, not of the result
    (folder / "b").mkdir()
    run = MadeRun(folder / "b", records, **chosen)
    done = set()
    for world_size in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        for rank in data.draw(st.sets(st.integers(0, world_size - 1))):
            resumed = said(work(run, run.config, rank, world_size), "resumed")
            mine = set(run.plan.rank_blocks(rank, world_size))
            assert resumed["sequences"] == sum(len(run.plan.block_positions(block)) for block in mine & done)
            done |= mine
    for rank in range(2):
        work(run, run.config, rank, 2)
    assert check_all_there(run) == sha256


def test_a_worker_that_was_cut_off_leaves_parts_that_the_next_one_takes_up(tmp_path):
    records = [(f"s{n}", "ACDEFGHIKL"[n % 10 :] + "M" * n) for n in range(30)]
    run = MadeRun(tmp_path, records, sequences_per_part=2)
    kept = [0, 1, 4]
    for block in kept:
        run.write_part([block])
    reports = work(run, run.config, 0, 1)
    report = reports[-1]
    assert said(reports, "resumed")["sequences"] == sum(len(run.plan.block_positions(block)) for block in kept)
    assert report["status"] == "complete"
    check_all_there(run)
