"""
Throughput of splitting contigs into chunks and translating six frames, alone and as the whole stage.

Run it as ``python benchmarks/fragments.py [--rounds 5] [--write]``. The contigs are real genomes and genome windows
(``train_*.fna.gz`` of ``../shared/data/viral``, or of ``--genomes``; a record with a repeated id is skipped),
as they are and cut into reads of 150 nucleotides. ``translate`` is chunk bounds, both strands, six frames and the
extraction of the open ones, on letters in memory; ``write`` is the whole stage: the index opened, records read and
compared with it, all files written and made durable. The pass that checks the input is measured beside them. CPU
seconds are those of the process, system calls included; the rows take turns. Memory is the peak resident set of the
process, which holds all letters for ``translate``. ``--write`` keeps the figures in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_common import machine, spread, write_result

from virnucpro.choices import BadRecordPolicy, SequenceKind
from virnucpro.config import InputRules
from virnucpro.data.fragments import write_fragments
from virnucpro.data.frames import chunk_bounds, open_frames, stream_nucleotides
from virnucpro.data.sequence_index import SequenceIndex

GENOMES = Path(__file__).parents[2] / "shared" / "data" / "viral"
READ_NT = 150
CHUNKS_PER_CALL = 2048
GENOME_JOBS = [("translate", 500), ("write", 500), ("translate", 300), ("write", 300)]


def build(inputs: list[Path], folder: Path) -> SequenceIndex:
    """Check and index the contigs."""
    rules = InputRules(sequence_kind=SequenceKind.DNA, on_bad_record=BadRecordPolicy.SKIP)
    return SequenceIndex.build(inputs, folder / "index", unpack_dir=folder / "unpacked", rules=rules)


def letters_of(index: SequenceIndex) -> str:
    """Return all contigs, end to end, in upper case."""
    ends = np.cumsum([file.num_records for file in index.files])
    by_file = np.split(index.in_input_order(), ends[:-1])
    return b"".join(piece for positions in by_file for piece in stream_nucleotides(index, positions)).decode().upper()


def write_reads(letters: str, path: Path) -> None:
    """Cut *letters* into reads."""
    with path.open("w") as file:
        for number, at in enumerate(range(0, len(letters) - READ_NT, READ_NT)):
            file.write(f">read_{number}\n{letters[at : at + READ_NT]}\n")


def translate(letters: bytes, chunk_nt: int) -> tuple[int, int]:
    """Split and translate *letters* as one contig; return chunks and open frames."""
    starts, ends = chunk_bounds(len(letters), chunk_nt)
    frames = 0
    for at in range(0, len(starts), CHUNKS_PER_CALL):
        some = slice(at, at + CHUNKS_PER_CALL)
        first, last = int(starts[at]), int(ends[some][-1])
        found = open_frames(letters[first:last], starts[some] - first, ends[some] - first)
        frames += len(found.frames)
    return len(starts), frames


def write(folder: Path, chunk_nt: int) -> tuple[int, int]:
    """Run the whole stage on the index in *folder*; return chunks and open frames."""
    index = SequenceIndex.open(folder / "index")
    numbers = range(len(index.files))
    counts = write_fragments(
        index,
        chunk_nt=chunk_nt,
        min_nt=0,
        nucleotide=[folder / f"{number}.fa" for number in numbers],
        protein=[folder / f"{number}.faa" for number in numbers],
        chunked=None,
        open_frames=folder / "open_frames.u8",
    )
    return counts.chunks, counts.frames


def measure(name: str, inputs: list[Path], folder: Path, jobs: list[tuple[str, int]], rounds: int) -> list[dict]:
    """Time every job, (what, chunk length), on *inputs*, after one unmeasured round."""
    folder.mkdir()
    start = time.process_time()
    index = build(inputs, folder)
    index_s = time.process_time() - start
    letters = letters_of(index).encode()
    seconds: dict[tuple[str, int], list[float]] = {job: [] for job in jobs}
    found = {}
    for number in range(rounds + 1):
        for what, chunk_nt in jobs:
            start = time.process_time()
            found[what, chunk_nt] = translate(letters, chunk_nt) if what == "translate" else write(folder, chunk_nt)
            if number:
                seconds[what, chunk_nt].append(time.process_time() - start)
    return [
        {
            "input": name,
            "contigs": len(index),
            "megabases": round(len(letters) / 1e6, 1),
            "index_cpu_seconds": round(index_s, 2),
            "what": what,
            "chunk_nt": chunk_nt,
            "chunks": found[what, chunk_nt][0],
            "open_frames": found[what, chunk_nt][1],
            "chunks_per_cpu_second": spread([found[what, chunk_nt][0] / one for one in seconds[what, chunk_nt]], 0),
            "megabases_per_cpu_second": spread([len(letters) / 1e6 / one for one in seconds[what, chunk_nt]], 1),
        }
        for what, chunk_nt in jobs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--genomes", type=Path, default=GENOMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    genomes = sorted(options.genomes.glob("train_*.fna.gz"))
    if not genomes:
        parser.error(f"no train_*.fna.gz in {options.genomes}: name a folder with --genomes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = measure("genomes", genomes, folder / "genomes", GENOME_JOBS, options.rounds)
        write_reads(letters_of(SequenceIndex.open(folder / "genomes" / "index")), folder / "reads.fa")
        rows += measure(
            f"reads of {READ_NT}", [folder / "reads.fa"], folder / "reads", [("write", 500)], options.rounds
        )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report = {"machine": machine("numpy"), "rounds": options.rounds, "peak_mib": round(peak_mib), "rows": rows}
    print(json.dumps(report, indent=2))
    if options.write:
        print(write_result("fragments", report))


if __name__ == "__main__":
    main()
