"""
Records that repeat the id of an earlier record, across all files: reported with both lines, or skipped.

Ids are compared by Python's hash, then byte by byte, a bounded number at a time: a million duplicates take no more
memory than the columns do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.data.fasta import Fault
from virnucpro.data.reading.fasta_block import select_rows
from virnucpro.data.reading.input_files import open_regular

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.data.reading.fasta_block import Rows
    from virnucpro.data.reading.fasta_scan import Problems, ScannedFile
    from virnucpro.data.reading.input_files import ReadableFile


_NAMES_AT_ONCE = 1 << 14
_COUNTED_BYTES = 1 << 20


def drop_duplicates(scanned: Sequence[tuple[ReadableFile, ScannedFile]], problems: Problems) -> None:
    """Report every record that repeats an earlier id, with both lines, and remove it from *scanned*."""
    found = [one for _, one in scanned]
    blocks = [rows for one in found for rows in one.rows]
    pairs_P2 = _duplicate_rows(blocks)
    if not len(pairs_P2):
        return
    numbers, offsets = file_numbers(found), joined(blocks, "offsets")
    lines_P2 = np.empty_like(pairs_P2)
    for number, (file, _) in enumerate(scanned):
        here_P2 = numbers[pairs_P2] == number
        lines_P2[here_P2] = lines_at(file.read_path, offsets[pairs_P2[here_P2]])
    for at in range(0, len(pairs_P2), _NAMES_AT_ONCE):
        some = slice(at, at + _NAMES_AT_ONCE)
        names = _names_of(blocks, pairs_P2[some, 1])
        pairs, lines = pairs_P2[some].tolist(), lines_P2[some].tolist()
        for name, (first, again), (first_line, line) in zip(names, pairs, lines, strict=True):
            first_file, number = scanned[numbers[first]][0], int(numbers[again])
            file = scanned[number][0]
            what = f"duplicate id, first at {first_file.path}:{first_file.place(first_line)}"
            fault = Fault(file.place(line), what, "give every record an id of its own")
            problems.add_record(fault, name, file.path, number)
    keep = np.ones(len(numbers), dtype=np.bool_)
    keep[pairs_P2[:, 1]] = False
    start = 0
    for one in found:
        for at, rows in enumerate(one.rows):
            one.rows[at] = select_rows(rows, keep[start : start + len(rows.residues)])
            start += len(rows.residues)


def _duplicate_rows(blocks: list[Rows]) -> IntArray:
    """Return first row and later row, int64 (P, 2), of every repeated id, by later row."""
    hashes = joined(blocks, "id_hashes")
    in_order = np.sort(hashes)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    candidates = np.flatnonzero(np.isin(hashes, repeated)) if len(repeated) else np.empty(0, dtype=np.int64)
    candidates = candidates[np.argsort(hashes[candidates], kind="stable")]  # rows of one hash together, in their order
    pairs = [np.empty((0, 2), dtype=np.int64)]
    of_hash: int | None = None
    first_rows: dict[bytes, int] = {}
    for start in range(0, len(candidates), _NAMES_AT_ONCE):
        rows = candidates[start : start + _NAMES_AT_ONCE]
        some = []
        for row, row_hash, name in zip(rows.tolist(), hashes[rows].tolist(), _names_of(blocks, rows), strict=True):
            if row_hash != of_hash:
                of_hash = row_hash
                first_rows.clear()
            first = first_rows.setdefault(name, row)
            if first != row and name:
                some.append((first, row))
        pairs.append(np.array(some, dtype=np.int64).reshape(-1, 2))
    pairs_P2 = np.concatenate(pairs)
    return pairs_P2[np.argsort(pairs_P2[:, 1])]


def _names_of(blocks: list[Rows], rows: IntArray) -> list[bytes]:
    """Return the ids of *rows* (at least one) in their order."""
    block_starts = np.cumsum([0, *(len(block.id_bytes) for block in blocks)])
    names: list[bytes] = [b""] * len(rows)
    numbers = np.searchsorted(block_starts, rows, side="right") - 1
    order = np.argsort(numbers, kind="stable")
    for same in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
        block = blocks[numbers[same[0]]]
        ends = np.cumsum(block.id_bytes)
        for at, row in zip(same.tolist(), (rows[same] - block_starts[numbers[same[0]]]).tolist(), strict=True):
            names[at] = block.ids[int(ends[row] - block.id_bytes[row]) : int(ends[row])]
    return names


def lines_at(path: str, offsets: IntArray) -> IntArray:
    """Return the 1-based line of each offset, int64, in the given order; the file is read once."""
    wanted, places = np.unique(offsets, return_inverse=True)
    lines = np.ones(len(wanted), dtype=np.int64)
    with open_regular(path) as descriptor:
        start, passed, at = 0, 1, 0
        while at < len(wanted) and (block := os.pread(descriptor, _COUNTED_BYTES, start)):
            line_ends = start + np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            start += len(block)
            end = int(np.searchsorted(wanted, start, side="right"))
            lines[at:end] = passed + np.searchsorted(line_ends, wanted[at:end])
            passed += len(line_ends)
            at = end
    return lines[places]


def joined(blocks: list[Rows], name: str) -> Any:
    return np.concatenate([getattr(rows, name) for rows in blocks]) if blocks else np.empty(0, dtype=np.int64)


def file_numbers(scanned: Sequence[ScannedFile]) -> Any:
    records = [sum(len(rows.residues) for rows in found.rows) for found in scanned]
    return np.repeat(np.arange(len(scanned), dtype=np.uint32), records)
