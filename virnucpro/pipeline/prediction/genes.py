"""
``genes.gff3`` and ``genes.faa``, found by one process a core; a contig's genes depend on it alone.

A start after a kill finds the genes of the other parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.calls.gene_files import GFF_HEADER
from virnucpro.pipeline.prediction.part_jobs import GENE_COUNTS
from virnucpro.pipeline.prediction.part_work import Work, compute_parts, parts_of, read_part

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from virnucpro.arrays import BoolArray
    from virnucpro.config import RunLimits
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.part_jobs import GeneJob

PART_NT = 1_000_000
"""Nucleotides of a part whose genes are wanted."""


def write_genes(
    job: GeneJob,
    is_chosen_C: BoolArray,
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    elsewhere: ItemMap | None = None,
    advance: Callable[[int, int, str], None] = lambda *_: None,
    stop: threading.Event | None = None,
) -> int:
    """
    Write the genes of the chosen contigs, and return their number; arguments and errors as of ``compute_parts``.

    Args:
        is_chosen_C: bool (contigs,), in input order.
    """
    layout, index = job.layout, job.open_index()
    lengths_nt = np.where(is_chosen_C, index.lengths[index.in_input_order()], 0)
    parts = [part for part in parts_of(lengths_nt, PART_NT) if is_chosen_C[part.start : part.stop].any()]
    durable.write_bytes(job.chosen, is_chosen_C.tobytes())
    if lengths_nt.sum() < job.worker_nt:
        elsewhere = None
    compute_parts(
        Work(job, lengths_nt, parts, advance), job.load, workers=workers, limits=limits, elsewhere=elsewhere, stop=stop
    )
    number = 0
    with durable.replacing(layout.genes) as gff, durable.replacing(layout.gene_proteins) as proteins:
        gff.write(GFF_HEADER)
        for part in parts:
            data = read_part(job, part)
            genes, of_gff = GENE_COUNTS.unpack_from(data)
            number += genes
            gff.write(data[GENE_COUNTS.size : GENE_COUNTS.size + of_gff])
            proteins.write(data[GENE_COUNTS.size + of_gff :])
    durable.remove_tree(layout.contig_parts)
    return number
