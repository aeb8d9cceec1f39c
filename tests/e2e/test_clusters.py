"""Real clusters of Ray and Dask on this machine: the bytes of a run on threads, also when a process is killed."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.clusters import (
    SlowRun,
    command,
    dask_scheduler,
    dask_workers,
    environment_of_commands,
    rows_done,
    said,
    wait_until,
    worker_process,
)
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the commands: a Prefect of their own, and Ray's files in a short path."""
    return environment_of_commands(tmp_path_factory.mktemp("prefect"))


@pytest.fixture(scope="module")
def expected(examples_dir, tmp_path_factory, environment):
    """Return the bytes that a run without a cluster gives."""
    folder = tmp_path_factory.mktemp("threads")
    with command(environment, examples_dir / "proteins.fasta", folder / "out", "--devices", "cpu") as run:
        assert run.wait() == 0
    return RunLayout(folder / "out").embeddings.read_bytes()


@pytest.mark.long
def test_ray_gives_the_same_bytes_also_when_the_process_of_a_task_is_killed(
    examples_dir, tmp_path, environment, expected
):
    layout = RunLayout(tmp_path / "ray" / "out")
    began_s = time.monotonic()
    with command(environment, examples_dir / "proteins.fasta", layout.output_dir, "--runner", "ray") as run:
        worker = worker_process(layout, 0)
        wait_until(lambda: rows_done(layout), seconds=120)
        task = worker.parent()
        assert "ray" in task.name()
        task.kill()
        assert run.wait(240) == 0, (tmp_path / "ray" / "stderr").read_text()
    print(f"a run of 400 proteins on Ray, one task killed: {time.monotonic() - began_s:.0f} s")
    assert layout.embeddings.read_bytes() == expected
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.long
def test_a_standing_cluster_of_dask_that_loses_a_worker_gives_the_same_bytes(
    examples_dir, tmp_path, environment, expected
):
    layout = RunLayout(tmp_path / "dask" / "out")
    with ExitStack() as stack:
        scheduler, address = dask_scheduler(stack, tmp_path, environment)
        workers = dask_workers(stack, [environment] * 2, address, tmp_path)
        runner = ("--runner", f"dask://{address}")
        with command(environment, examples_dir / "proteins.fasta", layout.output_dir, *runner) as run:
            worker_process(layout, 0)
            wait_until(lambda: rows_done(layout), seconds=120)
            workers[0].kill()
            assert run.wait(300) == 0, (tmp_path / "dask" / "stderr").read_text()
        assert scheduler.poll() is None
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.long
def test_a_cluster_of_dask_for_the_time_of_a_run_gives_the_same_bytes(examples_dir, tmp_path, environment, expected):
    layout = RunLayout(tmp_path / "dask" / "out")
    with command(environment, examples_dir / "proteins.fasta", layout.output_dir, "--runner", "dask") as run:
        assert run.wait(300) == 0, (tmp_path / "dask" / "stderr").read_text()
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", pytest.param("dask", marks=pytest.mark.long)])
def test_the_shards_of_a_result_are_written_by_the_tasks_of_a_cluster(examples_dir, tmp_path, environment, engine):
    found = {}
    for runner in ("threads", engine):
        layout = RunLayout(tmp_path / runner / "out")
        options = ("--runner", runner, "--devices", "cpu", "--flow", "--result-form", "sharded")
        program = {"program": ("tests.small_shards",)}
        with command(environment, examples_dir / "proteins.fasta", layout.output_dir, *options, **program) as run:
            assert run.wait(300) == 0, said(layout.output_dir)
        found[runner] = {path.name: path.read_bytes() for path in layout.result("", is_partial=False).iterdir()}
    assert len(found["threads"]) == 8 + 1
    assert found[engine] == found["threads"]
    assert "it is done here" not in said(layout.output_dir)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_sequence_that_no_process_of_a_cluster_can_compute_costs_its_own_row(tmp_path, environment, engine):
    slow = SlowRun.made(tmp_path, num_proteins=200)
    sequences = [record.split("\n", 1)[1].replace("\n", "") for record in slow.fasta.read_text().split(">")[1:]]
    # it crashes; ends as by a lack of the host's memory; hangs; does not fit into its device's memory
    poison = dict(zip(sequences[20::40], ["segfault", "sigkill", "hang", "memory_error"], strict=False))
    plan = {"how": "none", "times": 0, "before_batch": -1, "poison": poison, "limits": {"progress_timeout_s": 5.0}}
    Path(slow.program[1]).write_text(json.dumps(plan))
    layout = RunLayout(tmp_path / engine / "out")
    options = ("--runner", engine, "--devices", "cpu", "--allow-partial")
    with slow.on(environment, layout.output_dir, *options) as run:
        assert run.wait(300) == 0, said(layout.output_dir)
    lines = layout.failed_sequences.read_text().splitlines()[1:]
    poisoned = [f"p{number}" for number, sequence in enumerate(sequences) if sequence in poison]  # copies, too
    assert sorted(line.split("\t")[0] for line in lines) == sorted(poisoned)
    assert json.loads(layout.manifest.read_text())["counts"]["rows"] == 200 - len(poisoned)


@pytest.mark.parametrize("name", ["ray://127.0.0.1:1", "dask://127.0.0.1:1"])
@pytest.mark.long
def test_a_cluster_that_is_not_there_is_an_error_of_the_configuration(examples_dir, tmp_path, environment, name):
    out = tmp_path / "absent" / "out"
    with command(environment, examples_dir / "proteins.fasta", out, "--runner", name) as run:
        assert run.wait(200) == 78
    assert "no cluster of" in (tmp_path / "absent" / "stderr").read_text()
    shutil.rmtree(out, ignore_errors=True)
