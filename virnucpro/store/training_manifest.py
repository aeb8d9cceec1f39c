"""``run.json`` of a training: what it is made of, and which of its stages are done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.store.json_manifest import check_common, check_counts, not_a_manifest, read_values, write_manifest
from virnucpro.store.prediction_manifest import StageRecord

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
KIND = "training"


@dataclass(kw_only=True)
class TrainingManifest:
    """The content of ``run.json``."""

    run_id: str
    """Of the last run in this folder."""
    state: str
    """running, complete, failed or stopped."""
    started: str
    """UTC, ISO 8601."""
    host: str
    """Where it ran."""
    inputs: list[dict[str, Any]]
    """path, size_bytes and sha256 of each file that is read: genomes first, then tables and other genomes."""
    settings: dict[str, Any]
    """What decides the classifier; a resumed training must have the same."""
    versions: dict[str, str]
    """Of Python and the packages that compute."""
    devices: list[str]
    """One name a worker of the embedding runs."""
    finished: str | None = None
    """UTC, ISO 8601."""
    stages: dict[str, StageRecord] = field(default_factory=dict)
    """The finished stages, by name."""
    counts: dict[str, int] = field(default_factory=dict)
    """Genomes, pieces, chunks and frames."""
    notes: list[str] = field(default_factory=list)
    """What a person should know, a sentence each."""
    files: dict[str, str] = field(default_factory=dict)
    """Every file of the classifier -> hex sha256."""
    kind: str = KIND
    """Tells it from the manifests of other runs."""
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
    def read(cls, path: Path) -> TrainingManifest:
        """
        Read a manifest.

        Raises:
            ResultError: It is absent, unreadable, of another kind of run, or of another layout.
        """
        data = read_values(path)
        if data.get("kind") != KIND or data.get("format") != FORMAT:
            raise not_a_manifest(path, "it is not one of a training")
        try:
            manifest = cls(**{**data, "stages": {name: StageRecord(**one) for name, one in data["stages"].items()}})
        except (TypeError, KeyError, AttributeError) as error:
            raise not_a_manifest(path, str(error)) from error
        kinds = {"state": str, "inputs": list, "settings": dict, "counts": dict, "files": dict, "devices": list}
        check_common(path, manifest, kinds)
        for name, stage in manifest.stages.items():
            if not (isinstance(stage.files, dict) and isinstance(stage.counts, dict)):
                raise not_a_manifest(path, f"stage {name!r} is none")
            check_counts(path, stage.counts.values())
        check_counts(path, manifest.counts.values())
        return manifest


def is_training(path: Path) -> bool:
    """
    Whether the manifest at *path* is that of a training.

    Raises:
        ResultError: There is no readable one.
    """
    return read_values(path).get("kind") == KIND
