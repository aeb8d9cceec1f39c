"""Held-out loss and retrieval on cases whose answers are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tools.encoders.evaluation import (
    compositions,
    held_out_loss,
    mean_embeddings,
    protein_names,
    retrieval,
)
from tools.encoders.masked_residues import new_encoder
from tools.encoders.training import TrainingSettings
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return ProteinTokenizer()


@pytest.fixture(scope="module")
def model():
    settings = TrainingSettings(num_layers=2, hidden_dim=32, attention_heads=2)
    return new_encoder(settings).eval()


def _ids(tokenizer, *texts):
    return [tokenizer.encode([text])[0][1:-1] for text in texts]


def test_unigram_loss_is_the_cross_entropy_of_the_training_frequencies(model, tokenizer):
    # three A to one C in training; the held-out protein is all C
    loss = held_out_loss(
        model,
        tokenizer,
        held_out=_ids(tokenizer, "C" * 400),
        training=_ids(tokenizer, "ACDEFGHIKLMNPQRSTVWY" + "A" * 59 + "C" * 19),
    )
    assert loss.unigram == pytest.approx(math.log(98 / 20))
    assert loss.num_masked == pytest.approx(60, abs=30)
    assert loss.gain == loss.unigram - loss.encoder


def test_held_out_loss_is_the_same_every_time(model, tokenizer):
    held_out = _ids(tokenizer, "MKTAYIAKQRQISFVKSHFSRQ" * 3, "GGLVPRGSHM" * 5, "M" * 50)
    first, again = (
        held_out_loss(model, tokenizer, held_out=held_out, training=_ids(tokenizer, "ACDEFGHIKLMNPQRSTVWY"))
        for _ in range(2)
    )
    assert first == again


def test_masked_residues_are_hidden_from_the_encoder(tokenizer):
    # an encoder that copies what it sees (embedding straight to output) must not see the answer
    class Copier(torch.nn.Module):
        mask_idx, embed_dim, layers = 32, 33, ()

        def __init__(self):
            super().__init__()
            self.embed_tokens = torch.nn.Embedding.from_pretrained(torch.eye(33) * 50)
            self.emb_layer_norm_after = torch.nn.Identity()
            self.lm_head = torch.nn.Identity()

    held_out = _ids(tokenizer, "ACDEFGHIKLMNPQRSTVWY" * 20)
    loss = held_out_loss(Copier(), tokenizer, held_out=held_out, training=held_out)
    assert loss.encoder == pytest.approx(math.log(33), rel=1e-4)


def test_mean_embedding_is_the_mean_over_residues(model, tokenizer):
    texts = ["MKTAY", "GG", "WCYAA"]
    found = mean_embeddings(model, tokenizer, _ids(tokenizer, *texts))
    for text, row in zip(texts, found, strict=True):
        tokens = torch.from_numpy(tokenizer.encode([text])[0])[None]
        with torch.inference_mode():
            states = model(tokens, repr_layers=[2])["representations"][2]
        np.testing.assert_allclose(row, states[0, 1:-1].mean(0), atol=1e-5)


def test_compositions_are_shares():
    rows = compositions(["AAAC", "XXXX"])
    assert rows[0].tolist()[:2] == [0.75, 0.25]
    assert rows[1].sum() == 0


def test_protein_names_without_meaning_or_partner_are_no_labels():
    descriptions = [
        "Cytochrome b (Fragment) OS=Homo sapiens GN=MT-CYB",
        "Cytochrome b OS=Mus musculus",
        "Uncharacterized protein OS=X",
        "Uncharacterized protein OS=Y",
        "DNA ligase OS=Z",
    ]
    assert protein_names(descriptions) == ["cytochrome b", "cytochrome b", None, None, None]


def test_retrieval_counts_right_neighbours_and_can_leave_out_near_copies():
    names = ["a", "a", "a", "b", "b", None]
    groups = np.array([0, 0, 1, 2, 3, 4])
    embeddings = np.array([[1, 0], [1, 0.01], [1, 0.1], [-1, 0.2], [-1, 0.1], [0, -1]], dtype=np.float32)
    useless = np.array([[1, 0], [-1, 0], [0, 1], [1, 0.01], [0, 1.01], [0, -1]], dtype=np.float32)
    near = retrieval(names, groups, embeddings, useless, across_groups=False)
    assert (near.num_queries, near.embedding, near.composition) == (5, 1.0, 0.0)
    far = retrieval(names, groups, embeddings, useless, across_groups=True)
    assert (far.num_queries, far.embedding) == (5, 1.0)
