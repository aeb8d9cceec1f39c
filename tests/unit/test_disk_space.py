"""What a run needs of its disk is known before it begins, less what it has already."""

from __future__ import annotations

import os

import pytest

from tests.strategies import MadeRun
from virnucpro.choices import ResultForm
from virnucpro.errors import DiskSpaceError
from virnucpro.pipeline.run import run as run_folder
from virnucpro.store import schema

WIDTH = 1000


@pytest.fixture
def run(tmp_path):
    made = MadeRun(tmp_path, [(f"s{n}", "MKV" * (n % 7 + 1) + "ACDEF"[: n % 5]) for n in range(60)])
    made.layout.parts_dir.mkdir(parents=True)
    return made


def needed_bytes(run, monkeypatch):
    """What a disk without any room says that is needed."""
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((1, 1, 0, 0, 0, 0, 0, 0, 0, 0)))
    with pytest.raises(DiskSpaceError) as caught:
        run_folder.take_space(run.layout, run.index, hidden_dim=WIDTH, result_form=ResultForm.SINGLE)
    assert not run.layout.reservation.exists()
    monkeypatch.undo()
    return caught.value.needed_bytes


def test_the_need_is_parts_and_shards_of_what_is_computed_and_a_result_of_every_record(run, monkeypatch):
    num_unique = len(run.plan.positions)
    assert num_unique < len(run.index)
    rows_bytes = (2 * num_unique + len(run.index)) * WIDTH * 4
    assert rows_bytes < needed_bytes(run, monkeypatch) - run_folder.MANIFEST_BYTES < rows_bytes * 1.1 + 3 * 2**16


def test_what_is_on_disk_already_is_not_needed_again(run, monkeypatch):
    before = needed_bytes(run, monkeypatch)
    part = run.write_part([0, 1, 2])
    assert before - needed_bytes(run, monkeypatch) == part.stat().st_size


def test_the_reservation_takes_the_results_space_and_gives_way_piece_by_piece(run):
    run_folder.take_space(run.layout, run.index, hidden_dim=WIDTH, result_form=ResultForm.SINGLE)
    result_bytes = schema.bytes_at_most(len(run.index), WIDTH, id_bytes=run.index.id_bytes)
    taken = run.layout.reservation.stat()
    assert taken.st_size == result_bytes + run_folder.MANIFEST_BYTES
    assert taken.st_blocks * 512 >= taken.st_size
    run_folder.give_way_to_result(run.layout, 1000)
    assert run.layout.reservation.stat().st_size == taken.st_size - 1000
    run_folder.give_way_to_result(run.layout, result_bytes)
    assert run.layout.reservation.stat().st_size == run_folder.MANIFEST_BYTES
    run_folder.release_space(run.layout)
    run_folder.release_space(run.layout)
    run_folder.give_way_to_result(run.layout, result_bytes)
    assert not run.layout.reservation.exists()


def test_a_reservation_of_a_killed_run_is_not_counted_as_taken(run):
    run.layout.reservation.write_bytes(bytes(100))
    run_folder.take_space(run.layout, run.index, hidden_dim=WIDTH, result_form=ResultForm.SINGLE)
    assert run.layout.reservation.stat().st_size > 100
