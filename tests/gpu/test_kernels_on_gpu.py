"""Kernels of a GPU against the plain formula or PyTorch's operators; pooling; and that none makes the host wait."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_models
from benchmarks.gpu_steps import step_errors
from tests.unit.test_attention import plain_attention
from virnucpro.models.attention import choose_attention
from virnucpro.models.encoders.attention_kernels import flash_attention, padded_attention, varlen_attention
from virnucpro.models.esm2_flash import TRITON_KERNELS, StepKernels, choose_step_kernels
from virnucpro.models.pooling import mean_over_residues, mean_over_tokens

LENGTHS = (168, 1024, 17, 700, 101, 168, 33, 5, 3, 1)
HALVES = [torch.bfloat16, torch.float16]
needs_varlen = pytest.mark.skipif(
    importlib.util.find_spec("torch.nn.attention.varlen") is None, reason="this PyTorch has no varlen_attn"
)
needs_flash = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")


def packed(cuda, dtype, *, head_dim=64, heads=4):
    torch.manual_seed(head_dim)
    # views of one product, as the models hand them over
    q, k, v = torch.randn(sum(LENGTHS), 3, heads, head_dim, device=cuda).to(dtype).unbind(1)
    return q, k, v, torch.tensor([0, *LENGTHS], device=cuda).cumsum(0).int(), LENGTHS


def relative_error(out, batch, slopes=None):
    q, k, v, cu_seqlens, lengths = batch
    slopes = None if slopes is None else slopes.cpu()
    expected = plain_attention(q.cpu(), k.cpu(), v.cpu(), cu_seqlens.cpu(), lengths, slopes)
    return float((out.cpu().double() - expected).norm() / expected.norm())


@needs_varlen
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64])
def test_varlen_attn_is_the_formula(cuda, dtype, head_dim):
    batch = packed(cuda, dtype, head_dim=head_dim)
    assert relative_error(varlen_attention(*batch), batch) < 1e-2


@needs_flash
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("alibi", [False, True])
def test_flash_attn_is_the_formula(cuda, dtype, alibi):
    batch = packed(cuda, dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=cuda) if alibi else None
    assert relative_error(flash_attention(*batch, slopes), batch, slopes) < 1e-2


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_padded_kernel_is_the_formula(cuda, dtype, most, alibi):
    batch = packed(cuda, dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=cuda) if alibi else None
    assert relative_error(padded_attention(*batch, slopes), batch, slopes) < most


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_chosen_kernel_runs_gives_equal_bits_and_never_makes_the_host_wait(cuda, dtype, alibi):
    choice = choose_attention(cuda, dtype, head_dim=64, alibi=alibi)
    batch = packed(cuda, dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=cuda) if alibi else None
    first = choice.kernel(*batch, slopes)
    torch.cuda.set_sync_debug_mode("error")
    try:
        others = [kernel(*batch, slopes) for kernel in (choice.kernel, *[choice.for_forward_pass()] * 3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("pool", [mean_over_residues, mean_over_tokens])
def test_pooling_on_a_gpu_is_pooling_on_a_cpu_without_a_wait(cuda, pool):
    lengths = LENGTHS[:-1]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    hidden = torch.randn(sum(lengths), 320).bfloat16()
    on_gpu = hidden.to(cuda), cu_seqlens.to(cuda), lengths
    pool(*on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        means = [pool(*on_gpu) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    assert (means[0].cpu() - pool(hidden, cu_seqlens, lengths)).abs().max() < 1e-6


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this PyTorch has no Triton")
SHAPE = gpu_models.ESM2["650M"]


@pytest.fixture
def triton_kernels():
    return importlib.import_module(TRITON_KERNELS)


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
def test_tritons_kernels_are_chosen(cuda, dtype):
    chosen = choose_step_kernels(cuda, dtype, SHAPE)
    assert chosen.kernels is not None, chosen.reason


@needs_triton
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("heads", "head_dim"), [(20, 16), (20, 24), (20, 64), (40, 64)])
@pytest.mark.parametrize("num_tokens", [1, 2, 1001])
def test_tritons_kernels_are_pytorchs_operators(cuda, triton_kernels, dtype, most, heads, head_dim, num_tokens):
    errors = step_errors(triton_kernels, cuda, dtype, heads, head_dim, num_tokens=num_tokens)
    assert max(errors.values()) < most, errors


@needs_triton
def test_tritons_kernels_find_tokens_beyond_two_to_the_31_numbers(cuda, triton_kernels):
    num_tokens = (1 << 31) // (3 * SHAPE.hidden_dim) + 100
    qkv = torch.ones(num_tokens, 3, SHAPE.attention_heads, SHAPE.head_dim, device=cuda, dtype=torch.float16)
    turns = torch.full((num_tokens, 1, SHAPE.head_dim // 2), 1j, device=cuda, dtype=torch.complex64)
    triton_kernels.rotate(qkv, turns)
    for tokens in (slice(0, 1), slice(-150, None)):
        pairs = qkv[tokens, :2].unflatten(-1, (-1, 2))
        assert bool((pairs[..., 0] == -1).all())
        assert bool((pairs[..., 1] == 1).all())
    del turns
    x_TD = qkv.view(-1, SHAPE.hidden_dim)
    norm = torch.nn.LayerNorm(SHAPE.hidden_dim, device=cuda, dtype=torch.float16).requires_grad_(requires_grad=False)
    triton_kernels.add_and_normalise(x_TD, torch.ones_like(x_TD), norm)
    assert bool((x_TD[-1] == 2).all())


@needs_triton
def test_no_number_of_tokens_compiles_anew(cuda, triton_kernels, monkeypatch):
    triton = importlib.import_module("triton")
    # a shape that no other test has
    triton_kernels.try_out(cuda, torch.bfloat16, num_heads=12, head_dim=40)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **_: compiled.append(1))
    for num_tokens in (1, 2, 16, 17, 1001, 4096):
        step_errors(triton_kernels, cuda, torch.bfloat16, 12, 40, num_tokens=num_tokens)
    assert not compiled
    triton_kernels.try_out(cuda, torch.bfloat16, num_heads=12, head_dim=48)
    assert compiled


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
def test_a_models_rows_with_and_without_tritons_kernels(cuda, dtype):
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], cuda, dtype)
    (batch,) = gpu_models.blocks_of([1024, 700, 168, 168, 101, 70, 33, 17, 5, 3], token_budget=10**5)
    inputs = batch.input_ids_T.to(cuda), batch.cu_seqlens.to(cuda), batch.lengths
    first = model(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
    model.steps = StepKernels(None, "the test says so")
    assert torch.cosine_similarity(first, model(*inputs)).min() > 0.999


@needs_triton
def test_without_a_c_compiler_pytorchs_operators_are_left(tmp_path):
    tried = (
        "import torch; from benchmarks import gpu_models; from virnucpro.models.esm2_flash import choose_step_kernels; "
        "chosen = choose_step_kernels(torch.device('cuda:0'), torch.bfloat16, gpu_models.ESM2['8M']); "
        "assert chosen.kernels is None; print(chosen.reason)"
    )
    kept = {name: value for name, value in os.environ.items() if name not in {"CC", "PATH"}}
    changed = {"PATH": "/nonexistent", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", tried],
        cwd=Path(__file__).parents[2],
        env=kept | changed,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Triton kernels do not run here" in done.stdout
