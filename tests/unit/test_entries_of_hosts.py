"""What a worker on another host says is taken in as if its pipe ended here, and nonsense costs a warning only."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.unit.test_work_telemetry import two_ranks
from virnucpro.telemetry.snapshot import GpuSample, RankState

FAILED = {
    "state": "failed",
    "failure": "died",
    "reason": "signal 9",
    "exit_code": -9,
    "starts_again": True,
    "quarantined": [[7, "died"]],
}


def say(telemetry, rank, **entry):
    telemetry.apply_entry({"rank": rank, **entry})


def begin(telemetry, rank):
    say(telemetry, rank, message={"kind": "placed", "host": "node-9", "device": "cuda:5"})
    say(telemetry, rank, assigned=None)
    say(telemetry, rank, message={"kind": "found"})
    say(telemetry, rank, message={"kind": "model_loaded", "seconds": 1.5})


def test_a_worker_that_the_run_did_not_have_at_first_is_counted_like_the_others(tmp_path):
    telemetry = two_ranks(folder=tmp_path)
    begin(telemetry, 3)
    say(telemetry, 3, message={"kind": "claimed", "runs": [[0, 1, 1]]})
    say(telemetry, 3, message={"kind": "durable", "runs": [[0, 1, 1]]})
    ranks = telemetry.snapshot().ranks
    assert [(rank.rank, rank.rows) for rank in ranks] == [(0, None), (1, None), (2, None), (3, 9)]
    assert (ranks[3].host, ranks[3].device, ranks[3].attempts) == ("node-9", "cuda:5", 1)
    say(telemetry, 3, ended={**FAILED, "state": "complete", "starts_again": False, "quarantined": []})
    assert telemetry.snapshot().ranks[3].state is RankState.COMPLETE


def test_the_end_of_a_process_comes_with_what_is_not_computed_any_more(tmp_path):
    telemetry = two_ranks(folder=tmp_path)
    begin(telemetry, 1)
    say(telemetry, 1, ended=FAILED)
    snapshot = telemetry.snapshot()
    assert (snapshot.ranks[1].state, snapshot.quarantined) == (RankState.FAILED, {"died": 1})
    assert "signal 9" in telemetry.failure_of(1)
    say(telemetry, 1, assigned=None)
    assert telemetry.snapshot().ranks[1].restarts == {"died": 1}


def test_what_a_host_has_sampled_is_shown_while_its_process_runs(tmp_path):
    telemetry = two_ranks(folder=tmp_path)
    begin(telemetry, 1)
    gpu = {"device": "cuda:5", "uuid": "GPU-1", "host": "node-9", "utilization": 0.5}
    say(telemetry, 1, used={"cpu_s": 3.5, "resident_bytes": 4096}, gpus=[gpu])
    assert telemetry.gpus() == (GpuSample(**gpu),)
    rank = telemetry.snapshot().ranks[1]
    assert (rank.host, rank.cpu_s, rank.resident_bytes) == ("node-9", 3.5, 4096)
    say(telemetry, 1, used=None, gpus=[gpu])
    assert telemetry.snapshot().ranks[1] == rank
    say(telemetry, 1, ended=FAILED)
    assert telemetry.gpus() == ()


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"rank": "x", "assigned": None},
        {"rank": 0},
        {"rank": 0, "ended": {"state": "complete"}},
        {"rank": 0, "ended": {**FAILED, "quarantined": [[1]]}},
        {"rank": 0, "used": None, "gpus": [{"power": 1}]},
        {"rank": 0, "used": {"cpu_s": "much"}, "gpus": []},
    ],
)
def test_an_entry_that_makes_no_sense_costs_a_warning(tmp_path, entry):
    telemetry = two_ranks(folder=tmp_path)
    with capture_logs() as logs:
        telemetry.apply_entry(entry)
    assert [line["event"] for line in logs] == ["messages.not_understood"]
    assert len(telemetry.snapshot().ranks) == 2
