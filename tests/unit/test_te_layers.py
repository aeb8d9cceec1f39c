"""TransformerEngine's layers without a GPU: rows by its layout and formulas, and when they are chosen."""

from __future__ import annotations

import ast
import gzip
import importlib.metadata
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks import gpu_models
from tests import fake_cuda, te_by_definition
from virnucpro.models import esm2_flash
from virnucpro.models.encoders import fused_linear, te_layers
from virnucpro.models.encoders.esm2_checkpoint import Architecture, ProteinTokenizer
from virnucpro.models.encoders.te_layers import Engine, EngineLayer, choose_engine
from virnucpro.models.esm2_flash import PackedESM2, StepKernels, load_esm2_model

SMALL = Architecture(num_layers=3, hidden_dim=64, attention_heads=4)
CARDS = {"sm_80": (8, 0), "sm_90": (9, 0)}
NAME = "transformer-engine 2.20.2"


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch):
    """Leave weights as a GPU has them: a CPU lays them out for itself."""
    monkeypatch.setattr(fused_linear, "can_pack", lambda _device, _dtype: False)


@pytest.fixture
def installed(monkeypatch):
    """Be a machine that has TransformerEngine."""

    def version(name):
        assert name == "transformer_engine"
        return te_by_definition.VERSION

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_by_definition.PACKAGE)


def engine_of(model, gelu="tanh"):
    layers = tuple(EngineLayer(layer, model.architecture, te_by_definition.PACKAGE) for layer in model.layers)
    for layer in layers:
        layer._layer.gelu = gelu
    return Engine(layers, NAME, "")


def rows_by(model, engine, proteins):
    input_ids, lengths = ProteinTokenizer().encode(proteins)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    model.engine = engine
    return model(torch.from_numpy(input_ids), torch.from_numpy(cu_seqlens), tuple(lengths.tolist()))


def lowest_cosine(model, engine):
    """Return what decides whether *engine* is used."""
    return float(functional.cosine_similarity(model._rows_by(engine), model._rows_by(Engine())).min())


@pytest.fixture
def small_model():
    return gpu_models.random_esm2(SMALL, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def real_weights(data_dir):
    return data_dir / "weights" / "esm2_t6_8M_hemopi2ft.pt"


@pytest.fixture(scope="module")
def real_proteins(data_dir):
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as lines:
        records = [line.strip() for line in lines if not line.startswith(">")]
    return [record[:length] for record, length in zip(records[40:46], (400, 300, 190, 110, 64, 20), strict=True)]


def test_the_stand_in_has_the_parameters_of_the_installed_layer():
    found = importlib.util.find_spec("transformer_engine")
    if found is not None and importlib.metadata.version("transformer_engine") == te_by_definition.VERSION:
        source = (Path(found.origin).parent / "pytorch" / "transformer.py").read_text()
        (layer,) = (x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "TransformerLayer")
        real = {x.name: x.args for x in layer.body if isinstance(x, ast.FunctionDef)}
        for name in ("__init__", "forward"):
            own = inspect.signature(getattr(te_by_definition.TransformerLayer, name)).parameters
            assert [*own] == [x.arg for x in real[name].args]
            defaults = [x.default for x in own.values() if x.default is not x.empty]
            assert defaults == [*map(ast.literal_eval, real[name].defaults)]


def check_rows(model, proteins):
    expected = rows_by(model, Engine(), proteins)
    assert torch.allclose(rows_by(model, engine_of(model, gelu="none"), proteins), expected, rtol=0, atol=1e-5)
    by_tanh = rows_by(model, engine_of(model), proteins)
    assert not torch.allclose(by_tanh, expected, rtol=0, atol=1e-5)
    assert functional.cosine_similarity(by_tanh, expected).min() > 0.99999


def test_rows_are_those_of_the_packed_layers_but_for_the_gelu(small_model):
    check_rows(small_model, ["ACDEFGHIKLMNPQRSTVWY" * 10, "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQ" * 3])


@pytest.mark.data
def test_rows_of_real_weights_are_those_of_the_packed_layers_but_for_the_gelu(real_weights, real_proteins):
    model, _ = load_esm2_model(real_weights, "cpu")
    check_rows(model, real_proteins)


@pytest.mark.data
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_of_real_weights_stays_above_the_bar(precision, real_weights, real_proteins):
    in_fp32, _ = load_esm2_model(real_weights, "cpu")
    model, _ = load_esm2_model(real_weights, "cpu", precision=precision)
    expected = rows_by(in_fp32, Engine(), real_proteins)
    assert functional.cosine_similarity(rows_by(model, engine_of(model), real_proteins), expected).min() > 0.999
    assert lowest_cosine(model, engine_of(model)) > 0.999


def test_the_packed_layers_parameters_are_used_not_copied(small_model):
    engine = engine_of(small_model)
    for layer, packed in zip(engine.layers, small_model.layers, strict=True):
        assert {id(x) for x in layer._layer.parameters()} == {id(x) for x in packed.parameters()}
    assert not any("engine" in name for name in small_model.state_dict())


def exchange_queries_and_keys(layer, heads):
    product = layer.self_attention.layernorm_qkv
    for name in ("weight", "bias"):
        q, k, v = getattr(product, name).chunk(3)
        setattr(product, name, nn.Parameter(torch.cat([k, q, v])))


def leave_rotary_pairs_apart(layer, heads):
    product = layer.self_attention.layernorm_qkv
    for name in ("weight", "bias"):
        q, k, v = (x.reshape(heads, -1, 2, *x.shape[1:]) for x in getattr(product, name).chunk(3))
        parts = [q.transpose(1, 2), k.transpose(1, 2), v]
        setattr(product, name, nn.Parameter(torch.cat([x.reshape(-1, *x.shape[3:]) for x in parts])))


def rotate_halves(layer, heads):
    layer.rotary_pos_interleaved = False


def take_a_head_at_a_time(layer, heads):
    layer.qkv_weight_interleaved = True


def leave_out_biases(layer, heads):
    for module in (layer.self_attention.layernorm_qkv, layer.self_attention.proj, layer.layernorm_mlp):
        for name, parameter in list(module.named_parameters()):
            if name.endswith("bias"):
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))


