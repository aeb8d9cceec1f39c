"""
Which files of which folders a server of reports may show, and their addresses.

A file has the absolute path as its address: no table of names, and a worker makes the same address as the server reads.
Only reports of runs and what a report links to can be opened, below given roots, without following any link.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from virnucpro.errors import ResultError
from virnucpro.run_layout import FolderLayout, PredictionLayout, TrainingLayout
from virnucpro.store.manifest import PredictionManifest, TrainingManifest, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_MANIFEST_BYTES = 16 << 20
"""A larger ``run.json`` is not read."""
MOST_REPORTS, MOST_FOLDERS, DEEPEST = 200, 20_000, 6
"""Of the list of reports: lines, folders looked at, and levels of folders below a root."""
LIST_S = 5.0
"""Seconds after which the list takes what was found so far."""
LIST_AGAIN_S = 10.0
"""Seconds for which a list is good, so that readers share it."""

_PREDICTION, _TRAINING = PredictionLayout(Path()), TrainingLayout(Path())
_LINKED = (
    *(_PREDICTION.report, _PREDICTION.contigs, _PREDICTION.viral_fasta, _PREDICTION.tracks, _PREDICTION.viral_regions),
    *(_PREDICTION.genes, _PREDICTION.gene_proteins),
    *(_PREDICTION.prediction_results, _PREDICTION.highest_score, _PREDICTION.failed_sequences, _PREDICTION.manifest),
)
"""The report of a prediction, and the files that it links to."""
SERVED = {
    PredictionManifest: frozenset(path.name for path in _LINKED),
    TrainingManifest: frozenset({_TRAINING.card_text.name}),
}
"""Kind of run -> names of its files that can be opened."""
TITLE_PAGES = (_PREDICTION.report.name, _TRAINING.card_text.name)
_MANIFEST = FolderLayout(Path()).manifest.name


class NotServedError(LookupError):
    """There is nothing to serve at an address."""


class FoundReport(NamedTuple):
    """A line of the list of reports."""

    path: str
    changed: float
    """Unix time."""


def address_of(path: Path) -> str:
    """Return the address of a file: its absolute path, links resolved, each byte safe in a URL and in Markdown."""
    return quote(os.fsencode(os.path.realpath(path)))


class ServedFiles:
    """
    Reports below *roots*.

    Args:
        roots: Folders; links in their own names are resolved now, links below them are never followed.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [os.path.realpath(root) for root in roots]
        self._looking = threading.Lock()
        self._list: tuple[list[FoundReport], bool] | None = None
        self._listed_s = 0.0

    def open(self, address: str) -> tuple[int, str]:
        """
        Return a descriptor of the regular file at an address, for the caller to close, and the file's name.

        Raises:
            NotServedError: It is outside the roots, behind a link, of no run, no report or linked file, or unreadable.
        """
        path = os.fsdecode(unquote_to_bytes(address))
        names = path.split("/")
        if names[0] or "\0" in path or any(name in {"", ".", ".."} for name in names[1:]):
            raise NotServedError("not an absolute path")
        if len(names) < 3 or not any(names[-1] in known for known in SERVED.values()):
            raise NotServedError("not a report or a file that one links to")
        try:
            return self._open(path), names[-1]
        except (OSError, ResultError) as error:
            raise NotServedError(str(error)) from error

    def _open(self, path: str) -> int:
        for root in self.roots:
            if path.startswith(f"{root.rstrip('/')}/"):
                *folders, name = Path(path).relative_to(root).parts
                return _open_of_run(root, folders, name)
        raise NotServedError("outside the roots")

    def newest(self) -> tuple[list[FoundReport], bool]:
        """Return the newest reports, at most ``MOST_REPORTS``, and whether every folder was looked at."""
        with self._looking:
            if self._list is None or time.monotonic() - self._listed_s > LIST_AGAIN_S:
                self._list = self._look()
                self._listed_s = time.monotonic()
            return self._list

    def _look(self) -> tuple[list[FoundReport], bool]:
        deadline_s = time.monotonic() + LIST_S
        reports: dict[str, FoundReport] = {}
        is_whole = True
        for number, folder in enumerate(self._folders()):
            if number >= MOST_FOLDERS or time.monotonic() > deadline_s:
                is_whole = False
                break
            for path in () if folder is None else [Path(folder, name) for name in TITLE_PAGES]:
                with suppress(OSError):
                    found = path.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        reports[str(path)] = FoundReport(str(path), found.st_mtime)
        newest = sorted(reports.values(), key=lambda report: report.changed, reverse=True)
        return newest[:MOST_REPORTS], is_whole

    def _folders(self) -> Iterator[str | None]:
        """Yield each folder if it is of a run, else None and enter it."""
        left = [(root, 0) for root in self.roots]
        while left:
            folder, depth = left.pop()
            is_run, below = False, []
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    is_run |= entry.name == _MANIFEST
                    if depth < DEEPEST and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        below.append((entry.path, depth + 1))
            yield folder if is_run else None
            if not is_run:
                left += below


def _open_of_run(root: str, folders: Sequence[str], name: str) -> int:
    """Open a file of a run's folder, one folder after the other, so that no link is followed, also if they change."""
    above = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            os.close(above)
            above = below
        _check_is_of_run(above, name)
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotServedError("not a regular file")
    return descriptor


def _check_is_of_run(folder: int, name: str) -> None:
    """Raise unless the run in *folder*, a descriptor, has a file of this name to serve."""
    manifest = os.stat(_MANIFEST, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(manifest.st_mode) or manifest.st_size > MOST_MANIFEST_BYTES:
        raise NotServedError(f"{_MANIFEST} is not a file of ours")
    if name not in SERVED.get(type(read_manifest(Path(f"/proc/self/fd/{folder}/{_MANIFEST}"))), ()):
        raise NotServedError("not a file of such a run")
