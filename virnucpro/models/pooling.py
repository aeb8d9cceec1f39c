"""
From one vector a token to one a sequence: the mean over the residues, BOS and EOS left out.

Always in float32, whatever the precision of the forward pass. Legend: T packed tokens, S sequences, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from virnucpro.models.attention import equal_length_runs

if TYPE_CHECKING:
    from collections.abc import Sequence


def mean_over_residues(hidden_TD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """
    Average each sequence's residues.

    Args:
        hidden_TD: Last layer's states of the packed tokens.
        lengths: Tokens of each sequence, BOS and EOS included: 3 at least.

    Returns:
        ``embeddings_SD``, float32, in the order of the batch.
    """
    means = [
        hidden_TD[tokens].view(*group_shape, -1)[:, 1:-1].float().mean(dim=1)
        for tokens, group_shape in equal_length_runs(lengths)
    ]
    return torch.cat(means)
