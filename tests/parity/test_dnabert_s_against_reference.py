"""
Our packed DNABERT-S against a plain reading of the published architecture, with the same random weights.

The published weights are not to be had here, so nothing is compared with the original's own output. The reference takes
one sequence at a time, or a padded batch, with the whole ALiBi matrix, separate queries, keys and values, and softmax
written out; it follows the published MosaicBERT layer of DNABERT-2 (post-layer-norm BERT, Wqkv, gated_layers, wo).
`--log-cli-level=INFO` shows every difference.
"""

from __future__ import annotations

import gzip
import json
import logging
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.models.attention import choose_attention
from virnucpro.models.dnabert_s import PackedMosaicBert, alibi_slopes, load_dnabert_s
from virnucpro.models.encoders.attention_kernels import alibi_bias, equal_length_attention
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer, MosaicBertConfig

pytestmark = [pytest.mark.data, pytest.mark.usefixtures("one_thread")]

_log = logging.getLogger(__name__)

TOLERANCE = 1e-5

SMALL = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3, "intermediate_size": 160}
"""Six heads, so that slopes are interpolated; a feed-forward that is not four times the width."""


@pytest.fixture(scope="module")
def tokenizer():
    return DnaTokenizer()


@pytest.fixture(scope="module")
def genome(data_dir):
    with gzip.open(data_dir / "viral" / "lambda_virus.fa.gz", "rt") as lines:
        return "".join(line.strip() for line in lines if not line.startswith(">"))


@pytest.fixture(scope="module")
def sequences(genome):
    """1 to 6,000 nt in no order, a length twice, an N run and IUPAC letters."""
    cuts = [(0, 500), (500, 1), (600, 2), (700, 6000), (7000, 37), (8000, 300), (9000, 300), (9500, 150), (9700, 3)]
    plain = [genome[start : start + length] for start, length in cuts]
    return [*plain, genome[9900:10000] + "N" * 40 + genome[10040:10100], "ACGTRYKMSW" + genome[11000:11080] + "BDHVN"]


def _published_weights(folder, config: dict, *, seed: int):
    """Write ``pytorch_model.bin`` and ``config.json`` with random weights under the published names; return both."""
    random = torch.Generator().manual_seed(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]

    def normal(*shape, std=0.02, mean=0.0):  # the published initializer_range
        return torch.randn(*shape, generator=random) * std + mean

    tensors = {
        "bert.embeddings.word_embeddings.weight": normal(config["vocab_size"], width, std=0.5),
        "bert.embeddings.token_type_embeddings.weight": normal(2, width, std=0.5),
        "bert.pooler.dense.weight": normal(width, width),
        "bert.pooler.dense.bias": normal(width),
        "cls.predictions.decoder.weight": normal(config["vocab_size"], width),
    }
    norms = ["bert.embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        name = f"bert.encoder.layer.{layer}"
        tensors[f"{name}.attention.self.Wqkv.weight"] = normal(3 * width, width, std=1.5 / math.sqrt(width))
        tensors[f"{name}.attention.self.Wqkv.bias"] = normal(3 * width)
        tensors[f"{name}.attention.output.dense.weight"] = normal(width, width)
        tensors[f"{name}.attention.output.dense.bias"] = normal(width)
        tensors[f"{name}.mlp.gated_layers.weight"] = normal(2 * inner, width)
        tensors[f"{name}.mlp.wo.weight"] = normal(width, inner)
        tensors[f"{name}.mlp.wo.bias"] = normal(width)
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.mlp.layernorm"]
    for name in norms:
        tensors[f"{name}.weight"] = normal(width, std=0.2, mean=1.0)
        tensors[f"{name}.bias"] = normal(width, std=0.2)
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "pytorch_model.bin", {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}


class Reference:
    """The published forward pass, written out for one padded batch, in the dtype of the weights."""

    def __init__(self, tensors, config):
        self.tensors = tensors
        self.config = config

    def embed(self, ids_of, *, dtype=torch.float32):
        """Mean over each sequence's tokens, the batch padded to its longest sequence."""
        heads, longest = self.config["num_attention_heads"], max(map(len, ids_of))
        tokens = torch.full((len(ids_of), longest), 3)
        for row, ids in zip(tokens, ids_of, strict=True):
            row[: len(ids)] = torch.as_tensor(ids)
        lengths = torch.tensor([len(ids) for ids in ids_of])
        is_token = torch.arange(longest) < lengths[:, None]
        distance = (torch.arange(longest)[:, None] - torch.arange(longest)[None, :]).abs().to(dtype)
        bias = torch.stack([-slope * distance for slope in _papers_slopes(heads)])[None]
        bias = bias.masked_fill(~is_token[:, None, None, :], -1e9)
        w = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, w, "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            x = self._norm(
                x + self._attention(x, w, f"{name}.attention", bias, heads), w, f"{name}.attention.output.LayerNorm"
            )
            gate_weight, value_weight = w[f"{name}.mlp.gated_layers.weight"].chunk(2)
            gate = x @ gate_weight.T
            gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
            fed = (gelu * (x @ value_weight.T)) @ w[f"{name}.mlp.wo.weight"].T + w[f"{name}.mlp.wo.bias"]
            x = self._norm(x + fed, w, f"{name}.mlp.layernorm")
        return torch.stack([row[:length].mean(0) for row, length in zip(x, lengths.tolist(), strict=True)])

    def _attention(self, x, w, name, bias, heads):
        num_sequences, longest, width = x.shape
        parts = zip(w[f"{name}.self.Wqkv.weight"].chunk(3), w[f"{name}.self.Wqkv.bias"].chunk(3), strict=True)
        q, k, v = ((x @ m.T + b).view(num_sequences, longest, heads, -1).transpose(1, 2) for m, b in parts)
        scores = q @ k.transpose(2, 3) / math.sqrt(width / heads) + bias
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(num_sequences, longest, width)
        return attended @ w[f"{name}.output.dense.weight"].T + w[f"{name}.output.dense.bias"]

    def _norm(self, x, w, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.config["layer_norm_eps"])
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _papers_slopes(heads):
    """
    Return ALiBi's slopes as Press et al. say it: a geometric sequence that starts at, and has the ratio, 2 ** (-8 / n).

    Their answer to other numbers of heads: those of the nearest power of two below, then every other one of twice that.
    """
    nearest = 1
    while nearest * 2 <= heads:
        nearest *= 2

    def geometric(n):
        ratio = 2 ** (-8 / n)
        return [ratio ** (head + 1) for head in range(n)]

    return (geometric(nearest) + geometric(2 * nearest)[::2])[:heads]


