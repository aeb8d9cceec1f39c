"""Triton's kernels without a GPU: in its interpreter, compiled for GPUs, and when they are chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from virnucpro.models.encoders.esm2_checkpoint import Architecture
from virnucpro.models.esm2_flash import TRITON_KERNELS, choose_step_kernels

REPOSITORY = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
SHAPE = Architecture(num_layers=1, hidden_dim=1280, attention_heads=20)

COMPILE = """
import re, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from virnucpro.models.encoders import triton_kernels as kernels

def compiled(kernel, tensors, numbers, constants, capability, warps):
    types = {**tensors, **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(tensors))}
    source = triton.compiler.ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, **kernels._FUSION}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]

for capability in (80, 90):
    for number in ("fp16", "bf16", "fp32"):
        pointers = {"qkv": f"*{number}", "rotation": "*fp32"}
        constants = {"HEADS": 20, "HEAD_DIM": 64, "WIDTH": 64, "ROWS": 32}
        rotary = compiled(kernels._rotate_rows, pointers, {"num_rows": "i32"}, constants, capability, 4)
        pointers = dict.fromkeys(("x", "y", "weight", "bias"), f"*{number}")
        constants = {"EPS": 1e-5, "DIM": 1280, "WIDTH": 2048}
        norm = compiled(kernels._add_and_normalise_row, pointers, {}, constants, capability, 4)
        for ptx in (rotary, norm):
            accesses = re.findall(r"(?:ld|st)\\.global\\S*", ptx)
            assert accesses and all(".v4.b32" in access for access in accesses), accesses
        assert "shared" not in rotary, "pairs are exchanged between threads"
"""


def run(*arguments, **environment):
    command = [sys.executable, *map(str, arguments)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=kept | environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]


def test_the_interpreter_finds_pytorchs_numbers_and_few_bytes_moved():
    options = ("-q", "-x", "-p", "no:cacheprovider")
    run("-m", "pytest", *options, "tests/interpreted_kernels.py", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_they_compile_for_gpus_with_16_bytes_an_access(tmp_path):
    run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=str(REPOSITORY))


@pytest.fixture
def card(monkeypatch):
    """Be a GPU of a capability whose trial fails with *error*; return the trials."""
    tries = []

    def be(capability, error=None):
        def try_out(device, dtype, *, num_heads, head_dim):
            tries.append((device, dtype, num_heads, head_dim))
            if error:
                raise error

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setitem(sys.modules, TRITON_KERNELS, SimpleNamespace(try_out=try_out))
        return tries

    return be


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_trial_that_succeeds_chooses_them(card, dtype):
    tries = card((8, 0))
    chosen = choose_step_kernels(CUDA, dtype, SHAPE)
    assert chosen.kernels is sys.modules[TRITON_KERNELS]
    assert tries == [(CUDA, dtype, 20, 64)]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "says"),
    [
        ("cuda", torch.float32, (9, 0), "in float16 and bfloat16"),
        ("cpu", torch.float16, (9, 0), "for GPUs"),
        ("cuda", torch.float16, (7, 5), "need compute capability 8.0"),
    ],
)
def test_elsewhere_nothing_is_tried(card, device, dtype, capability, says):
    tries = card(capability)
    chosen = choose_step_kernels(torch.device(device), dtype, SHAPE)
    assert (chosen.kernels, tries) == (None, [])
    assert says in chosen.reason


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore"),
        subprocess.CalledProcessError(1, ["gcc", "x" * 1000]),
        PermissionError("~/.triton"),
        AssertionError(),
    ],
    ids=repr,
)
def test_a_trial_that_fails_leaves_pytorchs_operators_with_a_short_reason(card, error):
    card((9, 0), error)
    chosen = choose_step_kernels(CUDA, torch.bfloat16, SHAPE)
    assert chosen.kernels is None
    assert f"Triton kernels do not run here ({type(error).__name__}: {str(error)[:40]}" in chosen.reason
    assert "\n" not in chosen.reason
    assert len(chosen.reason) < 260


def test_a_full_device_is_not_taken_for_a_want_of_triton(card):
    card((9, 0), torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        choose_step_kernels(CUDA, torch.bfloat16, SHAPE)


def test_without_triton_pytorchs_operators_are_left(card, monkeypatch):
    card((9, 0))
    monkeypatch.delitem(sys.modules, TRITON_KERNELS)
    monkeypatch.setitem(sys.modules, "triton", None)
    chosen = choose_step_kernels(CUDA, torch.bfloat16, SHAPE)
    assert chosen.kernels is None
    assert "triton" in chosen.reason
    assert TRITON_KERNELS not in sys.modules
