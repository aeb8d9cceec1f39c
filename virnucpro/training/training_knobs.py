"""Every setting of ``virnucpro train``, once, as ``virnucpro.settings`` has those of the other runs."""

from typing import Annotated, Literal

from pydantic import Field

from virnucpro import texts
from virnucpro.choices import DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL
from virnucpro.knobs import Box, knob
from virnucpro.settings import RESTART, FilePath, RunSettings

DEFAULT_FRAGMENTS = 12_000
"""Fragments that train: some 28 million nucleotides."""
LEAST_FRAGMENTS = 60
"""Fragments below which nothing can be learnt or measured."""
DEFAULT_HELD_OUT_SHARE = 0.1
MOST_HELD_OUT_SHARE = 0.4
DEFAULT_EPOCHS = 100
LENGTHS_NT = {300: 1.0, 500: 1.0, 800: 1.0, 1000: 1.0, 2000: 1.0, 3000: 1.0, 5000: 1.0, 10_000: 0.5}
"""Nucleotides of a fragment -> how often, against the others."""

# A table: each setting in as few lines as it takes.
# fmt: off


class Training(Box):
    """What is trained, and on how much."""

    name: str = knob("", "Name", "What outputs call the classifier.", auto="the name of its folder", decides=True)
    chunk_nt: Literal[300, 500] = knob(
        500, "Chunk", "Nucleotides of a chunk.", option="--chunk", metavar="300|500", unit="nt", decides=True,
        recorded="chunk length"
    )
    also_chunk_nt: list[Literal[300, 500]] = knob(
        [], "Other chunks", "Nucleotides of other chunks that the classifier is measured with, and may be used with.",
        option="--also-chunk", metavar="300|500", unit="nt", auto="none", decides=True, recorded="other chunk lengths"
    )
    dna_model: str = knob(
        DEFAULT_DNA_MODEL, "Model of DNA", "Embeds the DNA: a registered name or a path.", text=texts.DNA_MODEL,
        metavar="NAME|PATH"
    )
    protein_model: str = knob(
        DEFAULT_PROTEIN_MODEL, "Model of proteins", "Embeds the proteins: a registered name or a path.",
        text=texts.PROTEIN_MODEL, metavar="NAME|PATH"
    )
    num_fragments: int = knob(
        DEFAULT_FRAGMENTS, "Fragments",
        "Contigs of 300 to 10,000 nt that are extracted from the genomes to train on, half of them viral; a sixth as "
        "many stop the training, and a sixth measure it.",
        ge=LEAST_FRAGMENTS, le=10**8, option="--fragments", metavar="N",
        decides=True, recorded="fragments"
    )
    embedded_fragments: int = knob(
        0, "Embedded fragments",
        "Fragments that train whose frames are embedded; if there are others, the contig model reads no embeddings.",
        ge=0, le=10**8, metavar="N", auto="all", decides=True, recorded="embedded fragments"
    )
    held_out_share: float = knob(
        DEFAULT_HELD_OUT_SHARE, "Held out",
        "Share of each group's nucleotides that only measures, and as much that stops and calibrates.", gt=0,
        le=MOST_HELD_OUT_SHARE, option="--held-out", metavar="SHARE", decides=True, recorded="held-out share"
    )
    most_epochs: int = knob(
        0, "Passes", "Over the training frames, at most; validation may end it earlier.", ge=0, le=10**4,
        option="--epochs", metavar="N", auto=f"{DEFAULT_EPOCHS}", decides=True, recorded="classifier most_epochs"
    )
    length_weights: dict[int, Annotated[float, Field(ge=0)]] = knob(
        {}, "Weights of lengths",
        "How often a fragment has this many nucleotides, against the others; what is not named keeps its weight.",
        option="--length-weight", metavar="NT=NUMBER",
        auto=", ".join(f"{length}={weight:g}" for length, weight in LENGTHS_NT.items()), decides=True,
        recorded="lengths of fragments"
    )
    group_weights: dict[str, Annotated[float, Field(ge=0)]] = knob(
        {}, "Weights of groups", "How many of a label's fragments come from this group, against the others.",
        option="--group-weight", metavar="GROUP=NUMBER", auto="the root of the group's nucleotides", decides=True,
        recorded="group weights"
    )
    leave_groups_out: bool = knob(
        False, "Leave groups out",
        "Measure for the card how each group ranks when nothing like it trains: half a minute a group.", decides=True,
        recorded="leave groups out"
    )
    shuffle_labels: bool = knob(
        False, "Shuffle labels",
        "Permute the labels of the genomes: a check that the evaluation does not leak (AUROC near 0.5).", decides=True,
        recorded="shuffled labels"
    )
    seed: int = knob(1, "Seed", "Of all random numbers.", ge=0, le=2**31 - 1, metavar="N", decides=True)
    data_note: str = knob("", "Origin", "What the card says of the origin and licence of the genomes.", metavar="TEXT")
    keep_work: bool = knob(False, "Keep embeddings", "Keep fragments and embeddings when the classifier is done.")
    command: str = knob(
        "", "Command", "What the card says makes the same classifier.", auto="this flow with these parameters",
        faces="form"
    )


class TrainingOutput(Box):
    """What becomes of the classifier."""

    restart: bool = RESTART


class TrainingSettings(RunSettings):
    genomes: str = knob(
        "", "Genomes",
        "Tab-separated, with a header: id (of a record) or file, label (virus or nonviral), and optionally group and "
        "genome; records without a line are labelled by the names of their files.", metavar="TABLE",
        auto="what the names of the files say", decides=True
    )
    annotations: list[FilePath] = knob(
        [], "Annotations",
        "Proteins of the genomes: GenBank flat files, or FASTA of CDS translations. Reading frames then count only "
        "where they are part of one. May be given again.", metavar="FILE", auto="none", decides=True
    )
    leave_out: list[FilePath] = knob(
        [], "Leave out",
        "Genomes or contigs that the classifier will be judged by: their relatives are not used. May be given again.",
        metavar="FASTA", auto="none", decides=True
    )
    training: Training = Training()
    result: TrainingOutput = TrainingOutput()
