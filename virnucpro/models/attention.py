"""
Attention within each sequence of a packed batch: one signature, and one function that chooses the kernel.

``choose_attention`` is called once, when a model is loaded, and returns its reason. On a CPU sequences go one at a time
in fp32, and equal lengths together otherwise; on a GPU the choice is PyTorch's varlen_attn, flash-attn, or, where
neither is possible, padded groups. No kernel makes the host wait for the device. Legend: T packed tokens, S sequences,
N heads, H head width.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from virnucpro.models.encoders.attention_kernels import (
    PaddedAttention,
    equal_length_attention,
    exponential_attention,
    exponentials_are_exact,
    flash_attention,
    padded_attention,
    varlen_attention,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_FLASH_HEAD_DIM = 256


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
            k_TNH: Keys, same as above.
            cu_seqlens: First token of each sequence and, last, T; int32, shape (S+1,), on the tensors' device.
            lengths: Tokens of each sequence, on the host.
            alibi_slopes_N: Where given, ``slope * abs(i - j)`` is subtracted from the score of tokens i and j of a
                sequence, in both directions (Press et al. 2022, made symmetric for encoders); float32, shape (N,).
        """


@dataclass(frozen=True)
class AttentionChoice:
    """A kernel, its name for the run's record, and why it was chosen."""

    name: str
    kernel: AttentionKernel
    reason: str

    def for_forward_pass(self) -> AttentionKernel:
        """Return the kernel for the layers of one forward pass over one batch."""
        return PaddedAttention() if self.kernel is padded_attention else self.kernel


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
    return AttentionChoice("sdpa-padded", padded_attention, f"{obstacle}: sequences of like length are padded together")


def _flash_attn_version() -> str | None:
    """Return the version of flash-attn, None where it is absent or cannot be imported (built for another PyTorch)."""
    try:
        return str(importlib.import_module("flash_attn").__version__)
    except ImportError:
        return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