def _embed(model, tokenizer, sequences):
    input_ids, lengths = tokenizer.encode(sequences)
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return model(torch.from_numpy(input_ids), starts, lengths.tolist())


def _ids(tokenizer, sequences):
    return [tokenizer.encode([letters])[0] for letters in sequences]


def _cosines(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=1)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    config = {**_published_config(), **SMALL}
    path, tensors = _published_weights(tmp_path_factory.mktemp("small"), config, seed=1)
    return path, Reference(tensors, config)


def _published_config():
    return {"model_type": "bert", "alibi_starting_size": 512, "hidden_act": "gelu", **vars(MosaicBertConfig())}


def test_slopes_are_the_papers():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(12).tolist() == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    )
    for heads in range(1, 33):
        assert alibi_slopes(heads).tolist() == pytest.approx(_papers_slopes(heads)), heads


def test_defaults_are_the_published_configuration(data_dir):
    text = (data_dir / "dnabert_s" / "config.json").read_text()
    assert MosaicBertConfig.from_json(text) == MosaicBertConfig()


def test_packed_and_alone_are_the_reference_at_a_small_shape(small, tokenizer, sequences):
    path, reference = small
    model, own_tokenizer = load_dnabert_s(path, "cpu")
    packed = _embed(model, own_tokenizer, sequences)
    alone = torch.cat([_embed(model, tokenizer, [letters]) for letters in sequences])
    expected = torch.cat([reference.embed([ids]) for ids in _ids(tokenizer, sequences)])
    exact = torch.cat([reference.embed([ids], dtype=torch.float64) for ids in _ids(tokenizer, sequences)])
    for kind, found in (("packed", packed), ("alone", alone), ("reference in float64", exact)):
        differences = (found - expected).abs().amax(1)
        _log.info("%s: largest differences %s", kind, [f"{value:.1e}" for value in differences.tolist()])
        assert differences.max() <= TOLERANCE, kind
    assert expected.abs().max() > 0.1
    assert len({tuple(row.round(decimals=3).tolist()) for row in expected}) == len(sequences)


def test_padding_and_company_change_nothing(small, tokenizer, sequences):
    path, reference = small
    model, _ = load_dnabert_s(path, "cpu")
    short = [letters for letters in sequences if len(letters) <= 500]
    padded = reference.embed(_ids(tokenizer, short))
    assert (_embed(model, tokenizer, short) - padded).abs().max() <= TOLERANCE
    assert (_embed(model, tokenizer, short[::-1]).flip(0) - padded).abs().max() <= TOLERANCE


def test_each_kernel_of_a_cpu_gives_the_reference(small, tokenizer, sequences):
    path, reference = small
    expected = torch.cat([reference.embed([ids]) for ids in _ids(tokenizer, sequences)])
    model, _ = load_dnabert_s(path, "cpu")
    names = {model.attention.name}
    assert (_embed(model, tokenizer, sequences) - expected).abs().max() <= TOLERANCE
    model.attention = choose_attention(torch.device("cpu"), torch.bfloat16, head_dim=16, alibi=True)
    assert model.attention.kernel is equal_length_attention
    assert model.attention.name not in names
    assert (_embed(model, tokenizer, sequences) - expected).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.long
