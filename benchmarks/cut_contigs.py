"""Contigs with lengths as an assembly has them, cut from the genomes of the shared data; seeded."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from virnucpro.training.genomes.records import read_records

DATA = Path(os.environ.get("VIRNUCPRO_TEST_DATA") or Path(__file__).parents[2] / "shared" / "data")
PATTERNS = ("viral/train_*.fna.gz", "viral/*virus.fa.gz", "viral/crAssphage.fa", "genomes/*.fna.gz")
SEED = 20261123
SHORTEST_NT, LONGEST_NT = 300, 100_000
MEDIAN_NT, SPREAD = 1_500, 1.2
"""Of the log-normal lengths before the bounds."""


def read_genomes(data: Path = DATA) -> list[str]:
    """Return the letters of every record that is long enough, an id once; none without the data."""
    paths = [path for pattern in PATTERNS for path in sorted(data.glob(pattern))]
    letters = {record.accession: record.letters for path in paths for record in read_records(path)}
    return [genome for genome in letters.values() if len(genome) >= SHORTEST_NT]


def write_contigs(path: Path, genomes: list[str], total_nt: int) -> tuple[int, int]:
    """
    Write contigs until they have *total_nt* letters; return the numbers of contigs and letters.

    Fewer letters are the beginning of more. A record is chosen by its length, and what is shorter than the drawn length
    is taken whole.
    """
    random = np.random.default_rng(SEED)
    sizes = np.array([len(genome) for genome in genomes])
    shares = np.cumsum(sizes) / sizes.sum()
    written_nt, number = 0, 0
    with path.open("w") as file:
        while written_nt < total_nt:
            length = int(random.lognormal(np.log(MEDIAN_NT), SPREAD))
            genome = genomes[int(np.searchsorted(shares, random.random()))]
            place = random.random()
            if not SHORTEST_NT <= length <= LONGEST_NT:
                continue
            start = int(place * max(len(genome) - length, 0))
            contig = genome[start : start + length]
            number, written_nt = number + 1, written_nt + len(contig)
            file.write(f">contig_{number}\n{contig}\n")
    return number, written_nt
