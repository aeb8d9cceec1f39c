"""Logs are read back whole and in the order of time, whatever happens to the files meanwhile."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest

from virnucpro.errors import ResultError
from virnucpro.telemetry import log_reader
from virnucpro.telemetry.log_reader import LogFile, RunLogs


def line(second, event, **values):
    return (
        json.dumps({"event": event, "level": "info", "timestamp": f"2026-11-21T18:00:{second:09.6f}Z", **values}) + "\n"
    )


def events(found):
    return [getattr(item, "entry", item).event for item in found]


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def test_files_are_merged_by_time_and_say_whose_a_line_is(tmp_path):
    for folder, rank, seconds in (("dna", 0, (1, 4)), ("dna", 1, (2,)), ("protein", 0, (3, 5))):
        (tmp_path / folder / "logs").mkdir(parents=True, exist_ok=True)
        text = "".join(line(second, f"e{second}") for second in seconds)
        (tmp_path / folder / "logs" / f"worker_{rank}.log").write_text(text)
    with RunLogs(tmp_path) as found:
        assert found.ranks() == [0, 1]
        assert [(item.entry.event, item.stage, item.rank) for item in found.read_new()] == [
            *(("e1", "dna", 0), ("e2", "dna", 1), ("e3", "protein", 0)),
            *(("e4", "dna", 0), ("e5", "protein", 0)),
        ]
    with RunLogs(tmp_path, rank=1) as found:
        assert events(found.read_new()) == ["e2"]


def test_a_time_on_the_second_is_in_its_place(logs):
    (logs / "worker_0.log").write_text('{"event": "a", "timestamp": "2026-11-21T18:00:00Z"}\n' + line(1, "c"))
    (logs / "worker_1.log").write_text(line(0.5, "b"))
    with RunLogs(logs.parent) as found:
        assert events(found.read_new()) == ["a", "b", "c"]


def test_a_torn_line_is_text_at_the_time_of_the_line_before_it(logs):
    (logs / "worker_0.log").write_text(line(1, "a") + '{"event": "part.wri\n' + line(3, "c") + "no line end")
    (logs / "worker_1.log").write_text(line(2, "b"))
    with RunLogs(logs.parent) as found:
        assert events(found.read_new()) == ["a", '{"event": "part.wri', "b", "c", "no line end"]


@pytest.mark.parametrize("count", [0, 1, 3, 7, 1000])
def test_the_last_lines_are_those_of_all_files_together(logs, monkeypatch, count):
    monkeypatch.setattr(log_reader, "_WINDOW_BYTES", 200)
    for rank in range(3):
        (logs / f"worker_{rank}.log").write_text("".join(line(n / 2, f"e{n}") for n in range(rank, 100, 3)))
    with RunLogs(logs.parent) as found:
        assert events(found.last(count)) == [f"e{number}" for number in range(max(0, 100 - count), 100)]
        with (logs / "worker_1.log").open("a") as file:
            file.write(line(59, "new"))
        assert events(found.read_new()) == ["new"]


def test_the_last_lines_that_are_wanted_are_found_however_far_back_they_are(logs, monkeypatch):
    monkeypatch.setattr(log_reader, "_WINDOW_BYTES", 200)
    lines = [line(n / 10, f"e{n}", level="error" if n in {3, 150} else "info") for n in range(500)]
    (logs / "worker_0.log").write_text("".join(lines))
    with RunLogs(logs.parent, lambda entry: entry.level == "ERROR") as found:
        assert events(found.last(2)) == ["e3", "e150"]
        assert events(found.last(5)) == ["e3", "e150"]


def test_a_line_that_is_being_written_waits_for_its_end(logs):
    path = logs / "worker_0.log"
    whole = line(2, "b")
    path.write_text(line(1, "a") + whole[:20])
    with RunLogs(logs.parent) as found:
        assert events(found.read_new(is_over=False)) == ["a"]
        with path.open("a") as file:
            file.write(whole[20:])
        assert events(found.read_new(is_over=False)) == ["b"]
        assert events(found.read_new()) == []


def test_new_files_cut_files_and_replaced_files_are_noticed(logs):
    path = logs / "worker_0.log"
    with RunLogs(logs.parent) as found:
        assert events(found.read_new(is_over=False)) == []
        path.write_text(line(1, "first") * 3)
        assert events(found.read_new(is_over=False)) == ["first"] * 3
        (logs / "worker_1.log").write_text(line(2, "another"))
        assert events(found.read_new(is_over=False)) == ["another"]
        path.write_text(line(3, "cut"))
        assert events(found.read_new(is_over=False)) == ["cut"]
        with path.open("a") as file:
            file.write(line(4, "last of the old"))
        path.unlink()
        path.write_text(line(5, "replaced") * 9)
        assert events(found.read_new(is_over=False)) == ["last of the old", *["replaced"] * 9]
        path.unlink()
        assert events(found.read_new(is_over=False)) == []
        path.write_text(line(6, "again"))
        assert events(found.read_new(is_over=False)) == ["again"]


def test_an_endless_line_is_cut_and_its_rest_passed_over(logs, monkeypatch):
    monkeypatch.setattr(log_reader, "MAX_LINE_BYTES", 100)
    (logs / "worker_0.log").write_text("x" * 1234 + "\n" + line(1, "after"))
    with RunLogs(logs.parent) as found:
        assert events(found.read_new()) == ["x" * 100, "after"]


def test_a_large_log_is_read_in_little_memory(logs):
    with (logs / "worker_0.log").open("w") as file:
        for number in range(10_000):
            file.write(line(number / 1000, "part.written", part=f"part_{number}", padding="x" * 3000))
    assert (logs / "worker_0.log").stat().st_size > 30e6
    tracemalloc.start()
    with RunLogs(logs.parent) as found:
        assert len(found.last(10)) == 10
    with RunLogs(logs.parent, lambda entry: entry.fields["part"] == "part_9999") as found:
        assert len(list(found.read_new())) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
def test_what_is_no_file_is_refused(logs, what):
    path = logs / "worker_0.log"
    (logs / "other").write_text(line(1, "secret"))
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(logs / "other")}[what]()
    with LogFile(path) as file, pytest.raises(ResultError, match=r"worker_0\.log"):
        list(file.read_new())
