"""
The sequences that embedding is measured on, all of them made from the 400 real proteins in ``examples/``.

``proteins`` is the file itself: a random sample of UniProt, 8 to 1,487 residues, median 290, truncated to 1,022 by
every program. ``chunks`` are windows of 30 to 166 residues, lengths uniform, as open frames of 500-base chunks of
contigs. A sample of fewer than 400 sequences flatters every packed method, so none is smaller.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from bench_common import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

SEED = 20261121
MAX_RESIDUES = 1022
CHUNK_RESIDUES = (30, 166)


def proteins() -> list[tuple[str, str]]:
    """Return (id, residues) of the example proteins."""
    records: list[tuple[str, list[str]]] = []
    for line in (EXAMPLES / "proteins.fasta").read_text().splitlines():
        if line.startswith(">"):
            records.append((line[1:].split()[0], []))
        else:
            records[-1][1].append(line)
    return [(name, "".join(lines)) for name, lines in records]


def chunks(count: int = 400) -> list[tuple[str, str]]:
    """Return *count* windows of the example proteins, of uniformly distributed length."""
    generator = random.Random(SEED)
    long_enough = [residues for _, residues in proteins() if len(residues) >= CHUNK_RESIDUES[1]]
    windows = []
    for number in range(count):
        source, length = generator.choice(long_enough), generator.randint(*CHUNK_RESIDUES)
        start = generator.randint(0, len(source) - length)
        windows.append((f"chunk_{number + 1}", source[start : start + length]))
    return windows


def whole_batches(records: list[tuple[str, str]], *, token_budget: int, batches: int) -> list[tuple[str, str]]:
    """Return the records of *batches* whole batches, evenly spaced over the length-sorted *records*."""
    ordered = sorted(records, key=lambda record: -len(record[1]))
    cut: list[list[tuple[str, str]]] = [[]]
    tokens = 0
    for record in ordered:
        if cut[-1] and tokens + len(record[1]) + 2 > token_budget:
            cut.append([])
            tokens = 0
        cut[-1].append(record)
        tokens += len(record[1]) + 2
    complete = cut[:-1]
    chosen = [complete[round(step * (len(complete) - 1) / max(1, batches - 1))] for step in range(batches)]
    return [record for batch in chosen for record in batch]


def write_fasta(path: Path, records: list[tuple[str, str]]) -> Path:
    """Write *records*, one line a sequence."""
    path.write_text("".join(f">{name}\n{residues}\n" for name, residues in records))
    return path
