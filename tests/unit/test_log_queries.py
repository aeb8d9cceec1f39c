"""The commands of docs/monitoring.md show every line of the workers' logs, by time, whatever the lines hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest
import structlog

from tests.log_queries import queries, shown
from virnucpro.telemetry.worker_logging import log_end_of_process, setup_worker_logging

pytestmark = pytest.mark.usefixtures("logging_as_before")
TORN = '{"event": "part.wri'
HOSTILE = "an id\x1b[2J\x9b31m\x7f\u2028\u202e\n" + '"level": "info"'


@pytest.fixture
def out(tmp_path):
    """Logs of two workers: worker 0 was killed while it wrote, worker 1 was restarted."""
    for rank, event in ((0, "a"), (1, "b"), (0, "c")):
        path = setup_worker_logging(rank, tmp_path / "logs", run_id="r", device="cpu", host="h", attempt=1)
        structlog.get_logger("virnucpro.test").info(event)
    log_end_of_process(tmp_path / "logs" / "worker_1.log", level="warning", bound={"rank": 1}, reason="killed")
    with path.open("a") as file:
        file.write(TORN)
    setup_worker_logging(1, tmp_path / "logs", run_id="r", device="cpu", host="h", attempt=2)
    structlog.get_logger("virnucpro.test").error("d", reason=HOSTILE)
    return tmp_path


def without_time(command):
    return [tuple(json.loads(line)[1:]) for line in shown(command)]


def test_all_lines_are_shown_by_time_after_one_that_is_torn(out):
    torn, *lines = without_time(queries(out)[1])
    assert torn == (None, None, TORN)
    assert lines == [
        *((0, "info", "a"), (1, "info", "b"), (0, "info", "c")),
        *((1, "warning", "worker.ended"), (1, "error", "d")),
    ]


def test_warnings_and_errors_are_shown_without_the_rest(out):
    torn, *lines = without_time(queries(out)[0])
    assert torn == (None, TORN, None)
    assert lines == [(1, "worker.ended", "killed"), (1, "d", HOSTILE)]


def test_nothing_that_is_shown_can_act_on_a_terminal(out):
    for command in queries(out)[:3]:
        assert all(line.isascii() and line.isprintable() for line in shown(command))


def test_the_last_line_of_a_worker_is_shown(out):
    setup_worker_logging(1, out / "logs", attempt=3)
    structlog.get_logger("virnucpro.test").info("e", rows=7)
    _, _, last, _ = queries(out)
    (line,) = shown(last)
    found = json.loads(line)
    assert (found["event"], found["attempt"], found["rows"]) == ("e", 3, 7)


def test_a_run_is_followed_and_a_file_that_appears_later_too(out):
    (out / "logs" / "worker_1.log").rename(out / "later")
    command = ["stdbuf", "-oL", "bash", "-c", queries(out)[3]]  # buffered as on a terminal
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as following:
        try:
            assert [json.loads(following.stdout.readline())["event"] for _ in "ac"] == ["a", "c"]
            with (out / "logs" / "worker_0.log").open("a") as file:
                file.write("ten\n")
            assert json.loads(following.stdout.readline()) == f"{TORN}ten"
            (out / "later").rename(out / "logs" / "worker_1.log")
            assert [json.loads(following.stdout.readline())["event"] for _ in "bw"] == ["b", "worker.ended"]
        finally:
            os.killpg(following.pid, signal.SIGKILL)
