"""
Annotated proteins of genomes: the translations of CDS features in GenBank flat files, or FASTA of CDS translations.

A flat file's translations belong to its record's VERSION (or, without one, to its ACCESSION or LOCUS). In FASTA, a
protein belongs to the record whose accession is between ``lcl|`` and ``_prot_`` in its id, as NCBI writes it, or before
the last ``_``, as gene callers write it. Everything else in these files is ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from virnucpro.errors import BadInputError, InputProblem
from virnucpro.training.genomes.records import read_records, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_NCBI_ID = re.compile(r"(?:lcl\|)?(?P<record>\S+?)_prot_\S+")
_FEATURE = re.compile(r" {5}(?P<key>\S+) ")
_TRANSLATION = re.compile(r' {21}/translation="(?P<residues>[^"]*)(?P<end>"?)')
_REMEDY = "give GenBank flat files with /translation, or FASTA of proteins named RECORD_prot_... or RECORD_number"
BETWEEN = "*"
"""Separates two proteins of a record: no open frame has it."""


class Annotations:
    def __init__(self, proteins_of: dict[str, str]) -> None:
        self._proteins_of = proteins_of

    def is_part(self, accession: str, protein: str) -> bool:
        """
        Whether *protein* is part of one of the record's proteins; True for a record without annotation.

        A record that is a range of a sequence has the sequence's proteins.
        """
        known = self._proteins_of.get(accession) or self._proteins_of.get(accession.partition(":")[0])
        return known is None or protein in known


def read_annotations(paths: Sequence[Path]) -> Annotations:
    """Read GenBank flat files or FASTA, plain or gzip."""
    proteins_of: dict[str, list[str]] = {}
    for path in paths:
        try:
            text = read_text(path)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or "not text, plain or gzip"
            raise BadInputError([InputProblem(str(path), None, what, _REMEDY)]) from error
        found = list(_of_fasta(path) if text.startswith(">") else _of_flat_file(text))
        for accession, protein in found:
            proteins_of.setdefault(accession, []).append(protein)
        if not found:
            raise BadInputError([InputProblem(str(path), None, "it has no translation of a record's CDS", _REMEDY)])
    return Annotations({name: BETWEEN.join(proteins) for name, proteins in proteins_of.items()})


def _of_fasta(path: Path) -> Iterator[tuple[str, str]]:
    for record in read_records(path):
        ncbi = _NCBI_ID.fullmatch(record.accession)
        accession = ncbi["record"] if ncbi else record.accession.rpartition("_")[0]
        if accession:
            yield accession, record.letters.rstrip("*")


def _of_flat_file(text: str) -> Iterator[tuple[str, str]]:
    accession = key = ""
    residues: list[str] | None = None
    for line in text.splitlines():
        if residues is not None:
            part, end, _ = line.strip().partition('"')
            residues.append(part)
            if end:
                yield accession, "".join(residues).upper()
                residues = None
        elif line.startswith(("LOCUS", "ACCESSION", "VERSION")):
            accession = [*line.split(), accession][1]
        elif feature := _FEATURE.match(line):
            key = feature["key"]
        elif key == "CDS" and (translation := _TRANSLATION.match(line)):
            if translation["end"]:
                yield accession, translation["residues"].upper()
            else:
                residues = [translation["residues"]]
        elif line.startswith("//"):
            accession = key = ""
