"""
Features of a contig's nucleotides: composition, open runs, genes, and k-mers.

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

An open run is a stretch of a frame without a stop or two nucleotides in a row other than A, C, G and T. Legend: L
nucleotides, P fragments (contigs, or parts of them, read together), N genes, R residues, K k-mers, G groups, S features
of a fragment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs import gene_finding
from virnucpro.models.contigs.fragments import FRAMES, Fragments, Groups, ranges
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import BACTERIAL, CODONS, RESIDUES, canonical_strand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray, WordArray

    TableArray = np.ndarray[Any, np.dtype[np.int8]]

UNITS_PER_NAT = 4
"""Log-odds are kept as int8, in quarters of a nat: finer ones pack worse, and their means tell as much."""
MARKED = 6
"""Log-odds, in those units, from which a k-mer counts as typical of the group: 4.5 times as frequent."""
JUDGED_KMERS = 25
"""K-mers that a gene needs to be judged by itself, unless none has them."""

PASS_NT = 100_000
"""Nucleotides, and those of one fragment more, that are read in one pass: bounds memory, and more is not faster."""

_REDUCED_ALPHABET = ("LVIM", "C", "A", "G", "ST", "P", "FYW", "EDNQ", "KR", "H")
"""Ten classes of residues (Murphy, Wallqvist and Levy 2000)."""


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
        tables: Name of each of ``TABLES`` -> log-odds of each group: int8 (slots, G), in ``UNITS_PER_NAT``.
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
        return np.asarray(self.of_many([codes_L])[0])

    def of_many(self, codes: Sequence[CodeArray]) -> FloatArray:
        """Return the features of contigs or parts, float32 (P, S), each as ``of`` does; equal for both strands."""
        codes = [canonical_strand(codes_L) for codes_L in codes]
        pass_P = np.cumsum([len(codes_L) for codes_L in codes], dtype=np.int64) // PASS_NT
        bounds = [0, *(np.flatnonzero(np.diff(pass_P)) + 1).tolist(), len(codes)]
        features_PS = np.empty((len(codes), self.dim), dtype=np.float32)
        for first, last in pairwise(bounds):
            if first < last:
                features_PS[first:last] = self._of_pass(Fragments(codes[first:last]))
        return features_PS

    def _of_pass(self, fragments: Fragments) -> DoubleArray:
        genes = Genes.of(fragments)
        num_nt_P1 = np.maximum(fragments.lengths_P, 1)[:, None]
        parts = [composition(fragments), open_runs(fragments), genes.numbers(fragments), genes.usage()]
        of_tables, of_genes = [], []
        for rows, (slots_K, counts_X, of_X) in zip(self._tables, kmers(fragments, genes), strict=True):
            found_KG = rows.take(slots_K, axis=0)
            sums_XG, marked_XG = (_sums_of_runs(x_KG, counts_X) for x_KG in (found_KG, found_KG >= MARKED))
            number_P1 = of_X.sums(counts_X)[:, None]
            most_P1 = np.maximum(number_P1, 1)
            means, shares = of_X.sums(sums_XG) / (UNITS_PER_NAT * most_P1), of_X.sums(marked_XG) / most_P1
            of_tables.append([means, shares, number_P1 / num_nt_P1])
            of_genes.append((sums_XG, counts_X))
        sums, counts = zip(*compress(of_genes, (table.is_protein for table in TABLES)), strict=True)
        by_gene = iter(self._by_gene(np.stack(sums), np.stack(counts), genes))
        for table, of_table in zip(TABLES, of_tables, strict=True):
            parts += [*of_table, next(by_gene)] if table.is_protein else of_table
        return np.concatenate(parts, axis=1)

    def _by_gene(self, sums_TNG: IntArray, counts_TN: IntArray, genes: Genes) -> DoubleArray:
        """Return the features of single genes, float64 (T, P, 3 * G + 5), of T tables of residues."""
        tables, fragments = len(counts_TN), len(genes.code_P)
        means_TNG = sums_TNG / (UNITS_PER_NAT * np.maximum(counts_TN, 1))[..., None]
        groups = Groups((np.arange(tables)[:, None] * fragments + genes.groups.fragment_X).ravel(), tables * fragments)
        counts = counts_TN.ravel()
        most = groups.reduced(np.maximum, counts)
        is_judged = counts >= np.clip(most, 1, JUDGED_KMERS)[groups.fragment_X]
        judged, means = groups.take(is_judged), means_TNG.reshape(-1, len(self._is_viral_G))[is_judged]
        lead = means[:, self._is_viral_G].max(axis=1) - means[:, ~self._is_viral_G].max(axis=1)
        greatest, least = (judged.reduced(by, lead) for by in (np.maximum, np.minimum))
        of_lead = [greatest, least, judged.means(lead), judged.means(lead > 0), judged.deviations(lead)]
        of_longest = np.zeros((tables, fragments, means.shape[1]))
        there = genes.groups.there
        of_longest[:, there] = means_TNG[:, genes.groups.first_greatest(genes.lengths_N)[there]]
        parts = [judged.reduced(np.maximum, means), judged.deviations(means), np.stack(of_lead, axis=1)]
        of_all = [part.reshape(tables, fragments, -1) for part in parts]
        return np.concatenate([of_longest, *of_all], axis=2)


def open_runs(fragments: Fragments) -> DoubleArray:
    """Return codon usage of the longest open run, longest runs, stops, and sizes, float64 (P, 84)."""
    ends = fragments.run_ends(BACTERIAL.ends_run)
    lengths = np.diff(ends, prepend=-1) - 1
    of_frames = Groups(_frame_and_fragment(ends, fragments), FRAMES * len(fragments))
    longest_6P = of_frames.reduced(np.maximum, lengths).reshape(FRAMES, -1)
    codons_6P = np.maximum(fragments.lengths_P - np.arange(FRAMES)[:, None] % 3, 0) // 3
    stops_6P = of_frames.counts_P.reshape(FRAMES, -1) - (fragments.frame_lengths_P - codons_6P)
    runs = of_frames.first_greatest(lengths).reshape(FRAMES, -1)
    run_P = runs[longest_6P.argmax(axis=0), np.arange(len(fragments))]
    length_P = lengths[run_P]
    codons = fragments.codons_6F.ravel().take(ranges(ends[run_P] - length_P, length_P))
    usage_PC = Groups(np.repeat(np.arange(len(fragments)), length_P), len(fragments)).bins(codons, CODONS)
    longest_P6 = np.sort(longest_6P, axis=0)[::-1].T
    stop_shares_P6 = np.sort(stops_6P / np.maximum(codons_6P, 1), axis=0).T
    num_nt_P = np.maximum(fragments.lengths_P, 1)
    parts = [
        usage_PC / np.maximum(length_P, 1)[:, None],
        longest_P6,
        3 * longest_P6 / num_nt_P[:, None],
        stop_shares_P6,
        np.stack([length_P, np.log(num_nt_P)], axis=1),
    ]
    return np.concatenate(parts, axis=1)


def composition(fragments: Fragments) -> DoubleArray:
    """Return the frequencies of 3-mers and 4-mers of either strand, float64 (P, 168)."""
    parts = []
    for k, canonical in _CANONICAL.items():
        fragment, words = fragments.whole_words(k)
        counts = Groups(fragment, len(fragments)).bins(canonical.take(words), int(canonical.max()) + 1)
        parts.append(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    return np.concatenate(parts, axis=1)


def kmers(fragments: Fragments, genes: Genes) -> Iterator[tuple[WordArray, IntArray, Groups]]:
    """
    Yield for each of ``TABLES`` the slots of its k-mers, how many of each gene, and the genes' fragments.

    K-mers of residues are from genes, gene by gene. Those of nucleotides are from everywhere, and their counts and
    fragments are of whole fragments. Slots are unsigned, (K,), counts int64.
    """
    residues_R = genes.residues()
    reduced_R = _CLASS_OF_RESIDUE[residues_R]
    ends_N = np.cumsum(genes.lengths_N)
    for table in TABLES:
        if table.is_protein:
            counts_N = np.maximum(genes.lengths_N - table.span + 1, 0)
            letters_R = residues_R if table.letters == len(RESIDUES) else reduced_R
            windows = max(len(letters_R) - table.span + 1, 0)
            slots = np.zeros(windows, dtype=np.uint32)
            for place in table.places:
                slots *= np.uint32(table.letters)
                slots += letters_R[place : place + windows]
            slots = slots[ranges(ends_N - genes.lengths_N, counts_N)]
            yield _hashed(slots, table.hash_bits) if table.hash_bits else slots, counts_N, genes.groups
        else:
            fragment_K, words_K = fragments.whole_words(table.span)
            counts_P = np.bincount(fragment_K, minlength=len(fragments))
            yield _SLOTS_OF_WORDS[table.span].take(words_K), counts_P, Groups(np.arange(len(fragments)), len(fragments))


def _frame_and_fragment(places: IntArray, fragments: Fragments) -> IntArray:
    """Return frame and fragment of places in the six frames, as one number: P times the frame, plus the fragment."""
    frame, codon = np.divmod(places, len(fragments.fragment_F))
    return len(fragments) * frame + fragments.fragment_F[codon]


def _sums_of_runs(found_KG: TableArray | BoolArray, counts_X: IntArray) -> IntArray:
    """Return the sums of *counts_X* consecutive rows each, int64 (X, G)."""
    sums_XG = np.zeros((len(counts_X), found_KG.shape[1]), dtype=np.int64)
    if len(there := np.flatnonzero(counts_X)):
        firsts = (np.cumsum(counts_X) - counts_X)[there]
        sums_XG[there] = np.add.reduceat(found_KG, firsts, axis=0, dtype=np.int64)
    return sums_XG


def feature_count(num_groups: int) -> int:
    of_tables = sum(5 * num_groups + 6 if table.is_protein else 2 * num_groups + 1 for table in TABLES)
    return COMPOSITION_COUNT + GENES_COUNT + of_tables


def _slots_of_words(k: int) -> WordArray:
    """Return each k-mer's slot, below 4**k / 2, uint32 (4**k,): the number of it or its reverse, with A or C amid."""
    forward = np.arange(4**k)
    chosen = np.where((forward >> k) & 1, _backward(k), forward)
    low = chosen & ((1 << k) - 1)  # the middle base's high bit, bit k, is 0 and goes
    return ((chosen >> (k + 1) << k) | low).astype(np.uint32)


