"""What the benchmarks share: where they ran, how fast this core multiplies, and where results go."""

from __future__ import annotations

import json
import platform
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
EXAMPLES = Path(__file__).parent.parent / "examples"


def machine(*packages: str) -> dict[str, str]:
    """Describe where this runs, with the versions of *packages*."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": f"{len(models)} x {models[0]}" if models else platform.processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in packages},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def write_result(name: str, report: dict[str, Any]) -> Path:
    """Keep *report* as today's result of benchmark *name*."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{datetime.now(UTC).date()}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def latest(name: str) -> dict[str, Any] | None:
    """Return the newest result of benchmark *name*."""
    paths = sorted(RESULTS.glob(f"{name}_[0-9]*.json"))
    return json.loads(paths[-1].read_text()) if paths else None


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "greatest": round(max(values), digits),
    }


def gemm_peak_flops(seconds: float = 1.0) -> float:
    """
    Return the best fp32 FLOP per CPU second that one matrix product of this process reached in *seconds*.

    The shapes are square and tall ones that fit the caches, so that this is the machine's own ceiling for one thread.
    """
    import torch  # noqa: PLC0415  not needed by the benchmarks of files

    best = 0.0
    shapes = [(1024, 1024, 1024), (2048, 1280, 1280), (4096, 640, 2560)]
    pairs = [(torch.randn(m, k), torch.randn(k, n), 2.0 * m * k * n) for m, k, n in shapes]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for left, right, flops in pairs:
            start = time.process_time()
            torch.mm(left, right)
            best = max(best, flops / (time.process_time() - start))
    return best
