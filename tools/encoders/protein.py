"""
Train the bundled protein encoder: ``python -m tools.encoders.protein FASTA -o DIR``.

Splits the proteins, trains, evaluates on the held-out part, and writes weights and card into the folder, with a
checkpoint from which the same command resumes. Needs PyTorch 2.9 or later (Muon): the extra ``train``.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.encoders.card import publish
from tools.encoders.command import run_training, training_card, training_parser
from tools.encoders.evaluation import (
    compositions,
    held_out_loss,
    mean_embeddings,
    protein_names,
    retrieval,
)
from tools.encoders.masked_residues import ResidueObjective
from tools.encoders.protein_split import Split, largest_overlaps, linked_groups, split_by_overlap
from tools.encoders.training import TrainingSettings, train_encoder
from virnucpro.durable import sha256_of
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer
from virnucpro.training.genomes.records import Record, read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from esm.model.esm2 import ESM2

_log = logging.getLogger(__name__)

MODEL_NAME = "virnucpro-tiny-protein"
SPLIT_RULE = (
    "Two proteins are linked when one contains half or more of the other's distinct 5-mers; whole groups of linked "
    "proteins are held out, in a random order, up to a tenth of the proteins."
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = training_parser(
        __spec__.name,
        "Train an ESM-2-architecture encoder by masked-residue prediction, and write its card.",
        TrainingSettings(),
    )
    parser.add_argument("fasta", type=Path, metavar="FASTA", help="proteins, gzip-compressed or not")
    options = parser.parse_args(arguments)
    run_training(
        options,
        TrainingSettings(),
        lambda settings, device: train_and_publish(options.fasta, options.output, settings, device),
    )


def train_and_publish(fasta: Path, output: Path, settings: TrainingSettings, device: torch.device) -> None:
    """Train on nine tenths of *fasta*, evaluate on the rest, and write the encoder with its card into *output*."""
    output.mkdir(parents=True, exist_ok=True)
    proteins = read_records(fasta)
    split = split_by_overlap([protein.letters for protein in proteins], seed=settings.seed)
    _log.info("%d proteins train, %d are held out", len(split.training), len(split.held_out))
    tokenizer = ProteinTokenizer()
    training = [tokenizer.encode([proteins[number].letters])[0][1:-1] for number in split.training]
    model, state = train_encoder(
        training, settings, ResidueObjective(), device=device, checkpoint=output / "checkpoint.pt"
    )
    model.eval()
    held_out = [proteins[number] for number in split.held_out]
    held_out_ids = [tokenizer.encode([protein.letters])[0][1:-1] for protein in held_out]
    loss = held_out_loss(model, tokenizer, held_out=held_out_ids, training=training)
    _log.info(
        "held-out loss %.4f nats per masked residue, unigram model %.4f: %.4f better",
        *(loss.encoder, loss.unigram, loss.gain),
    )
    card = {
        "name": MODEL_NAME,
        "purpose": "a demonstration encoder: small enough to come with the package",
        "licence": "CC-BY-4.0",
        "data": _data_card(fasta, proteins),
        "split": _split_card(proteins, split, settings),
        "training": training_card(__spec__.name, [fasta], settings, state, device),
        "held_out_loss": loss.as_card("num_residues"),
        "retrieval": _retrieval_card(model, tokenizer, held_out),
    }
    files = publish(model, card, output)
    _log.info("wrote %s, %s and %s", files.weights, files.card, files.text)


def _data_card(fasta: Path, proteins: Sequence[Record]) -> dict[str, Any]:
    return {
        "description": "UniProt proteins, as in Debian's mmseqs2-examples",
        "licence": "CC BY 4.0 (UniProt Consortium)",
        "file": fasta.name,
        "sha256": sha256_of(fasta),
        "num_proteins": len(proteins),
        "num_accessions": len({protein.accession for protein in proteins}),
        "num_residues": sum(len(protein.letters) for protein in proteins),
    }


def _split_card(proteins: Sequence[Record], split: Split, settings: TrainingSettings) -> dict[str, Any]:
    overlaps = largest_overlaps(
        [proteins[number].letters for number in split.held_out],
        [proteins[number].letters for number in split.training],
    )
    _log.info("largest share of a held-out protein's 5-mers in one training protein: %.4f", overlaps.max())
    return {
        "rule": SPLIT_RULE,
        "seed": settings.seed,
        "num_groups": split.num_groups,
        "num_training": len(split.training),
        "num_held_out": len(split.held_out),
        "largest_overlap": float(overlaps.max()),
        "mean_overlap": float(overlaps.mean()),
    }


def _retrieval_card(model: ESM2, tokenizer: ProteinTokenizer, held_out: Sequence[Record]) -> dict[str, Any]:
    sequences = [protein.letters for protein in held_out]
    names = protein_names([protein.description for protein in held_out])
    groups = linked_groups(sequences)
    embeddings_RD = mean_embeddings(model, tokenizer, [tokenizer.encode([text])[0][1:-1] for text in sequences])
    vectors = (embeddings_RD, compositions(sequences))
    near, far = (retrieval(names, groups, *vectors, across_groups=across) for across in (False, True))
    for label, result in (("all neighbours", near), ("no near copies", far)):
        _log.info(
            "same protein name nearest, %s: embedding %.3f, composition %.3f (%d queries)",
            *(label, result.embedding, result.composition, result.num_queries),
        )
    wins = [result.embedding > result.composition for result in (near, far)]
    verdict = {
        (True, True): "The embedding beats composition in both.",
        (False, False): "The embedding does not beat composition in either.",
        (True, False): "The embedding beats composition only where near copies can be found.",
        (False, True): "The embedding beats composition only where near copies are left out.",
    }[wins[0], wins[1]]
    return {"all": asdict(near), "across_groups": asdict(far), "verdict": verdict}


if __name__ == "__main__":
    main(sys.argv[1:])
