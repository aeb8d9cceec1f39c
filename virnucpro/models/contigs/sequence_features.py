"""
Features of a contig's letters: composition, open runs, genes, and k-mers.

The features are, in this order:

- frequencies of 3-mers and 4-mers, a k-mer and its reverse complement counted as one (32 and 136);
- codon usage of the longest open run (64); the longest open run of each frame, longest first, in residues and as a
  share of the contig (6 and 6); stops over codons of each frame, fewest first (6); residues of the longest open run,
  and the logarithm of the contig's nucleotides (2);
- features of its likely genes (``gene_finding``: 25), and their codons and residues (64 and 20);
- of each table of k-mers: the mean log-odds of every group of genomes against all of them, the share of k-mers whose
  log-odds are at least ``MARKED``, and k-mers per nucleotide. Of tables of residues, whose k-mers are those of the
  genes, also the mean log-odds within the longest gene; the highest mean of a gene, and the standard deviation
  over the genes; and of each gene's lead, the highest mean log-odds of a viral group less that of the others, the
  greatest, the least, the mean, the share above 0, and the standard deviation.

An open run is a stretch of a frame without a stop or a letter other than A, C, G and T. A contig and its reverse
complement have the same features, unless two runs share the greatest length. Legend: L nucleotides, N genes, R
residues, K k-mers, G groups, S features of a contig.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs import gene_finding
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import (
    BACTERIAL,
    CODONS,
    RESIDUES,
    codons_of_frames,
    is_whole,
    reverse_complement,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray, WordArray

    TableArray = np.ndarray[Any, np.dtype[np.int8]]

UNITS_PER_NAT = 16
"""Log-odds are kept as int8, in sixteenths of a nat."""
MARKED = 24
"""Log-odds, in those units, from which a k-mer counts as typical of the group: 4.5 times as frequent."""
JUDGED_KMERS = 25
"""K-mers that a gene needs to be judged by itself, unless none has them."""

_REDUCED_ALPHABET = ("LVIM", "C", "A", "G", "ST", "P", "FYW", "EDNQ", "KR", "H")
"""Ten classes of residues (Murphy, Wallqvist and Levy 2000)."""
_FRAMES = 6


@dataclass(frozen=True)
class KmerTable:
    """One kind of k-mer, and the table of its log-odds."""

    name: str
    is_protein: bool
    """Of residues, or of nucleotides of either strand."""
    places: tuple[int, ...]
    """Letters of a window that make the k-mer, from 0."""
    letters: int
    hash_bits: int = 0
    """Where there are more k-mers than slots: k-mers share 2 to this many slots by their hash."""

    @property
    def span(self) -> int:
        return self.places[-1] + 1

    @property
    def slots(self) -> int:
        if self.hash_bits:
            return 1 << self.hash_bits
        kmers_of_a_strand: int = self.letters ** len(self.places)
        return kmers_of_a_strand if self.is_protein else kmers_of_a_strand // 2


TABLES = (
    KmerTable("residues_3", is_protein=True, places=(0, 1, 2), letters=20),
    KmerTable("residues_3_of_4", is_protein=True, places=(0, 2, 3), letters=20),
    KmerTable("residues_3_of_5", is_protein=True, places=(0, 1, 4), letters=20),
    KmerTable("residues_3_of_8", is_protein=True, places=(0, 3, 7), letters=20),
    KmerTable("residues_4", is_protein=True, places=(0, 1, 2, 3), letters=20),
    KmerTable("reduced_6", is_protein=True, places=(0, 1, 2, 3, 4, 5), letters=10, hash_bits=18),
    KmerTable("reduced_6_of_8", is_protein=True, places=(0, 1, 3, 5, 6, 7), letters=10, hash_bits=18),
    KmerTable("nucleotides_7", is_protein=False, places=tuple(range(7)), letters=4),
)
"""k is odd for nucleotides: the base in the middle then separates a k-mer from its reverse complement."""


class SequenceFeatures:
    """
    Makes the features of a contig.

    Args:
        tables: For each of ``TABLES``, by name, the log-odds of each group: int8 (slots, G), in ``UNITS_PER_NAT``.
        is_viral_G: Which groups are viruses, bool (G,), some and not all.
    """

    def __init__(self, tables: Mapping[str, TableArray], is_viral_G: BoolArray) -> None:
        self._tables = [tables[table.name] for table in TABLES if table.name in tables]
        shapes = [rows.shape for rows in self._tables]
        if shapes != [(table.slots, len(is_viral_G)) for table in TABLES]:
            raise ValueError(f"tables of log-odds have shapes {shapes}")
        self._is_viral_G = is_viral_G
        self.dim = feature_count(len(is_viral_G))

    def of(self, codes_L: CodeArray) -> FloatArray:
        """Return the features of a contig's codes, float32 (S,), finite; zeros where there is nothing to count."""
        genes = Genes.of(codes_L)
        parts = [composition(codes_L), open_runs(codes_L), genes.numbers(codes_L), genes.usage()]
        for table, rows, (slots_K, gene_K) in zip(TABLES, self._tables, kmers(codes_L, genes), strict=True):
            found_KG = rows[slots_K]
            most = max(len(found_KG), 1)
            parts.append(found_KG.sum(axis=0, dtype=np.int64) / (UNITS_PER_NAT * most))
            parts.append((found_KG >= MARKED).sum(axis=0) / most)
            parts.append(np.array([len(found_KG) / max(len(codes_L), 1)]))
            if table.is_protein:
                parts += self._by_gene(found_KG, gene_K, genes)
        return np.concatenate(parts).astype(np.float32)

    def _by_gene(self, found_KG: TableArray, gene_K: IntArray, genes: Genes) -> list[DoubleArray]:
        """Return the features of single genes, float64 (G,), (G,), (G,) and (5,)."""
        num_groups = len(self._is_viral_G)
        if not len(gene_K):
            return [np.zeros(3 * num_groups + 5)]
        counts_N = np.bincount(gene_K, minlength=len(genes.lengths_N))
        with_any = np.flatnonzero(counts_N)
        firsts = (np.cumsum(counts_N) - counts_N)[with_any]
        means_NG = np.zeros((len(counts_N), num_groups))
        sums = np.add.reduceat(found_KG, firsts, axis=0, dtype=np.int64)
        means_NG[with_any] = sums / (UNITS_PER_NAT * counts_N[with_any, None])
        is_judged_N = counts_N >= min(JUDGED_KMERS, counts_N.max())
        judged_NG = means_NG[is_judged_N]
        lead_N = judged_NG[:, self._is_viral_G].max(axis=1) - judged_NG[:, ~self._is_viral_G].max(axis=1)
        of_lead = [lead_N.max(), lead_N.min(), lead_N.mean(), (lead_N > 0).mean(), lead_N.std()]
        longest = int(np.argmax(genes.lengths_N))
        return [means_NG[longest], judged_NG.max(axis=0), judged_NG.std(axis=0), np.array(of_lead)]