def exchange_norms(layer, heads):
    first, second = layer.self_attention.layernorm_qkv, layer.layernorm_mlp
    for name in ("layer_norm_weight", "layer_norm_bias"):
        one, other = getattr(first, name), getattr(second, name)
        setattr(first, name, other)
        setattr(second, name, one)


@pytest.mark.data
@pytest.mark.parametrize(
    "mistake",
    [
        exchange_queries_and_keys,
        leave_rotary_pairs_apart,
        rotate_halves,
        take_a_head_at_a_time,
        leave_out_biases,
        exchange_norms,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_mistake_in_weights_or_rotation_is_seen_when_the_model_is_loaded(mistake, real_weights):
    model, _ = load_esm2_model(real_weights, "cpu", precision="fp16")
    engine = engine_of(model)
    for layer in engine.layers:
        mistake(layer._layer, model.architecture.attention_heads)
    found = lowest_cosine(model, engine)
    print(f"{mistake.__name__}: {found:.4f}")
    assert found < te_layers.LEAST_COSINE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("has_triton", [False, True], ids=["plain", "triton"])
def test_on_a_gpu_it_computes_all_but_what_is_wider(card, dtype, has_triton, installed, monkeypatch):
    steps = StepKernels(SimpleNamespace(rotate=lambda *_: None, add_and_normalise=lambda _x, y, _n: y), "")
    monkeypatch.setattr(esm2_flash, "choose_step_kernels", lambda *_: steps if has_triton else StepKernels(None, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: CARDS[card])
    # fake tensors have no numbers
    cosine = SimpleNamespace(min=lambda: 1.0)
    monkeypatch.setattr(te_layers.functional, "cosine_similarity", lambda *_: cosine)
    with torch.device("meta"):
        model = PackedESM2(SMALL, mask_idx=32)
    tensors = {name: x.shape for name, x in model.state_dict().items()}
    lengths = (700, 90, 64, 20)
    with fake_cuda.fake_cuda(), torch.inference_mode():
        state = {name: torch.empty(shape, dtype=dtype, device=fake_cuda.DEVICE) for name, shape in tensors.items()}
        state["rotary_frequencies"] = state["rotary_frequencies"].float()
        model.load_state_dict(state, assign=True)
        model.prepare_for_inference()
        is_engine = dtype is not torch.float32 and card == "sm_90"
        assert model.attention.name.startswith(NAME) == is_engine
        assert model.attention.name.endswith(", triton") == has_triton
        assert "transformer-engine" in model.attention.reason
        layers = [layer._layer for layer in model.engine.layers]
        for layer in layers:
            layer.calls.clear()
        bounds = torch.empty(5, dtype=torch.int32, device=fake_cuda.DEVICE)
        rows_SD = model(torch.empty(874, dtype=torch.int64, device=fake_cuda.DEVICE), bounds, lengths)
        assert (rows_SD.shape, rows_SD.dtype) == ((4, 64), torch.float32)
    assert len(layers) == (3 if is_engine else 0)
    # sequences of up to 64 tokens are in float32 where the model is in bf16
    assert {(d, n) for layer in layers for d, n in layer.calls} == ({(dtype, 704)} if is_engine else set())


@pytest.fixture
def layers_of(monkeypatch):
    """Return what is asked of a model's layers, on a card of that capability."""

    def be(device="cuda", dtype=torch.float16, capability=(9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        weight = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return [SimpleNamespace(get_parameter=lambda _name: weight, named_parameters=lambda: [("fc1.weight", weight)])]

    return be


def refuse(_engine):
    raise AssertionError("nothing is to be tried")


def test_where_it_is_not_installed_nothing_is_said_of_it(layers_of, monkeypatch):
    if importlib.util.find_spec("transformer_engine") is not None:
        monkeypatch.setattr(te_layers, "PACKAGE", "no_such_package")
    assert choose_engine(layers_of(), SMALL, refuse) == Engine()


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "says"),
    [
        ("cpu", torch.float16, (9, 0), "for GPUs"),
        ("cuda", torch.float32, (9, 0), "in float16 and bfloat16"),
        ("cuda", torch.float16, (8, 9), "needs compute capability 9.0"),
    ],
)
def test_elsewhere_it_is_not_tried(device, dtype, capability, says, installed, layers_of):
    chosen = choose_engine(layers_of(device, dtype, capability), SMALL, refuse)
    assert chosen.layers == ()
    assert chosen.name == ""
    assert NAME in chosen.reason
    assert says in chosen.reason


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudnn_graph.so.9: cannot open shared object file"),
        TypeError("TransformerLayer.__init__() got an unexpected keyword argument 'attn_input_format'"),
        RuntimeError("no compiler\n" + "x" * 1000),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_it_fails_the_packed_layers_stay_with_a_short_reason(error, installed, layers_of, monkeypatch):
    class Failing:
        def __init__(self, *_args):
            raise error

    monkeypatch.setattr(te_layers, "EngineLayer", Failing)
    chosen = choose_engine(layers_of(), SMALL, refuse)
    assert (chosen.layers, chosen.name) == ((), "")
    assert f"{NAME} does not run here ({type(error).__name__}: {str(error).splitlines()[0][:40]}" in chosen.reason
    assert "\n" not in chosen.reason
    assert len(chosen.reason) < 280


def test_a_want_of_memory_is_not_taken_for_a_want_of_transformer_engine(installed, layers_of, monkeypatch):
    def fill_up(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(te_layers, "EngineLayer", fill_up)
    with pytest.raises(torch.OutOfMemoryError):
        choose_engine(layers_of(), SMALL, refuse)


@pytest.mark.parametrize("found", [0.9989, float("nan")])
def test_rows_that_differ_leave_the_packed_layers(found, installed, layers_of, monkeypatch):
    monkeypatch.setattr(te_layers, "EngineLayer", lambda *_args: "layer")
    rows = {(): torch.tensor([[1.0, 0.0], [1.0, 0.0]]), ("layer",): torch.tensor([[1.0, 0.0], [found, 1.0]])}
    rows["layer",][1, 1] = (1 - found**2) ** 0.5
    chosen = choose_engine(layers_of(), SMALL, lambda engine: rows[engine.layers])
    assert (chosen.layers, chosen.name) == ((), "")
    assert "differ" in chosen.reason
    rows["layer",] = rows[()]
    assert choose_engine(layers_of(), SMALL, lambda engine: rows[engine.layers]) == Engine(
        ("layer",), NAME, f"{NAME} computes"
    )
