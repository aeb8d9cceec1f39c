"""A contig's score is what the rule says, computed here contig by contig; frames and chunks without a say have none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.pipeline.contig_rule import LEAST_PROBABILITY, score_contigs

P = st.one_of(st.floats(0, 1, width=32), st.just(float("nan")))
CONTIGS = st.lists(st.lists(st.lists(P, max_size=6), max_size=5), max_size=6)


def plain_score(chunks):
    """The rule in so many words."""
    of_chunks = []
    for frames in chunks:
        known = [min(max(p, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY) for p in frames if not math.isnan(p)]
        if known:
            of_chunks.append(sum(math.log(p / (1 - p)) for p in known) / len(known))
    if not of_chunks:
        return math.nan
    return 1 / (1 + math.exp(-sum(of_chunks) / len(of_chunks)))


def as_arrays(contigs):
    p_virus = np.array([p for chunks in contigs for frames in chunks for p in frames], dtype=np.float32)
    frames_per_chunk = np.array([len(frames) for chunks in contigs for frames in chunks], dtype=np.int64)
    return p_virus, frames_per_chunk, np.array([len(chunks) for chunks in contigs], dtype=np.int64)


@given(CONTIGS)
def test_scores_are_those_of_the_rule_contig_by_contig(contigs):
    found = score_contigs(*as_arrays(contigs))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [plain_score(chunks) for chunks in contigs], rtol=1e-12, atol=1e-12)


@given(CONTIGS, CONTIGS)
def test_a_contig_scores_the_same_whatever_is_beside_it(some, others):
    together = score_contigs(*as_arrays(some + others))
    apart = np.concatenate([score_contigs(*as_arrays(some)), score_contigs(*as_arrays(others))])
    np.testing.assert_array_equal(together, apart)


def test_one_frame_keeps_its_probability_and_certainty_is_not_infinite():
    found = score_contigs(*as_arrays([[[0.25]], [[1.0]], [[1.0, 0.0]], [[]], []]))
    np.testing.assert_allclose(found[:3], [0.25, 1 - LEAST_PROBABILITY, 0.5], atol=1e-9)
    assert np.isnan(found[3:]).all()


def test_a_chunk_counts_once_however_many_frames_it_has():
    found = score_contigs(*as_arrays([[[0.9] * 5, [0.1]]]))
    assert found[0] == pytest.approx(0.5)
