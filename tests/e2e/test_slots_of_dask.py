"""Workers of Dask that are busy with another run are waited for; one that is refused leaves its work to others."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.clusters import (
    SlowRun,
    dask_scheduler,
    dask_workers,
    environment_of_commands,
    rows_done,
    said,
    wait_until,
)
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

REFUSES_ITS_FIRST_TASK = """
from virnucpro.errors import HostCheckError
from virnucpro.pipeline.hosts import unit_worker
from virnucpro.pipeline.hosts.host_check import check_host as accepts

refused = []

def check_host(run):
    if not refused:
        refused.append(run)
        raise HostCheckError("host-b", run.output_dir, "did not answer: is it mounted?")
    return accepts(run)

unit_worker.check_host = check_host
"""
"""What a worker of Dask does before anything else."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the commands: a Prefect of their own."""
    return environment_of_commands(tmp_path_factory.mktemp("prefect"))


@pytest.fixture
def slow_run(tmp_path):
    return SlowRun.made(tmp_path)


def test_a_run_waits_for_the_worker_that_computes_for_another_run_and_says_so_once(tmp_path, environment, slow_run):
    first, second = (RunLayout(tmp_path / name / "out") for name in ("first", "second"))
    with ExitStack() as stack:
        _, address = dask_scheduler(stack, tmp_path, environment)
        dask_workers(stack, [environment], address, tmp_path)
        runner = ("--runner", f"dask://{address}")
        one = stack.enter_context(slow_run.on(environment, first.output_dir, *runner))
        wait_until(lambda: rows_done(first), seconds=240)
        other = stack.enter_context(slow_run.on(environment, second.output_dir, *runner))
        wait_until(lambda: "waiting for a slot of the cluster" in said(second.output_dir), seconds=120)
        assert one.poll() is None, "the first run was over before the second began to wait"
        assert not rows_done(second)
        assert one.wait(240) == 0, said(first.output_dir)
        assert other.wait(240) == 0, said(second.output_dir)
    assert second.embeddings.read_bytes() == first.embeddings.read_bytes()
    assert said(second.output_dir).count("waiting for a slot of the cluster") == 1


def test_a_host_that_refuses_is_named_and_the_run_goes_on(tmp_path, environment, slow_run):
    layout = RunLayout(tmp_path / "dask" / "out")
    expected = slow_run.expected(environment, tmp_path / "threads" / "out")
    preload = tmp_path / "preload.py"
    preload.write_text(REFUSES_ITS_FIRST_TASK)
    refusing = {**environment, "DASK_DISTRIBUTED__WORKER__PRELOAD": str([str(preload)])}
    with ExitStack() as stack:
        _, address = dask_scheduler(stack, tmp_path, environment)
        dask_workers(stack, [environment, refusing], address, tmp_path)
        with slow_run.on(environment, layout.output_dir, "--runner", f"dask://{address}") as run:
            assert run.wait(300) == 0, said(layout.output_dir)
    assert layout.embeddings.read_bytes() == expected
    assert said(layout.output_dir).count("did not answer: is it mounted?") == 1
