"""
Proteins or genomes to train on, read whole into memory: ids, descriptions and letters.

Made for a few ten thousand curated sequences; it checks no more than what would make training meaningless. The strict
reader of user input is ``virnucpro.data.fasta``.
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
    """One record of the training file."""

    accession: str
    """First word of the header, such as ``sp|P0A6F5|CH60_ECOLI``."""
    description: str
    """The rest of the header."""
    letters: str
    """Residues or nucleotides, upper-case one-letter codes."""


def read_records(path: Path) -> list[Record]:
    """
    Read every record of a FASTA file, gzip-compressed or not.

    Args:
        path: The file.

    Returns:
        The records in file order.

    Raises:
        BadInputError: The file does not start with a header, or a record is empty.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode("ascii")
    if not text.startswith(">"):
        problem = InputProblem(str(path), 1, "no header", "give a FASTA file")
        raise BadInputError([problem])
    records = []
    for record in text[1:].split("\n>"):
        header, _, body = record.partition("\n")
        accession, _, description = header.strip().partition(" ")
        letters = "".join(body.split()).upper()
        if not letters:
            problem = InputProblem(str(path), None, "a record without a sequence", "remove it", accession)
            raise BadInputError([problem])
        records.append(Record(accession, description.strip(), letters))
    return records


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of the file at *path*."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
