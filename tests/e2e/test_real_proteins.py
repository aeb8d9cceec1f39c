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

pytestmark = [pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(1500)]


def test_twenty_thousand_proteins_give_the_same_bytes_with_1_2_and_3_workers(tmp_path, data_dir):
    fasta = data_dir / "proteins" / "uniprot_20000.fasta.gz"
    with gzip.open(fasta, "rt") as file:
        ids = tuple(line[1:].split()[0] for line in file if line.startswith(">"))
    assert len(ids) == 20_000
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
