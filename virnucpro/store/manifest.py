"""
``run.json``: what a run is (input, settings, plan, versions) and how it went (ranks, counts, files).

Everything that must not be in the result file stands here: host, dates, device, run id. It is replaced as a whole,
so a reader never sees half of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.settings import ResultForm
from virnucpro.store.json_manifest import check_common, check_counts, not_a_manifest, read_values, write_manifest

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1


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

    @property
    def result_form(self) -> ResultForm:
        """Any but ``auto``; folders older than the choice are single."""
        return ResultForm(self.settings.get("result_form", ResultForm.SINGLE))

    def write(self, path: Path) -> None:
        """
        Replace the manifest on disk.

        Raises:
            OutputError: The system refused.
        """
        write_manifest(path, self)

    @classmethod
    def read(cls, path: Path) -> RunManifest:
        """
        Read a manifest.

        Raises:
            ResultError: It is absent, unreadable, or of another layout.
        """
        data = read_values(path)
        if data.get("format") != FORMAT:
            raise not_a_manifest(path, f"its format is not {FORMAT}")
        try:
            manifest = cls(**data)
        except TypeError as error:
            raise not_a_manifest(path, str(error)) from error
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
        check_common(path, self, kinds)
        check_counts(path, self.counts.values())
        if not all(isinstance(rank, dict) for rank in self.ranks):
            raise not_a_manifest(path, "a rank is no object")
        if self.settings.get("result_form", ResultForm.SINGLE) not in [
            form for form in ResultForm if form is not ResultForm.AUTO
        ]:
            raise not_a_manifest(path, "'settings' with a 'result_form' that does not exist")
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
                    raise not_a_manifest(path, f"{where!r} without {name!r}")
