"""
Everything that only a GPU can show, in one command of under ten minutes: ``python3 benchmarks/gpu_check.py``.

It needs torch 2.10 or later and numpy; not Prefect, structlog, fair-esm or h5py; it makes its own
sequences and random weights. transformers (the baseline) and pytest (``tests/gpu``) are used if installed; so is what
whole runs need (``gpu_runs.py``), also from the wheels that ``make gpu-kit`` puts into ``build/gpu_kit``.
Each section is independent: a failure is recorded and the rest runs. The figures go to
``benchmarks/results/gpu_check_DATE.json`` (or into ``--out``, or ``$OUT``), a table to the screen; the exit code is 1
when a check failed.

``--device cpu --tiny`` runs the same code over tiny shapes: this tests the script and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import gpu_models, gpu_runs  # noqa: E402
from virnucpro import spans  # noqa: E402
from virnucpro.models import esm2_flash  # noqa: E402
from virnucpro.models.attention import choose_attention  # noqa: E402
from virnucpro.models.encoders.attention_kernels import (  # noqa: E402
    equal_length_attention,
    flash_attention,
    padded_attention,
    varlen_attention,
)
from virnucpro.models.encoders.esm2_checkpoint import Architecture, open_checkpoint  # noqa: E402
from virnucpro.pipeline.async_inference import AsyncInferenceRunner  # noqa: E402
from virnucpro.pipeline.plan.token_budget import DeviceTrials, choose_token_budget  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.data.collators import PackedBatch
    from virnucpro.pipeline.async_inference import PackedEncoder

HALF = torch.bfloat16
EQUAL_LENGTHS = (53, 168, 400, 1022)
MIX = "UniProt-like lengths"
ROUND_SECONDS = 2.0
"""Seconds of rounds after which no further one begins."""
TOTAL_SECONDS = 470.0
"""Of the whole check; later sections are skipped, and the report says so."""
TARGETS = {"esm2 share of peak": 0.55, "dnabert-s share of peak": 0.35, "times transformers": 1.4, "cosine": 0.999}
SLOWEST = 12
UTILISATION_SECONDS = 60.0
TIE_ERROR_NS = 1_000_000
"""Nanoseconds that the GPU's times may be off on the host's clock: far more than waiting for one event takes."""
KIT = REPOSITORY / "build" / "gpu_kit"
BUNDLED = REPOSITORY / "virnucpro" / "models" / "weights" / "virnucpro-tiny-protein" / "model.safetensors"


@dataclass
class Check:
    """The state of one check of a device."""

    device: torch.device
    is_tiny: bool
    seconds: float
    started_s: float = field(default_factory=time.monotonic)
    peak_flops: float | None = None
    """Operations a second of the device's matrix product in bf16, once measured."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)
    only: frozenset[str] = frozenset()
    """Names of the sections to run; none: all."""

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started_s)

    def expect(self, what: str, *, value: float, least: float | None = None, most: float | None = None) -> None:
        """Note a check and its outcome; a value that is not a number fails."""
        passed = (least is None or value >= least) and (most is None or value <= most)
        limit = f">= {least:g}" if most is None else f"<= {most:g}"
        self.verdicts.append({"check": what, "value": value, "limit": limit, "passed": bool(passed)})
        self.rows.append((what, f"{value:.5g} ({limit}): {'ok' if passed else 'FAILED'}"))

    def show(self, what: str, text: str) -> None:
        self.rows.append((what, text))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- sections ---


def peak(check: Check) -> dict[str, Any]:
    """Measure the device's matrix product in bf16 on random numbers."""
    size, repeats = (256, 2) if check.is_tiny else (8192, 10)
    a, b = (torch.randn(size, size, device=check.device).to(HALF) for _ in range(2))
    rates = []
    for number in range(6):
        check.synchronize()
        started_s = time.perf_counter()
        for _ in range(repeats):
            a @ b
        check.synchronize()
        if number:
            rates.append(2 * size**3 * repeats / (time.perf_counter() - started_s))
    check.peak_flops = statistics.median(rates)
    check.show("bf16 matrix product", f"{check.peak_flops / 1e12:.1f} TFLOP/s (median of {len(rates)})")
    there = torch.randn(1 << (16 if check.is_tiny else 30), device=check.device)
    here = torch.empty_like(there)
    bandwidths = []
    for _ in range(6):
        check.synchronize()
        started_s = time.perf_counter()
        here.copy_(there)
        check.synchronize()
        bandwidths.append(2 * there.nbytes / (time.perf_counter() - started_s))
    bandwidth = statistics.median(bandwidths)
    check.show("copy within the device", f"{bandwidth / 1e12:.2f} TB/s, read and written")
    tflops = [round(rate / 1e12, 2) for rate in rates]
    return {"size": size, "tflops": tflops, "median": check.peak_flops / 1e12, "copy_tb_s": bandwidth / 1e12}


