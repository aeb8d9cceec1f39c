"""
Are the numbers right? Sections of part a of ``gpu_check.py``: kernels and models against formulas and against peers.

The bundled encoder is trained but small; the 650M shape is deep but of random weights, whose states are not those of a
trained model. Real checkpoints are compared by ``tests/parity`` on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import gpu_models, gpu_transformers
from benchmarks.gpu_measure import HALF, HALVES, cosines, free, rows_of, short
from virnucpro.models import esm2_flash
from virnucpro.models.attention import choose_attention
from virnucpro.models.encoders.attention_kernels import (
    equal_length_attention,
    flash_attention,
    padded_attention,
    varlen_attention,
)
from virnucpro.models.encoders.esm2_checkpoint import open_checkpoint
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.gpu_measure import Check
    from virnucpro.data.collators import PackedBatch
    from virnucpro.pipeline.async_inference import PackedEncoder

REPOSITORY = Path(__file__).resolve().parents[1]
BUNDLED = REPOSITORY / "virnucpro" / "models" / "weights" / "virnucpro-tiny-protein" / "model.safetensors"
LEAST_COSINE = 0.999
OWN_KERNELS = ("_rotate_rows", "_add_and_normalise_row")
SANITIZER_LIMIT_S = 90.0


def attention_parity(check: Check) -> dict[str, Any]:
    """Compare every attention kernel that works here with the formula in float64."""
    found: dict[str, Any] = {}
    lengths = (40, 37, 17, 3) if check.is_tiny else (1024, 700, 168, 168, 101, 33, 17, 5, 3)
    cu_seqlens = torch.tensor([0, *lengths], device=check.device).cumsum(0).int()
    for head_dim in (16, 24, 32, 64):
        for dtype in (*HALVES, torch.float32):
            for alibi in (False, True):
                torch.manual_seed(head_dim)
                q, k, v = (torch.randn(sum(lengths), 4, head_dim, device=check.device).to(dtype) for _ in range(3))
                slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=check.device) if alibi else None
                choice = choose_attention(check.device, dtype, head_dim=head_dim, alibi=alibi)
                tried = {choice.name: choice.kernel, "sdpa-padded": padded_attention}
                tried["sdpa-equal-lengths"] = equal_length_attention
                if check.is_on_gpu and dtype is not torch.float32 and not alibi:
                    tried["varlen_attn"] = varlen_attention
                if check.is_on_gpu and dtype is not torch.float32 and importlib.util.find_spec("flash_attn"):
                    tried["flash-attn"] = flash_attention
                expected = _attention_in_float64(q, k, v, lengths, slopes)
                for name, kernel in tried.items():
                    out = kernel(q, k, v, cu_seqlens, lengths, slopes).double()
                    error = float((out - expected).norm() / expected.norm())
                    key = f"{name}, {short(dtype)}{', ALiBi' if alibi else ''}"
                    found[key] = max(error, found.get(key, 0.0))
    for key, error in found.items():
        check.expect(f"relative error of {key}", value=error, most=1e-5 if "float32" in key else 1e-2)
    for alibi in (False, True):
        choice = choose_attention(check.device, HALF, head_dim=64, alibi=alibi)
        check.show(f"kernel in bf16{' with ALiBi' if alibi else ''}", f"{choice.name}: {choice.reason}")
    return found


def _attention_in_float64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], slopes: torch.Tensor | None
) -> torch.Tensor:
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        q_NLH, k_NLH, v_NLH = (x[part].double().transpose(0, 1) for x in (q, k, v))
        scores = q_NLH @ k_NLH.transpose(1, 2) / q.shape[-1] ** 0.5
        if slopes is not None:
            at = torch.arange(length, device=q.device)
            scores = scores - slopes.double()[:, None, None] * (at[:, None] - at).abs()
        out.append((scores.softmax(-1) @ v_NLH).transpose(0, 1))
        start += length
    return torch.cat(out)


def precision(check: Check) -> dict[str, Any]:
    """Compare bf16 and fp16 with fp32, and fp32 here with fp32 on the CPU."""
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55] if check.is_tiny else [*range(1, 1022, 7), 1022]
    tokens = sorted((length + 2 for length in lengths), reverse=True)
    batches = list(gpu_models.blocks_of(tokens, token_budget=4096))
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"]
    models: dict[str, Callable[[torch.device, torch.dtype], PackedEncoder]] = {
        "650M, random": lambda device, dtype: gpu_models.random_esm2(shape, device, dtype),
        "DNABERT-S, random": lambda device, dtype: gpu_models.random_mosaic_bert(device, dtype, is_tiny=check.is_tiny),
    }
    figures: dict[str, Any] = {"lengths": [min(lengths), max(lengths)], "sequences": len(lengths)}
    if importlib.util.find_spec("safetensors") is None:
        figures["bundled encoder"] = check.left_out("bundled encoder", "safetensors is not installed")
    else:
        models["bundled encoder"] = _bundled_encoder
    for name, make in models.items():
        reference = rows_of(check, make(check.device, torch.float32), batches)
        for dtype in HALVES:
            found = cosines(rows_of(check, make(check.device, dtype), batches), reference)
            figures[f"{name}, {short(dtype)}"] = {"least": float(found.min()), "median": float(np.median(found))}
            what = f"{name}, {short(dtype)} against float32: least cosine"
            check.expect(what, value=float(found.min()), least=LEAST_COSINE)
        free(check)
    if "bundled encoder" in models:
        cpu = torch.device("cpu")
        on_cpu = list(AsyncInferenceRunner(_bundled_encoder(cpu, torch.float32), cpu).run(batches))
        here = rows_of(check, _bundled_encoder(check.device, torch.float32), batches)
        difference = float(np.abs(np.concatenate([result.embeddings for result in on_cpu]) - here).max())
        check.expect("bundled encoder, fp32 here against the CPU: largest difference", value=difference, most=1e-5)
        figures["fp32 against the CPU"] = difference
    return figures


def _bundled_encoder(device: torch.device, dtype: torch.dtype) -> PackedEncoder:
    architecture, tensors = open_checkpoint(BUNDLED, vocabulary=33)
    # what load_esm2_model does, less fair-esm
    return esm2_flash.packed_esm2(architecture, tensors, device, dtype, mask_idx=gpu_models.MASK)


def transformers_parity(check: Check) -> dict[str, Any]:
    """Compare rows, sequence by sequence, with those of transformers' fp32 model with the same random weights."""
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"]
    tokens = gpu_models.protein_tokens(20 if check.is_tiny else 300)
    batches = list(gpu_models.blocks_of(tokens, token_budget=16384))
    model = gpu_transformers.esm_model(shape, check.device, torch.float32)
    padded = [pair for batch in batches for pair in gpu_transformers.padded_batches(check, batch, 16384)]
    reference = gpu_transformers.padded_rows(check, model, padded)
    del model
    figures: dict[str, Any] = {"sequences": len(tokens)}
    for dtype, least in ((torch.float32, 1 - 1e-5), *((half, LEAST_COSINE) for half in HALVES)):
        free(check)
        found = cosines(rows_of(check, gpu_models.random_esm2(shape, check.device, dtype), batches), reference)
        figures[short(dtype)] = {"least": float(found.min()), "median": float(np.median(found))}
        what = f"650M, {short(dtype)} against transformers in float32: least cosine"
        check.expect(what, value=float(found.min()), least=least)
    return figures


