"""
``run.json`` of an identification: what it is, and which of its stages are done, with the sha256 of what they wrote.

A stage counts as done when it was recorded for exactly the settings asked for and every file that it wrote is still as
it was recorded. That is all that a resumed run relies on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.errors import ResultError
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.json_manifest import check_common, check_counts, not_a_manifest, read_values, write_manifest

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
KIND = "prediction"
COUNTED = ("contigs", "chunks", "frames", "skipped", "scored_frames", "missing_frames")
"""What a run that has a result has counted, at the least."""


@dataclass(kw_only=True)
class StageRecord:
    """One finished stage."""

    fingerprint: str
    """Hex sha256 of the settings that it was done with."""
    seconds: float
    """How long it took."""
    files: dict[str, str]
    """Path of what it wrote, relative to the folder -> hex sha256."""
    counts: dict[str, int] = field(default_factory=dict)
    """What it counted."""
    notes: list[str] = field(default_factory=list)
    """What a person should know of it, a sentence each."""


@dataclass(kw_only=True)
class PredictionManifest:
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
    """What decides the scores; a resumed run must have the same."""
    output_settings: dict[str, Any]
    """Threshold, formats and what is kept: may change from run to run."""
    models: dict[str, dict[str, Any]]
    """``dna``, ``protein`` and ``classifier``: name and sha256, with widths and chunk length."""
    fingerprint: str
    """Of classifier, models and chunk length: scores of different ones are not to be compared."""
    versions: dict[str, str]
    """Of Python and the packages that compute."""
    devices: list[str]
    """One name a worker."""
    sequences: str = "contigs"
    """What its sequences are called: contigs; reads, where all inputs are FASTQ or BAM; sequences, where some are."""
    finished: str | None = None
    """UTC, ISO 8601."""
    outputs: list[str] = field(default_factory=list)
    """Every file beside the embedding runs that this run or an earlier one was to write, relative to the folder. None
    of them was there before."""
    stages: dict[str, StageRecord] = field(default_factory=dict)
    """The finished stages, by name."""
    counts: dict[str, int] = field(default_factory=dict)
    """Contigs, chunks, frames and calls."""
    notes: list[str] = field(default_factory=list)
    """What a person should know, a sentence each."""
    files: dict[str, str] = field(default_factory=dict)
    """Every file of the result -> hex sha256."""
    kind: str = KIND
    """Tells it from the manifest of an embedding run."""
    format: int = FORMAT
    """Version of this layout."""

    def write(self, path: Path) -> None:
        """
        Replace the manifest on disk.

        Raises:
            OutputError: The system refused.
        """
        write_manifest(path, self)

    @classmethod
    def read(cls, path: Path) -> PredictionManifest:
        """
        Read a manifest.

        Raises:
            ResultError: It is absent, unreadable, of an embedding run, or of another layout.
        """
        data = read_values(path)
        if "kind" not in data and "plan" in data:
            raise ResultError(path, "is of an embedding run, not of an identification: use another output folder")
        if data.get("kind") != KIND or data.get("format") != FORMAT:
            raise not_a_manifest(path, f"its format is not {FORMAT}")
        try:
            manifest = cls(**{**data, "stages": {name: StageRecord(**one) for name, one in data["stages"].items()}})
        except (TypeError, KeyError, AttributeError) as error:
            raise not_a_manifest(path, str(error)) from error
        manifest._check(path)
        return manifest

    def _check(self, path: Path) -> None:
        """Raise ``ResultError`` when something that a later start relies on is of another kind."""
        kinds = {
            "state": str,
            "sequences": str,
            "inputs": list,
            "outputs": list,
            "settings": dict,
            "output_settings": dict,
            "counts": dict,
            "files": dict,
        }
        check_common(path, self, kinds)
        for name, stage in self.stages.items():
            kinds_of_stage = ((stage.files, dict), (stage.counts, dict), (stage.notes, list))
            if not all(isinstance(value, kind) for value, kind in kinds_of_stage):
                raise not_a_manifest(path, f"stage {name!r} is none")
            check_counts(path, stage.counts.values())
        check_counts(path, self.counts.values())
        layout = PredictionLayout(path.parent)
        if not all(isinstance(name, str) and layout.has_output(name) for name in self.outputs):
            raise not_a_manifest(path, "an output that no run writes")
        missing = {*COUNTED} - self.counts.keys() if self.state in {"complete", "partial"} else None
        if missing:
            raise not_a_manifest(path, f"'counts' without {', '.join(map(repr, sorted(missing)))}")


def is_prediction(path: Path) -> bool:
    """
    Whether the manifest at *path* is that of an identification.

    Raises:
        ResultError: There is no readable one.
    """
    return read_values(path).get("kind") == KIND