def _hashed(numbers: WordArray, bits: int) -> WordArray:
    """Return the highest bits of the numbers times 2 to the 32 over the golden ratio (Knuth's multiplicative hash)."""
    return np.asarray((numbers * np.uint32(2654435761)) >> np.uint32(32 - bits))


def _canonical(k: int) -> IntArray:
    """Return for each k-mer's number a number that it shares with its reverse complement, from 0, int64 (4**k,)."""
    return np.unique(np.minimum(np.arange(4**k), _backward(k)), return_inverse=True)[1].astype(np.int64)


def _backward(k: int) -> IntArray:
    """Return the number of each k-mer's reverse complement, int64 (4**k,)."""
    digits = np.arange(4**k)[:, None] // 4 ** np.arange(k) % 4
    return np.asarray(((3 - digits) * 4 ** np.arange(k)[::-1]).sum(axis=1))


_CANONICAL = {k: _canonical(k) for k in (3, 4)}
_SLOTS_OF_WORDS = {table.span: _slots_of_words(table.span) for table in TABLES if not table.is_protein}
COMPOSITION_COUNT = sum(int(canonical.max()) + 1 for canonical in _CANONICAL.values()) + CODONS + 3 * FRAMES + 2
"""Features of the composition and the open runs, which come first."""
GENES_COUNT = gene_finding.NUMBERS + CODONS + len(RESIDUES)
"""Features of the genes, which come next."""
_CLASS_OF_RESIDUE = np.array(
    [next(n for n, same in enumerate(_REDUCED_ALPHABET) if chr(residue) in same) for residue in RESIDUES],
    dtype=np.uint8,
)