def open_runs(codes_L: CodeArray) -> DoubleArray:
    """Return codon usage of the longest open run, longest runs, stops, and sizes, float64 (84,)."""
    frames = codons_of_frames(codes_L)
    codons = np.concatenate(frames)
    ends = np.cumsum([len(frame) for frame in frames])
    stops = np.flatnonzero(BACTERIAL.ends_run[codons])
    lengths = np.diff(stops, prepend=-1) - 1
    bounds = [-1, *np.searchsorted(stops, ends - 1).tolist()]
    longest = np.sort([lengths[a + 1 : b + 1].max(initial=0) for a, b in pairwise(bounds)])[::-1]
    num_stops = np.array([b - a - 1 for a, b in pairwise(bounds)])
    stop_shares = num_stops / np.maximum([len(frame) - 1 for frame in frames], 1)
    run = int(np.argmax(lengths))
    usage = np.bincount(codons[stops[run] - lengths[run] : stops[run]], minlength=CODONS) / max(int(lengths[run]), 1)
    num_nt = max(len(codes_L), 1)
    sizes = [lengths[run], np.log(num_nt)]
    return np.concatenate([usage, longest, 3 * longest / num_nt, np.sort(stop_shares), sizes])


def composition(codes_L: CodeArray) -> DoubleArray:
    """Return the frequencies of 3-mers and 4-mers of either strand, float64 (168,)."""
    parts = []
    for k, canonical in _CANONICAL.items():
        counts = np.bincount(words(codes_L, k)[is_whole(codes_L, k)], minlength=4**k)
        either = np.bincount(canonical, weights=counts)
        parts.append(either / max(either.sum(), 1))
    return np.concatenate(parts)


