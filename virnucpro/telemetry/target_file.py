"""
Tells a Prometheus on this host where a run's metrics are: one file a run, for ``file_sd_configs``.

The file is locked (``flock``) as long as its run lives and removed at its end. A run that was killed leaves it behind,
and Prometheus shows its target as down, until the next run of this host that uses the folder removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from virnucpro import durable
from virnucpro.errors import OutputError
from virnucpro.telemetry.exposition import LOOPBACK

if TYPE_CHECKING:
    from pathlib import Path


class TargetFile:
    """
    The file of one run.

    Args:
        folder: What ``file_sd_configs`` names, as ``FOLDER/*.json``; made when it is not there. One a host: the
            addresses in it mean this host.
        run_id: Of the run.
        port: Where its metrics are served.
    """

    def __init__(self, folder: Path, run_id: str, port: int) -> None:
        self.path = folder / f"virnucpro-{socket.gethostname()}-{run_id}.json"
        self._content = [{"targets": [f"{LOOPBACK}:{port}"], "labels": {"run_id": run_id}}]
        self._descriptor: int | None = None

    def start(self) -> None:
        """
        Remove what runs of this host that have ended left behind, and put our file there.

        Raises:
            OutputError: The folder cannot be written.
        """
        temporary = self.path.with_name(f".{self.path.name}{durable.TEMPORARY_SUFFIX}")
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
    of_this_host = re.compile(rf"virnucpro-{re.escape(socket.gethostname())}-[^-]+\.json")
    for path in folder.iterdir():
        if of_this_host.fullmatch(path.name):
            with suppress(OSError):  # its run goes on, or it is somebody else's, or just being removed
                _remove_unless_held(path)


def _remove_unless_held(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(descriptor)
