"""What the parent counts from what workers say: each row once, whatever happens to the workers."""

import json
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from virnucpro.run_layout import RunLayout
from virnucpro.telemetry import ranks, work_telemetry
from virnucpro.telemetry.ranks import durable_messages
from virnucpro.telemetry.snapshot import RankState, WorkFacts
from virnucpro.telemetry.work_telemetry import WorkTelemetry

BLOCKS = 6
TOKENS = 100
"""Of each block, of 4 sequences."""
COPIED = 0
"""Index position of the sequence that has a copy."""


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

        def monotonic(self):
            return self.now_s

        def time(self):
            return self.now_s + 1e9

    clock = Clock()
    for module in (work_telemetry, ranks):
        monkeypatch.setattr(module, "time", clock)
    return clock


def two_ranks(*, folder="nowhere", **callbacks):
    facts = WorkFacts(
        run_id="r",
        model="m",
        precision="fp32",
        token_budget=125,
        devices=(("cuda:3", "3"), ("cuda:1", "1")),
        host="node-1",
        layout=RunLayout(Path(folder)),
        block_tokens=np.full(BLOCKS, TOKENS, np.int64),
        block_rows=np.array([5, 4, 4, 4, 4, 4], np.int64),
        rows_of=lambda positions: np.where(positions == COPIED, 2, 1),
        records=25,
        copies=1,
        skipped=0,
    )
    run = WorkTelemetry(facts, **callbacks)
    for rank in (0, 1):
        starts(run, rank, range(rank, BLOCKS, 2))
    return run


def test_a_rank_that_tells_its_share_of_a_long_batch_moves_with_a_rate(clock):
    run = two_ranks()
    say(run, 0, {"kind": "model_loaded", "seconds": 1.0}, {"kind": "start", "block": 0, "tokens": TOKENS})
    for share in (25, 50, 75):
        clock.now_s += 1
        say(run, 0, {"kind": "share", "block": 0, "tokens": share})
        rank = run.snapshot().ranks[0]
        assert rank.tokens_left == 3 * TOKENS - share
        assert rank.tokens_per_second == pytest.approx(25)
    clock.now_s += 1
    done = {"kind": "progress", "block": 0, "rows": 4, "batch_tokens": TOKENS, "planned_tokens": TOKENS}
    say(run, 0, {**done, "seconds": 4.0, "packing": 1.0, "oom_splits": 0})
    rank = run.snapshot().ranks[0]
    assert (rank.tokens_left, rank.tokens_per_second) == (2 * TOKENS, pytest.approx(25))
    say(run, 0, {"kind": "share", "block": 2, "tokens": 30})
    run.ranks[0].end_attempt()
    assert run.snapshot().ranks[0].tokens_left == 2 * TOKENS


def starts(run, rank, blocks):
    run.ranks[rank].begin_attempt()
    run.assigned(rank, blocks)


def say(run, rank, *messages):
    for message in messages:
        run.ranks[rank].apply(message)
        run.on_message(rank, message)


def begins(run, rank, *, found=(), to_do=300, short=None):
    say(run, rank, {"kind": "heartbeat", "pid": 4000 + rank})
    say(run, rank, *durable_messages(found, short=short or {}), {"kind": "found"})
    say(run, rank, {"kind": "resumed", "sequences": 0})
    if to_do:
        say(run, rank, {"kind": "model_loaded", "seconds": 1.5, "attention_kernel": "x"})


def computes(run, rank, block, *, rows=4, tokens=TOKENS, seconds=0.2, splits=0):
    say(
        run,
        rank,
        {"kind": "start", "block": block, "sequences": 4, "tokens": TOKENS},
        {
            "kind": "progress",
            "block": block,
            "rows": rows,
            "batch_tokens": tokens,
            "planned_tokens": TOKENS,
            "packing": min(1.0, tokens / 125),
            "seconds": seconds,
            "oom_splits": splits,
        },
    )


def durable(run, rank, *blocks, **more):
    say(run, rank, *durable_messages(blocks, short={}, written_bytes=1000, **more))


