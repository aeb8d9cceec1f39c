"""``virnucpro logs``: what a person gets to see, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.command_line import run
from virnucpro.store.locks.run_lock import RunLock


def line(second, event, level="info", **values):
    return (
        json.dumps({"event": event, "level": level, "timestamp": f"2026-11-21T18:00:{second:09.6f}Z", **values}) + "\n"
    )


@pytest.fixture
def out(tmp_path):
    """The folder of a run with two workers."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "logs" / "worker_0.log").write_text(line(1, "a", device="cpu") + line(3, "c", "warning", device="cpu"))
    (tmp_path / "logs" / "worker_1.log").write_text(line(2, "b", "error", device="cuda:3"))
    return tmp_path


def shown(*arguments):
    ended = run("logs", *arguments)
    assert ended.code == 0, ended
    return ended.out.splitlines()


def test_lines_of_all_workers_are_shown_by_time(out):
    assert shown(out) == [
        "2026-11-21 18:00:01.000Z INFO    rank 0 cpu     a",
        "2026-11-21 18:00:02.000Z ERROR   rank 1 cuda:3  b",
        "2026-11-21 18:00:03.000Z WARNING rank 0 cpu     c",
    ]


def test_they_can_be_narrowed_down(out):
    assert [text[-1] for text in shown(out, "--rank", 0)] == ["a", "c"]
    assert [text[-1] for text in shown(out, "--level", "WARNING")] == ["b", "c"]
    assert [text[-1] for text in shown(out, "--level", "error", "--tail", 5)] == ["b"]
    assert [text[-1] for text in shown(out, "--tail", 2)] == ["b", "c"]
    assert [text[-1] for text in shown(out, "--follow")] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--rank", 7), "there are 0, 1"), (("--level", "LOUD"), "'debug', 'info', 'warning', 'error'")],
)
def test_a_rank_or_level_that_is_none_is_an_error_of_usage(out, arguments, said):
    ended = run("logs", out, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_a_folder_of_no_run_is_refused_and_one_without_logs_says_so(tmp_path):
    assert run("logs", tmp_path / "nowhere").code == 65
    ended = run("logs", tmp_path)
    assert (ended.code, ended.out) == (65, "")
    assert "holds no run: give the output folder of a run" in ended.err
    (tmp_path / "run.json").write_text("{}")
    ended = run("logs", tmp_path, "--rank", 3)
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.endswith("no worker has logged\n")


def test_a_folder_that_cannot_be_looked_into_is_an_error_not_an_empty_log(out):
    ended = run("logs", out / ("x" * 300))
    assert (ended.code, ended.err.splitlines()[1:]) == (65, [])
    assert "File name too long" in ended.err
    (out / "dna").mkdir()
    (out / "dna" / "logs").touch()
    ended = run("logs", out)
    assert (ended.code, ended.out, ended.err) == (65, "", f"virnucpro: {out}/dna/logs: Not a directory\n")


def test_frames_of_an_exception_stand_below_its_line(out):
    frames = [{"filename": "f.py", "lineno": 7, "name": "work"}]
    text = line(4, "worker.failed", "error", exception=[{"exc_type": "KeyError", "exc_value": "'x'", "frames": frames}])
    (out / "logs" / "worker_1.log").write_text(text)
    assert shown(out, "--rank", 1)[0].endswith("""worker.failed exception="KeyError: 'x'\"""")
    assert shown(out, "--rank", 1)[1:] == ["      at f.py:7 in work"]


def test_there_are_colours_only_where_they_are_wanted(out, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert [text.startswith("\x1b[") for text in shown(out)] == [False, True, True]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(shown(out))


def program(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "virnucpro", "logs", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )


def test_follow_shows_what_comes_until_the_run_is_over(out):
    with RunLock(out / ".run.lock", run_id="r"):
        following = program(out, "--follow", "--tail", 1)
        assert following.stdout.readline().endswith(" c\n")
        with (out / "logs" / "worker_1.log").open("a") as file:
            file.write(line(4, "retry"))
        assert following.stdout.readline().endswith(" retry\n")
        (out / "logs" / "worker_2.log").write_text(line(5, "late"))
        assert following.stdout.readline().endswith(" late\n")
        with (out / "logs" / "worker_0.log").open("a") as file:
            file.write(line(6, "last"))
    assert following.communicate(timeout=30) == (
        "2026-11-21 18:00:06.000Z INFO    rank 0         last\n",
        f"no run is active in {out}; for its state: virnucpro status {out}\n",
    )
    assert following.returncode == 0


def test_ctrl_c_ends_it_with_its_own_code_and_without_a_traceback(out):
    with RunLock(out / ".run.lock", run_id="r"):
        following = program(out, "--follow")
        assert following.stdout.readline().endswith(" a\n")
        time.sleep(0.2)
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=30)
    assert (following.returncode, errors) == (130, "")


def test_a_reader_that_has_seen_enough_ends_it_quietly(out):
    (out / "logs" / "worker_0.log").write_text("".join(line(n % 60, f"event.{n}") for n in range(20_000)))
    reading = program(out)
    reading.stdout.readline()
    reading.stdout.close()
    assert (reading.wait(timeout=30), reading.stderr.read()) == (0, "")
    reading.stderr.close()
