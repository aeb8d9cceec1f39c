"""
The latest results as tables and a plot: ``benchmarks/results/table.md``, ``speed.svg``, and the section of
``docs/performance.md``, which has the comparison with other programs alone.

Run it as ``python benchmarks/report.py``; ``make bench`` and ``make bench-large`` end with it. It measures nothing: a
benchmark that has no result in ``benchmarks/results`` has no row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from bench_common import RESULTS, latest
from matplotlib import pyplot as plt

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- benchmarks: written by benchmarks/report.py -->", "<!-- end of benchmarks -->"
WORKLOADS = {"chunks": "chunks of 30 to 166 residues", "proteins": "whole proteins, median 290 residues"}
FAIR_ESM, TRANSFORMERS = "fair-esm", "transformers"
HEADER = (
    "| ESM-2, fp32, one CPU thread | processor | times as fast as fair-esm | as transformers "
    "| tokens per CPU s | peak memory, MB (fair-esm, transformers) | bf16 over fp32 |"
)
COLOURS = {"fair-esm": "#9aa5b1", "transformers": "#5b7c99", "virnucpro": "#c2410c"}


def embedding_reports() -> list[dict[str, Any]]:
    """Return the newest report of each embedding benchmark on each processor, small models first."""
    newest = {}
    for name in ("embedding", "embedding_large"):
        for path in sorted(RESULTS.glob(f"{name}_[0-9]*.json")):
            report = json.loads(path.read_text())
            newest[name, report["machine"]["cpu"]] = report
    return list(newest.values())


def embedding_rows() -> list[dict[str, Any]]:
    """Return the rows of those reports, each with its processor."""
    return [row | {"processor": processor(report)} for report in embedding_reports() for row in report["rows"]]


def processor(report: dict[str, Any]) -> str:
    """Return the maker's name for the processor, without the number of them."""
    name = report["machine"]["cpu"].partition(" x ")[2].replace("(R)", "")
    return name.removesuffix(" Processor")


def interval(figures: dict[str, float]) -> str:
    """Write median and range; one round has no range."""
    if figures["least"] == figures["greatest"]:
        return f"{figures['median']:g}"
    return f"{figures['median']:g} ({figures['least']:g} to {figures['greatest']:g})"


def comparison() -> str:
    """Return the comparison with other programs in Markdown."""
    lines = [HEADER, "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in embedding_rows():
        faster, memory = row["times_as_fast_as"], row.get("peak_memory_mb")
        lines.append(
            f"| {row['model']}, {WORKLOADS[row['workload']]} | {row['processor']} | **{interval(faster['fair-esm'])}** "
            f"| {interval(faster['transformers'])} "
            f"| {row['tokens_per_cpu_second']['median']:,.0f} "
            f"| {_peaks(memory)} | {interval(row['bf16']['times_as_fast_as_fp32']) if 'bf16' in row else ''} |"
        )
    if embedding_rows():
        where = "; ".join(dict.fromkeys(_machine(report) for report in embedding_reports()))
        how = (
            "Median and range over rounds in which the programs take turns, CPU seconds, from one FASTA file to "
            f"embeddings on disk. {where}."
        )
        lines += ["", how]
    return "\n".join(lines)


def _machine(report: dict[str, Any]) -> str:
    where = report["machine"]
    return (
        f"{where['cpu']}, torch {where['torch']}, fair-esm {where[FAIR_ESM]}, transformers {where[TRANSFORMERS]}, "
        f"{where['date'][:10]}"
    )


def elsewhere() -> str:
    """Return every other figure in Markdown."""
    return "\n".join(
        ["| elsewhere | figure |", "| --- | --- |", *_scaling_lines(), *_file_lines(), *_prediction_lines()]
    )


def _peaks(memory: dict[str, int] | None) -> str:
    return f"{memory['virnucpro']:,} ({memory[FAIR_ESM]:,}, {memory[TRANSFORMERS]:,})" if memory else ""


def _scaling_lines() -> list[str]:
    report = latest("workers")
    return [
        f"| {row['model']}, {name}, computing, over one worker of one thread | {interval(figures)} |"
        for row in (report or {}).get("workers", [])
        for name, figures in row["times_as_fast_as_one_worker"].items()
        if not name.startswith("1 worker x 1")
    ]


def _file_lines() -> list[str]:
    lines = []
    if index := latest("index"):
        figures = index["wrapped_60"]
        lines.append(
            f"| sequence index, MB of FASTA per CPU second, with hashes (without) "
            f"| {figures['mb_per_cpu_second_hash_on']:.0f} ({figures['mb_per_cpu_second_hash_off']:.0f}) |"
        )
    if hdf5 := latest("hdf5_writing"):
        lines += [
            f"| sealed parts, MB of float32 per second | {interval(hdf5['part']['mb_per_second'])} |",
            f"| a shard of them, MB of float32 per second | {interval(hdf5['shard']['mb_per_second'])} |",
        ]
    return lines


def _prediction_lines() -> list[str]:
    lines = []
    if fragments := latest("fragments"):
        named = {"translate": "chunks and six frames", "write": "the same, from contigs on disk to frames on disk"}
        lines += [
            f"| {named[row['what']]}, chunks of {row['chunk_nt']} nt per CPU second "
            f"| {interval(row['chunks_per_cpu_second'])} |"
            for row in fragments["rows"]
            if row["input"] == "genomes" and row["what"] in named
        ]
    if classification := latest("classification"):
        lines += [
            f"| from embeddings on disk ({widths} numbers a frame) to scores and tables, frames per CPU second "
            f"| {interval(row['frames_per_cpu_second'])} |"
            for widths, row in classification["widths (DNA,protein)"].items()
        ]
    return lines


def plot(path: Path) -> None:
    """Draw speed relative to fair-esm, one group a row of the table."""
    rows = embedding_rows()
    mpl.rcParams.update({"svg.hashsalt": "virnucpro", "font.family": "sans-serif", "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(8, 1.1 + 0.95 * len(rows)))
    for place, row in enumerate(rows):
        over_peer = row["times_as_fast_as"]
        ours = over_peer["fair-esm"]
        theirs = ours["median"] / over_peer["transformers"]["median"]
        bars = (("fair-esm", 1.0), ("transformers", theirs), ("virnucpro", ours["median"]))
        for step, (name, value) in enumerate(bars):
            y = place + (step - 1) * 0.26
            axes.barh(y, value, height=0.24, color=COLOURS[name], label=name if not place else None)
            end = ours["greatest"] if name == "virnucpro" else value
            axes.text(end + 0.06, y, f"{value:.2f}", va="center", fontsize=9)
        reach = [[ours["median"] - ours["least"]], [ours["greatest"] - ours["median"]]]
        axes.errorbar(ours["median"], place + 0.26, xerr=reach, color="black", capsize=3, linewidth=1)
    axes.set_yticks(range(len(rows)), [f"ESM-2 {row['model']}, {row['workload']}\n{row['processor']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("speed on one CPU thread, fp32, fair-esm = 1")
    axes.set_xlim(0, max(row["times_as_fast_as"]["fair-esm"]["greatest"] for row in rows) * 1.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    text = f"{comparison()}\n\n{elsewhere()}"
    (RESULTS / "table.md").write_text(text + "\n")
    plot(RESULTS / "speed.svg")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    image = "![Speed against fair-esm and transformers](../benchmarks/results/speed.svg)"
    PAGE.write_text(f"{before}{BEGIN}\n\n{image}\n\n{comparison()}\n\n{END}{after}")
    print(text)


if __name__ == "__main__":
    main()
