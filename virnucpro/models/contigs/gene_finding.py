"""
Likely genes of a contig, found without training, and features of them.

A candidate is an open reading frame: from the first start codon after a stop to the next stop; where the run continues
beyond the contig's end, or into unknown letters, as far as it can be read. Candidates shorter than ``SHORTEST_GENE``
codons are ignored. Of the others those are chosen whose total length, each less ``PRICE_NT``, is greatest, while
neighbours share at most ``MAX_SHARED_NT``: in most stretches of viral and cellular genomes the longest open frame is
the coding one. Density, strand, length and start of genes separate phages from their hosts over families without
similar sequences (Roux et al. 2015, Camargo et al. 2023). Genes are read by genetic code 11, unless code 4 or 15 makes
a long contig much denser. Legend: L nucleotides, N genes, R residues.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.models.contigs.nucleotide_codes import (
    BACTERIAL,
    CODONS,
    NO_CODON,
    RECODED,
    RESIDUES,
    GeneticCode,
    codons_of_frames,
    reverse_complement,
    word,
    words,
)

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray


SHORTEST_GENE = 30
"""Codons."""
PRICE_NT = 60
"""Nucleotides by which a gene must be worth more than the space between its neighbours."""
MAX_SHARED_NT = 30
"""Most nucleotides that neighbouring genes share: a third of the shortest one."""
LATEST_START = 20
"""Codons from the contig's end within which a start codon begins a gene that might come in from beyond."""
SMALL_NT, LARGE_NT, WIDE_NT, FAR_NT = 300, 1500, 100, 300
"""Limits for lengths of genes and the spaces between them; a space counts as at most ``FAR_NT``."""
RECODED_NT, RECODED_SHARE, RECODED_GAIN, RECODED_GENE_NT = 2_000, 0.8, 0.1, 400
"""Another code than 11 takes a contig of so many nucleotides, of which genes cover this share, and so much more than by
code 11, and genes of this mean length: chance makes dense but short ones where a stop codon less ends them."""
NUMBERS = 25
"""Features of the genes besides codons and residues."""

_START_CODONS = tuple(word(codon) for codon in (b"ATG", b"GTG", b"TTG"))
_IS_START = np.isin(np.arange(CODONS + 1), _START_CODONS)
_NOT_SEEN = -1
_TIE_BITS = 40
_BINDING_SITES = {4: (b"AGGA", b"GGAG", b"GAGG"), 5: (b"AGGAG", b"GGAGG")}
"""Parts of the Shine-Dalgarno sequence AGGAGG, by their length."""
_UPSTREAM_NT = (18, 3)
"""Distance of a binding site's begin to the start codon: at most, and more than."""


