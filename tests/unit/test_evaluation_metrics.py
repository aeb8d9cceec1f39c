"""Measures of scores: scikit-learn's numbers, their definitions by brute force, ties, one class and no score."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.training.evaluation.metrics import RankedContigs, bootstrap, counts_of

NUMBERS = np.arange(200)
TIED = ((NUMBERS * 37) % 101) / 100
TIED_VIRUS = ((NUMBERS * 53 + 7) % 89) < 25 + 40 * TIED
SMOOTH = ((NUMBERS * 37) % 211) / 211
SMOOTH_VIRUS = ((NUMBERS * 53 + 7) % 89) / 89 < SMOOTH**1.5


def auprc(scores, virus):
    return RankedContigs(scores, virus).counts().auprc()


def f1(scores, virus, threshold):
    return RankedContigs(scores, virus).counts().f1(threshold)


some = settings(max_examples=40)

contigs = st.lists(
    st.tuples(st.sampled_from([math.nan, 0.0, 0.1, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=40
).map(lambda pairs: (np.array([score for score, _ in pairs]), np.array([virus for _, virus in pairs])))
of_both_classes = contigs.filter(lambda pair: 0 < pair[1].sum() < len(pair[1]))


def test_the_measures_are_those_of_scikit_learn():
    """Constants of version 1.9.1: roc_auc_score, average_precision_score, f1_score, roc_curve, calibration_curve."""
    assert counts_of(TIED, TIED_VIRUS).auroc() == pytest.approx(0.6316631663166317, abs=1e-14)
    assert auprc(TIED, TIED_VIRUS) == pytest.approx(0.5962676753302982, abs=1e-14)
    assert f1(TIED, TIED_VIRUS, 0.6) == pytest.approx(0.5604395604395604, abs=1e-14)
    recalls = [counts_of(TIED, TIED_VIRUS).strict_recall(share) for share in (0.01, 0.05, 0.1)]
    assert recalls == pytest.approx([0, 0.07920792079207921, 0.1485148514851485], abs=1e-14)
    bins = RankedContigs(SMOOTH, SMOOTH_VIRUS).counts().calibration_bins()
    assert [one.contigs for one in bins] == [20] * 10
    shares = [0.0, 0.0, 0.15, 0.2, 0.35, 0.4, 0.5, 0.6, 0.85, 1.0]
    assert [one.viral_share for one in bins] == pytest.approx(shares, abs=1e-12)
    assert [one.mean_score for one in bins][:3] == pytest.approx([0.046208530806, 0.148104265403, 0.24644549763])
    assert counts_of(SMOOTH, SMOOTH_VIRUS).calibration_error() == pytest.approx(0.10338862559241704, abs=1e-14)


@some
@given(of_both_classes)
def test_auroc_is_the_share_of_pairs_in_the_right_order(drawn):
    scores, virus = drawn
    ranks = np.where(np.isnan(scores), -1, scores)
    pairs = [(a > b) + (a == b) / 2 for a in ranks[virus] for b in ranks[~virus]]
    assert counts_of(scores, virus).auroc() == pytest.approx(np.mean(pairs), abs=1e-12)
    assert counts_of(scores, ~virus).auroc() == pytest.approx(1 - np.mean(pairs), abs=1e-12)


@some
@given(of_both_classes)
def test_average_precision_adds_up_precision_where_recall_grows(drawn):
    scores, virus = drawn
    ranks = np.where(np.isnan(scores), -1, scores)
    expected, recall_before = 0.0, 0.0
    for threshold in sorted(set(ranks), reverse=True):
        called = ranks >= threshold
        recall = (called & virus).sum() / virus.sum()
        expected += (recall - recall_before) * (called & virus).sum() / called.sum()
        recall_before = recall
    assert auprc(scores, virus) == pytest.approx(expected, abs=1e-12)
    assert 0 < auprc(scores, virus) <= 1


@some
@given(of_both_classes, st.sampled_from([0.0, 0.01, 0.05, 0.29, 0.5, 1.0]))
def test_a_threshold_lets_no_more_pass_than_it_may_and_is_the_lowest_such(drawn, share):
    scores, virus = drawn
    others = scores[~virus]
    threshold = counts_of(scores, virus).strict_threshold(share)
    assert (others >= threshold).sum() <= share * len(others) + 1e-9
    below = others[others < threshold]
    if len(below):
        assert (others >= below.max()).sum() > share * len(others) + 1e-9
    assert counts_of(scores, virus).strict_recall(share) == (scores[virus] >= threshold).mean()


@some
@given(contigs, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_f1_counts_what_is_called_and_a_contig_without_a_score_never_is(drawn, threshold):
    scores, virus = drawn
    called = scores >= threshold
    hits, wrong = (called & virus).sum(), (called != virus).sum()
    found = f1(scores, virus, threshold)
    assert math.isnan(found) if not virus.any() else found == pytest.approx(2 * hits / (2 * hits + wrong), abs=1e-12)


@some
@given(contigs)
def test_the_bins_of_calibration_hold_every_scored_contig_once_and_no_score_twice(drawn):
    scores, virus = drawn
    bins = RankedContigs(scores, virus).counts().calibration_bins()
    scored = ~np.isnan(scores)
    assert sum(one.contigs for one in bins) == scored.sum()
    assert sum(one.contigs * one.viral_share for one in bins) == pytest.approx((virus & scored).sum())
    assert sum(one.contigs * one.mean_score for one in bins) == pytest.approx(scores[scored].sum())
    means = [one.mean_score for one in bins]
    assert all(a < b for a, b in itertools.pairwise(means))
    assert all(
        0 <= one.low <= one.viral_share + 1e-12 and one.viral_share <= one.high + 1e-12 <= 1 + 1e-9 for one in bins
    )
    error = counts_of(scores, virus).calibration_error()
    assert math.isnan(error) if not scored.any() else 0 <= error <= 1


@some
@given(of_both_classes, st.randoms())
def test_no_measure_depends_on_the_order_of_the_contigs(drawn, random):
    scores, virus = drawn
    order = random.sample(range(len(scores)), len(scores))
    before, after = (RankedContigs(scores[some], virus[some]).counts() for some in (np.arange(len(scores)), order))
    for measure in ("auroc", "auprc", "strict_recall", "strict_threshold", "calibration_error", "calibration_bins"):
        np.testing.assert_equal(getattr(before, measure)(), getattr(after, measure)())


def test_one_class_alone_has_no_ranking():
    scores = np.array([0.2, 0.8, np.nan])
    for virus in (np.ones(3, bool), np.zeros(3, bool)):
        assert math.isnan(counts_of(scores, virus).auroc())
        assert math.isnan(auprc(scores, virus))
        assert math.isnan(counts_of(scores, virus).strict_recall())
        assert counts_of(scores, virus).calibration_error() == pytest.approx(0.5)
    assert math.isnan(counts_of(scores, np.ones(3, bool)).strict_threshold())
    assert f1(scores, np.ones(3, bool), 0.5) == 0.5
    empty = bootstrap(lambda drawn: {"auroc": counts_of(scores[drawn], virus[drawn]).auroc()}, virus, seed=1, samples=3)
    assert math.isnan(empty["auroc"].low)


def test_a_probability_that_means_what_it_says_has_no_calibration_error():
    p_virus = np.repeat([0.1, 0.5, 0.9], 100)
    virus = np.concatenate([np.arange(100) < 10, np.arange(100) < 50, np.arange(100) < 90])
    assert counts_of(p_virus, virus).calibration_error() == pytest.approx(0, abs=1e-12)
    assert counts_of(1 - p_virus, virus).calibration_error() == pytest.approx((0.8 + 0 + 0.8) / 3)


def test_an_interval_holds_the_measure_is_repeatable_and_wider_with_fewer_contigs():
    random = np.random.default_rng(3)
    widths = []
    for num in (40, 400):
        scores, virus = random.random(num), np.arange(num) % 2 == 0
        found, again, other = (
            bootstrap(
                lambda drawn, s=scores, v=virus: {"it": counts_of(s[drawn], v[drawn]).auroc()},
                virus,
                seed=seed,
                samples=300,
            )
            for seed in (1, 1, 2)
        )
        assert found == again != other
        assert found["it"].low < found["it"].value == counts_of(scores, virus).auroc() < found["it"].high
        widths.append(found["it"].high - found["it"].low)
    assert widths[1] < widths[0]


def test_a_prevalence_weighs_contigs_as_if_there_were_more_of_one_kind():
    copies = np.where(SMOOTH_VIRUS, 1, 3)
    scores, virus = np.repeat(SMOOTH, copies), np.repeat(SMOOTH_VIRUS, copies)
    prevalence = virus.mean()
    weighted, copied = counts_of(SMOOTH, SMOOTH_VIRUS), counts_of(scores, virus)
    assert weighted.auprc(prevalence) == pytest.approx(copied.auprc(), abs=1e-12)
    assert weighted.f1(0.6, prevalence) == pytest.approx(copied.f1(0.6), abs=1e-12)
    assert weighted.precision(0.6, prevalence) == pytest.approx(virus[scores >= 0.6].mean(), abs=1e-12)
    assert weighted.calibration_error(prevalence) == pytest.approx(copied.calibration_error(), abs=1e-12)
    assert weighted.precision(0.6) > weighted.precision(0.6, prevalence)
    assert weighted.precision(0.6, SMOOTH_VIRUS.mean()) == pytest.approx(weighted.precision(0.6))
    assert math.isnan(weighted.precision(2.0, prevalence))
    assert math.isnan(counts_of(SMOOTH, np.ones(200, bool)).calibration_error(0.5))


def test_contigs_that_only_repeat_their_genome_make_no_interval_narrower():
    random = np.random.default_rng(4)
    scores, virus, copies = random.random(60), np.arange(60) % 3 == 0, 5

    def interval(scores, virus, genomes=None):
        ranked = RankedContigs(scores, virus)

        def measures(drawn):
            return {"it": ranked.counts(drawn).recall(0.4)}

        return bootstrap(measures, virus, genomes_C=genomes, seed=1, samples=200)["it"]

    genomes = np.repeat(random.permutation(60), copies)
    apart = interval(scores, virus)
    together = interval(np.repeat(scores, copies), np.repeat(virus, copies), genomes)
    as_contigs = interval(np.repeat(scores, copies), np.repeat(virus, copies))
    assert together.value == apart.value == as_contigs.value
    assert together.high - together.low == pytest.approx(apart.high - apart.low, rel=0.3)
    assert as_contigs.high - as_contigs.low < 0.7 * (together.high - together.low)


@some
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_a_sample_of_genomes_has_whole_genomes_and_as_many_of_each_class_as_there_are(pairs):
    genomes, virus = np.array([genome for genome, _ in pairs]), np.array([is_viral for _, is_viral in pairs])
    for label in (True, False):  # contigs of a single genome are drawn one by one
        if len(set(genomes[virus == label].tolist())) == 1:
            genomes[virus == label] = 100 + np.flatnonzero(virus == label)
    samples = []
    bootstrap(lambda drawn: samples.append(drawn) or {"it": 0.0}, virus, genomes_C=genomes, seed=1, samples=5)
    whole = [np.flatnonzero((genomes == one) & (virus == label)) for label in (True, False) for one in set(genomes)]
    for drawn in samples:
        times = np.bincount(drawn, minlength=len(pairs))
        drawn_genomes = {True: 0, False: 0}
        for members in filter(len, whole):
            assert len(set(times[members].tolist())) == 1
            drawn_genomes[bool(virus[members[0]])] += times[members[0]]
        assert drawn_genomes == {label: len(set(genomes[virus == label].tolist())) for label in (True, False)}


def test_the_contigs_of_a_single_genome_are_drawn_one_by_one():
    random = np.random.default_rng(5)
    scores, virus = random.random(40), np.arange(40) < 20
    ranked = RankedContigs(scores, virus)
    apart, one = (
        bootstrap(lambda drawn: {"it": ranked.counts(drawn).recall(0.5)}, virus, genomes_C=genomes, seed=1, samples=50)
        for genomes in (np.arange(40), np.where(virus, 0, np.arange(40)))
    )
    assert one == apart
    assert one["it"].low < one["it"].high


def test_samples_in_which_a_measure_has_no_meaning_do_not_take_its_interval_away():
    scores, virus = np.array([0.9, 0.1, 0.1, 0.1]), np.array([True, True, False, False])
    ranked = RankedContigs(scores, virus)
    found = bootstrap(lambda drawn: {"it": ranked.counts(drawn).precision(0.5)}, virus, seed=1, samples=50)["it"]
    assert (found.value, found.low, found.high) == (1, 1, 1)


def test_a_sample_has_as_many_contigs_of_each_class_as_there_are():
    virus = np.arange(50) < 7
    seen = []
    bootstrap(lambda drawn: seen.append(virus[drawn].sum()) or {"it": 0.0}, virus, seed=1, samples=20)
    assert seen == [7] * 21


@some
@given(st.integers(0, 2**32))
def test_scores_that_know_nothing_of_the_labels_are_worth_a_half(seed):
    random = np.random.default_rng(seed)
    scores, virus = random.random(4000), random.permutation(np.arange(4000) % 2 == 0)
    assert counts_of(scores, virus).auroc() == pytest.approx(0.5, abs=0.06)  # 6.5 standard deviations
    assert auprc(scores, virus) == pytest.approx(0.5, abs=0.07)
