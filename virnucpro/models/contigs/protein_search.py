"""
Which known proteins the open runs of contigs resemble, viral ones and cellular ones.

A search in the manner of BLAST and DIAMOND (Altschul et al. 1990, Buchfink et al. 2015): words of residues in a reduced
alphabet, at spaced places, that a contig and a protein share; of their surroundings enough residues must be the same,
and a stretch without gaps must score enough. The best remaining pairs are aligned with gaps. All open runs of the six
frames are searched: genes that are truncated, shifted or recoded count, too. A contig's scores do not depend on the
contigs that are searched with it. Legend: P contigs, Q places in their open runs, T places in the proteins, H words, X
pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro.errors import StoppedError
from virnucpro.models.contigs.fragments import Fragments, ranges
from virnucpro.models.contigs.local_alignment import (
    BAND,
    REACH,
    SEPARATOR,
    SPACE,
    SUBSTITUTIONS,
    LaidOut,
    align,
    identities,
)
from virnucpro.models.contigs.nucleotide_codes import BACTERIAL, RESIDUES, canonical_strand

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.models.contigs.nucleotide_codes import CodeArray, WordArray

    OnShare = Callable[[float], None]
    Int32Array = np.ndarray[Any, np.dtype[np.int32]]
    PackedArray = np.ndarray[Any, np.dtype[np.uint64]]

SHORTEST_PROTEIN = 40
"""Residues of a protein that is kept."""
_LAMBDA, _K = 0.243, 0.024
"""Of scores of BLOSUM62 with such gaps by chance (Altschul and Gish 1996; NCBI's ``blast_stat.c``)."""
MOST_EXPECTED = 1e-3
"""E-value of a hit: alignments with such a score that a search of as long a contig finds by chance."""
PASS_NT = 2_000_000
"""Nucleotides that are searched at once, as far as contigs are not longer: all proteins are read for them."""
_SHORTEST_RUN = 30
"""Codons of an open run that is searched."""
_SEED = (0, 1, 3, 4, 5, 7, 10, 11, 12)
"""Places of the letters of a word, from 0."""
_MIDDLE = _SEED[-1] // 2
_REDUCED_ALPHABET = ("KREDQN", "C", "G", "H", "ILV", "M", "F", "Y", "W", "P", "STA")
"""Eleven classes of residues (Buchfink et al. 2015)."""
_LEAST_CLASSES = 3
"""Of the letters of a word: fewer are in many proteins that are not related, and in repeats."""
_HASH_BITS = 22
"""Bits of a word's hash that identify it."""
_PACKED, _BITS = 12, 5
"""Residues around the middle of a word that are compared at once, and bits of each."""
_LEAST_SAME = 6
"""Of them, as many must be the same."""
_OTHER_SEPARATOR = np.uint8(SEPARATOR + 1)
"""Stands for it in contigs, so that it is the same as nothing."""
_NEAR, _LEAST_NEAR = SPACE, 38
"""Residues on each side that are scored without gaps, and what their best stretch must score."""
_ALIGNED = 10
"""Viral proteins, and cellular ones, that are aligned with a contig."""
_PLACES_AT_ONCE, _PAIRS_AT_ONCE = 1 << 17, 1 << 15
"""Of the proteins, and of pairs: their arrays stay in the processor's cache."""
_MARGIN = REACH + BAND
_HIGH_BITS = np.uint64(sum(1 << _BITS * place + _BITS - 1 for place in range(_PACKED)))
_LOW_BITS = _HIGH_BITS - np.uint64(sum(1 << _BITS * place for place in range(_PACKED)))
_PLACE_BITS, _NEAR_BITS = 32, 10
"""Bits of a place, and of a score without gaps, where several numbers are sorted as one."""
_PLACE, _NO_PLACES = (1 << _PLACE_BITS) - 1, np.iinfo(np.int64).max
_CLASS_OF_RESIDUE = np.array(
    [next(n for n, same in enumerate(_REDUCED_ALPHABET) if chr(residue) in same) for residue in RESIDUES] + [0],
    dtype=np.uint8,
)
_BIT_OF_CLASS = np.uint16(1) << _CLASS_OF_RESIDUE.astype(np.uint16)


class Hits(NamedTuple):
    """The best viral and cellular protein of each contig, (P, 2); without a hit: protein -1, the numbers 0."""

    proteins: IntArray
    """int64: numbers of proteins."""
    bits: DoubleArray
    """float64: score of the alignment in bits."""
    excess: DoubleArray
    """float64: bits beyond those of ``MOST_EXPECTED``."""
    identities: DoubleArray
    """float64: share of the alignment's columns with the same residue."""


@dataclass(frozen=True)
class KnownProteins:
    residues_R: CodeArray
    """uint8 (R,): places in ``RESIDUES``, of all proteins, end to end."""
    lengths_N: Int32Array
    """int32 (N,): residues of each."""
    is_viral_N: BoolArray
    record_N: Int32Array
    """int32 (N,): place in ``records``."""
    records: tuple[str, ...]
    """Accession and organism of each genome record, on one line."""

    def check(self) -> None:
        is_sound = (
            [x.dtype for x in (self.residues_R, self.lengths_N, self.is_viral_N, self.record_N)]
            == [np.uint8, np.int32, np.bool_, np.int32]
            and self.residues_R.ndim == self.lengths_N.ndim == 1
            and self.is_viral_N.shape == self.record_N.shape == self.lengths_N.shape
            and bool((self.lengths_N > 0).all())
            and int(self.lengths_N.sum(dtype=np.int64)) == len(self.residues_R)
            and bool((self.residues_R < len(RESIDUES)).all())
            and bool(((self.record_N >= 0) & (self.record_N < len(self.records))).all())
            and all(name.isprintable() for name in self.records)
        )
        if not is_sound:
            raise ValueError("the proteins of the contig model do not fit together")

    def take(self, is_kept_N: BoolArray) -> KnownProteins:
        return KnownProteins(
            self.residues_R[np.repeat(is_kept_N, self.lengths_N)],
            self.lengths_N[is_kept_N],
            self.is_viral_N[is_kept_N],
            self.record_N[is_kept_N],
            self.records,
        )

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        return {
            "residues": self.residues_R,
            "lengths": self.lengths_N,
            "is_viral": self.is_viral_N.astype(np.uint8),
            "record": self.record_N,
            "records": np.frombuffer("\n".join(self.records).encode(), dtype=np.uint8),
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, np.ndarray[Any, Any]]) -> KnownProteins:
        records = tensors["records"].tobytes().decode()
        return cls(
            residues_R=tensors["residues"],
            lengths_N=tensors["lengths"],
            is_viral_N=tensors["is_viral"].astype(np.bool_),
            record_N=tensors["record"],
            records=tuple(records.split("\n")),
        )

    def search(
        self, codes: Sequence[CodeArray], stop: threading.Event | None = None, on_share: OnShare | None = None
    ) -> Hits:
        """
        Return the best hits of contigs, the same for both strands.

        Args:
            codes: As of ``nucleotide_codes.encode``.
            stop: Set it to end the search.
            on_share: Called with the share of the search that is done.

        Raises:
            StoppedError: *stop* was set.
        """
        codes = [canonical_strand(codes_L) for codes_L in codes]
        pass_P = np.cumsum([len(codes_L) for codes_L in codes], dtype=np.int64) // PASS_NT
        bounds = [0, *(np.flatnonzero(np.diff(pass_P)) + 1).tolist(), len(codes)]
        found = []
        for number, (first, last) in enumerate(pairwise(bounds)):
            if stop is not None and stop.is_set():
                raise StoppedError

            def share_of_pass(share: float, before: int = number) -> None:
                if on_share is not None:
                    on_share((before + share) / (len(bounds) - 1))

            found.append(self._hits_of_pass(codes[first:last], share_of_pass))
        return Hits(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _hits_of_pass(self, codes: Sequence[CodeArray], on_share: OnShare) -> Hits:
        runs = _OpenRuns.of(codes)
        place_X, other_X, kind_X = self._most_alike(runs, *self._pairs(runs, on_share))
        bits_X = (_LAMBDA * align(runs.laid_out, self._laid_out, place_X, other_X) - np.log(_K)) / np.log(2)
        searched = 2 * np.array([len(codes_L) for codes_L in codes]) * float(len(self.residues_R))  # of six frames
        excess_X = bits_X - np.log2(np.maximum(searched, 1))[kind_X // 2] + np.log2(MOST_EXPECTED)
        order = np.lexsort((np.arange(len(kind_X)), -bits_X, kind_X))  # of equal ones the first
        best = order[np.flatnonzero(np.diff(kind_X[order], prepend=-1))]
        best = best[excess_X[best] >= 0]
        proteins = np.full(2 * len(codes), -1, dtype=np.int64)
        proteins[kind_X[best]] = self._laid_out.owner_T[other_X[best]]
        same = identities(runs.laid_out, self._laid_out, place_X[best], other_X[best])
        columns = np.zeros((3, 2 * len(codes)))
        columns[:, kind_X[best]] = bits_X[best], excess_X[best], same
        return Hits(proteins.reshape(-1, 2), *columns.reshape(3, -1, 2))

    @cached_property
    def _laid_out(self) -> LaidOut:
        return LaidOut.of(self.residues_R, self.lengths_N)

    def _most_alike(
        self, runs: _OpenRuns, place_X: IntArray, other_X: IntArray, near_X: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """
        Return the pairs to align: of each contig and kind the best, one for a run and a protein.

        Gives places in the runs and in the proteins, and twice the contig, plus 1 for a cellular protein. Of equal
        scores the first counts.
        """
        both_X = runs.laid_out.owner_T[place_X].astype(np.int64) * len(self.lengths_N) + self._laid_out.owner_T[other_X]
        key_X = (both_X << _NEAR_BITS) - near_X  # the better, the less; scores are positive
        order = np.argsort(key_X)
        key, places = key_X[order], (place_X << _PLACE_BITS | other_X)[order]
        both = -(-key >> _NEAR_BITS)
        firsts = np.flatnonzero(np.diff(both, prepend=-1))
        is_best = key == np.repeat(key[firsts], np.diff(np.append(firsts, len(key))))
        places = np.minimum.reduceat(np.where(is_best, places, _NO_PLACES), firsts)
        near = (both[firsts] << _NEAR_BITS) - key[firsts]
        run, protein = np.divmod(both[firsts], len(self.lengths_N))
        kind = 2 * runs.fragment_of_run[run] + ~self.is_viral_N[protein]
        order = np.argsort(places)
        order = order[np.argsort((kind[order] << _NEAR_BITS) - near[order], kind="stable")]
        kinds = kind[order]
        order = order[np.arange(len(order)) - np.searchsorted(kinds, kinds) < _ALIGNED]
        return places[order] >> _PLACE_BITS, places[order] & _PLACE, kind[order]

    def _pairs(self, runs: _OpenRuns, on_share: OnShare) -> tuple[IntArray, IntArray, IntArray]:
        """Return places in the runs and in the proteins that share a word and are alike, and how they score."""
        mine, known = runs.laid_out, self._laid_out
        index = _WordIndex.of(mine.residues_T)
        nothing = np.zeros(0, dtype=np.int64)
        found = [(nothing, nothing, nothing)]
        end = len(known.residues_T) - _MARGIN
        for start in range(_MARGIN, end, _PLACES_AT_ONCE):
            stop = min(start + _PLACES_AT_ONCE, end)
            stretch = known.residues_T[start - _PACKED : stop + 2 * _PACKED]  # the margin is wider
            place, other = (
                np.concatenate(parts) for parts in zip((nothing, nothing), *index.alike(stretch), strict=True)
            )
            score = _near_score(mine.residues_T, stretch, place, other)
            good = score >= _LEAST_NEAR
            found.append((place[good], other[good] + (start - _PACKED), score[good]))
            on_share(stop / end)
        place_X, other_X, near_X = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return place_X, other_X, near_X


@dataclass(frozen=True)
class _WordIndex:
    order_Q: IntArray
    """int64 (Q,): places in the runs, those of a word together."""
    packed_Q: PackedArray
    """uint64 (Q,): the residues around the middle of each of these words."""
    places_H: IntArray
    """int64 (H,): where the places of such a word begin, in the high bits, and how many there are."""
    is_there_H: BoolArray
    """Whether there are any: this stays in the processor's cache."""

    @classmethod
    def of(cls, residues_T: CodeArray) -> _WordIndex:
        places = np.flatnonzero(_is_seed(residues_T))
        # one number of word and place: sorted in a tenth of the time that sorting places by words takes
        keys = _words(residues_T).take(places).astype(np.int64) << _PLACE_BITS
        keys |= places
        keys.sort()
        order = keys & _PLACE
        keys >>= _PLACE_BITS
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        there = keys[firsts]
        places_of = np.zeros(1 << _HASH_BITS, np.int64)
        places_of[there] = firsts << _PLACE_BITS | np.diff(firsts, append=len(keys))
        unlike = np.where(residues_T == SEPARATOR, _OTHER_SEPARATOR, residues_T)
        packed = _Packed(unlike).at(order + (_MIDDLE - _PACKED // 2))
        return cls(order, packed, places_of, places_of > 0)

    def alike(self, stretch: CodeArray) -> Iterator[tuple[IntArray, IntArray]]:
        """
        Yield pairs of places in the runs and in a *stretch* of proteins that share a word and are alike.

        The stretch has ``_PACKED`` residues more before, and twice as many after.
        """
        words = _words(stretch[_PACKED:])[: len(stretch) - 3 * _PACKED]
        hits = np.flatnonzero(self.is_there_H.take(words))
        places = self.places_H.take(words.take(hits))
        first, count = places >> _PLACE_BITS, places & _PLACE
        hits += _PACKED + _MIDDLE
        packed = _Packed(stretch).at(hits - _PACKED // 2)
        ends = np.cumsum(count, dtype=np.int64)
        inside = np.searchsorted(ends, np.arange(_PAIRS_AT_ONCE, int(count.sum()), _PAIRS_AT_ONCE))
        limits = np.unique([0, *inside.tolist(), len(hits)]).tolist()
        for at in map(slice, limits, limits[1:]):
            number = ranges(first[at], count[at])
            unlike = self.packed_Q.take(number)
            unlike ^= np.repeat(packed[at], count[at])
            alike = np.flatnonzero(_differing(unlike) <= _PACKED - _LEAST_SAME)
            of_hit = np.searchsorted(ends[at], alike + (ends[at.start] - count[at.start]), side="right")
            yield self.order_Q.take(number[alike]) + _MIDDLE, hits[at][of_hit]


@dataclass(frozen=True)
class _OpenRuns:
    laid_out: LaidOut
    fragment_of_run: IntArray

    @classmethod
    def of(cls, codes: Sequence[CodeArray]) -> _OpenRuns:
        fragments = Fragments(codes)
        codons, ends = fragments.codons_6F.ravel(), fragments.run_ends(BACTERIAL.ends_run)
        lengths = np.diff(ends, prepend=-1) - 1
        is_long = lengths >= _SHORTEST_RUN
        starts, lengths = (ends - lengths)[is_long], lengths[is_long]
        residues = BACTERIAL.residue_of_codon[codons[ranges(starts, lengths)]]
        fragment = fragments.fragment_F[starts % len(fragments.fragment_F)]
        return cls(LaidOut.of(residues, lengths), fragment)


def _is_seed(residues: CodeArray) -> BoolArray:
    """Return which words are within a protein and of letters of several classes, bool (T - span + 1,)."""
    before = np.append(0, np.cumsum(residues == SEPARATOR, dtype=np.int32))
    is_inside = before[_SEED[-1] + 1 :] == before[: -_SEED[-1] - 1]
    class_T = _BIT_OF_CLASS[residues]
    classes = np.zeros(len(is_inside), dtype=np.uint16)
    for place in _SEED:
        classes |= class_T[place : place + len(classes)]
    return np.asarray(is_inside & (np.bitwise_count(classes) >= _LEAST_CLASSES))


def _words(residues: CodeArray) -> WordArray:
    """Return the hash of the word at each place, uint32 (T - span + 1,)."""
    reduced = _CLASS_OF_RESIDUE[residues].astype(np.uint32)
    number = max(len(residues) - _SEED[-1], 0)
    words = reduced[:number].copy()
    for place in _SEED[1:]:
        words *= np.uint32(len(_REDUCED_ALPHABET))
        words += reduced[place : place + number]
    words *= np.uint32(2654435761)
    words >>= np.uint32(32 - _HASH_BITS)
    return words


class _Packed:
    """Residues, of which ``at`` gives any ``_PACKED`` neighbours in one number; half as many are kept in one."""

    def __init__(self, residues: CodeArray) -> None:
        two = residues.astype(np.uint32)
        two = two[:-1] | two[1:] << np.uint32(_BITS)
        self._half = two[:-4] | two[2:-2] << np.uint32(2 * _BITS)
        self._half |= two[4:] << np.uint32(4 * _BITS)

    def at(self, places: IntArray) -> PackedArray:
        """Return the residues from each place on, uint64."""
        packed = self._half.take(places + _PACKED // 2).astype(np.uint64)
        packed <<= np.uint64(_PACKED // 2 * _BITS)
        packed |= self._half.take(places)
        return packed


def _differing(unlike: PackedArray) -> CodeArray:
    """Return how many of the packed residues differ, uint8, where exclusive or of both is given; it is overwritten."""
    carried = unlike & _LOW_BITS
    carried += _LOW_BITS  # reaches the highest bit of a residue where one below is set
    unlike |= carried
    unlike &= _HIGH_BITS
    return np.bitwise_count(unlike)


def _near_score(first: CodeArray, second: CodeArray, place: IntArray, other: IntArray) -> IntArray:
    """Return the best score of a stretch without gaps within ``_NEAR`` residues of the two places."""
    score, best = np.zeros(len(place), dtype=np.int16), np.zeros(len(place), dtype=np.int16)
    for shift in range(-_NEAR, _NEAR + 1):
        pair = first.take(place + shift).astype(np.intp)
        pair *= SEPARATOR + 1
        pair += second.take(other + shift)
        score += SUBSTITUTIONS.take(pair)
        np.maximum(score, 0, out=score)
        np.maximum(best, score, out=best)
    return best.astype(np.int64)
