"""
Classifying vectors on disk: frames a second of CPU time, from two HDF5 files to scores and both tables.

Random vectors of the given widths; the classifier has random weights and the published hidden width, since speed
does not depend on values. The disk's share is what wall time has beyond CPU time; reading alone is measured beside it.

    python benchmarks/classification.py [--frames 400000] [--widths 128,128 768,2560] [--rounds 3] [--write]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from bench_common import machine, spread, write_result

from virnucpro.calls.classification import classify_frames
from virnucpro.calls.frame_order import FrameOrder
from virnucpro.data.frames import FRAMES
from virnucpro.models.classifier import Classifier, MLPClassifier
from virnucpro.models.classifier_files.card import ClassifierCard, Encoder
from virnucpro.run_layout import PredictionLayout

CHUNK_NT = 500
CHUNKS_PER_CONTIG = 10


@dataclass
class Contigs:
    """What ``FrameOrder`` needs of an index: contigs of one length, in the order of the input."""

    count: int

    def __len__(self):
        return self.count

    @property
    def lengths(self):
        return np.full(self.count, CHUNK_NT * CHUNKS_PER_CONTIG, dtype=np.int64)

    def in_input_order(self):
        return np.arange(self.count)

    def sequence_ids(self, positions):
        return [f"NODE_{n}_length_5000_cov_12.3" for n in positions]


def make_folder(folder: Path, frames: int, widths: tuple[int, int]) -> FrameOrder:
    """Lay down the embeddings of *frames* frames, one a chunk, as aggregation does."""
    layout = PredictionLayout(folder)
    layout.work_dir.mkdir(parents=True)
    contigs = Contigs(frames // CHUNKS_PER_CONTIG)
    kept = np.left_shift(1, np.arange(frames, dtype=np.int64) % len(FRAMES)).astype(np.uint8)
    layout.open_frames.write_bytes(kept.tobytes())
    order = FrameOrder(contigs, layout.open_frames, chunk_nt=CHUNK_NT, min_nt=0)
    ids = [name for batch in order.batches() for name in batch.frame_ids()]
    chooser = np.random.default_rng(0)
    for name, width in zip(("dna", "protein"), widths, strict=True):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            rows = file.create_dataset("embeddings", (frames, width), np.float32)
            for start in range(0, frames, 1 << 14):
                end = min(frames, start + (1 << 14))
                rows[start:end] = chooser.random((end - start, width), dtype=np.float32)
            file.create_dataset("sequence_ids", data=ids, dtype=h5py.string_dtype())
    return order


def make_classifier(widths: tuple[int, int], hidden: int) -> Classifier:
    encoders = [Encoder(name="made up", sha256=None, hidden_dim=width) for width in widths]
    card = ClassifierCard(
        name="random",
        chunk_nt=CHUNK_NT,
        dna_model=encoders[0],
        protein_model=encoders[1],
        hidden_dim=hidden,
        weights_sha256="",
    )
    torch.manual_seed(0)
    return Classifier(card, MLPClassifier(sum(widths), hidden))


def cpu_and_wall(job) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    job()
    return time.process_time() - cpu, time.perf_counter() - wall


def read_all(folder: Path) -> None:
    for name in ("dna", "protein"):
        with (folder / f"{name}.h5").open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass


def measure(arguments: argparse.Namespace, widths: tuple[int, int]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        order = make_folder(folder, arguments.frames, widths)
        classifier = make_classifier(widths, arguments.hidden)
        layout, dna, protein = PredictionLayout(folder), folder / "dna.h5", folder / "protein.h5"
        rates, walls, reads = [], [], []
        for _ in range(arguments.rounds):
            reads.append(cpu_and_wall(lambda: read_all(folder))[1])
            cpu, wall = cpu_and_wall(
                lambda: classify_frames(order, classifier, layout, dna=dna, protein=protein, threads=1)
            )
            rates.append(arguments.frames / cpu)
            walls.append(arguments.frames / wall)
        return {
            "bytes": dna.stat().st_size + protein.stat().st_size,
            "frames_per_cpu_second": spread(rates, 0),
            "frames_per_second": spread(walls, 0),
            "reading_alone_s": spread(reads, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=400_000)
    parser.add_argument("--widths", nargs="+", default=["128,128"])
    parser.add_argument("--hidden", type=int, default=256, help="hidden width; the bundled classifier's is 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    widths = [tuple(int(width) for width in text.split(",")) for text in arguments.widths]
    results = {f"{dna},{protein}": measure(arguments, (dna, protein)) for dna, protein in widths}
    report = {
        "machine": machine("numpy", "h5py", "torch"),
        "frames": arguments.frames,
        "hidden_dim": arguments.hidden,
        "rounds": arguments.rounds,
        "threads": 1,
        "widths (DNA,protein)": results,
    }
    print(json.dumps(report, indent=2))
    if arguments.write:
        write_result("classification", report)


if __name__ == "__main__":
    main()
