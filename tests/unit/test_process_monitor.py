"""What processes cost, read from real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from virnucpro.telemetry.metrics.process_monitor import sample_processes

TICK_S = 0.03
"""The system counts in hundredths of a second, user and system apart."""
BURN = "import time\nwhile time.process_time() < {seconds}: pass\nprint(flush=True)\ninput()\n"
PARENT = (
    "import signal, subprocess, sys\n"
    "signal.signal(signal.SIGCHLD, signal.{reaping})\n"
    f"child = subprocess.Popen([sys.executable, '-c', {BURN.format(seconds=0.4)!r}],"
    " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    "child.stdout.readline()\n"
    "print(flush=True)\n"
    "input()\n"
    "child.communicate(b'\\n')\n"
    "print(flush=True)\n"
    "input()\n"
)


def started(program):
    """A process that has said its first line."""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_this_process_costs_what_the_system_says():
    sample = sample_processes({4: os.getpid()})[4]
    times = os.times()
    assert 0 < sample.cpu_s <= sum(times[:4]) + 0.1
    assert sample.resident_bytes > 10 << 20


def test_what_a_worker_starts_counts_as_its_own_before_and_after_it_ends():
    process = started(PARENT.format(reaping="SIG_DFL"))
    with_child = sample_processes({0: process.pid})[0]
    assert with_child.cpu_s >= 0.4 - TICK_S
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    alone = sample_processes({0: process.pid})[0]
    assert alone.cpu_s >= with_child.cpu_s - TICK_S
    assert alone.resident_bytes < with_child.resident_bytes - (1 << 20)
    process.communicate(b"\n")


def test_each_process_has_its_own_seconds_and_one_that_has_gone_none():
    first = started(BURN.format(seconds=0.5))
    assert 0.5 - TICK_S <= sample_processes({0: first.pid})[0].cpu_s < 5
    first.kill()
    first.communicate()
    assert sample_processes({0: first.pid}) == {}
    second = started(BURN.format(seconds=0))
    both = sample_processes({0: second.pid, 1: os.getpid()})
    assert both.keys() == {0, 1}
    assert both[0].cpu_s < 0.5 - TICK_S < both[1].cpu_s
    second.kill()
    second.communicate()


def test_seconds_of_a_child_that_was_not_waited_for_are_gone_so_that_records_keep_the_highest():
    process = started(PARENT.format(reaping="SIG_IGN"))
    before = sample_processes({0: process.pid})[0].cpu_s
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    assert sample_processes({0: process.pid})[0].cpu_s < before - 0.2
    process.communicate(b"\n")


def test_a_process_that_ended_and_was_not_waited_for_does_no_harm():
    process = started(BURN.format(seconds=0.1))
    before = sample_processes({0: process.pid})[0]
    process.kill()
    time.sleep(0.2)
    sample = sample_processes({0: process.pid}).get(0)
    assert sample is None or (sample.cpu_s >= before.cpu_s and sample.resident_bytes == 0)
    process.wait()
