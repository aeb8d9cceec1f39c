"""Workers on contigs, killed and stopped at random: whatever is tried again, the scores are those of a whole run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from tests.contig_runs import compute, works_in
from tests.faults.processes import kill_landed, workers_of
from virnucpro import durable
from virnucpro.config import RunLimits
from virnucpro.errors import WorkersFailedError
from virnucpro.pipeline.prediction import composition
from virnucpro.pipeline.prediction.contig_worker import contig_worker

SLOW_S = 0.1
"""Seconds that a unit takes longer, so that there is something to kill."""
HEARTBEAT_S = 2.5
"""Seconds without a heartbeat after which a stopped worker is taken to hang."""
MOST_STARTS = 60


def slow_worker(*arguments):
    score = composition.score_by_composition

    def slow(*of_unit, **settings):
        time.sleep(SLOW_S)
        return score(*of_unit, **settings)

    composition.score_by_composition = slow
    contig_worker(*arguments)


class Disturber(threading.Thread):
    """Kills workers of this process, or stops them, at random moments."""

    def __init__(self, chooser, faults, lifetime_s):
        super().__init__(daemon=True)
        self.chooser, self.faults, self.lifetime_s = chooser, faults, lifetime_s
        self.landed: Counter[str] = Counter()
        self.is_over = threading.Event()

    def run(self):
        while sum(self.landed.values()) < self.faults and not self.is_over.wait(
            self.chooser.uniform(0, self.lifetime_s)
        ):
            if workers := workers_of(os.getpid()):
                victim = self.chooser.choice(workers)
                if self.chooser.random() < 0.7:
                    self.landed["killed"] += kill_landed(victim)
                else:
                    with suppress(psutil.Error):
                        victim.send_signal(signal.SIGSTOP)
                        self.landed["stopped"] += 1


@pytest.fixture
def works(tmp_path):
    return works_in(tmp_path)


def scores_of(works):
    layout = works[0].layout
    return layout.composition_scores.read_bytes(), layout.composition_windows.read_bytes()


def disturbed(works, faults, chooser):
    """Compute until nothing is missing, while *faults* of workers come; return those that landed, and the starts."""
    limits = RunLimits(heartbeat_timeout_s=HEARTBEAT_S)
    landed: Counter[str] = Counter()
    for start in range(1, MOST_STARTS):
        disturber = Disturber(chooser, faults - sum(landed.values()), lifetime_s=3.0)
        disturber.start()
        try:
            run = compute(works, workers=2, limits=limits, worker_fn=f"{__name__}:slow_worker")
        except WorkersFailedError:
            continue
        finally:
            disturber.is_over.set()
            disturber.join()
            landed += disturber.landed
        if not run.quarantined:
            return landed, start
    raise AssertionError("it never ends")


def check(works, faults, seed, soak_table):
    chooser, landed, starts, differing, runs = random.Random(seed), Counter(), 0, 0, 0
    compute(works, workers=2)
    expected = scores_of(works)
    while sum(landed.values()) < faults:
        durable.remove_tree(works[0].layout.contig_parts)
        runs += 1
        of_run, number = disturbed(works, min(8, faults - sum(landed.values())), chooser)
        landed += of_run
        starts += number
        differing += scores_of(works) != expected
    soak_table("workers on contigs killed or stopped", tries=sum(landed.values()), differing=differing)
    print(f"{landed['killed']} killed, {landed['stopped']} stopped; {runs} runs, {starts} starts")
    assert differing == 0


def test_workers_on_contigs_that_are_killed_or_stopped_cost_time_only(works, seed, soak_table):
    check(works, 3, seed, soak_table)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_faults_of_workers_on_contigs_cost_time_only(works, seed, soak_table):
    check(works, 100, seed, soak_table)
