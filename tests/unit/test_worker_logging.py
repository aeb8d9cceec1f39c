"""A worker's log file: JSON lines that nothing from the input can forge, from every library."""

from __future__ import annotations

import json
import logging
import os
import warnings
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virnucpro.pipeline.work.worker_process import MAX_MESSAGE_BYTES
from virnucpro.telemetry.worker_logging import HANDLER_NAME, MAX_REPORTED, setup_worker_logging

pytestmark = pytest.mark.usefixtures("logging_as_before")


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_line_is_json_bound_with_rank_and_what_else_was_given(tmp_path):
    path = setup_worker_logging(3, tmp_path / "logs", run_id="abc", device="cpu")
    assert path == tmp_path / "logs" / "worker_3.log"
    structlog.get_logger("virnucpro.test").info("part.written", part="p.h5", blocks=7)
    (line,) = lines_of(path)
    timestamp = line.pop("timestamp")
    assert timestamp.endswith("Z")
    assert line == {
        "event": "part.written",
        "part": "p.h5",
        "blocks": 7,
        "rank": 3,
        "run_id": "abc",
        "device": "cpu",
        "level": "info",
    }


FORGERY = '{"event": "part.written", "rank": 0}'


@pytest.mark.parametrize(
    "name", [f"id\n{FORGERY}", f"id\r\n{FORGERY}\r", "\x1b[2J\x1b[31mred", "a\u2028b\x85c\x00", '"}']
)
def test_an_id_cannot_forge_a_line_or_reach_the_terminal(tmp_path, name):
    path = setup_worker_logging(1, tmp_path)
    structlog.get_logger().warning("sequence.failed", sequence_id=name)
    logging.getLogger("library").warning("about %s", name)
    first, second = lines_of(path)
    assert (first["event"], first["sequence_id"], first["rank"]) == ("sequence.failed", name, 1)
    assert second["event"] == f"about {name}"
    raw = path.read_bytes()
    assert raw.count(b"\n") == 2
    assert not set(raw) & (set(range(32)) - {10})


@given(st.text())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back_from_its_one_line(tmp_path_factory, text):
    path = setup_worker_logging(0, tmp_path_factory.mktemp("logs"))
    structlog.get_logger().info("event", value=text)
    (line,) = lines_of(path)
    assert line["value"] == text
    assert path.read_bytes().isascii()


def test_lines_of_other_libraries_and_warnings_land_in_the_same_form(tmp_path):
    path = setup_worker_logging(2, tmp_path, run_id="abc")
    logging.getLogger("library.something").error("went %s", "wrong")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("this is old", DeprecationWarning, stacklevel=1)
    foreign, warning = lines_of(path)
    assert (foreign["event"], foreign["logger"], foreign["level"]) == ("went wrong", "library.something", "error")
    assert (foreign["rank"], foreign["run_id"]) == (2, "abc")
    assert "this is old" in warning["event"]
    assert (warning["logger"], warning["level"]) == ("py.warnings", "warning")


def test_lines_of_torch_land_in_the_same_file(tmp_path):
    pytest.importorskip("torch")
    path = setup_worker_logging(2, tmp_path)
    logging.getLogger("torch.something").error("went wrong")
    assert [line["event"] for line in lines_of(path)] == ["went wrong"]


def test_an_exception_is_one_line_with_its_frames_but_without_local_values(tmp_path):
    path = setup_worker_logging(0, tmp_path)
    secret = "in a local variable"
    try:
        {}["id\nforged", len(secret)]
    except KeyError:
        structlog.get_logger().exception("worker.failed")
    (line,) = lines_of(path)
    assert line["event"] == "worker.failed"
    assert line["exception"][0]["exc_type"] == "KeyError"
    assert line["exception"][0]["frames"][-1]["filename"].endswith("test_worker_logging.py")
    assert "local variable" not in path.read_text()


def test_a_retry_appends_and_each_line_is_written_once(tmp_path):
    setup_worker_logging(0, tmp_path, attempt=1)
    structlog.get_logger().info("first")
    path = setup_worker_logging(0, tmp_path, attempt=2)
    structlog.get_logger().info("second")
    assert [(line["event"], line["attempt"]) for line in lines_of(path)] == [("first", 1), ("second", 2)]


def test_another_worker_in_the_same_process_writes_to_its_own_file_only(tmp_path):
    first = setup_worker_logging(0, tmp_path, only_here=1)
    second = setup_worker_logging(1, tmp_path)
    structlog.get_logger().info("event")
    assert lines_of(first) == []
    (line,) = lines_of(second)
    assert line["rank"] == 1
    assert "only_here" not in line


