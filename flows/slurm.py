"""
Workers of Dask that are jobs of SLURM: submitted through dask-jobqueue, waited for in the queue, cancelled at the end.

What a job is, dask-jobqueue's configuration says. Jobs may wait for hours: a run waits with them, says what SLURM says
of them, and begins with the first that runs. A job that ends before the run does (its time was over, its host is gone)
is submitted again; one that ends before a worker of its had come is not, since another would go the same way.
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
"""Seconds between two looks at the queue, which costs the cluster's controller an answer."""
SAY_AGAIN_S = 600.0
"""Seconds after which a person who waits is told again, though nothing has changed."""
_SQUEUE_S = 20.0
"""Seconds that squeue has to answer; while the controller is away nothing is known, which is no reason to give up."""
_FAILURES = 10
"""Workers that a task may lose to time limits and dead hosts before Dask gives it up; Dask's own default is 3."""


class SlurmJobs:
    """
    Context manager around jobs of SLURM, each with as many workers of Dask as the configuration has ``processes``.

    Each worker has one thread, so that it takes one device task, and may start processes. Scheduler and workers talk
    through TLS with certificates made for this run: on a host with other users nobody else can send them work.

    Args:
        workers: Wanted.

    Raises:
        ConfigurationError: There is no SLURM here, dask-jobqueue is not configured, or SLURM refuses the jobs.
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
            # the worker is the job's own process, so that SLURM, however it follows processes, ends it with the job
            "python": f"exec {settings['python'] or sys.executable}",
            "nanny": processes > 1,  # else one process cannot be several workers
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
        """Jobs of which a worker has come."""
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
        for name in ("ca_file", "cert", "key"):  # temporary files, which a process that ends at once would leave behind
            if (file := getattr(self.cluster, f"_job_{name}", None)) is not None:
                file.close()

    def wait_for_worker(self) -> None:
        """
        Wait until a worker has come, however long SLURM takes.

        Raises:
            ConfigurationError: All jobs have ended, and none had brought a worker.
        """
        get_run_logger().info("submitted to SLURM: %s", _named(self._ids().values()))
        said, said_s = "", 0.0
        while not self._workers():
            states = Counter((self.look() or {}).values())
            words = ", ".join(f"{number} {state}" for state, number in sorted(states.items()))
            if words and (words != said or time.monotonic() - said_s > SAY_AGAIN_S):
                get_run_logger().info("waiting for the first job of SLURM: %s", words)
                said, said_s = words, time.monotonic()
            time.sleep(1)

    def look(self) -> dict[str, str] | None:
        """
        Look at the queue, unless we have just done so, and submit again what has ended too early.

        Returns:
            The jobs' numbers and what SLURM says of each; None where it was not asked or did not answer.

        Raises:
            ConfigurationError: No job is left.
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
                get_run_logger().warning("job %s of SLURM ended before a worker of it had come: see %s", number, where)
        if not self.cluster.worker_spec:
            told = (
                f"{_named(ended.values())} of SLURM ended before a worker had come: see {self._output(ended.values())}"
            )
            raise ConfigurationError(told)
        if lost := len(set(self.cluster.worker_spec) - set(self.cluster.workers)):
            get_run_logger().warning("%s of the jobs of SLURM ended before the run: submitted again", lost)
            try:
                self._submit()
            except ConfigurationError as error:
                get_run_logger().warning("%s; tried again later", error)
        return {number: queued[number] for number in ids.values() if number in queued}

    def _submit(self) -> None:
        """Submit the jobs that are wanted and not there."""

        async def settle() -> None:
            await self.cluster

        try:
            self.cluster.sync(settle)
        except (RuntimeError, OSError, ValueError) as error:
            for name, job in list(self.cluster.workers.items()):
                if job.job_id is None:
                    job.status = importlib.import_module("distributed.core").Status.failed
                    del self.cluster.workers[name]
            said = [line for line in str(error).splitlines() if line.startswith("sbatch: ")] or [str(error)]
            raise ConfigurationError(f"SLURM takes no job: {printable(' '.join(said))}") from error

    def _ids(self) -> dict[str, str]:
        """Return the name of each job that was submitted, and its number in SLURM."""
        return {name: str(job.job_id) for name, job in self.cluster.workers.items() if job.job_id is not None}

    def _workers(self) -> list[str]:
        """Return the names of the workers that are there."""
        return [str(worker["name"]) for worker in list(self.cluster.scheduler_info["workers"].values())]

    def _output(self, numbers: Iterable[str]) -> str:
        """Return where the jobs wrote what went wrong."""
        if self._log_directory:
            return ", ".join(f"{self._log_directory}/*-{number}.err" for number in numbers)
        return ", ".join(f"slurm-{number}.out" for number in numbers)


def _queue() -> dict[str, str] | None:
    """Return number -> state and reason of every job of this user that waits or runs; None where SLURM does not say."""
    command = ["squeue", "--noheader", "--me", "--format=%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SQUEUE_S)
    except (subprocess.SubprocessError, OSError) as error:
        get_run_logger().warning("SLURM does not say how its jobs are: %s", error)
        return None
    rows = (line.split("|", 2) for line in answer.stdout.splitlines())
    return {number: state if reason == "None" else f"{state} ({reason})" for number, state, reason in rows}


def _named(numbers: Iterable[str]) -> str:
    return f"jobs {', '.join(sorted(numbers, key=int))}"
