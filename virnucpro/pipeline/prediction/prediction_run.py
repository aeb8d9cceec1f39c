"""A prediction under way: its files and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virnucpro.calls.frame_order import FrameOrder
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.run.stages import StagedRun

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.pipeline.prediction.settings import PredictionConfig
    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import PredictionManifest


@dataclass(kw_only=True)
class PredictionRun(StagedRun):
    """A prediction under way; the stages share it."""

    layout: PredictionLayout
    manifest: PredictionManifest
    config: PredictionConfig
    """What to compute."""
    stems: tuple[str, ...]
    """Of the input files; their frames' files begin with them."""
    notices: list[str] = field(default_factory=list)
    """What was kept of the folder's settings, and what was changed, a sentence each."""

    def open_index(self) -> SequenceIndex:
        """Open the index of the contigs."""
        return SequenceIndex.open(self.layout.contig_index)

    def frame_order(self) -> FrameOrder:
        """Return all frames in their order; the fragments must be there."""
        config = self.config
        return FrameOrder(self.open_index(), self.layout.open_frames, chunk_nt=config.chunk_nt, min_nt=config.min_nt)

    @property
    def nucleotide_files(self) -> list[Path]:
        """Nucleotides of the kept frames, one file an input file."""
        return [self.layout.nucleotide_frames(stem) for stem in self.stems]

    @property
    def protein_files(self) -> list[Path]:
        """Proteins of the kept frames, one file an input file."""
        return [self.layout.protein_frames(stem) for stem in self.stems]

    @property
    def chunk_files(self) -> list[Path]:
        """Chunks, one file an input file; written on request."""
        return [self.layout.chunks(stem, self.config.chunk_nt) for stem in self.stems]
