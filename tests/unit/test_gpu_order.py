"""The loop that feeds a GPU, by its order: copies, computation and rows on streams with vector clocks."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import gpu_models
from tests.fake_streams import DEVICE, PAGEABLE, fake_streams
from virnucpro import spans
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.plan.token_budget import DeviceTrials

LENGTHS = [9, 5, 3]


class Sums:
    """Gives each sequence the sum of its tokens; runs out of memory where it is told to."""

    hidden_dim = 2
    attention = None

    def __init__(self, most_tokens=10**9):
        self.most_tokens = most_tokens

    def __call__(self, input_ids_T, cu_seqlens, lengths):
        if sum(lengths) > self.most_tokens:
            input_ids_T + 1  # the device is to do that, and perhaps has not when the memory runs out
            raise torch.OutOfMemoryError
        sums_S = torch.stack([part.sum() for part in torch.split(input_ids_T, list(lengths))])
        assert len(cu_seqlens) == len(lengths) + 1
        return torch.stack([sums_S, sums_S + cu_seqlens[0]], dim=1).float()


@pytest.fixture
def runtime(monkeypatch):
    with fake_streams(monkeypatch) as found:
        yield found


def batches(number):
    rng = np.random.default_rng(26)
    return [gpu_models.random_batch(LENGTHS, rng, first=len(LENGTHS) * block).pin_memory() for block in range(number)]


def expected(batch):
    return [float(part.sum()) for part in torch.split(batch.input_ids_T, list(batch.lengths))]


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_rows_are_read_copied_and_freed_in_order(runtime, one_at_a_time):
    results = list(AsyncInferenceRunner(Sums(), DEVICE).run(batches(7), one_at_a_time=one_at_a_time))
    assert runtime.findings == []
    assert [result.embeddings[:, 0].tolist() for result in results] == [expected(batch) for batch in batches(7)]


def test_a_batch_that_does_not_fit_is_halved_in_order(runtime):
    results = list(AsyncInferenceRunner(Sums(most_tokens=10), DEVICE).run(batches(4)))
    assert set(runtime.findings) == {PAGEABLE}  # of the halves
    assert all(result.is_resplit and not result.failed and len(result.sequence_ids) == 3 for result in results)


def test_a_run_that_is_given_up_waits_for_what_is_in_flight(runtime):
    runner = AsyncInferenceRunner(Sums(), DEVICE)
    rows = runner.run(batches(5))
    next(rows)
    rows.close()
    del rows
    gc.collect()
    list(runner.run(batches(1)))  # gets the memory
    assert runtime.findings == []


def test_spans_of_a_gpu_are_recorded_in_order(runtime, tmp_path):
    spans.enable(
        tmp_path, {"model": "esm2", "rank": 0, "device": "cuda:0", "attempt": 1}, block_of=lambda position: position
    )
    try:
        list(AsyncInferenceRunner(Sums(), DEVICE).run(batches(3)))
    finally:
        spans.disable()
    assert runtime.findings == []


def test_batches_in_memory_that_is_not_page_locked_are_a_finding(runtime):
    plain = [replace(batch, input_ids_T=batch.input_ids_T.clone()) for batch in batches(1)]
    list(AsyncInferenceRunner(Sums(), DEVICE).run(plain))
    assert runtime.findings == [PAGEABLE]


def test_trials_of_budgets_bear_that_memory_runs_out(runtime, monkeypatch):
    freed = []
    for name in ("memory_allocated", "memory_reserved", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 1 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (9 << 20, 10 << 20))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    ids = [torch.arange(number) for number in (9, 8, 7)]
    trials = DeviceTrials(Sums(most_tokens=40), DEVICE, longest=ids, typical=ids)
    assert trials.memory_bytes == 8 << 20
    found = [trials(tokens) for tokens in (20, 40, 80)]
    assert [trial and trial.tokens for trial in found] == [20, 40, None]
    assert len(freed) == 3
    assert set(runtime.findings) == {PAGEABLE}  # before the clock starts
    assert all(trial.tokens_per_second > 0 and trial.peak_bytes == 1 << 20 for trial in found[:2])
