"""Write docs/metrics.md, the table of every metric, from the code that exports it: python -m tools.metrics_page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flows.exporter import SERVER_METRICS, ServerMetric
from virnucpro.telemetry.metrics.table import GPU, HOST_METRICS, METRICS, RANK, Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

[How to collect them](collect_metrics.md). Names that end in `_total` are counters, `virnucpro_batch_duration_seconds`
is a histogram, all others are gauges. Labels are above a table, or in parentheses:

- `rank`, `host`, `device`: number of the worker, its host (`VIRNUCPRO_HOST_NAME`, or the machine's name), and the
  device as that host calls it (`cuda:3`, `cpu`).
- `model`: of the embedding; for work on contigs `composition` (with the comparison with known proteins) or `genes`.

No label holds a sequence id or a path. Each start of a run has its own `run_id`, and counters from zero, except
`virnucpro_sequences_total` and `virnucpro_contigs_total`. GPU metrics need NVIDIA's driver.
Made by `python -m tools.metrics_page`.
"""
HOST_HEAD = """
## Of each GPU of a host

Of all GPUs, whether or not a run is there, by the exporter of their host. Labels: `host`, `device` (as nvidia-smi
numbers it), `uuid`. Never add them to those of runs, which count the same GPUs.
"""
SERVER_HEAD = """
## Of the Prefect server

`pool` and `queue` are empty for runs that no worker starts; runs within runs are not counted.
"""
TITLES = {RANK: "Of each worker", GPU: "Of each GPU", (): "Of the run"}
"""Labels that all metrics of a section have -> its title."""


def section_of(metric: Metric) -> tuple[str, ...]:
    """Return the labels of the section that a metric is in."""
    return next(labels for labels in TITLES if metric.labels[: len(labels)] == labels)


def table(metrics: Sequence[Metric | ServerMetric], shared: tuple[str, ...]) -> str:
    """Return metrics as a table, with the labels that not all of them have."""
    rows = ["| name | meaning |", "| --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels[len(shared) :])
        rows.append(f"| `{metric.name}` | {metric.help}{f' ({labels})' if labels else ''} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for shared, title in TITLES.items():
        labels = f"Labels: {', '.join(f'`{label}`' for label in shared)}.\n\n" if shared else ""
        metrics = [metric for metric in METRICS if section_of(metric) == shared]
        parts.append(f"\n## {title}\n\n{labels}{table(metrics, shared)}")
    return "".join([*parts, HOST_HEAD, "\n", table(HOST_METRICS, GPU), SERVER_HEAD, "\n", table(SERVER_METRICS, ())])


if __name__ == "__main__":
    PAGE.write_text(page())
