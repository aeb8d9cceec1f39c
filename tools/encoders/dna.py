"""
Train the bundled DNA encoder: ``python -m tools.encoders.dna FASTA... -o DIR``.

Splits the genomes, trains a small MosaicBERT of DNABERT-S's architecture and tokenizer, evaluates on the held-out part,
and writes weights and card into the folder, with a checkpoint from which the same command resumes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.encoders.card import ModelFiles, write_cards
from tools.encoders.command import run_training, training_card, training_parser
from tools.encoders.dna_card import card_text
from tools.encoders.dna_split import GenomeSplit, as_card, split_genomes
from tools.encoders.masked_dna import DnaObjective, save_masked_bert
from tools.encoders.training import TrainingSettings, train_encoder
from virnucpro.durable import sha256_of
from virnucpro.training.genomes.records import Genome, read_genomes
from virnucpro.training.genomes.related import KMER_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_log = logging.getLogger(__name__)

MODEL_NAME = "virnucpro-tiny-dna"
HELD_OUT_SHARE = 0.05
DNA_SETTINGS = TrainingSettings(
    num_layers=4,
    hidden_dim=128,
    attention_heads=4,
    steps=1500,
    batch_tokens=4096,
    window_tokens=126,
    # a quarter of the proteins' rate: at 0.008 queries and keys grew until attention was all but hard, the loss stood
    # still, and in bf16 embeddings of real DNA fell to a cosine of 0.93 with fp32
    matrix_learning_rate=2e-3,
    learning_rate=1.5e-3,
    weight_decay=0.1,
    threads=1,
)
SPLIT_RULE = (
    "Two records are linked when they are of the same genome (assembly, or accession without its range) or "
    f"organism, or when one has {KMER_LIMIT:.0%} or more of the other's 21-mers of either strand (one in twenty looked "
    "at, by hash); whole groups of linked records are held out, in a random order, up to a twentieth of each file's "
    "nucleotides."
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = training_parser(
        __spec__.name, "Train a MosaicBERT encoder by masked-token prediction, and write its card.", DNA_SETTINGS
    )
    parser.add_argument("fasta", type=Path, nargs="+", metavar="FASTA", help="genomes, gzip-compressed or not")
    options = parser.parse_args(arguments)
    run_training(
        options,
        DNA_SETTINGS,
        lambda settings, device: train_and_publish(options.fasta, options.output, settings, device),
    )


def train_and_publish(
    fasta_files: Sequence[Path], output: Path, settings: TrainingSettings, device: torch.device
) -> None:
    """Train on nineteen twentieths of the files, evaluate on the rest, write encoder and card into *output*."""
    output.mkdir(parents=True, exist_ok=True)
    genomes = read_genomes(fasta_files)
    split = split_genomes(genomes, seed=settings.seed, held_out_share=HELD_OUT_SHARE)
    _log.info(
        "%d records train, %d are held out; largest share of a held-out record's 21-mers in one training record: %.4f",
        *(len(split.training), len(split.held_out), split.largest_share),
    )
    objective = DnaObjective()
    training, held_out = ([genome.letters for genome in part] for part in (split.training, split.held_out))
    model, state = train_encoder(training, settings, objective, device=device, checkpoint=output / "checkpoint.pt")
    model.eval()
    unigram_nats_V = objective.unigram_nats(training)
    loss = objective.held_out_loss(model, held_out, unigram_nats_V)
    _log.info(
        "held-out loss %.4f nats per masked token, unigram model %.4f: %.4f better",
        *(loss.encoder, loss.unigram, loss.gain),
    )
    files = ModelFiles(output)
    save_masked_bert(model, files.weights)
    card = {
        "name": MODEL_NAME,
        "purpose": "a demonstration encoder: small enough to come with the package",
        "licence": "MIT",
        "data": _data_card(fasta_files, genomes),
        "split": _split_card(split, settings),
        "training": training_card(__spec__.name, fasta_files, settings, state, device),
        "held_out_loss": loss.as_card("num_tokens"),
        "held_out_loss_by_file": {
            file: objective.held_out_loss(
                model, [genome.letters for genome in split.held_out if genome.file == file], unigram_nats_V
            ).as_card("num_tokens")
            for file in sorted({genome.file for genome in split.held_out})
        },
        "architecture": json.loads(model.bert.config.to_json()),
    }
    packages = ("torch", "tokenizers", "numpy", "scipy", "safetensors")
    write_cards(model, card, files, card_text, packages=packages)
    _log.info("wrote %s, %s and %s", files.weights, files.card, files.text)


def _data_card(fasta_files: Sequence[Path], genomes: Sequence[Genome]) -> dict[str, Any]:
    return {
        "description": "Genomes and windows of genomes of INSDC and RefSeq: viruses, bacteria, one fungus, organelles",
        "licence": "INSDC and RefSeq: free of restrictions on use",
        "files": [
            {
                "file": path.name,
                "sha256": sha256_of(path),
                "num_records": sum(genome.file == path.name for genome in genomes),
                "num_nt": sum(len(genome.letters) for genome in genomes if genome.file == path.name),
            }
            for path in fasta_files
        ],
    }


def _split_card(split: GenomeSplit, settings: TrainingSettings) -> dict[str, Any]:
    held_out = Counter(genome.file for genome in split.held_out)
    return {
        "rule": SPLIT_RULE,
        "seed": settings.seed,
        "num_groups": split.num_groups,
        "num_training": len(split.training),
        "num_held_out": len(split.held_out),
        "held_out_nt": sum(len(genome.letters) for genome in split.held_out),
        "held_out_of_file": dict(sorted(held_out.items())),
        "largest_share": split.largest_share,
        "mean_share": split.mean_share,
        "held_out": [genome.accession for genome in split.held_out],
        **as_card(split.training),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
