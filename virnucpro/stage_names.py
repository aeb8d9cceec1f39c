"""The stages of each kind of run: what users read while one runs, its task under Prefect, its line in a report."""

from __future__ import annotations

from typing import NamedTuple


class StageNames(NamedTuple):
    title: str
    """What it does, on a terminal and in logs."""
    task: str = ""
    """Of Prefect; empty where the stage has the tasks of its ranks, or is a flow run of its own."""
    label: str = ""
    """In the report of a prediction; empty for parts of a stage."""


_INDEX = "checking and indexing the input"

EMBEDDING = {
    "index": StageNames(_INDEX, "build_index"),
    "devices": StageNames("waiting for devices that other runs hold"),
    "embed": StageNames("computing embeddings"),
    "aggregate": StageNames("putting the result together", "aggregate_shards"),
    "validate": StageNames("checking the result", "validate_embeddings"),
}
PREDICTION = {
    "index": StageNames(_INDEX, "index_contigs"),
    "composition": StageNames("scoring contigs: composition, genes, homology", label="composition scores"),
    "aggregate_scores": StageNames("putting the scores together", "aggregate_scores"),
    "validate_scores": StageNames("checking the scores", "validate_scores"),
    "fragments": StageNames("cutting the contigs into chunks and frames", "cut_fragments", "chunks and reading frames"),
    "dna": StageNames("embedding the frames' DNA", label="embedding of DNA"),
    "protein": StageNames("embedding the frames' proteins", label="embedding of proteins"),
    "classify": StageNames("classifying the frames", "classify_frames", "classification"),
    "contigs": StageNames("calling the contigs", "call_contigs", "calls"),
    "aggregate_genes": StageNames("putting the genes together", "aggregate_genes"),
    "report": StageNames("writing the report", "report", "report"),
}
TRAINING = {
    "index": StageNames(_INDEX, "read_genomes"),
    "split": StageNames("splitting the genomes into parts that are not related", "split_genomes"),
    "training_fragments": StageNames(
        "cutting training fragments and their frames out of the genomes", "cut_training_fragments"
    ),
    "dna_300": StageNames("embedding the DNA of frames of 300 nt"),
    "protein_300": StageNames("embedding the proteins of frames of 300 nt"),
    "dna_500": StageNames("embedding the DNA of frames of 500 nt"),
    "protein_500": StageNames("embedding the proteins of frames of 500 nt"),
    "train": StageNames("training", "train_classifier"),
    "evaluate": StageNames("measuring on the test part", "evaluate_classifier"),
}
EVERY = {**TRAINING, **PREDICTION, **EMBEDDING}
"""Of all kinds of run; stages of the same name have the same title."""
