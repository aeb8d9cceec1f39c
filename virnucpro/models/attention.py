"""
Attention within each sequence of a packed batch: one signature, and one function that chooses the kernel.

``choose_attention`` is asked once, when a model is loaded, and says why it chose. A kernel for GPUs (varlen_attn,
flash-attn) is another function of the same signature and another branch there; nothing else needs to know. Legend:
T packed tokens, S sequences, N heads, H head width, G sequences of one group, L tokens of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
        Attend.

        Args:
            q_TNH: Queries, positions already applied.
            k_TNH: Keys, likewise.
            v_TNH: Values.
            cu_seqlens: First token of each sequence and, last, T; int32, shape (S+1,), on the tensors' device.
            lengths: The same as tokens of each sequence, on the host.
            alibi_slopes_N: With it, ``slope * abs(i - j)`` is taken from the score of tokens i and j of a sequence,
                in both directions (Press et al. 2022, made symmetric for encoders); float32, shape (N,).

        Returns:
            ``out_TNH``, in the dtype of *v_TNH*.
        """


@dataclass(frozen=True)
class AttentionChoice:
    """A kernel, its name for the run's record, and why it was chosen."""

    name: str
    kernel: AttentionKernel
    reason: str


def choose_attention(device: torch.device, dtype: torch.dtype, *, alibi: bool = False) -> AttentionChoice:
    """
    Return the kernel for tensors of *dtype* on *device*, with the reason.

    Args:
        device: Where the tensors are.
        dtype: Theirs.
        alibi: Whether the kernel will be given slopes: not every kernel takes them.
    """
    return AttentionChoice(
        "sdpa-equal-lengths",
        equal_length_attention,
        f"PyTorch's scaled_dot_product_attention, a call for each group of equal length, works on {device.type} "
        f"in {str(dtype).removeprefix('torch.')}{' with ALiBi' if alibi else ''}",
    )


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
    out_TNH = torch.empty_like(v_TNH)
    for tokens, group_shape in equal_length_runs(lengths):
        q_GNLH, k_GNLH, v_GNLH = (
            x_TNH[tokens].view(*group_shape, *x_TNH.shape[1:]).transpose(1, 2) for x_TNH in (q_TNH, k_TNH, v_TNH)
        )
        bias_NLL = None if alibi_slopes_N is None else alibi_bias(alibi_slopes_N, group_shape[1]).to(q_TNH.dtype)
        out_GNLH = functional.scaled_dot_product_attention(q_GNLH, k_GNLH, v_GNLH, attn_mask=bias_NLL)
        out_TNH[tokens] = out_GNLH.transpose(1, 2).flatten(0, 1)
    return out_TNH


def alibi_bias(alibi_slopes_N: torch.Tensor, length: int) -> torch.Tensor:
    """Return what ALiBi adds to the scores of one sequence of *length* tokens, shape (N, length, length)."""
    positions_L = torch.arange(length, device=alibi_slopes_N.device, dtype=alibi_slopes_N.dtype)
    distances_LL = (positions_L[:, None] - positions_L).abs()
    return -alibi_slopes_N[:, None, None] * distances_LL


def equal_length_runs(lengths: Sequence[int]) -> Iterator[tuple[slice, tuple[int, int]]]:
    """
    Find the runs of neighbours of equal length.

    Args:
        lengths: Tokens of each sequence.

    Yields:
        The run's tokens as a slice of T, and its (sequences, tokens of each).
    """
    start = 0
    for length, run in groupby(lengths):
        num_sequences = sum(1 for _ in run)
        stop = start + num_sequences * length
        yield slice(start, stop), (num_sequences, length)
        start = stop
