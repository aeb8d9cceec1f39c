"""
``run.json``: what a run is (input, settings, plan, versions) and how it went (ranks, counts, files).

Everything that must not be in the result file stands here: host, dates, device, run id. It is replaced as a whole,
so a reader never sees half of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
_REMEDY = "restore it, or use another output folder"


@dataclass(kw_only=True)
class RunManifest:
    """The content of ``run.json``."""

    run_id: str
    """Of the last run in this folder."""
    state: str
    """running, complete, partial, failed or stopped."""
    started: str
    """UTC, ISO 8601."""
    host: str
    """Where it ran."""
    inputs: list[dict[str, Any]]
    """path, size_bytes and sha256 of each input file, in the order given."""
    settings: dict[str, Any]
    """What decides the bytes of the result; a resumed run must have the same."""
    plan: dict[str, Any]
    """fingerprint, token budget, blocks, unique sequences, tokens; what probes of the GPUs found."""
    versions: dict[str, str]
    """Of Python and the packages that compute."""
    devices: list[str]
    """One name a rank."""
    finished: str | None = None
    """UTC, ISO 8601."""
    stages_s: dict[str, float] = field(default_factory=dict)
    """Seconds a stage took."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """How each rank went."""
    counts: dict[str, int] = field(default_factory=dict)
    """records = rows + missing + skipped; copies, truncated; what was noticed at reading; resplit_blocks and
    cached_blocks of the plan's blocks."""
    promise: str | None = None
    """``bytes``: the same run gives the same bytes again. ``tolerance``: it gives the same numbers within the tolerance
    of the precision, because blocks were split or came from the embedding cache. None until there is a result."""
    files: dict[str, str] = field(default_factory=dict)
    """Final file name -> hex sha256."""
    format: int = FORMAT
    """Version of this layout."""

    def write(self, path: Path) -> None:
        """
        Replace the manifest on disk.

        Raises:
            OutputError: The system refused.
        """
        durable.write_bytes(path, (json.dumps(asdict(self), indent=2, ensure_ascii=True) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> RunManifest:
        """
        Read a manifest.

        Raises:
            ResultError: It is absent, unreadable, or of another layout.
        """
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise ResultError(path, error.strerror or str(error)) from error
        except (ValueError, RecursionError) as error:
            raise ResultError(path, f"not a run manifest ({error}): {_REMEDY}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ResultError(path, f"not a run manifest of format {FORMAT}: {_REMEDY}")
        try:
            manifest = cls(**data)
        except TypeError as error:
            raise ResultError(path, f"not a run manifest ({error}): {_REMEDY}") from error
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """Raise ``ResultError`` when something that a later start relies on is missing or of another kind."""
        kinds = {
            "state": str,
            "inputs": list,
            "settings": dict,
            "plan": dict,
            "ranks": list,
            "counts": dict,
            "files": dict,
        }
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ResultError(path, f"not a run manifest ({name!r} is no {kind.__name__}): {_REMEDY}")
        if not all(type(count) is int for count in self.counts.values()):
            raise ResultError(path, f"not a run manifest (a count is no whole number): {_REMEDY}")
        if not all(isinstance(rank, dict) for rank in self.ranks):
            raise ResultError(path, f"not a run manifest (a rank is no object): {_REMEDY}")
        if not all(isinstance(item, dict) and {"path", "sha256"} <= item.keys() for item in self.inputs):
            raise ResultError(path, f"not a run manifest (an input without path or sha256): {_REMEDY}")
        numbers = [
            (self.settings, "settings", ["token_budget"]),
            (self.plan, "plan", ["token_budget", "blocks", "longest_sequence_tokens"]),
            (
                self.counts,
                "counts",
                ["records", *(["rows", "copies", "truncated"] if self.state == "complete" else [])],
            ),
        ]
        for values, where, names in numbers:
            for name in names:
                if type(values.get(name)) is not int:
                    raise ResultError(path, f"not a run manifest ({where!r} without {name!r}): {_REMEDY}")
