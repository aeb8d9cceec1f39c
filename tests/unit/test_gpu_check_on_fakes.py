"""The GPU check on a GPU that is none: its sections' code for GPUs, over tiny shapes, with the streams of the tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check, gpu_dna, gpu_measure, gpu_models, gpu_parity, gpu_speed, gpu_steps
from tests.fake_streams import DEVICE, fake_streams
from virnucpro.models.esm2_flash import PackedESM2

GIB = 1 << 30
QUESTIONS = {
    "is_available": lambda: True,
    "get_device_properties": lambda _device: SimpleNamespace(
        name="fake", total_memory=8 * GIB, major=9, minor=0, uuid="fake"
    ),
    "get_device_capability": lambda _device: (9, 0),
    "max_memory_allocated": lambda _device: GIB,
    "max_memory_reserved": lambda _device: 2 * GIB,
    "memory_allocated": lambda _device: GIB,
    "memory_reserved": lambda _device: GIB,
    "mem_get_info": lambda _device: (4 * GIB, 8 * GIB),
    "reset_peak_memory_stats": lambda _device: None,
    "set_sync_debug_mode": lambda _mode: None,
}


@pytest.fixture
def check(monkeypatch):
    """A check of the fake; while its memory is capped, a forward pass bears 20,000 tokens."""
    share, forward = [1.0], PackedESM2.forward

    def capped(model, input_ids_T, *args):
        if share[0] < 1 and len(input_ids_T) > 20_000:
            raise torch.OutOfMemoryError
        return forward(model, input_ids_T, *args)

    for name, answer in QUESTIONS.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda of_all, _device: share.__setitem__(0, of_all)
    )
    monkeypatch.setattr(PackedESM2, "forward", capped)
    monkeypatch.setattr(gpu_models, "ESM2", dict.fromkeys(gpu_models.ESM2, gpu_models.TINY))
    with fake_streams(monkeypatch) as runtime:
        yield gpu_measure.Check(DEVICE, is_tiny=True, seconds=400.0), runtime


SECTIONS = [
    gpu_speed.rates,
    gpu_parity.waits,
    gpu_parity.order_of_rows,
    gpu_parity.equal_batches,
    gpu_parity.precision,
    gpu_speed.esm2_8m,
    gpu_dna.dnabert_s,
    gpu_dna.dna_from_letters,
    gpu_steps.step_kernels,
]


@pytest.mark.slow
def test_sections_have_their_figures_and_verdicts_and_order_nothing_wrongly(check, monkeypatch):
    state, runtime = check
    found = gpu_check.run_sections(state, [gpu_check.Section("a", section, 1) for section in SECTIONS])
    assert {name: figures.get("error", figures.get("left_out")) for name, figures in found.items()} == dict.fromkeys(
        found
    )
    assert len(state.verdicts) >= 5
    assert [item["check"] for item in state.verdicts if not item["passed"]] == []
    assert found["dnabert_s"]["tokens_per_second"] > 0
    assert found["esm2_8m"]["peak_memory_gib"] == 1
    assert not [finding for finding in runtime.findings if "perhaps" in finding]


def test_the_machine_is_described(check):
    described = gpu_check.machine(check[0])
    assert (described["device"], described["memory_gib"], described["capability"]) == ("fake", 8.0, "9.0")


@pytest.mark.slow
def test_rows_in_another_order_are_a_failed_check(check, monkeypatch):
    state, _ = check
    rows_of = gpu_parity.rows_of

    def swapped(of_check, model, batches):
        rows = rows_of(of_check, model, batches)
        rows[[3, 4]] = rows[[4, 3]]
        return rows

    assert gpu_parity.order_of_rows(state)["wrong"] == 0
    monkeypatch.setattr(gpu_parity, "rows_of", lambda *args: swapped(*args) if len(args[2]) < 40 else rows_of(*args))
    assert gpu_parity.order_of_rows(state)["wrong"] == 2
    assert [item["passed"] for item in state.verdicts] == [True, False]
