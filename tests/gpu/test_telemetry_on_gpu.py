"""What is told of a GPU while it works: its spans on the host's clock, its utilisation."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time

import numpy as np
import pytest
import torch

from benchmarks import gpu_models
from tests.traces import out_of_order, overlapping, spans_by_lane
from virnucpro import spans
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.hardware.device_clock import DeviceClock


@pytest.fixture
def folder(tmp_path):
    process = {"model": "esm2", "rank": 0, "device": "cuda:0", "attempt": 1}
    spans.enable(tmp_path / "spans", process, block_of=lambda position: position)
    yield tmp_path / "spans"
    spans.disable()


def test_a_batch_is_copied_in_then_computed_then_copied_out(cuda, folder):
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], cuda, torch.bfloat16)
    batches = list(gpu_models.blocks_of(gpu_models.protein_tokens(400), token_budget=8192))
    (path,) = folder.iterdir()
    began_ns = time.monotonic_ns()
    list(AsyncInferenceRunner(model, cuda).run(batches))
    ended_ns = time.monotonic_ns()
    lanes = spans_by_lane(path)
    assert sum(map(len, lanes.values())) == 4 * len(batches)
    for lane in (spans.LAUNCHING, spans.HOST_TO_DEVICE, spans.COMPUTE, spans.DEVICE_TO_HOST):
        assert [block for _, _, block in lanes[lane]] == [batch.positions[0] for batch in batches], lane
        assert lanes[lane][0][0] >= began_ns - 1_000_000
        assert lanes[lane][-1][1] <= ended_ns + 1_000_000
    assert out_of_order(lanes) == 0
    assert overlapping(lanes) == 0
    assert all(end > begin for begin, end, _ in lanes[spans.COMPUTE])


def test_without_recording_the_runner_has_no_clock_and_its_rows_are_the_same(cuda, folder):
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], cuda, torch.bfloat16)
    batches = list(gpu_models.blocks_of(gpu_models.protein_tokens(100), token_budget=8192))
    recorded = [result.embeddings.tobytes() for result in AsyncInferenceRunner(model, cuda).run(batches)]
    spans.disable()
    runner = AsyncInferenceRunner(model, cuda)
    assert runner._clock is None
    assert [result.embeddings.tobytes() for result in runner.run(batches)] == recorded


def test_the_clock_of_the_device_agrees_with_the_hosts_while_the_device_is_busy(cuda, folder):
    clock = DeviceClock(cuda)
    x = torch.randn(4096, 4096, device=cuda)
    x @ x
    torch.cuda.synchronize(cuda)
    marks = clock.marks()
    before_ns = time.monotonic_ns()
    with marks.around(spans.COMPUTE, torch.cuda.current_stream(cuda)):
        for _ in range(50):
            x @ x
    torch.cuda.synchronize(cuda)
    after_ns = time.monotonic_ns()
    marks.record(gpu_models.random_batch([3], np.random.default_rng(0)))
    (path,) = folder.iterdir()
    ((begin_ns, end_ns, _),) = spans_by_lane(path)[spans.COMPUTE]
    assert before_ns - 1_000_000 <= begin_ns < end_ns <= after_ns + 1_000_000
    assert end_ns - begin_ns > 0.8 * (after_ns - before_ns)


def sampled_utilisation(device: torch.device, *, seconds: float) -> tuple[list[float], list[float]]:
    """Compute and rest by turns; return the utilisation, 0 to 1, by ``GpuMonitor`` and by nvidia-smi, in samples."""
    from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor

    uuid = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
    question = ["nvidia-smi", f"--id={uuid}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    monitor = GpuMonitor([("cuda:0", uuid)])
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], device, torch.bfloat16)
    (batch,) = gpu_models.blocks_of(gpu_models.chunk_tokens(90), token_budget=1 << 14)
    runner = AsyncInferenceRunner(model, device)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            rests = int(time.monotonic() / (seconds / 6)) % 3 == 2  # a third of the time
            ended.wait(0.05) if rests else list(runner.run([batch] * 20))

    ours, theirs = [], []
    worker = threading.Thread(target=work)
    worker.start()
    try:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            ours += [sample.utilization for sample in monitor.sample() if sample.utilization is not None]
            told = subprocess.run(question, capture_output=True, text=True, timeout=30, check=True)
            theirs.append(float(told.stdout) / 100)
            time.sleep(0.5)
    finally:
        ended.set()
        worker.join()
        monitor.close()
    return ours, theirs


def test_the_monitor_says_of_utilisation_what_nvidia_smi_says(cuda):
    pytest.importorskip("pynvml")
    if not shutil.which("nvidia-smi"):
        pytest.skip("there is no nvidia-smi")
    ours, theirs = sampled_utilisation(cuda, seconds=12.0)
    assert min(len(ours), len(theirs)) >= 5
    assert max(ours) > 0.5
    assert statistics.mean(ours) == pytest.approx(statistics.mean(theirs), abs=0.10)


def test_a_host_has_the_gpus_that_nvidia_smi_has(cuda):
    pytest.importorskip("pynvml")
    from virnucpro.telemetry.metrics.gpu_monitor import HostGpus

    if not shutil.which("nvidia-smi"):
        pytest.skip("there is no nvidia-smi")
    question = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    told = subprocess.run(question, capture_output=True, text=True, timeout=30, check=True)
    samples = HostGpus().samples()
    assert [f"{sample.device}, {sample.uuid}" for sample in samples] == told.stdout.splitlines()
    assert not any(sample.is_lost for sample in samples)
