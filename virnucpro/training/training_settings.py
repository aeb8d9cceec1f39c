"""
Settings of ``virnucpro train``: what a classifier is made of, checked before anything is read.

``TrainingConfig.settings`` is what decides the classifier, which a training that goes on must have in common with the
one that began. Imports neither torch nor scipy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.config import AUTO_TOKEN_BUDGET, DEFAULT_CACHE_GIB, ModelConfig, SequenceKind, computing_versions
from virnucpro.errors import ConfigurationError, printable
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL
from virnucpro.pipeline.multi_gpu_inference import configure_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

DEFAULT_PIECES = 12_000
"""Pieces that train: some 28 million nucleotides."""
MEASURED_SHARE = 1 / 6
"""Pieces of validation, and of test, for each one that trains."""
DEFAULT_HELD_OUT_SHARE = 0.1
"""Share of each group's nucleotides that is for test, and as much for validation."""
MOST_HELD_OUT_SHARE = 0.4
CHUNKS_NT = (300, 500)
"""Nucleotides of a chunk, as the published classifiers have them."""
TRAINING_COVERAGE, MEASURED_COVERAGE = 8.0, 2.0
"""Times that a genome's letters are used at the most, for training and for what is measured on."""
LENGTHS_NT = {300: 1.0, 500: 1.0, 800: 1.0, 1000: 1.0, 2000: 1.0, 3000: 1.0, 5000: 1.0, 10_000: 0.5}
"""Nucleotides of a piece -> how often, against the others."""
SHORTEST_NT = 300
"""Nucleotides of the shortest piece, and of the shortest record that is cut."""
LEAST_PIECES = 60
"""Pieces below which nothing can be learnt or measured."""


