"""A classifier gives torch's own numbers, and is used with nothing but what it was trained with."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.fakes import classifier_card, hash_config, random_mlp, write_classifier
from tests.settings import prediction_config
from virnucpro.choices import DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL
from virnucpro.errors import (
    ClassifierFileError,
    ClassifierMismatchError,
    ExitCode,
    UnknownClassifierError,
    WeightsError,
)
from virnucpro.models.classifier import BLOCK_ROWS, Classifier, is_virus, load_classifier
from virnucpro.models.classifier_files.card import (
    CONTIG_MODEL_FORMAT,
    CONTIG_WEIGHTS_NAME,
    ContigModelCard,
    Encoder,
    check_contig_weights,
    read_card,
)
from virnucpro.models.registry import resolve_model


@pytest.fixture
def folder(tmp_path):
    write_classifier(tmp_path / "mine", random_mlp())
    return tmp_path / "mine"


def _features(rows, width=20, seed=3):
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


@pytest.mark.parametrize("rows", [0, 1, 7, BLOCK_ROWS, 2 * BLOCK_ROWS + 5])
def test_probabilities_are_those_of_the_module_in_evaluation_mode(folder, rows):
    module, features = random_mlp().eval(), _features(rows)
    expected = torch.softmax(module(torch.from_numpy(features)), dim=1).detach().numpy()
    found = load_classifier(folder).probabilities(features)
    assert found.dtype == np.float32
    assert found.shape == (rows, 2)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert rows < 7 or 0 < is_virus(found).mean() < 1


def test_features_may_be_read_only_and_strided_and_the_threads_are_as_before(folder, threads_as_before):
    torch.set_num_threads(2)
    wide = _features(50, width=40)
    wide.flags.writeable = False
    found = load_classifier(folder).probabilities(wide[:, ::2])
    np.testing.assert_array_equal(found, load_classifier(folder).probabilities(wide[:, ::2].copy()))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("features", [np.zeros((3, 19), np.float32), np.zeros((3, 20)), np.zeros(20, np.float32)])
def test_features_of_another_shape_or_type_are_refused(folder, features):
    with pytest.raises(ValueError, match=r"features are float.*not float32 \(rows, 20\)"):
        load_classifier(folder).probabilities(features)


def test_a_tie_is_others():
    ties = np.array([[0.5, 0.5], [0.4, 0.6], [0.6, 0.4]], dtype=np.float32)
    assert is_virus(ties).tolist() == [False, True, False]


def test_the_card_comes_back_as_it_was_written_and_keeps_what_readers_want(folder):
    card = classifier_card(load_classifier(folder)._model)
    assert read_card(folder) == card
    (folder / "card.json").write_text(card.to_json(training={"seed": 1}))
    assert read_card(folder) == card
    assert json.loads((folder / "card.json").read_text())["training"] == {"seed": 1}


def test_a_contig_model_is_known_by_its_sha256_and_a_card_without_one_does_not_speak_of_it(folder):
    assert "contig_model" not in json.loads((folder / "card.json").read_text())
    data = b"tables and layers"
    (folder / CONTIG_WEIGHTS_NAME).write_bytes(data)
    contig_model = ContigModelCard(weights_sha256=hashlib.sha256(data).hexdigest())
    card = replace(read_card(folder), contig_model=contig_model)
    for_readers = {"contig_model": {**asdict(contig_model), "training": {"seed": 1}}}
    (folder / "card.json").write_text(card.to_json(**for_readers))
    assert read_card(folder) == card
    assert check_contig_weights(folder, card) == data
    (folder / CONTIG_WEIGHTS_NAME).write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=r"contig_model\.safetensors\.gz has sha256 .*, its card says"):
        check_contig_weights(folder, card)
    (folder / CONTIG_WEIGHTS_NAME).unlink()
    with pytest.raises(WeightsError, match=r"contig_model\.safetensors\.gz cannot be read"):
        check_contig_weights(folder, card)


def test_reading_a_card_imports_no_torch(folder):
    imports = "import sys, pathlib; from virnucpro.models.classifier_files.card import read_card"
    code = f"{imports}; read_card(pathlib.Path({str(folder)!r})); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- what it was trained with ----------------------------------------------------------------------------------------


def test_the_same_chunk_length_and_models_are_fine():
    card = classifier_card(random_mlp())
    dna = hash_config(model_name="dna-model", hidden_dim=12, weights_sha256="d" * 64)
    card.check(chunk_nt=500, dna=dna, protein=hash_config(model_name="protein-model", hidden_dim=8))
    card.check(dna=replace(dna, hidden_dim=0, model_name="a copy"))  # known by its sha256; its width is not known yet
    card.check()


def test_the_bundled_models_are_told_apart_as_resolved_models():
    dna, protein = resolve_model(DEFAULT_DNA_MODEL), resolve_model(DEFAULT_PROTEIN_MODEL)
    card = classifier_card(random_mlp())
    trained = {"name": dna.name, "sha256": dna.weights_sha256, "hidden_dim": dna.hidden_dim}
    card = replace(card, dna_model=replace(card.dna_model, **trained))
    card.check(dna=dna)
    with pytest.raises(ClassifierMismatchError, match=f"embeddings of DNA by {dna.name}, not {protein.name}"):
        card.check(dna=protein)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk_nt": 300}, "chunks of 500 nt, not 300 nt"),
        ({"dna": {"weights_sha256": "e" * 64}}, r"DNA by dna-model, not dna-model \(other weights of that name\)"),
        ({"protein": {"model_name": "other"}}, "protein by protein-model, not other"),
        ({"protein": {"hidden_dim": 9}}, "protein of width 8, not 9"),
    ],
)
def test_another_chunk_length_or_model_is_refused_in_words(changes, says):
    used = {
        "dna": {"model_name": "dna-model", "hidden_dim": 12, "weights_sha256": "d" * 64},
        "protein": {"model_name": "protein-model", "hidden_dim": 8},
    }
    configs = {name: hash_config(**{**values, **changes.get(name, {})}) for name, values in used.items()}
    with pytest.raises(ClassifierMismatchError, match=says) as error:
        classifier_card(random_mlp()).check(chunk_nt=changes.get("chunk_nt", 500), **configs)
    assert error.value.exit_code is ExitCode.CONFIGURATION
    assert len(error.value.differences) == 1


def test_other_chunks_that_a_card_names_are_fine_too_and_make_another_fingerprint(tmp_path):
    trained = {"dna": resolve_model(DEFAULT_DNA_MODEL), "protein": resolve_model(DEFAULT_PROTEIN_MODEL)}
    encoders = {
        f"{kind}_model": Encoder(name=one.name, sha256=one.weights_sha256, hidden_dim=one.hidden_dim)
        for kind, one in trained.items()
    }
    width = sum(encoder.hidden_dim for encoder in encoders.values())
    card = write_classifier(tmp_path, random_mlp(width), also_chunk_nt=(300,), **encoders)
    assert read_card(tmp_path) == card
    with pytest.raises(ClassifierMismatchError, match="chunks of 500 or 300 nt, not 400 nt"):
        card.check(chunk_nt=400)
    configs = [prediction_config(classifier=tmp_path, chunk=chunk_nt) for chunk_nt in (None, 500, 300)]
    assert [config.chunk_nt for config in configs] == [500, 500, 300]
    assert configs[0].fingerprint == configs[1].fingerprint != configs[2].fingerprint
    assert configs[2].scores_settings("cpu")["chunk length"] == 300


# --- folders that are no classifier ----------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UnknownClassifierError, match="unknown classifier 'nonesuch': choose virnucpro-tiny, or the folder"
    ):
        load_classifier("nonesuch")


def test_a_published_file_is_to_be_converted_first(tmp_path):
    (tmp_path / "500_model.pth").write_bytes(b"PK")
    with pytest.raises(ClassifierFileError, match=r"convert-classifier 500_model.pth -o DIR"):
        load_classifier(tmp_path / "500_model.pth")


def test_weights_that_are_not_those_of_the_card_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(WeightsError, match="its card says"):
        load_classifier(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: {**t, "bn1.bias": t["bn1.bias"][:-1].clone()}, "does not hold the classifier"),
        (lambda t: {name: x for name, x in t.items() if name != "bn1.bias"}, "does not hold the classifier"),
        (lambda t: {**t, "bn1.bias": t["bn1.bias"].half()}, "bn1.bias is not of finite float32 numbers"),
        (lambda t: {**t, "bn1.bias": t["bn1.bias"] * float("nan")}, "bn1.bias is not of finite float32 numbers"),
        (lambda t: {**t, "bn1.bias": t["bn1.bias"].bfloat16()}, "is not a safetensors file of float32"),
        (lambda t: {**t, "bn1.running_var": -t["bn1.running_var"]}, "running_var has a variance that is not above"),
        (lambda t: {**t, "bn1.running_var": 0 * t["bn1.running_var"]}, "running_var has a variance that is not above"),
        (None, "is not a safetensors file"),
    ],
)
def test_weights_of_another_shape_type_or_range_are_refused_before_anything_is_embedded(folder, change, says):
    tensors = {name: x for name, x in random_mlp().state_dict().items() if "num_batches" not in name}
    data = b"none" if change is None else save(change(tensors))
    (folder / "model.safetensors").write_bytes(data)
    card = replace(read_card(folder), weights_sha256=hashlib.sha256(data).hexdigest())
    (folder / "card.json").write_text(card.to_json())
    with pytest.raises(WeightsError, match=says):
        prediction_config(classifier=folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "encoder"}, "of something else"),
        ({"format": 2}, "its format is 2, not 1"),
        ({"chunk_nt": "500"}, "chunk_nt"),
        ({"also_chunk_nt": [300, 0]}, "also_chunk_nt"),
        ({"also_chunk_nt": 300}, "not a classifier's card"),
        ({"hidden_dim": True}, "hidden_dim"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": int("9" * 400)}, "threshold is 999"),
        ({"batch_norm_eps": 10**400}, "batch_norm_eps is 1000"),
        ({"chunk_nt": 10**400}, "chunk_nt"),
        ({"dna_model": {"name": "x"}}, "not a classifier's card"),
        ({"dna_model": None}, "not a classifier's card"),
        ({"weights_sha256": None}, "weights_sha256"),
        ({"contig_model": {"weights_sha256": "a" * 64, "format": 1}}, f"contig model is 1, not {CONTIG_MODEL_FORMAT}"),
        ({"contig_model": {"weights_sha256": None, "format": 1}}, "contig model is no text"),
        ({"contig_model": {"weights_sha256": "a" * 64}}, "not a classifier's card"),
        ({"contig_model": "contig_model.safetensors"}, "not a classifier's card"),
    ],
)
def test_a_card_that_makes_no_sense_is_refused(folder, changes, says):
    path = folder / "card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(WeightsError, match=says):
        load_classifier(folder)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"kind": "classifier", "format": 1}', "[" * 10_000])
def test_no_card_or_a_damaged_one_is_one_sentence(folder, text):
    (folder / "card.json").unlink()
    if text is not None:
        (folder / "card.json").write_text(text)
    with pytest.raises(WeightsError, match=r"card\.json"):
        load_classifier(folder)


def test_a_classifier_never_trains(folder):
    module = random_mlp().train()
    classifier = Classifier(classifier_card(module), module)
    features = _features(8)
    np.testing.assert_array_equal(classifier.probabilities(features), classifier.probabilities(features))
    assert not module.training
