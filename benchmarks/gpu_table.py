"""
The table of ``docs/gpu_check.md``: a row for each card that ``gpu_check`` ran on, by its newest results.

The parts of a check are files of their own: those of a card that are at most ``LEASE`` older than its newest count
together, of each part the newest. Run it as ``python benchmarks/gpu_table.py``. It measures nothing; without a result
the table has no row.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from bench_common import RESULTS

LEASE = timedelta(hours=12)
PAGE = Path(__file__).parent.parent / "docs" / "gpu_check.md"
BEGIN, END = "<!-- gpu checks: written by benchmarks/gpu_table.py -->", "<!-- end of gpu checks -->"
COLUMNS = [
    *(
        "card",
        "date",
        "torch",
        "ESM-2 8M in tokens/s",
        "ESM-2 650M (share of the matrix rate, of the roofline)",
        "ESM-2 3B",
    ),
    *("DNABERT-S", "650M over transformers", "checks passed"),
]


def table(results: Path) -> str:
    """Return the table of the results in a folder, in Markdown."""
    by_card: dict[str, list[dict[str, Any]]] = {}
    reports = [json.loads(path.read_text()) for path in results.glob("gpu_check_*.json")]
    for report in sorted(reports, key=_date):
        if not report["tiny"]:
            by_card.setdefault(report["machine"]["device"], []).append(report)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_row(by_card[card]) for card in sorted(by_card))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _date(report: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(report["machine"]["date"])


def _row(reports: list[dict[str, Any]]) -> list[str]:
    """Write the row of a card; *reports* are from old to new."""
    of_lease = {one.get("part"): one for one in reports if _date(reports[-1]) - _date(one) <= LEASE}
    sections: dict[str, Any] = {}
    for report in of_lease.values():
        sections |= report["sections"]
    checks = [check for report in of_lease.values() for check in report["checks"]]
    about = reports[-1]["machine"]
    ratio = sections.get("esm2_650m", {}).get("times transformers, 168 tokens")
    return [
        *(about["device"], about["date"][:10], about["versions"]["torch"]),
        *(_speed(sections.get(f"esm2_{name}", {}).get("float16, 168 tokens", {})) for name in ("8m", "650m", "3b")),
        _speed(sections.get("dnabert_s", {})),
        "" if ratio is None else f"{ratio:.1f}",
        f"{sum(check['passed'] for check in checks)} of {len(checks)}",
    ]


def _speed(figures: dict[str, Any]) -> str:
    """Write tokens per second and what shares are known; nothing for what was not measured."""
    if "tokens_per_second" not in figures:
        return ""
    shares = ", ".join(f"{figures[name]:.0%}" for name in ("share_of_peak", "share_of_roofline") if name in figures)
    return f"{figures['tokens_per_second']:,.0f}{f' ({shares})' if shares else ''}"


def page(text: str, results: Path) -> str:
    """Return a page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), RESULTS))
