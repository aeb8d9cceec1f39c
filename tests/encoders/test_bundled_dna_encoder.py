"""The bundled DNA encoder: card, weights and registry say the same; on real genomes it is worth what the card says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tools.encoders.card import ModelFiles
from tools.encoders.dna_card import card_text
from tools.encoders.dna_split import as_card
from tools.encoders.masked_dna import DnaObjective, load_masked_bert
from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.durable import sha256_of
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, MODELS, resolve_model
from virnucpro.training.genomes.records import read_genomes
from virnucpro.training.genomes.related import KMER_LIMIT, largest_shares, sketch

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def files():
    return ModelFiles(BUNDLED_WEIGHTS_DIR / DEFAULT_DNA_MODEL)


@pytest.fixture(scope="module")
def card(files):
    return json.loads(files.card.read_text("utf-8"))


@pytest.fixture(scope="module")
def genomes(card, data_dir):
    """The held-out and the training records that the card names."""
    paths = [data_dir / "viral" / item["file"] for item in card["data"]["files"]]
    assert [sha256_of(path) for path in paths] == [item["sha256"] for item in card["data"]["files"]]
    every = read_genomes(paths)
    names = set(card["split"]["held_out"])
    return [g for g in every if g.accession in names], [g for g in every if g.accession not in names]


def test_weights_are_those_of_the_card_and_of_the_registry(files, card):
    found = resolve_model(DEFAULT_DNA_MODEL)
    assert found.weights_path == files.weights
    assert found.weights_sha256 == card["weights_sha256"] == MODELS[DEFAULT_DNA_MODEL].sha256
    assert files.weights.stat().st_size <= 8 * MEGABYTE


def test_shape_in_card_and_registry_is_that_of_the_weights(files, card):
    spec, config = MODELS[DEFAULT_DNA_MODEL], MosaicBertConfig.from_json(json.dumps(card["architecture"]))
    assert (spec.num_layers, spec.hidden_dim, spec.attention_heads) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
    )
    tensors = load_file(files.weights)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert "cls.predictions.decoder.weight" not in tensors
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    assert num_parameters == card["num_parameters"] == spec.num_parameters
    assert 1_000_000 <= num_parameters <= 2_000_000


def test_card_for_readers_is_made_from_the_card_for_programs(files, card):
    assert files.text.read_text("utf-8") == card_text(card)
    assert "demonstration encoder" in card_text(card)
    assert "eukaryotes are one fungus" in card_text(card)


def test_encoder_beats_the_unigram_model_on_held_out_genomes(card):
    loss = card["held_out_loss"]
    assert loss["gain"] == pytest.approx(loss["unigram"] - loss["encoder"])
    assert loss["gain"] >= 0.05
    assert all(part["gain"] > 0 for part in card["held_out_loss_by_file"].values())


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.long
def test_the_cards_gain_is_what_the_shipped_weights_have_on_the_real_genomes(files, card, genomes):
    held_out, training = ([genome.letters for genome in part] for part in genomes)
    objective = DnaObjective()
    loss = objective.held_out_loss(load_masked_bert(files.weights), held_out, objective.unigram_nats(training))
    assert loss.num_masked == card["held_out_loss"]["num_tokens"] > 10_000
    assert loss.unigram == pytest.approx(card["held_out_loss"]["unigram"], abs=1e-6)
    assert loss.encoder == pytest.approx(card["held_out_loss"]["encoder"], abs=1e-3)
    assert loss.gain >= 0.05


@pytest.mark.data
def test_no_genome_is_on_both_sides_and_held_out_ones_are_no_near_copies(card, genomes):
    held_out, training = genomes
    assert len(held_out) == card["split"]["num_held_out"]
    assert len(training) == card["split"]["num_training"]
    assert not {genome.source for genome in held_out} & {genome.source for genome in training}
    assert {name: card["split"][name] for name in as_card(training)} == as_card(training)
    viruses = [[sketch(g.letters) for g in part if "virus" in g.file] for part in genomes]
    shares = largest_shares(*viruses)
    assert len(shares) >= 15
    assert shares.max() <= card["split"]["largest_share"] < KMER_LIMIT
