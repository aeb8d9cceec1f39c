"""
The parent's book of suspects, without processes: a worker that follows its assignment is played, and dies as it must.

What is shown holds for any plan, any poisons and any number of ranks: nothing healthy is lost, nothing innocent is
quarantined, and the number of starts is bounded.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.config import RunLimits
from virnucpro.pipeline.work.assignment import SINGLY
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.settings import MAX_STARTS
from virnucpro.telemetry.ranks import Rank, done_messages


class ToldKills:
    """A kernel that says what it is told to say."""

    def explain_one(self):
        return False


def ranks(number):
    return [Rank(rank=rank, device="played") for rank in range(number)]


def batch_done(block, rows):
    costs = {"batch_tokens": 1, "planned_tokens": 1, "packing": 1.0, "seconds": 0.1, "oom_splits": 0}
    return {"kind": "progress", "block": block, "rows": rows, **costs}


class PlayedRun:
    """
    A run whose workers are played, each a step at a time and in random order.

    Args:
        blocks: Positions of each block.
        poison: Position -> ``dies`` or ``fails`` (in the process, without ending it).
        broken: Ranks whose every batch ends the process.
        whole_only: Blocks that end the process only when they are computed whole.
        steps: Rank -> steps that it makes where others make one.
        goes: Rank -> blocks that it computes before its device is gone: from then on every batch ends the process.
    """

    def __init__(
        self,
        blocks,
        world_size,
        *,
        poison=(),
        broken=(),
        whole_only=(),
        attempts=3,
        in_flight=1,
        steps=(),
        goes=(),
        seed=1,
    ):
        self.blocks, self.world_size, self.in_flight = blocks, world_size, in_flight
        self.poison, self.broken, self.whole_only = dict(poison), set(broken), set(whole_only)
        self.outcomes = ranks(world_size)
        self.recovery = Recovery(
            self.outcomes, num_blocks=len(blocks), limits=RunLimits(attempts=attempts), oom_kills=ToldKills()
        )
        self.steps, self.goes = dict(steps), dict(goes)
        self.chooser = random.Random(seed)
        self.durable = {}
        self.starts = Counter()
        self.died = Counter()
        """Rank -> its processes that failed since it last finished a block."""
        self.computed = Counter()
        self.times = {rank: [] for rank in range(world_size)}
        """Step of the run at which each block of a rank was finished."""
        self.now = 0

    def run(self):
        live = {rank: self.life(rank) for rank in range(self.world_size)}
        waited = 0
        while live:
            self.now += 1
            weights = [self.steps.get(rank, 1) for rank in live]
            (rank,) = self.chooser.choices(list(live), weights)
            try:
                waits = next(live[rank])
            except StopIteration:
                del live[rank]
                waits = False
            waited = waited + 1 if waits else 0
            assert waited < 1000, "every rank waits for another"
        return self

    def life(self, rank):
        """The processes of a rank, one after the other; yields whether it waits."""
        is_wanted = True
        while is_wanted:
            with self.recovery.turn(rank, threading.Event()):
                self.starts[rank] += 1
                (assignment,) = self.recovery.worker_args(rank, ())
                outcome = self.outcomes[rank]
                outcome.begin_attempt()
                if (yield from self.process(rank, assignment)):
                    outcome.state = "complete"
                else:
                    outcome.state, outcome.failure = ("failed", "died")
                    self.died[rank] += 1
                outcome.end_attempt()
            is_wanted = self.recovery.another_attempt(outcome)
            yield False

    def process(self, rank, assignment):
        """Play one process; whether it lived."""
        pending, known = {}, assignment.first
        yield False
        self.check(rank, known.blocks, known)
        while True:
            units, known = self.ask(rank, known, idle=False)
            while not units:
                self.flush(rank, pending)
                units, known = self.ask(rank, known, idle=True)
                yield not units
            if units[0]["answer"] == "end":
                return True
            (unit,) = units
            blocks = [block for first, last, step in unit["runs"] for block in range(first, last + 1, step)]
            if unit["answer"] == "check":
                self.check(rank, blocks, known)
                continue
            if unit.get("suspects"):
                lived = yield from self.suspect(rank, blocks[0], known, pending)
            else:
                lived = yield from self.plain(rank, blocks, known, pending)
            if not lived:
                return False
            if self.chooser.random() < 0.3:
                self.flush(rank, pending)

    def ask(self, rank, known, *, idle):
        """Return what the parent answers, and what is known with it."""
        self.outcomes[rank].apply({"kind": "wants", "idle": idle})
        *more, answer = self.recovery.next_blocks(rank) or [{"answer": "nothing"}]
        quarantined = frozenset(position for record in more for position in record["quarantined"])
        suspects, lone = dict(answer.get("suspects", ())), frozenset(answer.get("lone_suspects", ()))
        known = replace(known, quarantined=quarantined, suspects=suspects, lone_suspects=lone)
        return [answer] if answer["answer"] != "nothing" else [], known

    def check(self, rank, blocks, known):
        done = [block for block in blocks if self.is_done(block, known.quarantined)]
        self.send(rank, *done_messages(done), {"kind": "resumed", "sequences": 0})

    def plain(self, rank, blocks, known, pending):
        for at in range(0, len(blocks), self.in_flight):
            flying = [(block, self.wanted(block, known)) for block in blocks[at : at + self.in_flight]]
            for block, positions in flying:
                self.say(rank, block, positions)
            yield False
            if not all(self.survives(rank, *item) for item in flying):
                return False
            for item in flying:
                self.finish(rank, *item, pending)
        return True

    def suspect(self, rank, block, known, pending):
        """Compute one suspect block; whether the process lived."""
        positions = self.wanted(block, known)
        is_apart = known.computes_singly(block)
        apart = sorted(positions, key=lambda p: (p in known.lone_suspects, -p)) if is_apart else []
        for position in apart:
            self.say(rank, block, [position])
            yield False
            if not self.survives(rank, block, [position], is_alone=True):
                return False
        is_whole = len(positions) == len(self.blocks[block]) and not any(p in self.poison for p in positions)
        if not is_apart or (known.may_be_whole(block) and is_whole):
            self.say(rank, block, positions)
            yield False
            if not self.survives(rank, block, positions):
                return False
        self.finish(rank, block, positions, pending)
        return True

    def wanted(self, block, known):
        return [position for position in self.blocks[block] if position not in known.quarantined]

    def is_done(self, block, quarantined):
        return set(self.blocks[block]) - set(quarantined) <= self.durable.get(block, set())

    def send(self, rank, *messages):
        for message in messages:
            self.outcomes[rank].apply(message)
            self.recovery.on_message(rank, message)

    def say(self, rank, block, positions):
        if positions:
            message = {"kind": "start", "block": block}
            self.send(rank, message if len(positions) > 1 else {**message, "position": positions[0]})

    def survives(self, rank, block, positions, *, is_alone=False):
        is_gone = len(self.times[rank]) >= self.goes.get(rank, math.inf)
        if positions and (rank in self.broken or is_gone or (block in self.whole_only and not is_alone)):
            return False
        return not any(self.poison.get(position) == "dies" for position in positions)

    def finish(self, rank, block, positions, pending):
        fine = [position for position in positions if position not in self.poison]
        for position in set(positions) - set(fine):
            failed = {"kind": "sequence_failed", "block": block, "position": position}
            self.send(rank, {**failed, "failure": "application_error"})
        pending[block] = set(fine)
        self.computed[block] += 1
        self.times[rank].append(self.now)
        self.died[rank] = 0
        self.send(rank, batch_done(block, len(fine)))

    def flush(self, rank, pending):
        self.durable |= pending
        self.send(rank, *done_messages(pending))
        pending.clear()

    @property
    def delivered(self):
        return set().union(*self.durable.values())

    def why(self, position):
        block = next(number for number, positions in enumerate(self.blocks) if position in positions)
        return self.recovery.why_missing(position, block, self.outcomes)


def blocks_of(sizes):
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [list(range(a, b)) for a, b in itertools.pairwise(ends)]


def test_without_failures_every_rank_starts_once():
    played = PlayedRun(blocks_of([3] * 10), 3).run()
    assert played.starts == {0: 1, 1: 1, 2: 1}
    assert played.delivered == set(range(30))


@pytest.mark.parametrize("where", [0, 17, 31, 32, 319])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_one_poisoned_sequence_costs_four_more_starts_and_no_other_row(where, in_flight):
    played = PlayedRun(blocks_of([32] * 10), 2, poison={where: "dies"}, in_flight=in_flight).run()
    assert played.delivered == set(range(320)) - {where}
    assert [outcome.state for outcome in played.outcomes] == ["complete"] * 2
    assert sum(played.starts.values()) - 2 <= 4
    assert played.why(where) == ("died", 4)


def test_a_poisoned_sequence_that_is_a_block_costs_two_more_starts():
    played = PlayedRun(blocks_of([1, 1, 5, 5]), 1, poison={1: "dies"}).run()
    assert played.delivered == {0, *range(2, 12)}
    assert played.starts[0] == 3
    assert played.why(1) == ("died", 2)


def test_poisoned_sequences_in_every_block_do_not_look_like_a_device_that_is_gone():
    poison = {4: "dies", 13: "dies", 20: "dies"}
    played = PlayedRun(blocks_of([8] * 3), 1, poison=poison).run()
    assert played.delivered == set(range(24)) - poison.keys()
    assert {played.why(position)[0] for position in poison} == {"died"}


def test_a_block_whose_sequence_is_quarantined_no_more_is_computed_again():
    """The worker was told to leave the sequence out, on the word of a rank that was lost before anything else."""
    played, everything, poison, _ = play_at_random(random.Random(1702))
    assert played.delivered == everything - poison.keys()
    assert [played.why(position)[0] for position in poison] == ["died"] * len(poison)


def test_a_sequence_that_fails_within_the_process_costs_no_start():
    played = PlayedRun(blocks_of([8] * 4), 2, poison={9: "fails"}).run()
    assert played.delivered == set(range(32)) - {9}
    assert played.starts == {0: 1, 1: 1}
    assert played.why(9) == ("application_error", 1)


def play_at_random(chooser, attempts=3):
    """Play a run with poison, devices that never work and devices that go; return it with what it was made of."""
    blocks = blocks_of([chooser.randint(1, 12) for _ in range(chooser.randint(2, 12))])
    everything = [position for block in blocks for position in block]
    world_size = chooser.randint(1, 4)
    bad = chooser.sample(everything, min(chooser.randint(0, 3), len(everything) - 1))
    unsound = chooser.sample(range(world_size), chooser.randint(0, world_size - 1))
    poison = {position: chooser.choice(["dies", "fails"]) for position in bad}
    goes = {rank: chooser.randint(1, 4) for rank in unsound if chooser.random() < 0.6}
    played = PlayedRun(
        blocks,
        world_size,
        poison=poison,
        broken=set(unsound) - set(goes),
        goes=goes,
        attempts=attempts,
        in_flight=chooser.choice([1, 2, 3]),
        steps={rank: chooser.choice([1, 3, 10]) for rank in range(world_size)},
        seed=chooser.randrange(2**32),
    ).run()
    return played, set(everything), poison, set(unsound)


def check_played(played, everything, poison, unsound):
    """Check a run; False where every rank was given up, as three of its processes in a row computed nothing."""
    sound = [outcome for outcome in played.outcomes if outcome.rank not in unsound]
    is_whole = played.delivered == everything - set(poison)
    if not is_whole and poison and all(outcome.state == "failed" for outcome in sound):
        return False
    assert is_whole
    for position in poison:
        assert played.why(position)[0] in {"died", "application_error"}
    assert max(played.starts.values()) <= MAX_STARTS * played.world_size
    return True


@given(data=st.data())
def test_nothing_healthy_is_lost_and_nothing_innocent_quarantined(data):
    chooser = random.Random(data.draw(st.integers(0, 2**32)))
    played, everything, poison, unsound = play_at_random(chooser, attempts=data.draw(st.sampled_from([3, 6])))
    is_judged = check_played(played, everything, poison, unsound)
    assert is_judged or played.recovery.limits.attempts == 3


def test_three_thousand_played_runs_lose_no_row_and_name_the_devices_that_went():
    judged = named = gone = 0
    for seed in range(3000):
        played, everything, poison, unsound = play_at_random(random.Random(seed))
        judged += check_played(played, everything, poison, unsound)
        if poison:
            continue
        failed = {outcome.rank for outcome in played.outcomes if outcome.state == "failed"}
        assert failed <= unsound, (seed, failed, unsound)
        died = {rank for rank in unsound if played.died[rank] > 1}
        gone, named = gone + len(died), named + len(failed & died)
        assert failed >= died, (seed, failed, died)
    print(f"{judged} runs lost no row, {3000 - judged} every rank; {named} of {gone} bad devices were named")
    assert judged == 3000


def process_of(recovery, rank):
    """Begin a process of *rank*, which has looked for the files of its blocks."""
    recovery.worker_args(rank, ())
    recovery.ranks[rank].begin_attempt()
    recovery.on_message(rank, {"kind": "resumed", "sequences": 0})


def compute(recovery, rank, block):
    for message in (batch_done(block, 1), *done_messages([block])):
        recovery.ranks[rank].apply(message)
        recovery.on_message(rank, message)


def ask(recovery, rank):
    recovery.ranks[rank].apply({"kind": "wants", "idle": True})
    return recovery.next_blocks(rank)


def die(recovery, rank, block, failure="device_error"):
    """Let the process of *rank* end on a lone sequence; whether another is to start."""
    outcome = recovery.ranks[rank]
    outcome.apply({"kind": "start", "block": block, "position": block})
    outcome.state, outcome.failure = "failed", failure
    outcome.end_attempt()
    return recovery.another_attempt(outcome)


def test_what_a_device_that_worked_before_fails_on_goes_to_the_healthy_rank():
    recovery = Recovery(ranks(2), num_blocks=6, limits=RunLimits(), oom_kills=ToldKills())
    for rank in (0, 1):
        process_of(recovery, rank)
    for rank, block in [(0, 0), (1, 1), (1, 3)]:
        assert ask(recovery, rank) == [{"answer": "compute", "runs": [[block, block, 1]]}]
        compute(recovery, rank, block)
    assert ask(recovery, 0) == [{"answer": "compute", "runs": [[2, 2, 1]]}]
    assert die(recovery, 0, 2)
    process_of(recovery, 0)
    (answer,) = ask(recovery, 0)
    assert (answer["runs"], answer["suspects"]) == ([[4, 4, 1]], [[4, SINGLY]]), "what is not suspect comes first"
    assert die(recovery, 0, 4)
    process_of(recovery, 0)
    assert ask(recovery, 1) == [{"answer": "compute", "runs": [[5, 5, 1]]}]
    assert ask(recovery, 0) == [], "its suspects belong to the healthy rank, which still computes"
    compute(recovery, 1, 5)
    for block in (2, 4):
        (answer,) = ask(recovery, 1)
        assert (answer["answer"], answer["suspects"]) == ("compute", [[block, 1]])
        compute(recovery, 1, block)
    assert ask(recovery, 0) == ask(recovery, 1) == [{"answer": "end"}]
    for outcome in recovery.ranks:
        outcome.state = "complete"
        outcome.end_attempt()
        assert not recovery.another_attempt(outcome)
    assert [(outcome.state, outcome.failure) for outcome in recovery.ranks] == [
        ("failed", "device_error"),
        ("complete", None),
    ]
    assert recovery.quarantined() == {}


@pytest.mark.parametrize(("failure", "state"), [("died", "complete"), ("device_error", "failed")])
def test_one_failure_with_nothing_left_to_do_names_the_rank_only_where_its_device_reported_it(failure, state):
    recovery = Recovery(ranks(2), num_blocks=2, limits=RunLimits(), oom_kills=ToldKills())
    for rank in (0, 1):
        process_of(recovery, rank)
        ask(recovery, rank)
    assert die(recovery, 0, 0, failure)
    compute(recovery, 1, 1)
    process_of(recovery, 0)
    assert ask(recovery, 1)[-1]["suspects"] == [[0, 1]]
    compute(recovery, 1, 0)
    assert ask(recovery, 0) == [{"answer": "end"}]
    recovery.ranks[0].state = "complete"
    recovery.ranks[0].end_attempt()
    assert not recovery.another_attempt(recovery.ranks[0])
    assert recovery.ranks[0].state == state


def test_between_two_processes_of_a_rank_its_blocks_go_to_the_others():
    recovery = Recovery(ranks(2), num_blocks=4, limits=RunLimits(), oom_kills=ToldKills())
    for rank in (0, 1):
        process_of(recovery, rank)
    assert ask(recovery, 0) == [{"answer": "compute", "runs": [[0, 0, 1]]}]
    assert die(recovery, 0, 0)
    given = []
    while (answer := ask(recovery, 1))[-1]["answer"] != "end":
        if answer[-1]["answer"] == "check":
            recovery.on_message(1, {"kind": "resumed", "sequences": 0})
            continue
        ((block, _, _),) = answer[-1]["runs"]
        compute(recovery, 1, block)
        given.append(block)
    assert sorted(given) == [0, 1, 2, 3]


@pytest.mark.parametrize("lost", [[0], [1, 3], [0, 1, 2]])
def test_the_blocks_of_lost_ranks_go_to_those_that_are_left(lost):
    played = PlayedRun(blocks_of([4] * 21), 4, broken=lost).run()
    assert played.delivered == set(range(84))
    assert [outcome.rank for outcome in played.outcomes if outcome.state == "failed"] == lost
    assert all(3 <= played.starts[rank] <= 5 for rank in lost)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 40])
def test_a_broken_device_is_given_up_and_its_sequences_are_not_blamed(num_blocks):
    played = PlayedRun(blocks_of([5] * num_blocks), 1, broken=[0]).run()
    assert played.delivered == set()
    assert played.starts[0] <= 5
    assert all(played.why(position)[0] == "died" for position in range(5 * num_blocks))
    assert not played.recovery.worker_args(0, ())[0].first.quarantined


def test_a_block_that_only_fails_whole_keeps_its_rows_computed_apart():
    played = PlayedRun(blocks_of([5] * 4), 1, whole_only=[2]).run()
    assert played.delivered == set(range(20))
    assert played.starts[0] == 4


def test_what_a_broken_process_said_of_sequences_is_taken_back():
    recovery = Recovery(ranks(1), num_blocks=4, limits=RunLimits(), oom_kills=ToldKills())
    (outcome,) = recovery.ranks
    outcome.begin_attempt()
    outcome.apply({"kind": "sequence_failed", "block": 0, "position": 3, "failure": "not_finite"})
    outcome.apply(batch_done(0, 4))
    outcome.apply({"kind": "sequence_failed", "block": 1, "position": 7, "failure": "not_finite"})
    outcome.apply(batch_done(1, 0))
    outcome.state, outcome.failure = "failed", "application_error"
    outcome.end_attempt()
    assert recovery.another_attempt(outcome)
    assert recovery.worker_args(0, ())[0].first.quarantined == {3}


@pytest.mark.parametrize("failure", ["cannot_write", "bad_input"])
def test_work_is_not_handed_on_when_the_other_ranks_would_meet_the_same(failure):
    recovery = Recovery(ranks(2), num_blocks=4, limits=RunLimits(), oom_kills=ToldKills())
    one, other = recovery.ranks
    for rank in (one, other):
        recovery.worker_args(rank.rank, ())
        rank.begin_attempt()
    other.state, other.failure = "failed", failure
    other.end_attempt()
    assert not recovery.another_attempt(other)
    recovery.on_message(0, {"kind": "resumed", "sequences": 0})
    for block in (0, 2):
        one.apply({"kind": "wants", "idle": True})
        assert recovery.next_blocks(0) == [{"answer": "compute", "runs": [[block, block, 1]]}]
        recovery.on_message(0, {"kind": "done", "runs": [[block, block, 1]]})
    assert recovery.next_blocks(0) == [{"answer": "end"}]


def test_after_the_kernel_killed_one_fewer_run_at_a_time():
    recovery = Recovery(ranks(3), num_blocks=9, limits=RunLimits(), oom_kills=ToldKills())
    stop = threading.Event()
    turns = [recovery.turn(rank, stop) for rank in range(3)]
    for turn in turns:
        turn.__enter__()
    turns[1].__exit__(None, None, None)
    recovery.ranks[1].state, recovery.ranks[1].failure = "failed", "oom_kill"
    assert recovery.another_attempt(recovery.ranks[1])
    entered = threading.Event()

    def start_again():
        with recovery.turn(1, stop):
            entered.set()

    thread = threading.Thread(target=start_again)
    thread.start()
    assert not entered.wait(0.5), "two others run, and two is the most now"
    turns[0].__exit__(None, None, None)
    assert entered.wait(5)
    thread.join()


def test_who_waits_for_a_turn_does_not_wait_when_the_run_is_stopped():
    recovery = Recovery(ranks(2), num_blocks=9, limits=RunLimits(), oom_kills=ToldKills())
    stop = threading.Event()
    with recovery.turn(0, stop):
        recovery.ranks[1].state, recovery.ranks[1].failure = "failed", "oom_kill"
        recovery.another_attempt(recovery.ranks[1])
        threading.Timer(0.2, stop.set).start()
        with recovery.turn(1, stop):
            assert stop.is_set()


def test_one_attempt_means_one_process():
    played = PlayedRun(blocks_of([4] * 6), 1, poison={9: "dies"}, attempts=1).run()
    assert played.starts[0] == 1
    assert played.outcomes[0].state == "failed"


@pytest.mark.parametrize("num_blocks", [30, 300])
def test_fast_and_slow_ranks_finish_within_a_block_of_each_other(num_blocks):
    """Rank 1 is given a third of the steps of the others: it computes a third of what they do."""
    played = PlayedRun(blocks_of([4] * num_blocks), 3, steps={0: 3, 1: 1, 2: 3}).run()
    assert played.delivered == set(range(4 * num_blocks))
    assert set(played.computed.values()) == {1}, "no block is computed twice"
    done = {rank: len(times) for rank, times in played.times.items()}
    print(f"blocks of each rank: {done}")
    assert done[1] < min(done[0], done[2])


def test_ranks_that_wait_get_the_blocks_of_a_lost_one_at_once():
    recovery = Recovery(ranks(2), num_blocks=4, limits=RunLimits(attempts=1), oom_kills=ToldKills())
    one, other = recovery.ranks
    for rank in (one, other):
        recovery.worker_args(rank.rank, ())
        rank.begin_attempt()
    recovery.on_message(0, {"kind": "done", "runs": [[0, 2, 2]]})
    for rank in (one, other):
        recovery.on_message(rank.rank, {"kind": "resumed", "sequences": 0})
    other.apply({"kind": "wants", "idle": True})
    assert recovery.next_blocks(1) == [{"answer": "compute", "runs": [[1, 1, 1]]}]
    one.apply({"kind": "wants", "idle": True})
    assert recovery.next_blocks(0) == [{"answer": "compute", "runs": [[3, 3, 1]]}], "from the end of the other's"
    recovery.on_message(0, {"kind": "done", "runs": [[3, 3, 1]]})
    one.apply({"kind": "wants", "idle": True})
    assert recovery.next_blocks(0) == [], "the other computes the last one"
    other.state, other.failure = "failed", "died"
    other.end_attempt()
    assert not recovery.another_attempt(other)
    assert recovery.next_blocks(0) == [{"answer": "check", "runs": [[1, 1, 1]]}], "its part may have become durable"
    recovery.on_message(0, {"kind": "resumed", "sequences": 0})
    assert recovery.next_blocks(0) == [{"answer": "compute", "runs": [[1, 1, 1]]}]
    recovery.on_message(0, {"kind": "done", "runs": [[1, 1, 1]]})
    assert recovery.next_blocks(0) == [{"answer": "end"}]
