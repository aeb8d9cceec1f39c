"""How many CPU workers a run gets when nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from virnucpro.config import ModelConfig
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.hardware.device_claim import (
    INPUT_BYTES,
    DeviceClaim,
    claim_devices,
    default_cpu_workers,
    devices_for,
    free_memory_bytes,
    usable_cores,
)

GIB = 1 << 30
PLENTY = {"cores": 16, "memory_bytes": 1000 * GIB, "weights_bytes": 30_000_000, "input_bytes": 100 * INPUT_BYTES}


@pytest.mark.parametrize(
    ("limits", "workers"),
    [
        ({}, 16),
        ({"cores": 1}, 1),
        ({"input_bytes": 0}, 1),
        ({"input_bytes": INPUT_BYTES}, 2),
        ({"memory_bytes": 0}, 1),
        ({"memory_bytes": 23 * GIB, "weights_bytes": int(2.4 * GIB)}, 5),
    ],
)
def test_cores_memory_and_input_each_set_a_limit(limits, workers):
    assert default_cpu_workers(**{**PLENTY, **limits}) == workers


def _config(tmp_path):
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"w" * 1000)
    return ModelConfig(model_name="m", weights_path=str(weights), weights_sha256="0", hidden_dim=4)


def test_a_large_input_gets_a_worker_a_core(tmp_path):
    fasta = tmp_path / "large.fasta"
    fasta.write_bytes(b"A" * (usable_cores() * INPUT_BYTES))
    claim = devices_for(claim_devices("cpu"), _config(tmp_path), [fasta], workers=None)
    assert claim.devices() == [CPU] * min(usable_cores(), free_memory_bytes() // GIB)


def test_a_tiny_or_missing_input_gets_one_worker(tmp_path):
    fasta = tmp_path / "tiny.fasta"
    fasta.write_text(">a\nMK\n")
    claim = devices_for(claim_devices("cpu"), _config(tmp_path), [fasta, tmp_path / "none"], workers=None)
    assert claim.devices() == [CPU]


def test_what_was_asked_for_is_what_one_gets(tmp_path):
    fasta = tmp_path / "large.fasta"
    fasta.write_bytes(b"A" * (usable_cores() * INPUT_BYTES))
    for claim, workers in (
        (claim_devices("cpu", workers=1), 1),
        (DeviceClaim.of([CPU] * 3), None),
        (DeviceClaim.of([Device("0"), Device("1")]), None),
    ):
        assert devices_for(claim, _config(tmp_path), [fasta], workers=workers) is claim


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("max 100000", None), ("20000 100000", 1)])
def test_the_control_groups_quota_counts(tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    assert usable_cores(tmp_path) == (cores or usable_cores(Path("/nonexistent")))


def test_the_control_groups_memory_counts(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert free_memory_bytes(tmp_path, meminfo) == 4096 * 1024
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    assert free_memory_bytes(tmp_path, meminfo) == 600_000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory_bytes(tmp_path, meminfo) == 4096 * 1024
