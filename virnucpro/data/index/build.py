"""
Builds a sequence index: scan every input, compare ids across files, sort by residues, find copies, write.

Every problem of the whole input is collected before anything is written; or, where bad records are skipped, they are
listed in the index. A record that repeats an id is reported with both lines: ids are compared by Python's hash, then
byte by byte, a bounded number at a time. Memory is that of the records' columns and ids, never that of the sequences.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations, islice, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.config import DEFAULT_RULES
from virnucpro.data.fasta import Fault, read_header
from virnucpro.data.index.file import write_index
from virnucpro.data.reading.fasta_block import HASH_BYTES, select_rows
from virnucpro.data.reading.fasta_scan import COUNTED, OF_FILES, ScannedFile, scan_fasta
from virnucpro.data.reading.input_files import ReadableFile, input_name, make_readable, open_regular
from virnucpro.data.reading.problems import Problems, read_skipped
from virnucpro.errors import BadInputError, InputProblem, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import ByteArray, IntArray
    from virnucpro.config import InputRules
    from virnucpro.data.reading.fasta_block import Rows


_NAMES_AT_ONCE = 1 << 14
_COUNTED_BYTES = 1 << 20
_NAME_MATES = """write /1 and /2 behind the ids of mates: awk 'NR % 4 == 1 {$1 = $1 "/1"} 1' FILE > NEW_FILE"""


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    path: str
    real_path: str
    """Absolute, links resolved."""
    size_bytes: int
    sha256: str
    read_path: str
    """The file that records are read from: ``real_path``, or the FASTA copy of a compressed file, FASTQ or BAM."""
    read_size_bytes: int
    read_sha256: str
    num_records: int
    """Without skipped records."""


def build_index(
    fasta_files: Sequence[str | Path],
    index_path: Path,
    *,
    unpack_dir: Path,
    max_unpacked_bytes: int,
    rules: InputRules = DEFAULT_RULES,
) -> None:
    """Read and check the whole input, and write its index; arguments and errors are those of ``SequenceIndex``."""
    if any(os.path.realpath(path) == os.path.realpath(index_path) for path in fasta_files):
        raise OutputError(index_path, "it is one of the inputs")
    readable = partial(
        make_readable, unpack_dir=unpack_dir, kind=rules.sequence_kind, max_unpacked_bytes=max_unpacked_bytes
    )
    scanned, problems = _scan(fasta_files, readable, rules, {})
    mates = _mates(scanned)
    if mates:
        scanned, problems = _scan(fasta_files, readable, rules, mates)
    if not fasta_files:
        raise BadInputError([InputProblem("input", None, "no files", "name at least one FASTA file")])
    drop_duplicates(scanned, problems)
    problems.raise_if_any()
    if problems.skipped.count and not rules.allow_empty and not any(found.num_records for _, found in scanned):
        raise _nothing_left(problems, [file.path for file, _ in scanned])
    _write(scanned, problems, index_path, rules)


def _scan(
    fasta_files: Sequence[str | Path], readable: Callable[..., ReadableFile], rules: InputRules, mates: dict[str, int]
) -> tuple[list[tuple[ReadableFile, ScannedFile]], Problems]:
    """Read every file; *mates*: path -> number in a pair, 1 or 2, of its reads."""
    problems = Problems(rules.on_bad_record)
    scanned: list[tuple[ReadableFile, ScannedFile]] = []
    for file_number, path in enumerate(fasta_files):
        try:
            file = readable(path, mate=mates.get(input_name(path), 0))
            with open_regular(file.read_path) as descriptor:
                found = scan_fasta(
                    descriptor, file.path, problems, rules=rules, file_number=file_number, place=file.place
                )
            found.counts.update(lacks_bgzip_end=file.lacks_bgzip_end, mate_files=file.path in mates)
            scanned.append((file, found))
        except BadInputError as error:
            problems.extend(error)
    return scanned, problems


def _mates(scanned: Sequence[tuple[ReadableFile, ScannedFile]]) -> dict[str, int]:
    """Return path -> 1 or 2, of two FASTQ files that have the same unmarked ids in the same order."""
    mates: dict[str, int] = {}
    for (first, found), (second, other) in combinations([one for one in scanned if one[0].is_fastq], 2):
        if found.sha256 != other.sha256 and all(
            one == two and one is not None and not one.endswith((b"/1", b"/2"))
            for one, two in zip_longest(_fastq_ids(first), _fastq_ids(second))
        ):
            if first.path in mates or second.path in mates:
                return {}  # three files of the same ids
            mates |= {first.path: 1, second.path: 2}
    return mates


def _fastq_ids(file: ReadableFile) -> Iterator[bytes]:
    with open_regular(file.read_path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as copy:
        for header in islice(copy, 0, None, 4):
            yield read_header(header[1:-1], 1)[0]


def check_readable(input_files: Sequence[str | Path]) -> None:
    """Raise BadInputError with every file of an input that cannot be opened, long before any is read."""
    problems = Problems()
    for path in input_files:
        try:
            with open_regular(os.fspath(path)):
                pass
        except BadInputError as error:
            problems.extend(error)
    problems.raise_if_any()


def _nothing_left(problems: Problems, paths: list[str]) -> BadInputError:
    text = b"".join(problems.skipped.pieces())
    first = islice(read_skipped(text, paths), BadInputError.MAX_PROBLEMS - 1)
    shown = [InputProblem(bad.path, bad.line, bad.what, "fix or remove it", bad.sequence_id or None) for bad in first]
    what = f"no record is left: all {problems.skipped.count:,} are bad"
    shown.append(InputProblem("input", None, what, "fix them, or use --allow-empty for an empty result"))
    return BadInputError(shown)


def _write(
    scanned: list[tuple[ReadableFile, ScannedFile]],
    problems: Problems,
    index_path: Path,
    rules: InputRules,
) -> None:
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
        "representatives": lambda: find_representatives(sequence_hashes(), lengths),
        "id_ends": lambda: np.cumsum(_joined(blocks, "id_bytes")),
        "sequence_hashes": sequence_hashes,
        "file_numbers": lambda: _file_numbers([found for _, found in scanned])[order],
        "low_information": lambda: _joined(blocks, "low_information")[order],
    }
    counts = sum((found.counts for _, found in scanned), Counter[str]())
    counts["low_information"] = int(_joined(blocks, "low_information").sum())
    description = {
        "files": [asdict(_indexed(file, found)) for file, found in scanned],
        "counts": {**{name: counts[name] for name in (*COUNTED, *OF_FILES)}, "skipped": problems.skipped.count},
        "rules": asdict(rules),
    }
    ids = (rows.ids for rows in blocks)
    write_index(index_path, len(lengths), columns, ids, problems.skipped.pieces(), description)


def longest_first(residues: IntArray) -> IntArray:
    """Return the rows by residues, longest first, ties in their order: one sort of keys that hold both numbers."""
    if not len(residues):
        return residues
    row_bits = len(residues).bit_length()
    assert int(residues.max()).bit_length() + row_bits < 64
    keys: IntArray = residues.max() - residues
    keys <<= row_bits
    keys |= np.arange(len(residues))
    keys.sort()
    keys &= (1 << row_bits) - 1
    return keys


def find_representatives(sequence_hashes: ByteArray, lengths: IntArray) -> IntArray:
    """Return for each position the first one with the same hash, uint8 (n, 16), and length: int64 (n,)."""
    if not len(lengths):
        return np.empty(0, dtype=np.int64)
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


def _indexed(file: ReadableFile, found: ScannedFile) -> IndexedFile:
    return IndexedFile(
        path=file.path,
        real_path=file.real_path,
        size_bytes=found.size_bytes if file.given_bytes is None else file.given_bytes,
        sha256=found.sha256 if file.given_sha256 is None else file.given_sha256,
        read_path=file.read_path,
        read_size_bytes=found.size_bytes,
        read_sha256=found.sha256,
        num_records=found.num_records,
    )


def drop_duplicates(scanned: Sequence[tuple[ReadableFile, ScannedFile]], problems: Problems) -> None:
    """Report every record that repeats an earlier id, with both lines, and remove it from *scanned*."""
    found = [one for _, one in scanned]
    blocks = [rows for one in found for rows in one.rows]
    pairs_P2 = _duplicate_rows(blocks)
    if not len(pairs_P2):
        return
    numbers, offsets = _file_numbers(found), _joined(blocks, "offsets")
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
            fault = Fault(
                file.place(line), what, _NAME_MATES if file.is_fastq else "give every record an id of its own"
            )
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
    hashes = _joined(blocks, "id_hashes")
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


def _joined(blocks: list[Rows], name: str) -> Any:
    return np.concatenate([getattr(rows, name) for rows in blocks]) if blocks else np.empty(0, dtype=np.int64)


def _file_numbers(scanned: Sequence[ScannedFile]) -> Any:
    return np.repeat(np.arange(len(scanned), dtype=np.uint32), [found.num_records for found in scanned])
