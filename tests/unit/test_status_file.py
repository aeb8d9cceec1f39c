"""How a run is, as a file: whole, checked when it is read, and out of the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.snapshots import rank_snapshot, run_snapshot
from virnucpro.errors import ResultError
from virnucpro.run_layout import RunLayout
from virnucpro.telemetry.show import status_file
from virnucpro.telemetry.show.status_file import StatusFile, from_json, read_status, to_json
from virnucpro.telemetry.snapshot import Batch, GpuSample


@pytest.fixture
def path(tmp_path):
    layout = RunLayout(tmp_path / "out")
    layout.work_dir.mkdir(parents=True)
    return layout.live_status


@pytest.fixture
def written(path):
    """The file of a run in its middle, as text."""
    StatusFile(path).update(full_snapshot())
    return path.read_text()


def full_snapshot():
    rank = rank_snapshot(restarts={"died": 2}, last_batch=Batch(block=3, sequences=7, tokens=4000), rows=None)
    gpu = GpuSample(device="cuda:0", uuid="GPU-1", utilization=0.5, throttle={"sw_power_cap": True})
    return run_snapshot(rank, rank_snapshot(1), gpus=(gpu,))


def test_what_is_read_is_what_was_written(path, written):
    saved = read_status(path)
    assert saved.snapshot == full_snapshot()
    assert json.loads(written)["format"] == 1
    assert [item.name for item in path.parent.iterdir()] == [path.name], "no temporary file stays"


def test_the_file_follows_the_run_but_not_at_every_step(path, monkeypatch):
    file = StatusFile(path)
    first, second = run_snapshot(rank_snapshot()), run_snapshot(rank_snapshot(tokens_left=0))
    file.update(first)
    file.update(second)
    assert read_status(path).snapshot == first
    monkeypatch.setattr(status_file, "WRITE_INTERVAL_S", 0.0)
    file.update(second)
    assert read_status(path).snapshot == second


def test_at_the_end_it_is_gone_with_a_folder_that_nobody_else_needs(path):
    file = StatusFile(path)
    file.update(run_snapshot())
    file.close()
    assert not path.parent.exists()
    path.parent.mkdir()
    (path.parent / "sequences.index").touch()
    file = StatusFile(path)
    file.update(run_snapshot())
    file.close()
    assert [item.name for item in path.parent.iterdir()] == ["sequences.index"]


def test_a_folder_that_the_run_has_not_made_yet_is_left_to_it(tmp_path):
    path = RunLayout(tmp_path / "out").live_status
    file = StatusFile(path)
    file.update(run_snapshot())
    file.close()
    assert not path.parent.parent.exists()
    assert read_status(path) is None


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again(path, capsys, monkeypatch):
    monkeypatch.setattr(status_file, "WRITE_INTERVAL_S", 0.0)
    path.mkdir()
    file = StatusFile(path)
    file.update(run_snapshot())
    file.update(run_snapshot())
    assert capsys.readouterr().out.count("status.not_written") == 1
    path.rmdir()
    file.update(run_snapshot())
    assert read_status(path).snapshot == run_snapshot()


def changed(data, where, value):
    """*data* with another value at *where*."""
    if not where:
        return value
    key, *rest = where
    if isinstance(data, list):
        return [*data[:key], changed(data[key], rest, value), *data[key + 1 :]]
    return {**data, key: changed(data[key], rest, value)}


RANK = ("snapshot", "embeddings", 0, "ranks", 0)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("format",), 2),
        (("snapshot",), []),
        (("snapshot", "now"), "soon"),
        (("snapshot", "now"), 10**400),
        (("snapshot", "now"), float("nan")),
        (("snapshot", "now"), True),
        (("snapshot", "stages"), {}),
        (("snapshot", "stages", 0, "is_over"), 1),
        ((*RANK, "sequences"), "12"),
        ((*RANK, "sequences"), 1.5),
        ((*RANK, "sequences"), 2**70),
        ((*RANK, "sequences"), None),
        ((*RANK, "state"), "flying"),
        ((*RANK, "restarts"), {"died": "often"}),
        ((*RANK, "last_batch"), {"block": 1}),
    ],
)
def test_a_value_of_another_kind_is_refused(path, written, where, value):
    path.write_text(json.dumps(changed(json.loads(written), where, value)))
    with pytest.raises(ResultError, match=r"status\.json: says nothing that this version understands"):
        read_status(path)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe", b"9" * 10_000])
def test_what_is_no_status_at_all_is_refused(path, data):
    path.write_bytes(data)
    with pytest.raises(ResultError):
        read_status(path)


def test_a_torn_file_is_refused_wherever_it_was_torn(path, written):
    for at in range(0, len(written) - 1, 97):
        path.write_text(written[:at])
        with pytest.raises(ResultError):
            read_status(path)


def test_numbers_that_json_does_not_know_are_left_out():
    rank = rank_snapshot(seconds_left=float("inf"))
    assert from_json(type(rank), json.dumps(to_json(rank)).encode()) == replace(rank, seconds_left=None)
