"""
What a score means in a sample: the estimated share of viruses, and false discoveries as expected and as they are.

Draws samples of 1, 5, 20 and 50 % viruses, with replacement, from contigs of known label, and gives the means over the
samples: the estimated share with its interval, and the expected and realised false discovery rate, with the recall, of
the default calls, of ``--fdr 0.05``, and of calls by the score alone.

How the estimates of a share spread by the size of the sample sets from how many contigs on it is estimated. Realised
rates at low shares rest on the few others with high scores: of 258 others, each counts for 0.4 % of all.

    python benchmarks/sample_prior.py CONTIGS_TSV --truth TSV [--threshold 0.61] [--write]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from bench_common import machine, write_result

from virnucpro.calls.sample_prior import call_limits, count_scores, estimate_prior
from virnucpro.training.evaluation.tables import join, read_scores, read_truth

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray, FloatArray

SHARES = (0.01, 0.05, 0.2, 0.5)
SIZES = (50, 100, 200, 500, 1000, 5000)
SAMPLES = 100
FDR = 0.05
SEED = 1


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("contigs", type=Path, help="contigs.tsv, or a table with the columns contig and score")
    arguments.add_argument("--truth", type=Path, required=True, help="columns contig and label")
    arguments.add_argument("--threshold", type=float, default=0.5, help="the classifier's")
    arguments.add_argument("--name", help="what made the scores")
    arguments.add_argument("--write", action="store_true")
    asked = arguments.parse_args()
    scores, is_virus = scored(asked.contigs, asked.truth)
    report = {
        "machine": machine("numpy"),
        "scores": asked.name or str(asked.contigs),
        "contigs": {"viral": int(is_virus.sum()), "others": int((~is_virus).sum())},
        "threshold": asked.threshold,
        "samples": SAMPLES,
        "rows": [],
    }
    for size in SIZES:
        for share in SHARES:
            row = measured(scores, is_virus, size, share, asked.threshold)
            report["rows"].append(row)
            print("  ".join(f"{name} {value:g}" for name, value in row.items()), flush=True)
    if asked.write:
        print(write_result("sample_prior", report))


def scored(table: Path, truth: Path) -> tuple[FloatArray, BoolArray]:
    """Return the scores of contigs of known label, float32 (contigs,), and whether each is of a virus."""
    joined = join(read_scores(table), read_truth(truth), truth)
    has_score = ~np.isnan(joined.scores_C)
    return joined.scores_C[has_score].astype(np.float32), joined.known.is_virus_C[has_score]


def measured(scores: FloatArray, is_virus: BoolArray, size: int, share: float, threshold: float) -> dict[str, float]:
    """Return means over samples of *size* contigs, a *share* of them viral, at least one."""
    random = np.random.default_rng(SEED)
    viral = max(1, round(size * share))
    truth = np.arange(size) < viral
    rows = []
    for _ in range(SAMPLES):
        drawn = np.concatenate([random.choice(scores[is_virus], viral), random.choice(scores[~is_virus], size - viral)])
        sample = estimate_prior(count_scores(drawn))
        low, high = sample.interval or (0.0, 1.0)
        row = {
            "share": sample.share,
            "low": low,
            "high": high,
            "share_error": abs(sample.share - viral / size),
            "covered": low <= viral / size <= high,
        }
        limits = {
            "default": call_limits(sample, threshold),
            "fdr_0.05": call_limits(sample, threshold, fdr=FDR),
            "by_score": call_limits(None, threshold),
        }
        for name, limit in limits.items():
            called = drawn >= limit.virus_from
            row |= {
                f"{name}_expected": sample.fdr(limit.virus_from) if called.any() else 0.0,
                f"{name}_realised": float(np.mean(~truth[called])) if called.any() else 0.0,
                f"{name}_recall": float(np.mean(called[truth])),
            }
        rows.append(row)
    means = {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]}
    spread = round(float(np.std([row["share"] for row in rows])), 4)
    return {"contigs": size, "viruses": viral / size, "share_spread": spread, **means}


if __name__ == "__main__":
    main()
