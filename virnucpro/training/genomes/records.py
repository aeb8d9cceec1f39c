"""
Read FASTA whole into memory: ids, descriptions and letters.

For a few ten thousand curated sequences, with few checks; the strict reader of user input is ``virnucpro.data.fasta``.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from pathlib import Path

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Record:
    """One record of a FASTA file."""

    accession: str
    """First word of the header, such as ``sp|P0A6F5|CH60_ECOLI``."""
    description: str
    """The rest of the header."""
    letters: str
    """Residues or nucleotides, upper-case one-letter codes."""
    line: int = 1
    """1-based line of its header."""


def read_records(path: Path) -> list[Record]:
    """Read every record of a FASTA file, plain or gzip, in file order."""
    text = read_text(path)
    if not text.startswith(">"):
        problem = InputProblem(str(path), 1, "no header", "give a FASTA file")
        raise BadInputError([problem])
    records = []
    line = 1
    for record in text[1:].split("\n>"):
        header, _, body = record.partition("\n")
        accession, description = [*header.split(maxsplit=1), "", ""][:2]
        letters = "".join(body.split()).upper()
        if not letters:
            problem = InputProblem(str(path), line, "a record without a sequence", "remove it", accession)
            raise BadInputError([problem])
        records.append(Record(accession, description.strip(), letters, line))
        line += record.count("\n") + 1
    return records


def read_text(path: Path) -> str:
    """Return the text of an ASCII file, plain or gzip."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode("ascii")


def file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
