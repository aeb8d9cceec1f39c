"""
Attention kernels: PyTorch's for equal lengths, plain exponentials on a CPU, and those of GPUs.

``equal_length_attention`` works on every device and in every precision; ``exponential_attention`` is for float32 on a
CPU; ``varlen_attention``, ``flash_attention`` and, where neither is possible, ``padded_attention`` are for GPUs.

Legend: T packed tokens, S sequences, N heads, H head width, G sequences of one group, L tokens of each of them (padding
included), P = G * L slots, Q queries.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_BIAS_ELEMENTS = 1 << 24
"""Numbers of an ALiBi bias at a time in PyTorch's kernel: 64 MiB in float32."""
_CACHED_SCORES = 1 << 18
"""Scores at a time: 1 MiB, half of a second-level cache of 2 MiB."""
_CONTIGUOUS_TOKENS = 256
"""Tokens of a sequence from which copying its heads together pays: they are read more often."""
_KEPT_BIAS_TOKENS = 512
"""Tokens of a sequence up to which an ALiBi bias is made once for the whole batch."""
_SAFE_SUMS = (1e-20, 1e30)
"""Row sums of exponentials between which nothing significant has vanished or overflowed."""
_EXP_TOLERANCE = 1e-6
"""Largest relative error of an exponential in float32; right ones are within 6e-8."""
_PADDED_SHARE = 1.25
"""Most slots of a padded group over its tokens."""
_GROUP_BIAS_ELEMENTS = 1 << 27
"""Most numbers of the ALiBi bias of one padded group (256 MiB in bfloat16)."""
_KEPT_BIAS_ELEMENTS = 1 << 28
"""Most numbers of biases that a forward pass keeps for its next layer (512 MiB in bfloat16)."""


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


def exponentials_are_exact() -> bool:
    """
    Whether this process computes exponentials in float32 to the last bits; call it before any that count.

    The first call of MKL's vector exp in a process was seen with a relative error of 1.5e-4, in 4 of some 2,000
    processes (torch 2.13, MKL 2024.2); later calls never. So the first one is made here and not used.
    """
    x = torch.linspace(-8, 8, 6400)
    exact = x.double().exp()
    return any(float(((x.clone().exp_().double() - exact) / exact).abs().max()) < _EXP_TOLERANCE for _ in range(3))


