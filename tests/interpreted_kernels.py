"""
Triton's kernels in its interpreter, against PyTorch's operators: run by ``test_triton_kernels.py`` in a process whose
``TRITON_INTERPRET`` is set before triton is imported.

The interpreter cuts float32 to bfloat16 off where a GPU rounds: one unit of the last place more.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

import virnucpro
from benchmarks.gpu_roofline import esm2_kernels
from virnucpro.models import esm2_flash
from virnucpro.models.encoders import fused_linear, triton_kernels
from virnucpro.models.encoders.esm2_checkpoint import Architecture
from virnucpro.models.esm2_flash import PackedESM2, StepKernels, load_esm2_model

assert os.environ.get("TRITON_INTERPRET") == "1"

BUNDLED = Path(virnucpro.__file__).parent / "models" / "weights" / "virnucpro-tiny-protein" / "model.safetensors"
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SEQUENCES = ["MWKLA" * 13 + "M", "GGLVPRGSHM", "W"]


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request):
    torch.manual_seed(27)
    return request.param


def close(found, expected, dtype):
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("head_dim", [16, 24, 64])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 1), (37, 5), (70, 4)])
def test_queries_and_keys_are_rotated_and_values_are_not(dtype, num_tokens, num_heads, head_dim):
    qkv_T3NH = torch.randn(num_tokens, 3, num_heads, head_dim).to(dtype)
    angles = 1000 * torch.rand(num_tokens, 1, head_dim // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    found, expected = qkv_T3NH.clone(), qkv_T3NH.clone()
    triton_kernels.rotate(found, turns)
    esm2_flash._rotate(expected, turns)
    close(found, expected, dtype)
    assert torch.equal(found[:, 2], qkv_T3NH[:, 2])


@pytest.mark.parametrize("dim", [320, 1280, 2560, 256])
@pytest.mark.parametrize("norm_dtype", [None, torch.bfloat16], ids=["weights alike", "weights in bf16"])
def test_a_sum_and_its_norm_are_those_of_pytorch(dtype, dim, norm_dtype):
    x_TD, y_TD = (3 * torch.randn(5, dim).to(dtype) for _ in range(2))
    norm = torch.nn.LayerNorm(dim, eps=0.3, dtype=norm_dtype or dtype).requires_grad_(requires_grad=False)
    norm.weight.normal_(1, 0.5)
    norm.bias.normal_(0, 0.5)
    expected = x_TD + y_TD
    normed = triton_kernels.add_and_normalise(x_TD, y_TD, norm)
    close(x_TD, expected, dtype)
    close(normed, fused_linear.normalised(norm, x_TD), dtype)
    assert normed.data_ptr() == y_TD.data_ptr()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_layers_states_and_the_rows_are_those_without_kernels(precision):
    model, tokenizer = load_esm2_model(BUNDLED, "cpu", precision=precision)
    input_ids_T, lengths_S = tokenizer.encode(SEQUENCES)
    bounds = torch.tensor([0, *lengths_S.tolist()]).cumsum(0).int()
    packed = torch.from_numpy(input_ids_T), bounds, tuple(lengths_S.tolist())
    own = model.embed_tokens.weight.dtype

    def computed():
        with torch.inference_mode():
            return [x.clone() for x in model._states(*packed, own)], model(*packed)

    expected_states, expected_rows = computed()
    model.steps = StepKernels(triton_kernels, "the test says so")
    states, rows = computed()
    assert len(states) == len(expected_states) == len(model.layers) + 1
    least = {"fp32": 1 - 1e-6, "bf16": 0.999, "fp16": 0.99999}[precision]
    for found, expected in zip([*states, rows], [*expected_states, expected_rows], strict=True):
        assert found.shape == expected.shape
        assert torch.cosine_similarity(found.float(), expected.float()).min() > least
        if precision == "fp32":
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # short sequences are computed in float32 with bf16 weights, whose rounding is the same in both
    if precision == "bf16":
        torch.testing.assert_close(rows[1:], expected_rows[1:], rtol=1e-4, atol=1e-4)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators and kernels read and write, by kind; each address once for a launch."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.bytes = Counter()
        self.kind = None
        self.launch = None
        builder = interpreter.InterpreterBuilder
        for name in ("create_masked_load", "create_masked_store"):
            monkeypatch.setattr(builder, name, self.noted(getattr(builder, name), name))

    def noted(self, access, name):
        def call(own, ptrs, *args):
            mask = args[1 if "store" in name else 0]
            itemsize = ptrs.get_element_ty().primitive_bitwidth // 8
            if self.launch is not None:
                self.launch.update((name, itemsize, address) for address in ptrs.data[mask.data].tolist())
            return access(own, ptrs, *args)

        return call

    def of_kind(self, kind, function, *, is_kernel):
        def call(*args):
            self.kind, self.launch = kind, set() if is_kernel else None
            out = function(*args)
            self.bytes[kind] += sum(itemsize for _, itemsize, _ in self.launch or ())
            self.kind = self.launch = None
            return out

        return call

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        kind = self.kind or ("sums and norms" if name in {"add", "layer_norm", "native_layer_norm"} else "other")
        read, written = ([x for x in tree_leaves(some) if isinstance(x, torch.Tensor)] for some in (args, out))
        is_view = not function._schema.is_mutable and {memory(x) for x in written} <= {memory(x) for x in read}
        if self.launch is None and not is_view:
            # what is copied to is not read
            self.bytes[kind] += sum(x.nbytes for x in [*(read[1:] if name == "copy_" else read), *written])
        return out


def memory(tensor):
    return tensor.untyped_storage().data_ptr()


def test_rotary_sums_and_norms_move_at_most_25_bytes_a_channel_of_a_token_and_layer(monkeypatch):
    """
    One layer of the 650M's shape in fp16, less the norm that a model of any depth has once more.

    With 256 tokens the weights of norms, read once, are 0.08 of it.
    """
    num_tokens, width = 256, 1280
    model = PackedESM2(Architecture(num_layers=1, hidden_dim=width, attention_heads=20), mask_idx=32).half()
    model.rotary_frequencies = torch.rand(32)
    packed = torch.randint(4, 24, (num_tokens,)), torch.tensor([0, num_tokens], dtype=torch.int32), (num_tokens,)
    plain, fused = Traffic(monkeypatch), Traffic(monkeypatch)
    monkeypatch.setattr(esm2_flash, "_rotate", plain.of_kind("rotary", esm2_flash._rotate, is_kernel=False))
    steps = SimpleNamespace(
        rotate=fused.of_kind("rotary", triton_kernels.rotate, is_kernel=True),
        add_and_normalise=fused.of_kind("sums and norms", triton_kernels.add_and_normalise, is_kernel=True),
    )
    for traffic, kernels in ((plain, None), (fused, steps)):
        model.steps = StepKernels(kernels, "the test says so")
        states = model._states(*packed, torch.float16)
        with torch.inference_mode():
            next(states)
            with traffic:
                list(states)
    before, after = (
        (x.bytes["rotary"] + x.bytes["sums and norms"]) / (num_tokens * width) - 2 * 2 for x in (plain, fused)
    )
    # the targets of benchmarks/gpu_check.py count the same
    counted = (
        2 * sum(units for flops, units in esm2_kernels(width, num_tokens, is_fused=is_fused) if not flops) - 2 * 8
        for is_fused in (False, True)
    )
    assert (before, after) == pytest.approx(tuple(counted), abs=0.5)
    assert before == pytest.approx(60, abs=0.5)
    assert after <= 25
