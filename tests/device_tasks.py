"""A program that is one device task of one host: the host of a test is a process group, which a test can kill."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

from virnucpro.config import RunLimits
from virnucpro.pipeline.hosts.device_task import run_device_task


class Host:
    """
    A host of the name *name* with one device task.

    Args:
        name: Of the host.
        run: Prepared.
        rank: Of the task.
        folder: For what it leaves.
        metrics: Where it serves what only it knows.
    """

    def __init__(self, name, run, rank, folder, *, metrics=None, **environ):
        self.task = folder / f"{name}.{rank}.task"
        self.result = folder / f"{name}.{rank}.result"
        self.task.write_bytes(pickle.dumps((run, rank, metrics)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device_tasks", self.task, self.result],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "VIRNUCPRO_HOST_NAME": name, **environ},
            start_new_session=True,
        )

    def outcome(self, timeout_s=120):
        """Wait for the end of the task; return its outcome, or raise its error."""
        self.process.wait(timeout_s)
        found = pickle.loads(self.result.read_bytes())
        if isinstance(found, Exception):
            raise found
        return found

    def lose(self):
        """Let the host go: every process on it ends at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self):
        """End what is left."""
        if self.process.poll() is None:
            self.lose()


def main(task: Path, result: Path) -> None:
    """Do the pickled task, and pickle how it went."""
    run, rank, metrics = pickle.loads(task.read_bytes())
    try:
        found = run_device_task(run, rank, limits=RunLimits(attempts=2, stop_grace_s=20), metrics=metrics)
    except Exception as error:  # noqa: BLE001  raised again in the test
        found = error
    result.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
