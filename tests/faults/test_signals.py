"""
Row 21: SIGTERM, Ctrl-C and a terminal that closes (SIGHUP), once and twice, to the parent alone and to the whole group.

The first signal stops the run at a batch boundary, the second one at once; either way no process is left, and the same
command continues to the bytes of an undisturbed run. The flow's are in ``tests/flows/test_flow_command.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from tests import fakes
from tests.faults.hash_command import hash_config_of
from tests.faults.processes import (
    DEADLINE_S,
    RowsFound,
    compare_rows,
    hash_command,
    is_gone,
    make_proteins,
    wait_until,
    workers_of,
)
from virnucpro.config import RunLimits
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.parts import BlockRows, write_part

GRACE_S = RunLimits().stop_grace_s
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


@pytest.fixture(scope="module")
def proteins(tmp_path_factory):
    """An input, and the bytes of its result."""
    folder = tmp_path_factory.mktemp("proteins")
    sequences = make_proteins(folder / "proteins.fasta", random.Random(2), 60)
    command = hash_command(folder, folder / "proteins.fasta")
    assert command.run(folder / "out", workers=1) == 0, command.errors()
    return folder / "proteins.fasta", sequences, (folder / "out" / "embeddings.h5").read_bytes()


def send(number, process, *, to_the_group):
    (os.killpg if to_the_group else os.kill)(process.pid, number)


def signalled(command, out, number, *, to_the_group, times):
    """Start, wait for a part, send the signal; return the exit code and the seconds to it from the last signal."""
    with command.running(out, workers=2) as process:
        wait_until(lambda: len(list(out.glob("work/parts/part_*.h5"))) >= 2, what="parts")
        if times > 1:
            wait_until(command.control.with_suffix(".failed0").exists, what="the batch that hangs")
        workers = workers_of(process.pid)
        send(number, process, to_the_group=to_the_group)
        for _ in range(times - 1):
            time.sleep(0.5)
            assert process.poll() is None, "the first signal alone ended it: the second one shows nothing"
            send(number, process, to_the_group=to_the_group)
        began_s = time.monotonic()
        code = process.wait(DEADLINE_S)
        seconds = time.monotonic() - began_s
        assert workers
        assert all(is_gone(worker) for worker in workers)
    print(f"exit code {code}, {seconds:.2f} s after signal {number} number {times}")
    return code, seconds


def check_it_continues(command, proteins, out):
    _, sequences, expected = proteins
    assert not (out / "embeddings.h5").exists()
    assert command.run(out, workers=1) == 0, command.errors()
    assert compare_rows(out, sequences) == RowsFound()
    assert (out / "embeddings.h5").read_bytes() == expected


@pytest.mark.parametrize(
    ("number", "to_the_group"),
    [
        (signal.SIGINT, True),
        (signal.SIGHUP, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(signal.SIGINT, False, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_one_signal_stops_the_run_at_a_batch_and_the_same_command_continues_it(
    tmp_path, proteins, number, to_the_group
):
    out = tmp_path / "out"
    command = hash_command(tmp_path, proteins[0], slow_s=0.15)
    code, seconds = signalled(command, out, number, to_the_group=to_the_group, times=1)
    assert code == CODES[number], command.errors()
    assert seconds < GRACE_S
    assert "stopping as soon as what is finished is safe; once more to stop at once" in command.errors()
    assert "start the same command again to continue" in command.errors()
    check_it_continues(hash_command(tmp_path / "again", proteins[0]), proteins, out)


@pytest.mark.parametrize(
    ("number", "to_the_group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(signal.SIGTERM, True, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_second_signal_does_not_wait_for_a_batch_that_hangs(tmp_path, proteins, number, to_the_group):
    out = tmp_path / "out"
    command = hash_command(tmp_path, proteins[0], rank=1, how="hang", before_batch=0, times=1)
    code, seconds = signalled(command, out, number, to_the_group=to_the_group, times=2)
    assert code == CODES[number], command.errors()
    assert seconds < 2.0
    assert "stopped at once: start the same command again to continue" in command.errors()
    assert json.loads((out / "run.json").read_text())["state"] == "stopped"
    check_it_continues(command, proteins, out)


def test_under_nohup_a_terminal_that_closes_stops_nothing(tmp_path, proteins):
    command = hash_command(tmp_path, proteins[0], slow_s=0.1)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which the command inherits
    try:
        with command.running(tmp_path / "out", workers=2) as process:
            wait_until(lambda: list(tmp_path.glob("out/work/parts/part_*.h5")), what="a part")
            os.killpg(process.pid, signal.SIGHUP)
            assert process.wait(DEADLINE_S) == 0, command.errors()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "out" / "embeddings.h5").read_bytes() == proteins[2]


def test_a_time_limit_stops_the_run_and_the_same_command_continues_it(tmp_path, proteins):
    out = tmp_path / "out"
    command = hash_command(tmp_path, proteins[0], slow_s=0.5)
    with command.running(out, workers=2, options=["--time-limit", "0.1"]) as process:
        assert process.wait(60) == 70, command.errors()
    assert "the time limit of 0.1 minutes has passed: run it again to continue" in command.errors()
    assert json.loads((out / "run.json").read_text())["state"] == "stopped"
    command.control.write_text(json.dumps({"times": 1, "before_batch": -1}))
    check_it_continues(command, proteins, out)


def test_a_worker_that_ignores_the_request_to_stop_is_ended_after_the_grace_time(tmp_path):
    limits = RunLimits(attempts=1, stop_grace_s=0.5)
    heard = threading.Event()
    coordinator = GPUProcessCoordinator(
        1, tmp_path, devices=[CPU], limits=limits, on_message=lambda _, message: "ready" in message and heard.set()
    )
    coordinator.spawn_workers(fakes.ignore_sigterm, ())
    assert heard.wait(DEADLINE_S)
    began_s = time.monotonic()
    coordinator.terminate_all()
    seconds = time.monotonic() - began_s
    print(f"ended after {seconds:.2f} s")
    assert 0.5 <= seconds < 3.0
    assert coordinator.outcomes[0].exit_code == -signal.SIGKILL
    assert coordinator.outcomes[0].state == "stopped"


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param("file.write:1", signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("file.rename:1", signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.long]),
        ("file.reserve:2", signal.SIGTERM),
    ],
    ids=["the index is written", "the index is renamed", "the result is put together"],
)
def test_a_signal_while_there_are_no_workers_ends_the_command_at_once(tmp_path, proteins, monkeypatch, step, number):
    command = hash_command(tmp_path / "run", proteins[0])
    reached = tmp_path / "reached"
    monkeypatch.setenv("VIRNUCPRO_FAILPOINT", f"MainProcess/{step}:hang:{reached}")
    with command.running(tmp_path / "out", workers=1) as process:
        wait_until(reached.exists, what=step)
        began_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(DEADLINE_S / 4) == CODES[number]
        seconds = time.monotonic() - began_s
    print(f"ended {seconds:.2f} s after the signal")
    assert seconds < 3
    monkeypatch.delenv("VIRNUCPRO_FAILPOINT")
    check_it_continues(command, proteins, tmp_path / "out")
    assert "Traceback" not in command.errors()


def finish_every_block(command, out, count):
    """Write an input of *count* proteins, and parts with all its rows: what is left is to put the result together."""
    as_letters = str.maketrans("0123456789", "ACDEFGHIKL")
    with command.fasta.open("w") as file:
        file.writelines(f">p{number}\n{str(number).translate(as_letters)}\n" for number in range(count))
    layout = RunLayout(out)
    with RunLock(layout.lock, run_id="made"):
        run = prepare_run([command.fasta], out, hash_config_of(str(command.control)), [CPU], run_id="made")
        index = run.open_index()
        plan = run.plan(index)
        for first in range(0, len(plan), 8):
            blocks = range(first, min(first + 8, len(plan)))
            positions = [plan.block_positions(block) for block in blocks]
            rows = [np.zeros((len(some), fakes.HASH_WIDTH), np.float32) for some in positions]
            found = zip(blocks, positions, map(index.sequence_ids, positions), rows, strict=True)
            write_part(layout.parts_dir, [BlockRows(*one) for one in found], plan_fingerprint=plan.fingerprint)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_result_of_three_million_rows_is_not_finished_first(tmp_path, soak_table):
    count, out = 3_000_000, tmp_path / "out"
    command = hash_command(tmp_path, tmp_path / "many.fasta", config={"token_budget": 1 << 16})
    finish_every_block(command, out, count)
    seconds = []
    for wait_s in itertools.accumulate(itertools.repeat(1.5), initial=0.2):
        with command.running(out, workers=1) as process:
            wait_until(lambda: workers_of(process.pid), what="workers")
            wait_until(lambda: not workers_of(process.pid), deadline_s=400, what="the end of the workers")
            time.sleep(wait_s)
            process.terminate()
            began_s = time.monotonic()
            code = process.wait(DEADLINE_S)
            if code == 0:
                break
            seconds.append(time.monotonic() - began_s)
            assert code == 143, command.errors()
    note = f"of {count:,} rows; ended {max(seconds):.1f} s after the signal at most"
    soak_table("SIGTERM while the result is written", tries=len(seconds), note=note)
    assert max(seconds) < GRACE_S
    assert json.loads((out / "run.json").read_text())["counts"]["rows"] == count
