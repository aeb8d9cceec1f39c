"""
Contigs as chunks and frames: the stream of nucleotides, the bounds of chunks, and the six frames of each.

A contig of L nucleotides is divided into the fewest chunks of at most C nucleotides that cover it; neighbours overlap a
little, so that all but perhaps the last one have exactly C.

A chunk is read in six frames, F1 to F3 on its own strand and R1 to R3 on the reverse complement, by the standard
genetic code. A frame is open when its protein holds no stop and is not empty. Only A, C, G and T are complemented, and
a codon with any other letter gives no residue, so a protein may have fewer residues than its frame has codons. Many
chunks at a time.
"""

from __future__ import annotations

import hashlib
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.choices import SequenceKind
from virnucpro.data.fasta import MAX_HEADER_BYTES, letters_of
from virnucpro.data.reading.fasta_block import HASH_BYTES, sequence_hash
from virnucpro.genetic_code import BASES, STANDARD_CODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virnucpro.arrays import ByteArray, IntArray
    from virnucpro.data.fasta import Letters
    from virnucpro.data.sequence_index import RecordPlace, SequenceIndex

FRAMES = ("F1", "F2", "F3", "R1", "R2", "R3")
"""Names of the frames, in the order of their bits and of the files."""

_STOP = b"*"
_NO_RESIDUE = b"-"
_COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")
_RADIX = len(BASES) + 1
"""A codon's number has three digits: the index of each base in ``BASES``; other letters have the next one."""
_DIGITS = bytes(BASES.find(letter) % _RADIX for letter in range(256))
_BLOCK_BYTES = 1 << 21
_PLACES_AT_ONCE = 1 << 14
_HEADER_ENDS = (b"\n", b"\r", b" ", b"\t", b"")


def chunks_per_contig(lengths_nt: IntArray, chunk_nt: int, min_nt: int = 0) -> IntArray:
    """Return the number of chunks of each contig, int64; a contig of less than *min_nt* nucleotides has none."""
    lengths = np.asarray(lengths_nt, dtype=np.int64)
    return np.where(lengths >= min_nt, -(-lengths // chunk_nt), 0)


def chunk_bounds(lengths_nt: int | IntArray, chunk_nt: int) -> tuple[IntArray, IntArray]:
    """Return starts and ends of all chunks of one contig or of several, contig by contig, as ``bounds_of_chunks``."""
    lengths = np.atleast_1d(np.asarray(lengths_nt, dtype=np.int64))
    counts = chunks_per_contig(lengths, chunk_nt)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return bounds_of_chunks(np.repeat(lengths, counts), numbers, chunk_nt)


def bounds_of_chunks(lengths_nt: IntArray, numbers: IntArray, chunk_nt: int) -> tuple[IntArray, IntArray]:
    """
    Return starts and ends of single chunks, int64 (chunks,): 0-based in their contig, half open.

    With n chunks, R = n·C - L nucleotides too many and q, r = divmod(R, n), the first q + r chunks after the first one
    begin q + 1 nucleotides before the end of the one before, the others q. *lengths_nt* and *numbers* are of each
    chunk: nucleotides of its contig, at least 1, and its number there, from 0.
    """
    counts = chunks_per_contig(lengths_nt, chunk_nt)
    quotients, remainders = np.divmod(counts * chunk_nt - lengths_nt, counts)
    starts = numbers * (chunk_nt - quotients) - np.minimum(numbers, quotients + remainders)
    return starts, np.minimum(starts + chunk_nt, lengths_nt)


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
    """Return the open frames of chunks *starts* to *ends*, int64 (chunks,), in the end-to-end upper-case *letters*."""
    # both strands end to end: a chunk's reverse complement is in the second half
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
        A byte a codon (a residue, a stop, or none): first codons that begin at letters 0, 3, 6 ..., then at 1, 4, 7 ...
        and at 2, 5, 8 ...; and the codons in each of the three. The last ones, which would end after the strand, are
        meaningless.
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


def stream_nucleotides(
    index: SequenceIndex, positions: IntArray, *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[bytes]:
    """
    Yield the letters of records of DNA in the case of the input, without blanks, line ends and gaps; in RNA T for U.

    Memory does not grow with a contig's length. Every record is compared with the index (id, letters, hash), as in
    ``SequenceIndex.read``; a changed long record is found only after a part of it was yielded: discard output made from
    the stream where it ends with InputChangedError. No block spans two records.

    Args:
        positions: int64 (n,): records of one file, in the order of the file.
        block_bytes: Bytes read at once; a longer record comes in several blocks. Never changes a letter.
    """
    assert index.rules.sequence_kind is SequenceKind.DNA
    assert block_bytes > MAX_HEADER_BYTES + len(b">\r\n")
    rules = letters_of(index.rules)
    block, block_start = b"", 0
    for at in range(0, len(positions), _PLACES_AT_ONCE):
        for place in index.places(positions[at : at + _PLACES_AT_ONCE]):
            if place.num_bytes > block_bytes:
                yield from _long_record(index, place, rules, block_bytes)
                continue
            start = place.offset - block_start
            if start < 0 or start + place.num_bytes > len(block):
                block, block_start, start = index.bytes_at(place.position, place.offset, block_bytes), place.offset, 0
            record = block[start : start + place.num_bytes]
            letters = record[record.find(b"\n") + 1 :].translate(rules.in_case, rules.removed)
            same = len(record) == place.num_bytes and _names(record, place) and len(letters) == place.num_letters
            if not same or sequence_hash(letters.upper()) != place.sequence_hash:
                raise index.changed(place.position)
            yield letters


class NucleotideWindow:
    """A forward-moving window on the blocks of ``stream_nucleotides``."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held: list[bytes] = []
        self._start = 0
        self._end = 0

    def read(self, start: int, count: int) -> bytes:
        """Return *count* nucleotides from number *start* of the stream; earlier ones are gone after that."""
        while self._end < start + count:
            piece = next(self._pieces)
            self._held.append(piece)
            self._end += len(piece)
        held = b"".join(self._held)[start - self._start :]
        self._held, self._start = [held], start
        return held[:count]

    def finish(self) -> None:
        """Exhaust the stream, so that its last record is compared too."""
        for _ in self._pieces:
            pass


def _long_record(index: SequenceIndex, place: RecordPlace, rules: Letters, block_bytes: int) -> Iterator[bytes]:
    digest = hashlib.sha256()
    num_letters = 0
    end = place.offset + place.num_bytes
    for offset in range(place.offset, end, block_bytes):
        block = index.bytes_at(place.position, offset, min(block_bytes, end - offset))
        if offset == place.offset:
            if not _names(block, place):
                raise index.changed(place.position)
            block = block[block.find(b"\n") + 1 :]
        letters = block.translate(rules.in_case, rules.removed)
        digest.update(letters.upper())
        num_letters += len(letters)
        yield letters
    if num_letters != place.num_letters or digest.digest()[:HASH_BYTES] != place.sequence_hash:
        raise index.changed(place.position)


def _names(record: bytes, place: RecordPlace) -> bool:
    """Whether *record* begins with the indexed id."""
    name_end = 1 + len(place.name)
    return record[:name_end] == b">" + place.name and record[name_end : name_end + 1] in _HEADER_ENDS
