"""The records of ``viral.fasta`` that a report holds, and the likely genes of their contigs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.errors import ResultError
from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import encode
from virnucpro.run_folders import only_regular

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

_END_OF_NAME = re.compile(r"[ \t\n]")


class Gene(NamedTuple):
    start: int
    """0-based nt; *end* is exclusive."""
    end: int
    is_reverse: bool
    residues: int
    is_whole: bool
    """Whether it begins with a start codon and ends with a stop."""

    def said(self) -> str:
        strand = "reverse" if self.is_reverse else "forward"
        whole = "" if self.is_whole else ", incomplete"
        return f"gene {self.start + 1:,}\u2013{self.end:,}, {strand} strand, {self.residues:,} residues{whole}"


def find_genes(record: str) -> list[Gene]:
    """Return the genes of a FASTA record that models of composition see, in the order of the contig."""
    sequence = record.partition("\n")[2].replace("\n", "")
    genes = Genes.of(Fragments([encode(sequence.encode())]))
    is_whole_N = (genes.start_codons_N >= 0) & genes.has_stop_N
    columns = (genes.starts_N, genes.ends_N, genes.is_reverse_N, genes.lengths_N, is_whole_N)
    return sorted(Gene(*values) for values in zip(*(column.tolist() for column in columns), strict=True))


def read_records(path: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return the *wanted* records, by the contig's name; one that is not there is left out."""
    try:
        # a header may hold any bytes
        with open(path, encoding="utf-8", errors="replace", newline="\n", opener=only_regular) as file:
            return {name: record for name, record in _records(file, wanted) if name in wanted} if wanted else {}
    except FileNotFoundError:
        return {}  # the user has removed it
    except OSError as error:
        raise ResultError(path, f"cannot be read ({error.strerror or error})") from error


def _records(lines: Iterator[str], wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    name, record = "", list[str]()
    for line in lines:
        if line.startswith(">"):
            yield name, "".join(record)
            name, record = _END_OF_NAME.split(line[1:], maxsplit=1)[0], []
        if name in wanted:
            record.append(line)
    yield name, "".join(record)
