"""What runs between ESM-2's products, part e of ``gpu_check.py``: Triton's kernels and PyTorch's operators."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import gpu_models, gpu_roofline
from benchmarks.gpu_measure import HALVES, free, median_and_ends, rates_of, rows_of, short, timed
from virnucpro.models import esm2_flash

if TYPE_CHECKING:
    from benchmarks.gpu_measure import Check


def step_parity(check: Check) -> dict[str, Any]:
    """Compare Triton's kernels with PyTorch's operators in float64, where they run."""
    chosen = esm2_flash.choose_step_kernels(check.device, torch.bfloat16, gpu_models.ESM2["650M"])
    if chosen.kernels is None:
        return check.left_out("Triton's kernels", chosen.reason)
    found: dict[str, float] = {}
    for dtype in (*HALVES, torch.float32):
        for heads, head_dim in ((20, 16), (20, 24), (20, 64), (40, 64)):
            for what, error in step_errors(chosen.kernels, check.device, dtype, heads, head_dim).items():
                key = f"Triton, {what}, {short(dtype)}"
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
    expected_norm = esm2_flash.normalised(norm, total)
    normed = kernels.add_and_normalise(x, y, norm)
    pairs = {"rotary": (rotated, expected), "sum": (x, total), "norm": (normed, expected_norm)}
    return {what: float((a.double() - b).norm() / b.norm()) for what, (a, b) in pairs.items()}


def step_kernels(check: Check) -> dict[str, Any]:
    """Compare them by throughput, in turn: half of the gain that the roofline predicts is to be there."""
    figures: dict[str, Any] = {}
    for name in ("650M", "3B"):
        for dtype in HALVES:
            figures[f"{name}, {short(dtype)}"] = _compare(check, name, dtype)
            free(check)
    return figures


def _compare(check: Check, name: str, dtype: torch.dtype) -> dict[str, Any]:
    architecture = gpu_models.TINY if check.is_tiny else gpu_models.ESM2[name]
    model = gpu_models.random_esm2(architecture, check.device, dtype)
    what = f"{name}, {short(dtype)}"
    if model.steps.kernels is None:
        return check.left_out(what, model.steps.reason)
    tokens = gpu_models.chunk_tokens(12 if check.is_tiny else 390)
    batches = list(gpu_models.blocks_of(tokens, token_budget=65536))
    ways = {"operators": esm2_flash.StepKernels(None, "for comparison"), "Triton kernels": model.steps}

    def rows(way: str) -> np.ndarray:
        model.steps = ways[way]
        return rows_of(check, model, batches)

    first = {way: rows(way) for way in ways}
    taken = [{way: timed(check, partial(rows, way)) for way in ways} for _ in range(1 if check.is_tiny else 7)]
    figures: dict[str, Any] = {way: median_and_ends([sum(tokens) / seconds[way] for seconds in taken]) for way in ways}
    gain = median_and_ends([seconds["operators"] / seconds["Triton kernels"] for seconds in taken])
    difference = float(np.abs(first["Triton kernels"] - first["operators"]).max())
    fused, plain = (
        gpu_roofline.esm2_tokens_per_second(rates_of(check), architecture, tokens, dtype, is_fused=is_fused)
        for is_fused in (True, False)
    )
    what = f"{what}: speed with Triton kernels over PyTorch's operators"
    check.show(what, f"{gain[0]:.3f} ({gain[1]:.3f} to {gain[2]:.3f}), rows within {difference:.1e}")
    if not check.is_tiny:
        check.expect(what, value=gain[0], least=(1 + fused / plain) / 2)
    return {**figures, "gain": gain, "predicted_gain": fused / plain, "difference": difference}
