"""Spans of a process: what is recorded, what it costs nobody, and what ends it."""

from __future__ import annotations

import json
import os
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from virnucpro import spans

PROCESS = {"model": "esm2", "rank": 3, "device": "cuda:1", "attempt": 2}
BATCH = SimpleNamespace(positions=(40, 41, 57), num_tokens=900)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "spans"
    spans.disable()


def enable(folder):
    spans.enable(folder, PROCESS, block_of=lambda position: position // 10)


def events(folder):
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(folder):
    """Lane, name, begin and duration in nanoseconds, and details of each span."""
    return [
        (one["cat"], one["name"], round(1000 * one["ts"]), round(1000 * one["dur"]), one.get("args", {}))
        for one in events(folder)
        if one["ph"] == "X"
    ]


def test_nothing_is_recorded_before_it_is_asked_for(folder):
    with spans.span(spans.COMPUTE, BATCH, tokens=3):
        pass
    spans.add(spans.COMPUTE, 1, 2, BATCH)
    assert not spans.is_enabled()
    assert spans.loader_start() is None
    assert not folder.exists()


def test_a_span_tells_lane_times_block_sequences_and_tokens(folder):
    enable(folder)
    before_ns = time.monotonic_ns()
    with spans.span(spans.COMPUTE, BATCH):
        time.sleep(0.01)
    after_ns = time.monotonic_ns()
    lane, name, begin_ns, duration_ns, details = lines(folder)[-1]
    assert (lane, name) == ("compute", "compute")
    assert before_ns <= begin_ns <= begin_ns + duration_ns <= after_ns
    assert duration_ns >= 10_000_000
    assert details == {"block": 4, "sequences": 3, "tokens": 900}


def test_a_span_about_records_looks_at_them_when_it_ends(folder):
    enable(folder)
    records = []
    with spans.span(spans.READING, records, name="reading ahead", bytes=7):
        records.extend(SimpleNamespace(position=position) for position in (25, 26))
    assert lines(folder)[-1][1::3] == ("reading ahead", {"block": 2, "sequences": 2, "bytes": 7})


def test_a_span_about_nothing_readable_has_no_block(folder):
    enable(folder)
    with spans.span(spans.TOKENISING, []):
        pass
    assert lines(folder)[-1][4] == {"sequences": 0}


def test_the_file_says_which_process_it_is_of_and_when_that_began(folder):
    enable(folder)
    (start,) = lines(folder)
    head, *others = events(folder)
    assert (head["ph"], head["name"]) == ("M", "process_name")
    assert head["args"]["name"] == f"esm2, rank 3, cuda:1, attempt 2 (pid {os.getpid()})"
    assert {one["pid"] for one in others} == {head["pid"]}
    assert start[:2] == ("preparing", "start process")
    seconds = time.time() - psutil.Process().create_time()
    assert (time.monotonic_ns() - start[2]) / 1e9 == pytest.approx(seconds, abs=2)  # boot is known to the second


def test_what_fails_is_recorded_with_its_error_and_goes_on_failing(folder):
    enable(folder)
    with pytest.raises(MemoryError), spans.span(spans.COMPUTE, BATCH):
        raise MemoryError
    assert lines(folder)[-1][4]["failed"] == "MemoryError"


def test_recording_ends_when_there_are_too_many_and_says_so(folder, monkeypatch, caplog):
    monkeypatch.setattr(spans, "MOST_SPANS", 5)
    enable(folder)  # its own span is the first
    for _ in range(20):
        with spans.span(spans.COMPUTE, BATCH):
            pass
    written, last = lines(folder), events(folder)[-1]
    assert len(written) == 5
    assert last["args"]["why"] == "5 spans of this process are recorded, the limit"
    assert last["ts"] * 1000 >= written[-1][2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_full_disk_ends_recording_and_nothing_else(folder, caplog):
    enable(folder)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, spans._recorder._descriptor)
    os.close(full)
    for _ in range(3):
        with spans.span(spans.COMPUTE, BATCH):
            pass
    assert "No space left on device" in caplog.text
    assert len(caplog.records) == 1
    assert len(lines(folder)) == 1


def test_a_folder_that_cannot_be_made_records_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    enable(tmp_path / "file" / "spans")
    assert not spans.is_enabled()
    assert "spans.unwritable" in caplog.text


def test_nothing_follows_a_line_that_a_full_disk_took_in_part(folder, monkeypatch, caplog):
    enable(folder)
    (path,), write = folder.iterdir(), os.write
    before = path.read_bytes()
    monkeypatch.setattr(spans.os, "write", lambda descriptor, data: write(descriptor, data[:9]))
    spans.add(spans.COMPUTE, 0, 1)
    monkeypatch.undo()
    spans.add(spans.COMPUTE, 1, 2)  # there is room again
    assert len(path.read_bytes()) == len(before) + 9
    assert "took a line in part" in caplog.text


def test_threads_do_not_tear_each_others_lines(folder):
    enable(folder)

    def work(number):
        for _ in range(300):
            with spans.span(spans.LANES[number], BATCH):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = lines(folder)[1:]
    assert [sum(line[0] == lane for line in written) for lane in spans.LANES[:4]] == [300] * 4


def test_a_loader_process_records_in_a_file_of_its_own(folder):
    enable(folder)
    start = spans.loader_start()
    spans.disable()
    start(1)  # as in a process of its own
    with spans.span(spans.READING, [SimpleNamespace(position=31)]):
        pass
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()]
    (of_loader,) = (one for one in found if "loader" in one[0]["args"]["name"])
    assert of_loader[0]["args"]["name"].startswith("esm2, rank 3, cuda:1, attempt 2, loader 1")
    (span,) = (event for event in of_loader if event["ph"] == "X")
    assert (span["cat"], span["args"]) == ("reading", {"block": 3, "sequences": 1})
    assert len({one[0]["pid"] for one in found}) == 2
