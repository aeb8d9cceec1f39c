"""
What an exception means for the device: its memory ran out, or this process can no longer use it.

torch has types for some of these errors only: what a library of the driver reports (cuBLAS, cuDNN, Triton), and every
error before torch 2.8, is a plain ``RuntimeError`` whose text names its source. Such texts are compared here and
nowhere else.
"""

from __future__ import annotations

import re

import torch

from virnucpro.pipeline.failures import FailureClass, classify_error

# c10/cuda/CUDAException.h, aten/src/ATen/cuda/Exceptions.h and c10/cuda/CUDAFunctions.cpp of PyTorch 2.11; Triton 3.4
_OF_A_DEVICE = re.compile(
    r"CUDA (error|driver error|unknown error|out of memory)|cuDNN error|Triton Error \[CUDA\]|No CUDA GPUs are avail"
)
_OF_MEMORY = re.compile(r"out of memory|STATUS_ALLOC_FAILED")
_ACCELERATOR_ERROR: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)


def device_failure(error: BaseException) -> FailureClass | None:
    """
    Return the failure of the device in *error*: out of memory, or lost to this process; None for any other error.

    Page-locked memory and kernels that are loaded at their first use fail with an ``AcceleratorError`` that names
    memory; the process can continue with less of it.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return FailureClass.DEVICE_OUT_OF_MEMORY
    text = str(error)
    if isinstance(error, _ACCELERATOR_ERROR) or (isinstance(error, RuntimeError) and _OF_A_DEVICE.search(text)):
        return FailureClass.DEVICE_OUT_OF_MEMORY if _OF_MEMORY.search(text) else FailureClass.DEVICE_ERROR
    return None


def failure_of(error: BaseException) -> FailureClass:
    return device_failure(error) or classify_error(error)
