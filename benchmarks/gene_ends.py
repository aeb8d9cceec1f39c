"""
How far ``genes.gff3`` agrees with the genes of a trained gene finder, by genome.

    virnucpro predict GENOMES.fna -o OUT --genes all
    pyrodigal -i GENOMES.fna -p meta -f gff -o OTHER.gff      # GPL: in an environment of its own
    python benchmarks/gene_ends.py OUT/genes.gff3 OTHER.gff

Two genes are the same where strand and end are: the last nucleotide of the stop codon, or of the gene where it runs out
of the contig. The start is compared of these. Printed as a table: genes of either, the share of the other's that ours
has, the share of ours that the other has, and the share of the same genes with the same start.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

Genes = dict[tuple[str, int], int]
"""Strand and end of each gene of a contig -> its start."""


def read_genes(path: Path) -> dict[str, Genes]:
    """Return the coding sequences of each contig."""
    found: dict[str, Genes] = defaultdict(dict)
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        contig, _, kind, first, last, _, strand, *_ = line.split("\t")
        if kind == "CDS":
            start, end = (int(first), int(last)) if strand == "+" else (int(last), int(first))
            found[contig][strand, end] = start
    return found


def compare(ours: dict[str, Genes], others: dict[str, Genes]) -> list[tuple[str, int, int, int, int]]:
    """Return of each contig, and of all, our genes, the other's, the same by end, and the same by start, too."""
    rows = []
    for contig in sorted(ours.keys() | others.keys()):
        mine, other = ours.get(contig, {}), others.get(contig, {})
        same = mine.keys() & other.keys()
        rows.append((contig, len(mine), len(other), len(same), sum(mine[gene] == other[gene] for gene in same)))
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    return [*rows, ("all", *totals)] if totals else rows


def main() -> None:
    """Print the table."""
    print("| contig | genes | the other's | of the other's found | of ours confirmed | same start |")
    print("| --- | --- | --- | --- | --- | --- |")
    for contig, mine, other, same, starts in compare(*map(read_genes, map(Path, sys.argv[1:3]))):
        shares = [f"{part / of:.1%}" if of else "" for part, of in ((same, other), (same, mine), (starts, same))]
        print(f"| {contig} | {mine:,} | {other:,} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
