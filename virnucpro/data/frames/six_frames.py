"""
The six frames of a chunk: which are open, their proteins and their nucleotides.

A chunk is read in six frames, F1 to F3 on its own strand and R1 to R3 on the reverse complement, by the standard
genetic code. A frame is open when its protein holds no stop and is not empty. Only A, C, G and T are complemented, and
a codon with any other letter gives no residue, so a protein may have fewer residues than its frame has codons. Many
chunks at a time.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.genetic_code import BASES, STANDARD_CODE

if TYPE_CHECKING:
    from virnucpro.arrays import ByteArray, IntArray

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
"""Names of the frames, in the order of their bits and of the files."""

_STOP = b"*"
_NO_RESIDUE = b"-"
_COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")
_RADIX = len(BASES) + 1
"""A codon's number has three digits: the index of each base in ``BASES``; other letters have the next one."""
_DIGITS = bytes(BASES.find(letter) % _RADIX for letter in range(256))


def _residue_table() -> bytes:
    """Residue, stop or no residue of each codon's number."""
    residues = bytearray(_NO_RESIDUE) * 256
    for residue, (first, second, third) in zip(STANDARD_CODE, product(range(len(BASES)), repeat=3), strict=True):
        residues[(first * _RADIX + second) * _RADIX + third] = residue
    return bytes(residues)


_RESIDUES = _residue_table()


class OpenFrames(NamedTuple):
    """The open frames of some chunks, chunk by chunk, in the order of ``FRAMES``."""

    bits: ByteArray
    """uint8 (chunks,): bit f is set where frame f is open."""
    chunks: IntArray
    """int64 (kept,): chunk of each frame, from 0."""
    frames: IntArray
    """int64 (kept,): frame, as an index into ``FRAMES``."""
    proteins: list[bytes]
    nucleotides: list[bytes]
    """Of each frame: its codons up to the last residue, and the base after them if there is one."""


def open_frames(letters: bytes, starts: IntArray, ends: IntArray) -> OpenFrames:
    """
    Translate chunks in six frames and return the open ones.

    Args:
        letters: Upper-case nucleotides of the chunks' contigs, end to end.
        starts: int64 (chunks,): first letter of each chunk, from 0.
        ends: int64 (chunks,): letter after each chunk.
    """
    # both strands end to end: a chunk's reverse complement is a piece of the second half
    strands = letters + letters.translate(_COMPLEMENT)[::-1]
    offsets = np.arange(3)
    firsts_C6 = np.hstack([starts[:, None] + offsets, len(strands) - ends[:, None] + offsets])
    ends_C6 = np.repeat(np.stack([ends, len(strands) - starts], axis=1), 3, axis=1)
    codons_C6 = np.maximum((ends_C6 - firsts_C6) // 3, 0)

    by_frame, frame_codons = _translate(strands)
    at_C6 = firsts_C6 % 3 * frame_codons + firsts_C6 // 3
    residues = np.frombuffer(by_frame, dtype=np.uint8)
    stops = np.append(np.flatnonzero(residues == ord(_STOP)), len(residues))
    kept_C6 = (stops[np.searchsorted(stops, at_C6)] >= at_C6 + codons_C6) & (codons_C6 > 0)
    missing = np.flatnonzero(residues == ord(_NO_RESIDUE))
    counts_C6 = codons_C6
    if len(missing):
        counts_C6 = codons_C6 - np.searchsorted(missing, at_C6 + codons_C6) + np.searchsorted(missing, at_C6)
        kept_C6 &= counts_C6 > 0

    chunks, frames = np.nonzero(kept_C6)
    kept = chunks, frames
    proteins = [by_frame[at : at + codons] for at, codons in _pairs(at_C6[kept], codons_C6[kept])]
    for number in np.flatnonzero(counts_C6[kept] < codons_C6[kept]).tolist():
        proteins[number] = proteins[number].replace(_NO_RESIDUE, b"")
    nucleotide_ends = np.minimum(firsts_C6[kept] + 3 * counts_C6[kept] + 1, ends_C6[kept])
    nucleotides = [strands[first:end] for first, end in _pairs(firsts_C6[kept], nucleotide_ends)]
    bits = np.packbits(kept_C6, axis=1, bitorder="little")[:, 0]
    return OpenFrames(bits, chunks, frames, proteins, nucleotides)


def _translate(strand: bytes) -> tuple[bytes, int]:
    """
    Translate the codon that begins at every letter of *strand*.

    Returns:
        A byte a codon (a residue, a stop, or none): first those that begin at letters 0, 3, 6 ..., then those at 1, 4,
        7 ... and at 2, 5, 8 ...; and their number in each of the three. The last ones, which would end after the
        strand, are meaningless.
    """
    frame_codons = -(-len(strand) // 3)
    padded = strand + b"N" * (3 * frame_codons + 2 - len(strand))
    digits = np.frombuffer(padded.translate(_DIGITS), dtype=np.uint8)
    codons = digits[:-2] * np.uint8(_RADIX)
    codons += digits[1:-1]
    codons *= np.uint8(_RADIX)
    codons += digits[2:]
    return codons.reshape(frame_codons, 3).T.tobytes().translate(_RESIDUES), frame_codons


def _pairs(left: IntArray, right: IntArray) -> zip[tuple[int, int]]:
    return zip(left.tolist(), right.tolist(), strict=True)
