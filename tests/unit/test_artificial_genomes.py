"""Artificial sequences keep what they are to keep, and nothing else; errors of sequencing are as rare as promised."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from tests.unit.test_training_fragments import genome, letters
from virnucpro.training.fitting.training_fragments import MOST_ERRORS, with_errors
from virnucpro.training.genomes.artificial_genomes import FRAGMENTS_PER_RECORD, GROUP, artificial_genomes, shuffled


@pytest.mark.parametrize(
    "sequence", ["A", "AC", "AAAA", "ACGTN" * 40, letters(3_000, 1), "AAAT" + letters(50, 2) + "A"]
)
def test_a_shuffled_sequence_has_the_same_pairs_of_neighbours(sequence):
    found = {shuffled(sequence, np.random.default_rng(seed)) for seed in range(5)}
    for one in found:
        assert Counter(pairwise(one)) == Counter(pairwise(sequence))
        assert (one[0], one[-1]) == (sequence[0], sequence[-1])
    assert len(found) == (5 if len(set(pairwise(sequence))) > 8 else 1)


def test_there_are_as_many_records_as_fragments_bear_and_the_same_for_a_seed():
    genomes = [genome("v", letters(20_000, 1)), genome("b", letters(500, 2), group="bacteria")]
    made = artificial_genomes(genomes, 20 * FRAGMENTS_PER_RECORD, seed=1)
    assert len(made) == 40  # random ones, and of the virus: the other genome is too short
    assert {(one.group, one.is_virus) for one in made} == {(GROUP, False)}
    assert len({one.source for one in made}) == len({one.letters for one in made}) == 40
    assert made == artificial_genomes(genomes, 20 * FRAGMENTS_PER_RECORD, seed=1)
    assert artificial_genomes(genomes, FRAGMENTS_PER_RECORD - 1, seed=1) == []
    shares = [sum(map(one.letters.count, "GC")) / len(one.letters) for one in made[::2]]
    assert min(shares) < 0.3
    assert max(shares) > 0.7


def test_errors_are_as_many_as_may_be_and_of_every_kind():
    sequence, random = letters(10_000, 1), np.random.default_rng(3)
    found = [with_errors(sequence, random) for _ in range(60)]
    assert any(len(one) == len(sequence) and one != sequence and "N" not in one for one in found)
    assert any(len(one) != len(sequence) for one in found)
    unknown = [one.count("N") / len(one) for one in found]
    assert 0 < max(unknown) <= 1.5 * MOST_ERRORS[2]
    assert all(abs(len(one) - len(sequence)) < MOST_ERRORS[1] * len(sequence) for one in found)
    assert set("".join(found)) <= set("ACGTN")
