"""
Composition scores of all contigs, computed by one process a core.

A contig's scores depend on it alone, not on its part. Contigs that a model with known proteins is not sure of are then
searched in these by the same processes, in larger parts.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from virnucpro import durable
from virnucpro.calls.score_files import map_scores
from virnucpro.models.contigs.homology import SEARCHED_NT, is_ambiguous
from virnucpro.models.contigs.protein_search import PASS_NT
from virnucpro.pipeline.prediction.part_jobs import HomologyJob
from virnucpro.pipeline.prediction.part_work import Work, compute_parts, parts_of, processes_for, read_part

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.config import RunLimits
    from virnucpro.pipeline.hosts.result_passes import ItemMap
    from virnucpro.pipeline.prediction.part_jobs import CompositionJob

PART_NT = 250_000
"""Nucleotides of a part, as far as contigs are not longer."""
SEARCH_PART_NT = PASS_NT
"""Most of a part that is searched, of the nucleotides that are."""


def score_composition(
    job: CompositionJob,
    *,
    workers: int | None = None,
    limits: RunLimits | None = None,
    elsewhere: ItemMap | None = None,
    advance: Callable[[int, int, str], None] = lambda *_: None,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """
    Write the scores of all contigs, and of the windows along the long ones; return how many were scored and searched.

    Arguments and errors are those of ``compute_parts``; *advance* is that of ``Work``.
    """
    index = job.open_index()
    lengths = index.lengths[index.in_input_order()]
    parts = parts_of(lengths, PART_NT)
    counts = {"contigs": len(index), "scored": 0, "searched": 0}

    @cache  # processes that have scored everything ask for it, and so does what comes after them
    def search() -> Work | None:
        counts["scored"] = _join_parts(job, parts)
        scores = map_scores(job.layout.composition_scores, "scores", len(index))
        is_searched = is_ambiguous(scores) & job.model.searches_proteins
        counts["searched"] = int(np.count_nonzero(is_searched))
        if not counts["searched"]:
            return None
        searched_nt = np.where(is_searched, np.minimum(lengths, SEARCHED_NT), 0)
        refining = HomologyJob(**vars(job))
        num_workers = processes_for(int(searched_nt.sum()), refining.worker_nt, workers if elsewhere is None else 1)
        return Work(refining, searched_nt, search_parts(searched_nt, num_workers), advance)

    compute = partial(compute_parts, workers=workers, limits=limits, elsewhere=elsewhere, stop=stop)
    load = cache(job.load)
    compute(Work(job, lengths, parts, advance), load, then=search)
    if (found := search()) is not None:
        compute(found, load)
        with durable.replacing(job.layout.composition_scores) as of_contigs:
            for part in found.parts:
                of_contigs.write(read_part(found.job, part))
    durable.remove_tree(job.layout.contig_parts)
    return counts


def _join_parts(job: CompositionJob, parts: Sequence[range]) -> int:
    """Write the composition scores of all contigs and windows into two files; return how many contigs have one."""
    scored, layout = 0, job.layout
    with (
        durable.replacing(layout.composition_scores) as of_contigs,
        durable.replacing(layout.composition_windows) as of_windows,
    ):
        for part in parts:
            data = read_part(job, part)
            of_part = np.frombuffer(data[: 4 * len(part)], np.float32)
            scored += int(np.count_nonzero(~np.isnan(of_part)))
            of_contigs.write(of_part.tobytes())
            of_windows.write(data[4 * len(part) :])
    return scored


def search_parts(searched_nt: IntArray, num_workers: int) -> list[range]:
    """
    Return the contigs of each part that is searched, by their number in the input.

    *searched_nt* count of all contigs, in that order. Parts are as large as each other, and as many for each process:
    all proteins are read for each.
    """
    ends_nt = np.cumsum(searched_nt)
    total_nt = int(ends_nt[-1])
    number = num_workers * -(-total_nt // (num_workers * SEARCH_PART_NT))
    limits = np.searchsorted(ends_nt, total_nt * np.arange(1, number) // number, side="right")
    return [range(*part) for part in pairwise(np.unique([0, *limits.tolist(), len(ends_nt)]).tolist())]