@dataclass(frozen=True)
class Genes:
    """Likely genes, ordered by their ends."""

    starts_N: IntArray
    """int64 (N,): first nucleotide, on the forward strand, from 0."""
    ends_N: IntArray
    """int64 (N,): nucleotide after the last one."""
    is_reverse_N: BoolArray
    """bool (N,)."""
    start_codons_N: IntArray
    """int64 (N,): number of the start codon; -1 where it is unknown."""
    has_stop_N: BoolArray
    """bool (N,): whether the gene's end is in the contig."""
    lengths_N: IntArray
    """int64 (N,): residues."""
    codons_R: CodeArray
    """uint8 (R,): codons of all genes, end to end."""
    genetic_code: GeneticCode

    @classmethod
    def of(cls, codes_L: CodeArray) -> Genes:
        """Return the genes by the code with which they cover most, 11 unless another one is clearly better."""
        genes = cls._by(BACTERIAL, codes_L)
        share = genes.share_of(codes_L)
        if len(codes_L) >= RECODED_NT and share + RECODED_GAIN <= 1:
            recoded = max((cls._by(code, codes_L) for code in RECODED), key=lambda found: found.share_of(codes_L))
            is_dense = recoded.share_of(codes_L) >= max(RECODED_SHARE, share + RECODED_GAIN)
            if is_dense and _mean(recoded.ends_N - recoded.starts_N) >= RECODED_GENE_NT:
                return recoded
        return genes

    @classmethod
    def _by(cls, code: GeneticCode, codes_L: CodeArray) -> Genes:
        frames = codons_of_frames(codes_L)
        found = [_candidates(codons_of_frame, code.ends_run) for codons_of_frame in frames]
        frame = np.repeat(np.arange(len(frames)), [len(first) for first, _ in found])
        first, last = (np.concatenate(side) for side in zip(*found, strict=True))
        codons = np.concatenate(frames)
        before = np.append(0, np.cumsum([len(codons_of_frame) for codons_of_frame in frames]))[frame]
        start_codons = codons[before + first].astype(np.int64)
        has_stop = codons[before + last] != NO_CODON
        from_nt, to_nt = frame % 3 + 3 * first, frame % 3 + 3 * (last + has_stop)
        is_reverse = frame >= len(frames) // 2
        starts = np.where(is_reverse, len(codes_L) - to_nt, from_nt)
        ends = np.where(is_reverse, len(codes_L) - from_nt, to_nt)
        sums = np.append(0, np.cumsum(codons, dtype=np.int64))
        chosen = _chosen(starts, ends, sums[before + last] - sums[before + first])
        genes = [frames[frame[n]][first[n] : last[n]] for n in chosen]
        return cls(
            starts_N=starts[chosen],
            ends_N=ends[chosen],
            is_reverse_N=is_reverse[chosen],
            start_codons_N=np.where(_IS_START[start_codons[chosen]], start_codons[chosen], _NOT_SEEN),
            has_stop_N=has_stop[chosen],
            lengths_N=(last - first)[chosen],
            codons_R=np.concatenate([np.empty(0, dtype=np.uint8), *genes]),
            genetic_code=code,
        )

    def residues(self) -> CodeArray:
        """Return the residues of all genes, end to end: places in ``RESIDUES``, uint8 (R,)."""
        return self.genetic_code.residue_of_codon[self.codons_R]

    def share_of(self, codes_L: CodeArray) -> float:
        """Return how much of the contig the genes cover; a little more than 1 where they overlap."""
        return float((self.ends_N - self.starts_N).sum() / max(len(codes_L), 1))

    def numbers(self, codes_L: CodeArray) -> DoubleArray:
        """
        Return the features of the genes, float64 (NUMBERS,); 0 for a mean of nothing.

        In this order: genes per 1,000 nt, and their share of the contig; strand changes over pairs of neighbours, and
        how much longer the genes of one strand are than the other's; mean length of all genes; mean, median and
        standard deviation of the lengths of whole ones, and these per 1,000 nt; mean space between neighbours; of
        those on one strand the median space, the mean space, and the shares that overlap, are far apart, or overlap by
        up to eight; shares of starts after a binding site of four letters, and of five, and of starts with ATG, with
        GTG; shares of small and of large genes; whether there are no neighbours, and no whole gene; genes; whether they
        are read by another code than 11.
        """
        num_nt, lengths = max(len(codes_L), 1), self.ends_N - self.starts_N
        is_whole = (self.start_codons_N != _NOT_SEEN) & self.has_stop_N
        whole = lengths[is_whole]
        spaces = self.starts_N[1:] - self.ends_N[:-1]
        changes = self.is_reverse_N[1:] != self.is_reverse_N[:-1]
        along = spaces[~changes]
        balance = abs(int(np.where(self.is_reverse_N, -lengths, lengths).sum()))
        starts = self.start_codons_N[self.start_codons_N != _NOT_SEEN]
        numbers = [
            1000 * len(lengths) / num_nt,
            self.share_of(codes_L),
            _mean(changes),
            balance / max(int(lengths.sum()), 1),
            _mean(lengths),
            _mean(whole),
            float(np.median(whole)) if len(whole) else 0.0,
            float(np.std(whole)) if len(whole) else 0.0,
            1000 * len(whole) / num_nt,
            _mean(spaces),
            float(np.median(along)) if len(along) else 0.0,
            _mean(np.minimum(along, FAR_NT)),
            _mean(along < 0),
            _mean(along > WIDE_NT),
            _mean((along < 0) & (along > -9)),
            *self._with_binding_site(codes_L),
            _mean(starts == _START_CODONS[0]),
            _mean(starts == _START_CODONS[1]),
            _mean(whole < SMALL_NT),
            _mean(whole > LARGE_NT),
            float(not len(spaces)),
            float(not len(whole)),
            float(len(lengths)),
            float(self.genetic_code is not BACTERIAL),
        ]
        return np.array(numbers, dtype=np.float64)

    def usage(self) -> DoubleArray:
        """Return the shares of codons and of residues, float64 (CODONS + 20,)."""
        codons = np.bincount(self.codons_R, minlength=CODONS)[:CODONS]
        residues = np.bincount(self.residues(), minlength=len(RESIDUES))[: len(RESIDUES)]
        return np.concatenate([codons, residues]) / max(len(self.codons_R), 1)

    def _with_binding_site(self, codes_L: CodeArray) -> list[float]:
        """Return the share of known starts after a binding site, for each length of site."""
        is_seen = self.start_codons_N != _NOT_SEEN
        before = [0.0] * len(_BINDING_SITES)
        if not is_seen.any():
            return before
        for place, (k, sites) in enumerate(_BINDING_SITES.items()):
            found = 0
            for is_other, strand in ((False, codes_L), (True, reverse_complement(codes_L))):
                of_strand = is_seen & (self.is_reverse_N == is_other)
                starts = len(codes_L) - self.ends_N[of_strand] if is_other else self.starts_N[of_strand]
                sums = np.append(0, np.cumsum(np.isin(words(strand, k), [word(site) for site in sites])))
                low, high = (np.clip(starts - nt, 0, len(sums) - 1) for nt in _UPSTREAM_NT)
                found += int(np.count_nonzero(sums[high] > sums[low]))
            before[place] = found / int(np.count_nonzero(is_seen))
        return before


