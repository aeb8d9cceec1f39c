"""
Our packed forward pass against fair-esm's own, on real proteins: a real checkpoint, and random weights at the published
shapes.

The tolerance is 1e-5 on every number of an embedding; these reach 5. Against fair-esm in a padded batch, what fair-esm
itself moves between that batch and one at a time is added for each protein: on proteins of one to seven residues,
where there is little to average, that alone passes 1e-5. `--log-cli-level=INFO` shows every difference.
"""

from __future__ import annotations

import argparse
import gzip
import logging
import math
from itertools import islice

import esm
import numpy as np
import pytest
import torch
from esm.model.esm2 import ESM2

from virnucpro.models.attention import choose_attention
from virnucpro.models.esm2_flash import load_esm2_model

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("one_thread")]

_log = logging.getLogger(__name__)

TOLERANCE = 1e-5
TOO_SHORT_TO_AVERAGE = 8

SHAPES = {
    "8M": (6, 320, 20),
    "35M": (12, 480, 20),
    "650M, 2 layers": (2, 1280, 20),
}


@pytest.fixture(scope="module")
def proteins(data_dir):
    """Real proteins and starts of proteins, 1 to 1,500 residues, in no order of length, two lengths twice."""
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as lines:
        records = [line.strip() for line in islice(lines, 400) if not line.startswith(">")]
    longest = max(records, key=len)[:1500]
    assert len(longest) == 1500
    cuts = {11: 8, 12: 1, 13: 2, 14: 30, 15: 3, 16: 100, 17: 100}
    starts = [records[number][:num_residues] for number, num_residues in cuts.items()]
    whole = [record for record in records if 150 < len(record) < 420][:3]
    return [*starts[:3], whole[0], longest, *starts[3:], *whole[1:], records[18][:30]]


