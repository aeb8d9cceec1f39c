"""
How many tokens a second one worker's loader gives to its device: reading, checking, tokenising and packing, no model.

Run it as ``python benchmarks/feeding.py [--rounds 5] [--processes 0 1] [--write]``. ``chunks`` are windows of 30 to 166
residues of real proteins, ``proteins`` whole ones, and ``DNA`` pieces of 500 nt of real contigs, in batches that suit
a GPU. The files are in the system's cache. Each kind takes its turn in a round, with each number of loader processes;
with 0 the thread that feeds a GPU does it. The clock starts when the loader's processes are at work: each takes some
seconds to start, which the first batches of a run wait for.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_common import EXAMPLES, machine, spread, write_result
from workloads import SEED, chunks, proteins, write_fasta

from virnucpro.config import InputRules
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.packing import plan_blocks, tokens_of
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer
from virnucpro.models.registry import DNABERT_S, ESM2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.data.collators import Tokenizer
    from virnucpro.models.registry import ModelFamily

TOKENS = 32_768
"""Of a batch."""
PIECE_NT = 500
MAX_LETTERS = 1022


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each kind, roughly")
    parser.add_argument("--processes", type=int, nargs="*", default=[0], help="of the loader, one row for each number")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        feeds = _feeds(Path(name), options.tokens)
        for _ in range(options.rounds + 1):  # the first one warms up
            for kind, feed in feeds.items():
                for processes in options.processes:
                    _measure(feed, processes, figures.setdefault(f"{kind}, {processes} processes", {}))
    report: dict[str, Any] = {
        "machine": machine("numpy", "torch", "tokenizers"),
        "batch_tokens": TOKENS,
        "rounds": options.rounds,
        "tokens": options.tokens,
        **{name: {unit: spread(values[1:], 0) for unit, values in units.items()} for name, units in figures.items()},
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("feeding", report)


class Feed:
    """One kind of sequences, indexed, and the batches of them."""

    def __init__(self, folder: Path, records: list[tuple[str, str]], family: ModelFamily, tokenizer: Tokenizer) -> None:
        rules = InputRules(sequence_kind=family.sequence_kind)
        fasta = write_fasta(folder / f"{family.sequence_kind}_{len(records)}.fasta", records)
        self.index = SequenceIndex.build([fasta], fasta.with_suffix(".index"), unpack_dir=folder, rules=rules)
        self.collator = VarlenCollator(tokenizer, max_residues=MAX_LETTERS)
        tokens = tokens_of(self.index.lengths[:], max_residues=MAX_LETTERS, letters_per_token=family.letters_per_token)
        self.batches: Sequence[list[int]] = [list(block) for block in plan_blocks(tokens, token_budget=TOKENS)]


def _feeds(folder: Path, tokens: int) -> dict[str, Feed]:
    contigs = [
        part.partition("\n")[2].replace("\n", "") for part in (EXAMPLES / "contigs.fasta").read_text().split(">")
    ]
    generator = random.Random(SEED)
    usable = [contig for contig in contigs if len(contig) > PIECE_NT]
    pieces = []
    for number in range(int(tokens * DNABERT_S.letters_per_token) // PIECE_NT):
        contig = generator.choice(usable)
        start = generator.randint(0, len(contig) - PIECE_NT)
        pieces.append((f"piece_{number}", contig[start : start + PIECE_NT].upper()))
    whole = proteins()
    copies = max(1, tokens // sum(len(residues) for _, residues in whole))
    many = [(f"{name}_{copy}", residues) for copy in range(copies) for name, residues in whole]
    return {
        "chunks": Feed(folder, chunks(tokens // 100), ESM2, ProteinTokenizer()),
        "proteins": Feed(folder, many, ESM2, ProteinTokenizer()),
        "DNA": Feed(folder, pieces, DNABERT_S, DnaTokenizer()),
    }


def _measure(feed: Feed, processes: int, figures: dict[str, list[float]]) -> None:
    loader = create_async_dataloader(
        IndexBasedDataset(feed.index), feed.collator, feed.batches, loader_processes=processes
    )
    batches = iter(loader)
    for _ in range(1 + 2 * processes):  # those that the processes have made while they started
        next(batches)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    total = sum(batch.num_tokens for batch in batches)
    figures.setdefault("tokens_per_second", []).append(total / (time.perf_counter() - began_s))
    if not processes:
        figures.setdefault("tokens_per_cpu_second", []).append(total / (time.process_time() - began_cpu_s))


if __name__ == "__main__":
    main()
