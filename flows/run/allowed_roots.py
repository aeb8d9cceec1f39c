"""
Paths that a deployment's parameters may name.

Anyone who may start a deployment could name any path that the worker's user can access. So each path, links resolved,
must lie under a folder of ``VIRNUCPRO_DATA_ROOTS`` (separated by ``:``; by default the folder of the flow), or for
models, classifiers and weights of ``VIRNUCPRO_MODEL_ROOTS`` (by default as for data). Nothing is opened to check it.

In a process of the user's own, as with ``virnucpro embed --flow``, the variables hold only where they are set.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from prefect.runtime import deployment

from virnucpro.errors import ConfigurationError, printable

DATA_ROOTS = "VIRNUCPRO_DATA_ROOTS"
"""Environment variable of the worker: folders of input, output, caches and metrics targets."""
MODEL_ROOTS = "VIRNUCPRO_MODEL_ROOTS"
"""Likewise, for models, classifiers and weights."""


class PathNotAllowedError(ConfigurationError):
    """A path lies outside the worker's allowed roots."""

    def __init__(self, parameter: str, path: str, variable: str, roots: list[str]) -> None:
        self.parameter = parameter
        self.path = path
        allowed = ", ".join(printable(root) for root in roots) or "none"
        setting = next((name for name in (variable, DATA_ROOTS) if name in os.environ), None)
        where = setting or "by default the folder that the flow runs in"
        super().__init__(
            f"{parameter}: {printable(path)} is not under a folder that the worker allows ({where}: {allowed}); "
            f"nothing was opened"
        )


def check_allowed(
    *, data: dict[str, str | Iterable[str] | None], models: dict[str, str | Iterable[str] | None] | None = None
) -> None:
    """Refuse paths outside the allowed roots; both arguments map parameter to path or paths."""
    is_deployed = deployment.id is not None
    for variable, given in ((DATA_ROOTS, data), (MODEL_ROOTS, models or {})):
        roots = allowed_roots(variable, is_deployed=is_deployed)
        if roots is None:
            continue
        for parameter, paths in given.items():
            for path in [paths] if isinstance(paths, str) else paths or []:
                if path and not is_under(path, roots):
                    raise PathNotAllowedError(parameter, path, variable, roots)


def allowed_roots(variable: str, *, is_deployed: bool) -> list[str] | None:
    """Return the folders that *variable* allows, links resolved; None where everything is allowed."""
    setting = os.environ.get(variable)
    if setting is None and variable == MODEL_ROOTS:
        return allowed_roots(DATA_ROOTS, is_deployed=is_deployed)
    if setting is None:
        return [os.path.realpath(".")] if is_deployed else None
    return [os.path.realpath(root) for root in setting.split(os.pathsep) if root]


def is_under(path: str, roots: list[str]) -> bool:
    """Whether a path, links resolved, is one of the folders or below one."""
    return "\0" not in path and any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots)