def ends(run, rank, state="complete", failure="", *, again=False, quarantined=None):
    record = run.ranks[rank]
    record.state, record.failure, record.reason, record.exit_code = state, failure, "r", 1
    record.end_attempt()
    run.ended(rank, again, quarantined or {})


def test_rows_count_when_they_are_durable_with_their_copies():
    run = two_ranks()
    begins(run, 0)
    computes(run, 0, 0)
    assert run.snapshot().ranks[0].rows == 0
    assert run.snapshot().ranks[0].sequences == 4
    durable(run, 0, 0)
    assert run.snapshot().rows == 5
    assert run.snapshot().ranks[0].written_bytes == 1000


def test_a_rank_has_no_count_before_it_said_what_it_found():
    run = two_ranks()
    assert run.snapshot().ranks[0].rows is None
    say(run, 0, *durable_messages([0, 2], short={}))
    assert run.snapshot().ranks[0].rows is None, "else a scrape in between would see a jump"
    say(run, 0, {"kind": "found"})
    assert run.snapshot().ranks[0].rows == 9


@pytest.mark.parametrize("was_told", [True, False])
def test_a_worker_killed_around_its_message_counts_nothing_twice_and_loses_nothing(was_told):
    run = two_ranks()
    begins(run, 0)
    computes(run, 0, 0)
    if was_told:
        durable(run, 0, 0)
    computes(run, 0, 2)  # lost with its process
    ends(run, 0, "failed", "died", again=True)
    assert run.snapshot().ranks[0].state is RankState.FAILED
    assert run.snapshot().ranks[0].tokens_left == (200 if was_told else 300)
    starts(run, 0, range(0, BLOCKS, 2))
    begins(run, 0, found=[0], to_do=200)
    for block in (2, 4):
        computes(run, 0, block)
    durable(run, 0, 2, 4)
    ends(run, 0)
    rank = run.snapshot().ranks[0]
    assert rank.rows == 13
    assert rank.restarts == {"died": 1}
    assert rank.attempts == 2
    assert rank.tokens_left == 0
    assert rank.tokens == 400, "what was computed again was computed"


def test_a_lost_ranks_blocks_count_once_whoever_finds_them():
    run = two_ranks()
    begins(run, 0)
    begins(run, 1)
    computes(run, 0, 0)
    durable(run, 0, 0)
    for block in (1, 3, 5):
        computes(run, 1, block)
    durable(run, 1, 1, 3, 5)
    ends(run, 1)
    ends(run, 0, "failed", "died")
    assert run.snapshot().ranks[0].state is RankState.LOST
    assert run.snapshot().tokens_left == 200
    starts(run, 1, [0, 2, 4])
    assert run.snapshot().ranks[0].tokens_left == 0
    assert run.snapshot().tokens_left == 200
    begins(run, 1, found=[0], to_do=200)
    assert run.snapshot().rows == 17
    for block in (2, 4):
        computes(run, 1, block)
    durable(run, 1, 2, 4)
    ends(run, 1)
    run.over()
    snapshot = run.snapshot()
    assert snapshot.rows == 25
    assert snapshot.progress == 1
    assert snapshot.seconds_left == 0


def test_what_this_start_has_computed_was_not_done_before_whoever_goes_on_with_it():
    run = two_ranks()
    begins(run, 0, found=[0], to_do=200)
    begins(run, 1)
    computes(run, 0, 2)
    durable(run, 0, 2)
    for block in (1, 3, 5):
        computes(run, 1, block)
    durable(run, 1, 1, 3, 5)
    ends(run, 1)
    ends(run, 0, "failed", "died", again=True)
    starts(run, 0, [0, 2, 4])
    begins(run, 0, found=[0, 2], to_do=100)
    ends(run, 0, "failed", "died")
    starts(run, 1, [0, 2, 4])
    begins(run, 1, found=[0, 2], to_do=100)
    assert run.snapshot().tokens_left == 100
    assert run.snapshot().tokens_before == 100, "block 0 alone"


def test_a_block_that_lacked_a_sequence_counts_the_rest_when_it_is_whole():
    run = two_ranks()
    begins(run, 0, short={0: 3})
    assert run.snapshot().rows == 3
    durable(run, 0, 0)
    assert run.snapshot().rows == 5


