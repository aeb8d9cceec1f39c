"""
ESM-2's steps between matrix products as Triton kernels, each one pass over its tensors, in place; float32 inside.

Importing this needs triton, which PyTorch's CUDA builds bring. A kernel is compiled once for a model's shape and number
format, not for a number of tokens. Legend: T tokens, N heads, H head width, D model width.
"""

from __future__ import annotations

import torch
import triton
from triton import language as tl

_ROTARY_ELEMENTS = 2048
"""Numbers that a program rotates: 16 for each thread of four warps."""
_FUSION = {"enable_fp_fusion": True}
"""Products and sums in one instruction; stated, as the default differs between versions of Triton."""


def try_out(device: torch.device, dtype: torch.dtype, *, num_heads: int, head_dim: int) -> None:
    """Compile both kernels for a model's shape and run them once; raises whatever prevents it."""
    qkv_T3NH = torch.zeros(2, 3, num_heads, head_dim, device=device, dtype=dtype)
    rotate(qkv_T3NH, torch.zeros(2, 1, head_dim // 2, device=device, dtype=torch.complex64))
    x_TD, y_TD, _ = qkv_T3NH.flatten(2).transpose(0, 1).contiguous()
    add_and_normalise(x_TD, y_TD, torch.nn.LayerNorm(num_heads * head_dim, device=device, dtype=dtype))
    torch.cuda.synchronize(device)


def rotate(qkv_T3NH: torch.Tensor, rotation_TH: torch.Tensor) -> None:
    """Rotate queries and keys, each pair of neighbouring channels by its token's complex64 turn, shape (T, 1, H/2)."""
    assert qkv_T3NH.is_contiguous()
    assert rotation_TH.is_contiguous()
    num_tokens, _, num_heads, head_dim = qkv_T3NH.shape
    width = triton.next_power_of_2(head_dim)
    rows = _ROTARY_ELEMENTS // width
    num_rows = num_tokens * 2 * num_heads
    with torch.cuda.device_of(qkv_T3NH):
        _rotate_rows[triton.cdiv(num_rows, rows),](
            qkv_T3NH, torch.view_as_real(rotation_TH), num_rows, num_heads, head_dim, width, rows, **_FUSION
        )


def add_and_normalise(x_TD: torch.Tensor, y_TD: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
    """Add *y_TD* to *x_TD* in place and return the sum's layer norm, in the memory of *y_TD*."""
    assert x_TD.is_contiguous()
    assert y_TD.is_contiguous()
    num_tokens, dim = x_TD.shape
    width = triton.next_power_of_2(dim)
    with torch.cuda.device_of(x_TD):
        _add_and_normalise_row[num_tokens,](
            x_TD, y_TD, norm.weight, norm.bias, norm.eps, dim, width, num_warps=4 if width <= 2048 else 8, **_FUSION
        )
    return y_TD


# a row is one head of one token's queries or keys; their number fits 32 bits, their offsets do not
@triton.jit(do_not_specialize=["num_rows"])
def _rotate_rows(
    qkv, rotation, num_rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, WIDTH)[None, :]
    inside = (rows < num_rows)[:, None] & (channels < HEAD_DIM)
    tokens = (rows // (2 * HEADS)).to(tl.int64)
    heads = rows % (2 * HEADS)
    at = qkv + (tokens * (3 * HEADS * HEAD_DIM) + heads * HEAD_DIM)[:, None] + channels
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    turns = tl.load(rotation + (tokens * HEAD_DIM)[:, None] + channels, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, (ROWS, WIDTH // 2, 2)))
    cosine, sine = tl.split(tl.reshape(turns, (ROWS, WIDTH // 2, 2)))
    rotated = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    tl.store(at, tl.reshape(rotated, (ROWS, WIDTH)).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _add_and_normalise_row(x, y, weight, bias, EPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    channels = tl.arange(0, WIDTH)
    inside = channels < DIM
    at = tl.program_id(0).to(tl.int64) * DIM + channels
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(y + at, mask=inside, other=0.0)
    stored = total.to(x.dtype.element_ty)
    tl.store(x + at, stored, mask=inside)
    # the norm is that of the numbers stored, as without this kernel
    total = stored.to(tl.float32)
    mean = tl.sum(total, 0) / DIM
    centred = tl.where(inside, total - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / DIM + EPS)
    gain = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (centred * scale * gain + shift).to(y.dtype.element_ty), mask=inside)
