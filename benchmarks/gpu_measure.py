"""
What every section of ``gpu_check.py`` uses: the state of a check, and how rates and throughput are measured.

``rates_of`` measures the card itself, once: matrix products and copies. ``gpu_roofline.py`` makes targets of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu_roofline import Rates
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.data.collators import PackedBatch
    from virnucpro.pipeline.async_inference import PackedEncoder

HALF = torch.bfloat16
HALVES = (torch.float16, torch.bfloat16)
ROUND_SECONDS = 2.0
"""Seconds of rounds after which no further one begins."""
RATE_SECONDS = 1.0
"""Of products in a row: a card that is hot or at its limit of power is slower than in its first tenths of a second."""


@dataclass
class Check:
    """The state of one check of a device."""

    device: torch.device
    is_tiny: bool
    seconds: float
    started_s: float = field(default_factory=time.monotonic)
    rates: Rates | None = None
    """What the card can do, once measured."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self.started_s)

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def expect(self, what: str, *, value: float, least: float | None = None, most: float | None = None) -> None:
        """Note a check and its outcome; a value that is not a number fails."""
        passed = (least is None or value >= least) and (most is None or value <= most)
        limit = f">= {least:g}" if most is None else f"<= {most:g}"
        self.verdicts.append({"check": what, "value": value, "limit": limit, "passed": bool(passed)})
        self.rows.append((what, f"{value:.5g} ({limit}): {'ok' if passed else 'FAILED'}"))

    def fail(self, what: str) -> None:
        self.verdicts.append({"check": what, "value": None, "limit": "runs", "passed": False})

    def show(self, what: str, text: str) -> None:
        self.rows.append((what, text))

    def left_out(self, what: str, reason: str) -> dict[str, Any]:
        """Say why something does not run; return it for the report."""
        self.show(what, f"left out: {reason}")
        return {"left_out": reason}

    def synchronize(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize(self.device)


def rates_of(check: Check) -> Rates:
    """Return the operations a second of matrix products, by dtype, and the bytes a second of copies; measured once."""
    if check.rates is None:
        products = {dtype: _product_rate(check, dtype) for dtype in HALVES}
        there = torch.randn(1 << (16 if check.is_tiny else 30), device=check.device)
        here = torch.empty_like(there)
        seconds = [timed(check, lambda: here.copy_(there)) for _ in range(6)]
        check.rates = Rates(products, 2 * there.nbytes / statistics.median(seconds[1:]))
        for dtype, rate in products.items():
            check.show(f"matrix product in {short(dtype)}", f"{rate / 1e12:.1f} TFLOP/s")
        check.show("copy within the device", f"{check.rates.copy / 1e12:.2f} TB/s, read and written")
    return check.rates


def _product_rate(check: Check, dtype: torch.dtype) -> float:
    size, repeats = (64, 2) if check.is_tiny else (8192, 10)
    a, b = (torch.randn(size, size, device=check.device).to(dtype) for _ in range(2))

    def products() -> None:
        for _ in range(repeats):
            a @ b

    products()
    seconds = [timed(check, products) for _ in range(2)]
    while not check.is_tiny and sum(seconds) < RATE_SECONDS:
        seconds.append(timed(check, products))
    return 2 * size**3 * repeats / statistics.median(seconds[len(seconds) // 2 :])


def timed(check: Check, work: Callable[[], object]) -> float:
    """Return the seconds of *work* until the device has done it."""
    check.synchronize()
    started_s = time.perf_counter()
    work()
    check.synchronize()
    return time.perf_counter() - started_s


def tokens_per_second(check: Check, model: PackedEncoder, batches: Sequence[PackedBatch]) -> tuple[float, float, float]:
    """Run whole passes over *batches* through the runner; return median, lowest and highest."""
    runner = AsyncInferenceRunner(model, check.device)
    timed_pass = lambda: timed(check, lambda: list(runner.run(batches)))  # noqa: E731
    timed_pass()
    tokens = sum(batch.num_tokens for batch in batches)
    return median_and_ends([tokens / seconds for seconds in rounds(check, timed_pass)])


def speed_row(
    check: Check,
    label: str,
    model: PackedEncoder,
    batches: Sequence[PackedBatch],
    seconds_a_token: tuple[float, float],
) -> dict[str, Any]:
    """Measure *batches*; *seconds_a_token* are the least by matrix products alone, and by the roofline."""
    speed = tokens_per_second(check, model, batches)
    of_peak, of_roofline = (speed[0] * seconds for seconds in seconds_a_token)
    shares = f"{of_peak:.1%} of the matrix rate, {of_roofline:.1%} of the roofline"
    check.show(label, f"{speed[0]:,.0f} tokens/s ({speed[1]:,.0f} to {speed[2]:,.0f}), {shares}")
    return {
        "tokens_per_second": speed[0],
        "lowest_highest": speed[1:],
        "tokens": sum(batch.num_tokens for batch in batches),
        "share_of_peak": of_peak,
        "share_of_roofline": of_roofline,
    }


def rounds(check: Check, one_pass: Callable[[], float]) -> list[float]:
    """Return the seconds of three to nine passes, fewer where one takes long, one of tiny shapes."""
    seconds = [one_pass()]
    while len(seconds) < 9 and not check.is_tiny and sum(seconds) + seconds[0] < ROUND_SECONDS:
        seconds.append(one_pass())
    return seconds


def median_and_ends(rates: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(rates), min(rates), max(rates)


def rows_of(check: Check, model: PackedEncoder, batches: Sequence[PackedBatch]) -> np.ndarray:
    """Return the rows of *batches*, in their order, shape (S, D)."""
    return np.concatenate([result.embeddings for result in AsyncInferenceRunner(model, check.device).run(batches)])


def cosines(rows: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the cosine of each row to the reference's, shape (S,)."""
    rows, reference = rows.astype(np.float64), reference.astype(np.float64)
    return (rows * reference).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(reference, axis=1)


def free(check: Check) -> None:
    gc.collect()
    if check.is_on_gpu:
        torch.cuda.empty_cache()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
