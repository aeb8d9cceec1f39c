"""A real SLURM: jobs that wait, end too early, fail, are refused; the bytes of a run on threads; no job is left."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.clusters import SlowRun, command, environment_of_commands, rows_done, said, wait_until, worker_process
from tests.conftest import REPOSITORY
from tests.slurm import slurm
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster():
    """A node for two jobs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # the socket in it needs a short path
    try:
        with slurm(folder, cpus=2) as service:
            yield service
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def environment(cluster, tmp_path_factory):
    """Of the commands: dask-jobqueue's settings are those of the guide, as far as this host goes."""
    guide = (REPOSITORY / "deployments" / "clusters" / "slurm.md").read_text()
    (block,) = re.findall(r"```yaml\n(jobqueue:.*?)```", guide, re.DOTALL)
    settings = yaml.safe_load(block)
    settings["jobqueue"]["slurm"] |= {
        "queue": "main",
        "memory": "1GiB",
        "job-cpu": 1,
        "interface": "lo",
        "log-directory": str(cluster.folder / "logs"),
        "shared-temp-directory": str(cluster.folder),
    }
    folder = tmp_path_factory.mktemp("dask")
    (folder / "jobqueue.yaml").write_text(yaml.safe_dump(settings))
    home = tmp_path_factory.mktemp("prefect")
    ours = {name: value for name, value in cluster.environ.items() if name.startswith("SLURM_")}
    return {**environment_of_commands(home), **ours, "DASK_CONFIG": str(folder)}


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """A run that lasts until it is disturbed."""
    return SlowRun.made(tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def expected(slow_run, tmp_path_factory, environment):
    """Return the bytes that the run gives without a cluster."""
    return slow_run.expected(environment, tmp_path_factory.mktemp("threads") / "out")


ON_SLURM = ("--runner", "dask://slurm", "--devices", "cpu")


def test_a_run_waits_for_its_jobs_and_begins_with_the_first_that_runs(cluster, environment, examples_dir, tmp_path):
    proteins = examples_dir / "proteins.fasta"
    layout, plain = RunLayout(tmp_path / "waits" / "out"), RunLayout(tmp_path / "threads" / "out")
    with command(environment, proteins, plain.output_dir, "--devices", "cpu") as run:
        assert run.wait(240) == 0, said(plain.output_dir)
    others = [cluster.occupy(1), cluster.occupy(1)]
    wait_until(lambda: list(cluster.jobs().values()) == ["RUNNING"] * 2, seconds=30)
    with command(environment, proteins, layout.output_dir, *ON_SLURM) as run:
        wait_until(lambda: "waiting for the first job of SLURM: " in said(layout.output_dir), seconds=240)
        assert sorted(cluster.jobs().values()) == ["PENDING", "RUNNING", "RUNNING"]
        cluster.cancel(others[0])
        assert run.wait(240) == 0, said(layout.output_dir)
    assert layout.embeddings.read_bytes() == plain.embeddings.read_bytes()
    # ours have ended, and none waits any more
    wait_until(lambda: list(cluster.jobs()) == [others[1]], seconds=10)
    cluster.cancel(others[1])
    wait_until(lambda: not cluster.jobs(), seconds=30)


def test_a_job_that_ends_before_the_run_is_submitted_again_and_the_bytes_are_the_same(
    cluster, environment, slow_run, tmp_path, expected
):
    layout = RunLayout(tmp_path / "cancelled" / "out")
    with slow_run.on(environment, layout.output_dir, *ON_SLURM, "--workers", "1") as run:
        worker = worker_process(layout, 0)
        wait_until(lambda: rows_done(layout), seconds=240)
        (job,) = cluster.jobs()
        cluster.cancel(job)
        assert run.wait(300) == 0, said(layout.output_dir)
    assert not worker.is_running()
    assert layout.embeddings.read_bytes() == expected
    wait_until(lambda: not cluster.jobs(), seconds=10)


@pytest.mark.long
def test_one_job_may_have_several_workers(cluster, environment, slow_run, tmp_path, expected):
    layout = RunLayout(tmp_path / "one" / "out")
    two = {**environment, "DASK_JOBQUEUE__SLURM__PROCESSES": "2"}
    with slow_run.on(two, layout.output_dir, *ON_SLURM) as run:
        workers = [worker_process(layout, rank) for rank in range(2)]
        assert len(cluster.jobs()) == 1
        assert len({worker.ppid() for worker in workers}) == 2
        assert run.wait(300) == 0, said(layout.output_dir)
    assert layout.embeddings.read_bytes() == expected
    wait_until(lambda: not cluster.jobs(), seconds=10)


def test_ctrl_c_cancels_the_jobs_and_the_run_goes_on_without_slurm(cluster, environment, slow_run, tmp_path, expected):
    layout = RunLayout(tmp_path / "interrupted" / "out")
    with slow_run.on(environment, layout.output_dir, *ON_SLURM) as run:
        wait_until(lambda: rows_done(layout), seconds=240)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, said(layout.output_dir)
    wait_until(lambda: not cluster.jobs(), seconds=10)
    assert not list(cluster.folder.glob(".dask*"))  # no key stays
    assert not layout.embeddings.exists()
    with slow_run.on(environment, layout.output_dir, "--runner", "threads", "--devices", "cpu") as run:
        assert run.wait(240) == 0, said(layout.output_dir)
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"DASK_JOBQUEUE__SLURM__PYTHON": "/no/python"}, "ended before a worker connected: see"),
        ({"DASK_JOBQUEUE__SLURM__QUEUE": "nowhere"}, "SLURM refuses the jobs: sbatch: error: invalid partition"),
    ],
)
def test_jobs_that_cannot_be_are_an_error_of_the_configuration(
    cluster, environment, examples_dir, tmp_path, setting, told
):
    out = tmp_path / "wrong" / "out"
    with command({**environment, **setting}, examples_dir / "proteins.fasta", out, *ON_SLURM) as run:
        assert run.wait(240) == 78, said(out)
    assert told in said(out)
    wait_until(lambda: not cluster.jobs(), seconds=10)
