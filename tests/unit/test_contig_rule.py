"""A contig's score is what the rule says, computed here contig by contig; frames and chunks without a say have none."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.calls.frame_rules import LEAST_PROBABILITY, score_by_frames

P = st.one_of(st.floats(0, 1, width=32), st.just(float("nan")))
CONTIGS = st.lists(st.lists(st.lists(P, max_size=6), max_size=5), max_size=6)


def plain_score(chunks):
    """The rule in so many words."""
    known = [min(max(p, 1e-6), 1 - 1e-6) for frames in chunks for p in frames if not math.isnan(p)]
    if not known:
        return math.nan
    mean = sum(math.log(p / (1 - p)) for p in known) / len(known)
    return 1 / (1 + math.exp(-mean * math.sqrt(min(len(known), 16))))


def as_arrays(contigs):
    p_virus = np.array([p for chunks in contigs for frames in chunks for p in frames], dtype=np.float32)
    return p_virus, np.array([sum(map(len, chunks)) for chunks in contigs], dtype=np.int64)


@given(CONTIGS)
def test_scores_are_those_of_the_rule_contig_by_contig(contigs):
    found = score_by_frames(*as_arrays(contigs))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, [plain_score(chunks) for chunks in contigs], rtol=1e-12, atol=1e-12)


@given(CONTIGS, CONTIGS)
def test_a_contig_scores_the_same_whatever_is_beside_it(some, others):
    together = score_by_frames(*as_arrays(some + others))
    apart = np.concatenate([score_by_frames(*as_arrays(some)), score_by_frames(*as_arrays(others))])
    np.testing.assert_array_equal(together, apart)


def test_one_frame_keeps_its_probability_and_certainty_is_not_infinite():
    found = score_by_frames(*as_arrays([[[0.25]], [[1.0]], [[1.0, 0.0]], [[]], []]))
    np.testing.assert_allclose(found[:3], [0.25, 1 - LEAST_PROBABILITY, 0.5], atol=1e-9)
    assert np.isnan(found[3:]).all()


def test_frames_of_one_opinion_make_a_contig_surer_up_to_sixteen():
    counts = [1, 2, 4, 9, 16, 17, 1000]
    found = score_by_frames(*as_arrays([[[0.6] * n] for n in counts]))
    assert (np.diff(found[:5]) > 0).all()
    odds = math.log(0.6 / 0.4)
    np.testing.assert_allclose(found[4:], 1 / (1 + math.exp(-4 * odds)), rtol=1e-6)
    np.testing.assert_allclose(found[0], 0.6, rtol=1e-6)
