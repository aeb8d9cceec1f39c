"""
What telemetry costs: a run with all of it, beside the same run without.

Run it as ``python benchmarks/telemetry.py [--sequences 20000] [--rounds 3] [--workers 2] [--write]``. It embeds real
proteins (``../shared/data/proteins/uniprot_20000.fasta.gz``, or ``--fasta``) with the bundled encoder. A round is three
whole runs, whose order changes from round to round. Figures are CPU seconds: of the parent, where metrics, views and
monitors live, of the workers, and of both; ``--write`` keeps them in ``benchmarks/results``.

``watched``: metrics served and scraped every second, bars drawn on a terminal, status file, monitors, messages and
warnings of the workers. ``profiled``: the same with ``--profile``. ``unwatched``, in this benchmark only: nothing of
it, but for what the recovery of failed workers needs. The scraper and the reader of the terminal are processes of
their own and not counted. All runs must give the same bytes.

The parent's own seconds are the exact figure: what it takes when watched less what it takes when unwatched, as a share
of all CPU seconds of the unwatched run. The ratio of all seconds also holds what the machine did meanwhile. Most of
the parent's work goes by the clock, so on a busy machine, where a run takes longer, its share is larger; its
milliseconds per second of the run are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pty
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_common import machine, spread, write_result
from durability import PROTEINS, first_records

from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import GPU_WORKER, run_embedding
from virnucpro.settings import EmbeddingSettings, Monitoring
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.ranks import Rank
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import TerminalView
from virnucpro.telemetry.show.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("unwatched", "watched", "profiled")
CLOCKS = ("parent_s", "workers_s", "all_s", "wall_s")
UNWATCHED_WORKER = "telemetry:unwatched_worker"
NEEDED = {"wants", "done", "heartbeat", "resumed", "model_loaded", "start", "progress", "sequence_failed", "step"}
"""Messages of workers that handing out blocks, the detection of hangs and the recovery of failed workers need."""
SCRAPER = """
import json, pathlib, sys, time, urllib.request
while True:
    for path in pathlib.Path(sys.argv[1]).glob("*.json"):
        try:
            (target,) = json.loads(path.read_text())[0]["targets"]
            urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read()
        except (OSError, ValueError):
            pass
    time.sleep(1)
"""


class _Unwatched(RunTelemetry):
    """Times the stages, which the run's own record needs, and does nothing else."""

    def __exit__(self, *_: object) -> None:
        pass

    def running(self, *_: object) -> Any:
        return nullcontext()

    def begin_embedding(self, facts: Any) -> Any:
        return _Deaf(facts)


class _Deaf:
    """Takes an embedding run's messages and keeps nothing but the ranks, which recovery writes itself."""

    def __init__(self, facts: Any) -> None:
        self.ranks = [Rank(rank=number, device=label) for number, (label, _) in enumerate(facts.devices)]

    def assigned(self, *_: object) -> None:
        pass

    on_message = ended = over = aggregated = assigned


class _FewWords:
    """The worker's end of its pipe, without the messages that are only displayed."""

    def __init__(self, reports: Any) -> None:
        self._reports = reports

    def put(self, message: dict[str, Any]) -> None:
        if message.get("kind") in NEEDED or "status" in message:
            self._reports.put(message)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        answer: dict[str, Any] | None = self._reports.receive(timeout_s)
        return answer


def unwatched_worker(rank: int, world_size: int, results_queue: Any, *arguments: Any) -> None:
    """Do what ``gpu_worker`` does, with few messages."""
    from virnucpro.pipeline.gpu_worker import gpu_worker  # noqa: PLC0415  imports torch, which the parent must not

    gpu_worker(rank, world_size, _FewWords(results_queue), *arguments)


@contextmanager
def watchers(folder: Path) -> Iterator[RunTelemetry]:
    """Yield telemetry, not yet begun, with a terminal that is read and metrics that are scraped."""
    ours, theirs = pty.openpty()
    targets = folder / "targets"
    targets.mkdir()
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, targets])
    try:
        with os.fdopen(theirs, "w") as terminal:
            yield RunTelemetry(MetricsOptions(port=0, targets_dir=targets), [TerminalView(Terminal(terminal))])
    finally:
        for process in (scraper, reader):
            process.kill()
            process.wait()
        os.close(ours)


