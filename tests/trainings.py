"""Trainings for the tests: made genomes that can be told apart, and the hash model in place of both encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch._dynamo

import virnucpro.training.fitting.classifier_fitting  # noqa: F401  here, so that no forked process imports it
from tests.fakes import hash_config
from tests.faults.forked import LIMITS, run_job
from tests.strategies import write_fasta
from virnucpro.choices import SequenceKind
from virnucpro.pipeline.devices import CPU
from virnucpro.training.classifier_training import run_training
from virnucpro.training.training_knobs import Training
from virnucpro.training.training_settings import ClassifierSettings, ContigSettings, TrainingConfig, TreeSettings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.forked import Ended

STOPS = {"TAA", "TAG", "TGA"}
CODONS = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in STOPS]


def make_genomes(folder: Path, *, count: int = 8, codons: int = 1500) -> list[Path]:
    """Write *count* viral genomes, rich in AT, and as many others, rich in GC, open in one frame; return the files."""
    files = []
    for name, favoured in (("virus_phage", "AT"), ("nonviral_bacteria", "GC")):
        weights = np.array([3.0 ** sum(codon.count(base) for base in favoured) for codon in CODONS])
        random = np.random.default_rng(len(name))
        genomes = [
            (f"{name}_{n}", "".join(random.choice(CODONS, codons, p=weights / weights.sum()))) for n in range(count)
        ]
        files.append(write_fasta(folder / f"{name}.fa", genomes))
    return files


TINY = {"name": "tiny", "num_fragments": 60, "command": "virnucpro train"}


def hash_training(**changes) -> TrainingConfig:
    """Settings of a training of seconds."""
    settings = {
        "dna": hash_config(
            sequence_kind=SequenceKind.DNA, max_residues=10**9, token_budget=4096, sequences_per_part=64
        ),
        "protein": hash_config(token_budget=4096, sequences_per_part=64),
        "classifier": ClassifierSettings(hidden_dim=8, most_epochs=3),
        "contig": ContigSettings(folds=2, members=1, most_epochs=3, trees=TreeSettings(trees=3)),
    }
    asked = {name: value for name, value in changes.items() if name not in TrainingConfig.__dataclass_fields__}
    settings |= {name: value for name, value in changes.items() if name not in asked}
    return TrainingConfig(asked=Training(**{**TINY, **asked}), **settings)


def train_forked(inputs, out: Path, config: TrainingConfig, *, workers: int = 1, **arguments) -> Ended:
    """Train to the end in a forked process, without seconds of imports for every worker."""

    def job():
        torch.set_num_threads(1)
        run_training(inputs, out, config, [CPU] * workers, workers=workers, limits=LIMITS, **arguments)

    return run_job(job, out)
