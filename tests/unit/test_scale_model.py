"""The model of scale adds up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import scale_model, scale_page
from benchmarks.scale_model import GPUS, SEQUENCES, SERIAL, Assumptions, Rates, Run
from virnucpro.choices import AUTO_SHARDED_BYTES, AUTO_SHARDED_ROWS
from virnucpro.config import ModelConfig
from virnucpro.pipeline.hosts import host_check
from virnucpro.pipeline.work import units
from virnucpro.pipeline.work.units import UnitBook
from virnucpro.store.results import hdf5
from virnucpro.store.results.hdf5 import most_rows_of_shard, shard_bounds
from virnucpro.store.results.id_index import write_id_index

RATES = Rates.of(scale_model.latest())
RUNS = [Run(count, gpus, RATES) for count in SEQUENCES for gpus in GPUS]


def test_a_page_without_a_mark_is_refused():
    with pytest.raises(ValueError, match="assumed"):
        scale_page.filled("<!-- scale: measured -->\n<!-- end -->\n", {"measured": "a", "assumed": "b"})


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.sequences}-on-{run.gpus}")
def test_the_stages_are_the_whole_time_and_the_gpus_compute_in_one_of_them(run):
    stages = run.stages_s()
    assert all(seconds > 0 for seconds in stages.values())
    assert run.total_s() == pytest.approx(sum(stages.values()))
    assert stages["embed"] >= run.computing_s
    assert 0 < run.efficiency() < 1
    assert stages[run.longest()] == max(stages.values())


@pytest.mark.parametrize("count", SEQUENCES)
def test_more_gpus_compute_faster_and_less_of_the_time_and_the_driver_takes_no_less(count):
    runs = [Run(count, gpus, RATES) for gpus in GPUS]
    for fewer, more in pairwise(runs):
        assert more.computing_s < fewer.computing_s
        assert more.efficiency() < fewer.efficiency()
        assert fewer.alone_s() <= more.alone_s() < more.total_s()
        for stage in SERIAL:
            assert more.stages_s()[stage] == fewer.stages_s()[stage]


@pytest.mark.parametrize("gpus", GPUS)
def test_more_sequences_take_longer_in_every_stage_and_more_of_everything(gpus):
    runs = [Run(count, gpus, RATES) for count in SEQUENCES]
    for fewer, more in pairwise(runs):
        assert all(more.stages_s()[stage] > seconds for stage, seconds in fewer.stages_s().items())
        assert all(more.memory_bytes()[what] > size for what, size in fewer.memory_bytes().items())
        assert more.asked_bytes() > fewer.asked_bytes()
        assert more.parts > fewer.parts


@pytest.mark.parametrize("count", SEQUENCES)
def test_a_faster_gpu_makes_a_run_faster(count):
    for gpus in GPUS:
        faster = replace(Assumptions(), gpu_tokens_per_second=2 * Assumptions().gpu_tokens_per_second)
        assert Run(count, gpus, RATES, faster).total_s() < Run(count, gpus, RATES).total_s()


def test_rates_a_row_and_a_byte_are_those_that_both_measurements_have():
    def seconds(rows, size):
        return 3e-6 * rows + 2e-9 * size, rows, size

    found = scale_model._per_row_and_byte(seconds(60_000, 6e8), seconds(10**6, 1.28e8))
    assert found == pytest.approx((3e-6, 2e-9))


def test_what_the_model_takes_from_the_program_is_still_so(tmp_path):
    assert ModelConfig.__dataclass_fields__["sequences_per_part"].default == scale_model.SEQUENCES_PER_PART
    assert units.UNITS_OF_A_SHARE == scale_model.UNITS_OF_A_SHARE
    assert units.MOST_UNITS_OF_A_SHARE == scale_model.MOST_UNITS_OF_A_SHARE
    assert host_check.HASHED_BYTES == scale_model.HASHED_BYTES
    assert (hdf5.SHARD_BYTES, hdf5.SHARD_ROWS) == (scale_model.SHARD_BYTES, scale_model.SHARD_ROWS)
    book = UnitBook(range(200_000), np.full(200_000, 65_536))
    assert sum(1 for _ in iter(lambda: book.next(100), None)) == pytest.approx(
        100 * scale_model.UNITS_PER_GPU, rel=0.05
    )
    run = Run(10**8, 1, RATES)
    assert run.result_files == 1 + len(shard_bounds(10**8, rows_per_shard=most_rows_of_shard(2560)))
    for count in (AUTO_SHARDED_ROWS - 1, AUTO_SHARDED_ROWS):
        row_numbers = 8
        small = Run(count, 1, RATES, replace(Assumptions(), row_numbers=row_numbers))
        assert small.is_sharded == (count >= AUTO_SHARDED_ROWS)
        assert small.rows_bytes < AUTO_SHARDED_BYTES
    hashes = np.arange(100_000, dtype=np.uint64) << np.uint64(40)
    write_id_index(tmp_path / "i", hashes, hidden_dim=8, rows_per_shard=10**6, shard_bytes=[1])
    beside = (tmp_path / "i").stat().st_size - 16 * 100_000
    assert 0 < beside - Run(100_000, 1, RATES).directory_bytes() < 200
