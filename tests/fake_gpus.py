"""
A host with GPUs that are none, for programs of ours in processes of their own.

Only the ends are exchanged: what the driver tells (``FakeNvml``, behind ``pynvml``'s own functions), and where a worker
computes, which is the CPU. In between everything is the program: which devices a run takes, their locks, the value of
CUDA_VISIBLE_DEVICES that each worker process gets, the check that it got it, and the probe that becomes a worker.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pynvml

from tests.fake_nvml import FakeGpu, FakeNvml

VARIABLE = "FAKE_GPUS"
"""How many GPUs the host has."""
NOW = "FAKE_GPUS_NOW"
"""A JSON file of what the GPUs are like now, if a test changes that: number -> values of ``FakeGpu``."""
WORKER = "tests.fake_gpus:gpu_worker_on_a_fake_gpu"
PROBE = "tests.fake_gpus:probe_a_fake_gpu"
PROBE_WITH_TRIALS = "tests.fake_gpus:try_out_a_fake_gpu"


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-0000-1111-2222-333344445555"


class _NvmlOfNow(FakeNvml):
    def _check(self):
        if NOW in os.environ:
            for number, values in json.loads(Path(os.environ[NOW]).read_text()).items():
                vars(self.gpus[int(number)]).update(values)
        super()._check()


def let_the_driver_tell(count: int) -> None:
    """Let this process's driver tell of *count* GPUs."""
    nvml = _NvmlOfNow([FakeGpu(uuid_of(number)) for number in range(count)])
    for name in dir(nvml):
        if name.startswith("nvml") and callable(getattr(nvml, name)):
            setattr(pynvml, name, getattr(nvml, name))


def set_now(path: Path, gpus: dict[int, dict]) -> None:
    """Write the file of ``NOW``, whole whenever it is read."""
    path.with_suffix(".new").write_text(json.dumps(gpus))
    path.with_suffix(".new").replace(path)


def pretend(count: int) -> None:
    """Let this process see *count* GPUs, and start workers for them."""
    from virnucpro.pipeline import multi_gpu_inference
    from virnucpro.pipeline.run import run_preparation

    let_the_driver_tell(count)
    multi_gpu_inference.run_embedding.__kwdefaults__.update(worker_fn=WORKER, probe_fn=PROBE)
    run_preparation.prepare_run.__kwdefaults__.update(probe_fn=PROBE)


def gpu_worker_on_a_fake_gpu(rank, world_size, results_queue, index_path, output_dir, model_config, *args, **loaded):
    """Work on the CPU, and note beside the model's control file when this process had which device."""
    import torch

    from virnucpro.pipeline import gpu_worker

    uses = Path(model_config.weights_path).with_suffix(".devices")
    use = {"out": str(output_dir), "device": os.environ["CUDA_VISIBLE_DEVICES"], "pid": os.getpid()}
    make_plan = gpu_worker.make_plan
    gpu_worker.own_device = lambda _config: torch.device("cpu")
    gpu_worker.make_plan = lambda *args, **_: make_plan(*args, device_type="cuda")  # as its parent has it
    _note(uses, {**use, "event": "begin", "time": time.monotonic()})
    try:
        gpu_worker.gpu_worker(rank, world_size, results_queue, index_path, output_dir, model_config, *args, **loaded)
    finally:
        _note(uses, {**use, "event": "end", "time": time.monotonic()})


def probe_a_fake_gpu(rank, world_size, results_queue, index_path, output_dir, model_config):
    """Probe the CPU as a GPU, but for the trials of budgets."""
    config = replace(model_config, token_budget=model_config.token_budget or 64)
    try_out_a_fake_gpu(rank, world_size, results_queue, index_path, output_dir, config)


def try_out_a_fake_gpu(*args):
    """Probe the CPU as a GPU of 1 GiB, with trials of budgets unless one is given."""
    import torch

    from virnucpro.pipeline.plan import probe_worker

    none = ("memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats")
    for name in (*none, "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: 0)
    torch.cuda.mem_get_info = lambda _device: (1 << 30, 1 << 30)
    torch.cuda.get_device_name = lambda _device: "fake"
    probe_worker.own_device = lambda _config: torch.device("cpu")
    probe_worker.gpu_worker = gpu_worker_on_a_fake_gpu
    probe_worker.probe_worker(*args)


def uses_of(control: Path) -> list[dict]:
    """Return when which process had which device: out, device, pid, begin and end (None: it was killed)."""
    path = control.with_suffix(".devices")
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    ends = {line["pid"]: line["time"] for line in lines if line["event"] == "end"}
    return [
        {"out": line["out"], "device": line["device"], "begin": line["time"], "end": ends.get(line["pid"])}
        for line in lines
        if line["event"] == "begin"
    ]


def shared(uses: list[dict]) -> list[tuple[dict, dict]]:
    """Return the pairs of uses of one device by two runs at one time."""
    return [
        (one, other)
        for number, one in enumerate(uses)
        for other in uses[:number]
        if one["device"] == other["device"]
        and one["out"] != other["out"]
        and one["begin"] < other["end"]
        and other["begin"] < one["end"]
    ]


def _note(path: Path, line: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