def test_less_severe_lines_than_the_level_are_left_out(tmp_path):
    path = setup_worker_logging(0, tmp_path, level="WARNING")
    structlog.get_logger().info("quiet")
    logging.getLogger("library").info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines_of(path)] == ["loud"]


def test_a_folder_that_cannot_be_made_is_told_and_what_matters_goes_to_standard_error(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    assert setup_worker_logging(0, tmp_path / "file") == tmp_path / "file" / "worker_0.log"
    structlog.get_logger("virnucpro.test").info("quiet")
    structlog.get_logger("virnucpro.test").error("loud")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines] == ["log.unwritable", "loud"]
    assert lines[0]["reason"] == "File exists"


def test_a_log_is_never_written_through_a_link(tmp_path, capfd):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "worker_0.log").symlink_to(tmp_path / "precious")
    setup_worker_logging(0, tmp_path)
    structlog.get_logger("virnucpro.test").error("loud")
    assert (tmp_path / "precious").read_text() == "precious"
    assert "log.unwritable" in capfd.readouterr().err


def test_a_log_whose_disk_is_full_says_so_once(tmp_path, capfd):
    path = setup_worker_logging(0, tmp_path)
    (handler,) = [item for item in logging.getLogger().handlers if item.get_name() == HANDLER_NAME]
    kept = os.dup(handler.stream.fileno())
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), handler.stream.fileno())
    for _ in range(3):
        structlog.get_logger("virnucpro.test").error("lost")
    os.dup2(kept, handler.stream.fileno())
    os.close(kept)
    said = capfd.readouterr().err
    assert said.count(f"lines of {path} are lost: [Errno 28] No space left on device") == 1
    assert "Traceback" not in said


class Told(list):
    """What the parent is told, as it comes out of the pipe."""

    def put(self, message):
        data = json.dumps(message, ensure_ascii=False).encode("utf-8", "backslashreplace")
        assert len(data) <= MAX_MESSAGE_BYTES
        self.append(json.loads(data))


def test_warnings_and_errors_are_told_to_the_parent_without_what_it_knows(tmp_path):
    told = Told()
    setup_worker_logging(1, tmp_path, reports=told, run_id="r", device="cuda:3", attempt=2)
    log = structlog.get_logger("virnucpro.test")
    log.info("part.written", part="p.h5")
    log.warning("block.resplit", block=3, tokens=64)
    logging.getLogger("library").error("went %s", "wrong")
    try:
        {}["no\nluck"]
    except KeyError:
        log.exception("worker.failed", failure="died")
    assert told == [
        {"kind": "log", "level": "warning", "event": "block.resplit", "fields": {"block": 3, "tokens": 64}},
        {"kind": "log", "level": "error", "event": "went wrong", "fields": {"logger": "library"}},
        {
            "kind": "log",
            "level": "error",
            "event": "worker.failed",
            "fields": {"failure": "died", "exception": "KeyError: 'no\\nluck'"},
        },
    ]


def test_a_flood_of_warnings_is_told_up_to_a_number_and_that_there_are_more(tmp_path):
    told = Told()
    path = setup_worker_logging(1, tmp_path, reports=told)
    for number in range(MAX_REPORTED + 20):
        structlog.get_logger("virnucpro.test").warning("again", number=number)
    assert [message["event"] for message in told] == ["again"] * MAX_REPORTED + ["log.more"]
    assert len(lines_of(path)) == MAX_REPORTED + 20


@given(st.lists(st.text(alphabet=st.sampled_from("a\x00\x1b\n\u2028é\ud800\U0001f9ec"), max_size=3000), max_size=40))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_told_always_fits_the_pipe(tmp_path_factory, texts):
    told = Told()
    setup_worker_logging(1, tmp_path_factory.mktemp("logs"), reports=told)
    structlog.get_logger().warning("event" * 1000, **{f"value_{number}": text for number, text in enumerate(texts)})
    (message,) = told
    assert message["event"].startswith("event")


def test_a_parent_that_has_gone_harms_nobody(tmp_path, capfd):
    class Gone:
        def put(self, message):
            raise BrokenPipeError

    path = setup_worker_logging(1, tmp_path, reports=Gone())
    structlog.get_logger("virnucpro.test").error("loud")
    structlog.get_logger("virnucpro.test").error("afterwards", value=object)
    assert [line["event"] for line in lines_of(path)] == ["loud", "afterwards"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_line_that_a_killed_process_left_unfinished_does_not_swallow_the_next(tmp_path):
    path = setup_worker_logging(0, tmp_path)
    path.write_text('{"event": "part.wri')
    setup_worker_logging(0, tmp_path)
    structlog.get_logger("virnucpro.test").info("worker.started")
    torn, whole = path.read_text().splitlines()
    assert torn == '{"event": "part.wri'
    assert json.loads(whole)["event"] == "worker.started"
