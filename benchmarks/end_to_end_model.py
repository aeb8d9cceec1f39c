"""
What follows from the runs of ``end_to_end.py``: cost of a further Mb, peers, a model of more workers, the page's table.

It measures nothing. The model of a run by composition alone: its own process works alone while there are no
workers; these start at the same time, then share the nucleotides, and the last one waits for at most one part.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OURS, EMBEDDING = "virnucpro", "virnucpro --cascade off"
PART_MB = 0.25
"""Of ``composition.py``: what one worker computes at a time."""
LEAST_SHARED_MB = 2.0
"""Of ``composition.py``: one process scores less, whatever ``--workers``."""
MODELLED_WORKERS = 16


@dataclass(frozen=True)
class WorkerModel:
    """CPU seconds of a run by composition alone, of one size."""

    megabases: float
    alone_s: float
    """Of the parent, while there are no workers."""
    worker_start_s: float
    """Of one worker, before it computes."""
    per_mb_s: float
    """Of the workers, a Mb."""

    def wall_s(self, workers: int) -> float:
        """Return the seconds of a run with *workers*, each on an idle core of its own."""
        if workers == 1:
            return self.alone_s + self.per_mb_s * self.megabases  # the parent scores itself
        letters_s = self.per_mb_s * (self.megabases / workers + PART_MB)
        return self.alone_s + self.worker_start_s + letters_s

    def share_alone(self, workers: int) -> float:
        """Return the share of the wall time in which one core works alone."""
        return self.alone_s / self.wall_s(workers)


def rows_of(report: Mapping[str, Any], program: str, workers: int | None) -> list[dict[str, Any]]:
    """Return the rows of a program, small inputs first."""
    rows = [row for row in report["rows"] if (row["program"], row["workers"]) == (program, workers)]
    return sorted(rows, key=lambda row: row["megabases"])


def median_of(row: Mapping[str, Any], *names: str) -> float:
    """Return the median over the runs of a row of the value found by *names*."""
    values = []
    for run in row["runs"]:
        value = run
        for name in names:
            value = value[name]
        values.append(value)
    return statistics.median(values)


def spread_of(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Return median, least and greatest."""
    pairs = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
    return {name: round(value, digits) for name, value in pairs.items()}


