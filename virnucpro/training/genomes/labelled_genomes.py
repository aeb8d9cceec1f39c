"""
Genomes with labels: read from FASTA files, labelled by the names of the files or by a table.

By name: one of the words of a file's name (between ``_``, ``-`` and ``.``) is its label, and the words after it are its
group: ``train_nonviral_bacteria.fna.gz`` holds bacteria, which are not viral. By table (``--genomes TABLE``), a line
each, tab-separated or CSV: ``id`` (or ``accession``) of a record, or ``file`` for all records of a file (a record's own
line wins); ``label``; and optionally ``group`` and ``genome`` (records of one genome stay in one part of every split).
Records without a line are labelled by name. Records with the same id and letters are kept once; those with other
letters get a number after their id, and stay in one part with the first one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from virnucpro.data.fasta import DNA_LETTERS
from virnucpro.data.index.build import check_readable
from virnucpro.data.reading.problems import Problems
from virnucpro.errors import BadInputError, InputProblem, printable
from virnucpro.training.genomes.delimited_tables import DelimitedTable, shown
from virnucpro.training.genomes.records import Genome, organism_of, read_records, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.training.genomes.delimited_tables import TableProblems
    from virnucpro.training.genomes.records import Record

_VIRAL = ("virus", "viruses", "viral", "phage", "phages")
_OTHERS = ("nonviral", "nonvirus", "host", "hosts", "cellular", "other", "others")
LABEL_WORDS = {**dict.fromkeys(_VIRAL, True), **dict.fromkeys(_OTHERS, False)}
"""Label in a table or file name -> whether it is viral."""
VIRUS, NONVIRAL = "virus", "nonviral"
"""The labels as tables and cards have them."""
NAMES = {True: VIRUS, False: NONVIRAL}
"""By whether something is viral."""
SUFFIXES = (".fa", ".fas", ".fasta", ".fna", ".ffn", ".fsa")
"""Suffixes of FASTA files in a folder; each may be followed by .gz."""
_TITLE_CHARACTERS = 60
_SUFFIX = re.compile(rf"({'|'.join(map(re.escape, SUFFIXES))})?(\.gz)?$", re.IGNORECASE)
_OTHER_LETTER = re.compile(f"[^{DNA_LETTERS.decode()}]")
NAME_RULE = (
    "a name contains virus, viral or phage, or nonviral, nonvirus, host, cellular or others, as separate words "
    "(train_virus_phages.fna, nonviral-bacteria.fa.gz); otherwise give --genomes TABLE"
)


@dataclass(frozen=True, kw_only=True)
class Label:
    is_virus: bool
    group: str
    genome: str = ""
    """Empty: taken from the header."""


@dataclass
class Labels:
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


@dataclass(frozen=True, kw_only=True)
class LabelledGenome(Genome):
    """A record to train on, with its label; *organism* is empty, too, where the table names the genome."""

    group: str
    is_virus: bool
    title: str = ""
    """For readers: the organism, or else how its header begins."""


@dataclass(frozen=True)
class LabelledInput:
    """All records, and notes for the user on how they were read."""

    genomes: list[LabelledGenome]
    notes: list[str]


def files_of(inputs: Sequence[Path]) -> list[Path]:
    """Return the files of the input: a folder stands for its FASTA files, sorted by name."""
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            named = (one for one in path.iterdir() if one.name.lower().removesuffix(".gz").endswith(SUFFIXES))
            inside = sorted(one for one in named if one.is_file())
            if not inside:
                what = f"a folder without FASTA files ({', '.join(SUFFIXES)}, plain or .gz)"
                raise BadInputError([InputProblem(str(path), None, what, "give another, or the files themselves")])
            files += inside
        else:
            files.append(path)
    twice = [name for name, count in Counter(path.resolve() for path in files).items() if count > 1]
    if twice:
        raise BadInputError([InputProblem(str(twice[0]), None, "the file is given twice", "give it once")])
    return files


def check_files(inputs: Sequence[Path], *others: Path | None) -> None:
    """Raise unless every file of a training can be opened, long before it is read."""
    check_readable([*files_of(inputs), *(path for path in others if path is not None)])


def read_labelled(files: Sequence[Path], table: Path | None = None) -> LabelledInput:
    """Read every record with its label, from *table* or, if it has no line there, from its file's name."""
    labels = None if table is None else read_labels(table)
    genomes: list[LabelledGenome] = []
    problems = Problems()
    for path in files:
        by_name = label_of_name(path) if labels is None else _label_of_name_or_none(path)
        for record in _records(path):
            label = (labels and labels.of(record.accession, path)) or by_name
            if label is None:
                what, remedy = f"no line of {table} is for this record", "add a line with its id, or its file"
                problems.add(InputProblem(str(path), record.line, what, remedy, record.accession))
            else:
                genomes.append(_labelled(record, label, path))
    for problem in labels.unused() if labels is not None else ():
        problems.add(problem)
    problems.raise_if_any()
    _refuse_groups_of_both_labels(genomes, str(table or files[0]))
    return _each_once(genomes, str(table or files[0]))