def test_rows_that_a_killed_host_did_not_live_to_name_count_once_the_result_is_known_and_for_their_owner():
    run = two_ranks()
    begins(run, 0)
    begins(run, 1)
    for rank, block in [(0, 0), (0, 2), (1, 1), (1, 3), (1, 5)]:
        computes(run, rank, block)
    durable(run, 0, 0)
    durable(run, 1, 1, 3, 5)
    ends(run, 0, "failed", "died")  # block 2 was durable, block 4 as well
    say(run, 1, {"kind": "claimed", "runs": [[4, 4, 1]]})  # and lacked a sequence
    ends(run, 1)
    run.over()
    states = [rank.state for rank in run.snapshot().ranks]
    assert run.snapshot().rows == 17
    for _ in range(2):
        run.aggregated(np.array([0, 0, 0, 0, 1, 0]))
        assert [rank.rows for rank in run.snapshot().ranks] == [9, 15]
        assert run.snapshot().tokens_left == 0
    assert [rank.state for rank in run.snapshot().ranks] == states


def test_ranks_of_which_every_word_was_lost_have_what_the_result_holds():
    run = two_ranks()
    run.over()
    assert [rank.rows for rank in run.snapshot().ranks] == [None, None]
    run.aggregated(np.array([0, 4, 0, 4, 0, 4]))
    assert [rank.rows for rank in run.snapshot().ranks] == [13, None]
    assert [rank.tokens_left for rank in run.snapshot().ranks] == [0, 300]


def test_failed_and_quarantined_sequences_are_told_apart_and_counted_once():
    run = two_ranks()
    begins(run, 0)
    say(run, 0, {"kind": "sequence_failed", "block": 0, "position": 7, "failure": "not_finite"})
    assert run.snapshot().failed == {}, "the fault may be the process's own"
    computes(run, 0, 0, rows=3)
    assert run.snapshot().failed == {"not_finite": 1}
    say(run, 0, {"kind": "sequence_failed", "block": 2, "position": 9, "failure": "application_error"})
    ends(run, 0, "failed", "died", again=True, quarantined={7: "not_finite", 11: "died"})
    snapshot = run.snapshot()
    assert snapshot.failed == {"not_finite": 1}
    assert snapshot.quarantined == {"died": 1}


def test_the_copies_of_a_sequence_without_a_row_have_none_either():
    run = two_ranks()
    begins(run, 0)
    say(run, 0, {"kind": "sequence_failed", "block": 0, "position": COPIED, "failure": "not_finite"})
    computes(run, 0, 0, rows=3)
    ends(run, 0, quarantined={COPIED: "not_finite", 2: "died"})
    assert run.snapshot().failed == {"not_finite": 2}
    assert run.snapshot().quarantined == {"died": 1}


def test_a_sequence_that_another_rank_is_in_doubt_about_is_not_quarantined():
    run = two_ranks()
    for rank in (0, 1):
        begins(run, rank)
    say(run, 1, {"kind": "sequence_failed", "block": 1, "position": 7, "failure": "not_finite"})
    ends(run, 0, quarantined={7: "not_finite", 11: "died"})
    assert run.snapshot().quarantined == {"died": 1}
    computes(run, 1, 1, rows=3)
    ends(run, 1, quarantined={7: "not_finite", 11: "died"})
    assert run.snapshot().failed == {"not_finite": 1}
    assert run.snapshot().quarantined == {"died": 1}


def test_a_process_that_was_to_be_started_again_and_was_not_is_no_restart_and_none_that_is_down():
    run = two_ranks()
    for rank in (0, 1):
        begins(run, rank)
    ends(run, 0, "failed", "died", again=True)
    assert run.snapshot().ranks[0].state is RankState.FAILED
    run.over()
    assert run.snapshot().seconds_left is None, "nobody works on what is left"
    for rank in run.snapshot().ranks:
        assert rank.state is RankState.STOPPED
        assert rank.restarts == {}
        assert rank.pid is None


