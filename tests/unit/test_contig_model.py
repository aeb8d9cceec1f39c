"""What a contig's letters say, whose k-mers it has, and the networks that make one score of it."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.fakes import one_split
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.errors import WeightsError
from virnucpro.models.classifier_files.card import (
    CONTIG_WEIGHTS_NAME,
    ContigModelCard,
    locate_classifier,
    read_card,
)
from virnucpro.models.contigs.contig_model import CompositionModel, ContigModel, ContigWeights, Layer
from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import Genes
from virnucpro.models.contigs.nucleotide_codes import encode
from virnucpro.models.contigs.sequence_features import (
    COMPOSITION_COUNT,
    GENES_COUNT,
    TABLES,
    SequenceFeatures,
    kmers,
    open_runs,
)
from virnucpro.training.fitting.contig_training import (
    LabelledRecords,
    choose_temperature,
    count_kmers,
    features_out_of_fold,
)
from virnucpro.training.fitting.network_fitting import Examples, fit_networks
from virnucpro.training.fitting.suspect_fragments import SUSPECT, judge
from virnucpro.training.fitting.tree_fitting import fit_trees
from virnucpro.training.genomes.related import reverse_complement
from virnucpro.training.training_settings import ContigSettings, TreeSettings

GROUPS = 2
IS_VIRAL = np.array([False, True])
TREES = TreeSettings(trees=5, least_contigs=2)
SETTINGS = ContigSettings(folds=2, members=1, hidden_dims=(8, 4), most_epochs=3, batch_contigs=16, trees=TREES)


def letters_of(length, seed):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), length))


@pytest.fixture(scope="module")
def tables():
    chooser = np.random.default_rng(0)
    return {table.name: chooser.integers(-99, 99, (table.slots, GROUPS)).astype(np.int8) for table in TABLES}


@pytest.fixture(scope="module")
def weights(tables):
    chooser, inputs = np.random.default_rng(1), SequenceFeatures(tables, IS_VIRAL).dim
    shapes = ((4, inputs), (GROUPS, 4))
    layers = tuple(
        Layer(chooser.normal(0, 0.3, shape).astype("f2").astype("f4"), chooser.normal(size=shape[0]).astype("f4"))
        for shape in shapes
    )
    return ContigWeights(
        log_odds=tables,
        is_viral_G=IS_VIRAL,
        mean_I=np.zeros(inputs, dtype=np.float32),
        deviation_I=np.ones(inputs, dtype=np.float32),
        members=(layers,),
        trees=one_split(0, 0.01),
        temperature=1.5,
    )


@pytest.mark.parametrize("seed", range(5))
def test_both_strands_have_the_same_numbers(tables, seed):
    letters = letters_of(701, seed) + "NNRY" + letters_of(333, seed + 99)
    codes, reverse = (encode(strand.encode()) for strand in (letters, reverse_complement(letters)))
    longest = open_runs(Fragments([codes]))[0, 64:66]
    if longest[0] == longest[1]:
        pytest.fail("choose another seed: two runs share the greatest length")
    features = SequenceFeatures(tables, IS_VIRAL)
    np.testing.assert_allclose(features.of(codes), features.of(reverse), atol=1e-6)


def test_composition_is_counted_and_other_letters_are_not(tables):
    numbers = SequenceFeatures(tables, IS_VIRAL).of(encode(b"AAAAANAAAA"))
    assert numbers[0] == 1.0  # AAA and TTT: all five 3-mers without the N
    assert numbers[:32].sum() == pytest.approx(1)
    assert SequenceFeatures(tables, IS_VIRAL).of(encode(b"NNNN"))[:COMPOSITION_COUNT][:168].sum() == 0


@pytest.mark.parametrize("length", [0, 1, 2, 5, 8, 11, 74, 80])
def test_short_contigs_have_finite_numbers(tables, length):
    numbers = SequenceFeatures(tables, IS_VIRAL).of(encode(letters_of(length, 3).encode()))
    assert np.isfinite(numbers).all()


def test_residues_are_read_from_genes_and_windows_stay_within_them():
    gene = "TTAGCTAACCTGACCGCCTAC" * 8 + "TAA"
    codes = encode((gene + "CCATT" + gene + letters_of(200, 4)).encode())
    fragments = Fragments([codes])
    genes = Genes.of(fragments)
    assert len(genes.lengths_N) >= 2
    for table, (slots, counts, _) in zip(TABLES, kmers(fragments, genes), strict=True):
        assert (slots < table.slots).all()
        assert len(slots) == counts.sum()
        if table.is_protein:
            assert (counts == np.maximum(genes.lengths_N - table.span + 1, 0)).all()
        else:
            assert len(slots) == len(codes) - table.span + 1


def test_genes_are_judged_one_by_one(tables):
    units = ("TTAGCTAACCTGACCGCCTAC" * 8, "TTACCTAACCTGACCTCCTAC" * 8)  # stops in every other frame
    first, last = (encode(f"TAACATG{unit}TAAC".encode()) for unit in units)
    both = np.concatenate([first, last])
    assert list(Genes.of(Fragments([both])).lengths_N) == [57, 57]
    at = COMPOSITION_COUNT + GENES_COUNT + 3 * GROUPS + 1  # behind the means of the longest gene
    highest = slice(at, at + GROUPS)
    features = SequenceFeatures(tables, IS_VIRAL)
    alone = np.stack([features.of(codes)[highest] for codes in (first, last)])
    np.testing.assert_allclose(features.of(both)[highest], alone.max(axis=0), rtol=1e-6)


def test_a_model_is_read_as_it_was_written_and_broken_ones_are_refused(weights):
    model = ContigModel(ContigWeights.of_bytes(weights.to_bytes()))
    rows = np.stack([model.features.of(encode(letters_of(400, seed).encode())) for seed in range(6)])
    nothing, ones = np.zeros((6, 0), dtype=np.float32), np.ones(6, dtype=np.int64)
    scores = model.probabilities(rows, nothing, nothing, ones, ones)
    assert scores.dtype == np.float32
    assert ((scores > 0) & (scores < 1)).all()
    assert (scores == ContigModel(weights).probabilities(rows, nothing, nothing, ones, ones)).all()
    one_by_one = [model.probabilities(rows[[n]], nothing[:1], nothing[:1], ones[:1], ones[:1])[0] for n in range(6)]
    np.testing.assert_allclose(one_by_one, scores, rtol=1e-6)
    assert not model.uses_embeddings
    first, *others = weights.members[0]
    for broken in (
        replace(weights, members=((replace(first, weight=first.weight.ravel()), *others),)),
        replace(weights, members=((replace(first, bias=first.bias[None]), *others),)),
        replace(weights, is_viral_G=weights.is_viral_G[None]),
        replace(weights, temperature=0.0),
        replace(weights, deviation_I=weights.deviation_I * 0),
        replace(weights, is_viral_G=np.array([True, True])),
        replace(weights, mean_I=weights.mean_I[:-1]),
        replace(weights, members=()),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            ContigWeights.of_bytes(broken.to_bytes())
    layer = Layer(weights.members[0][0].weight[:, 9:], weights.members[0][0].bias)
    of_before = replace(
        weights,
        mean_I=weights.mean_I[9:],
        deviation_I=weights.deviation_I[9:],
        members=((layer, weights.members[0][1]),),
    )
    with pytest.raises(ValueError, match="train it again"):
        ContigModel(ContigWeights.of_bytes(of_before.to_bytes()))
    with pytest.raises(ValueError, match="no contig model"):
        ContigWeights.of_bytes(b"something else")


def header(**shapes):
    """The beginning of a file of tensors of such shapes."""
    text = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    return len(text).to_bytes(8, "little") + text


NO_HEADERS_OF_CONTIG_MODELS = {
    "no gzip": (b"something else", "incorrect header"),
    "nothing": (gzip.compress(b""), "no contig model"),
    "no classes": (gzip.compress(header(mean=[4000])), "is_viral"),
    "too few inputs": (gzip.compress(header(mean=[40], is_viral=[19])), "train it again"),
    "a number as text": (gzip.compress(header(mean=[4000], is_viral=["19"])), "no contig model"),
    "two dimensions": (gzip.compress(header(mean=[4000], is_viral=[19, 1])), "too many values"),
    "a bomb": (gzip.compress((1 << 60).to_bytes(8, "little") + b"[" * (1 << 22)), "no contig model"),
    "a list": (gzip.compress((2).to_bytes(8, "little") + b"[]"), "no contig model"),
}


@pytest.mark.parametrize("case", NO_HEADERS_OF_CONTIG_MODELS)
def test_what_a_contig_model_reads_is_refused_where_its_file_does_not_say_it(tmp_path, case):
    content, says = NO_HEADERS_OF_CONTIG_MODELS[case]
    (tmp_path / CONTIG_WEIGHTS_NAME).write_bytes(content)
    of_file = ContigModelCard(weights_sha256=hashlib.sha256(content).hexdigest())
    card = replace(read_card(locate_classifier(DEFAULT_CLASSIFIER)), contig_model=of_file)
    with pytest.raises(WeightsError, match=says):
        CompositionModel.of(tmp_path, card)


def test_a_contig_model_of_somebody_else_is_refused_before_a_run_begins(tmp_path):
    folder = locate_classifier(DEFAULT_CLASSIFIER)
    tensors = load(gzip.decompress((folder / CONTIG_WEIGHTS_NAME).read_bytes()))
    content = gzip.compress(save(tensors | {"deviation": 0 * tensors["deviation"]}), 1)
    (tmp_path / CONTIG_WEIGHTS_NAME).write_bytes(content)
    of_file = ContigModelCard(weights_sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(WeightsError, match="do not fit together"):
        CompositionModel.of(tmp_path, replace(read_card(folder), contig_model=of_file))


def test_what_the_bundled_contig_model_reads_is_known_from_the_beginning_of_its_file():
    folder = locate_classifier(DEFAULT_CLASSIFIER)
    found = CompositionModel.of(folder, read_card(folder))
    assert found is not None
    assert found.searches_proteins
    assert found.load().homology is not None


def records(seeds, *, label):
    return [(encode(letters_of(3000, seed).encode()), label, f"genome {seed}") for seed in seeds]


def as_labelled(rows):
    return LabelledRecords(
        codes=[codes for codes, _, _ in rows],
        is_virus_C=np.array([label for _, label, _ in rows]),
        groups=["phages" if label else "hosts" for _, label, _ in rows],
        sources=[source for _, _, source in rows],
    )


def test_a_contig_is_not_looked_up_in_tables_that_have_seen_its_genome():
    genomes = as_labelled([*records(range(4), label=True), *records(range(10, 14), label=False)])
    names = genomes.group_names()
    counts, fold_of = count_kmers(genomes, genomes.group_numbers(names), names, SETTINGS)
    assert {fold for source, fold in fold_of.items()} == {0, 1}
    seen = np.stack([SequenceFeatures(counts.log_odds(), IS_VIRAL).of(codes) for codes in genomes.codes])
    unseen = features_out_of_fold(genomes, counts, fold_of, IS_VIRAL)
    (place,) = [n for n, table in enumerate(TABLES) if table.name == "residues_4"]
    at = (
        COMPOSITION_COUNT
        + GENES_COUNT
        + sum(5 * GROUPS + 6 if t.is_protein else 2 * GROUPS + 1 for t in TABLES[:place])
    )
    own = genomes.group_numbers(names)
    rows = np.arange(len(own))
    assert (seen[rows, at + own] > 0.2).all()  # each k-mer is in one genome: two pseudo counts hold it down
    assert (abs(unseen[rows, at + own]) < 0.05).all()


def test_weights_that_float16_cannot_hold_are_not_written(weights):
    layer, last = weights.members[0]
    huge = Layer(np.full_like(layer.weight, np.inf), layer.bias)  # as rounding makes them
    with pytest.raises(ValueError, match="give no score"):
        replace(weights, members=((huge, last),)).to_bytes()


def test_the_same_contigs_give_the_same_networks_and_what_can_be_told_apart_is():
    chooser = np.random.default_rng(5)
    group = chooser.integers(0, GROUPS, 400)
    x = (chooser.normal(size=(400, 5)) + 2 * group[:, None]).astype(np.float32)
    training, validation = (Examples(x_CI=x[some], group_C=group[some]) for some in (slice(300), slice(300, 400)))
    settings = replace(SETTINGS, most_epochs=30)
    first, again = (fit_networks(training, validation, IS_VIRAL, settings) for _ in range(2))
    for one, other in zip(first.members[0], again.members[0], strict=True):
        assert (one.weight == other.weight).all()
        assert (one.bias == other.bias).all()
    assert first.validation_loss < 0.3
    assert ((first.validation_log_odds_C > 0) == (group[300:] == 1)).mean() > 0.9


def viral_elements(elements, fragments=1200):
    """Return inputs and labels of fragments, the last of which look viral and are labelled as not viral."""
    chooser = np.random.default_rng(8)
    is_virus = np.arange(fragments) % 2 == 0
    looks_viral = is_virus | (np.arange(fragments) >= fragments - 2 * elements)
    x = (chooser.normal(size=(fragments, 5)) + 5 * looks_viral[:, None]).astype(np.float32)
    return x, is_virus, looks_viral


def test_fragments_that_look_viral_by_trees_that_have_not_seen_their_genome_are_suspect():
    x, is_virus, looks_viral = viral_elements(5)
    genome = np.arange(len(x)) // 6 % 8
    score = judge(x, is_virus, genome, TreeSettings(least_contigs=20))
    assert (~is_virus & (score >= SUSPECT)).tolist() == (~is_virus & looks_viral).tolist()


def test_a_fragment_without_weight_trains_neither_networks_nor_trees():
    x, is_virus, looks_viral = viral_elements(200)
    suspect = ~is_virus & looks_viral
    weight = np.where(suspect, 0, 1).astype(np.float32)
    both = Examples(x_CI=x, group_C=is_virus.astype(np.int64))
    settings = replace(SETTINGS, most_epochs=30, dropout=0.0, input_dropout=0.0)
    networks = [fit_networks(both, both, IS_VIRAL, settings, weight_C=w).validation_log_odds_C for w in (None, weight)]
    trees = [fit_trees(x, is_virus, TREES, weight_C=w).log_odds(x) for w in (None, weight)]
    for seen, unseen in (networks, trees):
        assert unseen[suspect].mean() > seen[suspect].mean() + 0.2


def test_the_temperature_takes_back_what_is_too_sure():
    chooser = np.random.default_rng(6)
    log_odds = chooser.normal(scale=2, size=20_000)
    is_virus = chooser.random(20_000) < 1 / (1 + np.exp(-log_odds))
    assert choose_temperature(3 * log_odds, is_virus) == pytest.approx(3, rel=0.1)
