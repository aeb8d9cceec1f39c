"""Homology to known proteins: alignments, the search, and what is made of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from virnucpro.errors import StoppedError
from virnucpro.models.contigs import protein_search
from virnucpro.models.contigs.contig_model import ContigWeights
from virnucpro.models.contigs.homology import SEARCHED_NT, Homology, ends_of, is_searched
from virnucpro.models.contigs.local_alignment import (
    BAND,
    GAP_EXTEND,
    GAP_OPEN,
    REACH,
    SEPARATOR,
    SUBSTITUTIONS,
    LaidOut,
    align,
    identities,
)
from virnucpro.models.contigs.nucleotide_codes import BACTERIAL, RESIDUES, encode, reverse_complement
from virnucpro.models.contigs.protein_search import KnownProteins
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR
from virnucpro.training.fitting import homology_fitting
from virnucpro.training.fitting.contig_training import LabelledRecords, count_kmers
from virnucpro.training.fitting.group_left_out import leave_each_group_out
from virnucpro.training.fitting.homology_fitting import choose_proteins, fit_homology, fit_regression
from virnucpro.training.training_settings import ContigSettings, TreeSettings

START, STOP = encode(b"ATG"), encode(b"TAA")
RECORDS = ("A1 a phage", "B2", "C3 a host")


def test_a_search_tells_its_share_up_to_the_end(known, proteins, chooser, monkeypatch):
    monkeypatch.setattr(protein_search, "PASS_NT", 300)
    monkeypatch.setattr(protein_search, "_PLACES_AT_ONCE", 100)
    shares = []
    codes = [coding(protein, chooser) for protein in proteins]
    hits = known.search(codes, on_share=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 4
    assert shares[-1] == pytest.approx(1)
    assert np.array_equal(hits.proteins, known.search(codes).proteins)


def plain_alignment(first, second):
    """Return the best score of a local alignment, cell by cell (Gotoh 1982)."""
    scores, down, best = np.zeros(len(second) + 1), np.full(len(second) + 1, -np.inf), 0
    for one in first:
        diagonal, right = 0.0, -np.inf
        for at, other in enumerate(second, start=1):
            down[at] = max(scores[at] - GAP_OPEN, down[at] - GAP_EXTEND)
            right = max(scores[at - 1] - GAP_OPEN, right - GAP_EXTEND)
            found = max(0, diagonal + int(SUBSTITUTIONS[(SEPARATOR + 1) * int(one) + int(other)]), down[at], right)
            diagonal, scores[at] = scores[at], found
            best = max(best, found)
    return best


def changed(protein, chooser, replaced, inserted=0):
    """Return a protein with so many residues replaced, and so many set in."""
    protein = protein.copy()
    protein[chooser.integers(0, len(protein), replaced)] = chooser.integers(0, len(RESIDUES), replaced)
    at = len(protein) // 3
    return np.insert(protein, at, chooser.integers(0, len(RESIDUES), inserted)).astype(np.uint8)


def coding(protein, chooser):
    """Return codes of nucleotides that are translated to the protein."""
    residues = BACTERIAL.residue_of_codon[:64]
    codons = [chooser.choice(np.flatnonzero(residues == residue)) for residue in protein]
    return np.array([[codon >> 4, codon >> 2 & 3, codon & 3] for codon in codons], dtype=np.uint8).ravel()


@pytest.fixture
def chooser():
    return np.random.default_rng(5)


@pytest.fixture
def proteins(chooser):
    return [chooser.integers(0, len(RESIDUES), length).astype(np.uint8) for length in (120, 90, 200, 150)]


@pytest.fixture
def known(proteins):
    lengths = np.array([len(protein) for protein in proteins], dtype=np.int32)
    record = np.array([0, 1, 1, 2], dtype=np.int32)
    return KnownProteins(np.concatenate(proteins), lengths, np.array([True, False, True, False]), record, RECORDS)


def test_the_matrix_is_that_of_known_pairs():
    score = {
        pair: SUBSTITUTIONS[(SEPARATOR + 1) * RESIDUES.index(pair[0]) + RESIDUES.index(pair[1])]
        for pair in (b"WW", b"CC", b"IV", b"VI", b"DW", b"KR", b"AA", b"YF", b"PP")
    }
    assert score == {b"WW": 11, b"CC": 9, b"IV": 3, b"VI": 3, b"DW": -4, b"KR": 2, b"AA": 4, b"YF": 3, b"PP": 7}


@pytest.mark.parametrize("inserted", [0, 1, 4, 9])
def test_an_alignment_scores_as_cell_by_cell(chooser, inserted):
    for replaced in (0, 10, 25):
        first = chooser.integers(0, len(RESIDUES), 60).astype(np.uint8)
        second = changed(first, chooser, replaced, inserted)
        places = [np.array([REACH + BAND + at]) for at in (30, 30 + inserted)]
        found = align(*(LaidOut.of(x, np.array([len(x)])) for x in (first, second)), *places)
        assert found.tolist() == [plain_alignment(first, second)]


@pytest.mark.parametrize(("replaced", "inserted"), [(0, 0), (10, 0), (0, 4)])
def test_identities_are_of_all_columns_of_the_alignment(chooser, replaced, inserted):
    first = chooser.integers(0, len(RESIDUES), 60).astype(np.uint8)
    second = changed(first, chooser, replaced, inserted)
    same = 60 if inserted else int((first == second).sum())
    places = [np.array([REACH + BAND + at]) for at in (40, 40 + inserted)]
    (found,) = identities(*(LaidOut.of(x, np.array([len(x)])) for x in (first, second)), *places)
    assert found == pytest.approx(same / (60 + inserted), abs=0.04), "its ends may be left out"


def test_no_pairs_have_no_scores():
    nothing = np.zeros(0, dtype=np.int64)
    empty = LaidOut.of(np.zeros(0, dtype=np.uint8), nothing)
    assert align(empty, empty, nothing, nothing).tolist() == []


def test_an_alignment_ends_with_the_protein_whatever_follows(chooser):
    both = chooser.integers(0, len(RESIDUES), (2, 60)).astype(np.uint8)
    laid_out = LaidOut.of(both.ravel(), np.array([60, 60]))
    place = np.array([REACH + BAND + 30])
    assert align(laid_out, laid_out, place, place).tolist() == [plain_alignment(both[0], both[0])]


def test_the_codons_of_this_test_are_translated_back(chooser, proteins):
    letters = bytes(b"ACGT"[code] for code in coding(proteins[1], chooser))
    codes = encode(letters).reshape(-1, 3).astype(int)
    np.testing.assert_array_equal(BACTERIAL.residue_of_codon[codes @ [16, 4, 1]], proteins[1])


def test_relatives_are_found_by_their_kind_and_on_both_strands_alike(known, proteins, chooser):
    relatives = [coding(changed(protein, chooser, len(protein) // 3, 2), chooser) for protein in proteins]
    random = chooser.integers(0, 4, 2_000).astype(np.uint8)
    both = np.concatenate([relatives[0], random[:31], relatives[1]])
    contigs = [*relatives, random, both, random[:0], np.full(500, 4, dtype=np.uint8)]
    hits = known.search(contigs)
    assert hits.proteins.tolist() == [[0, -1], [-1, 1], [2, -1], [-1, 3], [-1, -1], [0, 1], [-1, -1], [-1, -1]]
    assert ((hits.bits > 0) == (hits.proteins >= 0)).all()
    assert ((hits.identities > 0.4) == (hits.proteins >= 0)).all()
    for column, backward in zip(hits, known.search([reverse_complement(codes) for codes in contigs]), strict=True):
        np.testing.assert_array_equal(column, backward)


def test_bits_are_of_the_whole_alignment_and_a_hit_is_rare_by_chance(known, proteins, chooser):
    relative = changed(proteins[1], chooser, 20, 3)
    codes = coding(relative, chooser)
    hits = known.search([codes, np.concatenate([codes, np.full(1_000_000, 4, dtype=np.uint8)])])
    bits = (0.243 * plain_alignment(relative, proteins[1]) - np.log(0.024)) / np.log(2)
    assert hits.bits[:, 1] == pytest.approx(bits)
    expected = 2 * len(codes) * len(known.residues_R) / 2 ** hits.bits[0, 1]
    assert hits.excess[0, 1] == pytest.approx(np.log2(1e-3 / expected))
    assert hits.excess[1, 1] < hits.excess[0, 1], "in more nucleotides such a score is found by chance more often"


def test_hits_depend_neither_on_the_others_nor_on_how_many_are_searched_at_once(known, proteins, chooser, monkeypatch):
    contigs = [coding(changed(protein, chooser, 20), chooser) for protein in proteins * 3]
    together = known.search(contigs)
    assert (together.proteins.max(axis=1) >= 0).all()
    alone = [known.search([one]) for one in contigs]
    for name in ("PASS_NT", "_PLACES_AT_ONCE", "_PAIRS_AT_ONCE"):
        monkeypatch.setattr(protein_search, name, 100)
    again = known.search(contigs)
    for number, column in enumerate(together):
        np.testing.assert_array_equal(np.concatenate([one[number] for one in alone]), column)
        np.testing.assert_array_equal(again[number], column)


def test_of_a_long_contig_both_ends_are_searched(known, proteins, chooser):
    middle = chooser.integers(0, 4, SEARCHED_NT).astype(np.uint8)
    ends = [coding(protein, chooser) for protein in proteins[:2]]
    long = np.concatenate([ends[0], middle, ends[1]])
    hits = known.search([ends_of(long)])
    assert hits.proteins.tolist() == [[0, 1]]
    np.testing.assert_array_equal(reverse_complement(ends_of(long)), ends_of(reverse_complement(long)))
    assert ends_of(middle) is middle


def test_a_stop_ends_the_search(known):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        known.search([np.zeros(100, dtype=np.uint8)], stop)


def test_proteins_that_do_not_fit_together_are_refused(known):
    known.check()
    residues, lengths, is_viral, record = known.residues_R, known.lengths_N, known.is_viral_N, known.record_N
    for parts in (
        (residues[1:], lengths, is_viral, record, RECORDS),
        (residues, lengths[1:], is_viral, record, RECORDS),
        (residues, lengths, is_viral[1:], record, RECORDS),
        (residues, lengths, is_viral, record[1:], RECORDS),
        (residues, lengths, is_viral, record, RECORDS[1:]),
        (residues, lengths, is_viral, record - 1, RECORDS),
        (residues, lengths, is_viral, record, ("a\nb", *RECORDS[1:])),
        (residues.astype(np.int64), lengths, is_viral, record, RECORDS),
        (residues, lengths.astype(np.int64), is_viral, record, RECORDS),
        (np.full_like(residues, len(RESIDUES)), lengths, is_viral, record, RECORDS),
        (residues, lengths + np.array([1, -1, 200, -200], dtype=np.int32), is_viral, record, RECORDS),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            KnownProteins(*parts).check()


def test_proteins_come_back_from_their_tensors(known):
    again = KnownProteins.of_tensors(known.tensors())
    assert again.records == RECORDS
    for name in ("residues_R", "lengths_N", "is_viral_N", "record_N"):
        np.testing.assert_array_equal(getattr(again, name), getattr(known, name))


def test_contigs_with_a_hit_and_without_one_are_judged_apart_and_cellular_ones_not_at_all(known, proteins, chooser):
    homology = Homology(known, np.array([1.0, 0, 0.5, -0.5, 1, 0]), np.array([1.0, 0, -2]))
    homology.check()
    scores = np.array([0.5, 0.5, 0.995, 0.005, np.nan, 0.5], dtype=np.float32)
    contigs = [coding(proteins[number], chooser) for number in (0, 1, 1, 0, 0)] + [np.zeros(90, dtype=np.uint8)]
    judged = homology.judge(scores, contigs)
    assert judged.scores.dtype == np.float32
    assert is_searched(scores).tolist() == judged.searched.tolist() == [True, True, True, False, False, True]
    np.testing.assert_array_equal(judged.scores[3:5], scores[3:5])
    assert judged.scores[0] > 0.9
    assert judged.scores[1] < 0.1
    assert judged.scores[2] < scores[2]
    assert judged.scores[5] == pytest.approx(1 / (1 + np.exp(2))), "it resembles nothing"
    assert judged.hits.proteins.tolist() == [[0, -1], [-1, 1], [-1, 1], [-1, -1]]
    for weights in ((homology.with_hits_J[1:], homology.without_J), (homology.with_hits_J, np.full(3, np.nan))):
        with pytest.raises(ValueError, match="do not fit"):
            Homology(known, *weights).check()
    with pytest.raises(ValueError, match="train it again"):
        Homology.of_tensors({"weights": np.zeros(6)})


def test_the_regression_is_at_the_minimum_and_weighs_both_labels_alike(chooser):
    x = np.column_stack([chooser.normal(3, 2, 900), chooser.normal(0, 50, 900), np.ones(900)])
    is_virus = 1 / (1 + np.exp(3 - 2 * x[:, 0])) > chooser.random(900)
    even = np.where(is_virus, 0.5 / is_virus.sum(), 0.5 / (~is_virus).sum())
    weights = fit_regression(x, is_virus, even)
    rarer = np.concatenate([np.flatnonzero(is_virus), np.flatnonzero(~is_virus), np.flatnonzero(~is_virus)])
    halved = np.where(is_virus, even, even / 2)[rarer]
    np.testing.assert_allclose(fit_regression(x[rarer], is_virus[rarer], 3 * halved), weights, rtol=0.01)
    p = 1 / (1 + np.exp(-(x @ weights)))
    assert abs(p[is_virus].mean() - 1 + p[~is_virus].mean()) < 0.01, "both labels weigh the same"
    assert ((p > 0.5) == is_virus).mean() > 0.85
    one_label = fit_regression(x, np.ones(900, dtype=bool), np.ones(900))
    assert np.isfinite(one_label).all()
    assert (x @ one_label > 0).all()


def test_a_file_that_would_fill_the_memory_does_not_load(monkeypatch):
    data = (BUNDLED_WEIGHTS_DIR / "virnucpro-tiny" / "contig_model.safetensors.gz").read_bytes()
    weights = ContigWeights.of_bytes(data)
    assert weights.homology is not None
    monkeypatch.setattr("virnucpro.models.contigs.contig_model._MOST_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="no contig model"):
        ContigWeights.of_bytes(data)


def genomes_of(proteins, chooser):
    spacers = [chooser.integers(0, 4, 40).astype(np.uint8) for _ in proteins]
    return LabelledRecords(
        codes=[
            np.concatenate([gap, START, coding(x, chooser), STOP, gap])
            for x, gap in zip(proteins, spacers, strict=True)
        ],
        is_virus_C=np.arange(len(proteins)) % 2 == 0,
        groups=["g"] * len(proteins),
        sources=[str(number) for number in range(len(proteins))],
        names=[f"G{number} genome" for number in range(len(proteins))],
    )


def test_proteins_are_drawn_from_likely_genes_up_to_a_limit(proteins, chooser, monkeypatch):
    genomes = genomes_of(proteins, chooser)
    every = choose_proteins(genomes, seed=1)
    every.check()
    of_genome = every.record_N
    assert every.records == tuple(genomes.names)
    assert (every.is_viral_N == genomes.is_virus_C[of_genome]).all()
    by_genome = [every.take(of_genome == number) for number in range(len(proteins))]
    assert b"".join(one.residues_R.tobytes() for one in by_genome) == every.residues_R.tobytes()
    found = zip(proteins, by_genome, strict=True)
    assert sum(protein[30:].tobytes() in mine.residues_R.tobytes() for protein, mine in found) >= 3
    assert len(every.lengths_N) >= len(proteins)
    text = every.residues_R.tobytes()
    assert sum(protein[30:].tobytes() in text for protein in proteins) >= 3, "one may be hidden by another frame"
    assert (every.lengths_N >= protein_search.SHORTEST_PROTEIN).all()
    monkeypatch.setattr(homology_fitting, "MOST_RESIDUES", 300)
    fewer = choose_proteins(genomes, seed=1)
    assert 0 < len(fewer.residues_R) <= 300
    assert choose_proteins(genomes, seed=1).residues_R.tobytes() == fewer.residues_R.tobytes()


def test_relatives_of_a_longer_protein_are_not_kept(proteins, chooser):
    near, far = changed(proteins[2][:100], chooser, 3), changed(proteins[2][:100], chooser, 60)
    alone = choose_proteins(genomes_of(proteins, chooser), seed=1)
    for protein, is_kept in ((near, False), (far, True)):
        text = choose_proteins(genomes_of([*proteins, protein], chooser), seed=1).residues_R.tobytes()
        assert (protein[20:60].tobytes() in text) == is_kept
    assert proteins[2][20:60].tobytes() in alone.residues_R.tobytes()


def test_homology_is_fitted_on_contigs_that_are_searched_if_there_are_enough(proteins, chooser, monkeypatch):
    known = choose_proteins(genomes_of(proteins, chooser), seed=1)
    relatives = [coding(changed(proteins[n % 4], chooser, 30), chooser) for n in range(60)]
    is_virus, scores = np.arange(60) % 2 == 0, np.full(60, 0.5, dtype=np.float32)
    contigs = LabelledRecords(codes=relatives, is_virus_C=is_virus, groups=["a", "b"] * 30, sources=["s"] * 60)
    assert fit_homology(known, contigs, scores) is None
    monkeypatch.setattr(homology_fitting, "LEAST_CONTIGS", 20)
    homology = fit_homology(known, contigs, scores)
    homology.check()
    assert ((homology.judge(scores, relatives).scores > 0.5) == is_virus).all()
    cellular = np.where(np.arange(60) < 25, 0.5, 0).astype(np.float32)
    assert fit_homology(known, contigs, cellular) is None


def test_a_group_that_is_left_out_is_not_compared_with_its_own_proteins(proteins, chooser):
    names = [(False, "host"), (True, "first"), (True, "second")]
    seen, like = ["host", "first", "second"] * 20, {"host": 0, "first": 1, "second": 1}

    def fragments(groups):
        """Fragments of both viral groups resemble a protein of the first one."""
        return LabelledRecords(
            codes=[coding(changed(proteins[like[group]], chooser, 20), chooser) for group in groups],
            is_virus_C=np.array([group != "host" for group in groups]),
            groups=groups,
            sources=[f"{group}_{at % 4}" for at, group in enumerate(groups)],
        )

    training, test = fragments(seen), fragments(seen)
    counted = count_kmers(training, training.group_numbers(names), names, ContigSettings(folds=2))
    lengths = np.array([len(protein) for protein in proteins[:2]], dtype=np.int32)
    record = np.array([0, 1], dtype=np.int32)
    known = KnownProteins(np.concatenate(proteins[:2]), lengths, np.array([False, True]), record, ("a", "b"))
    by_viral = Homology(known, np.array([0, 0, 2.0, 0, 0, -5.0]), np.array([0, 0, -5.0]))
    settings = TreeSettings(trees=1, least_contigs=2, learning_rate=1e-6)
    found, fitted = leave_each_group_out(names, counted, training, test, settings, (by_viral, np.array([0, 1])))
    assert fitted.with_hits_J is by_viral.with_hits_J
    assert found.keys() == {"first", "second"}
    assert found["second"]["auroc"] == 1.0
    assert found["first"]["auroc"] == 0.5
