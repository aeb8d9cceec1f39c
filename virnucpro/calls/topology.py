"""
Terminal repeats of contigs: an end that is identical to the other end, or to its reverse complement.

A direct repeat is what an assembler leaves of a circular genome, or of one that is packaged with repeats; an inverted
one is of linear genomes such as those of adenoviruses (as CheckV reports them: Nayfach et al. 2021).
"""

from __future__ import annotations

from enum import IntEnum

from virnucpro.models.contigs.nucleotide_codes import OTHER, masked

SHORTEST_REPEAT_NT = 20
LONGEST_REPEAT_NT = 20_000
"""Longer ones are not looked for."""
_COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")


class Topology(IntEnum):
    LINEAR = 0
    DIRECT = 1
    INVERTED = 2

    def __str__(self) -> str:
        return ("linear", "direct terminal repeat", "inverted terminal repeat")[self]


class ContigEnds:
    """The two ends of a contig, read from left to right in stretches that may overlap."""

    def __init__(self, length_nt: int) -> None:
        self._length_nt = length_nt
        self._reach_nt = min(length_nt // 2, LONGEST_REPEAT_NT)
        self._head, self._tail = bytearray(), bytearray()

    def read(self, start: int, letters: bytes) -> None:
        """Read the upper-case *letters* from nucleotide *start* on; none is skipped between two calls."""
        end, tail_start = start + len(letters), self._length_nt - self._reach_nt
        if start <= len(self._head) < self._reach_nt:
            self._head += letters[len(self._head) - start : self._reach_nt - start]
        new = max(start, tail_start + len(self._tail))
        if new < end:
            self._tail += letters[new - start :]

    def topology(self) -> Topology:
        """Return how the ends of a fully read contig repeat each other; not by low complexity or unknown letters."""
        head, tail = bytes(self._head), bytes(self._tail)
        seed = head[:SHORTEST_REPEAT_NT]
        if len(seed) < SHORTEST_REPEAT_NT:
            return Topology.LINEAR
        found = Topology.LINEAR
        if seed == tail[-SHORTEST_REPEAT_NT:][::-1].translate(_COMPLEMENT):
            found = Topology.INVERTED
        at = tail.find(seed)
        while at >= 0:
            if head.startswith(tail[at:]):
                found = Topology.DIRECT
                break
            at = tail.find(seed, at + 1)
        is_simple = found and bool((masked(head)[:SHORTEST_REPEAT_NT] == OTHER).any())
        return Topology.LINEAR if is_simple else found
