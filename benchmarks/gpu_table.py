"""
The table of ``docs/gpus.md``: a row for each card that ``gpu_check`` ran on, by its newest result.

Run it as ``python benchmarks/gpu_table.py``. It measures nothing; without a result the table has no row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_common import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "gpus.md"
BEGIN, END = "<!-- gpu checks: written by benchmarks/gpu_table.py -->", "<!-- end of gpu checks -->"
COLUMNS = [
    *("card", "date", "torch", "ESM-2 8M in tokens/s", "ESM-2 650M (share of the matrix rate)", "ESM-2 3B"),
    *("DNABERT-S", "650M over transformers", "checks passed"),
]


def table(results: Path) -> str:
    """Return the table of the results in a folder, in Markdown."""
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(results.glob("gpu_check_*.json")):
        report = json.loads(path.read_text())
        if not report["tiny"]:
            newest[report["machine"]["device"]] = report
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_row(report) for _, report in sorted(newest.items()))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row(report: dict[str, Any]) -> list[str]:
    sections, about, checks = report["sections"], report["machine"], report["checks"]
    ratio = sections.get("esm2_650m", {}).get("times transformers, 168 tokens")
    return [
        *(about["device"], about["date"][:10], about["versions"]["torch"]),
        *(_speed(sections.get(f"esm2_{name}", {}).get("float16, 168 tokens", {})) for name in ("8m", "650m", "3b")),
        _speed(sections.get("dnabert_s", {})),
        "" if ratio is None else f"{ratio:.1f}",
        f"{sum(check['passed'] for check in checks)} of {len(checks)}",
    ]


def _speed(figures: dict[str, Any]) -> str:
    """Write tokens per second and the share of the matrix rate; nothing for what was not measured."""
    if "tokens_per_second" not in figures:
        return ""
    share = f" ({figures['share_of_peak']:.0%})" if "share_of_peak" in figures else ""
    return f"{figures['tokens_per_second']:,.0f}{share}"


def page(text: str, results: Path) -> str:
    """Return a page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), RESULTS))
