"""The bundled demonstration encoder: its card, its weights and the registry say the same; it is worth what it says."""

from __future__ import annotations

import json

import pytest
import torch
from esm.model.esm2 import ESM2
from safetensors.torch import load_file

from tools.encoders.card import ModelFiles, card_text
from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.models.encoders.esm2_checkpoint import Architecture
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, MODELS, resolve_model

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def files():
    return ModelFiles(BUNDLED_WEIGHTS_DIR / DEFAULT_PROTEIN_MODEL)


@pytest.fixture(scope="module")
def card(files):
    return json.loads(files.card.read_text("utf-8"))


def test_weights_are_those_of_the_card_and_of_the_registry(files, card):
    found = resolve_model(DEFAULT_PROTEIN_MODEL)
    assert found.weights_path == files.weights
    assert found.weights_sha256 == card["weights_sha256"] == MODELS[DEFAULT_PROTEIN_MODEL].sha256
    assert files.weights.stat().st_size <= 8 * MEGABYTE


def test_shape_in_card_and_registry_is_that_of_the_weights(files, card):
    spec, architecture = MODELS[DEFAULT_PROTEIN_MODEL], Architecture(**card["architecture"])
    assert (spec.num_layers, spec.hidden_dim, spec.attention_heads) == (
        architecture.num_layers,
        architecture.hidden_dim,
        architecture.attention_heads,
    )
    model = ESM2(architecture.num_layers, architecture.hidden_dim, architecture.attention_heads)
    tensors = load_file(files.weights)
    model.load_state_dict(tensors, strict=True)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == card["num_parameters"] == spec.num_parameters


def test_encoder_beats_the_unigram_model_on_held_out_proteins(card):
    loss = card["held_out_loss"]
    assert loss["gain"] == pytest.approx(loss["unigram"] - loss["encoder"])
    assert loss["gain"] >= 0.05
    assert loss["num_residues"] > 100_000


def test_held_out_proteins_were_no_copies_of_training_ones(card):
    split = card["split"]
    assert split["largest_overlap"] < 0.5
    assert split["num_held_out"] == pytest.approx(card["data"]["num_proteins"] / 10, rel=0.01)
    assert split["num_held_out"] + split["num_training"] == card["data"]["num_proteins"]


def test_card_for_readers_is_made_from_the_card_for_programs(files, card):
    assert files.text.read_text("utf-8") == card_text(card)
    assert "demonstration encoder" in card_text(card)
    assert "CC BY 4.0" in card_text(card)