def further_mb(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return CPU seconds a further Mb of each program, between neighbouring sizes from 1 Mb on; paired by round."""
    found = []
    for program, workers in _programs(report):
        rows = [row for row in rows_of(report, program, workers) if row["megabases"] >= 1]
        for less, more in pairwise(rows):
            pairs = zip(less["runs"], more["runs"], strict=False)
            megabases = more["megabases"] - less["megabases"]
            costs = [(big["cpu_s"] - small["cpu_s"]) / megabases for small, big in pairs]
            between = f"{less['input']} to {more['input']}"
            found.append({"program": program, "workers": workers, "between": between, "cpu_s": spread_of(costs)})
    return found


def peers_over_ours(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ratios of a peer's CPU seconds to ours with one worker, paired by round."""
    ours = {row["input"]: row for row in rows_of(report, OURS, 1)}
    found = []
    for row in report["rows"]:
        if row["workers"] is None and row["input"] in ours:
            pairs = zip(row["runs"], ours[row["input"]]["runs"], strict=False)
            ratios = [theirs["cpu_s"] / own["cpu_s"] for theirs, own in pairs]
            found.append({"program": row["program"], "input": row["input"], "cpu_s_over_ours": spread_of(ratios)})
    return found


def two_workers(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what two workers gain by wall time, paired by round, and how busy they kept two cores."""
    found = []
    one = {row["input"]: row for row in rows_of(report, OURS, 1)}
    for row in rows_of(report, OURS, 2):
        parallel = [run for run in row["runs"] if "workers_cpu_s" in run]
        if row["input"] not in one or not parallel or row["megabases"] < LEAST_SHARED_MB:
            continue
        pairs = zip(one[row["input"]]["runs"], row["runs"], strict=False)
        found.append(
            {
                "input": row["input"],
                "wall_of_one_over_two": spread_of([single["wall_s"] / double["wall_s"] for single, double in pairs]),
                "workers_cpu_over_twice_wall": spread_of([r["workers_cpu_s"] / r["wall_s"] / 2 for r in parallel]),
            }
        )
    return found


def worker_models(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the model of each size that two workers shared, beside what was measured; none of fewer than two sizes."""
    rows = [row for row in rows_of(report, OURS, 2) if row["megabases"] >= LEAST_SHARED_MB]
    if len(rows) < 2:
        return []
    worked = [(row["megabases"], median_of(row, "workers_cpu_s")) for row in rows]
    per_mb_s, intercept_s = statistics.linear_regression(*zip(*worked, strict=True))
    found = []
    for row in rows:
        alone_s = sum(median_of(row, "phases_parent_cpu_s", phase) for phase in ("before", "after"))
        model = WorkerModel(row["megabases"], alone_s, max(0.0, intercept_s / 2), per_mb_s)
        measured_s = median_of(row, "wall_s")
        found.append(
            {
                "input": row["input"],
                **{name: round(value, 3) for name, value in asdict(model).items()},
                "wall_s_with_1": round(model.wall_s(1), 2),
                "wall_s_with_2": round(model.wall_s(2), 2),
                "wall_of_one_over_two": round(model.wall_s(1) / model.wall_s(2), 2),
                "measured_wall_s_with_2": measured_s,
                "measured_over_model_with_2": round(measured_s / model.wall_s(2), 2),
                f"wall_s_with_{MODELLED_WORKERS}": round(model.wall_s(MODELLED_WORKERS), 2),
                f"share_alone_with_{MODELLED_WORKERS}": round(model.share_alone(MODELLED_WORKERS), 3),
            }
        )
    return found


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return what the page says of one or more results, in Markdown; of a row in several, the first is taken."""
    return "\n\n".join([table(reports), ratios(reports), where(reports)])


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return time, memory and disk of each program on each input; of the peers, their CPU seconds and memory."""
    lines = [
        "| contigs | program | CPU s | wall s | peak memory, MB: parent; each worker | output, MB: end; peak |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in (row for report in reports for row in report["rows"]):
        first.setdefault((row["input"], row["program"], row["workers"]), row)
    for row in sorted(first.values(), key=lambda row: (row["megabases"], row["workers"] is None)):
        run = min(row["runs"], key=lambda run: abs(run["cpu_s"] - median_of(row, "cpu_s")))
        peaks = run["peak_mb"]["workers"]
        memory = f"{run['peak_mb']['parent']:,}" + (f"; {_range(peaks)}" if peaks else "")
        disk = f"{run['folder_mb']['end']:,.1f}; {run['folder_mb']['peak']:,.1f}"
        seconds = f"{median_of(row, 'cpu_s'):,.1f} | {median_of(row, 'wall_s'):,.1f}"
        lines.append(f"| {row['input']} | {_named(row)} | {seconds} | {memory} | {disk} |")
    return "\n".join(lines)


def ratios(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return CPU seconds of the peers over ours."""
    found: dict[str, dict[str, str]] = {}
    for row in (row for report in reports for row in report["peers_over_ours"]):
        found.setdefault(row["program"], {})[row["input"]] = _interval(row["cpu_s_over_ours"])
    return "\n\n".join(
        f"CPU seconds of {program} over those of `predict` with one worker: {_listed(of_inputs)}."
        for program, of_inputs in found.items()
    )


def _listed(values: Mapping[str, Any]) -> str:
    """Write *values* by input, small inputs first."""
    inputs = sorted(values, key=lambda name: float(name.split()[0]) * (1e-3 if "kb" in name else 1))
    return "; ".join(f"{name}: {values[name]}" for name in inputs)


def where(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return on what was measured."""
    machine = reports[0]["machine"]
    loads = [run["load"] for report in reports for row in report["rows"] for run in row["runs"]]
    peers = {name: version for report in reports for name, version in report["peers"].items()}
    versions = "".join(f", {name} {version}" for name, version in peers.items())
    threads = next((report["omp_num_threads"] for report in reports if report["omp_num_threads"]), None)
    variable = f" (`OMP_NUM_THREADS={threads}` for all)" if threads else ""
    return (
        f"Medians (ranges) over rounds in which the programs take turns; peers with one thread{variable}. "
        f"`benchmarks/end_to_end.py`, {machine['date'][:10]}, {machine['cpu']}, load "
        f"{min(loads):.0f} to {max(loads):.0f}; Python "
        f"{machine['python']}{versions}. MB are 10^6 bytes."
    )


def _named(row: Mapping[str, Any]) -> str:
    workers = row["workers"]
    return row["program"] + (f", {workers} worker{'s' * (workers > 1)}" if workers else "")


def _interval(figures: Mapping[str, float]) -> str:
    if figures["least"] == figures["greatest"]:
        return f"{figures['median']:,}"
    return f"{figures['median']:,} ({figures['least']:,} to {figures['greatest']:,})"


def _range(values: Sequence[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _programs(report: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    return list(dict.fromkeys((row["program"], row["workers"]) for row in report["rows"]))
