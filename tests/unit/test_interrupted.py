"""What a killed run leaves says afterwards what is true; a run that goes on, and what resumes, are left alone."""

from __future__ import annotations

import json

import pytest

from tests.unit.test_status_command import killed_holder, manifest
from virnucpro.errors import ResultError
from virnucpro.pipeline.run.interruption import mark_interrupted
from virnucpro.pipeline.run.run_status import status_of
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import RunManifest


@pytest.fixture
def layout(tmp_path):
    made = RunLayout(tmp_path / "out")
    made.parts_dir.mkdir(parents=True)
    (made.parts_dir / "part_000000000_abc.h5").write_bytes(b"finished rows")
    made.live_status.write_text("{}")
    made.reservation.write_bytes(b"")
    manifest("running", ranks=[{"rank": 0, "state": "running"}, {"rank": 1, "state": "complete"}]).write(made.manifest)
    return made


def test_a_killed_run_has_stopped_and_keeps_what_it_resumes_from(layout):
    killed_holder(layout.lock)
    assert status_of(layout.output_dir).state == "interrupted"
    found = mark_interrupted(layout.output_dir)
    said = RunManifest.read(layout.manifest)
    assert found.state == said.state == status_of(layout.output_dir).state == "stopped"
    assert [rank["state"] for rank in said.ranks] == ["stopped", "complete"]
    assert said.finished is not None
    assert json.loads(layout.lock.read_bytes()).keys() == {"mark"}
    left = {path.name for path in layout.work_dir.rglob("*") if path.is_file()}
    assert left == {"part_000000000_abc.h5"}


def test_a_run_that_goes_on_is_left_alone(layout):
    with RunLock(layout.lock, run_id="abc"):
        before = layout.lock.read_bytes()
        assert mark_interrupted(layout.output_dir).state == "running"
        assert layout.lock.read_bytes() == before
    assert RunManifest.read(layout.manifest).state == "running"
    assert layout.live_status.exists()


def test_of_a_run_on_another_host_nothing_is_claimed(layout):
    elsewhere = {"host": "node18", "pid": 1, "run_id": "abc", "since": "2026-11-21T10:00:00+00:00"}
    layout.lock.write_text(json.dumps(elsewhere))
    assert mark_interrupted(layout.output_dir).state == "silent"
    assert json.loads(layout.lock.read_text()) == elsewhere
    assert RunManifest.read(layout.manifest).state == "running"


@pytest.mark.parametrize("state", ["complete", "partial", "failed", "stopped"])
def test_a_run_that_has_said_how_it_ended_is_not_touched(layout, state):
    layout.live_status.unlink()
    manifest(state).write(layout.manifest)
    layout.lock.touch()
    before = layout.manifest.stat().st_ino, layout.manifest.read_bytes()
    assert mark_interrupted(layout.output_dir).state == state
    assert (layout.manifest.stat().st_ino, layout.manifest.read_bytes()) == before


def test_the_embedding_runs_of_a_prediction_are_settled_with_it(layout, tmp_path):
    killed_holder(layout.lock)
    parts = PredictionLayout(tmp_path)
    layout.output_dir.rename(parts.dna_dir)
    killed_holder(parts.lock)
    parts.work_dir.mkdir()
    mark_interrupted(tmp_path)
    assert RunManifest.read(RunLayout(parts.dna_dir).manifest).state == "stopped"


def test_a_folder_without_a_run_is_said_to_be_one_and_stays_as_it_is(tmp_path):
    with pytest.raises(ResultError, match="holds no run"):
        mark_interrupted(tmp_path)
    assert list(tmp_path.iterdir()) == []
