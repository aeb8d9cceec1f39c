"""
How fast a model could be on a card, from what the card itself was measured to do: its roofline.

A kernel takes at least the time of its operations at the rate of matrix products, and at least that of its bytes at the
rate of copies; the kernels of a layer follow one another. Counted are the kernels that a layer starts on a GPU, as
``tests/interpreted_kernels.py`` counts bytes; weights, embedding and pooling, small in blocks of many tokens, are not.
Legend: D model width, F width of the feed-forward, N heads, n tokens of a sequence. A unit is one number of a token's
D: units times the bytes of a number are the bytes that a kernel reads and writes for a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from virnucpro.models.encoders.esm2_checkpoint import Architecture

LEAST_SHARE = {"packed": 0.7, "padded": 0.55}
"""
Of the roofline, by kind of attention. One H100 (2026-11-26) reached 0.78 to 0.92 of it with ESM-2 650M and 3B, and 0.67
with DNABERT-S in padded groups, which multiplies halves of a product that are not contiguous, and attends with a bias.
"""


@dataclass(frozen=True)
class Rates:
    """What a card does a second: operations of matrix products by dtype, and bytes copied, read and written."""

    products: Mapping[torch.dtype, float]
    copy: float

    def seconds(self, kernels: Iterable[tuple[float, float]], width: int, dtype: torch.dtype) -> float:
        """Return the least time of *kernels*, each given as (operations, units of *width*) a token."""
        bytes_of_unit = width * dtype.itemsize
        return sum(max(flops / self.products[dtype], units * bytes_of_unit / self.copy) for flops, units in kernels)


def esm2_kernels(width: int, tokens: int, *, is_fused: bool) -> list[tuple[float, float]]:
    """Return (operations, units) a token of an ESM-2 layer's kernels; *is_fused*: with Triton's between products."""
    product = width * width
    between = [(0.0, 4.0), (0.0, 4.0), (0.0, 4.0)] if is_fused else [(0.0, 20.0), (0.0, 5.0), (0.0, 5.0)]
    qkv, attention, out = (6.0 * product, 4.0), (4.0 * tokens * width, 4.0), (2.0 * product, 2.0)
    gelu, feed_forward = (0.0, 8.0), (8.0 * product, 5.0)
    return [qkv, attention, out, feed_forward, gelu, feed_forward, *between]


def dnabert_kernels(width: int, inner: int, heads: int, tokens: int, *, is_padded: bool) -> list[tuple[float, float]]:
    """Return the same of a MosaicBERT layer; *is_padded*: with copies into and out of groups, and the bias read."""
    wide = inner / width
    copies = [(0.0, 6.0), (0.0, 2.0)] if is_padded else []
    bias = heads * tokens / width if is_padded else 0.0
    attention = [(6.0 * width**2, 4.0), *copies, (4.0 * tokens * width, 4.0 + bias), (2.0 * width**2, 2.0)]
    gated = [(4.0 * width * inner, 1 + 2 * wide), (0.0, 2 * wide), (0.0, 3 * wide), (2.0 * inner * width, wide + 1)]
    return [*attention, *gated, *[(0.0, 3.0), (0.0, 2.0)] * 2]


def esm2_tokens_per_second(
    rates: Rates, architecture: Architecture, tokens: Sequence[int], dtype: torch.dtype, *, is_fused: bool
) -> float:
    """Return the most tokens a second of sequences of *tokens* tokens in a half, *dtype*."""
    width = architecture.hidden_dim
    seconds = sum(n * rates.seconds(esm2_kernels(width, n, is_fused=is_fused), width, dtype) for n in tokens)
    return sum(tokens) / (architecture.num_layers * seconds)


def dnabert_tokens_per_second(
    rates: Rates, config: Any, tokens: Sequence[int], dtype: torch.dtype, *, is_padded: bool
) -> float:
    """Return the same of a MosaicBERT."""
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    seconds = sum(
        n * rates.seconds(dnabert_kernels(width, inner, heads, n, is_padded=is_padded), width, dtype) for n in tokens
    )
    return sum(tokens) / (config.num_hidden_layers * seconds)
