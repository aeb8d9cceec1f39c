"""Kills and refused writes at the steps of a prediction: no half table, and the next start gives the same."""

from __future__ import annotations

import pytest

from tests.faults.write_faults import PredictionTrial, fail_each_step, kill_at_steps


@pytest.fixture
def trial(tmp_path):
    return PredictionTrial(tmp_path)


def test_a_kill_at_the_last_step_of_each_name_gives_the_same_tables(trial):
    trial.steps = [step for step in trial.steps if step.startswith("MainProcess/")]
    tries, violations = kill_at_steps(trial, lambda count: [count])
    assert violations == []
    assert tries == len(set(trial.steps)) > 6


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kill_at_every_step_gives_the_same_tables(trial, soak_table):
    tries, violations = kill_at_steps(trial, lambda count: range(1, count + 1))
    soak_table("prediction killed at every step of writing", tries=tries, differing=len(violations))
    assert violations == []
    assert tries == len(trial.steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_full_disk_at_some_steps_ends_in_a_sentence_and_the_next_start_finishes(trial):
    tries, violations = fail_each_step(trial, "ENOSPC", step=40)
    assert violations == []
    assert tries > 4
