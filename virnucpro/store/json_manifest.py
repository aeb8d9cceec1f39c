"""What the manifests of all runs have in common: JSON, replaced as a whole, believed as far as it was checked."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

REMEDY = "restore it, or use another output folder"


def write_manifest(path: Path, manifest: Any) -> None:
    """
    Replace the manifest on disk by a dataclass's fields.

    Raises:
        OutputError: The system refused.
    """
    durable.write_bytes(path, (json.dumps(asdict(manifest), indent=2, ensure_ascii=True) + "\n").encode())


def read_object(path: Path) -> dict[str, Any]:
    """
    Return the JSON object in a file.

    Raises:
        ResultError: It is absent, unreadable, or holds none.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise not_a_manifest(path, str(error)) from error
    if not isinstance(data, dict):
        raise not_a_manifest(path, "it is no object")
    return data


def check_common(path: Path, manifest: Any, kinds: Mapping[str, type]) -> None:
    """
    Check what every later start relies on.

    Args:
        path: For messages.
        manifest: Has an attribute for each name of *kinds*, and ``inputs``.
        kinds: Name -> type.

    Raises:
        ResultError: Something is of another kind.
    """
    for name, kind in kinds.items():
        if not isinstance(getattr(manifest, name), kind):
            raise not_a_manifest(path, f"{name!r} is no {kind.__name__}")
    if not all(isinstance(item, dict) and {"path", "sha256"} <= item.keys() for item in manifest.inputs):
        raise not_a_manifest(path, "an input without path or sha256")


def check_counts(path: Path, counts: Iterable[object]) -> None:
    """
    Check that counts are whole numbers.

    Raises:
        ResultError: One is not.
    """
    if not all(type(count) is int for count in counts):
        raise not_a_manifest(path, "a count is no whole number")


def not_a_manifest(path: Path, what: str) -> ResultError:
    """Return the error of a file that is no manifest of ours."""
    return ResultError(path, f"not a run manifest ({what}): {REMEDY}")
