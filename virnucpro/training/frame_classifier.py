"""
Train the bundled classifier: ``python -m virnucpro.training.frame_classifier DATA -o DIR``.

DATA is a folder of genomes, one file a group, its label in its name (``train_virus_*``, ``train_nonviral_*``), with
contigs to judge by (``dev_contigs.fa.gz``, ``dev_truth.tsv``). Genomes that are related to such a contig or to a genome
of the examples are left out; the rest is cut into pieces, the pieces' open frames are embedded with the bundled
encoders, and a classifier is trained on nine tenths of the genomes and stopped by the others. The contigs are scored
once, with every rule of ``contig_rules``. Weights and cards go into the folder DIR, embeddings into DIR/work, where the
same command takes them from when it is started again. Needs the extra ``train`` (scipy).
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.errors import VirNucProError
from virnucpro.models.classifier_card import DEFAULT_CLASSIFIER
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL
from virnucpro.training.classifier_publication import TrainedClassifier, publish_classifier, score_frames
from virnucpro.training.frame_data import cut_pieces, embed_frames, without_relatives
from virnucpro.training.frame_training import LabelledFrames, train_classifier
from virnucpro.training.genomes import GenomeSplit, read_genomes, split_genomes
from virnucpro.training.known_contigs import read_truth
from virnucpro.training.rule_evaluation import evaluate_rules
from virnucpro.training.training_settings import ClassifierSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.training.frame_data import FrameSet

_log = logging.getLogger(__name__)

CHUNK_NT = 500
VALIDATION_SHARE = 0.1
PIECES = 30_000
"""Pieces of a group at the most."""
FUNGUS, FUNGUS_PIECES = "train_nonviral_eukaryote", 20_000
"""The eukaryotes are one fungus: fewer pieces of it at the most."""
VIRUS_PREFIX = "train_virus_"
REFERENCES = ("dev_contigs.fa.gz", "lambda_virus.fa.gz", "crAssphage.fa")
"""What the classifier is judged by, and the genomes of the examples."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The frames of one side of the split."""

    labelled: LabelledFrames
    """Features and labels."""
    pieces_of: Counter[str]
    """Pieces of each group."""
    frames_of: Counter[str]
    """Open frames of each group."""


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Run the command.

    Raises:
        SystemExit: With the error's exit code.
    """
    summary = "Train the bundled classifier on genomes, choose by contigs, and write its card."
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=summary)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of the genomes and contigs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    parser.add_argument("--seed", type=int, default=1, help="seed of everything (default %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="CPU workers that embed (default %(default)s)")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        train_and_publish(options.data, options.output, seed=options.seed, workers=options.workers)
    except VirNucProError as error:
        _log.error("%s", error)
        raise SystemExit(error.exit_code) from error


def train_and_publish(data: Path, output: Path, *, seed: int, workers: int) -> None:
    """
    Train, choose, and write weights and cards into *output*.

    Raises:
        BadInputError: A file is no FASTA.
        WorkersFailedError: Frames could not be embedded.
    """
    files = sorted(data.glob("train_*.fna.gz"))
    references = [data / name for name in REFERENCES]
    genomes = read_genomes(files)
    unrelated, related = without_relatives(genomes, read_genomes(references))
    _log.info("%d records are left, %d are related to what it is judged by", len(unrelated), len(related))
    split = split_genomes(unrelated, seed=seed, held_out_share=VALIDATION_SHARE)
    work = output / "work"
    training, validation = embed_pieces(split, work, seed=seed, workers=workers)
    settings = ClassifierSettings(seed=seed)
    model, outcome = train_classifier(training.labelled, validation.labelled, settings)
    dev = _embed(references[0], work / "dev", workers)
    p_virus = score_frames(model, dev.features_FD)
    evaluation = evaluate_rules(p_virus, dev, read_truth(data / "dev_truth.tsv").of(dev.contigs), seed=seed)
    trained = TrainedClassifier(
        name=DEFAULT_CLASSIFIER,
        chunk_nt=CHUNK_NT,
        model=model,
        settings=settings,
        outcome=outcome,
        validation=validation.labelled,
        split=split,
        related=related,
        evaluation=evaluation,
        files=files,
        num_records=Counter(genome.file for genome in genomes),
        num_pieces=training.pieces_of + validation.pieces_of,
        num_frames=training.frames_of + validation.frames_of,
        command=f"python -m {__spec__.name} {data.name} -o DIR --seed {seed}",
    )
    publish_classifier(trained, output)


def embed_pieces(split: GenomeSplit, folder: Path, *, seed: int, workers: int) -> tuple[Pieces, Pieces]:
    """
    Cut both sides of a split into pieces and embed them.

    Args:
        split: Genomes to train on, and genomes to stop by.
        folder: Where the pieces and the embedding runs go.
        seed: Seed of the pieces.
        workers: CPU workers.

    Returns:
        The frames to train on, and those to stop by.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    sides = []
    for side, genomes, share in (("training", split.training, 1), ("validation", split.held_out, VALIDATION_SHARE)):
        fasta = folder / f"{side}.fa"
        pieces_of: Counter[str] = Counter()
        with fasta.open("w", encoding="ascii") as file:
            for group in sorted({genome.file for genome in split.training}):
                name = group.partition(".")[0]
                of_group = [genome for genome in genomes if genome.file == group]
                most = int(share * (FUNGUS_PIECES if name == FUNGUS else PIECES))
                pieces = cut_pieces(of_group, most, CHUNK_NT, random)
                file.writelines(f">{name}_{number}\n{piece}\n" for number, piece in enumerate(pieces))
                pieces_of[group] = len(pieces)
                _log.info("%s: %d pieces of %d records of %s", side, len(pieces), len(of_group), group)
        sides.append(_labelled(_embed(fasta, folder / side, workers), pieces_of))
    return sides[0], sides[1]


def _labelled(frames: FrameSet, pieces_of: Counter[str]) -> Pieces:
    files = np.array(list(pieces_of.elements()))[frames.contig_of_frames()]  # pieces are in the order of their groups
    is_virus_F = np.char.startswith(files, VIRUS_PREFIX)
    return Pieces(
        labelled=LabelledFrames(features_FD=frames.features_FD, is_virus_F=is_virus_F),
        pieces_of=pieces_of,
        frames_of=Counter(files.tolist()),
    )


def _embed(fasta: Path, work_dir: Path, workers: int) -> FrameSet:
    frames = embed_frames(
        fasta, work_dir, chunk_nt=CHUNK_NT, dna_model=DNA_MODEL, protein_model=DEFAULT_PROTEIN_MODEL, workers=workers
    )
    _log.info("%s: %d open frames of %d chunks", fasta, len(frames.features_FD), len(frames.frames_per_chunk))
    return frames


if __name__ == "__main__":
    main(sys.argv[1:])
