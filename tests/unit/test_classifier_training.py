"""The frame classifier's training and the threshold, each against what it promises."""

from __future__ import annotations

import json
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.trainings import hash_training
from virnucpro.errors import StoppedError
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.fitting import classifier_fitting
from virnucpro.training.fitting.classifier_fitting import (
    LabelledFrames,
    choose_threshold,
    train_classifier,
    validation_loss,
)
from virnucpro.training.fitting.embedded_fragments import EmbeddedFragments
from virnucpro.training.fitting.training_fragments import TrainingFragment, write_training_fragments
from virnucpro.training.genomes.genome_split import SPLITS, SplitGenomes
from virnucpro.training.genomes.labelled_genomes import LabelledGenome
from virnucpro.training.training_settings import ClassifierSettings

WIDTH = 256


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
    with torch.inference_mode():
        logits = model(torch.from_numpy(validation.features_FD)).double().numpy()
    assert counts_of(logits[:, 1] - logits[:, 0], validation.is_virus_F).auroc() > 0.95
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


def test_training_ends_without_a_result_when_it_is_told_to_stop(one_thread):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        train_classifier(_frames(60, 1), _frames(60, 2), ClassifierSettings(hidden_dim=8), stop=stop)


def test_the_threshold_lets_a_twentieth_pass_and_is_never_below_a_half_nor_out_of_reach():
    scores = np.concatenate([np.linspace(0, 0.99, 100), np.full(50, 0.95)])
    virus = np.arange(150) >= 100
    assert choose_threshold(scores, virus) == 0.95
    assert choose_threshold(scores / 10, virus) == 0.5
    assert choose_threshold(np.full(150, 0.999), virus) == 0.99


# --- what the test part may not do -----------------------------------------------------------------------------------

CONFIG = hash_training(classifier=ClassifierSettings(hidden_dim=4, most_epochs=2))


def _fragments(part, seed, *, flipped=False):
    """Twelve contigs of a part: viral ones are rich in AT, and their embeddings differ."""
    random = np.random.default_rng(seed)
    for number in range(12):
        is_virus = number % 2 == 0
        weights = np.array([3, 1, 1, 3] if is_virus else [1, 3, 3, 1]) / 8
        letters = "".join(random.choice(list("ACGT"), 600, p=weights))
        name = f"{part}{number}"
        label = is_virus != flipped
        yield TrainingFragment(
            name=name,
            part=part,
            is_virus=label,
            group="phage" if label else "host",
            source=name,
            accession=name,
            start=0,
            end=600,
            strand="+",
            letters=letters,
        )


def _fitted(folder, monkeypatch, **changed):
    """Fit on made fragments of three parts, some of them *changed*; return every file that the fitting wrote."""
    fragments = [
        fragment
        for seed, part in enumerate(SPLITS)
        for fragment in _fragments(part, [seed, part in changed], flipped=part in changed)
    ]
    random = np.random.default_rng(1)
    is_virus = np.array([fragment.is_virus for fragment in fragments])
    dna, protein = (random.normal(size=(len(fragments), 8)).astype(np.float32) + is_virus[:, None] for _ in range(2))
    ones = np.ones(len(fragments), dtype=np.int64)
    embedded = EmbeddedFragments(
        fragments=fragments,
        is_virus_C=is_virus,
        chunks_C=ones,
        frames_C=ones,
        dna_CD=dna,
        protein_CE=protein,
        features_FD=np.hstack([dna, protein]),
        fragment_of_F=np.arange(len(fragments)),
        is_example_F=ones.astype(bool),
    )
    genomes = [
        LabelledGenome(one.accession, one.source, one.letters, "x.fa", group=one.group, is_virus=one.is_virus)
        for one in fragments
    ]
    parts, clusters = [fragment.part for fragment in fragments], list(range(len(fragments)))
    found = SplitGenomes(genomes=genomes, parts=parts, clusters=clusters, left_out=[], largest_share=0.0, notes=[])
    folder.mkdir()
    monkeypatch.setattr(classifier_fitting, "read_embedded", lambda *_: embedded)
    none, table = (folder.parent / f"further of {folder.name}{suffix}" for suffix in (".fasta", ".tsv"))
    write_training_fragments([], none, table)
    layout = SimpleNamespace(trained_dir=folder, further_fragments=none, further_fragments_table=table)
    run = SimpleNamespace(config=CONFIG, layout=layout)
    classifier_fitting.fit_classifier(run, found, None)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_nothing_that_is_trained_stopped_calibrated_or_chosen_depends_on_the_test_part(
    tmp_path, monkeypatch, one_thread
):
    written = _fitted(tmp_path / "one", monkeypatch)
    assert len(written) == 4
    assert _fitted(tmp_path / "same", monkeypatch, test=True) == written
    stopped_otherwise = _fitted(tmp_path / "other", monkeypatch, validation=True)
    outcomes = [json.loads(files["outcome.json"]) for files in (written, stopped_otherwise)]
    assert outcomes[0]["threshold"] != outcomes[1]["threshold"]
    assert outcomes[0]["contigs"]["temperature"] != outcomes[1]["contigs"]["temperature"]
