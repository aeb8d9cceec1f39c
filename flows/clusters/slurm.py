"""
Dask workers as SLURM jobs, through dask-jobqueue, whose configuration describes a job.

dask-jobqueue submits jobs as there is work, again where one ends before it, and cancels them at the end. This module
adds the reason why nothing happens: SLURM refuses the jobs, they wait, or they end before a worker has connected.
"""

import importlib
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from virnucpro.errors import ConfigurationError, printable

PROGRAMS = ("sbatch", "squeue", "scancel")
LOOK_S = 15.0
"""Seconds between two queries of the queue, which load the cluster's controller."""
FAILURES = 10
"""Workers that a unit may lose to time limits and dead hosts; Dask's default is 3."""
UNIT = "10m"
_SQUEUE_S = 20.0
"""Seconds to wait for squeue; an absent controller is no reason to give up."""


@contextmanager
def slurm_cluster(workers: int) -> Iterator[Any]:
    """
    Yield a cluster of dask-jobqueue that starts at least one job, and more while there is work for *workers*.

    Each worker has one thread, so takes one unit, and may start processes. Scheduler and workers use TLS with
    certificates made for this run, so no other user can send them work.
    """
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        raise ConfigurationError(f"no SLURM on this host: {', '.join(absent)} not found; submit from one that has it")
    jobqueue, dask = importlib.import_module("dask_jobqueue"), importlib.import_module("dask")
    settings = dask.config.get("jobqueue.slurm")
    if settings["memory"] is None:
        raise ConfigurationError(
            "dask-jobqueue has no settings for SLURM: write what a job is to ~/.config/dask/jobqueue.yaml, "
            "as deployments/clusters/slurm.md shows"
        )
    dask.config.set(
        {
            "distributed.scheduler.allowed-failures": FAILURES,
            # of a unit, before the first is done: without it Dask takes a second, and asks for one job
            "distributed.scheduler.default-task-durations": {"compute_unit": UNIT},
        }
    )
    processes = settings["processes"] or 1
    cluster = jobqueue.SLURMCluster(
        n_workers=0,
        processes=processes,
        cores=processes,
        job_cpu=settings["job-cpu"] or settings["cores"] or processes,
        python=f"exec {settings['python'] or sys.executable}",  # the worker is what SLURM ends with the job
        nanny=processes > 1,  # needed for several workers in a job
        job_script_prologue=[
            *settings["job-script-prologue"],
            "export DASK_DISTRIBUTED__WORKER__DAEMON=False",
            "export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False",
        ],
        scheduler_options={"dashboard_address": "127.0.0.1:0", **settings["scheduler-options"]},
        security=True,
        shared_temp_directory=settings["shared-temp-directory"] or str(Path.cwd()),
    )
    _submit_the_first(cluster)
    cluster.adapt(minimum_jobs=1, maximum_jobs=-(-workers // processes), target_duration="60s", wait_count=30)
    try:
        yield cluster
    finally:
        cluster.close()
        for name in ("ca_file", "cert", "key"):  # temporary files, left behind by a process that ends at once
            if (file := getattr(cluster, f"_job_{name}", None)) is not None:
                file.close()


def _submit_the_first(cluster: Any) -> None:
    """Submit one job ourselves: an adaptive cluster does not report why SLURM refuses it."""

    async def submitted() -> None:
        await cluster

    cluster.worker_spec.update(cluster.new_worker_spec())
    try:
        cluster.sync(submitted)
    except (RuntimeError, OSError, ValueError) as error:
        reasons = [line for line in str(error).splitlines() if line.startswith("sbatch: ")] or [str(error)]
        for job in cluster.workers.values():  # it has no number to be cancelled by
            job.status = importlib.import_module("distributed.core").Status.failed
        cluster.close()
        raise ConfigurationError(f"SLURM refuses the jobs: {printable(' '.join(reasons))}") from error


def wait_for_worker(cluster: Any) -> None:
    """Wait until a worker has connected, logging SLURM's state; ConfigurationError where no job can start one."""
    logged, queued_before = "", False
    looked_s = -LOOK_S
    while not cluster.scheduler_info["workers"]:
        numbers = {str(job.job_id) for job in cluster.workers.values() if job.job_id is not None}
        is_due = bool(numbers) and time.monotonic() - looked_s > LOOK_S
        looked_s = time.monotonic() if is_due else looked_s
        if is_due and (queue := _queue()) is not None:
            states = Counter(state for number, state in queue.items() if number in numbers)
            if queued_before and not states:
                logs = importlib.import_module("dask").config.get("jobqueue.slurm.log-directory") or "."
                where = ", ".join(f"{logs}/*{number}*" for number in sorted(numbers))
                raise ConfigurationError(f"the jobs of SLURM ended before a worker connected: see {where}")
            queued_before = True
            summary = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            if summary != logged:
                get_run_logger().warning("waiting for the first job of SLURM: %s", summary)
                logged = summary
        time.sleep(1)


def _queue() -> dict[str, str] | None:
    """Return number -> state and reason of this user's waiting and running jobs; None when SLURM does not answer."""
    command = ["squeue", "--noheader", "--me", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SQUEUE_S)
    except (subprocess.SubprocessError, OSError) as error:
        get_run_logger().warning("SLURM does not report the state of its jobs: %s", printable(str(error)))
        return None
    rows = (line.split("|", 2) for line in answer.stdout.splitlines())
    return {number: state if reason == "None" else f"{state} ({reason})" for number, state, reason in rows}
