"""
Dask workers as SLURM jobs: submitted through dask-jobqueue, awaited in the queue, cancelled at the end.

dask-jobqueue's configuration describes a job. A run waits with its jobs, for hours if need be, logs their state, and
begins with the first. A job that ends before the run (time limit, lost host) is submitted again; one that ends before
its worker has connected is not, since another would fail alike.
"""

import importlib
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from prefect.logging import get_run_logger

from virnucpro.errors import ConfigurationError, printable

PROGRAMS = ("sbatch", "squeue", "scancel")
LOOK_S = 15.0
"""Seconds between two queries of the queue, which load the cluster's controller."""
NOTICE_AGAIN_S = 600.0
"""Seconds after which an unchanged state is logged again."""
_SQUEUE_S = 20.0
"""Seconds to wait for squeue; an absent controller is no reason to give up."""
_FAILURES = 10
"""Workers that a task may lose to time limits and dead hosts; Dask's default is 3."""


class SlurmJobs:
    """
    Context manager around SLURM jobs with as many Dask workers each as the configuration has ``processes``.

    Each worker has one thread, so takes one device task, and may start processes. Scheduler and workers use TLS with
    certificates made for this run, so no other user can send them work.
    """

    def __init__(self, workers: int) -> None:
        absent = [program for program in PROGRAMS if shutil.which(program) is None]
        if absent:
            raise ConfigurationError(
                f"no SLURM on this host: {', '.join(absent)} not found; submit from one that has it"
            )
        jobqueue = importlib.import_module("dask_jobqueue")
        self._dask = importlib.import_module("dask")
        settings = self._dask.config.get("jobqueue.slurm")
        if settings["memory"] is None:
            raise ConfigurationError(
                "dask-jobqueue has no settings for SLURM: write what a job is to ~/.config/dask/jobqueue.yaml, "
                "as deployments/clusters/slurm.md shows"
            )
        processes = settings["processes"] or 1
        self._num_jobs = -(-workers // processes)
        options: dict[str, Any] = {
            "processes": processes,
            "cores": processes,
            "job_cpu": settings["job-cpu"] or settings["cores"] or processes,
            # with exec the worker is the job's own process, which SLURM always ends with the job
            "python": f"exec {settings['python'] or sys.executable}",
            "nanny": processes > 1,  # needed for several workers in a job
            "job_script_prologue": [
                *settings["job-script-prologue"],
                "export DASK_DISTRIBUTED__WORKER__DAEMON=False",
                "export DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED=False",
            ],
            "scheduler_options": {"dashboard_address": "127.0.0.1:0", **settings["scheduler-options"]},
            "security": True,
            "shared_temp_directory": settings["shared-temp-directory"] or str(Path.cwd()),
        }
        self._log_directory = settings["log-directory"]
        with self._dask.config.set({"distributed.scheduler.allowed-failures": _FAILURES}):
            self.cluster: Any = jobqueue.SLURMCluster(n_workers=0, **options)
        self._arrived: set[str] = set()
        """Jobs whose worker has connected."""
        self._looked_s = -LOOK_S

    def __enter__(self) -> Self:
        try:
            for _ in range(self._num_jobs):
                self.cluster.worker_spec.update(self.cluster.new_worker_spec())
            self._submit()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()
        for name in ("ca_file", "cert", "key"):  # temporary files, left behind by a process that ends at once
            if (file := getattr(self.cluster, f"_job_{name}", None)) is not None:
                file.close()

    def wait_for_worker(self) -> None:
        """Wait without limit until a worker has connected."""
        get_run_logger().info("submitted to SLURM: %s", _named(self._ids().values()))
        logged, logged_s = "", 0.0
        while not self._workers():
            states = Counter((self.look() or {}).values())
            summary = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            if summary and (summary != logged or time.monotonic() - logged_s > NOTICE_AGAIN_S):
                get_run_logger().info("waiting for the first job of SLURM: %s", summary)
                logged, logged_s = summary, time.monotonic()
            time.sleep(1)

    def look(self) -> dict[str, str] | None:
        """
        Check the queue, at most every ``LOOK_S``, and submit jobs again that ended too early.

        Returns:
            SLURM's state of each job number; None when not asked or not answered.
        """
        ids = self._ids()
        workers = self._workers()
        self._arrived |= {job for job in ids if any(name == job or name.startswith(f"{job}-") for name in workers)}
        if time.monotonic() - self._looked_s < LOOK_S:
            return None
        self._looked_s = time.monotonic()
        if (queued := _queue()) is None:
            return None
        ended = {job: number for job, number in ids.items() if number not in queued}
        for job, number in ended.items():
            self.cluster.workers.pop(job, None)
            if job not in self._arrived:
                del self.cluster.worker_spec[job]
                where = self._output([number])
                get_run_logger().warning("job %s of SLURM ended before its worker connected: see %s", number, where)
        if not self.cluster.worker_spec:
            raise ConfigurationError(
                f"{_named(ended.values())} of SLURM ended before a worker connected: see {self._output(ended.values())}"
            )
        if lost := len(set(self.cluster.worker_spec) - set(self.cluster.workers)):
            get_run_logger().warning("%s of the jobs of SLURM ended before the run: submitted again", lost)
            try:
                self._submit()
            except ConfigurationError as error:
                get_run_logger().warning("%s; will be retried", error)
        return {number: queued[number] for number in ids.values() if number in queued}

    def _submit(self) -> None:
        """Submit the jobs that are missing."""

        async def submitted() -> None:
            await self.cluster

        try:
            self.cluster.sync(submitted)
        except (RuntimeError, OSError, ValueError) as error:
            for name, job in list(self.cluster.workers.items()):
                if job.job_id is None:
                    job.status = importlib.import_module("distributed.core").Status.failed
                    del self.cluster.workers[name]
            reasons = [line for line in str(error).splitlines() if line.startswith("sbatch: ")] or [str(error)]
            raise ConfigurationError(f"SLURM refuses the jobs: {printable(' '.join(reasons))}") from error

    def _ids(self) -> dict[str, str]:
        """Return name and SLURM number of each submitted job."""
        return {name: str(job.job_id) for name, job in self.cluster.workers.items() if job.job_id is not None}

    def _workers(self) -> list[str]:
        """Return the names of the connected workers."""
        return [str(worker["name"]) for worker in list(self.cluster.scheduler_info["workers"].values())]

    def _output(self, numbers: Iterable[str]) -> str:
        """Return where the jobs wrote their errors."""
        if self._log_directory:
            return ", ".join(f"{self._log_directory}/*-{number}.err" for number in numbers)
        return ", ".join(f"slurm-{number}.out" for number in numbers)


def _queue() -> dict[str, str] | None:
    """Return number -> state and reason of this user's waiting and running jobs; None when SLURM does not answer."""
    command = ["squeue", "--noheader", "--me", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SQUEUE_S)
    except (subprocess.SubprocessError, OSError) as error:
        get_run_logger().warning("SLURM does not report the state of its jobs: %s", error)
        return None
    rows = (line.split("|", 2) for line in answer.stdout.splitlines())
    return {number: state if reason == "None" else f"{state} ({reason})" for number, state, reason in rows}


def _named(numbers: Iterable[str]) -> str:
    return f"jobs {', '.join(sorted(numbers, key=int))}"
