"""
Genomes, and which of them are related.

Two records are linked when they are of the same genome (the assembly, or the accession without its range) or the same
organism (by the header), or when one has a tenth or more of the other's 21-mers, which two strains of about 90 %
identity have (0.9 to the 21st is 0.11). k-mers are of either strand, and one in twenty is used, chosen by its hash
(FracMinHash, Irber et al. 2022). Legend: R records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.genomes.kmer_links import connected, linked_pairs
from virnucpro.training.genomes.organisms import organism_of, source_of
from virnucpro.training.genomes.records import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


KMER_NT = 21
KMER_LIMIT = 0.1
"""Share of a record's 21-mers from which on two records are linked."""
SKETCH_ONE_IN = 20
_COMPLEMENT = str.maketrans("ACGTRYSWKMBDHVN", "TGCAYRSWMKVHDBN")


@dataclass(frozen=True)
class Genome:
    """A record of a training file: a genome, or a window of one."""

    accession: str
    """First word of the header."""
    source: str
    """The genome: the assembly, or the accession without its range."""
    letters: str
    file: str
    organism: str = ""
    """From the header, without strain; empty: none."""


def read_genomes(paths: Sequence[Path]) -> list[Genome]:
    return [
        Genome(record.accession, source_of(record), record.letters, path.name, organism_of(record.description))
        for path in paths
        for record in read_records(path)
    ]


def cluster(kmers_of: Sequence[NDArray[np.uint64]], *names_of: Sequence[str]) -> NDArray[np.int64]:
    """
    Return the cluster of each record, int64, shape (R,); links of links count.

    *kmers_of*: ``sketch`` of each record. *names_of*: lists of genomes, organisms and the like; records with the same
    name are linked, an empty name links nothing.
    """
    first, second = linked_pairs(kmers_of, KMER_LIMIT)
    pairs = [np.stack([first, second])]
    for names in names_of:
        numbers: dict[str, int] = {}
        links = [(at, numbers.setdefault(name, at)) for at, name in enumerate(names) if name]
        pairs.append(np.array(links, dtype=np.int64).reshape(-1, 2).T)
    first, second = np.concatenate(pairs, axis=1)
    return connected((first, second), len(kmers_of))


def reverse_complement(letters: str) -> str:
    """Return the other strand of *letters* (upper-case IUPAC)."""
    return letters.translate(_COMPLEMENT)[::-1]


def sketch(letters: str) -> NDArray[np.uint64]:
    """Return the hashes of one in twenty of the distinct 21-mers of either strand, of A, C, G and T only."""
    code_of = np.full(256, 4, dtype=np.uint64)
    code_of[np.frombuffer(b"ACGT", dtype=np.uint8)] = np.arange(4)
    codes = code_of[np.frombuffer(letters.encode("ascii"), dtype=np.uint8)]
    num_kmers = max(len(codes) - KMER_NT + 1, 0)
    forward, backward = np.zeros(num_kmers, dtype=np.uint64), np.zeros(num_kmers, dtype=np.uint64)
    whole = np.ones(num_kmers, dtype=bool)
    for shift in range(KMER_NT):
        part = codes[shift : shift + num_kmers]
        whole &= part < 4
        forward = (forward << np.uint64(2)) | (part & np.uint64(3))
        backward |= (np.uint64(3) - (part & np.uint64(3))) << np.uint64(2 * shift)
    hashes = _mixed(np.minimum(forward, backward)[whole])
    return np.unique(hashes[hashes % np.uint64(SKETCH_ONE_IN) == 0])


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finaliser of each number (Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
