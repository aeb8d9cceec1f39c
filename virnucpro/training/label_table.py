"""
``--labels TABLE``: what records or whole files are, a line each, tab-separated or CSV, with a header.

Columns: ``accession`` (of a record) or ``file`` (the name of a file, for all its records; a line for a record comes
first), ``label``, and, where wanted, ``group`` and ``genome`` (what the record is a part of: records of one genome stay
on one side of every split). Other columns are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virnucpro.errors import InputProblem
from virnucpro.training.delimited_tables import DelimitedTable, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.training.delimited_tables import Problems

_VIRAL = ("virus", "viruses", "viral", "phage", "phages")
_OTHERS = ("nonviral", "nonvirus", "host", "hosts", "cellular", "other", "others")
LABEL_WORDS = {**dict.fromkeys(_VIRAL, True), **dict.fromkeys(_OTHERS, False)}
"""What a word says: whether something is viral."""
VIRUS, NONVIRAL = "virus", "nonviral"
"""The labels as tables and cards have them."""
NAMES = {True: VIRUS, False: NONVIRAL}
"""By whether something is viral."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """What a record is."""

    is_virus: bool
    group: str
    """What kind of virus or other thing."""
    genome: str = ""
    """What other records of the same genome share; empty: what the header tells."""


@dataclass
class Labels:
    """The labels of a table."""

    path: Path
    by_accession: dict[str, tuple[Label, int]] = field(default_factory=dict)
    """Accession -> label and line."""
    by_file: dict[str, tuple[Label, int]] = field(default_factory=dict)
    """Name of a file -> label and line."""
    used: set[int] = field(default_factory=set)
    """Lines that some record was found for."""

    def of(self, accession: str, file: Path) -> Label | None:
        """Return the label of a record; None where no line is of it."""
        found = self.by_accession.get(accession) or self.by_file.get(file.name) or self.by_file.get(str(file))
        if found is None:
            return None
        self.used.add(found[1])
        return found[0]

    def unused(self) -> list[InputProblem]:
        """Return the lines that no record was found for."""
        lines = [(name, line) for names in (self.by_accession, self.by_file) for name, (_, line) in names.items()]
        return [
            InputProblem(str(self.path), line, "no record of the input is this one's", "mend or remove the line", name)
            for name, line in sorted(lines, key=lambda item: item[1])
            if line not in self.used
        ]


def read_labels(path: Path) -> Labels:
    """
    Read a table of labels, tab-separated or CSV, plain or gzip.

    Raises:
        BadInputError: It cannot be read, lacks a column, or a line of it says nothing, or the contrary of another.
    """
    table = DelimitedTable(path)
    table.column("label")
    places = {name: table.find(name) for name in ("accession", "file", "label", "group", "genome")}
    if places["accession"] is None and places["file"] is None:
        table.problems.refuse(1, "neither a column accession nor a column file", "add one: what a line is of")
    labels = Labels(path)
    for row in table.rows(*places.values()):
        cells = {name: "" if place is None else row.cells[place] for name, place in places.items()}
        _add(labels, cells, row.line, table.problems)
    table.problems.raise_if_any()
    return labels


def _add(labels: Labels, row: dict[str, str], line: int, problems: Problems) -> None:
    """Add a line of the table, or note what is wrong with it."""
    word, accession, file = row["label"].lower(), row["accession"], row["file"]
    if word not in LABEL_WORDS:
        problems.add(line, f"the label {shown(word)!r} is none", f"write {_listed(_VIRAL)}, or {_listed(_OTHERS)}")
        return
    if not accession and not file:
        problems.add(line, "neither accession nor file is given", "write one")
        return
    is_virus = LABEL_WORDS[word]
    label = Label(is_virus=is_virus, group=row["group"] or (VIRUS if is_virus else NONVIRAL), genome=row["genome"])
    names, name = (labels.by_accession, accession) if accession else (labels.by_file, file)
    before = names.setdefault(name, (label, line))
    if before[0] != label:
        problems.add(line, f"{name} stands in line {before[1]} already, and differs", "remove one of them")


def _listed(words: Sequence[str]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1]))
