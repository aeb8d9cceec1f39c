"""Embedding on a cluster whose engine is played by threads: what is lost, refused or late, and what becomes of it."""

import logging
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from flows.clusters import engine, on_cluster
from flows.clusters.engine import Engine, UnitWorkers
from flows.clusters.on_cluster import OnCluster
from tests import fakes
from tests.prepared_runs import prepared_run
from virnucpro.choices import ResultForm
from virnucpro.config import RunLimits
from virnucpro.errors import ClusterLostError, ConfigurationError, HostCheckError
from virnucpro.pipeline.blocks.finished_blocks import BlockUnits
from virnucpro.pipeline.work.units import MOST_LOSSES, UnitRecord
from virnucpro.telemetry.ranks import Rank, durable_messages
from virnucpro.telemetry.work_telemetry import WorkTelemetry

LATE_S = 0.3
REFUSED = HostCheckError("host-b", "/shared/run", "is not there")


def record(rank, **values):
    found = Rank(rank=rank, device="cpu", host=f"host-{rank}", state="complete")
    for name in ("state", "failure", "attempts"):
        setattr(found, name, values.pop(name, getattr(found, name)))
    return UnitRecord(rank=found, rows=0, tokens=0, seconds=0.0, **values)


def refused(rank, error=REFUSED):
    return record(rank, is_lost=True, error=error)


def broken(rank, unit, failure):
    return record(rank, state="failed", failure=failure, attempts=3, left=unit.blocks, is_lost=True)


class Workers(UnitWorkers):
    """
    A thread a worker, one of which is lost for good after a record that says so.

    Args:
        does: Called with a worker's number, a unit, and how often it was called before; returns a record, None for one
            that says that all went well, or raises.
    """

    def __init__(self, num_slots, does):
        self._does, self._pool = does, ThreadPoolExecutor(num_slots)
        self._free, self.lost = list(range(num_slots)), []
        self._computing = {}
        self.units, self.computed, self.entries = [], [], []
        self.is_stopped = False

    def has_room(self):
        return bool(self._free)

    def submit(self, unit):
        rank = self._free.pop(0)
        self._computing[self._pool.submit(self._does, rank, unit, len(self.units))] = rank, unit
        self.units.append(unit)

    def look(self, timeout_s):
        if not self._computing:
            time.sleep(timeout_s)
        over, _ = wait(self._computing, timeout_s, FIRST_COMPLETED)
        return [self._ended(future) for future in over]

    def _ended(self, future):
        rank, unit = self._computing.pop(future)
        if (error := future.exception()) is not None:
            self._free.append(rank)
            return unit, error
        found = future.result() or record(rank)
        (self.lost if found.is_lost else self._free).append(rank)
        if found.error is None:
            done = [block for block in unit.blocks if block not in found.left]
            self.computed += done
            self.say(rank, {"kind": "found"}, *durable_messages(done, short={}))
        return unit, found

    def say(self, rank, *messages):
        self.entries += [{"rank": rank, "message": message} for message in messages]

    def messages(self):
        entries, self.entries = self.entries, []
        return entries

    def are_refused(self):
        return bool(self.lost) and not self._free and not self._computing

    def stop(self):
        self.is_stopped = True

    def close(self):
        """The last that a worker says comes when its process is told to end."""
        self._pool.shutdown()
        self.say(0, {"kind": "log", "level": "warning", "event": "worker.ended"})


class Threads(Engine):
    """A cluster of threads; calls of the first slot wait until they may go on."""

    name = "threads"

    def __init__(self, *, slots=2, does=lambda *_: None):
        super().__init__(0, has_gpus=False, on_cpus=True)
        self.slots_now, self.workers = slots, Workers(slots, does)
        self.scheduler_is_there, self.may_go_on = True, threading.Event()
        self.calls, self.cancelled = [], []
        self._pool = ThreadPoolExecutor()

    def is_there(self):
        return self.scheduler_is_there

    @contextmanager
    def unit_workers(self, run, limits):
        try:
            yield self.workers
        finally:
            self.workers.close()

    def _slots_now(self):
        return self.slots_now

    def _call(self, function, item):
        self.calls.append(call := self._pool.submit(self._called, function, item, is_first=not self.calls))
        return call

    def _called(self, function, item, *, is_first):
        assert not is_first or self.may_go_on.wait(30)
        return function(item)

    def _over(self, calls):
        return [call for call in calls if call.done()]

    def _result_of(self, call):
        return call.result()

    def _cancel(self, calls):
        self.cancelled += [self.calls.index(call) for call in calls]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(on_cluster, "LOOK_S", 0.01)
    monkeypatch.setattr(engine, "_LOOK_S", 0.01)
    monkeypatch.setattr(on_cluster, "get_run_logger", logging.getLogger)
    monkeypatch.setattr(engine, "get_run_logger", logging.getLogger)


