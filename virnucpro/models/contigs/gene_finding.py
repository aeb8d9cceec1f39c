"""
Likely genes of a contig, found without training, and features of them.

A candidate is an open reading frame: from the first start codon after a stop to the next stop; where the run continues
beyond the contig's end, or into unknown bases, as far as it can be read. Candidates shorter than ``SHORTEST_GENE``
codons are ignored. Of the others those are chosen whose total length, each less ``PRICE_NT``, is greatest, while
neighbours share at most ``MAX_SHARED_NT``: in most stretches of viral and cellular genomes the longest open frame is
the coding one. Density, strand, length and start of genes separate phages from their hosts over families without
similar sequences (Roux et al. 2015, Camargo et al. 2023). Genes are read by genetic code 11, unless code 4 or 15 makes
a long contig much denser. Legend: P fragments (contigs, or parts of them), N genes of all fragments, R residues.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.models.contigs.fragments import FRAMES, Groups, ranges
from virnucpro.models.contigs.nucleotide_codes import BACTERIAL, CODONS, NO_CODON, RECODED, RESIDUES, GeneticCode, word

if TYPE_CHECKING:
    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.models.contigs.fragments import Fragments
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
_GENETIC_CODES = (BACTERIAL, *RECODED)
_RESIDUES_OF_CODES = np.stack([code.residue_of_codon for code in _GENETIC_CODES])
_NOT_SEEN = -1
_TIE_BITS = 40
_BINDING_SITES = {4: (b"AGGA", b"GGAG", b"GAGG"), 5: (b"AGGAG", b"GGAGG")}
"""Parts of the Shine-Dalgarno sequence AGGAGG, by their length."""
_UPSTREAM_NT = (18, 3)
"""Distance of a binding site's begin to the start codon: at most, and more than."""


