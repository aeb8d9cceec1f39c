"""
Paths that a deployment's parameters may name.

Anyone who may start a deployment could name any path that the worker's user can access. So each path, links resolved,
must lie under a folder of ``VIRNUCPRO_DATA_ROOTS`` (separated by ``:``; by default the folder of the flow), or for
models, classifiers and weights of ``VIRNUCPRO_MODEL_ROOTS`` (by default as for data). Nothing is opened to check it.

In a process of the user's own, as with ``virnucpro embed --flow``, the variables hold only where they are set.
"""

import os
from collections.abc import Iterable

from prefect.runtime import deployment

from virnucpro import allowed_roots
from virnucpro.allowed_roots import DATA_ROOTS, MODEL_ROOTS, is_under
from virnucpro.errors import PathNotAllowedError


def check_allowed(
    *, data: dict[str, str | Iterable[str] | None], models: dict[str, str | Iterable[str] | None] | None = None
) -> None:
    """
    Refuse paths outside the allowed roots; both arguments map parameter to path or paths.

    A deployment's own folder becomes the setting of its process where there is none, for whatever the run opens later.
    """
    if deployment.id is not None:
        os.environ.setdefault(DATA_ROOTS, os.path.realpath("."))
    for variable, given in ((DATA_ROOTS, data), (MODEL_ROOTS, models or {})):
        roots = allowed_roots.allowed_roots(variable)
        if roots is None:
            continue
        for parameter, paths in given.items():
            for path in [paths] if isinstance(paths, str) else paths or []:
                if path and not is_under(path, roots):
                    raise PathNotAllowedError(parameter, path, variable, roots)


def data_roots(*, is_deployed: bool) -> list[str] | None:
    """Return the folders of data, links resolved; None where everything is allowed."""
    roots = allowed_roots.allowed_roots(DATA_ROOTS)
    return [os.path.realpath(".")] if roots is None and is_deployed else roots
