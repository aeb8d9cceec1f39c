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


IN_A_POOL = """
import multiprocessing, sys, virnucpro
from virnucpro.errors import ConfigurationError

def embed(fasta, out):
    try:
        return len(virnucpro.embed_fasta(fasta, out))
    except ConfigurationError as error:
        return f"{int(error.exit_code)} {error}"

if __name__ == "__main__":
    with multiprocessing.Pool(1) as pool:
        print(pool.apply(embed, sys.argv[1:]))
"""


def test_a_worker_of_a_pool_is_told_that_it_cannot_start_workers(tmp_path, proteins):
    (tmp_path / "pool.py").write_text(IN_A_POOL)
    run = ended([sys.executable, str(tmp_path / "pool.py"), str(proteins), str(tmp_path / "out")])
    assert run.stdout.startswith("78 a daemonic process, "), run.stdout + run.stderr
    assert "ProcessPoolExecutor" in run.stdout
    assert "Traceback" not in run.stderr
    assert not list((tmp_path / "out").glob("shard_*.h5"))


@pytest.mark.parametrize(("stem_bytes", "code"), [(245, 65), (230, 0)])
def test_names_of_inputs_are_refused_only_where_an_output_of_that_name_would_be_too_long(tmp_path, stem_bytes, code):
    contigs = tmp_path / ("n" * stem_bytes + ".fa")
    letters = random.Random(1).choices("ACGT", k=600)
    contigs.write_text(f">c\n{''.join(letters)}\n")
    run = ended(command("predict", contigs, "-o", tmp_path / "out", "--cascade", "off", "--devices", "cpu"))
    assert run.returncode == code, run.stderr
    if code:
        assert "their names would be too long: shorten its name by 15 bytes" in run.stderr
        assert not (tmp_path / "out" / "run.json").exists(), "nothing was computed"


@pytest.mark.may_skip
@pytest.mark.parametrize("options", ["ro,size=4k", "size=4k"])
def test_loader_processes_without_shared_memory_name_it(tmp_path, proteins, options):
    unshare = ["unshare", "-m", "/bin/sh", "-c", f'mount -t tmpfs -o {options} none /dev/shm && exec "$@"', "sh"]
    if ended([*unshare, "true"]).returncode:
        pytest.skip("needs a mount namespace of its own: be root")
    run = ended([*unshare, *embed(proteins, tmp_path / "out", "--loader-processes", "2")])
    assert run.returncode == 78, run.stderr
    # Python 3.13 adds a warning of its own about what it cleaned up
    said = next(line for line in reversed(run.stderr.splitlines()) if line.startswith("virnucpro: "))
    assert "/dev/shm" in said
    assert "--loader-processes 0" in said
