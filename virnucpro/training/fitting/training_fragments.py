"""
Contigs to train on: fragments cut at random positions of genomes, as an assembly would leave them.

Half of the fragments are viral. A label's fragments come from its groups by weight, a group's from its genomes by the
root of their size, a genome's from its records by size. Lengths are drawn from a few; a shorter record is one whole
fragment. Either strand. A fragment with too many ambiguous letters is dropped and another one drawn.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable, run_folders
from virnucpro.training.genomes.labelled_genomes import NAMES, VIRUS
from virnucpro.training.genomes.records import read_records
from virnucpro.training.genomes.related import reverse_complement
from virnucpro.training.training_settings import SHORTEST_NT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.training.genomes.labelled_genomes import LabelledGenome

MOST_AMBIGUOUS = 0.02
"""Largest share of a fragment's letters other than A, C, G and T."""
_DRAWS_PER_FRAGMENT = 50
"""Attempts per fragment after which a label's genomes count as used up."""
MOST_ERRORS = (0.05, 0.015, 0.01)
"""Substitutions, insertions and deletions, and unknown letters of a nucleotide, at most."""
COLUMNS = ("fragment", "part", "label", "group", "genome", "accession", "start", "end", "strand")


@dataclass(frozen=True, kw_only=True)
class FragmentRules:
    """How fragments are drawn."""

    lengths_nt: Mapping[int, float]
    """Nucleotides -> relative frequency."""
    group_weights: Mapping[str, float]
    """Group -> relative share of its label's fragments; by default the root of its nucleotides."""
    most_coverage: float
    """A genome's letters are used at most so many times."""
    error_share: float = 0.0
    """Of fragments, those that get errors of sequencing."""


@dataclass(frozen=True, kw_only=True)
class TrainingFragment:
    """A contig to train or measure on."""

    name: str
    part: str
    """train, validation or test."""
    is_virus: bool
    group: str
    source: str
    accession: str
    start: int
    """0-based, in the record."""
    end: int
    strand: str
    letters: str

    def line(self) -> str:
        about = (self.name, self.part, NAMES[self.is_virus], self.group, self.source, self.accession)
        return "\t".join(map(str, (*about, self.start, self.end, self.strand))) + "\n"


