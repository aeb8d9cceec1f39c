"""
What similarity of genes to proteins of the training genomes would add to the bundled classifier.

Finds the likely genes of the training genomes, searches contigs of known label in them by DIAMOND (its blastx
--sensitive), and joins the best bit scores to a viral and to a cellular protein with the classifier's score by logistic
regression; each contig is scored by a regression that has not seen its genome (ten folds). Smaller sets of proteins are
drawn by a hash of their number. The scores must be those of letters alone: CONTIGS_TSV of a classifier that has no
proteins of its own, as the bundled one had none when the results of 2026-11-23 were written.

    python benchmarks/markers.py GENOMES.fna.gz ... --contigs FASTA.gz --truth TSV --scores CONTIGS_TSV [--write]

A file whose name has ``nonviral`` holds cellular genomes. Needs the program ``diamond`` (Debian: diamond-aligner).
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from bench_common import machine, write_result

from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import RESIDUES, encode
from virnucpro.models.contigs.pieces import Pieces
from virnucpro.training.evaluation.tables import join, read_scores, read_truth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virnucpro.arrays import BoolArray, DoubleArray

SHORTEST_PROTEIN = 40
PIECE_NT = 200_000
LEAST_BITS = 35
SHARES = (1.0, 0.5, 0.25)
"""Of the proteins."""
FOLDS = 10
_LETTERS = np.frombuffer("".join(map(chr, RESIDUES)).encode(), np.uint8)
_HASH = 2654435761


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("genomes", type=Path, nargs="+")
    arguments.add_argument("--contigs", type=Path, required=True)
    arguments.add_argument("--truth", type=Path, required=True)
    arguments.add_argument("--scores", type=Path, required=True, help="contigs.tsv of the same contigs")
    arguments.add_argument("--write", action="store_true")
    asked = arguments.parse_args()
    joined = join(read_scores(asked.scores), read_truth(asked.truth), asked.truth)
    known = joined.known
    with tempfile.TemporaryDirectory() as folder:
        proteins, residues = write_proteins(asked.genomes, Path(folder) / "proteins.faa")
        hits = search(asked.contigs, Path(folder))
    rows = []
    for share in (0.0, *SHARES):
        best_C2 = best_bits(hits, known.contigs, share)
        of_score = np.clip(joined.scores_C, 1e-9, 1 - 1e-9)
        inputs = [np.log(of_score / (1 - of_score)), np.log(known.lengths_nt_C)]
        if share:
            viral, cellular = np.log1p(best_C2).T
            lead = (best_C2[:, 0] - best_C2[:, 1]) / np.maximum(best_C2.max(axis=1), 1)
            inputs += [viral, cellular, viral - cellular, lead]
        scores = out_of_fold(np.stack(inputs, axis=1), known.is_virus_C, known.genomes or known.contigs)
        rows.append({"share_of_proteins": share, **measures(scores, known.is_virus_C, known.lengths_nt_C)})
        print("  ".join(f"{name} {value:g}" for name, value in rows[-1].items()), flush=True)
    report = {"machine": machine("numpy", "virnucpro"), "proteins": proteins, "residues": residues, "rows": rows}
    if asked.write:
        print(write_result("markers", report))


def records(path: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt") as file:
        for record in ("\n" + file.read()).split("\n>")[1:]:
            header, _, letters = record.partition("\n")
            yield header.split()[0], letters.replace("\n", "")


def write_proteins(genomes: list[Path], path: Path) -> tuple[int, int]:
    """Write likely genes with their number and label; return their number, and that of their residues."""
    number = residues = 0
    with path.open("w") as file:
        for source in genomes:
            label = "cellular" if "nonviral" in source.name else "viral"
            for _, letters in records(source):
                for at in range(0, len(letters), PIECE_NT):
                    genes = Genes.of(Pieces([encode(letters[at : at + PIECE_NT].upper().encode())]))
                    ends = np.cumsum(genes.lengths_N)
                    for protein in np.split(_LETTERS[genes.residues()], ends[:-1]):
                        if len(protein) >= SHORTEST_PROTEIN:
                            file.write(f">{number}|{label}\n{protein.tobytes().decode()}\n")
                            number, residues = number + 1, residues + len(protein)
    return number, residues


def search(contigs: Path, folder: Path) -> list[tuple[str, int, bool, float]]:
    """Return contig, number of the protein, whether it is viral, and bit score of every hit."""
    diamond = shutil.which("diamond")
    if diamond is None:
        raise SystemExit("diamond is not installed")
    database, found = folder / "proteins", folder / "hits.tsv"
    subprocess.run([diamond, "makedb", "--quiet", "--in", f"{database}.faa", "-d", database], check=True)
    options = ["--sensitive", "-k", "50", "-e", "10", "--outfmt", "6", "qseqid", "sseqid", "bitscore"]
    subprocess.run([diamond, "blastx", "--quiet", "-q", contigs, "-d", database, "-o", found, *options], check=True)
    hits = []
    for line in found.read_text().splitlines():
        contig, protein, bits = line.split("\t")
        number, label = protein.split("|")
        if float(bits) >= LEAST_BITS:
            hits.append((contig, int(number), label == "viral", float(bits)))
    return hits


def best_bits(hits: list[tuple[str, int, bool, float]], ids: list[str], share: float) -> DoubleArray:
    """Return each contig's best bit score to a viral and to a cellular protein of a *share* of them."""
    places = {name: place for place, name in enumerate(ids)}
    best_C2 = np.zeros((len(ids), 2))
    for contig, number, is_viral, bits in hits:
        if number * _HASH % 2**32 < share * 2**32:
            at = (places[contig], 0 if is_viral else 1)
            best_C2[at] = max(best_C2[at], bits)
    return best_C2