def _random_esm2(num_layers, hidden_dim, attention_heads, path):
    """
    Write a fair-esm checkpoint of that shape whose activations are of the real ones' size.

    Matrices keep the size of what passes through them, norms have gains about 1, so the stream grows from layer to
    layer and each layer's share of it matters; embeddings come out with numbers up to about 4.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        model = ESM2(num_layers, hidden_dim, attention_heads)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            scale = 0.3 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[1])
            parameter.data = noise * scale
        else:
            parameter.data = (1.0 if "norm" in name and name.endswith("weight") else 0.0) + 0.1 * noise
    settings = argparse.Namespace(
        encoder_layers=num_layers,
        encoder_embed_dim=hidden_dim,
        encoder_attention_heads=attention_heads,
        token_dropout=True,
    )
    state = {
        f"encoder.{'' if name.startswith('lm_head') else 'sentence_encoder.'}{name}": tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("contact_head")
    }
    torch.save({"cfg": {"model": settings}, "model": state}, path)


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module", params=["real 8M", "8M", pytest.param("35M", marks=LONG), "650M, 2 layers"])
def weights_name(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(weights_name, data_dir, tmp_path_factory):
    if weights_name == "real 8M":
        return data_dir / "weights" / "esm2_t6_8M_hemopi2ft.pt"
    path = tmp_path_factory.mktemp("weights") / "random.pt"
    _random_esm2(*SHAPES[weights_name], path)
    return path


@pytest.fixture(scope="module")
def fair_esm(checkpoint):
    """fair-esm's own module with these weights, put together from what the checkpoint says."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = torch.load(checkpoint, weights_only=True)
    settings = contents["cfg"]["model"]
    model = ESM2(settings.encoder_layers, settings.encoder_embed_dim, settings.encoder_attention_heads)
    state = {
        name.removeprefix("encoder.").removeprefix("sentence_encoder."): x for name, x in contents["model"].items()
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert all(name.startswith("contact_head") for name in missing)
    assert unexpected == []
    return model.eval()


@pytest.fixture(scope="module")
def ours(checkpoint):
    return load_esm2_model(checkpoint, "cpu")


def _representations(model, sequences, layers):
    """Each sequence's states of *layers*, cut to its own tokens, all sequences in one padded batch."""
    convert = model.alphabet.get_batch_converter()
    _, _, tokens = convert([(str(number), residues) for number, residues in enumerate(sequences)])
    with torch.inference_mode():
        states = model(tokens, repr_layers=layers)["representations"]
    return [
        [states[layer][number, : len(residues) + 2] for layer in layers] for number, residues in enumerate(sequences)
    ]


def _fair_esm_embeddings(model, sequences):
    states = _representations(model, sequences, [model.num_layers])
    return torch.stack([last[1:-1].mean(0) for (last,) in states])


@pytest.fixture(scope="module")
def one_at_a_time(fair_esm, proteins):
    torch.set_num_threads(1)
    return torch.cat([_fair_esm_embeddings(fair_esm, [residues]) for residues in proteins])


def _packed(tokenizer, sequences):
    input_ids_T, lengths_S = tokenizer.encode(sequences)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
    return torch.from_numpy(input_ids_T), torch.from_numpy(cu_seqlens), tuple(lengths_S.tolist())


@pytest.fixture
def assert_equal(request):
    """Compare embeddings with fair-esm's, and log the largest difference."""

    def compare(found, expected, sequences, *, moved=None):
        assert found.shape == expected.shape
        assert found.dtype == torch.float32
        differences = (found - expected).abs().amax(dim=1).tolist()
        is_short = [len(residues) < TOO_SHORT_TO_AVERAGE for residues in sequences]
        assert True in is_short
        assert False in is_short
        largest = max(value for value, short in zip(differences, is_short, strict=True) if not short)
        largest_short = max(value for value, short in zip(differences, is_short, strict=True) if short)
        _log.info("%s: %.1e; below 8 residues %.1e", request.node.name, largest, largest_short)
        allowed = [TOLERANCE] * len(sequences) if moved is None else (TOLERANCE + moved).tolist()
        assert all(value <= most for value, most in zip(differences, allowed, strict=True))

    return compare


def test_sizes_of_activations_are_real_ones(one_at_a_time):
    assert 1.0 < float(one_at_a_time.abs().max()) < 20.0


def test_one_at_a_time(ours, proteins, one_at_a_time, assert_equal):
    model, tokenizer = ours
    found = torch.cat([model(*_packed(tokenizer, [residues])) for residues in proteins])
    assert_equal(found, one_at_a_time, proteins)


@pytest.mark.parametrize("order", ["any order", "longest first"])
def test_packed(ours, proteins, one_at_a_time, order, assert_equal):
    model, tokenizer = ours
    numbers = list(range(len(proteins)))
    if order == "longest first":
        numbers.sort(key=lambda number: -len(proteins[number]))
    else:
        numbers = [number for number in numbers if len(proteins[number]) < 500]
    sequences = [proteins[number] for number in numbers]
    assert_equal(model(*_packed(tokenizer, sequences)), one_at_a_time[numbers], sequences)


def test_packed_against_fair_esm_in_a_padded_batch(ours, fair_esm, proteins, one_at_a_time, assert_equal):
    model, tokenizer = ours
    numbers = [number for number, residues in enumerate(proteins) if len(residues) < 250]
    batch = [proteins[number] for number in numbers]
    expected = _fair_esm_embeddings(fair_esm, batch)
    found = model(*_packed(tokenizer, batch))
    moved = (expected - one_at_a_time[numbers]).abs().amax(dim=1)
    assert moved[[len(residues) >= TOO_SHORT_TO_AVERAGE for residues in batch]].max() < TOLERANCE / 2
    assert_equal(found, expected, batch, moved=moved)


def test_layer_by_layer(ours, fair_esm, proteins):
    model, tokenizer = ours
    sequences = [residues for residues in proteins if TOO_SHORT_TO_AVERAGE <= len(residues) < 500]
    input_ids_T, cu_seqlens, lengths = _packed(tokenizer, sequences)
    with torch.inference_mode():
        states = [x_TD.clone() for x_TD in model._states(input_ids_T, cu_seqlens, lengths, torch.float32)]
    layers = list(range(fair_esm.num_layers + 1))
    assert len(states) == len(layers)
    for number, residues in enumerate(sequences):
        expected = _representations(fair_esm, [residues], layers)[0]
        for layer in layers:
            found = states[layer][cu_seqlens[number] : cu_seqlens[number + 1]]
            # single tokens, not means: relative to the size of the layer's numbers, which reach 45 in the real model
            assert float((found - expected[layer]).abs().max() / expected[layer].abs().max()) < TOLERANCE, layer


def test_masked_input_is_rescaled_as_fair_esm_does(ours, fair_esm, proteins):
    model, _ = ours
    texts = [f"{residues[:9]}<mask>{residues[9:20]}<mask><mask>{residues[20:60]}" for residues in proteins[3:5]]
    expected = torch.cat([_masked_embedding(fair_esm, text) for text in texts])
    ids = [torch.tensor([0, *fair_esm.alphabet.encode(text), 2]) for text in texts]
    lengths = tuple(len(x) for x in ids)
    cu_seqlens = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    found = model(torch.cat(ids), cu_seqlens, lengths)
    assert float((found - expected).abs().max()) <= TOLERANCE


def _masked_embedding(model, text):
    _, _, tokens = model.alphabet.get_batch_converter()([("", text)])
    with torch.inference_mode():
        states = model(tokens, repr_layers=[model.num_layers])["representations"][model.num_layers]
    return states[:, 1:-1].mean(1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_points_the_same_way(checkpoint, proteins, one_at_a_time, precision, weights_name):
    numbers = [number for number, residues in enumerate(proteins) if len(residues) < 500]
    model, tokenizer = load_esm2_model(checkpoint, "cpu", precision=precision)
    found = model(*_packed(tokenizer, [proteins[number] for number in numbers]))
    assert found.dtype == torch.float32
    cosines = torch.cosine_similarity(found, one_at_a_time[numbers])
    _log.info("%s, %s: smallest cosine %.5f", weights_name, precision, float(cosines.min()))
    assert float(cosines.min()) >= 0.999


def test_token_ids_are_those_of_fair_esm(ours, proteins):
    _, tokenizer = ours
    convert = esm.data.Alphabet.from_architecture("ESM-1b").get_batch_converter()
    sequences = [*proteins, "".join(sorted(tokenizer.letters))]
    input_ids_T, lengths_S = tokenizer.encode(sequences)
    _, _, tokens = convert([("", residues) for residues in sequences])
    expected = np.concatenate([row[:length] for row, length in zip(tokens.numpy(), lengths_S, strict=True)])
    assert input_ids_T.dtype == np.int64
    assert lengths_S.dtype == np.int32
    np.testing.assert_array_equal(input_ids_T, expected)


def test_equal_batches_give_equal_rows(ours, proteins):
    model, tokenizer = ours
    batch = _packed(tokenizer, proteins[5:9])
    first = model(*batch)
    assert all(torch.equal(model(*batch), first) for _ in range(5))


def test_choice_of_kernel_gives_its_reason():
    choice = choose_attention(torch.device("cpu"), torch.float32, head_dim=16)
    assert choice.name == "exp-bmm"
    assert "CPU" in choice.reason
    assert "float32" in choice.reason
