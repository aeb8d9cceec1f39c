"""The boxes of the form that only a training has; see ``flows/parameters.py``."""

from typing import Annotated, Literal

from pydantic import Field

from flows.parameters import Box
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL
from virnucpro.training.training_settings import (
    DEFAULT_HELD_OUT_SHARE,
    DEFAULT_PIECES,
    LEAST_PIECES,
    MOST_HELD_OUT_SHARE,
)


class Training(Box):
    """What is trained, and on how much."""

    name: str = Field(
        default="", title="Name", description="What outputs call the classifier; empty: the name of its folder."
    )
    chunk_nt: Literal[300, 500] = Field(default=500, title="Chunk", description="Nucleotides of a chunk.")
    also_chunk_nt: list[Literal[300, 500]] = Field(
        default=[],
        title="Other chunks",
        description="Nucleotides of chunks that the classifier is measured with, too, and may be used with.",
    )
    dna_model: str = Field(default=DNA_MODEL, title="Model of DNA", description="A registered name or a path.")
    protein_model: str = Field(
        default=DEFAULT_PROTEIN_MODEL, title="Model of proteins", description="A registered name or a path."
    )
    num_pieces: int = Field(
        default=DEFAULT_PIECES,
        ge=LEAST_PIECES,
        le=10**8,
        title="Pieces",
        description="Contigs that are cut out of the genomes to train on, half of them viral; a sixth as many stop the "
        "training, and a sixth measure it.",
    )
    held_out_share: float = Field(
        default=DEFAULT_HELD_OUT_SHARE,
        gt=0,
        le=MOST_HELD_OUT_SHARE,
        title="Held out",
        description="Share of each group's nucleotides that only measures, and as much that stops and calibrates.",
    )
    most_epochs: int = Field(
        default=0,
        ge=0,
        le=10**4,
        title="Passes",
        description="Over the training frames at the most; 0: 100. It ends earlier when validation says so.",
    )
    length_weights: dict[int, Annotated[float, Field(ge=0)]] = Field(
        default={},
        title="Weights of lengths",
        description="Nucleotides of a piece, and how often, against the others; what is not named keeps its weight.",
    )
    group_weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        title="Weights of groups",
        description="How many of a label's pieces come from a group, against the others; the root of its nucleotides "
        "where it is not named.",
    )
    seed: int = Field(default=1, ge=0, le=2**31 - 1, title="Seed", description="Of everything that is drawn by chance.")
    shuffle_labels: bool = Field(
        default=False,
        title="Shuffle labels",
        description="Permute the labels of the genomes: a check that the evaluation does not leak.",
    )
    data_note: str = Field(
        default="", title="Origin", description="What the card says of the origin and licence of the genomes."
    )
    keep_work: bool = Field(
        default=False, title="Keep embeddings", description="Keep pieces and embeddings when the classifier is there."
    )
    command: str = Field(
        default="",
        title="Command",
        description="What the card says makes the same classifier; empty: this flow with these parameters.",
    )


class TrainingOutput(Box):
    """What becomes of the classifier."""

    restart: bool = Field(
        default=False,
        title="Start afresh",
        description="Remove what the folder holds of an earlier training first, instead of continuing it.",
    )
