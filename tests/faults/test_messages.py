"""
Row 20: messages of workers that are killed while they write, that never stop talking, or that send too much.

That too much is refused where it is sent stands in ``tests/unit/test_gpu_coordinator.py``.
"""

from __future__ import annotations

import random
import threading
import time

import psutil
import pytest

from tests import fakes
from tests.faults.processes import kill_landed
from virnucpro.config import RunLimits
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator

RANKS = 4
HANGS_AFTER_S = 60.0


def kill_while_they_write(tmp_path, chooser):
    """Kill *RANKS* workers that write without a pause; return the kills that landed and whether the parent hung."""
    heard = dict.fromkeys(range(RANKS), 0)
    torn = []

    def listen(rank, message):
        heard[rank] += 1
        if message.get("kind") == "progress" and message["padding"] != "x" * len(message["padding"]):
            torn.append(message)

    coordinator = GPUProcessCoordinator(
        RANKS, tmp_path, devices=[CPU] * RANKS, limits=RunLimits(attempts=1), on_message=listen
    )
    coordinator.spawn_workers(fakes.flood_without_end, ())
    landed = 0
    try:
        for rank in chooser.sample(range(RANKS), RANKS):
            end_s = time.monotonic() + HANGS_AFTER_S
            while heard[rank] < 100 and time.monotonic() < end_s:
                time.sleep(0.001)
            assert heard[rank] >= 100
            time.sleep(chooser.uniform(0, 0.02))
            landed += kill_landed(psutil.Process(coordinator.workers[rank].pid))
        completed = coordinator.wait_for_completion(HANGS_AFTER_S)
        has_hung = any(thread.is_alive() for thread in threading.enumerate() if thread.name.startswith("rank-"))
        assert completed == dict.fromkeys(range(RANKS), False)
        assert not any(process.is_alive() for process in coordinator.workers.values())
    finally:
        coordinator.kill_all()
    assert torn == []
    assert {outcome.exit_code for outcome in coordinator.outcomes.values()} == {-9}
    return landed, has_hung


def check(tmp_path, seed, soak_table, rounds):
    chooser = random.Random(seed)
    found = [kill_while_they_write(tmp_path, chooser) for _ in range(rounds)]
    landed, hangs = sum(kills for kills, _ in found), sum(has_hung for _, has_hung in found)
    soak_table("worker killed while it writes a message", tries=landed, differing=hangs)
    assert landed == rounds * RANKS
    assert hangs == 0


def test_a_worker_killed_while_it_writes_neither_hangs_its_parent_nor_tears_a_message(tmp_path, seed, soak_table):
    check(tmp_path, seed, soak_table, rounds=1)


@pytest.mark.soak
def test_120_workers_killed_while_they_write_hang_nobody(tmp_path, seed, soak_table):
    check(tmp_path, seed, soak_table, rounds=120 // RANKS)


@pytest.mark.soak
def test_a_flood_of_100_000_messages_arrives_whole(tmp_path, soak_table):
    heard = []
    coordinator = GPUProcessCoordinator(
        1, tmp_path, devices=[CPU], limits=RunLimits(attempts=1), on_message=lambda _, message: heard.append(message)
    )
    with coordinator:
        coordinator.spawn_workers(fakes.flood, (100_000,))
        completed = coordinator.wait_for_completion(HANGS_AFTER_S)
    numbers = [message["sequences"] for message in heard if message.get("kind") == "progress"]
    is_whole = completed == {0: True} and numbers == list(range(100_000))
    soak_table("100,000 messages at once", tries=1, differing=not is_whole)
    assert is_whole
