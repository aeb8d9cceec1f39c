"""Identifications for the tests: random contigs, a random classifier, and the hash model in place of both encoders."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

import virnucpro.calls.classification  # noqa: F401  here, so that no forked process imports it
from tests.fakes import HASH_WIDTH, add_contig_model, hash_config, random_mlp, write_classifier
from tests.faults.forked import LIMITS, run_job
from tests.strategies import write_fasta
from virnucpro.choices import DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL, SequenceKind
from virnucpro.config import InputRules
from virnucpro.models.classifier_files.card import Encoder
from virnucpro.models.registry import MODELS
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.settings import PredictionConfig
from virnucpro.report.prediction.page import write_report

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.forked import Ended

TABLES = (
    "prediction_results.txt",
    "prediction_results_highestscore.csv",
    "contigs.tsv",
    "viral.fasta",
    "genes.gff3",
    "genes.faa",
    "tracks.bedgraph",
    "viral_regions.bed",
)


def make_contigs(path: Path, *, count: int = 12, seed: int = 5, longest_nt: int = 2500) -> dict[str, str]:
    """Write *count* random contigs, every other one without stop codons, and a long one; return their sequences."""
    chooser = random.Random(seed)
    codons = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in {"TAA", "TAG", "TGA"}]
    lengths_nt = [chooser.randint(1, longest_nt) for _ in range(count)]
    contigs = {
        f"k{n}": "".join(chooser.choices(codons if n % 2 else "ACGT", k=length_nt // 3 if n % 2 else length_nt))
        for n, length_nt in enumerate(lengths_nt)
    }
    contigs["long"] = "".join(chooser.choices(codons, k=4000))
    write_fasta(path, list(contigs.items()))
    return contigs


def hash_prediction(
    folder: Path, *, seed: int = 16, dna=None, protein=None, contig_model: bool = False, **changes
) -> PredictionConfig:
    """Settings with a random classifier in *folder*, trained, as its card says, on two hash models."""
    dna = dna or hash_config(sequence_kind=SequenceKind.DNA, allow_empty=True, max_residues=10**9)
    protein = protein or hash_config(allow_empty=True)
    encoders = [Encoder(name="hash", sha256=None, hidden_dim=HASH_WIDTH) for _ in range(2)]
    card = write_classifier(
        folder / "classifier", random_mlp(2 * HASH_WIDTH, seed=seed), dna_model=encoders[0], protein_model=encoders[1]
    )
    if contig_model:
        card = add_contig_model(folder / "classifier", card, seed=seed)
    settings = {
        "classifier_dir": folder / "classifier",
        "card": card,
        "dna": dna,
        "protein": protein,
        "rules": InputRules(sequence_kind=SequenceKind.DNA),
        "threshold": 0.5,
    }
    return PredictionConfig(**{**settings, **changes})


def predict(inputs, out: Path, config: PredictionConfig, *, workers: int = 1, **arguments):
    """Run the prediction."""
    return run_prediction(inputs, out, config, [CPU] * workers, write_report=write_report, workers=workers, **arguments)


def predict_forked(inputs, out: Path, config: PredictionConfig, *, failpoint: str | None = None, **arguments) -> Ended:
    """The same without seconds of imports for every worker; how it went is in ``run.json``."""

    def job():
        torch.set_num_threads(1)
        predict(inputs, out, config, limits=LIMITS, **arguments).raise_unless(allow_partial=False)

    return run_job(job, out, failpoint=failpoint)


def tables(out: Path) -> dict[str, bytes]:
    """Return every table of a result by its name, frames' files included."""
    written = [*(path for name in TABLES if (path := out / name).exists()), *out.glob("*_identified_*")]
    return {path.name: path.read_bytes() for path in written}


def real_classifier(folder: Path) -> Path:
    """Write a random classifier on the two bundled encoders; return its folder."""
    encoders = [
        Encoder(name=spec.name, sha256=spec.sha256, hidden_dim=spec.hidden_dim)
        for spec in (MODELS[DEFAULT_DNA_MODEL], MODELS[DEFAULT_PROTEIN_MODEL])
    ]
    module = random_mlp(sum(encoder.hidden_dim for encoder in encoders), seed=16)
    write_classifier(folder / "classifier", module, dna_model=encoders[0], protein_model=encoders[1])
    return folder / "classifier"