def kernels(check: Check) -> dict[str, Any]:
    """Compare every attention kernel that works here with the formula in float64."""
    found = {}
    lengths = (40, 37, 17, 3) if check.is_tiny else (1024, 700, 168, 168, 101, 33, 17, 5, 3)
    cu_seqlens = torch.tensor([0, *lengths], device=check.device).cumsum(0).int()
    on_gpu = check.device.type == "cuda"
    for head_dim in (16, 24, 32, 64):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for alibi in (False, True):
                torch.manual_seed(head_dim)
                q, k, v = (torch.randn(sum(lengths), 4, head_dim, device=check.device).to(dtype) for _ in range(3))
                slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=check.device) if alibi else None
                choice = choose_attention(check.device, dtype, head_dim=head_dim, alibi=alibi)
                tried = {choice.name: choice.kernel, "sdpa-padded": padded_attention}
                tried["sdpa-equal-lengths"] = equal_length_attention
                if on_gpu and dtype is not torch.float32 and not alibi:
                    tried["varlen_attn"] = varlen_attention
                if on_gpu and dtype is not torch.float32 and importlib.util.find_spec("flash_attn"):
                    tried["flash-attn"] = flash_attention
                expected = _attention_in_float64(q, k, v, lengths, slopes)
                for name, kernel in tried.items():
                    out = kernel(q, k, v, cu_seqlens, lengths, slopes).double()
                    error = float((out - expected).norm() / expected.norm())
                    key = f"{name}, {_short(dtype)}{', ALiBi' if alibi else ''}"
                    found[key] = max(error, found.get(key, 0.0))
    for key, error in found.items():
        check.expect(f"relative error of {key}", value=error, most=1e-5 if "float32" in key else 1e-2)
    for alibi in (False, True):
        choice = choose_attention(check.device, HALF, head_dim=64, alibi=alibi)
        check.show(f"kernel in bf16{' with ALiBi' if alibi else ''}", f"{choice.name}: {choice.reason}")
    return found | _step_kernels(check)


def _step_kernels(check: Check) -> dict[str, Any]:
    """Compare Triton's kernels with PyTorch's operators in float64, where they run."""
    chosen = esm2_flash.choose_step_kernels(check.device, HALF, gpu_models.ESM2["650M"])
    check.show("between matrix products in bf16", chosen.reason)
    if chosen.kernels is None:
        return {"steps": chosen.reason}
    found: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, head_dim in ((20, 16), (20, 24), (20, 64), (40, 64)):
            for what, error in step_errors(chosen.kernels, check.device, dtype, heads, head_dim).items():
                key = f"Triton, {what}, {_short(dtype)}"
                found[key] = max(error, found.get(key, 0.0))
    for key, error in found.items():
        check.expect(f"relative error of {key}", value=error, most=1e-5 if "float32" in key else 1e-2)
    return found


