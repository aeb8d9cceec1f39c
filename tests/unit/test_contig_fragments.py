"""Fragments read together give, to the bit, what each gives by itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.test_gene_finding import recoded_gene
from virnucpro.models.contigs import sequence_features
from virnucpro.models.contigs.fragments import Fragments, Groups, ranges
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import OTHER, encode, is_whole, masked, reverse_complement, words
from virnucpro.models.contigs.sequence_features import TABLES, SequenceFeatures

IS_VIRAL = np.array([False, True, True])
LENGTHS = (*range(13), 88, 89, 90, 91, 300, 301, 1500, 2100, 6002)


@pytest.fixture(scope="module")
def features():
    chooser = np.random.default_rng(0)
    tables = {table.name: chooser.integers(-99, 99, (table.slots, 3)).astype(np.int8) for table in TABLES}
    return SequenceFeatures(tables, IS_VIRAL)


def random_codes(chooser, length, *, unknown=0.0):
    codes = chooser.integers(0, 4, length).astype(np.uint8)
    return np.where(chooser.random(length) < unknown, np.uint8(OTHER), codes)


@pytest.fixture(scope="module")
def fragments():
    """Random letters of many lengths, some unknown; genes in which a stop of code 11 is a residue; one letter only."""
    chooser = np.random.default_rng(8)
    some = [random_codes(chooser, length, unknown=unknown) for unknown in (0, 0.01, 0.2) for length in LENGTHS]
    recoded = [f"CCTAACC{recoded_gene(stop, 11)}CC{recoded_gene(stop, 111)}" for stop in ("TGA", "TAG")]
    return [
        *some,
        *(encode(letters.encode()) for letters in recoded),
        encode(b"A" * 700),
        encode(b"N" * 50),
        encode(b""),
    ]


def test_many_fragments_have_the_features_that_each_has_alone(features, fragments, monkeypatch):
    alone = np.stack([features.of(codes) for codes in fragments])
    together = features.of_many(fragments)
    assert together.dtype == np.float32
    assert together.tobytes() == alone.tobytes()
    for pass_nt in (1, 700, 5000):
        monkeypatch.setattr(sequence_features, "PASS_NT", pass_nt)
        assert np.array_equal(features.of_many(fragments), alone)
    order = np.random.default_rng(1).permutation(len(fragments))
    assert np.array_equal(features.of_many([fragments[at] for at in order]), alone[order])
    assert features.of_many([]).shape == (0, features.dim)


def test_windows_of_a_contig_do_not_see_beyond_their_ends(features):
    """As tails of one contig, beside unknown letters, and over all of it."""
    codes = random_codes(np.random.default_rng(4), 6000)
    codes[1500:1600] = codes[4500] = OTHER
    windows = [codes[start : start + 1500] for start in range(0, 4501, 500)]
    alone = np.stack([features.of(np.array(window)) for window in [codes, *windows]])
    assert np.array_equal(features.of_many([codes, *windows]), alone)
    trimmed, beside_unknown = features.of_many([codes[1600:4500], codes[1500:4501]])
    genes = slice(168 + 64, 168 + 70)  # the longest open runs, in residues
    assert np.array_equal(trimmed[genes], beside_unknown[genes])


def test_reversed_fragments_have_the_same_features(features):
    chooser = np.random.default_rng(6)
    fragments = [random_codes(chooser, length, unknown=0.001) for length in (400, 1500, 1501, 3002, 5000)]
    fragments.append(np.concatenate([fragments[0], reverse_complement(fragments[0])]))
    reverse = [reverse_complement(codes) for codes in fragments]
    assert features.of_many(fragments).tobytes() == features.of_many(reverse).tobytes()


def test_a_single_unknown_letter_breaks_no_frame_and_ends_none_with_a_stop_and_two_do():
    gene = recoded_gene("CAA", 30)
    for at in range(6, len(gene) - 6):
        codes = encode(f"{gene[:at]}N{gene[at + 1 :]}".encode())
        for strand in (codes, reverse_complement(codes)):
            fragments = Fragments([strand, encode(gene.encode())])
            assert max(Genes.of(fragments).lengths_N[Genes.of(fragments).groups.fragment_X == 0]) >= len(gene) // 3 - 1
    broken = Genes.of(Fragments([encode(f"{gene[:45]}NN{gene[47:]}".encode())]))
    assert max(broken.lengths_N, default=0) < len(gene) // 3 - 10


def test_k_mers_of_nucleotides_include_no_unknown_letter():
    codes = encode(b"ACGTNACGTACG")
    fragments = Fragments([codes, encode(b"ACGT")])
    assert len(fragments.whole_words(4)[1]) == 1 + 4 + 1


@pytest.mark.parametrize(
    ("low", "is_masked"),
    [("A" * 90, True), ("AT" * 50, True), ("ACGGTCA" * 30, True), ("N" * 40, True), ("", False)],
)
def test_low_complexity_is_masked_on_both_strands_and_nothing_else(low, is_masked):
    chooser = np.random.default_rng(3)
    before, after = ("".join(chooser.choice(list("ACGT"), 600)) for _ in range(2))
    sequence = f"{before}{low}{after}"
    codes = masked(sequence.encode())
    assert bool((codes[610 : 590 + len(low)] == OTHER).all() and len(low)) == is_masked
    assert (codes[:580] != OTHER).all()
    assert (codes[620 + len(low) :] != OTHER).all()
    backward = masked(bytes(b"ACGTN"[code] for code in reverse_complement(encode(sequence.encode()))))
    np.testing.assert_array_equal(reverse_complement(backward), codes)
    assert masked(b"ACGTACG").tolist() == encode(b"ACGTACG").tolist()
    assert masked(b"").tolist() == []


def test_genes_of_many_fragments_are_those_of_each(fragments):
    together = Genes.of(Fragments(fragments))
    for fragment, codes in enumerate(fragments):
        alone, some = Genes.of(Fragments([codes])), together.groups.fragment_X == fragment
        assert np.array_equal(together.starts_N[some], alone.starts_N)
        assert np.array_equal(together.ends_N[some], alone.ends_N)
        assert np.array_equal(together.is_reverse_N[some], alone.is_reverse_N)
        assert together.code_P[fragment] == alone.code_P[0]
    assert set(together.code_P) == {0, 1, 2}


@pytest.mark.parametrize("k", range(1, 9))
def test_words_are_the_letters_as_digits(k):
    codes = random_codes(np.random.default_rng(k), 40, unknown=0.05)
    for length in (0, k - 1, k, 40):
        some = codes[:length]
        windows = [some[at : at + k] for at in range(max(length - k + 1, 0))]
        assert words(some, k).tolist() == [sum(int(c) % 4 * 4**n for n, c in enumerate(w[::-1])) for w in windows]
        assert is_whole(some, k).tolist() == [OTHER not in w for w in windows]


def test_statistics_of_groups_are_those_of_numpy():
    chooser = np.random.default_rng(2)
    counts = [0, 1, 2, 7, 8, 9, 0, 40, 200]
    groups = Groups(np.repeat(np.arange(len(counts)), counts), len(counts))
    whole, real = chooser.integers(-9, 9, sum(counts)), chooser.normal(size=sum(counts))
    table = chooser.normal(size=(sum(counts), 3))
    ends = np.cumsum(counts)
    for fragment, (end, count) in enumerate(zip(ends, counts, strict=True)):
        own = slice(end - count, end)
        if not count:
            assert (
                groups.means(real)[fragment]
                == groups.medians(whole)[fragment]
                == groups.deviations(real)[fragment]
                == 0
            )
            continue
        assert groups.sums(real)[fragment] == real[own].sum()
        assert groups.means(whole)[fragment] == whole[own].mean()
        assert groups.medians(whole)[fragment] == np.median(whole[own])
        assert groups.deviations(whole)[fragment] == whole[own].std()
        assert groups.deviations(real)[fragment] == real[own].std()
        assert np.array_equal(groups.deviations(table)[fragment], table[own].std(axis=0))
        assert np.array_equal(groups.reduced(np.maximum, table)[fragment], table[own].max(axis=0))
        assert groups.first_greatest(whole)[fragment] == end - count + whole[own].argmax()


def test_ranges_are_end_to_end():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)).tolist() == []