def test_the_estimate_goes_by_tokens_left_and_the_slowest_rank(clock):
    run = two_ranks()
    begins(run, 0)
    assert run.snapshot().seconds_left is None
    clock.now_s += 10
    computes(run, 0, 0)
    assert run.snapshot().ranks[0].tokens_per_second == pytest.approx(10)
    assert run.snapshot().ranks[0].seconds_left == pytest.approx(20)
    assert run.snapshot().seconds_left == pytest.approx(30), "rank 1 has 300 tokens left and is taken to be as fast"
    begins(run, 1)
    clock.now_s += 100
    computes(run, 1, 1)
    assert run.snapshot().seconds_left == pytest.approx(220), "rank 0 stands still"
    assert run.snapshot().ranks[0].tokens_per_second == pytest.approx(100 / 110)


def test_the_rate_is_that_of_the_last_minute(clock):
    run = two_ranks()
    begins(run, 0)
    clock.now_s += 1000
    computes(run, 0, 0)
    clock.now_s += 10
    computes(run, 0, 2)
    clock.now_s += 10
    assert run.snapshot().ranks[0].tokens_per_second == pytest.approx(200 / 1010)
    clock.now_s += 50
    computes(run, 0, 4)
    assert run.snapshot().ranks[0].tokens_per_second == pytest.approx(100 / 60)


def test_batches_fall_into_their_buckets_and_efficiency_never_passes_one():
    run = two_ranks()
    begins(run, 0)
    computes(run, 0, 0, seconds=0.25, tokens=100)
    computes(run, 0, 2, seconds=1000, tokens=500)  # BPE: more tokens than were planned
    rank = run.snapshot().ranks[0]
    histogram = dict(zip((*rank.batch_seconds.bounds, "more"), rank.batch_seconds.counts, strict=True))
    assert {bound: count for bound, count in histogram.items() if count} == {0.25: 1, "more": 1}
    assert rank.batch_seconds.total_s == pytest.approx(1000.25)
    assert rank.packing_efficiency == pytest.approx((100 + 125) / 250)


def test_who_cares_hears_of_gpus_logs_and_failures():
    heard = []
    run = two_ranks(
        on_gpu=lambda *what: heard.append(what),
        on_log=lambda rank, message: heard.append((rank.rank, message["event"])),
        on_failure=heard.append,
    )
    begins(run, 1)
    say(run, 1, {"kind": "model_loaded", "seconds": 1, "attention_kernel": "x", "gpu_uuid": "GPU-abc"})
    say(run, 1, {"kind": "log", "event": "block.resplit"})
    say(run, 1, {"kind": "start", "block": 3, "sequences": 4, "tokens": TOKENS})
    ends(run, 1, "failed", "hung")
    assert heard[:2] == [("cuda:1", "GPU-abc"), (1, "block.resplit")]
    for what in ("rank 1 on node-1 cuda:1", "(hung)", "block 3, 4 sequences"):
        assert what in heard[2]
    assert run.failure_of(1) == heard[2]
    assert run.failure_of(0) == ""


def test_the_log_of_a_process_that_was_killed_says_how_it_ended(tmp_path):
    layout = RunLayout(tmp_path)
    run = two_ranks(folder=tmp_path)
    begins(run, 1)
    say(run, 1, {"kind": "start", "block": 3, "sequences": 4, "tokens": TOKENS})
    ends(run, 1, "failed", "hung", again=True)
    assert not layout.log_dir.exists(), "what could not be written is no trouble"
    layout.log_dir.mkdir()
    layout.worker_log(1).write_text('{"torn')
    ends(run, 1, "failed", "died")
    begins(run, 0, to_do=0)
    ends(run, 0)
    assert not layout.worker_log(0).exists(), "nothing is said of a process that did what it was asked"
    torn, line = layout.worker_log(1).read_text().splitlines()
    assert torn == '{"torn'
    ended = json.loads(line)
    assert ended.pop("timestamp").endswith("Z")
    of_process = {"run_id": "r", "rank": 1, "host": "node-1", "device": "cuda:1", "attempt": 1}
    why = {"failure": "died", "reason": "r", "exit_code": 1, "starts_again": False, "last_block": 3}
    assert ended == {"event": "worker.ended", "level": "error", **of_process, **why}


