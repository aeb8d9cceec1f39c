"""
Paths that a deployment's parameters may name.

Whoever may start a deployment may give it any path that the worker's user can read or write. So every path among the
parameters must lie, once all links are resolved, under one of the worker's folders: ``VIRNUCPRO_DATA_ROOTS`` (folders,
separated by ``:``; unset: the folder that the worker runs the flow in, which is the project's), and
``VIRNUCPRO_MODEL_ROOTS`` for models, classifiers and weights (unset: as for data). Nothing is opened to find that out.

Who starts a flow in a process of their own, as ``virnucpro embed --flow`` does, could open the files without it: there
the variables hold only where they are set.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from prefect.runtime import deployment

from virnucpro.errors import ConfigurationError, printable

DATA_ROOTS = "VIRNUCPRO_DATA_ROOTS"
"""Environment variable of the worker: folders for input, output, caches and targets of metrics."""
MODEL_ROOTS = "VIRNUCPRO_MODEL_ROOTS"
"""Likewise, for models, classifiers and weights."""


class PathNotAllowedError(ConfigurationError):
    """
    A path lies outside the worker's allowed roots.

    Attributes:
        parameter: The flow's parameter.
        path: As it was given.
    """

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
    """
    Refuse paths outside the allowed roots.

    Args:
        data: Parameter -> path or paths; None or empty where it was not given.
        models: Likewise.

    Raises:
        PathNotAllowedError: One lies outside.
    """
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
    """
    Return the folders that a variable allows, links resolved; None where everything is allowed.

    Args:
        variable: ``DATA_ROOTS`` or ``MODEL_ROOTS``.
        is_deployed: Whether the run is one of a deployment.
    """
    setting = os.environ.get(variable)
    if setting is None and variable == MODEL_ROOTS:
        return allowed_roots(DATA_ROOTS, is_deployed=is_deployed)
    if setting is None:
        return [os.path.realpath(".")] if is_deployed else None
    return [os.path.realpath(root) for root in setting.split(os.pathsep) if root]


def is_under(path: str, roots: list[str]) -> bool:
    """Whether a path, links resolved, is one of the folders or in one of them."""
    return "\0" not in path and any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots)
