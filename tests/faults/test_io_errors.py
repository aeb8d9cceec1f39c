"""Row 3: each step of writing fails in turn, with each error of a disk that takes no more; once, or from then on."""

from __future__ import annotations

import pytest

from tests.faults.write_faults import Trial, fail_each_step


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path)


def test_a_write_that_fails_ends_the_run_with_73_and_the_next_start_finishes_it(trial):
    tries, violations = fail_each_step(trial, "ENOSPC", step=17, lasting=False)
    assert violations == []
    assert tries >= 5


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("action", ["ENOSPC", "EIO", "EDQUOT"])
def test_every_write_that_fails_ends_the_run_with_73_and_the_next_start_finishes_it(trial, action, lasting, soak_table):
    tries, violations = fail_each_step(trial, action, lasting=lasting)
    soak_table("ENOSPC, EIO or EDQUOT at each write, fsync, rename", tries=tries, differing=len(violations))
    assert violations == []
    assert tries == len(trial.steps)