@pytest.fixture
def run(tmp_path):
    with prepared_run(tmp_path, fakes.hash_config(), count=120) as (prepared, _):
        yield prepared


@pytest.fixture
def embed(run):
    """Embed the run on a cluster; return what has embedded it, and its telemetry."""

    def embedded(cluster):
        executor, telemetry = OnCluster(cluster), WorkTelemetry(run.facts())
        executor.compute(run, RunLimits(), telemetry, threading.Event())
        return executor, telemetry

    return embedded


# --- units ---


def test_every_block_is_computed_once_by_whoever_is_free(embed, run, caplog):
    cluster = Threads(slots=3)
    executor, telemetry = embed(cluster)
    assert sorted(cluster.workers.computed) == list(range(run.num_blocks))
    assert [rank.rank for rank in executor.outcomes()] == [0, 1, 2]
    assert all(rank.state == "complete" for rank in executor.outcomes())
    snapshot = telemetry.snapshot()
    assert (snapshot.rows, snapshot.tokens_left, len(snapshot.ranks)) == (120, 0, 3)
    assert not cluster.workers.is_stopped
    assert "rank 0: worker.ended" in caplog.text, "what a worker says at its end is heard"


def test_what_is_durable_before_is_counted_and_not_handed_out(embed, run, monkeypatch):
    done = set(range(0, run.num_blocks, 2))
    monkeypatch.setattr(BlockUnits, "durable", lambda *_: done)
    cluster = Threads()
    _, telemetry = embed(cluster)
    assert sorted(cluster.workers.computed) == list(range(1, run.num_blocks, 2))
    assert (telemetry.snapshot().rows, telemetry.snapshot().tokens_left) == (120, 0)


def test_where_all_is_durable_before_every_row_is_shown_and_no_worker_is_asked_for(embed, run, monkeypatch):
    done = set(range(run.num_blocks))
    monkeypatch.setattr(BlockUnits, "durable", lambda *_: done)
    cluster = Threads()
    monkeypatch.setattr(cluster, "unit_workers", lambda *_: pytest.fail("it asked for workers"))
    executor, telemetry = embed(cluster)
    assert executor.outcomes() == []
    assert (telemetry.snapshot().rows, telemetry.snapshot().tokens_left) == (120, 0)


def test_a_unit_that_is_lost_is_assigned_again(embed, run, caplog):
    def lose_the_first(_rank, _unit, number):
        if number == 0:
            raise RuntimeError("the node is gone\nand more about it")

    cluster = Threads(does=lose_the_first)
    embed(cluster)
    assert sorted(cluster.workers.computed) == list(range(run.num_blocks))
    lost = cluster.workers.units[0]
    assert [unit.blocks for unit in cluster.workers.units if unit.losses == 1] == [lost.blocks]
    assert f"a unit of {len(lost.blocks)} blocks was lost: the node is gone" in caplog.messages


def test_a_block_that_takes_down_every_host_costs_itself_only(embed, run):
    deadly = run.num_blocks // 2

    def die_of_it(_rank, unit, _number):
        if deadly in unit.blocks:
            raise RuntimeError("the node is gone")

    cluster = Threads(does=die_of_it)
    executor, _ = embed(cluster)
    assert sorted(cluster.workers.computed) == [block for block in range(run.num_blocks) if block != deadly]
    why_missing = executor.reasons().why_missing
    assert why_missing(0, deadly, []) == ("died", MOST_LOSSES + 1)
    assert why_missing(0, 0, []) == ("unknown", 0)


# --- workers that fail ---


def test_the_units_of_a_host_that_is_refused_go_to_the_others(embed, run, caplog):
    cluster = Threads(does=lambda rank, *_: refused(rank) if rank == 0 else None)
    executor, _ = embed(cluster)
    assert sorted(cluster.workers.computed) == list(range(run.num_blocks))
    first, other = executor.outcomes()
    assert (first.state, first.failure, first.reason) == ("failed", "configuration", str(REFUSED))
    assert other.state == "complete"
    assert f"worker 0 does not take part: {REFUSED}" in caplog.messages


