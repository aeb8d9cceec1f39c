"""
The tables and plots of ``docs/scale.md``, from the newest measured rates and the model of scale.

Run it as ``python benchmarks/scale_page.py``. To measure the rates anew: ``python benchmarks/scale_rates.py --write``
before it. This measures nothing, and the same rates give the same page.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.scale_model import (  # noqa: E402
    ENGINES,
    GPUS,
    SEQUENCES,
    SMALLER,
    Assumptions,
    Rates,
    Run,
    latest,
    medians,
)
from benchmarks.scale_wording import duration, number, power, size  # noqa: E402

PAGE = REPOSITORY / "docs" / "scale.md"
ASSUMED = {
    "gpu_tokens_per_second": "tokens/s of one GPU with ESM-2 3B, bf16",
    "block_tokens": "tokens of a block",
    "weights_bytes": "bytes of the weights, read once a host",
    "gpus_per_host": "GPUs of a host",
    "client_bytes_per_second": "bytes/s between the file system and one host",
    "shared_bytes_per_second": "bytes/s of the file system in all",
    "scattered_read_s": "s until a row from anywhere in a large file is there",
    "reads_at_once": "such reads at the same time",
    "operation_s": "s to open a file",
    "names_per_second": "names/s listed, of the file system in all",
    "driver_memory_bytes": "bytes of the driver's memory",
}
"""Labels of the fields of ``Assumptions``."""


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Return the parts of the page that follow from a result of ``scale_rates.py``, by the names of their marks."""
    rates = Rates.of(report)
    return {
        "measured": _measured(report),
        "assumed": _assumed(),
        "time": _times(rates),
        "sizes": _sizes(rates),
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured(report: dict[str, Any]) -> str:
    rates, median = Rates.of(report), medians(report)

    def spread(name: str, what: str, digits: int = 2) -> str:
        middle, least, most = (
            f"{report['rates'][name][what][key]:,.{digits}f}" for key in ("median", "least", "greatest")
        )
        return f"{middle} ({least} to {most})"

    def several(stem: str, ends: str, what: str, digits: int = 1) -> str:
        return ", ".join(f"{median[stem + end][what]:,.{digits}f}" for end in ends.split())

    def engines(what: str, digits: int) -> str:
        return ", ".join(f"{median[f'engine_{name}'][what]:,.{digits}f}" for name in ENGINES)

    def pair(rate: tuple[float, float]) -> str:
        return f"{1e6 * rate[0]:.2f} µs a row, {1e9 * rate[1]:.2f} ns a byte"

    long, parts = median["index_1_000_000"], "1_000 10_000 50_000"
    in_index = f"{rates.index_file_bytes + rates.id_bytes:.0f}, {rates.index_memory_bytes:.0f}"
    rows = [
        ["a protein: tokens, bytes in FASTA", f"{rates.tokens:,.0f}, {rates.record_bytes:,.0f}"],
        ["index, MB a processor s", f"{long['fasta_bytes'] / long['cpu_s'] / 1e6:,.0f}"],
        ["index, bytes of a record: in the file with its id, peak of memory", in_index],
        ["plan of 10^5, 10^6, 10^7, processor s", several("plan_", "100_000 1_000_000 10_000_000", "cpu_s", 3)],
        ["plan, bytes a sequence: peak, held", f"{rates.plan_memory_bytes:.0f}, {rates.plan_held_bytes:.0f}"],
        ["a part of 4,096 rows, MB/s", spread("part", "mb_per_second", 0)],
        ["looking for a unit among 1,000, 10,000, 50,000 parts, processor ms", several("looking_", parts, "look_ms")],
        ["checking parts, processor", pair(rates.check_s)],
        ["result in one file, processor", pair(rates.single_s)],
        ["result in shards, processor", pair(rates.sharded_s)],
        ["validating shards, processor", pair(rates.validate_s)],
        ["result, bytes of memory a row, peak", f"{rates.result_memory_bytes:.0f}"],
        ["a unit or file done by an engine, processor ms of the driver: Ray, Dask", engines("item_ms", 2)],
        ["a worker's messages, each second, processor ms of the driver: Ray, Dask", engines("messages_ms", 3)],
        ["a worker, s until ESM-2 8M is in memory", spread("embedding_8M", "start_s")],
    ]
    where = report["machine"]
    packages = ("torch", "numpy", "h5py", "prefect", "ray", "distributed")
    versions = ", ".join(f"{name} {where[name]}" for name in packages)
    how = f"{where['cpu']}, {where['system']}, Python {where['python']},\n{versions}; {where['date'][:10]}."
    return _table(["measured here", f"median of {report['rounds']} (range)"], rows) + f"\n\n{how}"


def _assumed() -> str:
    values = vars(Assumptions())
    return _table(["assumed, not measured", "value"], [[what, number(values[name])] for name, what in ASSUMED.items()])


def _times(rates: Rates) -> str:
    rows = []
    for assumed in (Assumptions(), replace(Assumptions(), **SMALLER)):
        for count in SEQUENCES:
            runs = [Run(count, gpus, rates, assumed) for gpus in GPUS]
            cells = (f"{duration(run.total_s())}, {run.efficiency():.0%}" for run in runs)
            rows.append([f"{assumed.model}, {power(count)}", *cells])
    return _table(["time, computing; GPUs:", *(f"{gpus:,}" for gpus in GPUS)], rows)


def _sizes(rates: Rates) -> str:
    runs = [Run(count, 1000, rates) for count in SEQUENCES]
    disks, memories = [run.disk_bytes() for run in runs], [run.memory_bytes() for run in runs]
    rows = [[f"disk: {name}", *(size(each[name]) for each in disks)] for name in disks[0]]
    rows.append(["disk: required at the start", *(size(run.asked_bytes()) for run in runs)])
    rows += [[f"memory: {name}", *(size(each[name]) for each in memories)] for name in memories[0]]
    rows.append(
        [f"fits {size(Assumptions().driver_memory_bytes)} a host", *("yes" if run.fits() else "**no**" for run in runs)]
    )
    rows.append(["files: parts, at most", *(f"{run.parts:,}" for run in runs)])
    rows.append(["files: of the result", *(f"{run.result_files:,}" for run in runs)])
    rows.append(
        ["opening the result reads", *(size(run.directory_bytes()) if run.is_sharded else "every id" for run in runs)]
    )
    rows.append(["resuming a finished embedding: its check", *(duration(run.continuing_s()) for run in runs)])
    return _table(["sequences:", *(f"{count:,}" for count in SEQUENCES)], rows)


def filled(page: str, parts: dict[str, str]) -> str:
    """
    Return *page* with every part between its marks.

    Raises:
        ValueError: A mark is not there.
    """
    for name, text in parts.items():
        begin, end = f"<!-- scale: {name} -->", "<!-- end -->"
        before, mark, rest = page.partition(begin)
        _, closing, after = rest.partition(end)
        if not (mark and closing):
            raise ValueError(f"{PAGE.name} has no {begin} ... {end}")
        page = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    from benchmarks.scale_plots import plot  # noqa: PLC0415  matplotlib is of the extra ``bench``

    report = latest()
    PAGE.write_text(filled(PAGE.read_text(), tables(report)))
    for path in plot(Rates.of(report), PAGE.parent):
        print(path)


if __name__ == "__main__":
    main()
