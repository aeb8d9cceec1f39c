"""
How many predictions change when embeddings are computed in bf16 or fp16 instead of fp32, split by margin.

Run it as ``python benchmarks/precision_on_predictions.py --checkpoint esm2_t6_8M.pt --viral DIR [--write]``. The
classifier at hand is a logistic regression, viral against not, on fp32 embeddings of stop-free frames of the training
genomes' 500-nt chunks; half of the genomes train it, the other half are predicted from embeddings of each precision.
The margin of a prediction is the distance of its fp32 probability from one half. The classifier is a stand-in: what is
measured is how far its decisions move, not how good they are.
"""

from __future__ import annotations

import argparse
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from bench_common import machine, write_result

from virnucpro.models.esm2_flash import load_esm2_model

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 20261121
CHUNK_NT = 500
BASES = "TCAG"
CODE = "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
"""The standard code in the order of ``BASES``."""
CODONS = dict(zip((a + b + c for a in BASES for b in BASES for c in BASES), CODE, strict=True))
MARGINS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
PER_GENOME = 6


def genomes(path: Path) -> Iterator[str]:
    """Yield the sequences of a gzipped FASTA file."""
    with gzip.open(path, "rt") as lines:
        for record in lines.read().split(">")[1:]:
            yield record.partition("\n")[2].replace("\n", "").upper()


def open_frames(genome: str, chooser: np.random.Generator) -> list[str]:
    """Return the proteins of stop-free forward frames of some chunks of *genome*."""
    if len(genome) < CHUNK_NT:
        return []
    proteins = []
    for start in chooser.integers(0, len(genome) - CHUNK_NT + 1, size=10 * PER_GENOME).tolist():
        chunk = genome[start : start + CHUNK_NT]
        for frame in range(3):
            protein = "".join(CODONS.get(chunk[at : at + 3], "") for at in range(frame, CHUNK_NT - 2, 3))
            if protein and "*" not in protein:
                proteins.append(protein)
    return proteins[:PER_GENOME]


def sample(folder: Path, most_per_class: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return proteins, labels (1: viral) and genome numbers, as many of either class."""
    chooser = np.random.default_rng(SEED)
    proteins: list[str] = []
    labels: list[int] = []
    genome_of: list[int] = []
    number = 0
    for label, pattern in ((0, "train_nonviral_*.fna.gz"), (1, "train_virus_*.fna.gz")):
        everything = [genome for path in sorted(folder.glob(pattern)) for genome in genomes(path)]
        taken = 0
        for position in chooser.permutation(len(everything)).tolist():
            found = open_frames(everything[position], chooser)[: most_per_class - taken]
            proteins += found
            labels += [label] * len(found)
            genome_of += [number] * len(found)
            number += 1
            taken += len(found)
            if taken == most_per_class:
                break
    return proteins, np.array(labels), np.array(genome_of)


def embed(checkpoint: Path, proteins: list[str], precision: str) -> np.ndarray:
    """Return an embedding for each protein, longest first in batches of 32."""
    model, tokenizer = load_esm2_model(checkpoint, "cpu", precision=precision)
    order = sorted(range(len(proteins)), key=lambda number: -len(proteins[number]))
    rows = np.empty((len(proteins), model.hidden_dim), dtype=np.float32)
    for first in range(0, len(order), 32):
        chosen = order[first : first + 32]
        input_ids, lengths = tokenizer.encode([proteins[number] for number in chosen])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = torch.from_numpy(input_ids), torch.from_numpy(cu_seqlens), tuple(lengths.tolist())
        rows[chosen] = model(*batch).numpy()
    return rows


def fit(rows: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit a logistic regression with a small L2 penalty by L-BFGS; return weights and bias."""
    x, y = torch.from_numpy(rows).double(), torch.from_numpy(labels).double()
    weights = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weights, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(x @ weights + bias, y)
        value = value + 1e-3 * weights.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return weights.detach(), bias.detach()


def by_margin(reference: np.ndarray, found: np.ndarray) -> list[dict[str, float]]:
    """Count changed decisions for each interval of the margin of *reference*, both being probabilities."""
    margin = np.abs(reference - 0.5)
    changed = (reference > 0.5) != (found > 0.5)
    table = []
    for low, high in pairwise(MARGINS):
        inside = (margin >= low) & ((margin < high) | (high == MARGINS[-1]))
        share = float(changed[inside].mean()) if inside.any() else 0.0
        row = {"from": low, "to": high, "predictions": int(inside.sum()), "changed": int(changed[inside].sum())}
        table.append({**row, "share_changed": round(share, 5)})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--viral", type=Path, required=True, help="folder of train_virus_* and train_nonviral_*")
    parser.add_argument("--per-class", type=int, default=2000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    proteins, labels, genome_of = sample(options.viral, options.per_class)
    rows = {precision: embed(options.checkpoint, proteins, precision) for precision in ("fp32", "bf16", "fp16")}
    trains = genome_of % 2 == 0
    centre, scale = rows["fp32"][trains].mean(0), rows["fp32"][trains].std(0) + 1e-6
    weights, bias = fit((rows["fp32"][trains] - centre) / scale, labels[trains])

    def probabilities(some: np.ndarray) -> np.ndarray:
        standard = torch.from_numpy((some[~trains] - centre) / scale).double()
        return torch.sigmoid(standard @ weights + bias).numpy()

    reference = probabilities(rows["fp32"])
    report: dict[str, object] = {
        "machine": machine("torch", "numpy"),
        "checkpoint": options.checkpoint.name,
        "predictions": int((~trains).sum()),
        "residues": [min(map(len, proteins)), max(map(len, proteins))],
        "accuracy_fp32": round(float(((reference > 0.5) == labels[~trains]).mean()), 4),
    }
    for precision in ("bf16", "fp16"):
        found = probabilities(rows[precision])
        cosines = torch.cosine_similarity(torch.from_numpy(rows[precision]).double(), torch.from_numpy(rows["fp32"]))
        report[precision] = {
            "least_cosine": round(float(cosines.min()), 6),
            "changed": int(((found > 0.5) != (reference > 0.5)).sum()),
            "share_changed": round(float(((found > 0.5) != (reference > 0.5)).mean()), 5),
            "largest_move_of_a_probability": round(float(np.abs(found - reference).max()), 5),
            "by_margin": by_margin(reference, found),
        }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("precision_on_predictions", report)


if __name__ == "__main__":
    main()
