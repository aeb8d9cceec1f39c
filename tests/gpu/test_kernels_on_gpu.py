"""Each attention kernel of a GPU against the plain formula; pooling; and that neither makes the host wait."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.unit.test_attention import plain_attention
from virnucpro.models.attention import choose_attention
from virnucpro.models.encoders.attention_kernels import flash_attention, padded_attention, varlen_attention
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
