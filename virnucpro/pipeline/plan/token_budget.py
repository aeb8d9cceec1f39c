"""
The best number of tokens in a block, measured on one GPU with the run's model and lengths.

The budget doubles while that gains a few per cent of speed and the extrapolated memory fits. The smallest of the
fastest is taken: small blocks lose less when a run stops. Legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from virnucpro.errors import DeviceError
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_errors import device_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.pipeline.async_inference import PackedEncoder

FIRST_TOKENS = 4096
LEAST_GAIN = 1.03
"""Least gain in speed for which the tokens are doubled again."""
MEMORY_SHARE = 0.8
"""Share of the memory for the model and a block; the rest is for what a trial does not measure."""
REPEATS = 3
"""Timed forward passes of a trial; the fastest counts."""


@dataclass(frozen=True)
class Trial:
    tokens: int
    tokens_per_second: float
    """With typical sequences."""
    peak_bytes: int
    """Peak device memory, model included, with typical and with the longest sequences."""


def choose_token_budget(
    try_out: Callable[[int], Trial | None],
    *,
    longest_tokens: int,
    most_tokens: int,
    resting_bytes: int,
    memory_bytes: int,
) -> tuple[int, list[Trial]]:
    """
    Return the budget in tokens, and the trials that decided it.

    Args:
        try_out: Measures blocks of a number of tokens; None when they do not fit into memory.
        longest_tokens: Tokens of the longest sequence, the least budget.
        most_tokens: Largest budget.
    """
    first = try_out(max(longest_tokens, min(FIRST_TOKENS, most_tokens))) or try_out(longest_tokens)
    if first is None:
        raise DeviceError(
            f"the device's memory does not hold the model and one sequence of {longest_tokens} tokens: "
            "lower --max-residues, or use a larger device"
        )
    trials = [first]
    while True:
        best = trials[-1]
        tokens = 2 * best.tokens
        if tokens > most_tokens or 2 * best.peak_bytes - resting_bytes > memory_bytes:
            return best.tokens, trials
        trial = try_out(tokens)
        if trial is None:
            return best.tokens, trials
        trials.append(trial)
        if trial.tokens_per_second < LEAST_GAIN * best.tokens_per_second:
            return best.tokens, trials


class DeviceTrials:
    """Measures blocks on a GPU; *longest*, *typical*: token ids of long and typical sequences, each int64 (tokens,)."""

    def __init__(
        self,
        model: PackedEncoder,
        device: torch.device,
        *,
        longest: Sequence[torch.Tensor],
        typical: Sequence[torch.Tensor],
    ) -> None:
        self._model = model
        self._device = device
        self._longest = longest
        self._typical = typical
        self.resting_bytes = torch.cuda.memory_allocated(device)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        self.memory_bytes = int(MEMORY_SHARE * (free_bytes + torch.cuda.memory_reserved(device)))

    def __call__(self, tokens: int) -> Trial | None:
        """Measure blocks of *tokens* tokens; None when they do not fit into memory."""
        try:
            trial = self._try(tokens)
        except RuntimeError as error:
            if device_failure(error) is not FailureClass.DEVICE_OUT_OF_MEMORY:
                raise
            trial = None
        torch.cuda.empty_cache()  # after the handler, once the tensors of the failed attempt are freed
        return trial

    @torch.inference_mode()
    def _try(self, tokens: int) -> Trial:
        torch.cuda.reset_peak_memory_stats(self._device)
        long_block = self._block(self._longest, tokens)
        typical_block = self._block(self._typical, tokens)
        for block in (long_block, typical_block):  # measures the peak, and warms up
            self._model(*block)
        seconds = []
        for _ in range(REPEATS):
            torch.cuda.synchronize(self._device)
            started_s = time.perf_counter()
            self._model(*typical_block)
            torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - started_s)
        speed = len(typical_block[0]) / min(seconds)
        return Trial(tokens, speed, torch.cuda.max_memory_reserved(self._device))

    def _block(
        self, sequences: Sequence[torch.Tensor], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Pack *sequences*, repeated, into a block of at most *tokens* tokens."""
        chosen = fill_block(sequences, tokens)
        lengths = tuple(len(sequence) for sequence in chosen)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        return torch.cat(chosen).to(self._device), cu_seqlens.to(self._device), lengths


def fill_block(sequences: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Return *sequences*, repeated, as far as they fit into *tokens*; at least one."""
    chosen = [sequences[0]]
    total = len(sequences[0])
    for sequence in cycle([*sequences[1:], sequences[0]]):
        total += len(sequence)
        if total > tokens:
            return sorted(chosen, key=len, reverse=True)
        chosen.append(sequence)
    raise AssertionError
