"""
Settings of ``virnucpro train``: what a classifier is made of, checked before anything is read.

``TrainingConfig.settings`` is what decides the classifier, which a training that goes on must have in common with the
one that began. Imports neither torch nor scipy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro.choices import SequenceKind
from virnucpro.errors import ConfigurationError, printable
from virnucpro.knobs import recorded_settings
from virnucpro.pipeline.prediction.settings import configure_encoder, encoder_settings
from virnucpro.training.training_knobs import DEFAULT_EPOCHS, LEAST_FRAGMENTS, LENGTHS_NT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from virnucpro.config import ModelConfig
    from virnucpro.training.training_knobs import Training, TrainingSettings

MEASURED_SHARE = 1 / 6
"""Fragments of validation, and of test, for each one that trains."""
CHUNKS_NT = (300, 500)
"""Nucleotides of a chunk, as the published classifiers have them."""
TRAINING_COVERAGE, MEASURED_COVERAGE = 8.0, 2.0
"""Times that a genome's letters are used, at most, for training and for what is measured on."""
ERROR_SHARE = 0.15
"""Of fragments, those that get errors of sequencing."""
SHORTEST_NT = 300
"""Nucleotides of the shortest fragment, and of the shortest record that is cut."""


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """How the frame classifier is trained."""

    hidden_dim: int = 256
    """Width of the hidden layer."""
    dropout: float = 0.5
    """Share of the hidden layer that is dropped in each step."""
    batch_frames: int = 512
    """Frames of one step."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    weight_decay: float = 1e-2
    """Of AdamW."""
    most_epochs: int = DEFAULT_EPOCHS
    """Passes over the frames, at most."""
    patience_epochs: int = 10
    """Passes without a lower loss on the held-out genomes after which training ends."""
    seed: int = 1
    """Seed of the first weights, the order of the frames and the dropout."""


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """How the boosted trees of a contig model are fitted."""

    trees: int = 700
    """One after the other."""
    leaves: int = 47
    """Of a tree, at most."""
    learning_rate: float = 0.06
    """Share of a tree's values that counts."""
    inputs_share: float = 0.2
    """Share of the inputs that a tree may use."""
    contigs_share: float = 0.7
    """Share of the contigs that a tree is fitted on."""
    least_contigs: int = 40
    """Contigs in a leaf, at least."""
    l2: float = 5.0
    """Penalty of large leaf values."""
    seed: int = 1
    """Seed of the choice of inputs and contigs."""

    def quick(self) -> TreeSettings:
        """Return settings of fewer trees, each of which counts more, for a third of the time."""
        return replace(self, trees=min(self.trees, 250), learning_rate=0.12)


