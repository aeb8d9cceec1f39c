"""
Masked-token prediction: windows cut from token sequences, and their masks, for proteins and DNA alike.

The recipe is BERT's, ESM-2's and DNABERT-2's: 15 % of the tokens are to be predicted, of these 80 % are masked, 10 %
replaced by a random token, 10 % left. A batch holds windows of one length, so nothing is padded. All randomness comes
from the numpy generator given. Legend: B windows of a batch, L tokens of a window (special ones included), M tokens to
predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

PREDICTED_SHARE = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
SHORTEST_WINDOW = 24
"""Tokens: a shorter remainder of a sequence joins no batch."""


@dataclass(frozen=True)
class MaskVocabulary:
    """The ids that masking uses."""

    first: int
    last: int
    mask: int
    ordinary: NDArray[np.int64]
    """Tokens that may be predicted, and put in place of others."""


@dataclass(frozen=True)
class MaskedBatch:
    """Windows with some tokens hidden."""

    tokens_BL: torch.Tensor
    """Input ids, int64, shape (B, L)."""
    positions_M: torch.Tensor
    """Where to predict: positions in the flattened (B*L,) tokens, int64."""
    targets_M: torch.Tensor
    """The true ids there, int64."""

    def to(self, device: torch.device) -> MaskedBatch:
        """Return the batch on *device*."""
        return MaskedBatch(self.tokens_BL.to(device), self.positions_M.to(device), self.targets_M.to(device))


def epoch_windows(
    sequences: Sequence[NDArray[np.int64]], *, window_tokens: int, batch_tokens: int, random: np.random.Generator
) -> Iterator[list[NDArray[np.int64]]]:
    """
    Yield batches of windows of about equal length, in a random order; every sequence is cut once.

    Each batch is cut to its shortest window. *window_tokens* excludes special tokens, *batch_tokens* includes them; a
    longer sequence is cut from a random offset on.
    """
    windows: list[NDArray[np.int64]] = []
    for tokens in sequences:
        # at least half a window before the first cut, so that no sequence loses more than a short end
        offset = int(random.integers(window_tokens // 2, window_tokens + 1))
        cuts = [0, *range(offset, len(tokens), window_tokens), len(tokens)]
        if len(tokens) <= window_tokens:
            cuts = [0, len(tokens)]
        pieces = [tokens[start:stop] for start, stop in pairwise(cuts)]
        windows.extend(piece for piece in pieces if len(piece) >= SHORTEST_WINDOW)
    order = random.permutation(len(windows))
    by_length = sorted(order, key=lambda number: len(windows[number]))
    batches, start = [], 0
    while start < len(by_length):
        shortest = len(windows[by_length[start]])
        stop = start + max(batch_tokens // (shortest + 2), 1)
        batches.append([windows[number][:shortest] for number in by_length[start:stop]])
        start = stop
    for number in random.permutation(len(batches)):
        yield batches[number]


def mask_tokens(
    windows: Sequence[NDArray[np.int64]],
    vocabulary: MaskVocabulary,
    random: np.random.Generator,
    *,
    predicted_share: float = PREDICTED_SHARE,
    masked_share: float = MASKED_SHARE,
    random_share: float = RANDOM_SHARE,
) -> MaskedBatch:
    """
    Choose the tokens to predict and hide them; special tokens go around each window and are never chosen.

    *masked_share* and *random_share* are shares of the chosen tokens; the rest stays visible.
    """
    inner_BL = np.stack(windows)
    chosen_BL = (random.random(inner_BL.shape) < predicted_share) & np.isin(inner_BL, vocabulary.ordinary)
    fate_BL = random.random(inner_BL.shape)
    hidden_BL = inner_BL.copy()
    hidden_BL[chosen_BL & (fate_BL < masked_share)] = vocabulary.mask
    replaced_BL = chosen_BL & (fate_BL >= 1 - random_share)
    hidden_BL[replaced_BL] = random.choice(vocabulary.ordinary, size=int(replaced_BL.sum()))
    edges = ((0, 0), (1, 1))
    tokens_BL = np.pad(hidden_BL, edges, constant_values=vocabulary.first)
    tokens_BL[:, -1] = vocabulary.last
    return MaskedBatch(
        torch.from_numpy(tokens_BL),
        torch.from_numpy(np.flatnonzero(np.pad(chosen_BL, edges))),
        torch.from_numpy(inner_BL[chosen_BL]),
    )
