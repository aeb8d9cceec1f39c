"""
``--labels TABLE``: what records or whole files are, a line each, tab-separated, with a header.

Columns: ``accession`` (of a record) or ``file`` (the name of a file, for all its records; a line for a record comes
first), ``label``, and, where wanted, ``group`` and ``genome`` (what the record is a part of: records of one genome stay
on one side of every split). Other columns are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virnucpro.errors import BadInputError, InputProblem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_VIRAL = ("virus", "viruses", "viral", "phage", "phages")
_OTHERS = ("nonviral", "nonvirus", "host", "hosts", "cellular", "other", "others")
LABEL_WORDS = {**dict.fromkeys(_VIRAL, True), **dict.fromkeys(_OTHERS, False)}
"""What a word says: whether something is viral."""
VIRUS, NONVIRAL = "virus", "nonviral"
"""The labels as tables and cards have them."""


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
    Read a table of labels.

    Raises:
        BadInputError: It cannot be read, lacks a column, or a line of it says nothing, or the contrary of another.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "not a table in UTF-8"
        raise BadInputError([InputProblem(str(path), None, what, "give a tab-separated table")]) from error
    columns = lines[0].rstrip("\r").split("\t") if lines else []
    if "label" not in columns or not {"accession", "file"} & set(columns):
        what = "the first line is no header with the columns label, and accession or file"
        raise BadInputError([InputProblem(str(path), 1, what, "write accession<TAB>label<TAB>group there")])
    labels, problems = Labels(path), []
    for number, line in enumerate(lines[1:], start=2):
        if line.strip():
            row = dict(zip(columns, (cell.strip() for cell in line.split("\t")), strict=False))
            fault = _add(labels, row, number)
            problems += [InputProblem(str(path), number, *fault)] if fault else []
    if problems:
        raise BadInputError(problems[: BadInputError.MAX_PROBLEMS], more=len(problems) > BadInputError.MAX_PROBLEMS)
    return labels


def _add(labels: Labels, row: dict[str, str], line: int) -> tuple[str, str] | None:
    """Add a line of the table; return what is wrong with it and what to do, or None."""
    word = row.get("label", "").lower()
    accession, file = row.get("accession", ""), row.get("file", "")
    if word not in LABEL_WORDS:
        return f"the label {word!r} is none", f"write {_listed(_VIRAL)}, or {_listed(_OTHERS)}"
    if not accession and not file:
        return "neither accession nor file is given", "write one"
    is_virus = LABEL_WORDS[word]
    group = row.get("group") or (VIRUS if is_virus else NONVIRAL)
    label = Label(is_virus=is_virus, group=group, genome=row.get("genome", ""))
    names, name = (labels.by_accession, accession) if accession else (labels.by_file, file)
    before = names.setdefault(name, (label, line))
    if before[0] != label:
        return f"{name} stands in line {before[1]} already, and differs", "remove one of them"
    return None


def _listed(words: Sequence[str]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1]))
