"""Pieces, training, rules and cards of a classifier, each against what it promises."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from virnucpro.models.classifier import is_virus, load_classifier
from virnucpro.pipeline.contig_rule import RULE
from virnucpro.training import rule_evaluation
from virnucpro.training.classifier_publication import TrainedClassifier, publish_classifier, score_frames
from virnucpro.training.contig_rules import RULES
from virnucpro.training.frame_data import (
    MOST_COVERAGE,
    SHORT_SHARE,
    SHORTEST_NT,
    FrameSet,
    cut_pieces,
    without_relatives,
)
from virnucpro.training.frame_training import LabelledFrames, train_classifier, validation_loss
from virnucpro.training.genomes import Genome, GenomeSplit, reverse_complement
from virnucpro.training.known_contigs import read_truth
from virnucpro.training.metrics import auroc
from virnucpro.training.training_settings import ClassifierSettings

WIDTH = 256


def letters(num_nt, seed):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), num_nt))


def genome(name, its_letters, source=None, file="train_virus_x.fna.gz"):
    return Genome(name, source or name, its_letters, file)


# --- pieces ----------------------------------------------------------------------------------------------------------


def test_pieces_are_of_either_strand_of_the_genomes_and_as_long_as_promised():
    genomes = [genome("a", letters(40_000, 1)), genome("b", letters(40_000, 2))]
    pieces = cut_pieces(genomes, 120, 500, np.random.default_rng(3))
    whole = " ".join(one.letters for one in genomes)
    forward = [piece in whole for piece in pieces]
    assert all(is_in or reverse_complement(piece) in whole for is_in, piece in zip(forward, pieces, strict=True))
    assert 0.3 < np.mean(forward) < 0.7
    lengths = np.array([len(piece) for piece in pieces])
    assert lengths.max() == 500
    assert lengths.min() >= SHORTEST_NT
    assert np.mean(lengths < 500) == pytest.approx(SHORT_SHARE, abs=0.12)
    again = cut_pieces(genomes, 120, 500, np.random.default_rng(3))
    assert pieces == again


def test_every_source_gives_as_many_pieces_as_far_as_its_letters_go():
    genomes = [genome("long", "A" * 100_000), genome("1", "C" * 2_000, "two"), genome("2", "G" * 2_000, "two")]
    genomes.append(genome("tiny", "T" * (SHORTEST_NT - 1)))
    found = Counter("long" if set(piece) <= set("AT") else "two" for piece in cut_pieces(genomes, 20, 500, _random()))
    assert found == {"long": 10, "two": 10}
    everything = cut_pieces(genomes, 10_000, 500, _random())
    assert sum(len(piece) for piece in everything) <= MOST_COVERAGE * 104_000 + 2 * 500
    assert not any(set(piece) <= {"T"} and len(piece) < SHORTEST_NT for piece in everything)


def test_pieces_with_other_letters_are_dropped():
    pieces = cut_pieces([genome("a", letters(3_000, 5) + "N" + letters(3_000, 6))], 1_000, 500, _random())
    assert pieces
    assert all(set(piece) <= set("ACGT") for piece in pieces)


def test_relatives_of_a_reference_are_left_out_directly_or_through_others():
    base, other = letters(6_000, 7), letters(6_000, 8)
    near = base[:3_000] + other[:3_000]
    genomes = [
        genome("itself, other strand", reverse_complement(base)),
        genome("half of it", near),
        genome("related to the half", other),
        genome("of that one's assembly", letters(3_000, 9), source="related to the half"),
        genome("unrelated", letters(6_000, 10)),
    ]
    left, related = without_relatives(genomes, [genome("reference", base)])
    assert [one.accession for one in left] == ["unrelated"]
    assert [one.accession for one in related] == [one.accession for one in genomes[:4]]


def _random():
    return np.random.default_rng(4)


# --- training --------------------------------------------------------------------------------------------------------


def _frames(num, seed, shift=0.3):
    random = np.random.default_rng(seed)
    viral = random.random(num) < 0.3
    features = random.normal(size=(num, WIDTH)) + shift * np.where(viral, 1, -1)[:, None]
    return LabelledFrames(features_FD=features.astype(np.float32), is_virus_F=viral)


@pytest.fixture
def trained(one_thread):
    settings = ClassifierSettings(hidden_dim=8, most_epochs=6, seed=5)
    training, validation = _frames(1025, 1), _frames(400, 2)  # a last batch of one frame
    return train_classifier(training, validation, settings), training, validation, settings


def test_a_classifier_learns_what_can_be_learnt_and_has_the_weights_of_its_best_pass(trained):
    (model, outcome), _, validation, _ = trained
    scores = score_frames(model, validation.features_FD)
    assert auroc(scores.astype(float), validation.is_virus_F) > 0.95
    assert 1 <= outcome.best_epoch <= outcome.epochs <= 6
    assert outcome.validation_loss == validation_loss(model, validation) < math.log(2) / 2


def test_the_same_seed_gives_the_same_weights_and_another_one_others(trained):
    (model, _), training, validation, settings = trained
    same, _ = train_classifier(training, validation, settings)
    other, _ = train_classifier(training, validation, ClassifierSettings(hidden_dim=8, most_epochs=6, seed=6))
    weights = [one.hidden_layer.weight.detach().numpy() for one in (model, same, other)]
    np.testing.assert_array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_training_stops_when_held_out_genomes_no_longer_gain(one_thread):
    training, noise = _frames(600, 1, shift=0), _frames(400, 2, shift=0)
    settings = ClassifierSettings(hidden_dim=8, patience_epochs=3)
    model, outcome = train_classifier(training, noise, settings)
    assert outcome.epochs == outcome.best_epoch + 3 < settings.most_epochs
    assert outcome.validation_loss == validation_loss(model, noise)


# --- rules -----------------------------------------------------------------------------------------------------------


# two chunks, of two frames and of none; no chunk at all; three chunks of one frame each
P_VIRUS = np.array([0.9, 0.2, 0.6, 0.7, 0.4], dtype=np.float32)
FRAMES, CHUNKS = np.array([2, 0, 1, 1, 1]), np.array([2, 0, 3])


def _logit(*values):
    return np.mean([math.log(p / (1 - p)) for p in values])


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("frames' mean log-odds", _logit(0.9, 0.2), _logit(0.6, 0.7, 0.4)),
        (
            "frames' mean log-odds times the root of their number",
            _logit(0.9, 0.2) * math.sqrt(2),
            _logit(0.6, 0.7, 0.4) * math.sqrt(3),
        ),
        (RULE, _logit(0.9, 0.2) * math.sqrt(2), _logit(0.6, 0.7, 0.4) * math.sqrt(3)),
        ("chunks' mean log-odds", _logit(0.9, 0.2), _logit(0.6, 0.7, 0.4)),
        (
            "chunks' mean log-odds times the root of their number",
            _logit(0.9, 0.2),
            _logit(0.6, 0.7, 0.4) * math.sqrt(3),
        ),
        ("chunks' mean log-odds times n / (n + 1)", _logit(0.9, 0.2) / 2, _logit(0.6, 0.7, 0.4) * 3 / 4),
        ("frames' mean P", _logit(0.55), _logit(1.7 / 3)),
        ("chunks' mean highest P", _logit(0.9), _logit(1.7 / 3)),
        ("share of viral chunks", math.inf, _logit(2 / 3)),
    ],
)
def test_a_rule_does_what_its_name_says(name, first, last):
    found = RULES[name](P_VIRUS, FRAMES, CHUNKS)
    np.testing.assert_allclose(found[[0, 2]], [1 / (1 + math.exp(-first)), 1 / (1 + math.exp(-last))], rtol=1e-6)
    assert np.isnan(found[1])


# --- what is published -----------------------------------------------------------------------------------------------


def test_what_is_published_loads_and_says_what_was_measured(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(rule_evaluation, "BOOTSTRAP_SAMPLES", 20)
    (model, outcome), _, validation, settings = trained
    file = tmp_path / "train_virus_x.fna.gz"
    file.write_bytes(b"x")
    contigs = [f"c{number}" for number in range(400)]
    ones = np.ones(400, dtype=np.int64)
    frames = FrameSet(
        contigs=contigs, chunks_per_contig=ones, frames_per_chunk=ones, features_FD=validation.features_FD
    )
    truth = tmp_path / "truth.tsv"
    rows = [
        f"{name}\t{'virus' if viral else 'nonviral'}\t{'phage' if viral else 'bacteria'}\t{300 + 3 * number}"
        for number, (name, viral) in enumerate(zip(contigs, validation.is_virus_F, strict=True))
    ]
    truth.write_text("\n".join(["contig\tlabel\tgroup\tlength", *reversed(rows)]))
    known = read_truth(truth).of(contigs)
    evaluation = rule_evaluation.evaluate_rules(score_frames(model, frames.features_FD), frames, known, seed=1)
    used = [genome("used", "ACGT")]
    published = publish_classifier(
        TrainedClassifier(
            name="mine",
            chunk_nt=500,
            model=model,
            settings=settings,
            outcome=outcome,
            validation=validation,
            split=GenomeSplit(used, [genome("held", "ACGT")], 2, 0.01, 0.01),
            related=[genome("relative", "ACGT")],
            evaluation=evaluation,
            files=[file],
            num_records=Counter({file.name: 3}),
            num_pieces=Counter({file.name: 1234}),
            num_frames=Counter({file.name: 567}),
            command="python -m something",
        ),
        tmp_path / "mine",
    )
    classifier = load_classifier(tmp_path / "mine")
    assert classifier.card == published
    found = classifier.probabilities(validation.features_FD)
    np.testing.assert_allclose(found[:, 1], score_frames(model, validation.features_FD), rtol=0, atol=1e-6)
    assert (is_virus(found) == validation.is_virus_F).mean() > 0.9
    text = (tmp_path / "mine" / "MODEL_CARD.md").read_text()
    assert f"| `{file.name}` | 3 | 1 | 1 | 1,234 | 567 |" in text
    assert f"| {RULE} | {evaluation['rules'][RULE]['auroc'][0]:.3f} (" in text
    card = json.loads((tmp_path / "mine" / "card.json").read_text())
    assert card["data"]["left_out"] == ["relative"]
    assert card["data"]["held_out"] == ["held"]


def test_the_threshold_lets_a_twentieth_pass_and_is_never_below_a_half():
    scores = np.concatenate([np.linspace(0, 0.99, 100), np.full(50, 0.95)])
    virus = np.arange(150) >= 100
    assert rule_evaluation.settle_threshold(scores, virus) == 0.95
    assert rule_evaluation.settle_threshold(scores / 10, virus) == 0.5
