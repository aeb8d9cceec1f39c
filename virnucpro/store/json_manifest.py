"""
What the manifests of all runs have in common: JSON, replaced as a whole, with a checksum of itself.

Changed by hand or by a bad disk, it is refused: a run relies on every value in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.run_folders import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

REMEDY = "restore it, or use another output folder"
CHECKSUM = "manifest_sha256"


def write_manifest(path: Path, manifest: Any) -> None:
    """
    Replace the manifest on disk by a dataclass's fields.

    Raises:
        OutputError: The system refused.
    """
    durable.write_bytes(path, with_checksum(asdict(manifest)))


def with_checksum(values: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest that holds *values* and, last, the sha256 of them."""
    return (json.dumps({**values, CHECKSUM: _checksum(values)}, indent=2, ensure_ascii=True) + "\n").encode()


def read_object(path: Path) -> dict[str, Any]:
    """
    Return the JSON object in a file.

    Raises:
        ResultError: It is absent, unreadable, or holds none.
    """
    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise not_a_manifest(path, str(error)) from error
    if not isinstance(data, dict):
        raise not_a_manifest(path, "it is no object")
    return data


def read_values(path: Path) -> dict[str, Any]:
    """
    Return the values of a manifest, without the checksum, which they match.

    Raises:
        ResultError: It is absent, unreadable, no manifest, or its values do not match its checksum.
    """
    data = read_object(path)
    if CHECKSUM not in data:
        raise not_a_manifest(path, "it has no checksum of itself")
    if data.pop(CHECKSUM) != _checksum(data):
        raise ResultError(path, f"was changed or damaged: its content does not match its own checksum: {REMEDY}")
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


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def not_a_manifest(path: Path, what: str) -> ResultError:
    """Return the error of a file that is no manifest of ours."""
    return ResultError(path, f"not a run manifest ({what}): {REMEDY}")