@dataclass(frozen=True, kw_only=True)
class ClassifierSettings:
    """How the frame classifier is trained."""

    hidden_dim: int = 256
    """Width of the hidden layer."""
    dropout: float = 0.5
    """Share of the hidden layer that is left out of each step."""
    batch_frames: int = 512
    """Frames of one step."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    weight_decay: float = 1e-2
    """Of AdamW."""
    most_epochs: int = 100
    """Passes over the frames at the most."""
    patience_epochs: int = 10
    """Passes without a lower loss on the held-out genomes after which training ends."""
    seed: int = 1
    """Seed of the first weights, the order of the frames and the dropout."""


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
    """Share of the inputs that is left out of each step: no network can rely on a few of them."""
    dropout: float = 0.4
    """Share of the first hidden layer that is left out of each step; half of that in the second one."""
    batch_contigs: int = 256
    """Contigs of one step."""
    learning_rate: float = 2e-3
    """Highest one of AdamW, in one cycle (Smith and Topin 2018)."""
    weight_decay: float = 2e-2
    """Of AdamW."""
    most_epochs: int = 30
    """Passes over the contigs at the most."""
    patience_epochs: int = 10
    """Passes without a lower loss on validation after which training ends."""
    seed: int = 1
    """Seed of folds, first weights, the order of the contigs and dropout."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a training needs to know; small and picklable."""

    name: str
    """What the classifier is called."""
    chunk_nt: int
    """Nucleotides of a chunk."""
    also_chunk_nt: tuple[int, ...] = ()
    """Nucleotides of other chunks that it is measured with, and may be used with."""
    dna: ModelConfig
    """How nucleotides of frames are embedded."""
    protein: ModelConfig
    """How proteins of frames are embedded."""
    labels: Path | None = None
    """Table of labels; None takes them from the names of the files."""
    annotations: tuple[Path, ...] = ()
    """Annotated proteins, which frames must be part of."""
    leave_out: tuple[Path, ...] = ()
    """Genomes or contigs whose relatives are left out."""
    num_pieces: int = DEFAULT_PIECES
    """Pieces that train."""
    held_out_share: float = DEFAULT_HELD_OUT_SHARE
    """Share of each group's nucleotides that is for test, and as much for validation."""
    lengths_nt: Mapping[int, float] = field(default_factory=lambda: dict(LENGTHS_NT))
    """Nucleotides of a piece -> how often, against the others."""
    group_weights: Mapping[str, float]
    """Group -> its share of its label's pieces, against the others; the root of its nucleotides where it is not in."""
    classifier: ClassifierSettings
    """How the frame classifier is trained."""
    contig: ContigSettings
    """How the contig model is trained."""
    seed: int = 1
    """Seed of everything."""
    shuffle_labels: bool = False
    """Whether the labels are permuted, so that nothing can be learnt."""
    data_note: str = ""
    """What the card says of the licence and origin of the genomes."""
    keep_work: bool = False
    """Whether the embeddings stay when the classifier is there."""
    command: str = ""
    """What the card says makes the same classifier."""

    @property
    def measured_pieces(self) -> int:
        """Pieces of validation, and of test."""
        return max(LEAST_PIECES // 3, int(MEASURED_SHARE * self.num_pieces))

    def settings(self, device_type: str) -> dict[str, Any]:
        """Return what decides the classifier, ready for JSON."""
        models = {
            f"{kind} model {key}": value
            for kind, config in (("DNA", self.dna), ("protein", self.protein))
            for key, value in config.result_settings().items()
            if key not in _SETTLED_BY_EMBEDDING
        }
        return {
            "name": self.name,
            "chunk length": self.chunk_nt,
            "other chunk lengths": list(self.also_chunk_nt),
            "labels by": "names" if self.labels is None else "table",
            "files of annotated proteins": len(self.annotations),
            "files whose relatives are left out": len(self.leave_out),
            "pieces": self.num_pieces,
            "held-out share": self.held_out_share,
            "lengths of pieces": {str(length): weight for length, weight in sorted(self.lengths_nt.items())},
            "group weights": dict(sorted(self.group_weights.items())),
            "seed": self.seed,
            "shuffled labels": self.shuffle_labels,
            **{f"classifier {name}": value for name, value in asdict(self.classifier).items()},
            **{f"contig model {name}": value for name, value in asdict(self.contig).items()},
            "contig model hidden_dims": list(self.contig.hidden_dims),  # as JSON gives it back
            **models,
            "device_type": device_type,
            **computing_versions(),
        }


_SETTLED_BY_EMBEDDING = ("token_budget", "attention_kernel", "gaps", "stops", "on_bad_record", "letters_per_token")
"""Settled, kept and checked by the embedding runs, or without a meaning for frames."""


def configure_training(
    *,
    name: str,
    chunk_nt: int = 500,
    also_chunk_nt: Sequence[int] = (),
    dna_model: str | Path = DNA_MODEL,
    protein_model: str | Path = DEFAULT_PROTEIN_MODEL,
    labels: Path | None = None,
    annotations: Sequence[Path] = (),
    leave_out: Sequence[Path] = (),
    num_pieces: int = DEFAULT_PIECES,
    held_out_share: float = DEFAULT_HELD_OUT_SHARE,
    most_epochs: int | None = None,
    length_weights: Mapping[int, float] | None = None,
    group_weights: Mapping[str, float] | None = None,
    seed: int = 1,
    shuffle_labels: bool = False,
    data_note: str = "",
    keep_work: bool = False,
    command: str = "",
    device_type: str,
    precision: str = "auto",
    weights_dir: Path | None = None,
    token_budget: int = AUTO_TOKEN_BUDGET,
    threads_per_worker: int = 1,
    workers_per_device: int = 1,
    cache_dir: str | Path | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    log_level: str = "INFO",
    profile: bool = False,
    on_download: Callable[[int, int | None], None] | None = None,
) -> TrainingConfig:
    """
    Find the encoders and settle everything.

    Args:
        name: What the classifier is called.
        chunk_nt: Nucleotides of a chunk.
        also_chunk_nt: Nucleotides of other chunks that it is measured with, and may be used with.
        dna_model: Registered name, or path; so is *protein_model*.
        protein_model: As *dna_model*.
        labels: Table of labels; None takes them from the names of the files.
        annotations: Annotated proteins.
        leave_out: Genomes or contigs whose relatives are left out.
        num_pieces: Pieces that train.
        held_out_share: Share of each group's nucleotides that is for test, and as much for validation.
        most_epochs: Passes of the frame classifier at the most.
        length_weights: Nucleotides of a piece -> how often; what is not named keeps its weight in ``LENGTHS_NT``.
        group_weights: Group -> its share, against the others of its label.
        seed: Seed of everything.
        shuffle_labels: Permute the labels.
        data_note: What the card says of the licence and origin of the genomes.
        keep_work: Keep the embeddings.
        command: What the card says makes the same classifier.
        device_type: ``cpu`` or ``cuda``; this and what follows as in ``configure_model``.
        precision: Of both encoders.
        weights_dir: Folder that is looked into first.
        token_budget: Tokens in one block at the most.
        threads_per_worker: Threads of a CPU worker.
        workers_per_device: Workers that share a GPU.
        cache_dir: Folder of the embedding cache.
        cache_gib: GiB that it takes at the most.
        log_level: Of the workers' log files.
        profile: Whether workers record when they did what.
        on_download: Called with bytes fetched and bytes in all.

    Raises:
        UnknownModelError: No such model.
        WeightsError: Weights cannot be had.
        ConfigurationError: A setting is out of range.
    """
    for length in (chunk_nt, *also_chunk_nt):
        if length not in CHUNKS_NT:
            raise ConfigurationError(f"chunks of {length} nt: choose one of {' and '.join(map(str, CHUNKS_NT))}")
    _check_amounts(num_pieces, held_out_share)
    if not name or not name.isprintable():
        raise ConfigurationError(f"the name {printable(name)!r} is none: give the classifier one with --name")
    for group, weight in (group_weights or {}).items():
        if not 0 <= weight < float("inf"):
            raise ConfigurationError(f"the weight of {group} is {weight}: it must be 0 or above")

    def model(which: str | Path, kind: SequenceKind) -> ModelConfig:
        config = configure_model(
            which,
            device_type=device_type,
            precision=precision,
            weights_dir=weights_dir,
            token_budget=token_budget,
            threads_per_worker=threads_per_worker,
            workers_per_device=workers_per_device,
            cache_dir=cache_dir,
            cache_gib=cache_gib,
            log_level=log_level,
            profile=profile,
            on_download=on_download,
        )
        if config.sequence_kind is not kind:
            raise ConfigurationError(f"{config.model_name} embeds {config.sequence_kind}: it is no {kind} model")
        return config

    classifier = ClassifierSettings(seed=seed, most_epochs=most_epochs or ClassifierSettings.most_epochs)
    return TrainingConfig(
        name=name,
        chunk_nt=chunk_nt,
        also_chunk_nt=tuple(sorted(set(also_chunk_nt) - {chunk_nt})),
        dna=model(dna_model, SequenceKind.DNA),
        protein=model(protein_model, SequenceKind.PROTEIN),
        labels=labels,
        annotations=tuple(annotations),
        leave_out=tuple(leave_out),
        num_pieces=num_pieces,
        held_out_share=held_out_share,
        lengths_nt=_lengths(length_weights or {}),
        group_weights=dict(group_weights or {}),
        classifier=classifier,
        contig=ContigSettings(seed=seed),
        seed=seed,
        shuffle_labels=shuffle_labels,
        data_note=data_note,
        keep_work=keep_work,
        command=command,
    )


def _lengths(weights: Mapping[int, float]) -> dict[int, float]:
    """Return the weight of each length of pieces that has any."""
    lengths = {length: weight for length, weight in {**LENGTHS_NT, **weights}.items() if weight != 0}
    wrong = [length for length in lengths if length < SHORTEST_NT or not 0 < lengths[length] < float("inf")]
    if wrong or not lengths:
        what = f"pieces of {wrong[0]} nt with the weight {lengths[wrong[0]]:g}" if wrong else "pieces of no length"
        raise ConfigurationError(f"{what}: give lengths of {SHORTEST_NT} nt and more, and weights of 0 and above")
    return lengths


def _check_amounts(num_pieces: int, held_out_share: float) -> None:
    if num_pieces < LEAST_PIECES:
        raise ConfigurationError(f"{num_pieces} pieces: at least {LEAST_PIECES} are needed")
    if not 0 < held_out_share <= MOST_HELD_OUT_SHARE:
        what = f"a held-out share of {held_out_share:g}: above 0, and {MOST_HELD_OUT_SHARE} at the most"
        raise ConfigurationError(what)
