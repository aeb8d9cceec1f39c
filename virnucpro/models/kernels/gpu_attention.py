"""
Attention on a GPU: PyTorch's varlen_attn, flash-attn, and groups padded to one width where neither is possible.

Legend: T packed tokens, S sequences, N heads, H head width, G sequences of one group, L tokens of each of them, padding
included.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from virnucpro.models.kernels.plain_attention import alibi_bias, plain_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PADDED_SHARE = 1.25
"""Most slots of a padded group over its tokens."""
_BIAS_ELEMENTS = 1 << 27
"""Most numbers of the ALiBi bias of one padded group (256 MiB in bfloat16)."""


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
    Attend with one ``scaled_dot_product_attention`` for each group of neighbours, padded to the longest.

    Few calls for many lengths, at the price of copies into and out of the padded form: made for GPUs.
    """
    heads = v_TNH.shape[1:]
    out_TNH = torch.empty_like(v_TNH, memory_format=torch.contiguous_format)
    for sequences, tokens, width in padded_groups(lengths, num_heads=heads[0], alibi=alibi_slopes_N is not None):
        if alibi_slopes_N is not None and heads[0] * width**2 > _BIAS_ELEMENTS:
            # one sequence, whose bias as a whole could be larger than the device: some of its queries at a time
            q_1NLH, k_1NLH, v_1NLH = (x_TNH[tokens].transpose(0, 1)[None] for x_TNH in (q_TNH, k_TNH, v_TNH))
            out_TNH[tokens] = plain_attention(q_1NLH, k_1NLH, v_1NLH, alibi_slopes_N)[0].transpose(0, 1)
            continue
        starts_G = cu_seqlens[sequences]
        lengths_G = cu_seqlens[sequences.start + 1 : sequences.stop + 1] - starts_G
        num_sequences, num_tokens = sequences.stop - sequences.start, tokens.stop - tokens.start
        columns_L = torch.arange(width, device=cu_seqlens.device)
        # token t of the group goes to slot_T[t] of the (G, L) slots
        padding_G = width * torch.arange(num_sequences, device=cu_seqlens.device) - (starts_G - tokens.start)
        slot_T = torch.arange(num_tokens, device=cu_seqlens.device)
        slot_T = slot_T + padding_G.repeat_interleave(lengths_G, output_size=num_tokens)
        q_GNLH, k_GNLH, v_GNLH = (
            x_TNH.new_zeros(num_sequences * width, *heads)
            .index_copy_(0, slot_T, x_TNH[tokens])
            .view(num_sequences, width, *heads)
            .transpose(1, 2)
            for x_TNH in (q_TNH, k_TNH, v_TNH)
        )
        mask = (columns_L < lengths_G[:, None])[:, None, None, :]
        if alibi_slopes_N is not None:
            bias_NLL = alibi_bias(alibi_slopes_N, width).to(q_TNH.dtype)
            mask = bias_NLL.where(mask, float("-inf"))
        out_GNLH = functional.scaled_dot_product_attention(q_GNLH, k_GNLH, v_GNLH, attn_mask=mask)
        out_TNH[tokens] = out_GNLH.transpose(1, 2).reshape(num_sequences * width, *heads)[slot_T]
    return out_TNH


def padded_groups(lengths: Sequence[int], *, num_heads: int, alibi: bool) -> Iterator[tuple[slice, slice, int]]:
    """
    Divide a batch into groups of neighbours that are worth padding to one width.

    Args:
        lengths: Tokens of each sequence.
        num_heads: Heads N.
        alibi: Whether each group needs a bias of (G, N, L, L).

    Yields:
        The group's sequences as a slice of S, its tokens as a slice of T, and the width L, a multiple of 16 (the
        kernels' alignment of a bias).
    """
    first = token = tokens = slots = longest = 0
    for number, length in enumerate(lengths):
        wanted = max(longest, -(-length // 16) * 16)
        count = number - first + 1
        is_full = alibi and count * num_heads * wanted**2 > _BIAS_ELEMENTS
        if count > 1 and (is_full or wanted * count > _PADDED_SHARE * (slots + -(-length // 16) * 16)):
            yield slice(first, number), slice(token, token + tokens), longest
            first, token, tokens, slots = number, token + tokens, 0, 0
            wanted = -(-length // 16) * 16
        longest, tokens, slots = wanted, tokens + length, slots + -(-length // 16) * 16
    if tokens:
        yield slice(first, len(lengths)), slice(token, token + tokens), longest
