"""
Builds a sequence index: scan every input, compare ids across files, sort by residues, find copies, write.

Every problem of the whole input is collected before anything is written; or, where bad records are skipped, they are
listed in the index. Memory is that of the records' columns and ids, never that of the sequences.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.config import DEFAULT_RULES
from virnucpro.data.index.duplicate_ids import drop_duplicates, file_numbers, joined
from virnucpro.data.index.file import write_index
from virnucpro.data.reading.fasta_block import HASH_BYTES
from virnucpro.data.reading.fasta_scan import COUNTED, Problems, ScannedFile, scan_fasta
from virnucpro.data.reading.input_files import ReadableFile, make_readable, open_regular
from virnucpro.data.reading.skipped_records import read_skipped
from virnucpro.errors import BadInputError, InputProblem, OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.arrays import ByteArray, IntArray
    from virnucpro.config import InputRules


@dataclass(frozen=True, kw_only=True)
class IndexedFile:
    """One input file as it was indexed."""

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
    hashing: bool = True,
) -> None:
    """
    Read and check the whole input, and write its index; arguments and errors are those of ``SequenceIndex.build``.

    Args:
        hashing: False skips every hash: for benchmarks, useless for a run.
    """
    problems = Problems(rules.on_bad_record)
    scanned: list[tuple[ReadableFile, ScannedFile]] = []
    for file_number, path in enumerate(fasta_files):
        if os.path.realpath(path) == os.path.realpath(index_path):
            raise OutputError(index_path, "it is one of the inputs")
        try:
            file = make_readable(path, unpack_dir, kind=rules.sequence_kind, max_unpacked_bytes=max_unpacked_bytes)
            with open_regular(file.read_path) as descriptor:
                found = scan_fasta(
                    descriptor,
                    file.path,
                    problems,
                    rules=rules,
                    file_number=file_number,
                    place=file.place,
                    hashing=hashing,
                )
            scanned.append((file, found))
        except BadInputError as error:
            problems.extend(error)
    if not fasta_files:
        raise BadInputError([InputProblem("input", None, "no files", "name at least one FASTA file")])
    drop_duplicates(scanned, problems)
    problems.raise_if_any()
    if problems.skipped.count and not rules.allow_empty and not any(_num_records(found) for _, found in scanned):
        raise _nothing_left(problems, [file.path for file, _ in scanned])
    _write(scanned, problems, index_path, rules, hashing=hashing)


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
    *,
    hashing: bool,
) -> None:
    blocks = [rows for _, found in scanned for rows in found.rows]
    residues = joined(blocks, "residues")
    order = longest_first(residues)
    lengths = residues[order]
    del residues

    def sequence_hashes() -> ByteArray:
        hashes: ByteArray = joined(blocks, "sequence_hashes")
        return hashes.view(f"V{HASH_BYTES}")[order].view(np.uint8).reshape(-1, HASH_BYTES)

    columns = {
        "offsets": lambda: joined(blocks, "offsets")[order],
        "record_bytes": lambda: joined(blocks, "record_bytes")[order],
        "lengths": lambda: lengths,
        "input_rows": lambda: order,
        "representatives": lambda: find_representatives(sequence_hashes(), lengths) if hashing else order,
        "id_ends": lambda: np.cumsum(joined(blocks, "id_bytes")),
        "sequence_hashes": sequence_hashes,
        "file_numbers": lambda: file_numbers([found for _, found in scanned])[order],
        "low_information": lambda: joined(blocks, "low_information")[order],
    }
    counts = sum((found.counts for _, found in scanned), Counter[str]())
    counts["low_information"] = int(joined(blocks, "low_information").sum())
    description = {
        "files": [asdict(_indexed(file, found)) for file, found in scanned],
        "counts": {**{name: counts[name] for name in COUNTED}, "skipped": problems.skipped.count},
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


def _num_records(found: ScannedFile) -> int:
    return sum(len(rows.residues) for rows in found.rows)


def _indexed(file: ReadableFile, found: ScannedFile) -> IndexedFile:
    return IndexedFile(
        path=file.path,
        real_path=file.real_path,
        size_bytes=found.size_bytes if file.given_bytes is None else file.given_bytes,
        sha256=found.sha256 if file.given_sha256 is None else file.given_sha256,
        read_path=file.read_path,
        read_size_bytes=found.size_bytes,
        read_sha256=found.sha256,
        num_records=_num_records(found),
    )
