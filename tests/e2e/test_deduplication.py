"""A sequence that comes ten times is computed once: what that costs and that every copy has the very same row."""

from __future__ import annotations

import gzip
import os
import random
import resource
import subprocess
import sys

import pytest

from virnucpro.store.reader import read_embeddings

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.data, pytest.mark.timeout(900)]

NUM_PROTEINS = 600
COPIES = 10


def embed(fasta, out):
    """Run the command; return the CPU seconds of it and its worker."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "virnucpro", "embed", fasta, "-o", out, "--devices", "cpu", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_ten_times_the_same_costs_at_most_1_3_times_as_much_and_gives_the_same_vectors(tmp_path, data_dir):
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as file:
        found = ("\n" + file.read()).split("\n>")[1:]
    proteins = list({record.partition("\n")[2].replace("\n", ""): None for record in found})[:NUM_PROTEINS]
    once = [(f"p{number}", sequence) for number, sequence in enumerate(proteins)]
    tenfold = [(f"{name}/{copy}", sequence) for name, sequence in once for copy in range(COPIES)]
    random.Random(7).shuffle(tenfold)
    seconds = {}
    for name, records in (("once", once), ("tenfold", tenfold)):
        fasta = tmp_path / f"{name}.fasta"
        fasta.write_text("".join(f">{sequence_id}\n{sequence}\n" for sequence_id, sequence in records))
        seconds[name] = embed(fasta, tmp_path / name)
    ratio = seconds["tenfold"] / seconds["once"]
    print(f"CPU seconds {seconds}, ratio {ratio:.3f}")
    with read_embeddings(tmp_path / "once") as single, read_embeddings(tmp_path / "tenfold") as copies:
        assert copies.ids == tuple(name for name, _ in tenfold)
        rows = single.to_numpy([name.partition("/")[0] for name in copies.ids])
        assert copies.to_numpy().tobytes() == rows.tobytes()
    assert ratio <= 1.3