def test_where_every_host_is_refused_the_run_ends_with_the_first_reason(embed):
    other = HostCheckError("host-c", "/shared/run", "cannot be written to")

    def refuse(rank, _unit, number):
        time.sleep(LATE_S * number)
        return refused(rank, other if number else REFUSED)

    cluster = Threads(does=refuse)
    with pytest.raises(HostCheckError) as caught:
        embed(cluster)
    assert caught.value is REFUSED
    assert len(cluster.workers.lost) == 2
    assert cluster.workers.is_stopped


def test_where_every_device_fails_the_rest_is_given_up_with_its_reason(embed, run):
    cluster = Threads(does=lambda rank, unit, _: broken(rank, unit, "device_error"))
    executor, _ = embed(cluster)
    assert cluster.workers.computed == []
    assert len(cluster.workers.units) == 2
    missing = {executor.reasons().why_missing(0, block, []) for block in range(run.num_blocks)}
    assert missing == {("device_error", 3)}


def test_a_failure_that_the_others_would_meet_as_well_ends_the_run(embed, run):
    has_failed = threading.Event()

    def full_disk(rank, unit, _number):
        if rank == 0:
            has_failed.set()
            return broken(rank, unit, "cannot_write")
        assert has_failed.wait(30)
        time.sleep(LATE_S)  # the failure is taken in before
        return None

    cluster = Threads(does=full_disk)
    executor, _ = embed(cluster)
    first, other = cluster.workers.units
    assert cluster.workers.computed == other.blocks
    reasons = executor.reasons()
    given_up = set(range(run.num_blocks)).difference(other.blocks)
    assert given_up.issuperset(first.blocks)
    assert {reasons.why_missing(0, block, []) for block in given_up} == {("cannot_write", 3)}


def test_a_worker_that_its_host_has_stopped_leaves_its_blocks_to_the_others(embed, run):
    """As where the time of a job of SLURM is up: nobody has stopped the run."""

    def time_is_up(rank, unit, _number):
        return record(rank, state="stopped", failure="stopped", left=unit.blocks, is_lost=True) if rank == 0 else None

    cluster = Threads(does=time_is_up)
    embed(cluster)
    assert sorted(cluster.workers.computed) == list(range(run.num_blocks))


# --- what is said ---


def waits_in(caplog):
    return [message for message in caplog.messages if message.startswith("waiting for a slot of the cluster")]


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_run_that_gets_no_slot_says_once_that_it_waits(embed, monkeypatch, caplog, is_busy):
    monkeypatch.setattr(on_cluster, "NOTICE_LOOKS", 5)
    cluster = Threads()
    looks, has_room = [], cluster.workers.has_room
    monkeypatch.setattr(cluster.workers, "has_room", lambda: (looks.append(1) or len(looks) > 20) and has_room())
    if not is_busy:
        looks += [1] * 20
    embed(cluster)
    assert len(waits_in(caplog)) == is_busy


def test_a_run_whose_first_units_take_long_does_not_say_that_nobody_computes(embed, monkeypatch, caplog):
    monkeypatch.setattr(on_cluster, "NOTICE_LOOKS", 5)
    is_late = threading.Event()
    cluster = Threads(does=lambda *_: is_late.wait(30) and None)
    cluster.workers.say(
        0, {"kind": "placed", "host": "host-a", "device": "cpu"}, {"kind": "model_loaded", "seconds": 1}
    )
    threading.Timer(LATE_S, is_late.set).start()
    embed(cluster)
    assert waits_in(caplog) == []


def test_lines_of_workers_are_logged_with_where_they_come_from(embed, caplog):
    cluster = Threads(slots=1)
    placed = {"kind": "placed", "host": "host-a", "device": "cuda:1"}
    cluster.workers.say(0, placed, {"kind": "log", "level": "error", "event": "sequence.failed"})
    embed(cluster)
    (line,) = [line for line in caplog.records if "sequence.failed" in line.message]
    assert (line.levelname, line.message) == ("ERROR", "host host-a, rank 0: sequence.failed")


