"""
How many frames a second of CPU time a classifier scores, on vectors in memory and on one thread.

Run it as ``python benchmarks/classifier.py [--rounds 5] [--write]``: the bundled classifier, and one of the published
widths (3,328 columns, 512 hidden) with random weights. ``--write`` keeps the figures in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import numpy as np
import torch
from bench_common import gemm_peak_flops, machine, spread, write_result

from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.models.classifier import BLOCK_ROWS, Classifier, MLPClassifier, load_classifier
from virnucpro.models.classifier_files.card import Encoder

SEED = 20261121


def published_widths() -> Classifier:
    torch.manual_seed(SEED)
    card = load_classifier(DEFAULT_CLASSIFIER).card
    dna, protein = (Encoder(name=name, sha256=None, hidden_dim=dim) for name, dim in (("dna", 768), ("protein", 2560)))
    card = replace(card, name="published widths", dna_model=dna, protein_model=protein, hidden_dim=512)
    return Classifier(card, MLPClassifier(card.input_dim, card.hidden_dim))


def frames_per_cpu_second(classifier: Classifier, num_frames: int) -> float:
    features = np.random.default_rng(SEED).normal(size=(num_frames, classifier.card.input_dim)).astype(np.float32)
    start = time.process_time()
    classifier.probabilities(features)
    return num_frames / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for classifier, num_frames in ((load_classifier(DEFAULT_CLASSIFIER), 400_000), (published_widths(), 40_000)):
        frames_per_cpu_second(classifier, 10 * BLOCK_ROWS)
        rates = [frames_per_cpu_second(classifier, num_frames) for _ in range(options.rounds)]
        card = classifier.card
        flop = 2 * card.hidden_dim * (card.input_dim + 2)
        rows.append(
            {
                "classifier": card.name,
                "columns": card.input_dim,
                "hidden": card.hidden_dim,
                "frames": num_frames,
                "frames_per_cpu_second": spread(rates, 0),
                "share_of_gemm_peak": round(max(rates) * flop / gemm_peak_flops(), 2),
            }
        )
        print(json.dumps(rows[-1]))
    if options.write:
        print(write_result("classifier", {"machine": machine("virnucpro", "torch", "numpy"), "rows": rows}))


if __name__ == "__main__":
    main()
