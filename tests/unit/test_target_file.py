"""The file that tells Prometheus where a run is: there while its run lives, gone afterwards."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import pytest

from tests.fakes import another_user
from virnucpro.errors import OutputError
from virnucpro.telemetry.metrics.exposition import TargetFile

HOST = socket.gethostname()
RUN = (
    "import sys, pathlib\n"
    "from virnucpro.telemetry.metrics.exposition import TargetFile\n"
    'TargetFile(pathlib.Path(sys.argv[1]), sys.argv[2], "127.0.0.1:1234").start()\n'
    "print(flush=True)\n"
    "input()\n"
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_elsewhere(folder, run_id):
    """Another process that has its target file there."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, folder, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    return process


def test_it_says_where_the_run_is_and_goes_with_it(tmp_path):
    folder = tmp_path / "new" / "targets"
    target = TargetFile(folder, "0123456789ab", "127.0.0.1:9100")
    target.stop()
    target.start()
    assert names(folder) == [f"virnucpro-{HOST}-0123456789ab.json"]
    assert target.path.parent == folder
    assert json.loads(target.path.read_bytes()) == [
        {"targets": ["127.0.0.1:9100"], "labels": {"run_id": "0123456789ab"}}
    ]
    target.stop()
    target.stop()
    assert names(folder) == []


def test_what_a_killed_run_left_goes_at_the_next_start_and_a_living_run_stays(tmp_path):
    killed, living = run_elsewhere(tmp_path, "dead00000000"), run_elsewhere(tmp_path, "live00000000")
    mine = TargetFile(tmp_path, "mine00000000", "127.0.0.1:1")
    mine.start()
    assert len(names(tmp_path)) == 3
    mine.stop()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert names(tmp_path) == [f"virnucpro-{HOST}-dead00000000.json", f"virnucpro-{HOST}-live00000000.json"]
    mine.start()
    assert names(tmp_path) == [f"virnucpro-{HOST}-live00000000.json", f"virnucpro-{HOST}-mine00000000.json"]
    mine.stop()
    living.communicate(b"\n")


def test_files_of_other_hosts_and_of_other_programs_are_left_alone(tmp_path):
    others = [
        f"virnucpro-{HOST}x-0123456789ab.json",
        f"virnucpro-{HOST}-b-0123456789ab.json",  # a host whose name goes on
        "virnucpro-elsewhere-0123456789ab.json",
        f"virnucpro-{HOST}-0123456789ab.yml",
        "node.json",
    ]
    for name in others:
        (tmp_path / name).write_text("[]")
    (tmp_path / f"virnucpro-{HOST}-ffffffffffff.json").symlink_to(tmp_path / "node.json")
    target = TargetFile(tmp_path, "0123456789ab", "127.0.0.1:1")
    target.start()
    target.stop()
    assert names(tmp_path) == sorted([*others, f"virnucpro-{HOST}-ffffffffffff.json"])


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    tmp_path.chmod(0o755)
    folder = tmp_path / "targets"
    folder.mkdir(mode=0o555)
    target = TargetFile(folder, "0123456789ab", "127.0.0.1:1")
    with another_user(), pytest.raises(OutputError, match="targets"):
        target.start()
    target.stop()
    assert names(folder) == []


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "targets").write_text("")
    with pytest.raises(OutputError, match="targets"):
        TargetFile(tmp_path / "targets", "0123456789ab", "127.0.0.1:1").start()
