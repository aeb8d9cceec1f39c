"""
Rows 1, 8 and 27: SIGKILL to workers and to the parent at random times, resumed with other numbers of workers.

Every start is the real command with real worker processes. A kill counts when the victim was alive until our signal.
In the end the result must be, byte for byte, the one of a run that nobody disturbed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
import pytest

from tests.faults.processes import (
    DEADLINE_S,
    RowsFound,
    compare_rows,
    hash_command,
    kill_landed,
    make_proteins,
    seconds_until_gone,
    wait_until,
    workers_of,
)
from virnucpro.pipeline.run.verification import verify_run

COMPLETE, PARTIAL, INTERNAL = 0, 3, 70
SLOW_S = 0.04
"""Seconds that the model takes for a batch, so that there is something to kill."""
MOST_STARTS = 60
"""Starts of one run after which it is taken never to end."""


@dataclass
class Campaign:
    """What came of killing one run again and again until it was complete."""

    landed: Counter = field(default_factory=Counter)
    starts: int = 0
    orphan_ms: list[float] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    rows: RowsFound = field(default_factory=RowsFound)
    is_identical: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        return sum(self.landed.values())


def disturbed_run(command, out, sequences, expected, chooser, *, kills, lifetime_s, world_sizes):
    """Start *command* until it is complete; the first *kills* kills come at random times, as long as it lasts."""
    found = Campaign()
    while True:
        found.starts += 1
        assert found.starts < MOST_STARTS, command.errors()[-4000:]
        workers = world_sizes[(found.starts - 1) % len(world_sizes)]
        with command.running(out, workers=workers) as parent:
            while parent.poll() is None and found.kills < kills:
                pause_s = chooser.uniform(0, lifetime_s)
                end_s = time.monotonic() + pause_s
                while parent.poll() is None and time.monotonic() < end_s:
                    time.sleep(0.002)
                if parent.poll() is None:
                    _kill_someone(parent, chooser, found)
            code = parent.wait(DEADLINE_S)
        if code == COMPLETE:
            break
        found.exit_codes.append(code)
    found.rows = compare_rows(out, sequences)
    found.is_identical = (out / "embeddings.h5").read_bytes() == expected
    found.problems = verify_run(out).problems
    return found


def _kill_someone(parent, chooser, found):
    """Kill the parent, or one of its workers; note how long the workers of a killed parent live."""
    workers = workers_of(parent.pid)
    if workers and chooser.random() < 0.6:
        found.landed["worker"] += kill_landed(chooser.choice(workers))
    elif kill_landed(psutil.Process(parent.pid)):
        found.landed["parent"] += 1
        if workers:
            found.orphan_ms.append(seconds_until_gone(workers) * 1000)
        parent.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The input, the bytes that every run of it must come to, and how long an undisturbed one takes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fasta = folder / "proteins.fasta"
    sequences = make_proteins(fasta, random.Random(1), 90)
    command = hash_command(folder / "command", fasta, slow_s=SLOW_S)
    began_s = time.monotonic()
    assert command.run(folder / "out", workers=2) == COMPLETE, command.errors()
    lifetime_s = time.monotonic() - began_s
    assert compare_rows(folder / "out", sequences) == RowsFound()
    return command, sequences, (folder / "out" / "embeddings.h5").read_bytes(), lifetime_s


def check(campaigns, soak_table, fault):
    landed = sum((found.landed for found in campaigns), Counter())
    orphan_ms = sorted(ms for found in campaigns for ms in found.orphan_ms)
    differing = sum(found.rows.differing > 0 or not found.is_identical for found in campaigns)
    note = (
        f"{landed['worker']} workers, {landed['parent']} parents; {len(campaigns)} runs, "
        f"{sum(found.starts for found in campaigns)} starts"
    )
    if orphan_ms:
        note += f"; workers outlive a killed parent by {orphan_ms[-1]:.0f} ms at most"
    soak_table(
        fault,
        tries=sum(landed.values()),
        lost=sum(found.rows.lost for found in campaigns),
        duplicated=sum(found.rows.duplicated for found in campaigns),
        differing=differing,
        note=note,
    )
    print(note, Counter(code for found in campaigns for code in found.exit_codes))
    for found in campaigns:
        assert found.rows == RowsFound()
        assert found.is_identical
        assert found.problems == []
        assert set(found.exit_codes) <= {-9, PARTIAL, INTERNAL}
    assert all(ms < 1000 for ms in orphan_ms)
    return landed


def test_a_run_whose_workers_and_parent_are_killed_ends_with_the_bytes_of_an_undisturbed_one(
    tmp_path, undisturbed, seed, soak_table
):
    command, sequences, expected, lifetime_s = undisturbed
    found = disturbed_run(
        command,
        tmp_path / "out",
        sequences,
        expected,
        random.Random(seed),
        kills=6,
        lifetime_s=lifetime_s / 2,
        world_sizes=[2, 3, 1],
    )
    landed = check([found], soak_table, "worker or parent killed (SIGKILL)")
    assert sum(landed.values()) > 0


@pytest.mark.parametrize("how", ["hold_the_gil", "sigstop"])
def test_a_worker_that_cannot_run_a_line_of_its_own_ends_with_its_parent(tmp_path, undisturbed, how, soak_table):
    command = hash_command(tmp_path, undisturbed[0].fasta, rank=0, how=how, before_batch=1, times=1)
    with command.running(tmp_path / "out", workers=1) as parent:
        wait_until(command.control.with_suffix(".failed0").exists, what="the batch that hangs")
        workers = workers_of(parent.pid)
        assert len(workers) == 1
        assert kill_landed(psutil.Process(parent.pid))
        seconds = seconds_until_gone(workers)
    print(f"{1000 * seconds:.0f} ms")
    soak_table("parent killed while a worker hangs in a library or is stopped", tries=1, differing=seconds >= 1)
    assert seconds < 1.0


@pytest.mark.slow
@pytest.mark.long
def test_a_run_cut_off_twice_and_continued_by_1_and_3_workers_after_4_has_the_bytes_of_one_run(
    tmp_path, undisturbed, soak_table
):
    command, sequences, expected, _ = undisturbed
    out = tmp_path / "out"
    for workers, parts in ((4, 3), (1, 6)):
        with command.running(out, workers=workers) as parent:
            wait_until(lambda parts=parts: len(list(out.glob("work/parts/part_*.h5"))) >= parts, what="parts")
            assert kill_landed(psutil.Process(parent.pid))
        assert not (out / "embeddings.h5").exists()
    assert command.run(out, workers=3) == COMPLETE, command.errors()
    found = compare_rows(out, sequences)
    is_identical = (out / "embeddings.h5").read_bytes() == expected
    soak_table("another number of workers on resuming: 4, 1, 3", tries=1, differing=not is_identical)
    assert found == RowsFound()
    assert is_identical


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_200_kills_lose_duplicate_and_change_nothing(tmp_path, undisturbed, seed, soak_table):
    command, sequences, expected, lifetime_s = undisturbed
    chooser = random.Random(seed)
    campaigns: list[Campaign] = []
    while (left := 200 - sum(found.kills for found in campaigns)) > 0:
        world_sizes = [chooser.randint(1, 4) for _ in range(MOST_STARTS)]
        campaigns.append(
            disturbed_run(
                command,
                tmp_path / str(len(campaigns)),
                sequences,
                expected,
                chooser,
                kills=min(left, 15),
                lifetime_s=lifetime_s / 2,
                world_sizes=world_sizes,
            )
        )
    check(campaigns, soak_table, "worker or parent killed (SIGKILL)")
