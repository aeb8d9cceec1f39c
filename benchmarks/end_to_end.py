"""
``virnucpro predict`` end to end, as a user runs it: CPU seconds, wall, stages, memory of each process, bytes on disk.

The contigs are cut from the genomes of ../shared/data (or ``VIRNUCPRO_TEST_DATA``) with log-normal lengths of 300 nt to
100 kb, seeded; smaller inputs are the beginning of larger ones, and one is a single contig of 3 kb. By default the
bundled classifier reads composition alone; ``--cascade off`` embeds frames. geNomad's ``nn-classification`` and
DeepMicroClass, each of an environment of its own and with one thread, take turns with ours. CPU seconds are user and
system of all processes of a command. ``--page`` measures nothing: it writes the table of docs/performance.md from the
newest results.

    python benchmarks/end_to_end.py [--megabases 1 5] [--workers 1 2] [--rounds 1]
        [--embedded-megabases 5] [--write NAME] [--genomad PATH] [--deepmicroclass PATH]
    python benchmarks/end_to_end.py --megabases 20 200 --workers 2 --embedded-megabases 0 --write end_to_end_of_200_mb
    python benchmarks/end_to_end.py --page
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_common import latest, machine, write_result
from cut_contigs import DATA, read_genomes, write_contigs
from end_to_end_model import (
    EMBEDDING,
    OURS,
    further_mb,
    page,
    peers_over_ours,
    spread_of,
    table,
    two_workers,
    worker_models,
)
from watched_command import watch

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- end to end: written by benchmarks/end_to_end.py -->", "<!-- end -->"
RESULT_NAMES = ("end_to_end", "end_to_end_large", "end_to_end_of_200_mb", "end_to_end_peers")
"""Results that the page shows; of a row in several, the first is shown."""
SINGLE_NT = 3_000
MOST_SLOW_MB = 5.0
"""Larger inputs are not embedded, and not given to the peers, unless an option says so."""


@dataclass(frozen=True)
class Input:
    """Contigs to predict."""

    name: str
    path: Path
    contigs: int
    megabases: float


@dataclass(frozen=True)
class Program:
    """A command line, from contigs to a folder of results."""

    name: str
    workers: int | None
    """None for a peer."""
    command: Callable[[Path, Path], list[str | Path]]
    most_mb: float | None = None
    """Megabases of the largest input; None for all."""

    def takes(self, contigs: Input) -> bool:
        """Whether the program is measured on the input."""
        if contigs.contigs == 1 and (self.workers or 1) > 1:
            return False  # one process scores one contig
        return self.most_mb is None or contigs.megabases <= self.most_mb * 1.1


def our_program(workers: int, *, embeds: bool, most_mb: float | None = None) -> Program:
    """Return ``virnucpro predict``."""
    options = ["--devices", "cpu", "--workers", str(workers), *(["--cascade", "off"] if embeds else [])]

    def command(contigs: Path, out: Path) -> list[str | Path]:
        return [sys.executable, "-m", "virnucpro", "predict", contigs, "-o", out, *options]

    return Program(EMBEDDING if embeds else OURS, workers, command, most_mb)


def peers(options: argparse.Namespace) -> list[Program]:
    """Return the peers whose executables were given; print a line for the others."""

    def genomad(contigs: Path, out: Path) -> list[str | Path]:
        return [options.genomad, "nn-classification", "--threads", "1", contigs, out]

    def deepmicroclass(contigs: Path, out: Path) -> list[str | Path]:
        chosen = ["-e", "onehot", "-md", "hybrid", "-d", "cpu", "-ct", "1"]
        return [options.deepmicroclass, "predict", "-i", contigs, "-o", out, *chosen]

    found = []
    for name, path, command in (
        ("geNomad", options.genomad, genomad),
        ("DeepMicroClass", options.deepmicroclass, deepmicroclass),
    ):
        if path is None:
            print(f"{name} is skipped: give its executable with --{name.lower()} PATH", file=sys.stderr)
        else:
            found.append(Program(name, None, command, options.peer_megabases))
    return found


def version_of(executable: Path, package: str) -> str:
    """Return the version of a package in the environment of an executable."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [executable.parent / "python", "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def make_inputs(folder: Path, megabases: list[float]) -> list[Input]:
    """Cut the contigs; none without the genomes."""
    genomes = read_genomes()
    if not genomes:
        return []
    single = folder / "single.fa"
    single.write_text(f">contig\n{next(one for one in genomes if len(one) >= SINGLE_NT)[:SINGLE_NT]}\n")
    inputs = [Input("3 kb, one contig", single, 1, SINGLE_NT / 1e6)]
    for size in sorted(megabases):
        path = folder / f"{size:g}_mb.fa"
        contigs, letters = write_contigs(path, genomes, int(size * 1e6))
        inputs.append(Input(f"{size:g} Mb", path, contigs, letters / 1e6))
    return inputs