# --- interruption ---


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_who_interrupts_a_run_ends_its_workers_at_their_next_batch(embed, monkeypatch, caplog, error):
    cluster = Threads()
    monkeypatch.setattr(cluster.workers, "look", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(error):
        embed(cluster)
    assert cluster.workers.is_stopped
    assert "stopping: workers end at their next batch boundary" in caplog.messages


def test_an_interruption_that_ends_the_cluster_as_well_is_still_the_interruption(embed, monkeypatch):
    cluster = Threads()
    monkeypatch.setattr(cluster.workers, "look", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(cluster.workers, "stop", lambda: (_ for _ in ()).throw(OSError("the stream is closed")))
    with pytest.raises(KeyboardInterrupt):
        embed(cluster)


def test_of_a_cluster_that_is_lost_nothing_more_is_asked(embed, monkeypatch):
    cluster = Threads()

    def lose(_timeout_s):
        cluster.scheduler_is_there = False
        raise OSError("the connection was closed")

    monkeypatch.setattr(cluster.workers, "look", lose)
    with pytest.raises(ClusterLostError, match="the scheduler of threads was lost"):
        embed(cluster)
    assert not cluster.workers.is_stopped


# --- calls of the engine ---


@pytest.fixture
def cluster():
    cluster = Threads(slots=3)
    yield cluster
    cluster.may_go_on.set()


def test_items_are_done_in_their_order_and_what_the_cluster_could_not_do_is_done_here(cluster, caplog):
    here = threading.current_thread()

    def only_here(item):
        if item == 5 and threading.current_thread() is not here:
            raise ConfigurationError("a task was lost")
        return item * 2, threading.current_thread() is here

    cluster.may_go_on.set()
    assert cluster.map(only_here, [4, 5, 6, 7]) == [(8, False), (10, True), (12, False), (14, False)]
    assert caplog.messages == ["a task was lost: it is done here"]
    assert cluster.map(only_here, []) == []


def test_what_neither_the_cluster_nor_this_host_can_do_is_an_error(cluster):
    def never(item):
        raise HostCheckError("host-b", item, "is not there")

    cluster.may_go_on.set()
    with pytest.raises(HostCheckError):
        cluster.map(never, ["a"])


def test_slots_that_are_late_are_left_out(cluster):
    assert cluster.ask_slots(lambda slot: slot, patience_s=LATE_S) == [1, 2]
    assert cluster.cancelled == [0]


def test_where_all_slots_are_taken_the_first_that_is_free_is_waited_for(cluster, monkeypatch, caplog):
    monkeypatch.setattr(engine, "NOTICE_S", LATE_S / 3)
    threading.Timer(3 * LATE_S, cluster.may_go_on.set).start()

    def probe(slot):
        cluster.may_go_on.wait(30)
        return slot

    assert cluster.ask_slots(probe, patience_s=LATE_S) == [0, 1, 2]
    assert caplog.messages == ["waiting for a slot of the cluster: none is free yet"]


@pytest.mark.parametrize(
    "ask",
    [lambda cluster: cluster.map(str, [1, 2]), lambda cluster: cluster.ask_slots(str, patience_s=30)],
    ids=["map", "ask_slots"],
)
def test_a_scheduler_that_goes_while_slots_are_asked_is_told_as_such(cluster, ask):
    threading.Timer(LATE_S, lambda: setattr(cluster, "scheduler_is_there", False)).start()
    with pytest.raises(ClusterLostError, match="the scheduler of threads was lost"):
        ask(cluster)
    assert cluster.cancelled == [], "nobody is there to be told"


def test_who_stops_the_run_while_slots_are_asked_gets_none(cluster, monkeypatch):
    monkeypatch.setattr(cluster, "_over", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cluster.map(str, [1, 2])
    assert cluster.cancelled == [0, 1]


def test_a_cluster_without_a_slot_at_the_time_is_asked_all_the_same(cluster, monkeypatch):
    monkeypatch.setattr(engine, "NOTICE_S", 0.0)
    cluster.slots_now = 0
    cluster.may_go_on.set()
    threading.Timer(3 * LATE_S, lambda: setattr(cluster, "scheduler_is_there", False)).start()  # ends a vain wait
    assert cluster.ask_slots(lambda slot: slot, patience_s=LATE_S) == [0]


def test_gpus_are_probed_in_every_slot_before_a_run_is_planned(cluster, monkeypatch):
    cluster.may_go_on.set()

    def found(index, folder, model, slot, *, run_id):
        return [(index, folder, model, slot, run_id)]

    monkeypatch.setattr(on_cluster, "probe_device_here", found)
    probe = OnCluster(cluster).probe("the run")
    assert probe("index", "out", "model") == [("index", "out", "model", slot, "the run") for slot in range(3)]


@pytest.mark.parametrize("form", [ResultForm.SHARDED, ResultForm.SINGLE])
def test_only_a_result_of_many_files_is_put_together_by_the_cluster(run, cluster, form):
    object.__setattr__(run, "result_form", form)
    with OnCluster(cluster).result_passes(run) as passes:
        assert (passes is not None) == (form is ResultForm.SHARDED)
