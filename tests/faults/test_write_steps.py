"""Row 2: the process is killed at steps of writing: the final name is absent or whole, and the next start finishes."""

from __future__ import annotations

import pytest

from tests.faults.write_faults import Trial, kill_at_steps


@pytest.fixture
def trial(tmp_path):
    return Trial(tmp_path)


def test_a_kill_at_the_middle_step_of_each_name_costs_nothing(trial):
    tries, violations = kill_at_steps(trial, lambda count: [(count + 1) // 2])
    assert violations == []
    assert tries == len(set(trial.steps)) > 12


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_kill_at_every_step_costs_nothing(trial, soak_table):
    tries, violations = kill_at_steps(trial, lambda count: range(1, count + 1))
    soak_table("killed at every step of writing", tries=tries, differing=len(violations))
    assert violations == []
    assert tries == len(trial.steps)
