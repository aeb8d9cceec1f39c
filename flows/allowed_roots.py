"""
Paths that a deployment's parameters may name.

Whoever may start a deployment may give it any path that the worker's user can read or write. Where
``VIRNUCPRO_ALLOWED_ROOTS`` (folders, separated by ``:``) is set on the worker, every path among a flow's parameters
must lie under one of them once all links are resolved.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from virnucpro.errors import ConfigurationError, printable

VARIABLE = "VIRNUCPRO_ALLOWED_ROOTS"
"""Environment variable of the worker."""


class PathNotAllowedError(ConfigurationError):
    """
    A path lies outside the worker's allowed roots.

    Attributes:
        parameter: The flow's parameter.
        path: As it was given.
    """

    def __init__(self, parameter: str, path: str, roots: list[str]) -> None:
        self.parameter = parameter
        self.path = path
        allowed = ", ".join(roots) or "none"
        super().__init__(f"{parameter} {printable(path)} is not under a folder that {VARIABLE} allows ({allowed})")


def check_allowed(**paths: str | Iterable[str] | None) -> None:
    """
    Refuse paths outside the allowed roots; without roots every path is allowed.

    Args:
        paths: Parameter -> path or paths; None where it was not given.

    Raises:
        PathNotAllowedError: One lies outside.
    """
    setting = os.environ.get(VARIABLE)
    if setting is None:
        return
    roots = [os.path.realpath(root) for root in setting.split(os.pathsep) if root]
    for parameter, given in paths.items():
        for path in [given] if isinstance(given, str) else given or []:
            if "\0" in path or not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots):
                raise PathNotAllowedError(parameter, path, roots)
