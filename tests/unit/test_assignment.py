"""The worker's side of blocks that are handed out: asked for ahead, and waited for only with nothing left to do."""

from __future__ import annotations

import threading

from tests import fakes
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.work.assignment import AssignedBlocks, AssignedUnit, Assignment
from virnucpro.pipeline.work.worker_process import WorkerProcess

FIRST = Assignment(
    first=AssignedUnit(blocks=range(0, 8, 2), to_check=True, quarantined=frozenset({5})), asks_parent=True
)


class Pipe:
    """A parent that has its answers ready; without any it is silent."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def put(self, message):
        self.asked.append("idle" if message.get("idle") else message["kind"])

    def receive(self, timeout_s):
        return self.answers.pop(0) if self.answers else None


def compute(*runs, **more):
    return {"answer": "compute", "runs": list(runs), **more}


def test_the_stride_is_checked_first_and_then_each_unit_is_asked_for_before_the_one_before_is_computed():
    pipe, stop = Pipe(compute([0, 2, 2]), compute([4, 4, 1]), {"answer": "nothing"}), threading.Event()
    handed = AssignedBlocks(FIRST, pipe, stop)
    first = handed.wait()
    assert (list(first.blocks), first.to_check, first.quarantined) == ([0, 2, 4, 6], True, {5})
    units = handed.iter_now()
    assert pipe.asked == []
    assert list(next(units).blocks) == [0, 2]
    assert pipe.asked == ["wants", "wants"], "the second is under way while the first is computed"
    assert list(next(units).blocks) == [4]
    assert list(units) == []
    assert pipe.asked == ["wants"] * 3
    assert not handed.all_done()


def test_a_process_with_nothing_left_says_so_and_ends_when_everything_is_done():
    pipe, stop = Pipe({"answer": "end"}), threading.Event()
    handed = AssignedBlocks(FIRST, pipe, stop)
    handed.wait()
    handed.mark_durable([0, 2])
    assert handed.wait() is None
    assert handed.all_done()
    assert pipe.asked == ["done", "idle"]
    assert list(handed.own_blocks()) == [0, 2]


def test_a_suspect_comes_with_what_is_known_of_it_and_nothing_is_asked_for_meanwhile():
    pipe, stop = (
        Pipe({"quarantined": [7, 8]}, compute([6, 6, 1], suspects=[[6, 2]], lone_suspects=[9])),
        threading.Event(),
    )
    handed = AssignedBlocks(FIRST, pipe, stop)
    handed.wait()
    unit = handed.wait()
    assert (list(unit.blocks), unit.suspects, unit.lone_suspects) == ([6], {6: 2}, {9})
    assert unit.quarantined == {7, 8}
    assert pipe.asked == ["idle"]


def test_the_stop_event_ends_the_waiting():
    stop = threading.Event()
    waited = []

    def on_wait():
        waited.append(1)
        if len(waited) == 3:
            stop.set()

    handed = AssignedBlocks(FIRST, Pipe(), stop, on_wait)
    handed.wait()
    assert handed.wait() is None
    assert len(waited) == 3
    assert not handed.all_done()


def test_an_answer_to_a_process_that_has_ended_is_dropped():
    worker = WorkerProcess(fakes.end_without_a_word, rank=0, world_size=1, device=CPU, worker_args=())
    worker.start()
    worker.process.join()
    for _ in range(10_000):
        worker.answer([compute([0, 100, 1])])
    worker.close()
