"""The outcome of a prediction: its counts, its notes, and the error that it ends a command with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from virnucpro.pipeline.run.run_result import RunResult


@dataclass(frozen=True, kw_only=True)
class PredictionResult:
    """The outcome of a prediction."""

    output_dir: Path
    """The run's folder."""
    state: str
    """complete or partial."""
    counts: Mapping[str, int]
    """Contigs, chunks, frames and calls, as in ``run.json``."""
    sequences: str
    """What the sequences are called: contigs, reads or sequences."""
    notes: tuple[str, ...]
    """What the user should know, a sentence each."""
    stages_s: Mapping[str, float]
    """Seconds by stage, stages of earlier starts included."""
    computed: tuple[str, ...]
    """Stages that this start did."""
    contigs_path: Path
    """``contigs.tsv``."""
    report_path: Path
    """``report.html``."""
    fingerprint: str
    """Of classifier, models and chunk length."""
    embeddings: tuple[RunResult, ...] = ()
    """How the embedding runs of this start went."""
    was_complete: bool = False
    """The folder held all of it already; nothing was computed."""

    def raise_unless(self, *, allow_partial: bool) -> None:
        """
        Raise the error of missing frames; with *allow_partial* they are none.

        Raises:
            WorkersFailedError, OutputError: By what happened to the embedding runs.
        """
        for result in self.embeddings:
            result.raise_unless(allow_partial=allow_partial)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json`` and for task results."""
        return {
            "state": self.state,
            "output_dir": str(self.output_dir),
            "contigs_path": str(self.contigs_path),
            "report_path": str(self.report_path),
            "fingerprint": self.fingerprint,
            "counts": dict(self.counts),
            "sequences": self.sequences,
            "notes": list(self.notes),
            "stages_s": dict(self.stages_s),
            "computed": list(self.computed),
            "embeddings": [result.to_json() for result in self.embeddings],
        }


def notes_on_contigs(counts: Mapping[str, int], sequences: str, *, chunk_nt: int, min_nt: int) -> list[str]:
    """Return what the user should know about a prediction, a sentence each."""
    sentences = {
        "skipped": "left out for what is wrong with them (bad records, listed in failed_sequences.tsv)",
        "short_contigs": f"not looked at, being shorter than {min_nt:,} nt",
        "short_for_classifier": (
            f"shorter than half of the {chunk_nt} nt that the classifier was trained with: do not rely on such calls "
            "(the published classifiers are near chance on 150 nt)"
        ),
        "no_open_frame": "without an open frame in any chunk, and so without a score",
        "by_sequence": "without an open frame in any chunk, scored by their sequence alone",
    }
    notes = [f"{sequences} {what}: {counts[name]:,}" for name, what in sentences.items() if counts.get(name)]
    if counts.get("missing_frames"):
        notes.append(
            f"open frames that could not be embedded (listed in failed_sequences.tsv): {counts['missing_frames']:,}"
        )
    return notes


def prove_counts(counts: Mapping[str, int]) -> None:
    """Assert that every contig has its call, and that every frame has its score or is counted as missing."""
    calls = sum(counts.get(call.replace(" ", "_"), 0) for call in Call)
    assert calls == counts["contigs"], f"{calls} calls of {counts['contigs']} contigs"
    scored, missing = counts["scored_frames"], counts["missing_frames"]
    assert scored + missing == counts["frames"], f"{scored} scores and {missing} missing of {counts['frames']} frames"
