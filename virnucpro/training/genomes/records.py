"""
FASTA read whole into memory, and the genome and organism that a header names, so that a split keeps them together.

For a few ten thousand curated sequences, with few checks; the strict reader of user input is ``virnucpro.data.fasta``.
In INSDC and RefSeq, the accession is followed by an organism's name, the strain, and the part of the genome. The strain
is dropped, since strains of one species are not independent genomes. An organism with two names counts as two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virnucpro.data.reading.text_files import open_text
from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ASSEMBLIES = ("GCF_", "GCA_")
_BEFORE_NAME = re.compile(
    r"(?:TPA\w*|MAG|UNVERIFIED):|\|?(?:gi\|\S*|GC[AF]_\d+(?:\.\d+)?|[A-Z]{1,6}_?[A-Z]{0,6}\d{4,}(?:\.\d+)?)"
)
_END_OF_NAME = re.compile(
    r"[,;|(\[<]|\b(?:(?:sub)?str(?:ain|\.)|isolate|clone|subsp\.|subspecies|serovar|biovar|bv\.|pv\.|subtype|genotype"
    r"|subgroup|lineage|segment|scaffold|contig|ctg|scf|supercont|NODE_|chromosome|plasmid|mitochondri|chloroplast"
    r"|plastid|complete|partial|genom|whole|DNA\b|[a-z]?RNA\b|gene\b)",
    re.IGNORECASE,
)
_VIRUS = re.compile(r"(?P<name>.+ \S*virus\S*(?: type)?(?: (?:\d+\w?|[A-Z]))?)(?: |$)", re.IGNORECASE)
_FIRST_WORD = re.compile(r"[A-Z][A-Za-z'-]*")
_UNNAMED_SPECIES = ("sp.", "spp.", "cf.", "bacterium", "archaeon")


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


@dataclass(frozen=True)
class Genome:
    """A record of a training file: a genome, or a window of one."""

    accession: str
    """First word of the header."""
    source: str
    """The genome: the assembly, or the accession without its range."""
    letters: str
    file: str
    organism: str = ""
    """From the header, without strain; empty: none."""


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


def read_genomes(paths: Sequence[Path]) -> list[Genome]:
    return [
        Genome(record.accession, source_of(record), record.letters, path.name, organism_of(record.description))
        for path in paths
        for record in read_records(path)
    ]


def read_text(path: Path) -> str:
    """Return the text of an ASCII file, plain or compressed; BadInputError, and UnicodeDecodeError if it is none."""
    with open_text(path, is_held=True) as file:
        return file.read().decode("ascii")


def source_of(record: Record) -> str:
    """Return the genome that a header names: the assembly after the id, or the id without a range."""
    assembly = record.description.partition(" ")[0]
    return assembly if assembly.startswith(_ASSEMBLIES) else record.accession.partition(":")[0]


def organism_of(description: str) -> str:
    """
    Return the organism in a header (the text after the id), without its strain; empty if there is none.

    The name ends before a word for a strain or part (``strain``, ``segment``, ``scaffold``, ``chromosome``,
    ``complete``, ...) and before punctuation. A virus keeps the name up to ``virus`` and a number or letter after it, a
    phage everything, and everything else genus and species; a species without a name (``sp.``) keeps its strain.
    ``Influenza A virus (A/Puerto Rico/8/1934(H1N1)) segment 5`` is ``Influenza A virus``.
    """
    words = description.split()
    while words and _BEFORE_NAME.fullmatch(words[0]):
        words.pop(0)
    name = _END_OF_NAME.split(" ".join(words).removeprefix("|"), maxsplit=1)[0].split()
    if len(name) <= 1 or not _FIRST_WORD.fullmatch(name[0]):
        return ""
    whole = " ".join(name)
    if found := _VIRUS.match(whole):
        return found["name"]
    if any(word in whole.lower() for word in ("phage", "virus", "satellite")):
        return whole
    is_candidate = name[0] == "Candidatus"
    genus, species = name[: 1 + is_candidate], name[1 + is_candidate : 2 + is_candidate]
    if species and species[0] in _UNNAMED_SPECIES:
        return whole
    return " ".join([*genus, *species]) if species and re.fullmatch(r"[a-z][a-z-]+", species[0]) else ""