def order_of_rows(check: Check) -> dict[str, Any]:
    """Find for every row of large batches the most similar row of the sequences one at a time: it is its own."""
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["8M"]
    tokens = gpu_models.protein_tokens(40 if check.is_tiny else 400)
    batches = list(gpu_models.blocks_of(tokens, token_budget=4096 if check.is_tiny else 16384))
    rows = rows_of(check, gpu_models.random_esm2(shape, check.device, HALF), batches)
    alone = [one.pin_memory() if check.is_on_gpu else one for batch in batches for one in batch.singles()]
    reference = rows_of(check, gpu_models.random_esm2(shape, check.device, torch.float32), alone)
    centred, own = rows - reference.mean(0), reference - reference.mean(0)
    similar = (centred @ own.T) / np.linalg.norm(own, axis=1)
    wrong = int((similar.argmax(1) != np.arange(len(rows))).sum())
    check.expect(f"of {len(rows)} rows those that are another sequence's", value=wrong, most=0)
    return {"rows": len(rows), "wrong": wrong}


def equal_batches(check: Check) -> dict[str, Any]:
    """Many equal batches, others between them and other streams busy, give equal bytes: nothing is reused too soon."""
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["8M"]
    model = gpu_models.random_esm2(shape, check.device, HALF)
    tokens = gpu_models.protein_tokens(8 if check.is_tiny else 300)
    one, *others = gpu_models.blocks_of(tokens, token_budget=1024 if check.is_tiny else 8192)
    others = others or [one]
    repeats = 10 if check.is_tiny else 300
    batches = [batch for number in range(repeats) for batch in (one, others[number % len(others)])]
    results = list(AsyncInferenceRunner(model, check.device).run(batches, on_start=_work_of_others(check)))
    distinct = len({result.embeddings.tobytes() for result in results[::2]})
    check.expect(f"distinct results of {repeats} equal batches", value=distinct, least=1, most=1)
    norms = np.linalg.norm(results[0].embeddings, axis=1)
    check.expect("their least norm", value=float(norms.min()), least=1e-3)
    return {"batches": repeats, "distinct": distinct}


