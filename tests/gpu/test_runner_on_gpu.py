"""The loop that feeds a GPU: rows, order, overlap, memory that runs out."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from benchmarks import gpu_models
from tests.traces import copies_and_kernels, share_overlapped
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

SHAPE = gpu_models.ESM2["8M"]


def rows_of(results):
    return np.concatenate([result.embeddings for result in results])


@pytest.fixture(scope="module")
def batches():
    return list(gpu_models.blocks_of(gpu_models.protein_tokens(400), token_budget=8192))


@pytest.fixture(scope="module")
def model(cuda):
    return gpu_models.random_esm2(SHAPE, cuda, torch.bfloat16)


def test_results_come_in_order_and_are_those_of_one_batch_at_a_time(cuda, model, batches):
    runner = AsyncInferenceRunner(model, cuda)
    together = list(runner.run(batches))
    assert [result.positions for result in together] == [batch.positions for batch in batches]
    for batch, result in zip(batches, together, strict=True):
        (alone,) = runner.run([batch])
        assert alone.embeddings.tobytes() == result.embeddings.tobytes()
        assert not result.is_resplit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_points_the_same_way(cuda, dtype, batches):
    reference = rows_of(AsyncInferenceRunner(gpu_models.random_esm2(SHAPE, cuda, torch.float32), cuda).run(batches))
    found = rows_of(AsyncInferenceRunner(gpu_models.random_esm2(SHAPE, cuda, dtype), cuda).run(batches))
    cosines = torch.cosine_similarity(torch.from_numpy(found).double(), torch.from_numpy(reference).double())
    assert cosines.min() >= 0.999


def test_many_equal_batches_with_others_between_give_equal_rows(cuda, model, batches):
    mixed = [batch for number in range(200) for batch in (batches[0], batches[number % len(batches)])]
    results = list(AsyncInferenceRunner(model, cuda).run(mixed))
    assert len({result.embeddings.tobytes() for result in results[::2]}) == 1


def test_a_forward_pass_never_makes_the_host_wait(cuda, model, batches):
    inputs = batches[1].input_ids_T.to(cuda), batches[1].cu_seqlens.to(cuda), batches[1].lengths
    model(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_go_on_while_the_gpu_computes(cuda, batches, tmp_path):
    # large enough that the GPU, not the host that launches its kernels, sets the pace
    model = gpu_models.random_esm2(gpu_models.ESM2["650M"], cuda, torch.bfloat16)
    runner = AsyncInferenceRunner(model, cuda)
    list(runner.run(batches[:3]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        list(runner.run(batches))
        torch.cuda.synchronize()
    trace.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for way in ("HtoD", "DtoH"):
        copies, kernels = copies_and_kernels(events, way)
        assert len(copies) >= len(batches)
        assert share_overlapped(copies, kernels) > 0


def test_a_number_that_is_not_finite_names_its_sequence(cuda, batches):
    class Poisoned:
        hidden_dim = 4

        def __call__(self, input_ids_T, cu_seqlens, lengths):
            rows = torch.ones(len(lengths), 4, device=input_ids_T.device)
            rows[2, 1] = float("nan")
            return rows

    (result,) = AsyncInferenceRunner(Poisoned(), cuda).run(batches[:1])
    assert [(item.sequence_id, item.failure) for item in result.failed] == [("s2", "not_finite")]
    assert len(result.positions) == len(batches[0].positions) - 1


def test_a_stop_keeps_what_the_gpu_was_given(cuda, model, batches):
    stop = threading.Event()
    results = AsyncInferenceRunner(model, cuda).run(batches * 10, stop=stop)
    first = next(results)
    stop.set()
    others = list(results)
    assert first.positions == batches[0].positions
    assert 1 <= len(others) <= 3
    assert [result.positions for result in others] == [batch.positions for batch in (batches * 10)[1 : 1 + len(others)]]


def test_a_batch_that_does_not_fit_is_computed_in_pieces(cuda):
    model = gpu_models.random_esm2(SHAPE, cuda, torch.bfloat16)
    (batch,) = gpu_models.blocks_of(gpu_models.chunk_tokens(2000), token_budget=10**6)
    runner = AsyncInferenceRunner(model, cuda)
    list(runner.run([batch]))
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_reserved(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    (whole,) = runner.run([batch])
    needed = torch.cuda.max_memory_reserved(cuda) - resting
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction((resting + 0.6 * needed) / total, cuda)
    try:
        (pieces,) = runner.run([batch])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert (whole.is_resplit, pieces.is_resplit) == (False, True)
    assert np.abs(whole.embeddings - pieces.embeddings).max() <= 1e-2