def run_once(program: Program, contigs: Input, folder: Path) -> dict[str, Any]:
    """Run a program on an input, and return what it took."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        out = Path(name) / "out"
        load = os.getloadavg()[0]
        run = watch(program.command(contigs.path, out), out, folder / "log.txt").to_json()
        manifest = out / "run.json"
        if manifest.exists():
            stages = json.loads(manifest.read_text())["stages"]
            run["stages_s"] = {stage: record["seconds"] for stage, record in stages.items()}
    named = f"{contigs.name}, {program.name}" + (f", workers: {program.workers}" if program.workers else "")
    print(f"  {named}: {run['cpu_s']} CPU s", file=sys.stderr, flush=True)
    return run | {"load": round(load, 2)}


def measure(programs: list[Program], inputs: list[Input], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Let the programs take turns on every input; each round begins with another one."""
    rows: dict[tuple[str, str, int | None], dict[str, Any]] = {}
    for number in range(rounds):
        for contigs in inputs:
            some = [program for program in programs if program.takes(contigs)]
            start = number % max(len(some), 1)
            for program in some[start:] + some[:start]:
                row = rows.setdefault(
                    (contigs.name, program.name, program.workers),
                    {
                        "input": contigs.name,
                        "contigs": contigs.contigs,
                        "megabases": round(contigs.megabases, 3),
                        "program": program.name,
                        "workers": program.workers,
                        "runs": [],
                    },
                )
                row["runs"].append(run_once(program, contigs, folder))
    for row in rows.values():
        for name in ("cpu_s", "wall_s"):
            row[name] = spread_of([run[name] for run in row["runs"]])
    return list(rows.values())


def write_page() -> None:
    """Write what the newest results say into the page."""
    before, mark, rest = PAGE.read_text().partition(BEGIN)
    _, closing, after = rest.partition(END)
    if not (mark and closing):
        raise ValueError(f"{PAGE.name} has no {BEGIN} ... {END}")
    text = page([report for name in RESULT_NAMES if (report := latest(name))])
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def options_of_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabases", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--embedded-megabases", type=float, default=MOST_SLOW_MB, help="largest for --cascade off")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--genomad", type=Path, metavar="PATH", help="geNomad's executable")
    parser.add_argument("--deepmicroclass", type=Path, metavar="PATH", help="DeepMicroClass' executable")
    parser.add_argument("--peer-megabases", type=float, default=MOST_SLOW_MB, help="largest input of the peers")
    parser.add_argument("--write", metavar="NAME", help="keep the result under this name")
    parser.add_argument("--page", action="store_true", help="write the table of docs/performance.md, and nothing else")
    return parser.parse_args()


def main() -> None:
    options = options_of_command()
    if options.page:
        write_page()
        return
    programs = [our_program(workers, embeds=False) for workers in options.workers]
    most_mb = options.embedded_megabases
    programs += [our_program(workers, embeds=True, most_mb=most_mb) for workers in options.workers if most_mb]
    programs += peers(options)
    packages = {"genomad": options.genomad, "DeepMicroClass": options.deepmicroclass}
    with tempfile.TemporaryDirectory() as name:
        inputs = make_inputs(Path(name), options.megabases)
        if not inputs:
            print(f"Nothing is measured: there are no genomes in {DATA}; VIRNUCPRO_TEST_DATA names another folder.")
            return
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs are installed with their bytecode
        for program in programs:
            if program.takes(inputs[0]):
                run_once(program, inputs[0], Path(name))  # not measured: writes it
        rows = measure(programs, inputs, options.rounds, Path(name))
    report: dict[str, Any] = {
        "machine": machine("virnucpro", "torch", "numpy"),
        "peers": {package: version_of(path, package) for package, path in packages.items() if path},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "rounds": options.rounds,
        "rows": rows,
    }
    report |= {
        "cpu_s_of_a_further_mb": further_mb(report),
        "peers_over_ours": peers_over_ours(report),
        "two_workers": two_workers(report),
        "model": worker_models(report),
    }
    print(json.dumps(report | {"rows": None}, indent=2))
    print(table([report]))
    if options.write:
        print(write_result(options.write, report))


if __name__ == "__main__":
    main()
