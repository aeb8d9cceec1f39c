"""
Attention within each sequence of a packed batch: one signature, and one function that chooses the kernel.

``choose_attention`` is called once, when a model is loaded, and returns its reason. On a CPU sequences go one at a time
in fp32, and equal lengths together otherwise; on a GPU the choice is PyTorch's varlen_attn, flash-attn, or, where
neither is possible, padded groups. No kernel makes the host wait for the device. Legend: T packed tokens, S sequences,
N heads, H head width, G sequences of one group, L tokens of each of them, padding included.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from virnucpro.models.kernels.cpu_attention import (
    alibi_bias,
    exponential_attention,
    exponentials_are_exact,
    plain_attention,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


MAX_FLASH_HEAD_DIM = 256

_PADDED_SHARE = 1.25
"""Most slots of a padded group over its tokens."""
_BIAS_ELEMENTS = 1 << 27
"""Most numbers of the ALiBi bias of one padded group (256 MiB in bfloat16)."""


class AttentionKernel(Protocol):
    """Softmax attention of every token to all tokens of its own sequence, scaled by 1/sqrt(H)."""

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        alibi_slopes_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Return ``out_TNH``, in the dtype of *v_TNH*.

        Args:
            q_TNH: Queries, positions already applied.
            k_TNH: Keys, likewise.
            v_TNH: Values.
            cu_seqlens: First token of each sequence and, last, T; int32, shape (S+1,), on the tensors' device.
            lengths: Tokens of each sequence, on the host.
            alibi_slopes_N: With it, ``slope * abs(i - j)`` is subtracted from the score of tokens i and j of a
                sequence, in both directions (Press et al. 2022, made symmetric for encoders); float32, shape (N,).
        """


@dataclass(frozen=True)
class AttentionChoice:
    """A kernel, its name for the run's record, and why it was chosen."""

    name: str
    kernel: AttentionKernel
    reason: str


def choose_attention(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, alibi: bool = False
) -> AttentionChoice:
    """Return the kernel for tensors of *dtype* on *device*, with the reason; *alibi*: it will be given slopes."""
    if device.type == "cuda":
        return _choose_on_gpu(
            dtype,
            head_dim=head_dim,
            alibi=alibi,
            capability=torch.cuda.get_device_capability(device),
            has_varlen=importlib.util.find_spec("torch.nn.attention.varlen") is not None,
            flash_attn_version=_flash_attn_version(),
        )
    if device.type == "cpu" and dtype is torch.float32 and exponentials_are_exact():
        return AttentionChoice(
            "exp-bmm",
            exponential_attention,
            "a sequence at a time, its heads as one batch of products and plain exponentials, is the fastest found "
            "for float32 on CPUs",
        )
    return AttentionChoice(
        "sdpa-equal-lengths",
        equal_length_attention,
        f"PyTorch's scaled_dot_product_attention, a call for each group of equal length, works on {device.type} "
        f"in {_short(dtype)}{' with ALiBi' if alibi else ''}",
    )


def _choose_on_gpu(
    dtype: torch.dtype,
    *,
    head_dim: int,
    alibi: bool,
    capability: tuple[int, int],
    has_varlen: bool,
    flash_attn_version: str | None,
) -> AttentionChoice:
    """Return the kernel for an NVIDIA GPU of compute *capability* with these packages."""
    # what FlashAttention 2 can do, which varlen_attn and flash-attn both are
    if dtype not in {torch.float16, torch.bfloat16}:
        obstacle = f"variable-length kernels take float16 and bfloat16, not {_short(dtype)}"
    elif capability < (8, 0):
        obstacle = (
            f"variable-length kernels need compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
        )
    elif head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        obstacle = f"variable-length kernels take heads of a multiple of 8 up to {MAX_FLASH_HEAD_DIM}, not {head_dim}"
    elif has_varlen and not alibi:
        return AttentionChoice(
            "varlen_attn",
            varlen_attention,
            f"PyTorch's own variable-length kernel takes heads of {head_dim} in {_short(dtype)}",
        )
    elif flash_attn_version is not None:
        why = "takes ALiBi slopes" if alibi else "is installed, and this PyTorch has no varlen_attn (2.10 has)"
        return AttentionChoice(f"flash-attn {flash_attn_version}", flash_attention, f"flash-attn {why}")
    elif alibi:
        obstacle = "varlen_attn takes no ALiBi slopes, and flash-attn (extra `flash`) is not installed"
    else:
        obstacle = "this PyTorch has no varlen_attn (2.10 has), and flash-attn (extra `flash`) is not installed"
    return AttentionChoice("sdpa-padded", padded_attention, f"{obstacle}: neighbours of like length are padded")


def _flash_attn_version() -> str | None:
    """Return the version of flash-attn, None where it is absent or cannot be imported (built for another PyTorch)."""
    try:
        return str(importlib.import_module("flash_attn").__version__)
    except ImportError:
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def equal_length_runs(lengths: Sequence[int]) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield the runs of neighbours of equal length: the tokens as a slice of T, and (sequences, tokens of each)."""
    start = 0
    for length, run in groupby(lengths):
        num_sequences = sum(1 for _ in run)
        stop = start + num_sequences * length
        yield slice(start, stop), (num_sequences, length)
        start = stop
