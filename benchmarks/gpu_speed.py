"""
How fast is it? Sections of part b of ``gpu_check.py``: throughput beside the card's own rates, and what takes it.

Targets are shares of the roofline that ``gpu_roofline.py`` computes from the measured rates.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import threading
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_models, gpu_roofline, gpu_transformers
from benchmarks.gpu_measure import HALF, HALVES, free, rates_of, rows_of, short, speed_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.gpu_measure import Check
    from virnucpro.pipeline.async_inference import PackedEncoder

EQUAL_LENGTHS = (53, 168, 400, 1022)
MIX = "lengths of real proteins"
SLOWEST = 20
FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
REASONS = {
    1 << 1: "clocks set by the operator",
    1 << 2: "power cap",
    1 << 3: "hardware slowdown",
    1 << 5: "heat (software)",
    1 << 6: "heat (hardware)",
    1 << 7: "power brake",
}
"""NVML's bits of why the clocks are lower than they could be; 1 is idleness."""


def rates(check: Check) -> dict[str, Any]:
    """Measure what the card can do: matrix products and copies."""
    found = rates_of(check)
    tflops = {short(dtype): rate / 1e12 for dtype, rate in found.products.items()}
    return {"tflops": tflops, "copy_tb_s": found.copy / 1e12}


def esm2_8m(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 8M; its products are too small for the rate of large ones, so no share is asked for."""
    return _esm2_speed(check, "8M", token_budget=131072)


def esm2_650m(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 650M, against the roofline and transformers."""
    return _esm2_speed(check, "650M", token_budget=65536)


def esm2_3b(check: Check) -> dict[str, Any]:
    """Tokens a second of ESM-2 3B, against the roofline and transformers."""
    return _esm2_speed(check, "3B", token_budget=65536)


def _esm2_speed(check: Check, name: str, *, token_budget: int) -> dict[str, Any]:
    """Measure equal lengths and a real mix, in both halves, and transformers in fp16 beside."""
    architecture = gpu_models.TINY if check.is_tiny else gpu_models.ESM2[name]
    token_budget = 1100 if check.is_tiny else token_budget
    blocks = 1 if check.is_tiny or name == "3B" else 3
    inputs = {f"{tokens} tokens": [tokens] * (blocks * token_budget // tokens) for tokens in EQUAL_LENGTHS}
    inputs[MIX] = gpu_models.protein_tokens(max(4, blocks * token_budget // 340))
    figures: dict[str, Any] = {"token_budget": token_budget}
    has_target = not check.is_tiny and name != "8M"
    card_rates = rates_of(check)
    with watched(check, f"ESM-2 {name}") as figures["card"]:
        for dtype in HALVES:
            model = gpu_models.random_esm2(architecture, check.device, dtype)
            figures["kernel"] = model.attention.name
            if check.is_on_gpu:
                torch.cuda.reset_peak_memory_stats(check.device)
            for kind, tokens in inputs.items():
                flops = gpu_models.esm2_flops(architecture, tokens) / sum(tokens)
                roof = gpu_roofline.esm2_tokens_per_second(
                    card_rates, architecture, tokens, dtype, is_fused=model.steps.kernels is not None
                )
                label = f"ESM-2 {name}, {short(dtype)}, {kind}"
                shares = (flops / card_rates.products[dtype], 1 / roof)
                batches = list(gpu_models.blocks_of(tokens, token_budget=token_budget))
                figures[f"{short(dtype)}, {kind}"] = row = speed_row(check, label, model, batches, shares)
                if has_target:
                    least = gpu_roofline.LEAST_SHARE["padded" if "padded" in model.attention.name else "packed"]
                    check.expect(f"{label}: share of the roofline", value=row["share_of_roofline"], least=least)
            if check.is_on_gpu:
                figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(check.device) / 2**30
            del model
            free(check)
    for kind in ("168 tokens", MIX):
        figures[f"transformers, {kind}"] = baseline = _baseline(check, name, kind, inputs[kind], token_budget)
        if "left_out" in baseline:
            continue
        ratio = figures[f"float16, {kind}"]["tokens_per_second"] / baseline["tokens_per_second"]
        figures[f"times transformers, {kind}"] = ratio
        what = f"ESM-2 {name}, {kind}: times transformers ({baseline['tokens_per_second']:,.0f} tokens/s)"
        if has_target:
            check.expect(what, value=ratio, least=1.0)
        else:
            check.show(what, f"{ratio:.2f}")
    return figures


def _baseline(check: Check, name: str, kind: str, tokens: Sequence[int], token_budget: int) -> dict[str, Any]:
    """Return the figures of transformers; where it fails, our own are kept."""
    architecture = gpu_models.TINY if check.is_tiny else gpu_models.ESM2[name]
    if importlib.util.find_spec("transformers") is None:
        return check.left_out(f"transformers, {kind}", "transformers is not installed")
    try:
        return gpu_transformers.transformers_speed(check, architecture, tokens, token_budget)
    except Exception as error:  # noqa: BLE001
        check.fail(f"transformers, {name}, {kind}")
        return {
            **check.left_out(f"transformers, {kind}", f"{type(error).__name__}: {error}".partition("\n")[0][:300]),
            "traceback": traceback.format_exc(),
        }
    finally:
        free(check)


def slowest_kernels(check: Check) -> dict[str, Any]:
    """List the kernels that take most of the time of a block of each model, and how many start in it."""
    budget = 600 if check.is_tiny else 65536
    chunks, dna = gpu_models.chunk_tokens(budget // gpu_models.TOKENS_OF_A_CHUNK), gpu_models.dna_tokens(budget // 106)
    figures: dict[str, Any] = {}
    for name, shape in gpu_models.ESM2.items():
        model = gpu_models.random_esm2(gpu_models.TINY if check.is_tiny else shape, check.device, torch.float16)
        figures[f"{name}, fp16, 168 tokens"] = _slowest(check, f"{name}, fp16, 168 tokens", model, chunks, budget)
    model = gpu_models.random_mosaic_bert(check.device, HALF, is_tiny=check.is_tiny)
    return figures | {"DNABERT-S, bf16": _slowest(check, "DNABERT-S, bf16, 500 nt", model, dna, budget)}


def _slowest(check: Check, what: str, model: PackedEncoder, tokens: Sequence[int], token_budget: int) -> dict[str, Any]:
    batches = list(gpu_models.blocks_of(tokens, token_budget=token_budget))[:1]
    rows_of(check, model, batches)
    check.synchronize()
    with profile(activities=[ProfilerActivity.CUDA if check.is_on_gpu else ProfilerActivity.CPU]) as trace:
        rows_of(check, model, batches)
        check.synchronize()
    rows = [
        (row.key, row.count, row.self_device_time_total if check.is_on_gpu else row.self_cpu_time_total)
        for row in trace.key_averages()
    ]
    rows.sort(key=lambda row: -row[2])
    total_us, started = sum(row[2] for row in rows), sum(row[1] for row in rows)
    check.show(f"{what}: kernels of a block", f"{started} in {total_us / 1e3:.1f} ms")
    for key, count, micros in rows[:SLOWEST]:
        check.show(f"  {count} x {key[:60]}", f"{micros / 1e3:.2f} ms, {micros / max(total_us, 1e-9):.1%}")
    free(check)
    return {"kernels": started, "ms": total_us / 1e3, "slowest": rows[:SLOWEST]}


@contextmanager
def watched(check: Check, what: str) -> Iterator[dict[str, Any]]:
    """Ask nvidia-smi for clocks, power and throttling twice a second; the dictionary has the figures at the end."""
    figures: dict[str, Any] = {}
    if not check.is_on_gpu or shutil.which("nvidia-smi") is None:
        figures |= check.left_out(f"{what}: clocks and power", "no nvidia-smi" if check.is_on_gpu else "no GPU")
        yield figures
        return
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    question = ["nvidia-smi", f"--id={card}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    answers, ended = [], threading.Event()

    def ask() -> None:
        while not (answers and ended.wait(0.5)):
            answers.append(subprocess.run(question, capture_output=True, text=True, timeout=30, check=False).stdout)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield figures
    finally:
        ended.set()
        asking.join()
    figures |= summary("".join(answers))
    check.show(f"{what}: clocks and power", figures.get("left_out") or figures["sentence"])


def summary(answers: str) -> dict[str, Any]:
    """Return medians of what nvidia-smi answered in lines of ``FIELDS``, and the reasons of throttling with shares."""
    samples = []
    for line in answers.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(FIELDS) and cells[-1].startswith("0x"):
            samples.append(cells)
    if not samples:
        return {"left_out": f"nvidia-smi does not tell them: {answers.strip()[:200]}"}
    figures: dict[str, Any] = {"samples": len(samples)}
    for name, values in zip(FIELDS[:-1], zip(*samples, strict=True), strict=False):
        numbers = [float(value) for value in values if value.replace(".", "", 1).isdigit()]
        figures[name] = statistics.median(numbers) if numbers else None
    bits = [int(cells[-1], 16) for cells in samples]
    shares = {reason: sum(bool(each & bit) for each in bits) / len(bits) for bit, reason in REASONS.items()}
    figures["throttled"] = {reason: share for reason, share in shares.items() if share}
    reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in figures["throttled"].items()) or "nothing"
    figures["sentence"] = (
        f"{figures['clocks.sm']} MHz, memory {figures['clocks.mem']} MHz, {figures['power.draw']} W, "
        f"{figures['temperature.gpu']} C; of {len(samples)} samples slowed by: {reasons}"
    )
    return figures