def step_errors(
    kernels: Any, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int, *, num_tokens: int = 1001
) -> dict[str, float]:
    """Return the relative errors of *kernels* against PyTorch's operators in float64 on the same numbers."""
    torch.manual_seed(head_dim)
    qkv = torch.randn(num_tokens, 3, heads, head_dim, device=device).to(dtype)
    angles = 1000 * torch.rand(num_tokens, 1, head_dim // 2, device=device)
    turns = torch.polar(torch.ones_like(angles), angles)
    rotated, expected = qkv.clone(), qkv.double()
    kernels.rotate(rotated, turns)
    esm2_flash._rotate(expected, turns.to(torch.complex128))  # noqa: SLF001
    x, y = (torch.randn(num_tokens, heads * head_dim, device=device).to(dtype) for _ in range(2))
    norm = torch.nn.LayerNorm(heads * head_dim, device=device, dtype=dtype).requires_grad_(requires_grad=False)
    norm.weight.normal_(1, 0.1)
    norm.bias.normal_(0, 0.1)
    total = x.double() + y.double()
    expected_norm = esm2_flash._normalised(norm, total)  # noqa: SLF001
    normed = kernels.add_and_normalise(x, y, norm)
    pairs = {"rotary": (rotated, expected), "sum": (x, total), "norm": (normed, expected_norm)}
    return {what: float((a.double() - b).norm() / b.norm()) for what, (a, b) in pairs.items()}


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


def esm2_8m(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 8M, which is too small to fill a large GPU: no share of the peak is asked for."""
    return _esm2_speed(check, "8M", token_budget=131072)


def esm2_650m(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 650M, against transformers."""
    return _esm2_speed(check, "650M", token_budget=65536)


def esm2_3b(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 3B, against transformers."""
    return _esm2_speed(check, "3B", token_budget=65536)


def _esm2_speed(check: Check, name: str, *, token_budget: int) -> dict[str, Any]:
    """Measure equal lengths and a usual mix, in both halves, and transformers in fp16 beside."""
    architecture = gpu_models.TINY if check.is_tiny else gpu_models.ESM2[name]
    token_budget = 1100 if check.is_tiny else token_budget
    blocks = 1 if check.is_tiny or name == "3B" else 3
    inputs = {f"{tokens} tokens": [tokens] * (blocks * token_budget // tokens) for tokens in EQUAL_LENGTHS}
    inputs[MIX] = gpu_models.uniprot_tokens(max(4, blocks * token_budget // 340))
    figures: dict[str, Any] = {"token_budget": token_budget}
    for dtype in (torch.float16, HALF):
        model = gpu_models.random_esm2(architecture, check.device, dtype)
        figures["kernel"] = model.attention.name
        _reset_peak_memory(check)
        for kind, tokens in inputs.items():
            flops = gpu_models.esm2_flops(architecture, tokens)
            label = f"ESM-2 {name}, {_short(dtype)}, {kind}"
            figures[f"{_short(dtype)}, {kind}"] = _speed_row(check, label, model, tokens, flops, token_budget)
        figures["peak_memory_gib"] = _peak_memory_gib(check)
        del model
        _free(check)
    check.show(f"ESM-2 {name}, peak memory", f"{figures['peak_memory_gib']:.1f} GiB at {token_budget} tokens a block")
    if check.peak_flops and not check.is_tiny and name != "8M":
        value = figures["float16, 168 tokens"]["share_of_peak"]
        check.expect(f"ESM-2 {name}, 168 tokens: share of peak", value=value, least=TARGETS["esm2 share of peak"])
    for kind in ("168 tokens", MIX):
        try:
            baseline = _transformers_speed(check, architecture, inputs[kind], token_budget)
        except Exception as error:  # noqa: BLE001  our own figures are kept
            baseline = {"left_out": f"FAILED: {type(error).__name__}: {error}", "traceback": traceback.format_exc()}
            check.verdicts.append(
                {"check": f"transformers, {name}, {kind}", "value": None, "limit": "runs", "passed": False}
            )
        figures[f"transformers, {kind}"] = baseline
        _free(check)
        if "left_out" in baseline:
            check.show(f"transformers, {kind}", baseline["left_out"].partition("\n")[0][:300])
            continue
        ratio = figures[f"float16, {kind}"]["tokens_per_second"] / baseline["tokens_per_second"]
        figures[f"times transformers, {kind}"] = ratio
        speed = f"{baseline['tokens_per_second']:,.0f} tokens/s"
        if check.is_tiny or name == "8M":
            check.show(f"ESM-2 {name}, {kind}: times transformers ({speed})", f"{ratio:.2f}")
        else:
            what = f"ESM-2 {name}, {kind}: times transformers ({speed})"
            check.expect(what, value=ratio, least=TARGETS["times transformers"])
    return figures


def _speed_row(
    check: Check, label: str, model: PackedEncoder, tokens: Sequence[int], flops: float, token_budget: int
) -> dict[str, Any]:
    batches = list(gpu_models.blocks_of(tokens, token_budget=token_budget))
    speed = _tokens_per_second(check, model, batches)
    row: dict[str, Any] = {"tokens_per_second": speed[0], "lowest_highest": speed[1:], "tokens": sum(tokens)}
    text = f"{speed[0]:,.0f} tokens/s ({speed[1]:,.0f} to {speed[2]:,.0f})"
    if check.peak_flops:
        row["share_of_peak"] = flops / sum(tokens) * speed[0] / check.peak_flops
        text += f", {row['share_of_peak']:.1%} of peak"
    check.show(label, text)
    return row


def _tokens_per_second(
    check: Check, model: PackedEncoder, batches: Sequence[PackedBatch]
) -> tuple[float, float, float]:
    """Run whole passes over *batches* through the runner; return median, lowest and highest."""
    runner = AsyncInferenceRunner(model, check.device)

    def one_pass() -> float:
        check.synchronize()
        started_s = time.perf_counter()
        for _ in runner.run(batches):
            pass
        return time.perf_counter() - started_s

    one_pass()
    tokens = sum(batch.num_tokens for batch in batches)
    return _median_and_ends([tokens / seconds for seconds in _rounds(one_pass)])


def _rounds(one_pass: Callable[[], float]) -> list[float]:
    """Return the seconds of three to nine passes, fewer where one takes long."""
    seconds = [one_pass()]
    while len(seconds) < 9 and sum(seconds) + seconds[0] < ROUND_SECONDS:
        seconds.append(one_pass())
    return seconds


def _median_and_ends(rates: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(rates), min(rates), max(rates)


def _transformers_speed(
    check: Check, architecture: Architecture, tokens: Sequence[int], token_budget: int
) -> dict[str, Any]:
    """Measure transformers' EsmModel: SDPA, fp16, sorted by length, padded batches of as many tokens, mean pooling."""
    if importlib.util.find_spec("transformers") is None:
        return {"left_out": "transformers is not installed"}
    from transformers import EsmConfig, EsmModel  # noqa: PLC0415

    config = EsmConfig(
        vocab_size=33,
        mask_token_id=gpu_models.MASK,
        pad_token_id=1,
        hidden_size=architecture.hidden_dim,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.attention_heads,
        intermediate_size=4 * architecture.hidden_dim,
        max_position_embeddings=1026,
        position_embedding_type="rotary",
        token_dropout=True,
        emb_layer_norm_before=False,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    with torch.device(check.device):
        model = EsmModel(config, add_pooling_layer=False)
    model = model.to(torch.float16).eval()
    padded, padding = _padded_batches(check, tokens, token_budget)
    _padded_pass(check, model, padded[:2])
    rates = [sum(tokens) / seconds for seconds in _rounds(lambda: _padded_pass(check, model, padded))]
    return {
        "tokens_per_second": statistics.median(rates),
        "lowest_highest": [min(rates), max(rates)],
        "padding": padding,
        "attention": model.config._attn_implementation,  # noqa: SLF001  what it chose
        "version": importlib.metadata.version("transformers"),
    }


@torch.inference_mode()
def _padded_pass(check: Check, model: torch.nn.Module, padded: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Embed padded batches, the mean over the tokens after BOS; return the seconds."""
    check.synchronize()
    started_s = time.perf_counter()
    for ids_SL, mask_SL in padded:
        ids, mask = ids_SL.to(check.device, non_blocking=True), mask_SL.to(check.device, non_blocking=True)
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 1:].float()
        weights = mask[:, 1:, None].float()
        ((states * weights).sum(1) / weights.sum(1)).cpu()
    return time.perf_counter() - started_s


def _padded_batches(
    check: Check, tokens: Sequence[int], token_budget: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], float]:
    ordered = sorted(tokens, reverse=True)
    batches, start, slots = [], 0, 0
    while start < len(ordered):
        longest = ordered[start]
        part = ordered[start : start + max(1, token_budget // longest)]
        start += len(part)
        slots += longest * len(part)
        ids = torch.randint(gpu_models.FIRST_LETTER, gpu_models.LAST_LETTER + 1, (len(part), longest))
        mask = (torch.arange(longest) < torch.tensor(part)[:, None]).long()
        ids = torch.where(mask.bool(), ids, 1)
        pair = (ids.pin_memory(), mask.pin_memory()) if check.device.type == "cuda" else (ids, mask)
        batches.append(pair)
    return batches, 1 - sum(ordered) / slots


def dnabert_s(check: Check) -> dict[str, Any]:
    """Tokens a second of DNABERT-S's shape; the ALiBi kernel is named."""
    if importlib.util.find_spec("virnucpro.models.dnabert_s") is None:
        check.show("DNABERT-S", "left out: this version has no such model")
        return {"left_out": "no virnucpro.models.dnabert_s"}
    model = _random_mosaic_bert(check, check.device, HALF)
    tokens = gpu_models.dna_tokens(12 if check.is_tiny else 8000)
    flops = gpu_models.mosaic_bert_flops(model.config, tokens)
    budget = 600 if check.is_tiny else 65536
    row = _speed_row(check, f"DNABERT-S, 500 nt, {model.attention.name}", model, tokens, flops, budget)
    if "share_of_peak" in row and not check.is_tiny:
        what = f"DNABERT-S ({model.attention.name}): share of peak"
        check.expect(what, value=row["share_of_peak"], least=TARGETS["dnabert-s share of peak"])
    return {**row, "kernel": model.attention.name, "reason": model.attention.reason}


def _random_mosaic_bert(check: Check, device: torch.device, dtype: torch.dtype) -> Any:
    from virnucpro.models.dnabert_s import PackedMosaicBert  # noqa: PLC0415
    from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig  # noqa: PLC0415

    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = MosaicBertConfig(**tiny) if check.is_tiny else MosaicBertConfig()
    with torch.device("meta"):
        model = PackedMosaicBert(config)
    gpu_models.randomise(model, config.num_hidden_layers, device, dtype)
    model.prepare_for_inference()
    return model


def precision(check: Check) -> dict[str, Any]:
    """
    Compare bf16 and fp16 with fp32, and fp32 here with fp32 on the CPU.

    The bundled encoder is trained but small; the 650M shape is deep but of random weights, whose states are not those
    of a trained model. Real checkpoints are compared by ``tests/parity`` on the CPU.
    """
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55] if check.is_tiny else [*range(1, 1022, 7), 1022]
    tokens = sorted((length + 2 for length in lengths), reverse=True)
    batches = list(gpu_models.blocks_of(tokens, token_budget=4096))
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"]
    models: dict[str, Callable[[torch.device, torch.dtype], PackedEncoder]] = {
        "bundled encoder": _bundled_encoder,
        "650M, random": lambda device, dtype: gpu_models.random_esm2(shape, device, dtype),
    }
    if importlib.util.find_spec("virnucpro.models.dnabert_s") is not None:
        models["DNABERT-S, random"] = lambda device, dtype: _random_mosaic_bert(check, device, dtype)
    figures: dict[str, Any] = {"lengths": [min(lengths), max(lengths)], "sequences": len(lengths)}
    for name, make in models.items():
        reference = _rows(check, make(check.device, torch.float32), batches)
        for dtype in (torch.bfloat16, torch.float16):
            cosines = _cosines(_rows(check, make(check.device, dtype), batches), reference)
            figures[f"{name}, {_short(dtype)}"] = {"least": float(cosines.min()), "median": float(np.median(cosines))}
            what = f"{name}, {_short(dtype)} against float32: least cosine"
            check.expect(what, value=float(cosines.min()), least=TARGETS["cosine"])
        _free(check)
    cpu = torch.device("cpu")
    on_cpu = list(AsyncInferenceRunner(_bundled_encoder(cpu, torch.float32), cpu).run(batches))
    here = _rows(check, _bundled_encoder(check.device, torch.float32), batches)
    difference = float(np.abs(np.concatenate([result.embeddings for result in on_cpu]) - here).max())
    check.expect("bundled encoder, fp32 here against the CPU: largest difference", value=difference, most=1e-5)
    figures["fp32 against the CPU"] = difference
    return figures


def _bundled_encoder(device: torch.device, dtype: torch.dtype) -> PackedEncoder:
    architecture, tensors = open_checkpoint(BUNDLED, vocabulary=33)
    # what load_esm2_model does, less fair-esm
    return esm2_flash.packed_esm2(architecture, tensors, device, dtype, mask_idx=gpu_models.MASK)


def _rows(check: Check, model: PackedEncoder, batches: Sequence[PackedBatch]) -> np.ndarray:
    return np.concatenate([result.embeddings for result in AsyncInferenceRunner(model, check.device).run(batches)])


def _cosines(rows: np.ndarray, reference: np.ndarray) -> np.ndarray:
    rows, reference = rows.astype(np.float64), reference.astype(np.float64)
    return (rows * reference).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(reference, axis=1)


def equal_batches(check: Check) -> dict[str, Any]:
    """Many equal batches, others between them, give equal rows: no race, nothing reused while it is in use."""
    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["8M"]
    model = gpu_models.random_esm2(shape, check.device, HALF)
    budget = 500 if check.is_tiny else 8192
    one, *others = gpu_models.blocks_of(
        gpu_models.uniprot_tokens(8 if check.is_tiny else 300), token_budget=max(budget, 1024)
    )
    others = others or [one]
    repeats = 10 if check.is_tiny else 300
    batches = [batch for number in range(repeats) for batch in (one, others[number % len(others)])]
    results = list(AsyncInferenceRunner(model, check.device).run(batches))
    distinct = len({result.embeddings.tobytes() for result in results[::2]})
    check.expect(f"distinct results of {repeats} equal batches", value=distinct, least=1, most=1)
    norms = np.linalg.norm(results[0].embeddings, axis=1)
    check.expect("their least norm", value=float(norms.min()), least=1e-3)
    return {"batches": repeats, "distinct": distinct}


def overlap(check: Check) -> dict[str, Any]:
    """Trace the runner: copies to and from the GPU while it computes."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    model = gpu_models.random_esm2(gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"], check.device, HALF)
    budget = 600 if check.is_tiny else 32768
    tokens = gpu_models.uniprot_tokens(12 if check.is_tiny else 1500)
    batches = list(gpu_models.blocks_of(tokens, token_budget=max(budget, 1024)))
    runner = AsyncInferenceRunner(model, check.device)
    list(runner.run(batches[:3]))
    check.synchronize()
    activity = ProfilerActivity.CUDA if check.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        list(runner.run(batches))
        check.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    figures: dict[str, Any] = {"batches": len(batches)}
    if check.device.type != "cuda":
        return {**figures, "left_out": "no GPU, no copies"}
    for way in ("HtoD", "DtoH"):
        copies, computations = copies_and_kernels(events, way)
        share = gpu_models.share_overlapped(copies, computations)
        figures[way] = {"copies": len(copies), "milliseconds": sum(b - a for a, b in copies) / 1e3, "share": share}
        check.expect(
            f"copies {way} ({len(copies)}): share of their time during which the GPU computes", value=share, least=0.5
        )
    return figures


def slowest_kernels(check: Check) -> dict[str, Any]:
    """List the kernels that take most of the time of a block, and how many start in it."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    shape = gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"]
    budget = 600 if check.is_tiny else 65536
    models = {
        "650M, fp16, 168 tokens": (
            lambda: gpu_models.random_esm2(shape, check.device, torch.float16),
            gpu_models.chunk_tokens(budget // gpu_models.TOKENS_OF_A_CHUNK),
        ),
        "DNABERT-S, bf16, 500 nt": (
            lambda: _random_mosaic_bert(check, check.device, HALF),
            gpu_models.dna_tokens(budget // 106),
        ),
    }
    activity = ProfilerActivity.CUDA if check.device.type == "cuda" else ProfilerActivity.CPU
    figures: dict[str, Any] = {}
    for name, (make, tokens) in models.items():
        runner = AsyncInferenceRunner(make(), check.device)
        batches = list(gpu_models.blocks_of(tokens, token_budget=budget))[:1]
        list(runner.run(batches))
        check.synchronize()
        with profile(activities=[activity]) as trace:
            list(runner.run(batches))
            check.synchronize()
        rows = [
            (row.key, row.count, row.self_device_time_total if check.device.type == "cuda" else row.self_cpu_time_total)
            for row in trace.key_averages()
        ]
        rows.sort(key=lambda row: -row[2])
        total_us, started = sum(row[2] for row in rows), sum(row[1] for row in rows)
        check.show(f"{name}: kernels of a block", f"{started} in {total_us / 1e3:.1f} ms")
        for key, count, micros in rows[:SLOWEST]:
            check.show(f"  {count} x {key[:60]}", f"{micros / 1e3:.2f} ms, {micros / max(total_us, 1e-9):.1%}")
        figures[name] = {"kernels": started, "ms": total_us / 1e3, "slowest": rows[:20]}
        _free(check)
    return figures


def first_forward(check: Check) -> dict[str, Any]:
    """Time what a new process does before its second forward pass, and what the first one spends its time on."""
    code = FIRST_FORWARD.format(repository=str(REPOSITORY), device=str(check.device), tiny=check.is_tiny)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    check.show("a new process", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in figures["stages"].items()))
    for name, milliseconds in figures["first forward"]:
        check.show(f"  {name}", f"{milliseconds:.0f} ms")
    return figures


FIRST_FORWARD = """
import json, sys, time
sys.path.insert(0, {repository!r})
stages, last = {{}}, time.perf_counter()
def mark(name):
    global last
    stages[name], last = time.perf_counter() - last, time.perf_counter()
import torch
mark("import torch")
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from benchmarks import gpu_models
mark("import virnucpro")
device = torch.device({device!r})
torch.zeros(1, device=device)
mark("context")
import torch.nn.attention.varlen
mark("import varlen_attn")
model = gpu_models.random_esm2(gpu_models.TINY if {tiny} else gpu_models.ESM2["650M"], device, torch.float16)
if device.type == "cuda": torch.cuda.synchronize()
mark("model")
(batch,) = list(gpu_models.blocks_of([168] * 20, token_budget=4000))
runner = AsyncInferenceRunner(model, device)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
    list(runner.run([batch]))
mark("first forward")
list(runner.run([batch]))
mark("second forward")
rows = sorted(trace.key_averages(), key=lambda row: -row.self_cpu_time_total)[:14]
slowest = [(row.key[:70], row.self_cpu_time_total / 1e3) for row in rows]
print(json.dumps({{"stages": stages, "first forward": slowest}}))
"""


def copies_and_kernels(
    events: Sequence[dict[str, Any]], way: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return (start, end) in microseconds of the copies one *way* (HtoD, DtoH) and of the kernels of a Chrome trace."""
    copies, computations = [], []
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if event.get("cat") == "gpu_memcpy" and way in event["name"]:
                copies.append(span)
            elif event.get("cat") == "kernel":
                computations.append(span)
    return copies, computations


def timeline(check: Check) -> dict[str, Any]:
    """Record the runner's spans, as ``--profile`` does: their order, that none overlap, and what recording costs."""
    model = gpu_models.random_esm2(gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"], check.device, HALF)
    budget, count = (600, 40) if check.is_tiny else (16384, 2000)
    batches = list(gpu_models.blocks_of(gpu_models.chunk_tokens(count), token_budget=budget))
    plain = _tokens_per_second(check, model, batches)
    with tempfile.TemporaryDirectory() as folder:
        spans.enable(
            Path(folder), {"rank": 0, "device": str(check.device), "attempt": 1}, block_of=lambda position: position
        )
        recorded = _tokens_per_second(check, model, batches)
        spans.disable()
        (path,) = Path(folder).iterdir()
        lanes = spans_by_lane(path)
    check.expect("spans that overlap another of their lane", value=overlapping(lanes), most=0)
    figures: dict[str, Any] = {
        "plain": plain,
        "recorded": recorded,
        "spans": {name: len(x) for name, x in lanes.items()},
    }
    if check.device.type == "cuda":
        check.expect("batches whose copies and computation are out of order", value=out_of_order(lanes), most=0)
    if not check.is_tiny:
        what = f"650M, blocks of {budget} tokens: speed with spans recorded over speed without"
        check.expect(what, value=recorded[0] / plain[0], least=0.95)
    return figures


def spans_by_lane(path: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return (begin, end, block) of every span about a block in a file of spans, nanoseconds, by lane, by time."""
    lanes: dict[str, list[tuple[int, int, int]]] = {}
    for line in path.read_text().splitlines()[1:]:
        lane, _, begin_ns, duration_ns, details = json.loads(line)
        if "block" in details:
            lanes.setdefault(lane, []).append((begin_ns, begin_ns + duration_ns, details["block"]))
    return {lane: sorted(found) for lane, found in lanes.items()}


def overlapping(lanes: dict[str, list[tuple[int, int, int]]]) -> int:
    """Return how many spans begin before the one before them in their lane has ended."""
    return sum(after[0] < before[1] for found in lanes.values() for before, after in pairwise(found))


def out_of_order(lanes: dict[str, list[tuple[int, int, int]]]) -> int:
    """Return for how many batches launching, copying in, computing and copying out did not follow one another."""
    named = [lanes[name] for name in (spans.HOST_TO_DEVICE, spans.COMPUTE, spans.DEVICE_TO_HOST)]
    wrong = sum(
        len({block for _, _, block in batch}) > 1 or any(after[0] < before[1] for before, after in pairwise(batch))
        for batch in zip(*named, strict=True)
    )
    launched = zip(lanes[spans.LAUNCHING], named[0], strict=True)
    return wrong + sum(copied[0] < launch[0] - TIE_ERROR_NS for launch, copied in launched)


def utilisation(check: Check) -> dict[str, Any]:
    """Compare what a run's monitor says of the GPU with nvidia-smi, for a minute in which work comes and goes."""
    if check.device.type != "cuda":
        return {"left_out": "no GPU to ask about"}
    if check.seconds_left < 1.5 * UTILISATION_SECONDS:
        return {"left_out": "no time left"}
    why_not = cannot_compare_utilisation()
    if why_not:
        check.show("utilisation", f"left out: {why_not}")
        return {"left_out": why_not}
    ours, theirs = sampled_utilisation(check.device, seconds=UTILISATION_SECONDS)
    points = 100 * abs(statistics.mean(ours) - statistics.mean(theirs))
    check.show("utilisation by the monitor, nvidia-smi", f"{statistics.mean(ours):.0%}, {statistics.mean(theirs):.0%}")
    check.expect(f"points between them over {UTILISATION_SECONDS:.0f} s", value=points, most=10)
    return {"monitor": ours, "nvidia_smi": theirs, "points": points}


def cannot_compare_utilisation() -> str:
    """Return what is missing for it, or nothing."""
    if importlib.util.find_spec("pynvml") is None:
        return "pynvml (nvidia-ml-py) is not installed"
    return "" if shutil.which("nvidia-smi") else "there is no nvidia-smi"


def sampled_utilisation(device: torch.device, *, seconds: float) -> tuple[list[float], list[float]]:
    """Compute and rest by turns; return the utilisation, 0 to 1, by ``GpuMonitor`` and by nvidia-smi, in samples."""
    from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor  # noqa: PLC0415  needs pynvml

    uuid = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
    question = ["nvidia-smi", f"--id={uuid}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    monitor = GpuMonitor([("cuda:0", uuid)])
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], device, HALF)
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


def out_of_memory(check: Check) -> dict[str, Any]:
    """Compute a block that does not fit into a capped memory: in pieces, marked, with the same rows."""
    if check.device.type != "cuda":
        return {"left_out": "no GPU, no cap"}
    model = gpu_models.random_esm2(gpu_models.ESM2["650M"], check.device, HALF)
    (batch,) = gpu_models.blocks_of(gpu_models.chunk_tokens(200), token_budget=50_000)
    runner = AsyncInferenceRunner(model, check.device)
    list(runner.run([batch]))
    _free(check)
    resting = torch.cuda.memory_reserved(check.device)
    _reset_peak_memory(check)
    (whole,) = runner.run([batch])
    needed = torch.cuda.max_memory_reserved(check.device) - resting
    _free(check)
    total = torch.cuda.get_device_properties(check.device).total_memory
    torch.cuda.set_per_process_memory_fraction((resting + 0.6 * needed) / total, check.device)
    try:
        (pieces,) = runner.run([batch])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, check.device)
    check.expect("a block under a cap of 0.6 of what it needs is marked", value=float(pieces.is_resplit), least=1.0)
    check.expect("a whole block is not", value=float(whole.is_resplit), most=0.0)
    difference = float(np.abs(pieces.embeddings - whole.embeddings).max())
    check.expect("largest difference of its rows", value=difference, most=1e-2)
    return {"needed_gib": needed / 2**30, "difference": difference}


def token_budget(check: Check) -> dict[str, Any]:
    """Find the token budget of 650M as a run would."""
    if check.device.type != "cuda":
        return {"left_out": "no GPU to try out"}
    model = gpu_models.random_esm2(gpu_models.ESM2["650M"], check.device, HALF)
    (batch,) = gpu_models.blocks_of(gpu_models.uniprot_tokens(400), token_budget=10**6)
    sequences = list(batch.input_ids_T.split(list(batch.lengths)))
    trials = DeviceTrials(model, check.device, longest=sequences, typical=sequences[200:])
    budget, tried = choose_token_budget(
        trials,
        longest_tokens=batch.lengths[0],
        most_tokens=1 << 18,
        resting_bytes=trials.resting_bytes,
        memory_bytes=trials.memory_bytes,
    )
    listed = ", ".join(f"{t.tokens}: {t.tokens_per_second:,.0f}/s, {t.peak_bytes / 2**30:.1f} GiB" for t in tried)
    check.show("token budget of 650M", f"{budget} ({listed})")
    return {"budget": budget, "trials": [vars(trial) for trial in tried]}


def waits(check: Check) -> dict[str, Any]:
    """Check that a forward pass never makes the host wait for the GPU."""
    if check.device.type != "cuda":
        return {"left_out": "no GPU to wait for"}
    model = gpu_models.random_esm2(gpu_models.ESM2["8M"], check.device, HALF)
    (batch,) = gpu_models.blocks_of(gpu_models.uniprot_tokens(40), token_budget=10**6)
    inputs = batch.input_ids_T.to(check.device), batch.cu_seqlens.to(check.device), batch.lengths
    model(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check.show("host waits in a forward pass", "none")
    return {"waits": 0}


def step_kernels(check: Check) -> dict[str, Any]:
    """Compare what runs between 650M's matrix products: Triton's kernels and PyTorch's operators, in turn."""
    if check.device.type != "cuda" or check.seconds_left < 30:
        return {"left_out": "no GPU, or no time left"}
    return {_short(dtype): _compare_steps(check, dtype) for dtype in (HALF, torch.float16)}


def _compare_steps(check: Check, dtype: torch.dtype) -> dict[str, Any]:
    model = gpu_models.random_esm2(gpu_models.ESM2["650M"], check.device, dtype)
    check.show(f"steps, {_short(dtype)}", model.steps.reason)
    if model.steps.kernels is None:
        return {"chosen": model.steps.reason}
    tokens = gpu_models.chunk_tokens(12 if check.is_tiny else 780)
    batches = list(gpu_models.blocks_of(tokens, token_budget=65536))
    ways = {
        "operators": (esm2_flash.StepKernels(None, "for comparison"), esm2_flash.Engine()),
        "Triton kernels": (model.steps, esm2_flash.Engine()),
    }
    if model.engine.layers:
        ways[model.engine.name] = (model.steps, model.engine)
    runner = AsyncInferenceRunner(model, check.device)

    def timed(way: str) -> tuple[float, np.ndarray]:
        model.steps, model.engine = ways[way]
        check.synchronize()
        started_s = time.perf_counter()
        rows = np.concatenate([result.embeddings for result in runner.run(batches)])
        return time.perf_counter() - started_s, rows

    first = {way: timed(way)[1] for way in ways}
    rounds = [{way: timed(way)[0] for way in ways} for _ in range(1 if check.is_tiny else 7)]
    figures: dict[str, Any] = {
        way: _median_and_ends([sum(tokens) / seconds[way] for seconds in rounds]) for way in ways
    }
    gain = _median_and_ends([seconds["operators"] / seconds["Triton kernels"] for seconds in rounds])
    difference = float(np.abs(first["Triton kernels"] - first["operators"]).max())
    what = f"{_short(dtype)}: speed with Triton kernels over PyTorch's operators"
    check.show(what, f"{gain[0]:.3f} ({gain[1]:.3f} to {gain[2]:.3f}), rows within {difference:.1e}")
    if not check.is_tiny:
        check.expect(what, value=gain[0], least=1.0)
    return {**figures, "gain": gain, "difference": difference}


def gpu_tests(check: Check) -> dict[str, Any]:
    if check.device.type != "cuda" or importlib.util.find_spec("pytest") is None:
        return {"left_out": "no GPU, or pytest is not installed"}
    if not (REPOSITORY / "tests" / "gpu").exists():
        return {"left_out": "this is not a checkout"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    limit_s = max(30.0, min(180.0, check.seconds_left))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_s, check=False)
    tail = done.stdout.strip().splitlines()[-12:]
    check.show("tests/gpu", tail[-1] if tail else done.stderr.strip()[-200:])
    check.expect("exit code of tests/gpu", value=done.returncode, most=0)
    return {"exit_code": done.returncode, "tail": tail}


SECTIONS: tuple[Callable[[Check], dict[str, Any]], ...] = (
    peak,
    kernels,
    waits,
    equal_batches,
    out_of_memory,
    first_forward,
    slowest_kernels,
    esm2_8m,
    esm2_650m,
    dnabert_s,
    overlap,
    timeline,
    token_budget,
    precision,
    esm2_3b,
    gpu_tests,
    utilisation,
    step_kernels,
    *gpu_runs.SECTIONS,
)


def run_sections(check: Check) -> dict[str, Any]:
    """Run every section; a failure is a failed check, and the rest runs."""
    found: dict[str, Any] = {}
    for section in SECTIONS:
        name = section.__name__
        if check.only and name not in check.only:
            continue
        print(f"{name} ... ", end="", file=sys.stderr, flush=True)
        if check.seconds_left < 15:
            found[name] = {"left_out": "no time left"}
            check.show(name, "left out: no time left")
            continue
        check.rows.append((f"--- {name}", ""))
        started_s = time.monotonic()
        try:
            found[name] = section(check)
        except Exception as error:  # noqa: BLE001  the other sections do not depend on this one
            sentence = f"{type(error).__name__}: {error}"
            found[name] = {"error": sentence, "traceback": traceback.format_exc()}
            check.verdicts.append({"check": name, "value": None, "limit": "runs", "passed": False})
            check.show(name, f"FAILED: {sentence.splitlines()[0][:300]}")
        found[name]["seconds"] = round(time.monotonic() - started_s, 1)
        print(f"{found[name]['seconds']} s", file=sys.stderr, flush=True)
        _free(check)
    return found


def machine(check: Check) -> dict[str, Any]:
    packages = ("torch", "numpy", "flash-attn", "transformers", "triton")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    described: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "device": "cpu",
    }
    if check.device.type == "cuda":
        properties = torch.cuda.get_device_properties(check.device)
        described["device"] = properties.name
        described["memory_gib"] = round(properties.total_memory / 2**30, 1)
        described["capability"] = f"{properties.major}.{properties.minor}"
        described["cuda"] = torch.version.cuda
    return described


def use_kit(folder: Path) -> None:
    """Let this process and those that it starts import what the wheels in *folder*, if any, hold."""
    if not (wheels := sorted(folder.glob("*.whl"))):
        return
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    for described in folder.glob("*.dist-info"):
        shutil.copytree(described, folder / "site" / described.name, dirs_exist_ok=True)
    sys.path.insert(0, str(folder / "site"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))


def _free(check: Check) -> None:
    gc.collect()
    if check.device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_peak_memory(check: Check) -> None:
    if check.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(check.device)


def _peak_memory_gib(check: Check) -> float:
    return torch.cuda.max_memory_allocated(check.device) / 2**30 if check.device.type == "cuda" else 0.0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_from_arguments() -> tuple[Check, Path]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: tries the script out, measures nothing")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="no section begins after so many")
    parser.add_argument("--out", type=Path, default=None, help="folder of the result")
    names = [section.__name__ for section in SECTIONS]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="SECTION", help=", ".join(names))
    options = parser.parse_args()
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
        sys.exit(f"gpu_check: torch {torch.__version__} is too old: 2.10 or later is needed (varlen_attn)")
    if options.device == "cpu" and not options.tiny:
        sys.exit(
            "gpu_check: on a CPU there is nothing to measure here: add --tiny to try the script out, or `make bench`"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_check: torch {torch.__version__} sees no CUDA device: run it on a machine with an NVIDIA GPU")
    folder = options.out or Path(os.environ.get("OUT") or REPOSITORY / "benchmarks" / "results")
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    return Check(device, options.tiny, options.seconds, only=frozenset(options.only)), folder


def main() -> None:
    check, folder = _check_from_arguments()
    use_kit(KIT)
    described = machine(check)
    sections = run_sections(check)
    seconds = round(time.monotonic() - check.started_s, 1)
    report = {"machine": described, "tiny": check.is_tiny, "seconds": seconds, "checks": check.verdicts}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu_check_{datetime.now(UTC).date()}.json"
    path.write_text(json.dumps({**report, "sections": sections}, indent=2, default=str) + "\n")
    print(f"\n{described['device']}, torch {described['versions']['torch']}, {described['date']}, {seconds} s")
    for what, text in check.rows:
        print(f"{what:<70} {text}".rstrip())
    failed = [item["check"] for item in check.verdicts if not item["passed"]]
    print(f"\n{len(check.verdicts) - len(failed)} of {len(check.verdicts)} checks passed; {path}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
