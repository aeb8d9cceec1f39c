"""The report of a failed process: what it was doing, why it ended and the end of its own log, safe to print."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest
import structlog

from tests.snapshots import rank_snapshot
from virnucpro.telemetry.failure_report import TAIL_LINES, failure_report
from virnucpro.telemetry.snapshot import Batch
from virnucpro.telemetry.worker_logging import setup_worker_logging

pytestmark = pytest.mark.usefixtures("logging_as_before")


def report(tmp_path, **changes):
    given = {
        "failure": "application_error",
        "reason": "RuntimeError: went wrong",
        "log_path": tmp_path / "worker_1.log",
        "exit_code": 70,
        "starts_again": True,
        "run_id": "r",
    }
    batch = Batch(block=17, sequences=1200, tokens=16384)
    rank = rank_snapshot(rank=1, device="cuda:3", attempts=2, last_batch=changes.pop("last_batch", batch))
    return failure_report(rank, **{**given, **changes})


def process(tmp_path, attempt, *, run_id="r", fails=False, lines=1):
    """What one process leaves in its log."""
    setup_worker_logging(1, tmp_path, run_id=run_id, attempt=attempt, device="cuda:3")
    log = structlog.get_logger("virnucpro.test")
    for number in range(lines):
        log.info("part.written", part=f"of-{run_id}-{attempt}-{number}")
    if fails:
        try:
            try:
                {}["a key\nrank 0 on cpu failed"]
            except KeyError as error:
                raise RuntimeError("went wrong") from error
        except RuntimeError:
            log.exception("worker.failed", failure="application_error")


def test_it_tells_device_attempt_batch_exception_and_the_end_of_the_log(tmp_path):
    process(tmp_path, 1, lines=3)
    process(tmp_path, 2, lines=2, fails=True)
    lines = report(tmp_path).split("\n")
    assert lines[:3] == [
        "rank 1 on cuda:3 failed in attempt 2 (application_error): RuntimeError: went wrong",
        "  exit code 70; another process follows",
        "  last batch: block 17, 1,200 sequences, 16,384 tokens",
    ]
    assert lines[3] == "  exception: RuntimeError: went wrong"
    assert Path(__file__).name in lines[4]
    assert lines[5].startswith("    caused by KeyError: 'a key")
    (end,) = [number for number, line in enumerate(lines) if line == f"  end of {tmp_path / 'worker_1.log'}:"]
    assert [line.split()[3] for line in lines[end + 1 :]] == ["part.written", "part.written", "worker.failed"]
    assert "of-r-1-" not in "\n".join(lines)


def test_it_stays_short_and_printable_whatever_the_process_wrote(tmp_path):
    process(tmp_path, 2, lines=100)
    hostile = "\x1b[2J\nrank 0 on cpu failed\r\u2028\x85" + "x" * 5000
    structlog.get_logger("virnucpro.test").error("sequence.failed", sequence_id=hostile)
    text = report(tmp_path, reason=hostile)
    lines = text.split("\n")
    assert len(lines) == 4 + TAIL_LINES
    assert all(line.isprintable() and len(line) <= 400 for line in lines)
    assert sum(line.startswith("rank ") for line in lines) == 1


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    process(tmp_path, 2)
    path = tmp_path / "worker_1.log"
    line = path.read_text()
    path.write_text(line.replace("of-r-2-0", "of-r-2-0" + "x" * 3000) * 10_000 + line)
    assert path.stat().st_size > 30e6
    tracemalloc.start()
    lines = report(tmp_path).split("\n")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6
    assert len(lines) == 4 + TAIL_LINES
    assert lines[-1].endswith(" part.written part=of-r-2-0")


@pytest.mark.parametrize("attempt", [1, 3])
def test_lines_of_other_processes_are_not_shown(tmp_path, attempt):
    process(tmp_path, attempt, fails=True)
    text = report(tmp_path)
    assert text.split("\n")[3:] == [f"  the log holds nothing of it: {tmp_path / 'worker_1.log'}"]


def test_lines_of_an_earlier_run_are_not_shown(tmp_path):
    process(tmp_path, 2, run_id="before", fails=True)
    assert "of-before-2" in report(tmp_path, run_id="before")
    assert "of-before-2" not in report(tmp_path, run_id="now")


def test_a_torn_line_at_the_end_is_its_own(tmp_path):
    process(tmp_path, 2)
    with (tmp_path / "worker_1.log").open("a") as file:
        file.write('{"event": "part.wri')
    *_, before, torn = report(tmp_path).split("\n")
    assert torn.split() == [*before.split()[:2], "|", '{"event":', '"part.wri']


def test_a_process_that_never_came_to_anything(tmp_path):
    text = report(tmp_path, exit_code=None, starts_again=False, last_batch=None, failure="died", reason="no process")
    assert text.split("\n")[1:] == [
        "  no process; it is not started again",
        "  last batch: none, it had not begun to compute",
        f"  the log holds nothing of it: {tmp_path / 'worker_1.log'}",
    ]


@pytest.mark.parametrize(("code", "told"), [(-9, "ended by SIGKILL"), (-11, "ended by SIGSEGV"), (-77, "signal 77")])
def test_signals_have_their_names(tmp_path, code, told):
    assert told in report(tmp_path, exit_code=code)


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_what_is_no_file_is_reported_and_not_read(tmp_path, what):
    path = tmp_path / "worker_1.log"
    process(tmp_path, 2)
    path.rename(tmp_path / "other")
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("other")}[what]()
    last = report(tmp_path).split("\n")[-1]
    assert last.startswith(f"  the log holds nothing of it: {path}: ")
