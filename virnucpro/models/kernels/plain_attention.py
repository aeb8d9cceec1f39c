"""
Attention by PyTorch's ``scaled_dot_product_attention``, for sequences of equal length; every device, every precision.

Legend: T packed tokens, N heads, H head width, G sequences of one group, L tokens of each of them, Q queries.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BIAS_ELEMENTS = 1 << 24
"""Numbers of an ALiBi bias at a time in PyTorch's kernel: 64 MiB in float32."""


def equal_length_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    cu_seqlens: torch.Tensor,  # noqa: ARG001  the signature of every kernel; this one works from the host's lengths
    lengths: Sequence[int],
    alibi_slopes_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend with one ``scaled_dot_product_attention`` for each run of neighbours of equal length.

    A length-sorted batch has few such runs, and none is padded or copied: a group is a view (G, N, L, H).
    """
    out_TNH = torch.empty_like(v_TNH, memory_format=torch.contiguous_format)
    for tokens, group_shape in equal_length_runs(lengths):
        q_GNLH, k_GNLH, v_GNLH = (
            x_TNH[tokens].view(*group_shape, *x_TNH.shape[1:]).transpose(1, 2) for x_TNH in (q_TNH, k_TNH, v_TNH)
        )
        out_GNLH = plain_attention(q_GNLH, k_GNLH, v_GNLH, alibi_slopes_N)
        out_TNH[tokens] = out_GNLH.transpose(1, 2).flatten(0, 1)
    return out_TNH


def equal_length_runs(lengths: Sequence[int]) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield the runs of neighbours of equal length: the tokens as a slice of T, and (sequences, tokens of each)."""
    start = 0
    for length, run in groupby(lengths):
        num_sequences = sum(1 for _ in run)
        stop = start + num_sequences * length
        yield slice(start, stop), (num_sequences, length)
        start = stop


def plain_attention(
    q_GNLH: torch.Tensor, k_GNLH: torch.Tensor, v_GNLH: torch.Tensor, alibi_slopes_N: torch.Tensor | None
) -> torch.Tensor:
    """
    Attend within sequences of equal length by PyTorch's kernel, shape (G, N, L, H).

    With slopes a long sequence's queries go some at a time (at least one), so that the memory of the bias is bounded by
    ``_BIAS_ELEMENTS``, not by the square of the length.
    """
    if alibi_slopes_N is None:
        return functional.scaled_dot_product_attention(q_GNLH, k_GNLH, v_GNLH)
    length = q_GNLH.shape[2]
    step = max(1, _BIAS_ELEMENTS // (len(alibi_slopes_N) * length))
    attended = []
    for first in range(0, length, step):
        queries = range(first, min(first + step, length))
        # four dimensions: with three, PyTorch 2.13 takes a path that is 4 to 9 times as slow on a CPU
        bias_1NQL = alibi_bias(alibi_slopes_N, length, queries)[None].to(q_GNLH.dtype)
        q_GNQH = q_GNLH[:, :, first : queries.stop]
        attended.append(functional.scaled_dot_product_attention(q_GNQH, k_GNLH, v_GNLH, attn_mask=bias_1NQL))
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)


def alibi_bias(alibi_slopes_N: torch.Tensor, length: int, queries: range | None = None) -> torch.Tensor:
    """Return ALiBi's addition to the scores of *queries* (by default all), ``-slope * abs(i - j)``, shape (N, Q, L)."""
    positions_L = torch.arange(length, device=alibi_slopes_N.device, dtype=alibi_slopes_N.dtype)
    asking_Q = positions_L if queries is None else positions_L[queries.start : queries.stop]
    return -alibi_slopes_N[:, None, None] * (asking_Q[:, None] - positions_L).abs()