def _candidates(codons: CodeArray, ends_run: BoolArray) -> tuple[IntArray, IntArray]:
    """Return the first codon of each open reading frame of a frame, and the one after its last."""
    ends = np.flatnonzero(ends_run[codons])
    begins = np.append(0, ends[:-1] + 1)
    comes_from_beyond = (begins == 0) | (codons[begins - 1] == NO_CODON)
    starts = np.flatnonzero(np.append(_IS_START[codons], True))  # the last stands for none
    first = np.minimum(starts[np.searchsorted(starts, begins)], ends)
    is_late = (first - begins > LATEST_START) | (first == ends)
    first = np.where(comes_from_beyond & is_late, begins, first)
    is_long = ends - first >= SHORTEST_GENE
    return first[is_long], ends[is_long]


def _chosen(starts: IntArray, ends: IntArray, sums: IntArray) -> IntArray:
    """
    Return the best set of candidates, by dynamic programming, ordered by their ends.

    *sums* of the codons' numbers break ties: the greater wins, so that both strands choose alike.
    """
    order = np.lexsort((starts, ends))
    sorted_ends = ends[order].tolist()
    best, reached = [0], []
    for place, number in enumerate(order.tolist()):
        length = int(ends[number] - starts[number])
        before = bisect_right(sorted_ends, int(starts[number]) + MAX_SHARED_NT, 0, place)
        worth = best[before] + ((length - PRICE_NT) << _TIE_BITS) + int(sums[number])
        is_taken = worth > best[-1]
        reached.append(before if is_taken else None)
        best.append(worth if is_taken else best[-1])
    taken = []
    place = len(order)
    while place:
        before_it = reached[place - 1]
        if before_it is None:
            place -= 1
        else:
            taken.append(int(order[place - 1]))
            place = before_it
    return np.array(taken[::-1], dtype=np.int64)


def _mean(values: np.ndarray[Any, Any]) -> float:
    return float(values.mean()) if len(values) else 0.0
