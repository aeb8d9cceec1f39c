"""
``--labels TABLE``: labels of records or whole files, a line each, tab-separated or CSV, with a header.

Columns: ``accession`` of a record, or ``file`` for all records of a file (a record's own line wins); ``label``; and
optionally ``group`` and ``genome`` (records of one genome stay in one part of every split). Others are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virnucpro.errors import InputProblem
from virnucpro.training.genomes.delimited_tables import DelimitedTable, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.training.genomes.delimited_tables import Problems

_VIRAL = ("virus", "viruses", "viral", "phage", "phages")
_OTHERS = ("nonviral", "nonvirus", "host", "hosts", "cellular", "other", "others")
LABEL_WORDS = {**dict.fromkeys(_VIRAL, True), **dict.fromkeys(_OTHERS, False)}
"""Label in a table or file name -> whether it is viral."""
VIRUS, NONVIRAL = "virus", "nonviral"
"""The labels as tables and cards have them."""
NAMES = {True: VIRUS, False: NONVIRAL}
"""By whether something is viral."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """The label of a record."""

    is_virus: bool
    group: str
    genome: str = ""
    """Empty: taken from the header."""


@dataclass
class Labels:
    """The labels of a table."""

    path: Path
    by_accession: dict[str, tuple[Label, int]] = field(default_factory=dict)
    """Accession -> label and line."""
    by_file: dict[str, tuple[Label, int]] = field(default_factory=dict)
    """Name of a file -> label and line."""
    used: set[int] = field(default_factory=set)
    """Lines that a record has matched."""

    def of(self, accession: str, file: Path) -> Label | None:
        """Return the label of a record; None without a line for it."""
        found = self.by_accession.get(accession) or self.by_file.get(file.name) or self.by_file.get(str(file))
        if found is None:
            return None
        self.used.add(found[1])
        return found[0]

    def unused(self) -> list[InputProblem]:
        """Return a problem for each line that no record has matched."""
        lines = [(name, line) for names in (self.by_accession, self.by_file) for name, (_, line) in names.items()]
        return [
            InputProblem(str(self.path), line, "it matches no record of the input", "fix or remove the line", name)
            for name, line in sorted(lines, key=lambda item: item[1])
            if line not in self.used
        ]


def read_labels(path: Path) -> Labels:
    """Read a table of labels, tab-separated or CSV, plain or gzip."""
    table = DelimitedTable(path)
    table.column("label")
    places = {name: table.find(name) for name in ("accession", "file", "label", "group", "genome")}
    if places["accession"] is None and places["file"] is None:
        table.problems.refuse(1, "neither a column accession nor a column file", "add one of them")
    labels = Labels(path)
    for row in table.rows(*places.values()):
        cells = {name: "" if place is None else row.cells[place] for name, place in places.items()}
        _add(labels, cells, row.line, table.problems)
    table.problems.raise_if_any()
    return labels


def _add(labels: Labels, row: dict[str, str], line: int, problems: Problems) -> None:
    word, accession, file = row["label"].lower(), row["accession"], row["file"]
    if word not in LABEL_WORDS:
        problems.add(line, f"the label {shown(word)!r} is not known", f"write {_listed(_VIRAL)}, or {_listed(_OTHERS)}")
        return
    if not accession and not file:
        problems.add(line, "neither accession nor file is given", "write one")
        return
    is_virus = LABEL_WORDS[word]
    label = Label(is_virus=is_virus, group=row["group"] or (VIRUS if is_virus else NONVIRAL), genome=row["genome"])
    names, name = (labels.by_accession, accession) if accession else (labels.by_file, file)
    before = names.setdefault(name, (label, line))
    if before[0] != label:
        problems.add(line, f"{name} has another label in line {before[1]}", "remove one of them")


def _listed(words: Sequence[str]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1]))
