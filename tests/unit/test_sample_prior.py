"""The share of viruses in a sample, the posterior, and the expected false discovery rate."""

import math

import numpy as np
import pytest

from virnucpro.calls import sample_prior
from virnucpro.calls.sample_prior import LEAST_VIRAL_SCORE, SamplePrior, call_limits, count_scores, estimate_prior


def calibrated(viral: int, others: int, seed: int = 1):
    """Draw float32 scores whose log-odds are true for as many viruses as others, and whether each is of a virus."""
    # N(m, 2m) against N(-m, 2m) has itself as log of the likelihood ratio
    random = np.random.default_rng(seed)
    is_virus = np.arange(viral + others) < viral
    log_odds = random.normal(
        np.where(is_virus, 3.0, -3.0), math.sqrt(6)
    )  # N(m, 2m): the log of its own likelihood ratio
    return (1 / (1 + np.exp(-log_odds))).astype(np.float32), is_virus


@pytest.fixture
def trusted(monkeypatch):
    """Have the interval cover the drawing of the sample alone."""
    monkeypatch.setattr(sample_prior, "_CALIBRATION", 0.0)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_the_share_of_viruses_is_found_with_an_interval_and_the_false_discoveries_are_as_expected(share):
    scores, is_virus = calibrated(round(20_000 * share), round(20_000 * (1 - share)))
    sample = estimate_prior(count_scores(scores))
    low, high = sample.interval
    assert low < share < high
    assert sample.share == pytest.approx(share, abs=0.01)
    assert 0 < high - low < 0.03
    for virus_from in (sample.score_of(0.5), sample.lowest_score(0.05)):
        called = scores >= virus_from
        realised, expected = np.mean(~is_virus[called]), sample.fdr(virus_from)
        spread = 4 * math.sqrt(expected * (1 - expected) / np.count_nonzero(called))
        assert realised == pytest.approx(expected, abs=spread + 0.005)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.8])
def test_the_interval_of_a_large_sample_allows_for_scores_that_are_a_little_wrong(share):
    scores, _ = calibrated(round(20_000 * share), round(20_000 * (1 - share)))
    log_odds = np.log(scores.astype(np.float64) / (1 - scores.astype(np.float64)))
    for wrong in (-0.3, 0.3):
        low, high = estimate_prior(count_scores((1 / (1 + np.exp(-log_odds - wrong))).astype(np.float32))).interval
        assert low < share < high
    low, high = estimate_prior(count_scores(np.full(300, 1e-6, dtype=np.float32))).interval
    assert low == 0 < high < 0.02, "no virus stays none"


@pytest.mark.usefixtures("trusted")
def test_the_interval_covers_the_truth_in_about_95_of_100_samples():
    random = np.random.default_rng(3)
    covered = 0
    for seed in range(200):
        viral = int(random.binomial(300, 0.2))
        low, high = estimate_prior(count_scores(calibrated(viral, 300 - viral, seed)[0])).interval
        covered += low <= 0.2 <= high
    assert 180 <= covered <= 199


def test_the_estimate_is_the_fixed_point_of_the_em_algorithm():
    scores = calibrated(100, 900)[0].astype(np.float64)
    share = 0.5
    for _ in range(2000):
        share = np.mean(share * scores / (share * scores + (1 - share) * (1 - scores)))
    assert estimate_prior(count_scores(scores.astype(np.float32))).share == pytest.approx(share, abs=1e-4)


def test_a_sample_of_one_kind_has_a_share_of_none_or_all():
    for score, share, posterior in ((0.01, 0, 0), (0.99, 1, 1)):
        sample = estimate_prior(count_scores(np.full(500, score, dtype=np.float32)))
        assert sample.share == share
        assert sample.interval[0] <= share <= sample.interval[1] < sample.interval[0] + 0.02
        assert sample.posteriors(np.array(score)) == posterior
        assert sample.fdr(score) == 1 - posterior
    none = estimate_prior(count_scores(np.full(500, 0.01, dtype=np.float32)))
    assert none.lowest_score(0.05) is None
    assert call_limits(none, 0.5, fdr=0.05) == (math.inf, 1.0)
    everything = estimate_prior(count_scores(np.full(500, 0.99, dtype=np.float32)))
    assert call_limits(everything, 0.5) == (LEAST_VIRAL_SCORE, 0.0)
    some = count_scores(np.repeat(np.array([0.02, 0.99], dtype=np.float32), [1, 500]))
    assert call_limits(SamplePrior(0.999, None, some), 0.5, fdr=0.05).virus_from == LEAST_VIRAL_SCORE


def test_scores_of_zero_and_one_and_none_are_counted_without_infinities():
    scores = np.array([0, 1, np.nan, 1, 0.5, 1e-30, np.nextafter(np.float32(1), 0)], dtype=np.float32)
    counts = count_scores(scores)
    assert counts.sum() == 6
    sample = estimate_prior(counts)
    assert 0.5 < sample.share < 0.7
    for score in (0.0, 0.5, 1.0):
        assert 0 <= sample.posteriors(np.array(score)) <= 1
        assert 0 <= sample.fdr(score) <= 1
    assert sample.fdr(1.0) < 1e-6 < sample.fdr(0.5) < sample.fdr(0.0) == pytest.approx(1 - sample.share, abs=1e-3)
    assert sample.fdr(math.inf) is not None  # the last bin has no upper end
    assert count_scores(np.empty(0, dtype=np.float32)).sum() == 0


def test_the_order_and_the_repetition_of_scores_do_not_matter_to_the_share():
    scores, _ = calibrated(300, 700)
    sample = estimate_prior(count_scores(scores))
    assert np.array_equal(count_scores(scores[::-1]), sample.counts_B)
    twice = estimate_prior(count_scores(np.tile(scores, 2)))
    assert twice.share == pytest.approx(sample.share, abs=1e-12)
    assert twice.interval[1] - twice.interval[0] < sample.interval[1] - sample.interval[0]


def test_equal_scores_share_one_rate_and_one_call():
    scores = np.repeat(np.array([0.9, 0.5, 0.1], dtype=np.float32), [10, 20, 70])
    sample = SamplePrior(0.5, None, count_scores(scores))
    assert sample.fdr(0.9) == pytest.approx(0.1, abs=1e-3)
    assert sample.fdr(0.5) == pytest.approx((10 * 0.1 + 20 * 0.5) / 30, abs=1e-3)
    assert 0.899 < sample.lowest_score(0.1 + 2e-3) <= scores[0]
    assert sample.lowest_score(0.09) is None


def test_limits_are_of_the_score_the_posterior_or_the_false_discovery_rate():
    sample = SamplePrior(0.1, None, count_scores(calibrated(100, 900)[0]))
    assert call_limits(None, 0.6) == (0.6, 0.4)
    assert call_limits(None, 0.6, fdr=0.01) == (0.6, 0.4)
    of_posterior = call_limits(sample, 0.6)
    assert sample.posteriors(np.array(of_posterior)).tolist() == pytest.approx([0.6, 0.4])
    assert of_posterior.virus_from == pytest.approx(0.6 * 0.9 / (0.6 * 0.9 + 0.4 * 0.1))
    strict = call_limits(sample, 0.6, fdr=0.01)
    assert strict.virus_from > of_posterior.virus_from
    assert strict.not_virus_below == of_posterior.not_virus_below
    lax = call_limits(sample, 0.6, fdr=0.7)
    assert lax.virus_from == lax.not_virus_below < of_posterior.not_virus_below
