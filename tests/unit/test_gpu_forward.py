"""
Forward passes as a GPU would run them: right shapes, types and devices, and the host never waits.

Tensors are PyTorch's fake ones of the device ``cuda``; kernels are checked by what they are called with.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu_models
from tests import fake_cuda, kernels_by_definition
from tests.fake_cuda import DEVICE, HostWaitError
from virnucpro.data.packing import plan_blocks
from virnucpro.models.dnabert_s import PackedMosaicBert, alibi_slopes
from virnucpro.models.encoders import attention_kernels
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.encoders.esm2_checkpoint import Architecture
from virnucpro.models.esm2_flash import TRITON_KERNELS, PackedESM2

CARDS = {"sm_70": (7, 0), "sm_75": (7, 5), "sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0)}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ESM2 = {
    name: Architecture(num_layers=1, hidden_dim=shape.hidden_dim, attention_heads=shape.attention_heads)
    for name, shape in gpu_models.ESM2.items()
} | {"150M": Architecture(num_layers=1, hidden_dim=640, attention_heads=20)}
SMALL_BERT = MosaicBertConfig(num_hidden_layers=1)
MIXES = {
    "equal": [168] * 5,
    "sorted": [1024, 700, 699, 64, 33, 12, 3],
    "not sorted": [90, 130, 81, 101, 3000],
}


@pytest.fixture
def card(monkeypatch, request):
    """Be a card of that name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: CARDS[request.param])
    return CARDS[request.param]


@pytest.fixture
def flash_attn(monkeypatch):
    """Stand in for flash-attn; return the calls."""
    calls = []
    module = ModuleType("flash_attn")
    module.__version__ = "2.8.3"
    module.flash_attn_varlen_func = noted(kernels_by_definition.flash_attn_varlen_func, calls)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.fixture
def varlen_attn(monkeypatch):
    """Stand in for PyTorch's kernel; return the calls."""
    calls = []
    monkeypatch.setattr(varlen, "varlen_attn", noted(kernels_by_definition.varlen_attn, calls))
    return calls


