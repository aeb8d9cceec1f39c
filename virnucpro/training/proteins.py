"""
Proteins to train on, read whole into memory: ids, descriptions and residues.

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
class Protein:
    """One record of the training file."""

    accession: str
    """First word of the header, such as ``sp|P0A6F5|CH60_ECOLI``."""
    description: str
    """The rest of the header."""
    residues: str
    """Upper-case one-letter codes."""


def read_proteins(path: Path) -> list[Protein]:
    """
    Read every record of a FASTA file, gzip-compressed or not.

    Args:
        path: The file.

    Returns:
        The proteins in file order.

    Raises:
        BadInputError: The file does not start with a header, or a record is empty.
    """
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode("ascii")
    if not text.startswith(">"):
        problem = InputProblem(str(path), 1, "no header", "give a FASTA file of proteins")
        raise BadInputError([problem])
    proteins = []
    for record in text[1:].split("\n>"):
        header, _, body = record.partition("\n")
        accession, _, description = header.strip().partition(" ")
        residues = "".join(body.split()).upper()
        if not residues:
            problem = InputProblem(str(path), None, "a record without residues", "remove it", accession)
            raise BadInputError([problem])
        proteins.append(Protein(accession, description.strip(), residues))
    return proteins


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of the file at *path*."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