def cpu_seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def run_once(fasta: Path, folder: Path, workers: int, mode: str) -> dict[str, Any]:
    """Embed *fasta* in a new folder; return CPU seconds of parent and workers, seconds, and the result's sha256."""
    config = configure_model(EmbeddingSettings(monitoring=Monitoring(profile=mode == "profiled")), device_type="cpu")
    is_watched = mode != "unwatched"
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        watchers(Path(name)) if is_watched else nullcontext(_Unwatched()) as telemetry,
    ):
        out = Path(name) / "run"
        before_s = [cpu_seconds(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        started_s = time.perf_counter()
        with telemetry:
            worker = GPU_WORKER if is_watched else UNWATCHED_WORKER
            result = run_embedding([fasta], out, config, [CPU] * workers, telemetry=telemetry, worker_fn=worker)
        wall_s = time.perf_counter() - started_s
        # reader and scraper have not been waited for yet, so their time is not among the children's
        after_s = [cpu_seconds(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        assert result.state == "complete", result
        assert (out / "metrics.prom").exists() == is_watched
        assert (out / "trace.json").exists() == (mode == "profiled")
        sha256 = hashlib.sha256((out / "embeddings.h5").read_bytes()).hexdigest()
    parent_s, workers_s = (after - before for after, before in zip(after_s, before_s, strict=True))
    seconds = {"parent_s": parent_s, "workers_s": workers_s, "all_s": parent_s + workers_s, "wall_s": wall_s}
    return {**seconds, "sha256": sha256}


def measure(fasta: Path, folder: Path, *, workers: int, rounds: int) -> dict[str, Any]:
    """Take turns; return ratios, shares and seconds."""
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        first = number % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            found[mode].append(run_once(fasta, folder, workers, mode))
            shown = ", ".join(f"{clock} {found[mode][-1][clock]:.2f}" for clock in CLOCKS)
            print(f"{mode}: {shown}; load {os.getloadavg()[0]:.1f}", flush=True)
    assert len({run["sha256"] for runs in found.values() for run in runs}) == 1, "the results differ"
    return {
        **{
            f"{mode}_over_{base}": {
                clock: spread([on[clock] / off[clock] for on, off in zip(found[mode], found[base], strict=True)], 4)
                for clock in CLOCKS
            }
            for mode, base in (("watched", "unwatched"), ("profiled", "watched"))
        },
        "share_of_the_parent": {
            mode: spread(
                [
                    (on["parent_s"] - off["parent_s"]) / off["all_s"]
                    for on, off in zip(found[mode], found["unwatched"], strict=True)
                ],
                digits=5,
            )
            for mode in ("watched", "profiled")
        },
        "milliseconds_of_the_parent_per_second": {
            mode: spread([1000 * run["parent_s"] / run["wall_s"] for run in runs]) for mode, runs in found.items()
        },
        "seconds": {
            mode: {clock: spread([run[clock] for run in runs]) for clock in CLOCKS} for mode, runs in found.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", type=Path, default=PROTEINS)
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        fasta = Path(name) / "proteins.fasta"
        sequences = first_records(options.fasta, fasta, options.sequences)
        few = Path(name) / "few.fasta"
        first_records(options.fasta, few, 20)
        for mode in MODES:  # what this process imports and makes once is not part of a run
            run_once(few, Path(name), options.workers, mode)
        figures = measure(fasta, Path(name), workers=options.workers, rounds=options.rounds)
    report = {
        "machine": machine("virnucpro", "torch", "prometheus-client", "psutil"),
        "load_before": round(load, 2),
        "sequences": sequences,
        "workers": options.workers,
        "rounds": options.rounds,
        **figures,
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("telemetry", report)


if __name__ == "__main__":
    main()
