"""
A transformer over padded batches, such as those of Hugging Face, run as a packed encoder.

Slower than a packed one: padding is computed, too. Legend: T packed tokens, S sequences, G sequences of one group, L
tokens of the longest of them, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from virnucpro.models.attention import AttentionChoice
from virnucpro.models.encoders.attention_kernels import padded_attention, padded_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


class PaddedEncoder:
    """
    Averages the last states of each sequence without its *special_tokens*, so many at the start and at the end.

    *model*, on its device, takes token ids and a mask that is 0 at padding, int64 (G, L), and returns states (G, L, D)
    or an object that has them as ``last_hidden_state``.
    """

    def __init__(
        self, model: torch.nn.Module, *, hidden_dim: int, padding_id: int, special_tokens: tuple[int, int] = (1, 1)
    ) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.hidden_dim, self.padding_id, self.special_tokens = hidden_dim, padding_id, special_tokens
        reason = "the model takes padded groups of like lengths"
        self.attention = AttentionChoice(f"padded {type(model).__name__}", padded_attention, reason)

    @torch.inference_mode()
    def __call__(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return float32 (S, D); the host waits for no number of the device."""
        longest_first = sorted(lengths, reverse=True)
        lengths_S, order_S = cu_seqlens.diff().sort(descending=True, stable=True)
        means_SD = torch.empty(len(lengths), self.hidden_dim, device=input_ids_T.device)
        for group, _, _ in padded_groups(longest_first, num_heads=1, alibi=False):
            lengths_G1, starts_G1 = lengths_S[group, None], cu_seqlens[order_S][group, None]
            columns_L = torch.arange(longest_first[group.start], device=input_ids_T.device)
            is_token_GL = columns_L < lengths_G1
            ids_GL = input_ids_T[starts_G1 + columns_L.minimum(lengths_G1 - 1)].where(is_token_GL, self.padding_id)
            states = self.model(ids_GL, is_token_GL.long())
            x_GLD = getattr(states, "last_hidden_state", states).float()
            is_averaged_GL = (columns_L >= self.special_tokens[0]) & (columns_L < lengths_G1 - self.special_tokens[1])
            sums_GD = x_GLD.masked_fill(~is_averaged_GL[:, :, None], 0).sum(dim=1)
            means_SD.index_copy_(0, order_S[group], sums_GD / is_averaged_GL.sum(dim=1, keepdim=True))
        return means_SD


class ListTokenizer:
    """Packs what *ids_of* returns: the token ids of each sequence of a list, special tokens included, as lists."""

    def __init__(self, ids_of: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self.ids_of = ids_of

    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        ids = [np.array(one, dtype=np.int64) for one in self.ids_of(list(sequences))]
        return np.concatenate(ids), np.array([len(one) for one in ids], dtype=np.int32)
