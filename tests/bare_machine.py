"""An environment that has only what a bare machine with a GPU has, made by hiding the rest of this one."""

from __future__ import annotations

import os

OF_TORCH = {
    *("torch", "torchgen", "functorch", "numpy", "sympy", "mpmath", "typing_extensions", "filelock", "jinja2"),
    *("markupsafe", "networkx", "fsspec", "setuptools", "_distutils_hack", "packaging"),
}
HIDE = """
from importlib.machinery import PathFinder

ALLOWED = {allowed!r}
found_by_path = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    spec = found_by_path(name, path, target)
    if path is not None or spec is None or name in ALLOWED:
        return spec
    return None if "site-packages" in str(spec.origin or spec.submodule_search_locations) else spec

PathFinder.find_spec = find_spec
"""


def bare_environment(folder, *more):
    """Return variables for processes that can import, of what is installed, torch, numpy and *more*; uses *folder*."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE.format(allowed=OF_TORCH | set(more)))
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OUT"}}
    return kept | {"PYTHONPATH": str(folder)}
