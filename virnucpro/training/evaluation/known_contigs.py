"""
The truth that scores are measured against: contigs with their labels, read from a table.

The table has the columns ``contig`` and ``label``, and may have ``group`` and ``length`` (nucleotides); others are
ignored. Legend: C contigs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.training.genomes.delimited_tables import DelimitedTable, shown, whole_number
from virnucpro.training.genomes.label_table import LABEL_WORDS

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.training.evaluation.metrics import BoolArray, IntArray
    from virnucpro.training.genomes.delimited_tables import Problems, Row

LABELS = LABEL_WORDS | {"1": True, "0": False, "non-viral": False, "not virus": False}
"""Lower-case label -> whether a contig is viral."""
_WRITE_LENGTH = "write a whole number, or leave it empty"
UNKNOWN_NT = 0
"""Length of a contig whose length is not known."""


@dataclass(frozen=True, kw_only=True)
class KnownContigs:
    """Contigs and their labels."""

    contigs: list[str]
    """Ids, each once."""
    is_virus_C: BoolArray
    groups: list[str]
    """Empty: not known."""
    lengths_nt_C: IntArray
    """int64 (C,): nucleotides, or ``UNKNOWN_NT``."""

    def __len__(self) -> int:
        return len(self.contigs)

    def take(self, numbers: IntArray) -> KnownContigs:
        """Return the contigs at these positions, in that order."""
        chosen = numbers.tolist()
        return KnownContigs(
            contigs=[self.contigs[number] for number in chosen],
            is_virus_C=self.is_virus_C[numbers],
            groups=[self.groups[number] for number in chosen],
            lengths_nt_C=self.lengths_nt_C[numbers],
        )


def read_truth(path: Path) -> KnownContigs:
    """Read a table, tab-separated or CSV, plain or gzip."""
    table = DelimitedTable(path)
    problems = table.problems
    places = (table.column("contig"), table.column("label"), table.find("group"), table.find("length"))
    lines: dict[str, int] = {}
    labels, groups, lengths = [], [], []
    for row in table.rows(*places):
        contig, label, group, length = ("" if place is None else row.cells[place] for place in places)
        if is_new_id(contig, row, lines, problems):
            labels.append(_is_viral(label, row.line, problems))
            groups.append(group)
            lengths.append(_length_nt(length, row.line, problems))
    problems.raise_if_any()
    if not lines:
        problems.refuse(None, "no contig after its header", "give it a line a contig")
    return KnownContigs(
        contigs=list(lines),
        is_virus_C=np.array(labels, dtype=bool),
        groups=groups,
        lengths_nt_C=np.array(lengths, dtype=np.int64),
    )


def is_new_id(contig: str, row: Row, lines: dict[str, int], problems: Problems) -> bool:
    """Record an id's line; report a missing or repeated id."""
    if not contig:
        problems.add(row.line, "no id", "give every contig its id")
        return False
    if contig in lines:
        what = f"duplicate id, first at {problems.path}:{lines[contig]}"
        problems.add(row.line, what, "keep one line a contig", sequence_id=contig)
        return False
    lines[contig] = row.line
    return True


def _is_viral(label: str, line: int, problems: Problems) -> bool:
    is_viral = LABELS.get(label.lower())
    if is_viral is None:
        what = f"label {shown(label)!r} is not known" if label else "no label"
        problems.add(line, what, f"write one of {', '.join(LABELS)}")
    return bool(is_viral)


def _length_nt(text: str, line: int, problems: Problems) -> int:
    if not text:
        return UNKNOWN_NT
    length_nt = whole_number(text)
    if not length_nt:
        problems.add(line, f"length {shown(text)!r} is not a number of nucleotides", _WRITE_LENGTH)
        return UNKNOWN_NT
    return length_nt