def kmers(codes_L: CodeArray, genes: Genes) -> Iterator[tuple[WordArray, IntArray]]:
    """
    Yield for each of ``TABLES`` the slots of its k-mers, uint32 (K,), and each one's gene, int64 (K,), ascending.

    K-mers of nucleotides are from everywhere and have no gene, int64 (0,); those of residues are from genes.
    """
    residues_R = genes.residues()
    reduced_R = _CLASS_OF_RESIDUE[residues_R]
    gene_R = np.repeat(np.arange(len(genes.lengths_N)), genes.lengths_N)
    reverse_L = reverse_complement(codes_L)
    for table in TABLES:
        if table.is_protein:
            letters_R = residues_R if table.letters == len(RESIDUES) else reduced_R
            windows = max(len(letters_R) - table.span + 1, 0)
            slots = np.zeros(windows, dtype=np.uint32)
            for place in table.places:
                slots *= np.uint32(table.letters)
                slots += letters_R[place : place + windows]
            is_within = gene_R[:windows] == gene_R[len(gene_R) - windows :]
            slots, gene_K = slots[is_within], gene_R[:windows][is_within]
        else:
            forward, backward = words(codes_L, table.span), words(reverse_L, table.span)[::-1]
            slots = _either_strand(forward, backward, table.span)[is_whole(codes_L, table.span)]
            gene_K = np.empty(0, dtype=np.int64)
        yield _hashed(slots, table.hash_bits) if table.hash_bits else slots, gene_K


def feature_count(num_groups: int) -> int:
    """Return the number of features of a contig, S."""
    of_tables = sum(5 * num_groups + 6 if table.is_protein else 2 * num_groups + 1 for table in TABLES)
    return COMPOSITION_COUNT + GENES_COUNT + of_tables


def _either_strand(forward: WordArray, backward: WordArray, k: int) -> WordArray:
    """Return one number, below 4**k / 2, for a k-mer and its reverse complement: that of the one with A or C amid."""
    chosen = np.where((forward >> np.uint32(k)) & np.uint32(1), backward, forward)
    low = chosen & np.uint32((1 << k) - 1)  # the middle base's high bit, bit k, is 0 and goes
    return np.asarray((chosen >> np.uint32(k + 1) << np.uint32(k)) | low)


def _hashed(numbers: WordArray, bits: int) -> WordArray:
    """Return the highest bits of the numbers times 2 to the 32 over the golden ratio (Knuth's multiplicative hash)."""
    return np.asarray((numbers * np.uint32(2654435761)) >> np.uint32(32 - bits))


def _canonical(k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return for each k-mer's number a number that it shares with its reverse complement, from 0, int64 (4**k,)."""
    digits = np.arange(4**k)[:, None] // 4 ** np.arange(k) % 4
    backward = ((3 - digits) * 4 ** np.arange(k)[::-1]).sum(axis=1)
    return np.unique(np.minimum(np.arange(4**k), backward), return_inverse=True)[1].astype(np.int64)


_CANONICAL = {k: _canonical(k) for k in (3, 4)}
COMPOSITION_COUNT = sum(int(canonical.max()) + 1 for canonical in _CANONICAL.values()) + CODONS + 3 * _FRAMES + 2
"""Features of the composition and the open runs, which come first."""
GENES_COUNT = gene_finding.NUMBERS + CODONS + len(RESIDUES)
"""Features of the genes, which come next."""
_CLASS_OF_RESIDUE = np.array(
    [next(n for n, same in enumerate(_REDUCED_ALPHABET) if chr(residue) in same) for residue in RESIDUES],
    dtype=np.uint8,
)
