"""
The batch plan: which sequences are computed together.

A block is a run of neighbours in the length-sorted index that fits the token budget (estimated for BPE). The plan is a
pure function of the sequence lengths, the settings and the budget, never of ranks, world size or remaining work: a
resumed run, or one on another number of devices, gives the same bytes. It covers each distinct sequence once; copies
get their row when the result is assembled.

Where long sequences are not truncated, a sequence of at most ``max_residues`` letters is one window. A longer one has
windows of exactly ``max_residues`` letters, each beginning half a window (rounded down, at least one letter) after the
one before; the last one ends where the sequence ends, and so may overlap more. Every letter is in a window, and all
windows of a sequence have the same number of letters. Its row is the unweighted mean of its windows' rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.choices import SPECIAL_TOKENS, LongPolicy
from virnucpro.config import ModelConfig, computing_versions, fingerprint
from virnucpro.errors import ConfigurationError, TokenBudgetError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.arrays import IntArray
    from virnucpro.data.sequence_index import SequenceIndex


@dataclass(frozen=True)
class BlockPlan:
    """Every block of a run; the same in every process that makes it from the same index and settings."""

    positions: IntArray
    """int64 (num_unique,): index positions of the distinct sequences, longest first."""
    starts: IntArray
    """int64 (num_blocks + 1,): block b holds ``positions[starts[b]:starts[b + 1]]``."""
    tokens: IntArray
    """int64 (num_blocks,): tokens of each block, special tokens included; estimated by ``tokens_of`` for BPE."""
    token_budget: int
    fingerprint: str
    """Identity of input, settings and blocks: rows of another fingerprint are not reused."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def block_positions(self, block: int) -> IntArray:
        return self.positions[self.starts[block] : self.starts[block + 1]]

    def block_of(self, position: int) -> int:
        return int(self.blocks_of(np.array([position]))[0])

    def blocks_of(self, positions: IntArray) -> IntArray:
        """Return the block of each of the index *positions*, all of them planned; int64."""
        return np.searchsorted(self.starts, np.searchsorted(self.positions, positions), side="right") - 1

    def rows(self, copied: IntArray) -> IntArray:
        """Return the rows of each block, copies included, int64 (num_blocks,); *copied* is the index's."""
        rows = np.diff(self.starts)
        np.add.at(rows, self.blocks_of(copied), 1)
        return rows

    def rank_blocks(self, rank: int, world_size: int) -> range:
        """Return every world_size-th block from *rank*, so that ranks get equal work."""
        return range(rank, len(self), world_size)


def plan_blocks(tokens: Sequence[int] | IntArray, *, token_budget: int) -> list[range]:
    """Divide sequences into consecutive blocks within the budget; TokenBudgetError where one alone is longer."""
    per_sequence = np.asarray(tokens, dtype=np.int64)
    longest = int(per_sequence.max(initial=0))
    if longest > token_budget:
        raise TokenBudgetError(longest, token_budget)
    through = np.cumsum(per_sequence)
    blocks = []
    start, tokens_before = 0, 0
    while start < len(per_sequence):
        end = int(np.searchsorted(through, tokens_before + token_budget, side="right"))
        blocks.append(range(start, end))
        start, tokens_before = end, int(through[end - 1])
    return blocks


def resolve_token_budget(
    requested: int,
    lengths: IntArray,
    *,
    max_residues: int,
    letters_per_token: float = 1.0,
    in_windows: bool = False,
) -> int:
    """Return *requested*, in tokens, raised to the longest sequence; the other arguments are those of ``tokens_of``."""
    tokens = tokens_of(lengths, max_residues=max_residues, letters_per_token=letters_per_token, in_windows=in_windows)
    return max(requested, int(tokens.max(initial=0)))


def tokens_of(
    lengths: IntArray, *, max_residues: int, letters_per_token: float = 1.0, in_windows: bool = False
) -> IntArray:
    """
    Return the tokens of each sequence, int64, special tokens included.

    Args:
        max_residues: Letters of a sequence that are embedded.
        letters_per_token: 1 for models of one token a letter, where the count is exact. For BPE an estimate from the
            length, since a count would tokenise the whole input for every plan: the true number is between this and one
            token a letter (runs of N are one token each).
        in_windows: Long sequences are not truncated; all their windows count.
    """
    letters = np.minimum(lengths.astype(np.int64), max_residues)
    tokens: IntArray = np.ceil(letters / letters_per_token).astype(np.int64) + SPECIAL_TOKENS
    return tokens * count_windows(lengths, max_residues) if in_windows else tokens


def count_windows(lengths: IntArray, max_residues: int) -> IntArray:
    beyond = np.maximum(np.asarray(lengths, dtype=np.int64) - max_residues, 0)
    windows: IntArray = 1 + -(-beyond // _window_step(max_residues))
    return windows


def windows_of(sequence: str, max_residues: int) -> list[str]:
    last = max(0, len(sequence) - max_residues)
    starts = (*range(0, last, _window_step(max_residues)), last)
    return [sequence[start : start + max_residues] for start in starts]


def _window_step(max_residues: int) -> int:
    return max(1, max_residues // 2)


def make_plan(index: SequenceIndex, model_config: ModelConfig, *, device_type: str) -> BlockPlan:
    """
    Plan the blocks of a run; *device_type*: ``cpu`` or ``cuda``, as rows of one are not reused on the other.

    Raises:
        ConfigurationError: A sequence is longer than allowed and is to be refused, or than the token budget.
    """
    is_refused = model_config.settings.sequences.long is LongPolicy.ERROR
    if is_refused and len(index) and index.lengths[0] > model_config.max_residues:
        raise ConfigurationError(
            f"a sequence of {index.lengths[0]} residues is longer than {model_config.max_residues}"
        )
    positions = np.flatnonzero(index.representatives[:] == np.arange(len(index)))
    tokens = tokens_of(
        index.lengths[positions],
        max_residues=model_config.max_residues,
        letters_per_token=model_config.letters_per_token,
        in_windows=model_config.in_windows,
    )
    blocks = plan_blocks(tokens, token_budget=model_config.token_budget)
    starts = np.array([block.start for block in blocks] + [len(positions)], dtype=np.int64)
    sums = np.add.reduceat(tokens, starts[:-1]) if blocks else np.empty(0, np.int64)
    identity = {
        "input": index.content_fingerprint,
        "settings": model_config.result_settings(),
        "device_type": device_type,
        "versions": computing_versions(),
        "unique": len(positions),
        "blocks": len(blocks),
    }
    index.release_pages()
    return BlockPlan(positions, starts, sums, model_config.token_budget, fingerprint(identity))