@dataclass(frozen=True)
class Genes:
    """Likely genes of fragments; those of a fragment are ordered by their ends."""

    groups: Groups
    starts_N: IntArray
    """int64 (N,): first nucleotide, on the forward strand of the fragment, from 0."""
    ends_N: IntArray
    """int64 (N,): nucleotide after the last one."""
    is_reverse_N: BoolArray
    start_codons_N: IntArray
    """int64 (N,): number of the start codon; -1 where it is unknown."""
    has_stop_N: BoolArray
    """bool (N,): whether the gene's end is in the fragment."""
    lengths_N: IntArray
    """int64 (N,): residues."""
    codons_R: CodeArray
    """uint8 (R,): codons of all genes, end to end."""
    code_P: IntArray
    """int64 (P,): place of each fragment's genetic code among 11, 4 and 15."""

    @classmethod
    def of(cls, fragments: Fragments) -> Genes:
        """Return the genes by the code with which they cover most, 11 unless another one is clearly better."""
        code_P = np.zeros(len(fragments), dtype=np.int64)
        frames = _OpenFrames.chosen(BACTERIAL, fragments, np.ones(len(fragments), dtype=np.bool_))
        share_P = frames.share_of(fragments)
        is_open_P = (fragments.lengths_P >= RECODED_NT) & (share_P + RECODED_GAIN <= 1)
        if is_open_P.any():
            recoded = [_OpenFrames.chosen(code, fragments, is_open_P) for code in RECODED]
            shares = np.stack([found.share_of(fragments) for found in recoded])
            best_P = shares.argmax(axis=0)
            means = np.stack([Groups(found.fragment_N, len(fragments)).means(found.lengths_nt) for found in recoded])
            is_dense_P = shares.max(axis=0) >= np.maximum(RECODED_SHARE, share_P + RECODED_GAIN)
            is_better_P = is_open_P & is_dense_P & (means[best_P, np.arange(len(fragments))] >= RECODED_GENE_NT)
            code_P[is_better_P] = best_P[is_better_P] + 1
            frames = _OpenFrames.joined([f.of_fragments(code_P == n) for n, f in enumerate((frames, *recoded))])
        return cls._of_frames(frames, fragments, code_P)

    @classmethod
    def _of_frames(cls, frames: _OpenFrames, fragments: Fragments, code_P: IntArray) -> Genes:
        starts, ends, is_reverse = frames.places(fragments)
        codons = fragments.codons_6F.ravel()
        first_codons = codons[frames.first_N].astype(np.int64)
        lengths = frames.last_N - frames.first_N
        return cls(
            groups=Groups(frames.fragment_N, len(fragments)),
            starts_N=starts,
            ends_N=ends,
            is_reverse_N=is_reverse,
            start_codons_N=np.where(_IS_START[first_codons], first_codons, _NOT_SEEN),
            has_stop_N=frames.has_stop_N,
            lengths_N=lengths,
            codons_R=codons.take(ranges(frames.first_N, lengths)),
            code_P=code_P,
        )

    @property
    def genetic_codes(self) -> list[GeneticCode]:
        return [_GENETIC_CODES[number] for number in self.code_P.tolist()]

    def residues(self) -> CodeArray:
        """Return the residues of all genes, end to end: places in ``RESIDUES``, uint8 (R,)."""
        if not self.code_P.any():
            return BACTERIAL.residue_of_codon.take(self.codons_R)
        code_R = np.repeat(self.code_P[self.groups.fragment_X], self.lengths_N)
        return _RESIDUES_OF_CODES[code_R, self.codons_R]

    def numbers(self, fragments: Fragments) -> DoubleArray:
        """
        Return the features of the genes, float64 (P, NUMBERS); 0 for a mean of nothing.

        In this order: genes per 1,000 nt, and their share of the fragment; strand changes over pairs of neighbours, and
        how much longer the genes of one strand are than the other's; mean length of all genes; mean, median and
        standard deviation of the lengths of whole ones, and these per 1,000 nt; mean space between neighbours; of
        those on one strand the median space, the mean space, and the shares that overlap, are far apart, or overlap by
        up to eight; shares of starts after a binding site of four bases, and of five, and of starts with ATG, with
        GTG; shares of small and of large genes; whether there are no neighbours, and no whole gene; genes; whether they
        are read by another code than 11.
        """
        genes, lengths = self.groups, self.ends_N - self.starts_N
        num_nt_P = np.maximum(fragments.lengths_P, 1)
        is_whole = (self.start_codons_N != _NOT_SEEN) & self.has_stop_N
        whole, whole_lengths = genes.take(is_whole), lengths[is_whole]
        is_pair = genes.fragment_X[1:] == genes.fragment_X[:-1]
        pairs = Groups(genes.fragment_X[1:][is_pair], len(fragments))
        spaces = (self.starts_N[1:] - self.ends_N[:-1])[is_pair]
        changes = (self.is_reverse_N[1:] != self.is_reverse_N[:-1])[is_pair]
        along, along_spaces = pairs.take(~changes), spaces[~changes]
        total_nt_P = genes.sums(lengths)
        balance_P = np.abs(genes.sums(np.where(self.is_reverse_N, -lengths, lengths)))
        is_seen = self.start_codons_N != _NOT_SEEN
        seen, starts = genes.take(is_seen), self.start_codons_N[is_seen]
        numbers = [
            1000 * genes.counts_P / num_nt_P,
            total_nt_P / num_nt_P,
            pairs.means(changes),
            balance_P / np.maximum(total_nt_P, 1),
            genes.means(lengths),
            whole.means(whole_lengths),
            whole.medians(whole_lengths),
            whole.deviations(whole_lengths),
            1000 * whole.counts_P / num_nt_P,
            pairs.means(spaces),
            along.medians(along_spaces),
            along.means(np.minimum(along_spaces, FAR_NT)),
            along.means(along_spaces < 0),
            along.means(along_spaces > WIDE_NT),
            along.means((along_spaces < 0) & (along_spaces > -9)),
            *(seen.means(has_site[is_seen]) for has_site in self._has_binding_site(fragments)),
            seen.means(starts == _START_CODONS[0]),
            seen.means(starts == _START_CODONS[1]),
            whole.means(whole_lengths < SMALL_NT),
            whole.means(whole_lengths > LARGE_NT),
            pairs.counts_P == 0,
            whole.counts_P == 0,
            genes.counts_P,
            self.code_P > 0,
        ]
        return np.stack(numbers, axis=1).astype(np.float64)

    def usage(self) -> DoubleArray:
        """Return the shares of codons and of residues, float64 (P, CODONS + 20)."""
        of_genes = Groups(np.repeat(self.groups.fragment_X, self.lengths_N), len(self.code_P))
        codons = of_genes.bins(self.codons_R, CODONS)
        residues = of_genes.bins(self.residues(), len(RESIDUES))
        return np.concatenate([codons, residues], axis=1) / np.maximum(of_genes.counts_P, 1)[:, None]

    def _has_binding_site(self, fragments: Fragments) -> list[BoolArray]:
        """Return which genes have a binding site before their start, for each length of site, bool (N,)."""
        fragment_N = self.groups.fragment_X
        start_N = np.where(self.is_reverse_N, fragments.lengths_P[fragment_N] - self.ends_N, self.starts_N)
        farthest, nearest = _UPSTREAM_NT
        before = np.arange(-farthest, max(_BINDING_SITES) - nearest - 1)
        begin_N = 3 * fragments.frame_starts_P[fragment_N] + start_N
        places = farthest - nearest
        at = np.maximum(begin_N[:, None] + before, 0)
        letters = fragments.strands_2T[self.is_reverse_N.astype(np.intp)[:, None], at]
        is_inside = start_N[:, None] + before[:places] >= 0
        found = []
        for k, sites in _BINDING_SITES.items():
            numbers = np.zeros((len(fragment_N), places), dtype=np.uint16)
            for letter in range(k):
                numbers = (numbers << 2) | (letters[:, letter : letter + places] & 3)
            is_site = np.logical_or.reduce([numbers == word(site) for site in sites])
            found.append((is_site & is_inside).any(axis=1))
        return found


