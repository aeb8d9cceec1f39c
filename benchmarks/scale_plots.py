"""The plots of ``docs/scale.md``, drawn by ``scale_page.py`` from the model; colours are those of Okabe and Ito."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.scale_model import GPUS, SEQUENCES, Assumptions, Rates, Run
from benchmarks.scale_wording import duration, size

if TYPE_CHECKING:
    from pathlib import Path

STAGES = {
    "index": ("#E69F00", "//"),
    "plan": ("#F0E442", ""),
    "start": ("#999999", ""),
    "embed": ("#0072B2", ""),
    "aggregate": ("#D55E00", ""),
    "validate": ("#CC79A7", "xx"),
}
"""Colour and hatching: neighbours differ in both."""
MARKERS = {"index": "s", "plan": "v", "start": "P", "embed": "o", "aggregate": "D", "validate": "X"}
TIMES_S = {"1 s": 1, "1 min": 60, "1 h": 3600, "1 day": 86400, "1 month": 30 * 86400, "1 year": 365 * 86400}
CENTURY_S = 100 * 365 * 86400


def plot(rates: Rates, folder: Path) -> list[Path]:
    """Draw every plot into *folder*; return their paths."""
    mpl.rcParams.update({"svg.hashsalt": "virnucpro", "font.family": "sans-serif", "svg.fonttype": "none"})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.5})
    drawn = {"time": _time, "shares": _shares, "sizes": _sizes}
    paths = []
    for name, draw in drawn.items():
        paths.append(folder / f"scale_{name}.svg")
        figure = draw(rates)
        figure.savefig(paths[-1], metadata={"Date": None})
        plt.close(figure)
    return paths


def _power(value: float) -> str:
    return f"$10^{{{len(str(int(value))) - 1}}}$"


def _gpu_axis(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_xticks(GPUS, [f"{gpus:,}" for gpus in GPUS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("GPUs")


def _time(rates: Rates) -> Any:
    """Draw the time of each stage against the number of GPUs, one panel a number of sequences."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 4.6), sharey=True)
    for axes, count in zip(panels, SEQUENCES, strict=True):
        runs = [Run(count, gpus, rates) for gpus in GPUS]
        axes.plot(GPUS, [run.total_s() for run in runs], color="black", linewidth=2.5, label="all")
        for name, (colour, _) in STAGES.items():
            seconds = [run.stages_s()[name] for run in runs]
            style = {"color": colour, "marker": MARKERS[name], "markersize": 5, "markeredgecolor": "#333333"}
            axes.plot(GPUS, seconds, label=name, linewidth=1.6, markeredgewidth=0.5, **style)
        axes.set_title(f"{_power(count)} sequences")
        _gpu_axis(axes)
        axes.set_yscale("log")
        axes.set_ylim(0.1, CENTURY_S)
        axes.set_yticks(list(TIMES_S.values()), list(TIMES_S))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    panels[0].set_ylabel("time of the stage")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="upper center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def _shares(rates: Rates) -> Any:
    """Draw which share of the time each stage takes, as stacked bars."""
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 4.2), sharey=True)
    for axes, count in zip(panels, SEQUENCES, strict=True):
        runs = [Run(count, gpus, rates) for gpus in GPUS]
        below = [0.0] * len(runs)
        for name, (colour, hatch) in STAGES.items():
            shares = [100 * run.stages_s()[name] / run.total_s() for run in runs]
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
            axes.bar(range(len(runs)), shares, bottom=below, width=0.8, label=name, **style)
            below = [bottom + share for bottom, share in zip(below, shares, strict=True)]
        for place, run in enumerate(runs):
            axes.text(place, 101.5, duration(run.total_s()), ha="center", fontsize=7.5)
        axes.set_xticks(range(len(runs)), [f"{gpus:,}" for gpus in GPUS])
        axes.set_xlabel("GPUs")
        axes.set_title(f"{_power(count)} sequences", pad=18)
    panels[0].set_ylabel("share of the time, %")
    panels[0].set_ylim(0, 100)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="upper center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    return figure


def _sizes(rates: Rates) -> Any:
    """Draw memory and disk against the number of sequences."""
    counts = [10**power for power in range(6, 11)]
    runs = [Run(count, 1000, rates) for count in counts]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4))
    memories = (("index (driver)", "#E69F00", "s"), ("aggregate (driver)", "#D55E00", "D"))
    for name, colour, marker in (*memories, ("plan (every worker)", "#0072B2", "o")):
        left.plot(counts, [run.memory_bytes()[name] for run in runs], color=colour, marker=marker, label=name)
    memory = Assumptions().driver_memory_bytes
    left.axhline(memory, color="black", linestyle="--", linewidth=1)
    left.text(counts[0], memory * 1.25, f"{size(memory)}, a host's memory", fontsize=8)
    left.set_title("memory")
    disks = [run.disk_bytes() for run in runs]
    of_disk = (("result", "#D55E00", "D"), ("input", "#009E73", "^"), ("index", "#E69F00", "s"))
    asked = [run.asked_bytes() for run in runs]
    right.plot(counts, asked, color="black", marker="o", label="required at the start: twice the parts, result")
    for name, colour, marker in of_disk:
        right.plot(counts, [each[name] for each in disks], color=colour, marker=marker, label=name)
    right.set_title("disk, rows of 2,560 numbers")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("sequences")
        axes.set_ylabel("bytes")
        axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), fontsize=8)
    figure.tight_layout()
    return figure