def test_the_published_shape_is_the_reference_too(tmp_path, tokenizer, sequences):
    config = {**_published_config(), "num_hidden_layers": 12}
    path, tensors = _published_weights(tmp_path / "published", config, seed=2)
    chosen = [letters for letters in sequences if len(letters) <= 500] + [sequences[3][:2000]]
    reference, ids_of = Reference(tensors, config), _ids(tokenizer, chosen)
    expected, exact = (
        torch.cat([reference.embed([ids], dtype=dtype) for ids in ids_of]) for dtype in (torch.float32, torch.float64)
    )
    model, _ = load_dnabert_s(path, "cpu")
    found = _embed(model, tokenizer, chosen)
    for kind, difference in (("ours", found - expected), ("ours from float64", found - exact)):
        differences = difference.abs().amax(1)
        _log.info("12 x 768, %s: largest differences %s", kind, [f"{value:.1e}" for value in differences.tolist()])
        assert differences.max() <= TOLERANCE, kind
    for precision in ("bf16", "fp16"):
        low, _ = load_dnabert_s(path, "cpu", precision=precision)
        cosines = _cosines(_embed(low, tokenizer, chosen[:6]), expected[:6])
        _log.info("12 x 768, %s: least cosine %.6f", precision, cosines.min())
        assert cosines.min() >= 0.999


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_points_the_same_way(small, tokenizer, sequences, precision):
    path, reference = small
    expected = torch.cat([reference.embed([ids]) for ids in _ids(tokenizer, sequences)])
    model, _ = load_dnabert_s(path, "cpu", precision=precision)
    found = _embed(model, tokenizer, sequences)
    assert found.dtype is torch.float32
    assert _cosines(found, expected).min() >= 0.999


def test_a_model_in_fp16_computes_in_float32_what_its_weights_give_there(small, tmp_path, tokenizer, sequences):
    path, reference = small
    rounded = {name: tensor.half().float().contiguous() for name, tensor in reference.tensors.items()}
    config = MosaicBertConfig(**{name: reference.config[name] for name in vars(MosaicBertConfig())})
    save_file(rounded, tmp_path / "rounded.safetensors", metadata={"config": config.to_json()})
    expected = _embed(load_dnabert_s(tmp_path / "rounded.safetensors", "cpu")[0], tokenizer, sequences)
    low, _ = load_dnabert_s(path, "cpu", precision="fp16")
    assert (_embed(low.in_float32, tokenizer, sequences) - expected).abs().max() <= TOLERANCE
    assert (_embed(low, tokenizer, sequences) - expected).abs().max() > TOLERANCE


def test_all_forms_of_a_checkpoint_give_the_same_rows(small, tmp_path, tokenizer, sequences):
    path, reference = small
    expected = _embed(load_dnabert_s(path, "cpu")[0], tokenizer, sequences[:2])
    config = MosaicBertConfig(**{name: reference.config[name] for name in vars(MosaicBertConfig())})
    unprefixed = {name: tensor.contiguous() for name, tensor in reference.tensors.items()}
    torch.save(unprefixed, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "alone").mkdir()
    save_file(unprefixed, tmp_path / "alone" / "model.safetensors", metadata={"config": config.to_json()})
    save_file(unprefixed, tmp_path / "model.safetensors")
    for other in ("model.pt", "model.safetensors", "alone/model.safetensors"):
        model, _ = load_dnabert_s(tmp_path / other, "cpu")
        assert torch.equal(_embed(model, tokenizer, sequences[:2]), expected), other


def test_a_long_sequence_takes_memory_by_its_length_not_by_its_square(tokenizer, genome, monkeypatch):
    """The bias is made for some queries at a time; the rows stay what they are with the whole bias."""
    torch.manual_seed(0)
    model = PackedMosaicBert(MosaicBertConfig(**SMALL))
    model.prepare_for_inference()
    whole = _embed(model, tokenizer, [genome[:6000], genome[:100]])
    made = []

    def watched(*args):
        bias = alibi_bias(*args)
        made.append(bias.numel())
        return bias

    monkeypatch.setattr("virnucpro.models.encoders.attention_kernels._CACHED_SCORES", 50_000)
    monkeypatch.setattr("virnucpro.models.encoders.attention_kernels.alibi_bias", watched)
    pieces = _embed(model, tokenizer, [genome[:6000], genome[:100]])
    assert max(made) <= 50_000
    assert len(made) > 50
    torch.testing.assert_close(pieces, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trained_weights_point_the_same_way_in_low_precision(tokenizer, genome, precision):
    lengths = [*range(1, 200), 250, 300, 400, *[500] * 10, 1000, 3000]
    windows = [genome[37 * number : 37 * number + length] for number, length in enumerate(lengths)]
    expected = _embed(load_dnabert_s(DEFAULT_DNA_MODEL, "cpu")[0], tokenizer, windows)
    found = _embed(load_dnabert_s(DEFAULT_DNA_MODEL, "cpu", precision=precision)[0], tokenizer, windows)
    cosines = _cosines(found, expected)
    worst = int(cosines.argmin())
    _log.info("bundled, %s: least cosine %.6f at %d nt", precision, cosines[worst], lengths[worst])
    assert cosines[worst] >= 0.999, f"{lengths[worst]} nt"