@dataclass(frozen=True)
class _OpenFrames:
    """Open reading frames, by their places in the six frames of all fragments, end to end."""

    fragment_N: IntArray
    """int64 (N,), ascending."""
    first_N: IntArray
    """int64 (N,): first codon."""
    last_N: IntArray
    """int64 (N,): codon after the last one."""
    has_stop_N: BoolArray

    @classmethod
    def chosen(cls, code: GeneticCode, fragments: Fragments, is_read_P: BoolArray) -> _OpenFrames:
        """Return the best candidates by *code*, of the fragments to be read."""
        codons = fragments.codons_6F.ravel()
        first, last = _candidates(codons, fragments.run_ends(code.ends_run))
        fragment = fragments.fragment_F[first % len(fragments.fragment_F)]
        some = is_read_P[fragment]
        first, last, fragment = first[some], last[some], fragment[some]
        candidates = cls(fragment, first, last, codons[last] != NO_CODON)
        starts, ends, _ = candidates.places(fragments)
        sums = np.append(0, np.cumsum(codons, dtype=np.int64))
        return candidates.take(_chosen(fragment, starts, ends, sums[last] - sums[first]))

    @classmethod
    def joined(cls, some: list[_OpenFrames]) -> _OpenFrames:
        """Put frames of different fragments together."""
        parts = [(one.fragment_N, one.first_N, one.last_N, one.has_stop_N) for one in some]
        fragment, first, last, has_stop = (np.concatenate(side) for side in zip(*parts, strict=True))
        return cls(fragment, first, last, has_stop).take(np.argsort(fragment, kind="stable"))

    @property
    def lengths_nt(self) -> IntArray:
        """int64 (N,): with the stop."""
        return 3 * (self.last_N - self.first_N + self.has_stop_N)

    def share_of(self, fragments: Fragments) -> DoubleArray:
        """Return how much of each fragment they cover, float64 (P,); a little more than 1 where they overlap."""
        covered_P = np.bincount(self.fragment_N, weights=self.lengths_nt, minlength=len(fragments))
        return covered_P / np.maximum(fragments.lengths_P, 1)

    def of_fragments(self, is_taken_P: BoolArray) -> _OpenFrames:
        return self.take(np.flatnonzero(is_taken_P[self.fragment_N]))

    def places(self, fragments: Fragments) -> tuple[IntArray, IntArray, BoolArray]:
        """Return first nucleotide in the fragment, the one after the last, and whether on the reverse strand."""
        frame, codon = np.divmod(self.first_N, len(fragments.fragment_F))
        from_nt = frame % 3 + 3 * (codon - fragments.frame_starts_P[self.fragment_N])
        to_nt = from_nt + self.lengths_nt
        is_reverse = frame >= FRAMES // 2
        num_nt = fragments.lengths_P[self.fragment_N]
        return np.where(is_reverse, num_nt - to_nt, from_nt), np.where(is_reverse, num_nt - from_nt, to_nt), is_reverse

    def take(self, numbers: IntArray) -> _OpenFrames:
        return _OpenFrames(
            self.fragment_N[numbers], self.first_N[numbers], self.last_N[numbers], self.has_stop_N[numbers]
        )