def _work_of_others(check: Check) -> Callable[[PackedBatch], None]:
    """Return what queues work on two other streams, which takes and frees memory of its own."""
    streams = [torch.cuda.Stream(check.device) for _ in range(2)] if check.is_on_gpu else []
    size = 64 if check.is_tiny else 1024

    def queue(_batch: PackedBatch) -> None:
        for stream in streams:
            with torch.cuda.stream(stream):
                x = torch.full((size, size), 0.5, device=check.device)
                x @ x

    return queue


def waits(check: Check) -> dict[str, Any]:
    """Let CUDA raise an error where a forward pass makes the host wait for the GPU."""
    if not check.is_on_gpu:
        return check.left_out("waits", "no GPU to wait for")
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], check.device, HALF)
    (batch,) = gpu_models.blocks_of(gpu_models.protein_tokens(40), token_budget=10**6)
    inputs = batch.input_ids_T.to(check.device), batch.cu_seqlens.to(check.device), batch.lengths
    model(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check.show("host waits in a forward pass", "none")
    return {"waits": 0}


def sanitizer(check: Check) -> dict[str, Any]:
    """Run a forward pass under NVIDIA's compute-sanitizer: accesses out of bounds, races in shared memory."""
    if not check.is_on_gpu:
        return check.left_out("sanitizer", "no GPU")
    folders = [os.environ.get("PATH", ""), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if tool is None:
        return check.left_out("sanitizer", "compute-sanitizer (CUDA's toolkit) is neither in PATH nor in CUDA_HOME")
    figures = {}
    for name in ("memcheck", "racecheck"):
        command = [tool, f"--tool={name}", "--error-exitcode=9", sys.executable, "-c", FORWARD, str(REPOSITORY)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            figures[name] = check.left_out(name, f"it takes longer than {SANITIZER_LIMIT_S:.0f} s")
            continue
        if done.returncode not in {0, 9}:
            raise RuntimeError(f"{name} ended with {done.returncode}: ... {(done.stdout + done.stderr)[-600:]}")
        # racecheck is not always right about kernels of CUDA's libraries: what it says of them is shown alone
        counts = name == "memcheck" or any(kernel in done.stdout for kernel in OWN_KERNELS)
        check.expect(f"errors that {name} finds in a forward pass", value=counts and done.returncode == 9, most=0)
        figures[name] = {"exit_code": done.returncode, "end": done.stdout[-600:]}
    return figures


FORWARD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from benchmarks import gpu_models
device = torch.device("cuda:0")
(batch,) = gpu_models.blocks_of([168, 101, 70, 33, 9], token_budget=1000)
inputs = batch.input_ids_T.to(device), batch.cu_seqlens.to(device), batch.lengths
for model in (
    gpu_models.random_esm2(gpu_models.TINY, device, torch.float16),
    gpu_models.random_mosaic_bert(device, torch.bfloat16, is_tiny=True),
):
    model(*inputs).cpu()
"""


def gpu_tests(check: Check) -> dict[str, Any]:
    """Run ``tests/gpu``, which skips what it cannot test without a GPU."""
    if not (REPOSITORY / "tests" / "gpu").exists():
        return check.left_out("tests/gpu", "this is not a checkout")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    limit_s = max(30.0, min(240.0, check.seconds_left))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_s, check=False)
    tail = done.stdout.strip().splitlines()[-12:]
    check.show("tests/gpu", tail[-1] if tail else done.stderr.strip()[-200:])
    check.expect("exit code of tests/gpu", value=done.returncode, most=0)
    return {"exit_code": done.returncode, "tail": tail}