@dataclass(frozen=True, kw_only=True)
class ContigSettings:
    """How a contig model is trained."""

    folds: int = 8
    """Parts of the training genomes; a contig's log-odds come from the parts that its genome is not in."""
    members: int = 3
    """Networks, M."""
    hidden_dims: tuple[int, int] = (256, 64)
    """Widths of their hidden layers."""
    input_dropout: float = 0.3
    """Share of the inputs that is dropped in each step: no network can rely on a few of them."""
    dropout: float = 0.4
    """Share of the first hidden layer that is dropped in each step; half of that in the second one."""
    batch_contigs: int = 256
    """Contigs of one step."""
    learning_rate: float = 2e-3
    """Highest one of AdamW, in one cycle (Smith and Topin 2018)."""
    weight_decay: float = 2e-2
    """Of AdamW."""
    most_epochs: int = 30
    """Passes over the contigs, at most."""
    patience_epochs: int = 10
    """Passes without a lower loss on validation after which training ends."""
    trees: TreeSettings = TreeSettings()
    """How its boosted trees are fitted."""
    seed: int = 1
    """Seed of folds, first weights, the order of the contigs and dropout."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a training needs to know; small and picklable."""

    asked: Training
    """As the user gave it."""
    also_chunk_nt: tuple[int, ...] = ()
    """Nucleotides of other chunks that it is measured with, and may be used with."""
    dna: ModelConfig
    """How nucleotides of frames are embedded."""
    protein: ModelConfig
    """How proteins of frames are embedded."""
    genomes: Path | None = None
    """Table of genomes; None takes labels from the names of the files."""
    annotations: tuple[Path, ...] = ()
    """Annotated proteins, which frames must be part of."""
    leave_out: tuple[Path, ...] = ()
    """Genomes or contigs whose relatives are not used."""
    lengths_nt: Mapping[int, float] = field(default_factory=lambda: dict(LENGTHS_NT))
    """Nucleotides of a fragment -> how often, against the others."""
    classifier: ClassifierSettings
    """How the frame classifier is trained."""
    contig: ContigSettings
    """How the contig model is trained."""

    @property
    def measured_fragments(self) -> int:
        """Fragments of validation, and of test."""
        return _measured(self.asked.num_fragments)

    def embedded_fragments(self, part: str) -> int:
        """Return how many fragments of a part have their frames embedded, at most."""
        of_training = self.asked.embedded_fragments or self.asked.num_fragments
        return of_training if part == "train" else _measured(of_training)

    def settings(self, device_type: str) -> dict[str, Any]:
        """Return what decides the classifier, ready for JSON."""
        return {
            **recorded_settings(self.asked),
            "other chunk lengths": list(self.also_chunk_nt),
            "labels by": "names" if self.genomes is None else "table",
            "files of annotated proteins": len(self.annotations),
            "files whose relatives are left out": len(self.leave_out),
            "lengths of fragments": {str(length): weight for length, weight in sorted(self.lengths_nt.items())},
            **{f"classifier {name}": value for name, value in asdict(self.classifier).items()},
            **{f"contig model {name}": value for name, value in asdict(self.contig).items()},
            "contig model hidden_dims": list(self.contig.hidden_dims),  # as JSON gives it back
            **encoder_settings((self.dna, self.protein), device_type),
        }


def configure_training(
    settings: TrainingSettings, *, device_type: str, on_download: Callable[[int, int | None], None] | None = None
) -> TrainingConfig:
    """
    Find the encoders and resolve their settings.

    Raises:
        UnknownModelError: No such model.
        WeightsError: Weights cannot be had.
        ConfigurationError: A setting is out of range.
    """
    asked = settings.training
    if not asked.name or not asked.name.isprintable():
        raise ConfigurationError(f"the name {printable(asked.name)!r} is none: give the classifier one with --name")
    for group, weight in asked.group_weights.items():
        if not 0 <= weight < float("inf"):
            raise ConfigurationError(f"the weight of {group} is {weight}: it must be 0 or above")

    encoder = partial(configure_encoder, settings=settings, device_type=device_type, on_download=on_download)
    return TrainingConfig(
        asked=asked,
        also_chunk_nt=tuple(sorted(set(asked.also_chunk_nt) - {asked.chunk_nt})),
        dna=encoder(asked.dna_model, SequenceKind.DNA),
        protein=encoder(asked.protein_model, SequenceKind.PROTEIN),
        genomes=Path(settings.genomes) if settings.genomes else None,
        annotations=tuple(map(Path, settings.annotations)),
        leave_out=tuple(map(Path, settings.leave_out)),
        lengths_nt=_lengths(asked.length_weights),
        classifier=ClassifierSettings(seed=asked.seed, most_epochs=asked.most_epochs or DEFAULT_EPOCHS),
        contig=ContigSettings(seed=asked.seed, trees=TreeSettings(seed=asked.seed)),
    )


def _measured(num_fragments: int) -> int:
    """Return the fragments of validation, and of test, for so many that train."""
    return max(LEAST_FRAGMENTS // 3, int(MEASURED_SHARE * num_fragments))


def _lengths(weights: Mapping[int, float]) -> dict[int, float]:
    """Return the weight of each length of fragments that has any."""
    lengths = {length: weight for length, weight in {**LENGTHS_NT, **weights}.items() if weight != 0}
    wrong = [length for length in lengths if length < SHORTEST_NT or not 0 < lengths[length] < float("inf")]
    if wrong or not lengths:
        what = (
            f"fragments of {wrong[0]} nt with the weight {lengths[wrong[0]]:g}" if wrong else "fragments of no length"
        )
        raise ConfigurationError(f"{what}: give lengths of {SHORTEST_NT} nt and more, and weights of 0 and above")
    return lengths
