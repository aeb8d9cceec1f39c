"""
Two CPU workers, one of a third of the other's speed: blocks handed out, against a fixed stride for each rank.

The model only waits, so that the figures are those of the assignment and not of the machine. A fixed stride is what a
worker function computes whose parent hands nothing out. The wall time is from the first batch to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_common import machine, write_result

from tests import fakes
from tests.faults.processes import make_proteins
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.gpu_worker import gpu_worker
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.run_layout import RunLayout


class Finished:
    """When each rank finished its batches."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {0: [], 1: []}
        self._first_s = float("inf")

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Note a batch that begins or ends."""
        if message.get("kind") == "start":
            self._first_s = min(self._first_s, time.monotonic())
        if message.get("kind") == "progress":
            self.times[rank].append(time.monotonic())

    def figures(self) -> dict[str, Any]:
        """Return wall seconds, blocks of each rank, and how long before the other one had nothing to do."""
        fast_s, slow_s = self.times[0][-1], self.times[1][-1]
        return {
            "wall_s": round(max(fast_s, slow_s) - self._first_s, 2),
            "blocks": [len(self.times[0]), len(self.times[1])],
            "finished_apart_s": round(abs(slow_s - fast_s), 2),
        }


def main() -> None:
    """Run both assignments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=400)
    parser.add_argument("--batch-seconds", type=float, default=0.2, help="of the fast rank; the slow one needs thrice")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vnp-") as name:
        folder = Path(name)
        make_proteins(folder / "in.fasta", random.Random(1), args.sequences)
        (folder / "seconds.json").write_text(json.dumps([args.batch_seconds, 3 * args.batch_seconds]))
        config = fakes.hash_config(
            loader="tests.fakes:load_model_of_uneven_ranks", weights_path=str(folder / "seconds.json")
        )
        handed_out = Finished()
        run_embedding([folder / "in.fasta"], folder / "a", config, [CPU] * 2, on_message=handed_out.on_message)
        stride = Finished()
        layout = RunLayout(folder / "b")
        SequenceIndex.build([folder / "in.fasta"], layout.index, unpack_dir=layout.unpacked_dir)
        with GPUProcessCoordinator(2, folder / "b", devices=[CPU] * 2, on_message=stride.on_message) as coordinator:
            coordinator.spawn_workers(gpu_worker, (str(layout.index), str(layout.output_dir), config))
            coordinator.wait_for_completion()
    report = {"machine": machine(), "handed_out": handed_out.figures(), "stride": stride.figures()}
    report["ratio_of_wall_s"] = round(report["handed_out"]["wall_s"] / report["stride"]["wall_s"], 3)
    # of N blocks the slow rank computes N / 2 by stride; at best the fast one computes 3 N / 4 in half that time
    report["best_possible_ratio"] = 0.5
    print(json.dumps({name: value for name, value in report.items() if name != "machine"}, indent=2))
    if args.write:
        print(write_result("uneven_ranks", report))


if __name__ == "__main__":
    main()
