"""
Folders that runs may use: the operator's, in environment variables that workers inherit; everything where unset.

A name is checked before a run begins (``is_under``), and again what it has led to once that is open (``check_open``): a
link that took its place in between is refused, unread.
"""

from __future__ import annotations

import os
from pathlib import Path

from virnucpro.errors import PathNotAllowedError
from virnucpro.run_folders import only_regular

DATA_ROOTS = "VIRNUCPRO_DATA_ROOTS"
"""Environment variable of the worker: folders of input, output, caches and metrics targets."""
MODEL_ROOTS = "VIRNUCPRO_MODEL_ROOTS"
"""Likewise, for models, classifiers and weights; unset: as for data."""


def allowed_roots(variable: str) -> list[str] | None:
    """Return the folders that *variable* allows, links resolved; None where everything is allowed."""
    setting = os.environ.get(variable, os.environ.get(DATA_ROOTS))
    return None if setting is None else [os.path.realpath(root) for root in setting.split(os.pathsep) if root]


def is_under(path: str, roots: list[str]) -> bool:
    """Whether a path, links resolved, is one of the folders or below one."""
    return "\0" not in path and any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots)


def check_open(descriptor: int, path: str | Path, variable: str = DATA_ROOTS) -> None:
    """Raise PathNotAllowedError where *path*, now open, has led outside the folders that *variable* allows."""
    roots = allowed_roots(variable)
    if roots is not None:
        found = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not any(found.is_relative_to(root) for root in roots):
            raise PathNotAllowedError("file", str(path), variable, roots)


def open_data(path: str, flags: int = os.O_RDONLY, variable: str = DATA_ROOTS) -> int:
    """Open a regular file below the allowed folders, without blocking; for use as an *opener*; OSError passes."""
    descriptor = only_regular(path, flags)
    try:
        check_open(descriptor, path, variable)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_model(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file of a model that the user named by its path; see ``open_data``."""
    return open_data(path, flags, MODEL_ROOTS)
