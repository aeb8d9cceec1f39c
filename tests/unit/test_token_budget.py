"""The rule that finds a token budget, on GPUs that are made of a formula."""

from __future__ import annotations

import pytest
import torch

from virnucpro.errors import DeviceError
from virnucpro.pipeline.plan.token_budget import Trial, choose_token_budget, fill_block

MODEL_BYTES = 10_000


class FormulaGpu:
    """A GPU whose speed ends growing at *saturated* tokens, and whose memory takes *bytes_per_token*."""

    def __init__(self, *, saturated, memory_bytes=10**12, bytes_per_token=100):
        self.saturated, self.memory_bytes, self.bytes_per_token = saturated, memory_bytes, bytes_per_token
        self.asked = []

    def __call__(self, tokens):
        self.asked.append(tokens)
        peak = MODEL_BYTES + self.bytes_per_token * tokens
        if peak > self.memory_bytes:
            return None
        return Trial(tokens, 1000.0 * min(tokens, self.saturated), peak)


def choose(gpu, *, longest=1024, most=10**9, memory_bytes=None):
    budget, trials = choose_token_budget(
        gpu,
        longest_tokens=longest,
        most_tokens=most,
        resting_bytes=MODEL_BYTES,
        memory_bytes=memory_bytes or gpu.memory_bytes,
    )
    assert [trial.tokens for trial in trials] == [tokens for tokens in gpu.asked if tokens <= trials[-1].tokens]
    return budget


def test_doubling_ends_where_it_no_longer_helps_and_the_smaller_of_two_equals_is_taken():
    gpu = FormulaGpu(saturated=32768)
    assert choose(gpu) == 32768
    assert gpu.asked == [4096, 8192, 16384, 32768, 65536]


def test_a_block_that_is_foreseen_not_to_fit_is_not_tried():
    gpu = FormulaGpu(saturated=10**9)
    assert choose(gpu, memory_bytes=MODEL_BYTES + 100 * 20_000) == 16384
    assert max(gpu.asked) == 16384


def test_a_block_that_does_not_fit_although_foreseen_to_is_the_end():
    gpu = FormulaGpu(saturated=10**9, memory_bytes=MODEL_BYTES + 100 * 20_000)
    assert choose(gpu, memory_bytes=10**12) == 16384
    assert max(gpu.asked) == 32768


def test_a_budget_holds_the_longest_sequence_and_no_more_than_the_input_is_worth():
    assert choose(FormulaGpu(saturated=10), longest=7000) == 7000
    assert choose(FormulaGpu(saturated=10**9), longest=300, most=3000) == 3000
    assert choose(FormulaGpu(saturated=10**9), longest=300, most=9000) == 8192
    assert choose(FormulaGpu(saturated=10**9), longest=300, most=300) == 300


def test_a_small_device_gets_what_the_longest_sequence_needs():
    gpu = FormulaGpu(saturated=10**9, memory_bytes=MODEL_BYTES + 100 * 2000)
    assert choose(gpu, longest=1500) == 1500
    assert gpu.asked == [4096, 1500]


def test_a_device_that_does_not_hold_one_sequence_is_an_error_that_says_so():
    with pytest.raises(DeviceError, match=r"one sequence of 1500 tokens.*--max-residues"):
        choose(FormulaGpu(saturated=10**9, memory_bytes=MODEL_BYTES), longest=1500)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(1, [5]), (5, [5]), (9, [5, 4]), (13, [5, 4, 3]), (20, [5, 5, 4, 3]), (40, [5, 5, 5, 4, 4, 4, 3, 3, 3])],
)
def test_a_block_is_filled_with_the_sequences_over_and_over(tokens, sizes):
    sequences = [torch.zeros(size) for size in (5, 4, 3)]
    assert [len(sequence) for sequence in fill_block(sequences, tokens)] == sizes
