"""
What is computed of contigs: the face that composition, homology and genes share, and their units.

A unit is a range of contigs, by their numbers in the input. What is found of one is a sealed file, and depends on the
contigs alone. Where a contig ends the processes that compute its unit, the unit is divided, and has a file for each of
its parts. It imports little, so that a process starts soon.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from threadpoolctl import threadpool_limits

from virnucpro import durable, run_folders
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.models.contigs.protein_search import OnShare
    from virnucpro.run_layout import PredictionLayout

MOST_UNITS = 1 << 10
"""Of large inputs units are larger, for at most so many."""
UNIT_CONTIGS = 1 << 12


def units_of(work_nt: IntArray, unit_nt: int) -> list[range]:
    """
    Return the contigs of each unit.

    Args:
        work_nt: int64 (contigs,): nucleotides of each, in the order of the input.
        unit_nt: What a unit is to have of them.
    """
    ends_nt = np.cumsum(work_nt)
    unit_nt = max(unit_nt, int(ends_nt[-1]) // MOST_UNITS) if len(ends_nt) else unit_nt
    units, first = [], 0
    while first < len(ends_nt):
        before_nt = int(ends_nt[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends_nt, before_nt + unit_nt, side="right")))
        units.append(range(first, min(last, first + UNIT_CONTIGS)))
        first = units[-1].stop
    return units


def divided(contigs: range, parts: int) -> list[range]:
    """Return up to so many parts of some contigs."""
    limits = [contigs.start + len(contigs) * part // parts for part in range(parts + 1)]
    return [range(*one) for one in pairwise(limits) if one[0] < one[1]]


@dataclass(frozen=True, kw_only=True)
class ContigWork:
    """One kind of work on the contigs of a prediction; small and picklable."""

    layout: PredictionLayout
    fingerprint: str
    """Of what is computed, and of what; names the files of units."""
    worker_nt: int
    """Nucleotides worth another process: it takes as long to start."""
    unit_nt: int
    """Nucleotides of a unit, as far as contigs are not longer."""
    name: ClassVar[str]
    """In the names of these files, in logs and metrics."""
    parts: ClassVar[int] = 16
    """That a unit is divided into where it has ended processes, and each of these again, until a contig is alone."""

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.contig_index)

    def work_nt(self, index: SequenceIndex) -> IntArray:
        """Return the nucleotides of each contig that are work, int64 (contigs,) in input order; 0: it is none."""
        return np.maximum(index.lengths[index.in_input_order()], 1)

    def units(self, work_nt: IntArray, num_workers: int) -> list[range]:
        """Return the units, of which so many processes have the same number where that matters."""
        del num_workers
        return [one for one in units_of(work_nt, self.unit_nt) if work_nt[one.start : one.stop].any()]

    def load(self) -> Any:
        """Load what ``compute`` needs for all units, beside the index."""

    def num_bytes(self, lengths_nt: IntArray) -> int | None:
        """Return the size of what is found of contigs of *lengths_nt*; None where it is not known."""
        del lengths_nt
        return None

    def compute(self, index: SequenceIndex, contigs: range, loaded: Any, on_share: OnShare) -> bytes:
        """Return what is found of some contigs."""
        raise NotImplementedError

    def without_result(self, lengths_nt: IntArray) -> bytes:
        """Return what stands for contigs of *lengths_nt* that cannot be computed."""
        raise NotImplementedError

    def join(self, units: ContigUnits) -> Mapping[str, int]:
        """Write the files of the stage from those of all units, and return counts for its record."""
        raise NotImplementedError

    def path_of(self, contigs: range) -> Path:
        """Return the file of a unit or a part of one."""
        # both ends: another start may have divided the contigs in another way
        return self.layout.contig_parts / f"{self.fingerprint[:16]}.{self.name}.{contigs.start}-{contigs.stop}"

    def write(self, index: SequenceIndex, contigs: range, loaded: Any, on_share: OnShare) -> int:
        """Compute some contigs with one thread, and write their file; return its bytes."""
        with threadpool_limits(1, user_api="blas"):
            data = self.compute(index, contigs, loaded, on_share)
        durable.write_bytes(self.path_of(contigs), data, seal=True)
        return len(data)

    def is_durable(self, contigs: range, lengths_nt: IntArray) -> bool:
        """Whether the file of some contigs, of all with *lengths_nt*, is whole and theirs; any other is removed."""
        path = self.path_of(contigs)
        try:
            durable.check_seal(path)
            num_bytes = self.num_bytes(lengths_nt[contigs.start : contigs.stop])
            if num_bytes in {None, path.stat().st_size - durable.SEAL_BYTES}:
                return True
        except FileNotFoundError:
            return False
        except ResultError:
            pass
        durable.remove(path)
        return False

    def read(self, contigs: range) -> bytes:
        """Return what was found of some contigs; ``ResultError`` where their file is not whole."""
        path = self.path_of(contigs)
        durable.check_seal(path)
        return run_folders.read_bytes(path)[: -durable.SEAL_BYTES]

    def names(self) -> frozenset[str]:
        """Return the names of the files that are there."""
        try:
            return frozenset(path.name for path in self.layout.contig_parts.iterdir())
        except OSError:  # there is no such folder, or something in its place, which writing refuses
            return frozenset()

    def missing(self, contigs: range, work_nt: IntArray, names: Collection[str]) -> list[int]:
        """Return the numbers of those contigs that are work and of which no file is among *names*."""
        if not work_nt[contigs.start : contigs.stop].any() or self.path_of(contigs).name in names:
            return []
        if len(contigs) == 1:
            return [contigs.start]
        return [number for part in divided(contigs, self.parts) for number in self.missing(part, work_nt, names)]

    def found(self, contigs: range, work_nt: IntArray, lengths_nt: IntArray) -> Iterator[tuple[range, bytes]]:
        """Yield what was found, for some contigs each, in their order; of a contig without any, what stands for it."""
        if not work_nt[contigs.start : contigs.stop].any():
            return
        if self.path_of(contigs).exists():
            yield contigs, self.read(contigs)
        elif len(contigs) == 1:
            yield contigs, self.without_result(lengths_nt[contigs.start : contigs.stop])
        else:
            for part in divided(contigs, self.parts):
                yield from self.found(part, work_nt, lengths_nt)


class ContigUnits:
    """
    The units of some kinds of work, numbered from 0: those of the first kind, then of the next, each the largest first.

    A kind may need what was found by the one before: its units are known, here and in every process, once that is
    there.
    """

    def __init__(self, works: Sequence[ContigWork], num_workers: int) -> None:
        self.index = works[0].open_index()
        self.lengths_nt = self.index.lengths[self.index.in_input_order()]
        """Of all contigs, int64 (contigs,) in input order."""
        self._left = list(works)
        self._num_workers = num_workers
        self._units: list[tuple[ContigWork, range]] = []
        self._work_nt: dict[str, IntArray] = {}
        self.add_next()

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, number: int) -> tuple[ContigWork, range]:
        while number >= len(self._units) and self._left:
            self.add_next()
        return self._units[number]

    def add_next(self) -> range:
        """Add the units of the next kind, if there is one; return their numbers."""
        first = len(self._units)
        if self._left:
            work = self._left.pop(0)
            work_nt = self._work_nt[work.name] = work.work_nt(self.index)
            units = work.units(work_nt, self._num_workers)
            self._units += [(work, unit) for unit in sorted(units, key=lambda unit: self.nt(work, unit), reverse=True)]
        return range(first, len(self._units))

    def add_to(self, kind: int) -> None:
        """Add units up to those of the kind of this number."""
        while len(self._work_nt) <= kind:
            self.add_next()

    @property
    def sizes(self) -> IntArray:
        """Nucleotides of each unit that are work, int64 (units,)."""
        return np.array([self.nt(*unit) for unit in self._units], np.int64)

    def durable(self, numbers: Collection[int], quarantined: Collection[int] = ()) -> set[int]:
        """Return those of some units of which everything is on disk but *quarantined* contigs."""
        return {number for number in numbers if self._is_durable(*self[number], quarantined)}

    def _is_durable(self, work: ContigWork, contigs: range, quarantined: Collection[int]) -> bool:
        if work.is_durable(contigs, self.lengths_nt):
            return True
        own = set(contigs).intersection(quarantined)
        return bool(own) and own.issuperset(work.missing(contigs, self.work_nt(work), work.names()))

    def missing(self, work: ContigWork) -> list[int]:
        """Return the numbers of the contigs of which a kind of work has found nothing yet, ascending."""
        names = work.names()
        return [number for unit in self.of(work) for number in work.missing(unit, self.work_nt(work), names)]

    def work_nt(self, work: ContigWork) -> IntArray:
        return self._work_nt[work.name]

    def found(self, work: ContigWork) -> Iterator[tuple[range, bytes]]:
        """Yield what was found by a kind of work, in the order of the contigs."""
        for contigs in self.of(work):
            yield from work.found(contigs, self.work_nt(work), self.lengths_nt)

    def of(self, work: ContigWork) -> list[range]:
        """Return the units of a kind, in the order of the contigs."""
        return sorted((unit for kind, unit in self._units if kind.name == work.name), key=lambda unit: unit.start)

    def nt(self, work: ContigWork, contigs: range) -> int:
        """Return the nucleotides of some contigs that are work."""
        return int(self.work_nt(work)[contigs.start : contigs.stop].sum())

    def only(self, work: ContigWork, contigs: range) -> int | None:
        """Return the number of the one contig that is work; None where several are."""
        found = np.flatnonzero(self.work_nt(work)[contigs.start : contigs.stop])
        return contigs.start + int(found[0]) if len(found) == 1 else None

    def count(self, work: ContigWork, contigs: range) -> int:
        """Return how many of some contigs are work."""
        return int(np.count_nonzero(self.work_nt(work)[contigs.start : contigs.stop]))
