"""
Addresses of a run's metrics for Prometheus (``file_sd_configs``): one file for each run, or host of a cluster run.

A file is locked (``flock``) while its run lives and removed at its end. One left by a killed run shows its target as
down, until the next run or Prefect worker of this host removes it.
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
    The file of one run, or of one host's share of it.

    Args:
        folder: Named by ``file_sd_configs`` as ``FOLDER/*.json``; made when absent. Hosts may share it where its
            addresses mean the same to all.
        address: HOST:PORT of the metrics.
        is_of_host: The metrics are this host's only; its name becomes the label ``host``.
    """

    def __init__(self, folder: Path, run_id: str, address: str, *, is_of_host: bool = False) -> None:
        labels = {"run_id": run_id} | ({"host": host_name()} if is_of_host else {})
        self.run_id = run_id
        self.path = folder / f"virnucpro-{host_name()}-{run_id}{'.host' * is_of_host}.json"
        self._content = [{"targets": [address], "labels": labels}]
        self._descriptor: int | None = None

    def start(self) -> None:
        """Remove the files of ended runs of this host and add this one."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            durable.make_folder(self.path.parent)
            remove_forgotten_targets(self.path.parent)
            self._descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            fcntl.flock(
                self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # before the rename: the file is never unlocked
            os.write(self._descriptor, json.dumps(self._content).encode())
            temporary.replace(self.path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            self.stop()
            raise OutputError(self.path, error.strerror or str(error)) from error

    def stop(self) -> None:
        if self._descriptor is None:
            return
        with suppress(OSError):  # the next run removes it: it is no longer locked
            self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def remove_forgotten_targets(folder: Path) -> None:
    """
    Remove the files that ended runs of this host left.

    Raises:
        OSError: The folder cannot be read.
    """
    of_this_host = re.compile(rf"virnucpro-{re.escape(host_name())}-[^-]+\.json")
    for path in folder.iterdir():
        if of_this_host.fullmatch(path.name):
            with suppress(OSError):  # its run is alive, or another user owns it, or it is being removed
                _remove_unless_held(path)


def remove_targets_of_hosts(folder: Path, run_id: str) -> None:
    """
    Remove the files of all hosts of a finished run; a killed host left its own.

    Raises:
        OSError: The folder cannot be read.
    """
    for path in folder.iterdir():
        if path.name.startswith("virnucpro-") and path.name.endswith(f"-{run_id}.host.json"):
            with suppress(OSError):  # another process removed it
                path.unlink()


def _remove_unless_held(path: Path) -> None:
    # opened for writing: an exclusive lock over NFS needs it
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
