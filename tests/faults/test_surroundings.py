"""Surroundings that a user did not choose: streams, parent, HOME, proxies, limits of the system. Real commands in each."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest

from tests.faults.processes import ROOT, make_proteins
from virnucpro.store.reader import read_embeddings


def command(*arguments):
    return [sys.executable, "-m", "virnucpro", *map(str, arguments)]


def ended(arguments, *, variables=None, without=(), shell=None, cwd=ROOT):
    """Run a command to its end, with *variables* set and those *without* unset; *shell* redirects its streams."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    program = arguments if shell is None else ["/bin/sh", "-c", f'exec "$@" {shell}', "sh", *arguments]
    return subprocess.run(
        program,
        env={**environment, "PYTHONPATH": str(ROOT), **(variables or {})},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def proteins(tmp_path_factory):
    path = tmp_path_factory.mktemp("proteins") / "proteins.fasta"
    make_proteins(path, random.Random(37), 20)
    return path


def embed(fasta, out, *options):
    return command("embed", fasta, "-o", out, "--devices", "cpu", *options)


@pytest.mark.parametrize("shell", [">&-", pytest.param("<&- >&- 2>&-", marks=pytest.mark.slow)])
def test_closed_standard_streams_are_as_if_they_led_nowhere(tmp_path, proteins, shell):
    run = ended(embed(proteins, tmp_path / "out"), shell=shell)
    assert run.returncode == 0, run.stderr
    manifest = json.loads((tmp_path / "out" / "run.json").read_text())
    assert manifest["state"] == "complete"
    assert [rank["attempts"] for rank in manifest["ranks"]] == [1], "a worker that has done its work has not died"
    assert "died" not in run.stderr
    with read_embeddings(tmp_path / "out") as rows:
        assert len(rows) == 20


def test_a_closed_standard_error_hides_the_message_and_not_the_exit_code(tmp_path):
    assert ended(embed(tmp_path / "absent.fasta", tmp_path / "out"), shell="2>&-").returncode == 65
