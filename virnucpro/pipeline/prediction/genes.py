"""``genes.gff3`` and ``genes.faa``; a contig's genes depend on it alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from virnucpro import durable
from virnucpro.arrays import mapped
from virnucpro.calls.gene_files import GFF_HEADER, gene_lines
from virnucpro.pipeline.prediction.contig_work import ContigWork

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.arrays import BoolArray, IntArray
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.models.contigs.protein_search import OnShare
    from virnucpro.pipeline.prediction.contig_work import ContigUnits

GENE_COUNTS = struct.Struct("<QQ")
"""At the beginning of what is found of a unit: the number of genes, and the bytes of GFF3."""


@dataclass(frozen=True, kw_only=True)
class Genes(ContigWork):
    """Finds the genes of chosen contigs: their ``GENE_COUNTS``, lines of GFF3, and proteins."""

    worker_nt: int = 10_000_000
    unit_nt: int = 1_000_000
    name: ClassVar[str] = "genes"

    @property
    def chosen(self) -> Path:
        """A byte for each contig, in input order: whether its genes are wanted."""
        return self.layout.contig_parts / "genes_of.u8"

    def choose(self, is_chosen_C: BoolArray) -> None:
        """Write which contigs are work, bool (contigs,), in input order."""
        durable.write_bytes(self.chosen, is_chosen_C.tobytes())

    def work_nt(self, index: SequenceIndex) -> IntArray:
        """Return the nucleotides of the chosen contigs."""
        return np.where(self._is_chosen(), super().work_nt(index), 0)

    def compute(self, index: SequenceIndex, contigs: range, loaded: None, on_share: OnShare) -> bytes:
        del loaded, on_share
        is_chosen = self._is_chosen()[contigs.start : contigs.stop]
        records = map(index.read, index.in_input_order()[contigs.start : contigs.stop][is_chosen].tolist())
        found = gene_lines((record.sequence_id, record.sequence) for record in records)
        return GENE_COUNTS.pack(found.genes, len(found.gff)) + found.gff + found.proteins

    def without_result(self, lengths_nt: IntArray) -> bytes:
        del lengths_nt
        return GENE_COUNTS.pack(0, 0)

    def join(self, units: ContigUnits) -> dict[str, int]:
        """Write both files."""
        number, layout = 0, self.layout
        with durable.replacing(layout.genes) as gff, durable.replacing(layout.gene_proteins) as proteins:
            gff.write(GFF_HEADER)
            for _, data in units.found(self):
                genes, of_gff = GENE_COUNTS.unpack_from(data)
                number += genes
                gff.write(data[GENE_COUNTS.size : GENE_COUNTS.size + of_gff])
                proteins.write(data[GENE_COUNTS.size + of_gff :])
        return {"genes": number}

    def _is_chosen(self) -> BoolArray:
        return mapped(self.chosen, np.bool_) if self.chosen.stat().st_size else np.empty(0, np.bool_)
