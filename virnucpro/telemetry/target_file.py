"""
Tells a Prometheus where a run's metrics are: one file a run, for ``file_sd_configs``; on a cluster one more a host.

A file is locked (``flock``) as long as its run lives and removed at its end. A run that was killed leaves it behind,
and Prometheus shows its target as down, until the next run of this host that uses the folder removes it, or the next
Prefect worker that is started with it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from pathlib import Path


class TargetFile:
    """
    The file of one run, or of what one host of a cluster serves of it.

    Args:
        folder: What ``file_sd_configs`` names, as ``FOLDER/*.json``; made when it is not there. Hosts may share it
            where the addresses in it mean the same to all.
        run_id: Of the run.
        address: Where the metrics are served, with the port.
        is_of_host: They are what this host knows of the run, not the run's own: its name becomes the label ``host``.
    """

    def __init__(self, folder: Path, run_id: str, address: str, *, is_of_host: bool = False) -> None:
        labels = {"run_id": run_id} | ({"host": host_name()} if is_of_host else {})
        self.run_id = run_id
        self.path = folder / f"virnucpro-{host_name()}-{run_id}{'.host' * is_of_host}.json"
        self._content = [{"targets": [address], "labels": labels}]
        self._descriptor: int | None = None

    def start(self) -> None:
        """
        Remove what runs of this host that have ended left behind, and put our file there.

        Raises:
            OutputError: The folder cannot be written.
        """
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            durable.make_folder(self.path.parent)
            remove_forgotten_targets(self.path.parent)
            self._descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before it has its name: never unheld
            os.write(self._descriptor, json.dumps(self._content).encode())
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.stop()
            raise OutputError(self.path, error.strerror or str(error)) from error

    def stop(self) -> None:
        """Remove our file; does nothing where there is none."""
        if self._descriptor is None:
            return
        with suppress(OSError):  # the next run removes it: nobody holds it any more
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def remove_forgotten_targets(folder: Path) -> None:
    """
    Remove the files of runs of this host that have ended without doing so.

    Raises:
        OSError: The folder cannot be read.
    """
    of_this_host = re.compile(rf"virnucpro-{re.escape(host_name())}-[^-]+\.json")
    for path in folder.iterdir():
        if of_this_host.fullmatch(path.name):
            with suppress(OSError):  # its run goes on, or it is somebody else's, or just being removed
                _remove_unless_held(path)


def remove_targets_of_hosts(folder: Path, run_id: str) -> None:
    """
    Remove the files of all hosts of a run that is over: one that was killed could not.

    Raises:
        OSError: The folder cannot be read.
    """
    for path in folder.iterdir():
        if path.name.startswith("virnucpro-") and path.name.endswith(f"-{run_id}.host.json"):
            with suppress(OSError):  # it is just being removed
                path.unlink()


def _remove_unless_held(path: Path) -> None:
    # for writing: over NFS an exclusive lock needs it
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
