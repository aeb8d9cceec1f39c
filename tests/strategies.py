"""Random inputs and random arrangements of finished work, and the means to lay a run down on disk without workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from tests.fakes import hash_config, hash_vector
from virnucpro.data.packing import BlockPlan, make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import BlockRows, write_part
from virnucpro.store.schema import BlockOrigin

if TYPE_CHECKING:
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


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)
