"""Prediction and training with their embedding on a cluster: the files of a run on threads, byte for byte."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.clusters import environment_of_commands
from tests.strategies import write_fasta
from tests.trainings import make_genomes

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

OF_THE_START = {"run.json", "metrics.prom", "report.html", "virnucpro_mqc.json", ".run.lock"}
"""Files that tell when, where and how long, or how their folder is called."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the commands: a Prefect of their own."""
    return environment_of_commands(tmp_path_factory.mktemp("prefect"))


def results(environment, folder, *arguments):
    """Run a command into *folder*; return its files but logs and what tells of the start, by their paths."""
    command = [sys.executable, "-m", "virnucpro", *arguments, "--output", str(folder), "--devices", "cpu"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "it is done here" not in ended.stderr
    files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {
        str(path): (folder / path).read_bytes()
        for path in files
        if path.name not in OF_THE_START and not {"logs", "work"} & set(path.parts)
    }


@pytest.fixture(scope="module")
def contigs(examples_dir, tmp_path_factory):
    """The shortest of the example contigs."""
    records = sorted((examples_dir / "contigs.fasta").read_text().split(">")[1:], key=len)[:6]
    path = tmp_path_factory.mktemp("contigs") / "contigs.fasta"
    path.write_text("".join(f">{record}" for record in records))
    return path


@pytest.fixture(scope="module")
def predicted(contigs, environment, tmp_path_factory):
    """Return the files of a prediction on threads, without and with embedding."""
    folder = tmp_path_factory.mktemp("threads")
    return {
        cascade: results(environment, folder / cascade, "predict", str(contigs), "--workers", "2", "--cascade", cascade)
        for cascade in ("auto", "off")
    }


@pytest.mark.parametrize("runner", ["dask", "ray"])
@pytest.mark.parametrize("cascade", ["auto", "off"])
def test_a_prediction_on_a_cluster_gives_the_files_of_one_on_threads(
    runner, cascade, contigs, predicted, environment, tmp_path
):
    options = ("--workers", "2", "--runner", runner, "--cascade", cascade)
    on_cluster = results(environment, tmp_path / "out", "predict", str(contigs), *options)
    assert {"contigs.tsv", "viral.fasta"} <= predicted[cascade].keys()
    assert ("dna/embeddings.h5" in on_cluster) == (cascade == "off")
    assert on_cluster == predicted[cascade]


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_contigs_are_computed_by_the_workers_of_a_cluster(runner, environment, tmp_path):
    chooser = random.Random(3)
    lengths_nt = [int(chooser.lognormvariate(8, 1)) + 200 for _ in range(600)]
    contigs = [(f"k{n}", "".join(chooser.choices("ACGT", k=nt))) for n, nt in enumerate(lengths_nt)]
    fasta = str(write_fasta(tmp_path / "contigs.fasta", contigs))
    alone = results(environment, tmp_path / "alone", "predict", fasta, "--workers", "2")
    on_cluster = results(environment, tmp_path / "out", "predict", fasta, "--workers", "2", "--runner", runner)
    assert on_cluster == alone
    logs = sorted((tmp_path / "out" / "logs").glob("worker_*.log"))
    assert len(logs) == 2
    assert all("worker.finished" in log.read_text() for log in logs)


def test_a_training_whose_embedding_is_on_a_cluster_gives_the_weights_of_one_on_threads(environment, tmp_path):
    genomes = [str(path) for path in make_genomes(tmp_path, codons=600)]
    options = ("train", *genomes, "--fragments", "60", "--epochs", "2", "--workers", "2")
    alone = results(environment, tmp_path / "threads", *options)
    on_cluster = results(environment, tmp_path / "dask", *options, "--runner", "dask")
    weights = {name for name in alone if ".safetensors" in name}
    assert len(weights) == 2
    assert {name: alone[name] for name in weights} == {name: on_cluster[name] for name in weights}
