"""The same worker, the same files, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from virnucpro.api import embed_fasta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("precision", "least_cosine"), [("fp32", 0.999999), ("bf16", 0.999), ("fp16", 0.999)])
def test_a_gpu_gives_the_rows_that_a_cpu_gives(tmp_path, examples_dir, precision, least_cosine):
    fasta = examples_dir / "proteins.fasta"
    with embed_fasta(fasta, tmp_path / "cpu", devices="cpu") as on_cpu:
        cpu = on_cpu.to_numpy().astype(np.float64)
    with embed_fasta(fasta, tmp_path / "gpu", devices="0", precision=precision) as on_gpu:
        gpu = on_gpu.to_numpy().astype(np.float64)
    cosine = (cpu * gpu).sum(1) / np.linalg.norm(cpu, axis=1) / np.linalg.norm(gpu, axis=1)
    assert cosine.min() >= least_cosine
