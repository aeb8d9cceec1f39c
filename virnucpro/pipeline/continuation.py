"""May a run continue what a folder holds? Only with the same input and the same settings; what differs is named."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from virnucpro.data.reading.input_files import hash_content, open_regular
from virnucpro.errors import BadInputError, SettingsChangedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class EarlierRun(Protocol):
    """What a manifest tells of a folder's earlier run."""

    inputs: list[dict[str, Any]]
    """path and sha256 of each input file."""
    settings: dict[str, Any]
    """What decides the result."""


def is_same_input(
    output_dir: Path, earlier: EarlierRun, input_files: Sequence[str | Path], settings: dict[str, Any]
) -> bool:
    """
    Refuse an input other than the earlier run's; False where a file cannot be read: indexing says what is wrong.

    Args:
        output_dir: The folder, for messages.
        earlier: Its run.
        input_files: What is asked for now.
        settings: Likewise; those that differ are named with the input.

    Raises:
        SettingsChangedError: Paths or content differ.
    """
    before = [(item["path"], item["sha256"]) for item in earlier.inputs]
    now = []
    for path in input_files:
        try:
            with open_regular(os.fspath(path)) as descriptor:
                now.append((os.path.realpath(path), hash_content(descriptor)[1]))
        except BadInputError:
            return False
    others = _differences(earlier.settings, settings)
    if [path for path, _ in before] != [path for path, _ in now]:
        paths = ([path for path, _ in before], [path for path, _ in now])
        raise SettingsChangedError(output_dir, {"input": paths, **others})
    if before != now:
        digests = ([sha for _, sha in before], [sha for _, sha in now])
        raise SettingsChangedError(output_dir, {"sha256 of the input": digests, **others})
    return True


def refuse_other_settings(output_dir: Path, earlier: EarlierRun, settings: dict[str, Any]) -> None:
    """
    Refuse settings other than the earlier run's.

    Raises:
        SettingsChangedError: Some differ.
    """
    differences = _differences(earlier.settings, settings)
    if differences:
        raise SettingsChangedError(output_dir, differences)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[object, object]]:
    keys = sorted(set(before) | set(now))
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}
