"""
Two embedding runs of one prediction: one after the other with every worker, or side by side with half of them each.

Run it as ``python benchmarks/two_models.py RUN [--rounds 3] [--write]``; RUN is the folder of a prediction, whose
frames are embedded again with the bundled encoders. Both ways take turns within a round; wall seconds, since what is
compared is how well the same work fills the same cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import threading
import time
from pathlib import Path

import structlog
from bench_common import machine, spread, write_result

from virnucpro.choices import DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.settings import EmbeddingSettings

WORKERS = 2


def seconds_of(job) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    jobs = [
        (
            sorted(options.run.glob("*_identified_nucleotide.fa")),
            configure_model(EmbeddingSettings(model=DEFAULT_DNA_MODEL), device_type="cpu"),
        ),
        (
            sorted(options.run.glob("*_identified_protein.faa")),
            configure_model(EmbeddingSettings(model=DEFAULT_PROTEIN_MODEL), device_type="cpu"),
        ),
    ]
    rows = sum(file.read_bytes().count(b">") for file in jobs[0][0])
    after_each_other, side_by_side = [], []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)

            def embed(number: int, workers: int, to: Path) -> None:
                files, config = jobs[number]
                run_embedding(files, to / str(number), config, [CPU] * workers)

            def one_by_one(to: Path) -> None:
                for number in range(len(jobs)):
                    embed(number, WORKERS, to)

            def both(to: Path) -> None:
                threads = [threading.Thread(target=embed, args=(n, WORKERS // len(jobs), to)) for n in range(len(jobs))]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

            after_each_other.append(seconds_of(lambda: one_by_one(folder / "one")))  # noqa: B023  called here and now
            side_by_side.append(seconds_of(lambda: both(folder / "both")))  # noqa: B023  likewise
    report = {
        "machine": machine("virnucpro", "torch"),
        "frames": rows,
        "workers": WORKERS,
        "one_after_the_other_s": spread(after_each_other),
        "side_by_side_s": spread(side_by_side),
        "side_by_side_over_one_after_the_other": spread(
            [both_s / one_s for both_s, one_s in zip(side_by_side, after_each_other, strict=True)]
        ),
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("two_models", report)


if __name__ == "__main__":
    main()
