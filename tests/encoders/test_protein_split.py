"""The held-out part shares fewer than half of its 5-mers with any training protein, whatever the proteins are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.encoders.protein_split import largest_overlaps, linked_groups, split_by_overlap

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def _kmers(residues):
    return {residues[start : start + 5] for start in range(len(residues) - 4)}


def _largest_share(residues, others):
    """The same quantity by sets of strings."""
    own = _kmers(residues)
    return max((len(own & _kmers(other)) for other in others), default=0) / max(len(own), 1)


@pytest.fixture(scope="module")
def families():
    """Twenty families of six proteins: an ancestor and mutated, cut and joined versions of it."""
    random = np.random.default_rng(3)
    sequences = []
    for _ in range(20):
        ancestor = random.choice(list(RESIDUES), size=int(random.integers(40, 300)))
        for share in (0.0, 0.02, 0.05, 0.1, 0.3, 0.6):
            mutant = ancestor.copy()
            where = random.random(len(mutant)) < share
            mutant[where] = random.choice(list(RESIDUES), size=int(where.sum()))
            sequences.append("".join(mutant[int(random.integers(0, 10)) :]))
    return sequences


def test_no_held_out_protein_shares_half_of_its_5mers_with_a_training_protein(families):
    split = split_by_overlap(families, seed=1, held_out_share=0.3)
    held_out = [families[number] for number in split.held_out]
    training = [families[number] for number in split.training]
    assert 0.2 * len(families) < len(held_out) <= 0.3 * len(families)
    shares = [_largest_share(residues, training) for residues in held_out]
    assert max(shares) < 0.5
    np.testing.assert_allclose(largest_overlaps(held_out, training), shares)


def test_property_is_not_empty_here(families):
    # every other protein held out would break it: the families really are families
    assert max(_largest_share(residues, families[1::2]) for residues in families[::2]) > 0.5


def test_every_protein_is_on_one_side(families):
    split = split_by_overlap(families, seed=1)
    assert sorted([*split.training, *split.held_out]) == list(range(len(families)))


def test_split_depends_on_data_and_seed_only(families):
    first, again, other = (split_by_overlap(families, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.held_out, again.held_out)
    assert first.held_out.tolist() != other.held_out.tolist()


def test_links_of_links_count_as_one_group():
    first, second, third = "ACDEFGHIKL", "MNPQRSTVWY", "LLKKAACCDD"
    groups = linked_groups([first, first + second, second + "W", third])
    assert groups[0] == groups[1] == groups[2] != groups[3]


def test_protein_without_a_5mer_always_trains():
    split = split_by_overlap(["ACD", "ACDEFGH", "W"], seed=0, held_out_share=1.0)
    assert split.training.tolist() == [0, 2]
    assert split.held_out.tolist() == [1]


@settings(max_examples=60)
@given(
    sequences=st.lists(st.text(alphabet="ACD", min_size=1, max_size=30), min_size=2, max_size=25).filter(
        lambda sequences: any(len(residues) >= 5 for residues in sequences)
    ),
    seed=st.integers(0, 100),
    share=st.floats(0.1, 0.9),
)
def test_property_holds_for_any_proteins(sequences, seed, share):
    split = split_by_overlap(sequences, seed=seed, held_out_share=share)
    training = [sequences[number] for number in split.training]
    assert len(split.held_out) <= share * len(sequences)
    for number in split.held_out:
        assert _largest_share(sequences[number], training) < 0.5
