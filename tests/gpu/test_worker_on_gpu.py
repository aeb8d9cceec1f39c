"""The same run, the same files, on a GPU: with all of the product's packages, real processes, a probed budget."""

from __future__ import annotations

import json

import numpy as np
import pytest

for package in ("esm", "structlog", "h5py"):
    pytest.importorskip(package, reason="a run needs the product's packages")

from virnucpro.api import embed_fasta  # noqa: E402


@pytest.mark.parametrize(("precision", "least_cosine"), [("fp32", 0.999999), ("bf16", 0.999), ("fp16", 0.999)])
def test_a_gpu_gives_the_rows_that_a_cpu_gives(tmp_path, examples_dir, precision, least_cosine):
    fasta = examples_dir / "proteins.fasta"
    with embed_fasta(fasta, tmp_path / "cpu", devices="cpu") as on_cpu:
        cpu = on_cpu.to_numpy().astype(np.float64)
    with embed_fasta(fasta, tmp_path / "gpu", devices="0", precision=precision) as on_gpu:
        gpu = on_gpu.to_numpy().astype(np.float64)
    cosine = (cpu * gpu).sum(1) / np.linalg.norm(cpu, axis=1) / np.linalg.norm(gpu, axis=1)
    assert cosine.min() >= least_cosine


def test_a_run_on_a_gpu_records_its_probe_and_its_kernel(tmp_path, examples_dir):
    embed_fasta(examples_dir / "proteins.fasta", tmp_path / "out", devices="0").close()
    manifest = json.loads((tmp_path / "out" / "run.json").read_text())
    (probe,) = manifest["plan"]["probes"]
    assert manifest["settings"]["attention_kernel"] == probe["attention_kernel"]
    assert manifest["ranks"][0]["attention_kernel"] == probe["attention_kernel"]
    assert manifest["plan"]["token_budget"] >= probe["token_budget"] > 0
    assert probe["trials"]


def test_two_runs_with_one_budget_give_the_same_bytes(tmp_path, examples_dir):
    for name in ("one", "two"):
        embed_fasta(examples_dir / "proteins.fasta", tmp_path / name, devices="0", token_budget=4096).close()
    assert (tmp_path / "one" / "embeddings.h5").read_bytes() == (tmp_path / "two" / "embeddings.h5").read_bytes()
