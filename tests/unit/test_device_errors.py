"""What a GPU's errors say, by the texts in which torch reports them, and what the loop does about each."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import HashModel
from tests.unit.test_async_inference import batch_of
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_errors import device_failure, failure_of

MEMORY, LOST = FailureClass.DEVICE_OUT_OF_MEMORY, FailureClass.DEVICE_ERROR
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call"
ERRORS = {
    "allocator": (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MEMORY),
    "cuBLAS has no memory": (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MEMORY,
    ),
    "cuDNN has no memory": (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), MEMORY),
    "page-locked memory": (torch.AcceleratorError(f"CUDA error: out of memory{HINT}"), MEMORY),
    "a module loaded late": (RuntimeError("CUDA driver error: out of memory"), MEMORY),
    "a kernel of Triton": (RuntimeError("Triton Error [CUDA]: out of memory"), MEMORY),
    "illegal access": (
        torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{HINT}"),
        LOST,
    ),
    "illegal access, before torch 2.8": (
        RuntimeError(f"CUDA error: an illegal memory access was encountered{HINT}"),
        LOST,
    ),
    "cuBLAS fails": (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), LOST),
    "fallen off the bus": (torch.AcceleratorError(f"CUDA error: unspecified launch failure{HINT}"), LOST),
    "gone at the next start": (RuntimeError("No CUDA GPUs are available"), LOST),
    "unknown to the driver": (RuntimeError("CUDA unknown error - this may be due to an incorrectly set up"), LOST),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_of_a_device_is_told_by_its_text(name):
    error, failure = ERRORS[name]
    assert device_failure(error) is failure_of(error) is failure


@pytest.mark.parametrize(
    "error", [RuntimeError("shape '[2]' is invalid"), ValueError("CUDA error: in a name"), MemoryError()]
)
def test_other_errors_are_no_devices(error):
    assert device_failure(error) is None


class FailingOnce(HashModel):
    """Fails at one batch, at the first attempt where its memory ran out, else always."""

    def __init__(self, error, number):
        super().__init__(self.before)
        self.error, self.number, self.failed = error, number, False

    def before(self, number, sequences):
        if number == self.number and not (self.failed and device_failure(self.error) is MEMORY):
            self.failed = True
            raise self.error


@pytest.mark.parametrize("number", [0, 2], ids=["first block", "last block"])
@pytest.mark.parametrize("name", ERRORS)
def test_memory_halves_the_batch_and_a_lost_device_ends_the_loop(name, number):
    error, failure = ERRORS[name]
    batches = [batch_of("MK", "A" * (1 + n), first=10 * n) for n in range(3)]
    results, loop = [], AsyncInferenceRunner(FailingOnce(error, number), "cpu").run(batches)
    if failure is LOST:
        with pytest.raises(type(error)):
            results += loop
        assert len(results) == number
    else:
        results += loop
        assert [result.oom_splits for result in results] == [int(n == number) for n in range(3)]
    assert [result.positions for result in results] == [batch.positions for batch in batches[: len(results)]]
    assert not any(result.failed for result in results), "no sequence is to blame"


def test_a_batch_stays_in_ordinary_memory_where_none_can_be_page_locked(monkeypatch, caplog):
    def refuse(_tensor):
        raise ERRORS["page-locked memory"][0]

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    batches = [batch_of("MK", first=n) for n in range(3)]
    assert [batch.pin_memory() for batch in batches] == batches
    assert [record.getMessage() for record in caplog.records] == ["batch.not_page_locked: CUDA error: out of memory"]
