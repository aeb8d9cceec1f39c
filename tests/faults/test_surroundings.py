"""Surroundings that a user did not choose: streams, parent, HOME, proxies, limits of the system; real commands."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec

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


def without_prefect():
    return [name for name in os.environ if name.startswith("PREFECT_") or name.lower().endswith("_proxy")]


def test_a_user_without_a_home_is_told_to_set_prefects_folder(tmp_path, proteins):
    (tmp_path / "sitecustomize.py").write_text("import pwd\npwd.getpwuid = {}.__getitem__\n")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    flow = embed(proteins, tmp_path / "out", "--flow")
    run = ended(flow, variables=variables, without=["HOME", *without_prefect()])
    assert run.returncode == 78, run.stderr
    assert "set PREFECT_HOME to a folder that can be written" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"HOME": "/dev/null"}, "/dev/null/.prefect, which cannot be written (Not a directory): set PREFECT_HOME to a"),
        ({"PREFECT_API_URL": "http://127.0.0.1:9/api"}, "Failed to reach API at http://127.0.0.1:9/api/: start the"),
        (
            {"PREFECT_API_URL": "http://127.0.0.1:9/api", "ALL_PROXY": "socks5://127.0.0.1:9"},
            "'socksio' package is not installed",
        ),
    ],
    ids=["no home", "no server", "no way to the server"],
)
def test_a_flow_that_cannot_reach_a_server_ends_in_a_sentence(tmp_path, proteins, variables, sentence):
    pytest.importorskip("prefect")
    if "ALL_PROXY" in variables and find_spec("socksio"):
        pytest.skip("socksio is installed")
    variables = {"HOME": str(tmp_path), **variables}
    run = ended(embed(proteins, tmp_path / "out", "--flow"), variables=variables, without=without_prefect())
    assert run.returncode == 78, run.stderr
    assert sentence in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_temporary_server_is_reached_past_all_proxies_without_a_home(tmp_path, proteins):
    pytest.importorskip("prefect")
    (tmp_path / "sitecustomize.py").write_text("import pwd\npwd.getpwuid = {}.__getitem__\n")
    dead = "127.0.0.1:9"
    variables = {"http_proxy": f"http://{dead}", "HTTPS_PROXY": f"socks4://{dead}", "ALL_PROXY": f"socks5://{dead}"}
    variables |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = ended(embed(proteins, tmp_path / "out", "--flow"), variables=variables, without=["HOME", *without_prefect()])
    assert run.returncode == 0, run.stderr
    assert "20 of 20 sequences" in run.stdout
