"""The scheduler of a cluster dies in the middle of a run: the command says so and ends, and its folder continues."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import pytest

from tests.clusters import (
    SlowRun,
    dask_scheduler,
    dask_workers,
    environment_of_commands,
    ray_head_and_node,
    rows_done,
    said,
    wait_until,
    worker_process,
)
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

ENDED_WITHIN_S = {"dask": 30.0, "ray": 90.0}
"""Seconds after its scheduler within which a command has ended, and no worker computes any more; Ray's client tries for
half a minute to connect again, its nodes for a minute."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the commands: a Prefect of their own, and a token for Ray."""
    environment = environment_of_commands(tmp_path_factory.mktemp("prefect"))
    return {**environment, "RAY_AUTH_TOKEN": "a-token-for-tests-only-of-some-length"}


def cluster_of(engine, stack, folder, environment):
    """Start a cluster with two slots that stands; return what kills its scheduler, and its runner's name."""
    if engine == "ray":
        head, address = ray_head_and_node(stack, folder, environment, slots=2)
        return head.kill, f"ray://{address}"
    scheduler, address = dask_scheduler(stack, folder, environment)
    dask_workers(stack, [environment] * 2, address, folder)
    return scheduler.kill, f"dask://{address}"


@pytest.mark.parametrize("engine", ["dask", pytest.param("ray", marks=pytest.mark.long)])
def test_when_the_scheduler_dies_the_run_ends_and_the_same_command_continues_it(engine, tmp_path, environment):
    slow_run, layout = SlowRun.made(tmp_path), RunLayout(tmp_path / engine / "out")
    expected = slow_run.expected(environment, tmp_path / "threads" / "out")
    with ExitStack() as stack:
        kill, runner = cluster_of(engine, stack, tmp_path, environment)
        with slow_run.on(environment, layout.output_dir, "--runner", runner) as run:
            workers = [worker_process(layout, rank) for rank in range(2)]
            wait_until(lambda: rows_done(layout), seconds=240)
            kill()
            killed_s = time.monotonic()
            assert run.wait(240) == 70, said(layout.output_dir)
            ended_s = time.monotonic() - killed_s
        wait_until(lambda: not any(worker.is_running() for worker in workers), seconds=60)
        idle_s = time.monotonic() - killed_s
    print(f"{engine}: after its scheduler the command lived {ended_s:.1f} s, the last worker {idle_s:.1f} s")
    assert max(ended_s, idle_s) < ENDED_WITHIN_S[engine]
    assert f"the scheduler of {engine} was lost" in said(layout.output_dir)
    assert "Traceback" not in said(layout.output_dir)
    with slow_run.on(environment, layout.output_dir, "--runner", "dask", "--devices", "cpu") as run:
        assert run.wait(240) == 0, said(layout.output_dir)
    assert layout.embeddings.read_bytes() == expected
    manifest = json.loads(layout.manifest.read_text())
    computed = sum(rank["sequences"] for rank in manifest["ranks"])
    assert computed < manifest["counts"]["rows"] - manifest["counts"]["copies"], "what was durable was computed again"