def out_of_fold(x_CI: DoubleArray, is_virus_C: BoolArray, genomes: list[str]) -> DoubleArray:
    """Return the log-odds of each contig by a regression that has not seen its genome."""
    x_CI = (x_CI - x_CI.mean(axis=0)) / np.maximum(x_CI.std(axis=0), 1e-9)
    names = sorted(set(genomes))
    fold_of = dict(zip(np.random.default_rng(0).permutation(names).tolist(), range(len(names)), strict=True))
    fold_C = np.array([fold_of[name] % FOLDS for name in genomes])
    inputs = torch.tensor(np.column_stack([x_CI, np.ones(len(x_CI))]))
    labels = torch.tensor(is_virus_C, dtype=torch.float64)
    log_odds_C = np.zeros(len(x_CI))
    for fold in range(FOLDS):
        own = torch.tensor(fold_C == fold)
        weights = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=200)

        def loss(own=own, weights=weights, optimizer=optimizer):
            optimizer.zero_grad()
            misfit = torch.nn.functional.binary_cross_entropy_with_logits(inputs[~own] @ weights, labels[~own])
            value = misfit + 1e-3 * (weights**2).sum()
            value.backward()
            return value

        optimizer.step(loss)
        log_odds_C[own.numpy()] = (inputs[own] @ weights).detach().numpy()
    return log_odds_C


def measures(scores: DoubleArray, is_virus_C: BoolArray, lengths_C: np.ndarray) -> dict[str, float]:
    found = {"recall_at_1_percent": float((scores[is_virus_C] > np.quantile(scores[~is_virus_C], 0.99)).mean())}
    for name, chosen in (
        ("auroc", lengths_C > 0),
        ("auroc_to_500_nt", lengths_C <= 500),
        ("auroc_from_5000_nt", lengths_C >= 5000),
    ):
        viral, others = scores[chosen & is_virus_C], scores[chosen & ~is_virus_C]
        wins = (viral[:, None] > others).mean() + (viral[:, None] == others).mean() / 2
        found[name] = float(wins)
    return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
