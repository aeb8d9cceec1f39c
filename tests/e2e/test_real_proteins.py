"""The main job on 20,000 real proteins with the bundled encoder; minutes long."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from virnucpro.store.reader import read_embeddings

pytestmark = [pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("num_proteins", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_real_proteins_give_the_same_bytes_with_1_2_and_3_workers(tmp_path, data_dir, num_proteins):
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as file:
        records = ("\n" + file.read()).split("\n>")[1 : num_proteins + 1]
    fasta = tmp_path / "proteins.fasta.gz"
    with gzip.open(fasta, "wt") as file:
        file.write("".join(f">{record}\n" for record in records))
    ids = tuple(record.split()[0] for record in records)
    assert len(ids) == num_proteins
    digests = {}
    for workers in (2, 1, 3):
        out = tmp_path / str(workers)
        began_s = time.monotonic()
        command = [sys.executable, "-m", "virnucpro", "embed", fasta, "-o", out, "--devices", "cpu"]
        subprocess.run([*command, "--workers", str(workers)], check=True, env={**os.environ, "COLUMNS": "120"})
        print(f"{workers} workers: {time.monotonic() - began_s:.0f} s")
        digests[workers] = hashlib.sha256((out / "embeddings.h5").read_bytes()).hexdigest()
        with read_embeddings(out) as embeddings:
            assert embeddings.ids == ids
            assert np.isfinite(embeddings.to_numpy()).all()
    assert len(set(digests.values())) == 1
    subprocess.run([sys.executable, "-m", "virnucpro", "verify", tmp_path / "3"], check=True)