def cut_training_fragments(
    genomes: Sequence[LabelledGenome], count: int, rules: FragmentRules, *, part: str, seed: int
) -> list[TrainingFragment]:
    """
    Cut fragments of one part's genomes: as many viral fragments as others, in a random order.

    *count* is for both labels; fewer come out where ``most_coverage`` is reached.
    """
    random = np.random.default_rng([seed, *part.encode()])
    both = [
        _fragments_of([g for g in genomes if g.is_virus is label], count // 2, rules, random) for label in (True, False)
    ]
    as_many = min(map(len, both))
    drawn = [fragment for fragments in both for fragment in fragments[:as_many]]
    order = random.permutation(len(drawn)).tolist()
    fragments = [replace(drawn[at], name=f"{part}_{number:06d}", part=part) for number, at in enumerate(order, start=1)]
    return [
        replace(one, letters=with_errors(one.letters, random)) if random.random() < rules.error_share else one
        for one in fragments
    ]


def with_errors(letters: str, random: np.random.Generator) -> str:
    """Return the letters with errors of sequencing: substitutions, insertions and deletions, unknown ones, or all."""
    kind = int(random.integers(len(MOST_ERRORS) + 1))
    rates = [most * random.random() * (kind in {place, len(MOST_ERRORS)}) for place, most in enumerate(MOST_ERRORS)]
    codes = np.frombuffer(letters.encode(), dtype=np.uint8).copy()
    substituted, shifted, unknown = (np.flatnonzero(random.random(len(codes)) < rate) for rate in rates)
    bases = np.frombuffer(b"ACGT", dtype=np.uint8)
    codes[substituted] = bases[random.integers(4, size=len(substituted))]
    codes[unknown] = ord("N")
    is_deleted = random.random(len(shifted)) < 0.5
    inserted = shifted[~is_deleted]
    kept = np.ones(len(codes), dtype=np.bool_)
    kept[shifted[is_deleted]] = False
    new = bases[random.integers(4, size=len(inserted))]
    return np.insert(codes, inserted, new)[np.insert(kept, inserted, True)].tobytes().decode()


def group_weights(genomes: Sequence[LabelledGenome], rules: FragmentRules) -> dict[str, float]:
    """Return each group's share of one label's fragments."""
    num_nt: Counter[str] = Counter()
    for genome in genomes:
        num_nt[genome.group] += len(genome.letters)
    weights = {group: rules.group_weights.get(group, num_nt[group] ** 0.5) for group in sorted(num_nt)}
    total = sum(weights.values())
    return {group: weight / total for group, weight in weights.items()} if total else {}


class _Group:
    """The genomes of a group, and how many more nucleotides may be cut from each."""

    def __init__(self, genomes: Sequence[LabelledGenome], rules: FragmentRules) -> None:
        self.records: dict[str, list[LabelledGenome]] = {}
        for genome in genomes:
            if len(genome.letters) >= SHORTEST_NT:
                self.records.setdefault(genome.source, []).append(genome)
        sizes = {name: sum(len(record.letters) for record in records) for name, records in self.records.items()}
        self.names = sorted(sizes)
        self._room_nt = {name: rules.most_coverage * sizes[name] for name in self.names}
        self._weights = np.array([sizes[name] ** 0.5 for name in self.names])

    @property
    def is_used_up(self) -> bool:
        return not self._weights.any()

    def draw(self, length_nt: int, random: np.random.Generator) -> tuple[LabelledGenome, int, int]:
        """Return a record, and start and end of a fragment of it."""
        at = int(random.choice(len(self.names), p=self._weights / self._weights.sum()))
        records = self.records[self.names[at]]
        lengths = np.array([len(record.letters) for record in records])
        record = records[int(random.choice(len(records), p=lengths / lengths.sum()))]
        length_nt = min(length_nt, len(record.letters))
        start = int(random.integers(len(record.letters) - length_nt + 1))
        return record, start, start + length_nt

    def use(self, source: str, length_nt: int) -> None:
        self._room_nt[source] -= length_nt
        if self._room_nt[source] <= 0:
            self._weights[self.names.index(source)] = 0


def _fragments_of(
    genomes: Sequence[LabelledGenome], count: int, rules: FragmentRules, random: np.random.Generator
) -> list[TrainingFragment]:
    """Cut the fragments of one label, in a random order of groups."""
    shares = group_weights(genomes, rules)
    groups = {group: _Group([g for g in genomes if g.group == group], rules) for group in shares}
    lengths = sorted(rules.lengths_nt)
    length_shares = np.array([rules.lengths_nt[length] for length in lengths])
    length_shares /= length_shares.sum()
    fragments: list[TrainingFragment] = []
    for _ in range(_DRAWS_PER_FRAGMENT * count):
        left = [group for group in shares if shares[group] and not groups[group].is_used_up]
        if len(fragments) == count or not left:
            break
        weights = np.array([shares[group] for group in left])
        group = left[int(random.choice(len(left), p=weights / weights.sum()))]
        length_nt = lengths[int(random.choice(len(lengths), p=length_shares))]
        record, start, end = groups[group].draw(length_nt, random)
        letters = record.letters[start:end]
        is_reverse = bool(random.integers(2))
        if len(letters) - sum(map(letters.count, "ACGT")) <= MOST_AMBIGUOUS * len(letters):
            groups[group].use(record.source, end - start)
            fragments.append(
                TrainingFragment(
                    name="",
                    part="",
                    is_virus=record.is_virus,
                    group=group,
                    source=record.source,
                    accession=record.accession,
                    start=start,
                    end=end,
                    strand="-" if is_reverse else "+",
                    letters=reverse_complement(letters) if is_reverse else letters,
                )
            )
    return fragments


def write_training_fragments(fragments: Sequence[TrainingFragment], fasta: Path, table: Path) -> None:
    """Write fragments as FASTA, and their origin as a table."""
    with durable.replacing(fasta) as file:
        file.write("".join(f">{fragment.name}\n{fragment.letters}\n" for fragment in fragments).encode())
    with durable.replacing(table) as file:
        file.write(("\t".join(COLUMNS) + "\n" + "".join(fragment.line() for fragment in fragments)).encode())


def read_training_fragments(fasta: Path, table: Path) -> list[TrainingFragment]:
    """Read what ``write_training_fragments`` wrote."""
    fragments: list[TrainingFragment] = []
    if not fasta.stat().st_size:  # of no fragments
        return fragments
    with open(table, encoding="utf-8", newline="", opener=run_folders.only_regular) as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        for row, record in zip(rows, read_records(fasta), strict=True):
            assert row["fragment"] == record.accession
            fragment = TrainingFragment(
                name=row["fragment"],
                part=row["part"],
                is_virus=row["label"] == VIRUS,
                group=row["group"],
                source=row["genome"],
                accession=row["accession"],
                start=int(row["start"]),
                end=int(row["end"]),
                strand=row["strand"],
                letters=record.letters,
            )
            fragments.append(fragment)
    return fragments
