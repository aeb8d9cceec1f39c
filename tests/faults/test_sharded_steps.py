"""Rows 2 and 3 for a result in shards: killed or refused at steps of writing, and what the next start makes of it."""

from __future__ import annotations

import signal

import pytest

from tests.faults.forked import left_over, state_of
from tests.faults.write_faults import ShardedTrial, fail_each_step, kill_at_steps
from virnucpro.errors import ResultError
from virnucpro.store.reader import read_embeddings
from virnucpro.store.results import hdf5


@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 4)
    return ShardedTrial(tmp_path)


def test_a_run_that_is_killed_while_it_writes_shards_is_finished_by_the_next_start(trial):
    assert len(trial.expected) == 5
    renames = trial.steps.count("MainProcess/file.rename")
    found = {}
    for number in range(1, renames + 1):
        out = trial.folder / f"killed_{number}"
        ended = trial.run(out, f"MainProcess/file.rename:{number}:kill")
        assert ended.code == -signal.SIGKILL, ended.errors
        sharded = out / "embeddings"
        found[number] = len(list(sharded.glob("shard-*.h5")))
        if sharded.exists() and not (sharded / "ids.index").exists():
            with pytest.raises(ResultError, match=r"ids\.index: is missing|embeddings\.h5: is missing"):
                read_embeddings(out)
        again = trial.run(out)
        assert again.code == 0, again.errors
        assert trial.is_whole(out)
        assert left_over(out) == []
    assert set(found.values()) == {0, 1, 2, 3, 4}, "some were killed between each two shards"


def test_a_kill_at_the_middle_step_of_each_name_costs_nothing(trial):
    tries, violations = kill_at_steps(trial, lambda count: [(count + 1) // 2])
    assert violations == []
    assert tries == len(set(trial.steps)) > 12


def test_a_write_that_fails_ends_the_run_with_73_and_the_next_start_finishes_it(trial):
    tries, violations = fail_each_step(trial, "EIO", step=23, lasting=True)
    assert violations == []
    assert tries >= 5


def test_shards_of_a_run_that_could_not_finish_them_do_not_stay(trial):
    out = trial.folder / "full"
    last = trial.steps.count("MainProcess/file.reserve")  # of the last shard
    ended = trial.run(out, f"MainProcess/file.reserve:{last}:ENOSPC")
    assert (ended.code, state_of(out)) == (73, "failed"), ended.errors
    assert not (out / "embeddings").exists()
    assert trial.run(out).code == 0
    assert trial.is_whole(out)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kill_at_every_step_costs_nothing(trial, soak_table):
    tries, violations = kill_at_steps(trial, lambda count: range(1, count + 1))
    soak_table("killed at every step of writing a sharded result", tries=tries, differing=len(violations))
    assert violations == []
    assert tries == len(trial.steps)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("action", "lasting"), [("ENOSPC", False), ("EIO", True)])
def test_every_write_that_fails_ends_the_run_with_73(trial, action, lasting, soak_table):
    tries, violations = fail_each_step(trial, action, lasting=lasting)
    soak_table("ENOSPC or EIO at each write of a sharded result", tries=tries, differing=len(violations))
    assert violations == []
    assert tries == len(trial.steps)