def label_of_name(path: Path) -> Label:
    """Return the label in a file's name; raise if it has none, or both."""
    stem = _SUFFIX.sub("", path.name)
    words = re.sub(r"non[\W_]+(?=vir)", "non", stem.lower())
    parts = [word for word in re.split(r"[\W_]+", words) if word]
    labels = [(place, LABEL_WORDS[word]) for place, word in enumerate(parts) if word in LABEL_WORDS]
    if not labels or len({label for _, label in labels}) > 1:
        what = "the file's name has no label" if not labels else "the file's name has both labels"
        raise BadInputError([InputProblem(str(path), None, what, NAME_RULE)])
    place, is_virus = labels[0]
    group = "_".join(parts[place + 1 :]) or "_".join(parts)
    return Label(is_virus=is_virus, group=group)


def _label_of_name_or_none(path: Path) -> Label | None:
    try:
        return label_of_name(path)
    except BadInputError:
        return None


def _records(path: Path) -> list[Record]:
    try:
        records = read_records(path)
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "not a FASTA file of ASCII text"
        raise BadInputError([InputProblem(str(path), None, what, "give files of genomes")]) from error
    problems = Problems()
    for record in records:
        odd = _OTHER_LETTER.search(record.letters)
        if not record.accession or odd is not None:
            what = f"the letter {odd[0]!r} is not a DNA letter" if odd is not None else "a header without an accession"
            problems.add(InputProblem(str(path), record.line, what, "fix the record", record.accession or None))
    problems.raise_if_any()
    return records


def _labelled(record: Record, label: Label, path: Path) -> LabelledGenome:
    organism = organism_of(record.description)
    return LabelledGenome(
        accession=record.accession,
        source=label.genome or source_of(record),
        letters=record.letters,
        file=str(path),
        group=label.group,
        is_virus=label.is_virus,
        organism="" if label.genome else organism,
        title=organism or printable(record.description[:_TITLE_CHARACTERS]),
    )


def _refuse_groups_of_both_labels(genomes: Sequence[LabelledGenome], where: str) -> None:
    labels: dict[str, bool] = {}
    for genome in genomes:
        if labels.setdefault(genome.group, genome.is_virus) != genome.is_virus:
            what = f"the group {genome.group} holds viral genomes and others"
            remedy = "give the two kinds groups of different names"
            raise BadInputError([InputProblem(where, None, what, remedy, genome.accession)])


def _each_once(genomes: Sequence[LabelledGenome], where: str) -> LabelledInput:
    """Keep records of one id and the same letters once; number those of other letters."""
    kept: dict[str, LabelledGenome] = {}
    copies, renamed = 0, []
    for genome in genomes:
        name, number = genome.accession, 1
        while name in kept and kept[name].letters != genome.letters:
            number += 1
            name = f"{genome.accession}#{number}"
        first = kept.get(genome.accession, genome)
        if first.is_virus != genome.is_virus:
            what = "records of this accession have both labels"
            raise BadInputError([InputProblem(where, None, what, "label them alike, or rename one", genome.accession)])
        if name in kept:
            copies += 1
        else:
            kept[name] = replace(genome, accession=name, source=first.source)
            renamed += [name] * (number > 1)
    notes = [f"identical records, used once: {copies:,}"] * bool(copies)
    if renamed:
        names = ", ".join(renamed[:5]) + (", ..." if len(renamed) > 5 else "")
        notes.append(f"records that share an accession but differ, renamed with a number: {names}")
    return LabelledInput(list(kept.values()), notes)


def read_labels(path: Path) -> Labels:
    """Read a table of labels, tab-separated or CSV, plain or gzip."""
    table = DelimitedTable(path)
    table.column("label")
    places = {name: table.find(name) for name in ("file", "label", "group", "genome")}
    places["accession"] = table.find("id", "accession")
    if places["accession"] is None and places["file"] is None:
        table.problems.refuse(1, "neither a column id nor a column file", "add one of them")
    labels = Labels(path)
    for row in table.rows(*places.values()):
        cells = {name: "" if place is None else row.cells[place] for name, place in places.items()}
        _add(labels, cells, row.line, table.problems)
    table.problems.raise_if_any()
    return labels


def _add(labels: Labels, row: dict[str, str], line: int, problems: TableProblems) -> None:
    word, accession, file = row["label"].lower(), row["accession"], row["file"]
    if word not in LABEL_WORDS:
        problems.note(
            line, f"the label {shown(word)!r} is not known", f"write {_listed(_VIRAL)}, or {_listed(_OTHERS)}"
        )
        return
    if not accession and not file:
        problems.note(line, "neither accession nor file is given", "write one")
        return
    is_virus = LABEL_WORDS[word]
    label = Label(is_virus=is_virus, group=row["group"] or (VIRUS if is_virus else NONVIRAL), genome=row["genome"])
    names, name = (labels.by_accession, accession) if accession else (labels.by_file, file)
    before = names.setdefault(name, (label, line))
    if before[0] != label:
        problems.note(line, f"{name} has another label in line {before[1]}", "remove one of them")


def _listed(words: Sequence[str]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1]))
