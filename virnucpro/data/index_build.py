"""
Building a sequence index: scan every input, compare ids across files, sort by residues, find copies, write.

Every problem of the whole input is collected before anything is written. Memory is that of the records' columns and
ids, never that of the sequences.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.data.fasta import shown_id
from virnucpro.data.fasta_block import HASH_BYTES, Rows
from virnucpro.data.fasta_scan import Problems, ScannedFile, scan_fasta
from virnucpro.data.index_file import write_index
from virnucpro.data.input_files import ReadableFile, make_readable, open_regular
from virnucpro.errors import BadInputError, InputProblem, OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

_COUNTED_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """One input file as it was when it was indexed."""

    path: str
    """As the user named it; for messages."""
    real_path: str
    """Absolute, links resolved."""
    size_bytes: int
    """Bytes of the file."""
    sha256: str
    """Hex sha256 of the file."""
    read_path: str
    """What records are read from: ``real_path``, or the unpacked copy of a gzip file."""
    read_size_bytes: int
    """Bytes of ``read_path``."""
    read_sha256: str
    """Hex sha256 of ``read_path``."""
    num_records: int
    """Records in the file."""


def build_index(
    fasta_files: Sequence[str | Path],
    index_path: Path,
    *,
    unpack_dir: Path,
    max_unpacked_bytes: int,
    hashing: bool = True,
) -> None:
    """
    Read and check the whole input, and write its index.

    Args:
        fasta_files: Plain or gzip FASTA files; their order is the order of the input.
        index_path: Where the index goes.
        unpack_dir: Where unpacked copies of gzip files go.
        max_unpacked_bytes: Bytes that one gzip file may unpack to.
        hashing: False leaves out every hash: the benchmark's, of no use for a run.

    Raises:
        BadInputError: The input breaks a rule.
        OutputError: The index or an unpacked copy cannot be written.
    """
    problems = Problems()
    scanned: list[tuple[ReadableFile, ScannedFile]] = []
    for path in fasta_files:
        if os.path.realpath(path) == os.path.realpath(index_path):
            raise OutputError(index_path, "it is one of the inputs")
        try:
            file = make_readable(path, unpack_dir, max_unpacked_bytes=max_unpacked_bytes)
            with open_regular(file.read_path) as descriptor:
                scanned.append((file, scan_fasta(descriptor, file.path, problems, hashing=hashing)))
        except BadInputError as error:
            problems.extend(error)
    if not fasta_files:
        raise BadInputError([InputProblem("input", None, "no files", "name at least one FASTA file")])
    _refuse_duplicates(scanned, problems)
    problems.raise_if_any()
    _write(scanned, index_path, hashing=hashing)


def _write(scanned: list[tuple[ReadableFile, ScannedFile]], index_path: Path, *, hashing: bool) -> None:
    """Sort the records and write the index, one column in memory at a time."""
    blocks = [rows for _, found in scanned for rows in found.rows]
    residues = _joined(blocks, "residues")
    order = longest_first(residues)
    lengths = residues[order]
    del residues

    def sequence_hashes() -> ByteArray:
        hashes: ByteArray = _joined(blocks, "sequence_hashes")
        return hashes.view(f"V{HASH_BYTES}")[order].view(np.uint8).reshape(-1, HASH_BYTES)

    columns = {
        "offsets": lambda: _joined(blocks, "offsets")[order],
        "record_bytes": lambda: _joined(blocks, "record_bytes")[order],
        "lengths": lambda: lengths,
        "input_rows": lambda: order,
        "representatives": lambda: find_representatives(sequence_hashes(), lengths) if hashing else order,
        "id_ends": lambda: np.cumsum(_joined(blocks, "id_bytes")),
        "sequence_hashes": sequence_hashes,
        "file_numbers": lambda: _file_numbers(scanned)[order],
    }
    counts = sum((found.counts for _, found in scanned), Counter[str]())
    description = {
        "files": [asdict(_indexed(file, found)) for file, found in scanned],
        "counts": {name: counts[name] for name in ("mapped_j", "removed_blanks", "stripped_stops")},
    }
    write_index(index_path, len(lengths), columns, (rows.ids for rows in blocks), description)


def longest_first(residues: IntArray) -> IntArray:
    """Return the rows by residues, longest first, ties in their order: one sort of keys that hold both numbers."""
    row_bits = len(residues).bit_length()
    assert int(residues.max()).bit_length() + row_bits < 64
    keys: IntArray = residues.max() - residues
    keys <<= row_bits
    keys |= np.arange(len(residues))
    keys.sort()
    keys &= (1 << row_bits) - 1
    return keys


def find_representatives(sequence_hashes: ByteArray, lengths: IntArray) -> IntArray:
    """
    Find the first of each set of identical sequences.

    Args:
        sequence_hashes: uint8 (n, 16), by position.
        lengths: int64 (n,): residues, by position.

    Returns:
        int64 (n,): for each position the first one with the same hash and the same length.
    """
    words = np.ascontiguousarray(sequence_hashes).view("<u8")
    order = np.argsort(words[:, 0])
    differs = np.zeros(len(order), dtype=bool)
    differs[0] = True
    for values in (words[:, 0], words[:, 1], lengths):
        in_order = values[order]
        differs[1:] |= in_order[1:] != in_order[:-1]
    del values, in_order
    groups = np.cumsum(differs)
    groups -= 1
    representatives: IntArray = np.empty_like(order)
    representatives[order] = np.minimum.reduceat(order, np.flatnonzero(differs))[groups]
    return representatives


def _refuse_duplicates(scanned: list[tuple[ReadableFile, ScannedFile]], problems: Problems) -> None:
    """Add a problem for every record whose id an earlier one has, naming both lines."""
    blocks = [rows for _, found in scanned for rows in found.rows]
    pairs = _duplicate_rows(blocks)
    if not pairs:
        return
    pairs = pairs[: BadInputError.MAX_PROBLEMS + 1]
    file_numbers, offsets = _file_numbers(scanned), _joined(blocks, "offsets")
    names = _names_of(blocks, [row for pair in pairs for row in pair])
    wanted: dict[int, list[int]] = {}
    for row in names:
        wanted.setdefault(int(file_numbers[row]), []).append(int(offsets[row]))
    lines = {number: lines_at(scanned[number][0].read_path, sorted(some)) for number, some in wanted.items()}
    for first, again in pairs:
        number, first_number = int(file_numbers[again]), int(file_numbers[first])
        what = f"duplicate id, first at {scanned[first_number][0].path}:{lines[first_number][int(offsets[first])]}"
        line = lines[number][int(offsets[again])]
        remedy = "give every record an id of its own"
        problems.add(InputProblem(scanned[number][0].path, line, what, remedy, shown_id(names[again])))


def _duplicate_rows(blocks: list[Rows]) -> list[tuple[int, int]]:
    """Return (first row, later row) for every row whose id occurred before, by later row."""
    hashes = _joined(blocks, "id_hashes")
    in_order = np.sort(hashes)
    repeated = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(repeated):
        return []
    candidates = np.flatnonzero(np.isin(hashes, repeated)).tolist()
    first_rows: dict[bytes, int] = {}
    pairs = []
    for row, name in _names_of(blocks, candidates).items():
        first = first_rows.setdefault(name, row)
        if first != row and name:
            pairs.append((first, row))
    return pairs


def _names_of(blocks: list[Rows], rows: Sequence[int]) -> dict[int, bytes]:
    """Return the ids of *rows*, by row."""
    block_starts = np.cumsum([0, *(len(block.id_bytes) for block in blocks)])
    names: dict[int, bytes] = {}
    sorted_rows = np.unique(np.asarray(rows, dtype=np.int64))
    numbers = np.searchsorted(block_starts, sorted_rows, side="right") - 1
    for number in np.unique(numbers).tolist():
        ends = np.cumsum(blocks[number].id_bytes)
        for row in sorted_rows[numbers == number].tolist():
            at = row - int(block_starts[number])
            names[row] = blocks[number].ids[int(ends[at] - blocks[number].id_bytes[at]) : int(ends[at])]
    return names


def lines_at(path: str, offsets: Sequence[int]) -> dict[int, int]:
    """Return the 1-based line of each of *offsets*, which are sorted."""
    lines: dict[int, int] = {}
    line = 1
    with open_regular(path) as descriptor:
        for start, end in pairwise([0, *offsets]):
            line += sum(block.count(b"\n") for block in _blocks(descriptor, start, end))
            lines[end] = line
    return lines


def _blocks(descriptor: int, start: int, end: int) -> Iterator[bytes]:
    while start < end and (block := os.pread(descriptor, min(end - start, _COUNTED_BYTES), start)):
        yield block
        start += len(block)


def _joined(blocks: list[Rows], name: str) -> Any:
    return np.concatenate([getattr(rows, name) for rows in blocks]) if blocks else np.empty(0, dtype=np.int64)


def _file_numbers(scanned: list[tuple[ReadableFile, ScannedFile]]) -> Any:
    return np.repeat(np.arange(len(scanned), dtype=np.uint32), [_num_records(found) for _, found in scanned])


def _num_records(found: ScannedFile) -> int:
    return sum(len(rows.residues) for rows in found.rows)


def _indexed(file: ReadableFile, found: ScannedFile) -> IndexedFile:
    return IndexedFile(
        path=file.path,
        real_path=file.real_path,
        size_bytes=file.packed_bytes if file.packed_bytes is not None else found.size_bytes,
        sha256=file.packed_sha256 if file.packed_sha256 is not None else found.sha256,
        read_path=file.read_path,
        read_size_bytes=found.size_bytes,
        read_sha256=found.sha256,
        num_records=_num_records(found),
    )