def _candidates(codons: CodeArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return the first codon of each open reading frame, and the one after its last; *ends* are those of open runs."""
    begins = np.append(0, ends[:-1] + 1)
    is_long = ends - begins >= SHORTEST_GENE
    begins, ends = begins[is_long], ends[is_long]
    comes_from_beyond = (begins == 0) | (codons[begins - 1] == NO_CODON)
    starts = np.append(np.flatnonzero(_IS_START.take(codons)), len(codons))  # the last stands for none
    first = np.minimum(starts[np.searchsorted(starts, begins)], ends)
    is_late = (first - begins > LATEST_START) | (first == ends)
    first = np.where(comes_from_beyond & is_late, begins, first)
    is_long = ends - first >= SHORTEST_GENE
    return first[is_long], ends[is_long]


def _chosen(fragment: IntArray, starts: IntArray, ends: IntArray, sums: IntArray) -> IntArray:
    """
    Return the best set of candidates of each fragment, ordered by their ends.

    *sums* of the codons' numbers break ties: the greater wins, so that both strands give the same genes.
    """
    order = np.lexsort((starts, ends, fragment))
    by_length, by_codons = (ends - starts - PRICE_NT)[order].tolist(), sums[order].tolist()
    worth = [(length << _TIE_BITS) + codons for length, codons in zip(by_length, by_codons, strict=True)]
    limits, sorted_ends = (starts + MAX_SHARED_NT)[order].tolist(), ends[order].tolist()
    bounds = [0, *(np.flatnonzero(np.diff(fragment[order])) + 1).tolist(), len(order)]
    taken: list[int] = []
    for low, high in pairwise(bounds):
        taken += _best_chain(limits, sorted_ends, worth, low, high)
    return order[np.array(taken, dtype=np.int64)]


def _best_chain(limits: list[int], ends: list[int], worth: list[int], low: int, high: int) -> list[int]:
    """Return which candidates, from *low* to before *high*, are worth most together, by dynamic programming."""
    best: list[int] = [0]
    reached: list[int | None] = []
    for place in range(low, high):
        before = bisect_right(ends, limits[place], low, place) - low
        worth_with_it = best[before] + worth[place]
        is_taken = worth_with_it > best[-1]
        reached.append(before if is_taken else None)
        best.append(worth_with_it if is_taken else best[-1])
    taken = []
    place = high - low
    while place:
        before_it = reached[place - 1]
        if before_it is None:
            place -= 1
        else:
            taken.append(low + place - 1)
            place = before_it
    return taken[::-1]