def exponential_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    cu_seqlens: torch.Tensor,  # noqa: ARG001  the signature of every kernel; this one works from the host's lengths
    lengths: Sequence[int],
    alibi_slopes_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend in float32 on a CPU, one sequence after the other.

    PyTorch's fused kernel processes scores row by row, which for sequences of a hundred tokens costs more than the
    products. Here the heads of a sequence are one batch: scores, exp and weighted sum are three calls over contiguous
    memory that stays in a core's second-level cache. The usual subtraction of each row's maximum is omitted, since
    softmax does not depend on it: exp does not overflow below 88, and relative errors are the same. A sequence whose
    sums leave the safe range is computed by PyTorch's kernel instead. Measured on one AVX-512 core against
    ``scaled_dot_product_attention``: 1.4 to 1.5 times as fast at 34 to 168 tokens and heads of 16, 1.2 to 1.4 with
    heads of 32 and 64; at 350 to 2,000 tokens 1.1 to 1.25 times.
    """
    num_heads = v_TNH.shape[1]
    out_TNH = torch.empty_like(v_TNH, memory_format=torch.contiguous_format)
    sums_NT1 = v_TNH.new_empty(num_heads, v_TNH.shape[0], 1)
    bias_of = _Bias(alibi_slopes_N, lengths)
    scratch = v_TNH.new_empty(max(_CACHED_SCORES, *lengths))
    by_sequence = [
        torch.split(x_NTC, list(lengths), dim=1)
        for x_NTC in (*(x_TNH.transpose(0, 1) for x_TNH in (q_TNH, k_TNH, v_TNH, out_TNH)), sums_NT1)
    ]
    for q_NLH, k_NLH, v_NLH, out_NLH, sums_NL1 in zip(*by_sequence, strict=True):
        length = q_NLH.shape[1]
        if num_heads * length**2 <= _CACHED_SCORES:
            bias_NLL = bias_of(slice(0, num_heads), slice(0, length), length)
            _attend(q_NLH, k_NLH, v_NLH, out_NLH, sums_NL1, bias_NLL, scratch)
            continue
        if length >= _CONTIGUOUS_TOKENS:
            q_NLH, k_NLH, v_NLH = (x_NLH.contiguous() for x_NLH in (q_NLH, k_NLH, v_NLH))  # noqa: PLW2901
        for heads, queries in _pieces(num_heads, length):
            piece = (heads, queries)
            bias_NQL = bias_of(heads, queries, length)
            _attend(q_NLH[piece], k_NLH[heads], v_NLH[heads], out_NLH[piece], sums_NL1[piece], bias_NQL, scratch)
    if not _are_safe(sums_NT1):
        for q_NLH, k_NLH, v_NLH, out_NLH, sums_NL1 in zip(*by_sequence, strict=True):
            if not _are_safe(sums_NL1):
                out_NLH.copy_(plain_attention(q_NLH[None], k_NLH[None], v_NLH[None], alibi_slopes_N)[0])
    return out_TNH


def _are_safe(sums: torch.Tensor) -> bool:
    """Whether nothing significant vanished or overflowed in any row; NaN is not safe."""
    smallest, largest = (float(extreme) for extreme in sums.aminmax())
    return smallest > _SAFE_SUMS[0] and largest < _SAFE_SUMS[1]


def _pieces(num_heads: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Divide a sequence's scores into heads and queries that fit the cache: whole heads, or some queries of one."""
    heads = max(1, _CACHED_SCORES // length**2)
    at_most = length if length**2 <= _CACHED_SCORES else max(1, _CACHED_SCORES // length)
    queries = -(-length // -(-length // at_most))  # as many parts, of like size
    for head in range(0, num_heads, heads):
        for query in range(0, length, queries):
            yield slice(head, min(head + heads, num_heads)), slice(query, min(query + queries, length))


class _Bias:
    def __init__(self, slopes_N: torch.Tensor | None, lengths: Sequence[int]) -> None:
        self._slopes_N = slopes_N
        longest = max((length for length in lengths if length <= _KEPT_BIAS_TOKENS), default=0)
        self._kept_NLL = None if slopes_N is None else alibi_bias(slopes_N, longest)

    def __call__(self, heads: slice, queries: slice, length: int) -> torch.Tensor | None:
        if self._slopes_N is None or self._kept_NLL is None:
            return None
        if length <= _KEPT_BIAS_TOKENS:
            return self._kept_NLL[heads, queries, :length]
        return alibi_bias(self._slopes_N[heads], length, range(queries.start, queries.stop))


def _attend(
    q_NQH: torch.Tensor,
    k_NLH: torch.Tensor,
    v_NLH: torch.Tensor,
    out_NQH: torch.Tensor,
    sums_NQ1: torch.Tensor,
    bias_NQL: torch.Tensor | None,
    scratch: torch.Tensor,
) -> None:
    """Attend within one sequence, some heads and queries; *out_NQH*, *sums_NQ1* and *scratch* are overwritten."""
    num_heads, queries, head_dim = q_NQH.shape
    length = k_NLH.shape[1]
    scores_NQL = scratch[: num_heads * queries * length].view(num_heads, queries, length)
    added, beta = (scores_NQL, 0) if bias_NQL is None else (bias_NQL, 1)
    torch.baddbmm(added, q_NQH, k_NLH.mT, beta=beta, alpha=head_dim**-0.5, out=scores_NQL)
    scores_NQL.exp_()
    torch.sum(scores_NQL, -1, keepdim=True, out=sums_NQ1)
    torch.div(torch.bmm(scores_NQL, v_NLH), sums_NQ1, out=out_NQH)


def varlen_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: Sequence[int],
    alibi_slopes_N: torch.Tensor | None = None,
) -> torch.Tensor:
    assert alibi_slopes_N is None, "varlen_attn takes no slopes"
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    longest = max(lengths)
    out_TNH: torch.Tensor = varlen_attn(q_TNH, k_TNH, v_TNH, cu_seqlens, cu_seqlens, longest, longest)
    return out_TNH


def flash_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: Sequence[int],
    alibi_slopes_N: torch.Tensor | None = None,
) -> torch.Tensor:
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func
    longest = max(lengths)
    out_TNH: torch.Tensor = flash_attn_varlen_func(
        q_TNH, k_TNH, v_TNH, cu_seqlens, cu_seqlens, longest, longest, alibi_slopes=alibi_slopes_N
    )
    return out_TNH


def padded_attention(
    q_TNH: torch.Tensor,
    k_TNH: torch.Tensor,
    v_TNH: torch.Tensor,
    cu_seqlens: torch.Tensor,
    lengths: Sequence[int],
    alibi_slopes_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attend with one ``scaled_dot_product_attention`` for each group of like lengths, padded to the longest.

    Few calls for many lengths, at the price of copies into and out of the padded form: made for GPUs.
    """
    return PaddedAttention()(q_TNH, k_TNH, v_TNH, cu_seqlens, lengths, alibi_slopes_N)


class PaddedAttention:
    """``padded_attention`` for the layers of one forward pass: groups, slots and biases are made by its first call."""

    def __init__(self) -> None:
        self._groups: list[_PaddedGroup] = []

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        alibi_slopes_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, *heads = v_TNH.shape
        self._groups = self._groups or list(_slots(cu_seqlens, lengths, heads[0], alibi=alibi_slopes_N is not None))
        out_TNH = v_TNH.new_empty(num_tokens + 1, *heads)  # the last row takes what padding attends to
        kept = 0
        for group in self._groups:
            q_GNLH, k_GNLH, v_GNLH = (x_TNH[group.source_GL].transpose(1, 2) for x_TNH in (q_TNH, k_TNH, v_TNH))
            if group.is_token_GL is None:
                # the whole bias of one sequence could be larger than the device: some of its queries at a time
                out_GNLH = plain_attention(q_GNLH, k_GNLH, v_GNLH, alibi_slopes_N)
            else:
                bias = group.bias
                if bias is None:
                    bias = _padded_bias(group.is_token_GL, alibi_slopes_N, q_TNH.dtype)
                if kept + bias.numel() <= _KEPT_BIAS_ELEMENTS:
                    group.bias, kept = bias, kept + bias.numel()
                out_GNLH = functional.scaled_dot_product_attention(q_GNLH, k_GNLH, v_GNLH, attn_mask=bias)
                del bias
            del q_GNLH, k_GNLH, v_GNLH  # the copies below are as large
            out_TNH.index_copy_(0, group.target_P, out_GNLH.transpose(1, 2).flatten(0, 1))
        return out_TNH[:num_tokens]


@dataclass
class _PaddedGroup:
    """Which tokens the slots of a group hold."""

    source_GL: torch.Tensor
    """Token of each slot; a sequence's last one also in its padding, so that no sequence's numbers reach another."""
    target_P: torch.Tensor
    """Row of the result; T, which is none, for padding."""
    is_token_GL: torch.Tensor | None
    """None: the bias is too large to be made as a whole."""
    bias: torch.Tensor | None = None
    """As ``_padded_bias`` returns it; None: made by each layer."""


def _slots(cu_seqlens: torch.Tensor, lengths: Sequence[int], num_heads: int, *, alibi: bool) -> Iterator[_PaddedGroup]:
    """Yield the groups of a batch, its sequences taken longest first; the host waits for no number of the device."""
    sorted_S, order_S = cu_seqlens.diff().sort(descending=True, stable=True)
    starts_S = cu_seqlens[order_S]
    longest_first = sorted(lengths, reverse=True)
    for sequences, _, width in padded_groups(longest_first, num_heads=num_heads, alibi=alibi):
        is_too_large = alibi and num_heads * width**2 > _GROUP_BIAS_ELEMENTS
        columns_L = torch.arange(longest_first[sequences.start] if is_too_large else width, device=cu_seqlens.device)
        lengths_G1 = sorted_S[sequences, None]
        source_GL = starts_S[sequences, None] + columns_L.minimum(lengths_G1 - 1)
        is_token_GL = columns_L < lengths_G1
        target_P = source_GL.where(is_token_GL, sum(lengths)).flatten()
        yield _PaddedGroup(source_GL, target_P, None if is_too_large else is_token_GL)


def _padded_bias(is_token_GL: torch.Tensor, alibi_slopes_N: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """
    Return what is added to scores: minus infinity at padding, shape (G, 1, 1, L); with ALiBi's bias, (G, N, L, L).

    The heads are made from one matrix of distances: in float32 theirs would need twice the memory of the result.
    """
    is_token_G11L = is_token_GL[:, None, None, :]
    if alibi_slopes_N is None:
        return torch.zeros_like(is_token_G11L, dtype=dtype).masked_fill_(~is_token_G11L, float("-inf"))
    num_sequences, length = is_token_GL.shape
    bias_GNLL = alibi_slopes_N.new_empty(num_sequences, len(alibi_slopes_N), length, length, dtype=dtype)
    minus_distances_1LL = alibi_bias(alibi_slopes_N.new_ones(1), length)
    masked_G1LL = minus_distances_1LL.where(is_token_G11L, float("-inf"))
    return torch.mul(masked_G1LL, alibi_slopes_N[:, None, None], out=bias_GNLL)


def padded_groups(lengths: Sequence[int], *, num_heads: int, alibi: bool) -> Iterator[tuple[slice, slice, int]]:
    """
    Divide a batch into groups of neighbours that are worth padding to one width.

    Yields sequences as a slice of S, tokens as a slice of T, and the width L, a multiple of 16 (the kernels' alignment
    of a bias). *alibi*: each group needs a bias of (G, N, L, L).
    """
    first = token = tokens = slots = longest = 0
    for number, length in enumerate(lengths):
        wanted = max(longest, -(-length // 16) * 16)
        count = number - first + 1
        is_full = alibi and count * num_heads * wanted**2 > _GROUP_BIAS_ELEMENTS
        if count > 1 and (is_full or wanted * count > _PADDED_SHARE * (slots + -(-length // 16) * 16)):
            yield slice(first, number), slice(token, token + tokens), longest
            first, token, tokens, slots = number, token + tokens, 0, 0
            wanted = -(-length // 16) * 16
        longest, tokens, slots = wanted, tokens + length, slots + -(-length // 16) * 16
    if tokens:
        yield slice(first, len(lengths)), slice(token, token + tokens), longest
