"""
The letters of indexed DNA in the order of the input, as a stream: memory does not grow with a contig's length.

Every record is compared with the index (id, letters, hash), as in ``SequenceIndex.read``. A change of a long record is
found only after a part of it was yielded: keep what was made of the stream only if the stream ends without an error.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from virnucpro.choices import SequenceKind
from virnucpro.data.fasta import MAX_HEADER_BYTES
from virnucpro.data.letters import letters_of
from virnucpro.data.reading.fasta_block import HASH_BYTES, sequence_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virnucpro.arrays import IntArray
    from virnucpro.data.sequence_index import RecordPlace, SequenceIndex


_BLOCK_BYTES = 1 << 21
_PLACES_AT_ONCE = 1 << 14
_HEADER_ENDS = (b"\n", b"\r", b" ", b"\t", b"")


def stream_letters(index: SequenceIndex, positions: IntArray, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """
    Yield the letters of records of DNA in the case of the input, without blanks, line ends and gaps.

    No piece spans two records; InputChangedError where the file no longer holds an indexed record.

    Args:
        positions: int64 (n,): records of one file, in the order of the file.
        block_bytes: Bytes read at once; a longer record comes in several pieces. Never changes a letter.
    """
    assert index.rules.sequence_kind is SequenceKind.DNA
    assert block_bytes > MAX_HEADER_BYTES + len(b">\r\n")
    removed = letters_of(index.rules).removed
    block, block_start = b"", 0
    for at in range(0, len(positions), _PLACES_AT_ONCE):
        for place in index.places(positions[at : at + _PLACES_AT_ONCE]):
            if place.num_bytes > block_bytes:
                yield from _long_record(index, place, removed, block_bytes)
                continue
            start = place.offset - block_start
            if start < 0 or start + place.num_bytes > len(block):
                block, block_start, start = _read(index, place, place.offset, block_bytes), place.offset, 0
            record = block[start : start + place.num_bytes]
            letters = record[record.find(b"\n") + 1 :].translate(None, removed)
            same = len(record) == place.num_bytes and _names(record, place) and len(letters) == place.num_letters
            if not same or sequence_hash(letters.upper()) != place.sequence_hash:
                raise index.changed(place.position)
            yield letters


class LetterWindow:
    """A forward-moving window on the pieces of ``stream_letters``."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held: list[bytes] = []
        self._start = 0
        self._end = 0

    def letters(self, start: int, count: int) -> bytes:
        """Return *count* letters from letter *start* of the stream; earlier letters are gone after that."""
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


def _long_record(index: SequenceIndex, place: RecordPlace, removed: bytes, block_bytes: int) -> Iterator[bytes]:
    digest = hashlib.sha256()
    num_letters = 0
    end = place.offset + place.num_bytes
    for offset in range(place.offset, end, block_bytes):
        block = _read(index, place, offset, min(block_bytes, end - offset))
        if offset == place.offset:
            if not _names(block, place):
                raise index.changed(place.position)
            block = block[block.find(b"\n") + 1 :]
        letters = block.translate(None, removed)
        digest.update(letters.upper())
        num_letters += len(letters)
        yield letters
    if num_letters != place.num_letters or digest.digest()[:HASH_BYTES] != place.sequence_hash:
        raise index.changed(place.position)


def _names(record: bytes, place: RecordPlace) -> bool:
    """Whether *record* begins with the indexed id."""
    name_end = 1 + len(place.name)
    return record[:name_end] == b">" + place.name and record[name_end : name_end + 1] in _HEADER_ENDS


def _read(index: SequenceIndex, place: RecordPlace, offset: int, num_bytes: int) -> bytes:
    try:
        return os.pread(index.descriptor(place.file_number), num_bytes, offset)
    except OSError as error:
        raise index.changed(place.position) from error
