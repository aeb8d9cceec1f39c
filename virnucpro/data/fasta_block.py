"""
A block of whole FASTA records as arrays: the fast way to read what holds nothing unusual.

What ``plain_rows`` reads it reads as the strict rules of ``virnucpro.data.fasta`` would; whatever is unusual at all it
leaves to them. It knows one block of bytes at a time, neither files nor lines.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from virnucpro.data.fasta import LETTERS, MAX_HEADER_BYTES, MAX_ID_BYTES, NORMALISE, PRINTABLE_ASCII

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

HASH_BYTES = 16
"""Bytes of sha256 kept for each sequence."""


class Rows(NamedTuple):
    """Some records in the order of their file."""

    offsets: IntArray
    """int64 (n,): bytes from the start of the file to each ``>``."""
    record_bytes: IntArray
    """int64 (n,): bytes from ``>`` to just before the next record."""
    residues: IntArray
    """int64 (n,): residues after normalisation."""
    id_bytes: IntArray
    """int64 (n,): bytes of each id."""
    id_hashes: IntArray
    """int64 (n,): Python's hash of each id, of use in this process only."""
    sequence_hashes: ByteArray
    """uint8 (n, 16): first bytes of the sha256 of each normalised sequence."""
    ids: bytes
    """The ids, end to end."""


def sequence_hash(sequence: bytes) -> bytes:
    """Return the 16-byte hash of a normalised sequence."""
    return hashlib.sha256(sequence).digest()[:HASH_BYTES]


def plain_rows(buffer: bytes, offset: int, counts: Counter[str], *, hashing: bool) -> tuple[Rows, int] | None:
    """
    Read whole records as arrays.

    Args:
        buffer: Whole records from the first ``>`` on.
        offset: Bytes before *buffer* in its file.
        counts: Takes the number of J.
        hashing: Whether sequences are hashed.

    Returns:
        The rows and the number of lines, or None where anything at all is unusual: the strict rules decide then.
    """
    if b"\r" in buffer:
        return None
    text = buffer if buffer.endswith(b"\n") else buffer + b"\n"
    bytes_B = np.frombuffer(text, dtype=np.uint8)
    line_ends = np.flatnonzero(bytes_B == ord("\n"))
    line_starts = np.empty_like(line_ends)
    line_starts[0] = 0
    np.add(line_ends[:-1], 1, out=line_starts[1:])
    header_lines = np.flatnonzero(bytes_B[line_starts] == ord(">"))
    starts, header_ends = line_starts[header_lines], line_ends[header_lines]
    record_ends = np.append(starts[1:], len(text))
    sequence_lines = np.diff(header_lines, append=len(line_ends)) - 1
    residues = record_ends - header_ends - 1 - sequence_lines
    if residues.min() < 1 or (header_ends - starts).max() > MAX_HEADER_BYTES:
        return None
    header_ends_list = header_ends.tolist()
    body = b"".join([text[a + 1 : b] for a, b in zip(header_ends_list, record_ends.tolist(), strict=True)])
    if _count_letters(body) != residues.sum():
        return None
    names = [text[a + 1 : b].partition(b" ")[0] for a, b in zip(starts.tolist(), header_ends_list, strict=True)]
    if b"\t" in text:
        names = [name.partition(b"\t")[0] for name in names]
    rows = make_rows(starts, len(buffer), offset, residues, names, _hash_all(body, residues) if hashing else None)
    if not _plain_ids(rows):
        return None
    counts["mapped_j"] += (b"J" in body and body.count(b"J")) + (b"j" in body and body.count(b"j"))
    return rows, len(line_ends)


def _count_letters(body: bytes) -> int:
    letters_B = np.frombuffer(body, dtype=np.uint8) | ord(" ")  # lower case, and nothing else becomes a letter
    letters_B -= ord("a")
    return int(np.count_nonzero(letters_B < len(LETTERS)))


def _plain_ids(rows: Rows) -> bool:
    ids_B = np.frombuffer(rows.ids, dtype=np.uint8)
    if rows.id_bytes.min() < 1 or rows.id_bytes.max() > MAX_ID_BYTES:
        return False
    return bool(ids_B.min() >= PRINTABLE_ASCII[0] and ids_B.max() <= PRINTABLE_ASCII[-1])


def _hash_all(body: bytes, residues: IntArray) -> bytes:
    """Hash sequences of letters and line feeds, which lie end to end; return the 16 bytes of each, end to end."""
    normal = b"J" not in body and np.frombuffer(body, dtype=np.uint8).max() <= ord("Z")
    sequences = body.replace(b"\n", b"") if normal else body.translate(NORMALISE, b"\n")
    sha256 = hashlib.sha256
    ends = np.cumsum(residues).tolist()
    digests = b"".join([sha256(sequences[a:b]).digest() for a, b in zip([0, *ends], ends, strict=False)])
    return np.frombuffer(digests, dtype=np.uint8).reshape(len(residues), -1)[:, :HASH_BYTES].tobytes()


def make_rows(
    starts: Sequence[int] | IntArray,
    buffer_bytes: int,
    offset: int,
    residues: Sequence[int] | IntArray,
    names: list[bytes],
    hashes: bytes | None,
) -> Rows:
    """Make rows; *starts* are offsets in a buffer that begins *offset* bytes into the file."""
    starts = np.asarray(starts, dtype=np.int64)
    return Rows(
        offsets=starts + offset,
        record_bytes=np.diff(starts, append=buffer_bytes),
        residues=np.asarray(residues, dtype=np.int64),
        id_bytes=np.fromiter(map(len, names), np.int64, len(names)),
        id_hashes=np.fromiter(map(hash, names), np.int64, len(names)),
        sequence_hashes=np.frombuffer(hashes or bytes(HASH_BYTES * len(names)), dtype=np.uint8).reshape(-1, HASH_BYTES),
        ids=b"".join(names),
    )