@pytest.fixture
def triton_kernels(monkeypatch):
    """Stand in for Triton's kernels, which a trial finds fit; return the calls."""
    calls = []

    def rotate(qkv_T3NH, rotation_TH):
        num_tokens, three, _, head_dim = qkv_T3NH.shape
        assert (three, rotation_TH.shape) == (3, (num_tokens, 1, head_dim // 2))
        assert (rotation_TH.dtype, rotation_TH.device) == (torch.complex64, DEVICE)
        assert qkv_T3NH.is_contiguous()
        assert rotation_TH.is_contiguous()
        calls.append(qkv_T3NH.dtype)

    def add_and_normalise(x_TD, y_TD, norm):
        assert (x_TD.shape, x_TD.dtype, x_TD.device) == (y_TD.shape, y_TD.dtype, y_TD.device)
        assert x_TD.is_contiguous()
        assert y_TD.is_contiguous()
        assert norm.weight.device == DEVICE
        calls.append(norm)
        return y_TD

    stand_in = SimpleNamespace(rotate=rotate, add_and_normalise=add_and_normalise, try_out=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, TRITON_KERNELS, stand_in)
    return calls


def noted(kernel, calls):
    def call(*args, **kwargs):
        calls.append(inspect.signature(kernel).bind(*args, **kwargs).arguments)
        return kernel(*args, **kwargs)

    return call


def packed(lengths):
    """Return what a worker puts on the GPU."""
    bounds = torch.empty(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    return torch.empty(sum(lengths), dtype=torch.int64, device=DEVICE), bounds, tuple(lengths)


def on_meta(make):
    """Return a model without weights, and what each of its tensors is."""
    with torch.device("meta"):
        model = make()
    return model, model.state_dict()


def fill(model, state, dtype, kept=()):
    """Give a model weights on the GPU, as loading does."""
    tensors = {
        name: torch.empty(x.shape, dtype=x.dtype if name in kept else dtype, device=DEVICE) for name, x in state.items()
    }
    model.load_state_dict(tensors, assign=True)
    model.prepare_for_inference()


def check_rows(compute, dim):
    for lengths in MIXES.values():
        rows_SD = compute(*packed(lengths))
        assert rows_SD.shape == (len(lengths), dim)
        assert rows_SD.dtype is torch.float32
        assert rows_SD.device == DEVICE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("card", "shape"),
    [*((card, "8M") for card in CARDS), *(("sm_90", shape) for shape in ESM2 if shape != "8M")],
    indirect=["card"],
)
def test_esm2_gives_rows_on_every_card(card, dtype, shape):
    model, state = on_meta(lambda: PackedESM2(ESM2[shape], mask_idx=32))
    with fake_cuda.fake_cuda(), torch.inference_mode():
        fill(model, state, dtype, kept={"rotary_frequencies"})
        is_varlen = dtype is not torch.float32 and card >= (8, 0)
        assert model.attention.name == ("varlen_attn" if is_varlen else "sdpa-padded")
        check_rows(model, ESM2[shape].hidden_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("card", ["sm_75", "sm_80", "sm_90"], indirect=True)
def test_esm2_gives_rows_with_kernels_between_its_products(card, dtype, triton_kernels):
    model, state = on_meta(lambda: PackedESM2(ESM2["8M"], mask_idx=32))
    with fake_cuda.fake_cuda(), torch.inference_mode():
        fill(model, state, dtype, kept={"rotary_frequencies"})
        check_rows(model, ESM2["8M"].hidden_dim)
    is_fused = dtype is not torch.float32 and card >= (8, 0)
    assert model.attention.name.endswith(", triton") == is_fused
    # short sequences of a model in bf16 are computed in fp16
    wide = {torch.float16} if dtype is torch.bfloat16 else set()
    assert {call for call in triton_kernels if isinstance(call, torch.dtype)} == ({dtype} | wide if is_fused else set())
    (layer,) = model.layers
    assert triton_kernels[1:3] == ([layer.final_layer_norm, model.emb_layer_norm_after] if is_fused else [])


@pytest.mark.parametrize("has_flash", [False, True], ids=["without flash-attn", "with flash-attn"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("card", ["sm_75", "sm_90"], indirect=True)
def test_dnabert_s_gives_rows_on_every_card(card, dtype, has_flash, request):
    calls = request.getfixturevalue("flash_attn") if has_flash else []
    model, state = on_meta(lambda: PackedMosaicBert(SMALL_BERT))
    with fake_cuda.fake_cuda(), torch.inference_mode():
        fill(model, state, dtype)
        is_flash = has_flash and dtype is not torch.float32 and card >= (8, 0)
        assert model.attention.name == ("flash-attn 2.8.3" if is_flash else "sdpa-padded")
        check_rows(model, 768)
    assert bool(calls) == is_flash


@pytest.mark.parametrize("make", [lambda: PackedESM2(ESM2["8M"], mask_idx=32), lambda: PackedMosaicBert(SMALL_BERT)])
@pytest.mark.parametrize("card", ["sm_75", "sm_90"], indirect=True)
def test_what_overflowed_is_computed_in_float32_by_a_kernel_that_can(card, make, flash_attn, monkeypatch):
    model, state = on_meta(make)
    with fake_cuda.fake_cuda(), torch.inference_mode():
        fill(model, state, torch.float16, kept={"rotary_frequencies"})
        monkeypatch.setattr(varlen, "varlen_attn", lambda *_: pytest.fail("it takes no float32"))
        check_rows(model.in_float32, model.hidden_dim)
    assert flash_attn == []


class Launches(TorchDispatchMode):
    """Counts operators that compute or copy: neither views nor allocations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in function._schema.returns)
        self.count += not is_view and "empty" not in function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_a_block_of_dnabert_s_is_few_launches_though_its_lengths_are_in_no_order(card):
    tokens = gpu_models.dna_tokens(8000)
    lengths = [tokens[number] for number in plan_blocks(tokens, token_budget=65549)[0]]
    model, state = on_meta(lambda: PackedMosaicBert(MosaicBertConfig()))
    with fake_cuda.fake_cuda(), torch.inference_mode():
        fill(model, state, torch.bfloat16)
        batch = packed(lengths)
        with Launches() as launches:
            model(*batch)
    print(f"{sum(lengths)} tokens, {launches.count} launches")
    assert model.attention.name == "sdpa-padded"
    assert launches.count <= 500


@pytest.mark.parametrize("shape", ["8M", "3B"])
def test_the_real_variable_length_kernel_of_this_torch_takes_what_esm2_gives_it(shape):
    width = ESM2[shape].head_dim
    q_TNH, k_TNH, v_TNH = (torch.empty(20, 4, width, dtype=torch.float16, device="meta") for _ in range(3))
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    out_TNH = attention_kernels.varlen_attention(q_TNH, k_TNH, v_TNH, bounds, (12, 8))
    assert (out_TNH.shape, out_TNH.dtype) == (v_TNH.shape, torch.float16)


def test_the_stand_ins_have_the_parameters_of_the_kernels():
    own = inspect.signature(kernels_by_definition.varlen_attn).parameters
    assert [*own] == [*inspect.signature(varlen.varlen_attn).parameters][: len(own)]
    if importlib.util.find_spec("flash_attn") is not None:
        real = importlib.import_module("flash_attn").flash_attn_varlen_func
        assert [*inspect.signature(kernels_by_definition.flash_attn_varlen_func).parameters] == [
            *inspect.signature(real).parameters
        ]


@pytest.mark.parametrize("alibi", [False, True], ids=["without slopes", "with slopes"])
@pytest.mark.parametrize("kernel", ["varlen_attention", "flash_attention", "padded_attention"])
def test_kernels_of_gpus_attend_as_the_one_of_the_cpu(kernel, alibi, varlen_attn, flash_attn):
    if kernel == "varlen_attention" and alibi:
        with pytest.raises(AssertionError, match="takes no slopes"):
            getattr(attention_kernels, kernel)(None, None, None, None, (), torch.ones(4))
        return
    lengths = (9, 4, 16, 1)
    generator = torch.Generator().manual_seed(26)
    q_TNH, k_TNH, v_TNH = (torch.randn(30, 4, 8, generator=generator) for _ in range(3))
    bounds = torch.tensor([0, 9, 13, 29, 30], dtype=torch.int32)
    slopes_N = alibi_slopes(4) if alibi else None
    found = getattr(attention_kernels, kernel)(q_TNH, k_TNH, v_TNH, bounds, lengths, slopes_N)
    expected = attention_kernels.equal_length_attention(q_TNH, k_TNH, v_TNH, bounds, lengths, slopes_N)
    assert torch.allclose(found, expected, atol=1e-5)
    calls = {"varlen_attention": varlen_attn, "flash_attention": flash_attn}.get(kernel, [])
    assert all(call["max_q" if "max_q" in call else "max_seqlen_q"] == 16 for call in calls)
    assert len(calls) == (kernel != "padded_attention")


def test_waiting_for_the_device_is_seen():
    with fake_cuda.fake_cuda():
        x_T = torch.empty(4, device=DEVICE)
        for wait in (x_T.cpu, lambda: x_T.sum().item(), lambda: x_T.repeat_interleave(x_T.long())):
            with pytest.raises(HostWaitError):
                wait()
