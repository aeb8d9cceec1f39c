"""
Whole FASTA records read as arrays: the fast path for a block in which nothing is unusual.

``plain_rows`` gives the same rows as the strict rules of ``virnucpro.data.fasta``, and leaves every unusual block to
them. This module knows one block of bytes at a time, neither files nor lines.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro.choices import SequenceKind
from virnucpro.data.fasta import MAX_HEADER_BYTES, MAX_ID_BYTES, PLAIN_ID_BYTES, PRINTABLE_ASCII, PROTEIN_LETTERS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from virnucpro.arrays import BoolArray, ByteArray, IntArray
    from virnucpro.data.fasta import Letters


HASH_BYTES = 16
"""Bytes of sha256 kept for each sequence."""


class Rows(NamedTuple):
    offsets: IntArray
    """int64 (n,): bytes from the start of the file to each ``>``."""
    record_bytes: IntArray
    """int64 (n,): bytes from ``>`` to just before the next record."""
    residues: IntArray
    """int64 (n,): residues after normalisation."""
    id_bytes: IntArray
    """int64 (n,): bytes of each id."""
    id_hashes: IntArray
    """int64 (n,): Python's hash of each id; valid in this process only."""
    sequence_hashes: ByteArray
    """uint8 (n, 16): first bytes of the sha256 of each normalised sequence."""
    low_information: BoolArray
    """bool (n,): whether a sequence holds unknown residues or nucleotides only."""
    ids: bytes
    """The ids, end to end."""


def sequence_hash(sequence: bytes) -> bytes:
    return hashlib.sha256(sequence).digest()[:HASH_BYTES]


def plain_rows(buffer: bytes, offset: int, counts: Counter[str], letters: Letters) -> tuple[Rows, int] | None:
    """Read whole records as arrays; return rows and number of lines, or None where anything is unusual."""
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
    if letters.most_residues is not None and residues.max() > letters.most_residues:
        return None
    if not _holds_letters_only(body, int(residues.sum()), letters):
        return None
    names = [text[a + 1 : b].partition(b" ")[0] for a, b in zip(starts.tolist(), header_ends_list, strict=True)]
    if b"\t" in text:
        names = [name.partition(b"\t")[0] for name in names]
    sequences, mapped_j = _normalised(body, letters)
    ends = np.cumsum(residues)
    low = _low_information(sequences, ends, residues, letters)
    hashes = _hash_all(sequences, ends.tolist())
    rows = make_rows(starts, len(buffer), offset, residues, names, hashes, low)
    if not _plain_ids(rows, MAX_ID_BYTES if letters.chunk_nt is None else PLAIN_ID_BYTES):
        return None
    counts["mapped_j"] += mapped_j
    counts["ambiguous"] += letters.count_ambiguous(sequences)
    counts["low_information"] += int(low.sum())
    return rows, len(line_ends)


def _holds_letters_only(body: bytes, num_residues: int, letters: Letters) -> bool:
    if letters.kind is SequenceKind.PROTEIN:
        letters_B = np.frombuffer(body, dtype=np.uint8) | ord(" ")  # lower case, and nothing else becomes a letter
        letters_B -= ord("a")
        return int(np.count_nonzero(letters_B < len(PROTEIN_LETTERS))) == num_residues
    return not body.translate(None, letters.taken + b"\n")


def _normalised(body: bytes, letters: Letters) -> tuple[bytes, int]:
    """Return the sequences of *body* as the model sees them, end to end, and the number of J."""
    has_j = letters.kind is SequenceKind.PROTEIN and (b"J" in body or b"j" in body)
    has_u = letters.kind is SequenceKind.DNA and b"U" in body
    if not (has_j or has_u) and np.frombuffer(body, dtype=np.uint8).max() <= ord("Z"):
        return body.replace(b"\n", b""), 0
    mapped_j = body.count(b"J") + body.count(b"j") if has_j else 0
    return body.translate(letters.normalise, b"\n"), mapped_j


def _low_information(sequences: bytes, ends: IntArray, residues: IntArray, letters: Letters) -> BoolArray:
    """Return for each of the concatenated *sequences* whether all its letters are unknown ones."""
    starts = ends - residues
    first_letters = np.frombuffer(sequences, dtype=np.uint8)[starts]
    low = np.zeros(len(ends), dtype=np.bool_)
    for number in np.flatnonzero(first_letters == letters.unknown[0]).tolist():
        low[number] = not sequences[starts[number] : ends[number]].strip(letters.unknown)
    return low


def _plain_ids(rows: Rows, most_bytes: int) -> bool:
    ids_B = np.frombuffer(rows.ids, dtype=np.uint8)
    if rows.id_bytes.min() < 1 or rows.id_bytes.max() > most_bytes:
        return False
    return bool(ids_B.min() >= PRINTABLE_ASCII[0] and ids_B.max() <= PRINTABLE_ASCII[-1])


def _hash_all(sequences: bytes, ends: list[int]) -> bytes:
    """Return the 16-byte hashes of the concatenated *sequences*, end to end."""
    sha256 = hashlib.sha256
    digests = b"".join([sha256(sequences[a:b]).digest() for a, b in zip([0, *ends], ends, strict=False)])
    return np.frombuffer(digests, dtype=np.uint8).reshape(len(ends), -1)[:, :HASH_BYTES].tobytes()


def make_rows(
    starts: Sequence[int] | IntArray,
    buffer_bytes: int,
    offset: int,
    residues: Sequence[int] | IntArray,
    names: list[bytes],
    hashes: bytes,
    low_information: Sequence[bool] | BoolArray,
) -> Rows:
    """*starts* are offsets in a buffer that begins *offset* bytes into the file."""
    starts = np.asarray(starts, dtype=np.int64)
    return Rows(
        offsets=starts + offset,
        record_bytes=np.diff(starts, append=buffer_bytes),
        residues=np.asarray(residues, dtype=np.int64),
        id_bytes=np.fromiter(map(len, names), np.int64, len(names)),
        id_hashes=np.fromiter(map(hash, names), np.int64, len(names)),
        sequence_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES),
        low_information=np.asarray(low_information, dtype=np.bool_),
        ids=b"".join(names),
    )


def select_rows(rows: Rows, keep: BoolArray) -> Rows:
    if keep.all():
        return rows
    ends = np.cumsum(rows.id_bytes)
    wanted = zip((ends - rows.id_bytes)[keep].tolist(), ends[keep].tolist(), strict=True)
    ids = b"".join([rows.ids[start:end] for start, end in wanted])
    columns = {name: getattr(rows, name)[keep] for name in Rows._fields if name != "ids"}
    return Rows(**columns, ids=ids)
