"""Random inputs and random arrangements of finished work, and the means to lay a run down on disk without workers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from tests.fakes import hash_config, hash_vector
from virnucpro.data.packing import BlockPlan, make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.run_layout import RunLayout
from virnucpro.store.manifest import CHECKSUM, read_object, with_checksum
from virnucpro.store.parts import BlockRows, write_part
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virnucpro.config import ModelConfig

residues = st.text("ACDEFGHIKLMNPQRSTVWY", min_size=1, max_size=30)
ids = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)


@st.composite
def fasta_records(draw, max_size=24):
    """Records with ids of their own; some sequences are copies of others."""
    names = draw(st.lists(ids, min_size=1, max_size=max_size, unique=True))
    pool = draw(st.lists(residues, min_size=1, max_size=len(names)))
    return [(name, draw(st.sampled_from(pool) | residues)) for name in names]


def open_frame(codons: int, seed: int = 0) -> str:
    """A frame without a stop codon, of no low complexity: ATGGCC, and random codons."""
    sense = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in ("TAA", "TAG", "TGA")]
    return "ATGGCC" + "".join(random.Random(seed).choices(sense, k=codons - 2))


def write_fasta(path: Path, records) -> Path:
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in records), encoding="utf-8")
    return path


class MadeRun:
    """A run's folder with its index and plan, whose finished blocks the test lays down itself."""

    def __init__(self, folder: Path, records, **settings):
        self.records = list(records)
        self.layout = RunLayout(folder / "out")
        self.config: ModelConfig = hash_config(**settings)
        self.fasta = write_fasta(folder / "in.fasta", self.records)
        self.index = SequenceIndex.build([self.fasta], self.layout.index, unpack_dir=self.layout.unpacked_dir)
        self.plan: BlockPlan = make_plan(self.index, self.config, device_type="cpu")
        self.sequence_of = dict(self.records)

    def vector(self, name: str) -> np.ndarray:
        """The row that the record *name* must get."""
        return hash_vector(self.sequence_of[name][: self.config.max_residues])

    def name_of(self, position: int) -> str:
        return self.index.sequence_id(position)

    def rows(self, block: int, origin: BlockOrigin = BlockOrigin.COMPUTED, *, without=()) -> BlockRows:
        positions = np.setdiff1d(self.plan.block_positions(block), without)
        names = self.index.sequence_ids(positions)
        return BlockRows(block, positions, names, np.stack([self.vector(name) for name in names]), origin)

    def write_part(self, blocks, *, folder: Path | None = None, fingerprint: str | None = None, without=()) -> Path:
        return write_part(
            folder or self.layout.parts_dir,
            [self.rows(block, without=without) for block in blocks],
            plan_fingerprint=fingerprint or self.plan.fingerprint,
        )

    def names_of(self, blocks) -> set[str]:
        """Every record whose row comes from one of *blocks*, copies included."""
        present = {int(p) for block in blocks for p in self.plan.block_positions(block)}
        everything = range(len(self.index))
        return {self.index.sequence_id(p) for p in everything if int(self.index.representatives[p]) in present}


def edit_manifest(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Let *edit* change the values of a ``run.json``, which gets the checksum of the new ones."""
    values = read_object(path)
    del values[CHECKSUM]
    edit(values)
    path.write_bytes(with_checksum(values))


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def random_contigs(count: int, *, seed: int, longest: int = 60_000) -> list[tuple[str, str]]:
    """
    Contigs of 1 to *longest* nucleotides, most of them short; some with N, IUPAC's letters and lower case.

    The shortest and the longest length are always among them where *count* is at least 4.
    """
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, np.log(3_000), count)).astype(int)
    rare = rng.random(count) < 0.002
    lengths[rare] = rng.integers(3_000, longest + 1, int(rare.sum()))
    lengths[:4] = [1, longest, 2, 3][:count]
    return [(f"contig{number}.{seed}", _random_contig(rng, int(n))) for number, n in enumerate(lengths)]


def _random_contig(rng: np.random.Generator, length: int) -> str:
    letters = rng.choice(list("ACGT"), size=length, p=rng.dirichlet([4, 4, 4, 4]))
    sort = rng.integers(6)
    if sort == 0:  # no T, so that many frames are open
        letters[letters == "T"] = "C"
    if sort == 1:
        spots = rng.random(length) < rng.choice([0.002, 0.3])
        letters[spots] = rng.choice(list("RYSWKMBDHVN"), size=int(spots.sum()))
    if sort == 2:
        start = rng.integers(length)
        letters[start : start + rng.integers(1, 2_000)] = "N"
    lower = rng.random(length) < (0.5 if sort in (1, 3) else 0.0)
    return "".join(np.where(lower, np.char.lower(letters), letters).tolist())
