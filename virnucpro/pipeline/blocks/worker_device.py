"""What a worker has of its device: which it is, the model on it, and how much memory that took."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from virnucpro import spans
from virnucpro.choices import KERNEL_SEPARATOR
from virnucpro.errors import ConfigurationError
from virnucpro.pipeline.devices import CPU_TOKEN, VISIBLE_VARIABLE, Device

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig
    from virnucpro.data.collators import Tokenizer
    from virnucpro.pipeline.async_inference import PackedEncoder
    from virnucpro.pipeline.work.worker_process import ReportPipe

log = structlog.get_logger(__name__)


def load_model(config: ModelConfig, device: torch.device, reports: ReportPipe) -> tuple[PackedEncoder, Tokenizer]:
    """
    Load the run's model onto *device*, and report it.

    Raises:
        WeightsError: The weights are absent or unusable.
        ConfigurationError: The run's rows are computed with an attention kernel that is not this device's.
    """
    started_s = time.monotonic()
    module, function = config.loader.split(":")
    load = getattr(importlib.import_module(module), function)
    with spans.span(spans.PREPARING, name="load model"):
        model, tokenizer = load(config.weights_path, device, precision=config.precision)
    seconds = round(time.monotonic() - started_s, 3)
    log.info("model.loaded", model=config.model_name, precision=config.precision, seconds=seconds)
    attention = model.attention
    log.info("attention.chosen", kernel=attention.name, reason=attention.reason)
    if config.attention_kernel and attention.name not in config.attention_kernel.split(KERNEL_SEPARATOR):
        raise ConfigurationError(
            f"this run's rows are computed with the attention kernel {config.attention_kernel}, but this device would "
            f"use {attention.name} ({attention.reason}): use the same packages and GPUs, or another output folder"
        )
    loaded = {"kind": "model_loaded", "seconds": seconds, "attention_kernel": attention.name}
    reports.put(loaded | ({"gpu_uuid": gpu_uuid(device)} if device.type == "cuda" else {}))
    return model, tokenizer


def own_label() -> str:
    """Return what logs call our device."""
    return Device(os.environ.get(VISIBLE_VARIABLE, CPU_TOKEN)).label


def gpu_uuid(device: torch.device) -> str:
    """Return what the driver calls the GPU that we see: numbers of CUDA need not be those of the driver."""
    token = os.environ.get(VISIBLE_VARIABLE, "")
    return token if token.startswith("MIG-") else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the peak MiB of this process: resident, and on a GPU those of torch's tensors there."""
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage counts in what our parent had when it forked
    found = [int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:")]
    peak = {"peak_resident_mib": found[0]} if found else {}  # a sandbox's kernel may hide it
    if device.type == "cuda":
        peak["peak_gpu_mib"] = torch.cuda.max_memory_allocated(device) >> 20
    return peak


def own_device(config: ModelConfig) -> torch.device:
    """
    Return our device and set the threads; a GPU is always the only one we see.

    Raises:
        ConfigurationError: A GPU was asked for that torch cannot use.
    """
    torch.set_num_threads(config.settings.hardware.threads)
    token = os.environ.get(VISIBLE_VARIABLE)
    if token and not torch.cuda.is_available():
        raise ConfigurationError(
            f"device {token} was asked for, but torch {torch.__version__} sees no CUDA device: "
            "install a CUDA build of torch, or use --devices cpu"
        )
    return torch.device("cuda:0" if torch.cuda.is_available() and token != CPU_TOKEN else "cpu")