def test_processor_time_adds_up_over_the_processes_of_a_rank():
    run = two_ranks()
    begins(run, 0)
    run.used(0, 4000, cpu_s=5.0, resident_bytes=10)
    run.used(0, 4000, cpu_s=4.0, resident_bytes=10)  # a child that was not waited for took its seconds along
    assert run.pids() == {0: 4000}
    ends(run, 0, "failed", "died", again=True)
    assert run.pids() == {}
    assert run.snapshot().ranks[0].resident_bytes is None
    starts(run, 0, [0])
    begins(run, 0)
    run.used(0, 1, cpu_s=100.0, resident_bytes=1)  # of a process that has ended meanwhile
    run.used(0, 4000, cpu_s=2.0, resident_bytes=20)
    used, unused = run.snapshot().ranks
    assert (used.resident_bytes, unused.cpu_s, unused.resident_bytes) == (20, None, None)
    assert used.cpu_s == pytest.approx(7)


def test_a_rank_says_where_it_is_once_its_task_has_begun_there():
    run = two_ranks()
    say(run, 1, {"kind": "placed", "host": "node-2", "device": "cuda:0"})
    assert [(rank.host, rank.device) for rank in run.snapshot().ranks] == [("node-1", "cuda:3"), ("node-2", "cuda:0")]


def test_what_is_said_of_something_unknown_is_passed_over():
    run = two_ranks()
    before = run.snapshot()
    say(run, 0, {"kind": "of a later version"}, {"rank": 0, "status": "complete"}, {"kind": "step"})
    assert run.snapshot() == before


def test_ranks_that_are_given_blocks_one_by_one_share_what_is_left_and_one_that_does_more_takes_it_from_the_other():
    run = two_ranks()
    shares = [rank.tokens_left for rank in run.snapshot().ranks]
    for rank in range(2):
        starts(run, rank, ())
        say(run, rank, {"kind": "found"}, {"kind": "resumed", "sequences": 0})
        say(run, rank, {"kind": "model_loaded", "seconds": 1.0})
    assert [rank.tokens_left for rank in run.snapshot().ranks] == shares
    claimed = int(run.facts.block_tokens[1])  # which would have been the other's
    say(run, 0, {"kind": "claimed", "runs": [[0, 1, 1]]})
    assert [rank.tokens_left for rank in run.snapshot().ranks] == [shares[0] + claimed, shares[1] - claimed]
    assert run.snapshot().tokens_left == sum(shares)
    computes(run, 0, 0)
    computes(run, 0, 1)
    durable(run, 0, 0, 1)
    say(run, 1, {"kind": "claimed", "runs": [[0, 0, 1]]})  # taken over, though it was durable
    assert [rank.tokens_left for rank in run.snapshot().ranks] == [
        shares[0] - int(run.facts.block_tokens[0]),
        shares[1] - claimed,
    ]


def test_what_makes_no_sense_costs_one_warning_and_nothing_else():
    run = two_ranks()
    begins(run, 0)
    with capture_logs() as logs:
        for block in (0, 2, BLOCKS):
            say(run, 0, {"kind": "progress", "block": block, "rows": 4})
        say(run, 0, {"kind": "durable", "runs": [[0, BLOCKS, 1]]}, {"kind": "resumed"})
    assert [line["kind"] for line in logs] == ["progress", "durable", "resumed"]
    computes(run, 0, 0)
    durable(run, 0, 0)
    assert run.snapshot().rows == 5


def test_hosts_whose_processors_differ_are_named_once_when_the_second_one_begins():
    told = []
    run = two_ranks(on_failure=told.append)
    for rank, host, processor in [(0, "node-1", "CPU with AVX2"), (1, "node-2", "CPU with AVX512")] * 2:
        say(run, rank, {"kind": "placed", "host": host, "device": "cpu"})
        assert bool(told) is (run.ranks[1].processor is not None)
        say(run, rank, {"kind": "model_loaded", "seconds": 1.0, "processor": processor})
    (line,) = told
    assert "different processors (CPU with AVX2 on node-1; CPU with AVX512 on node-2)" in line
    assert run.ranks[1].to_json()["processor"] == "CPU with AVX512"
