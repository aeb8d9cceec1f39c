"""Genes of the chosen contigs: the same files by any number of processes, after a kill, and of no other contigs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.contig_runs import compute
from tests.strategies import write_fasta
from virnucpro import durable
from virnucpro.calls.gene_files import GFF_HEADER, gene_lines
from virnucpro.config import InputRules
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError, StoppedError
from virnucpro.pipeline.prediction import contig_run, genes
from virnucpro.pipeline.prediction.genes import Genes
from virnucpro.run_layout import PredictionLayout
from virnucpro.telemetry.run_telemetry import RunTelemetry


def contigs_of(seed=5, count=40):
    chooser = np.random.default_rng(seed)
    return [(f"k{n}", "".join(chooser.choice(list("ACGT"), chooser.integers(50, 6_000)))) for n in range(count)]


@pytest.fixture
def job(tmp_path):
    layout = PredictionLayout(tmp_path / "out")
    layout.work_dir.mkdir(parents=True)
    files = [write_fasta(tmp_path / "a.fa", contigs_of()[:25]), write_fasta(tmp_path / "b.fa", contigs_of()[25:])]
    rules = InputRules(sequence_kind="DNA", allow_empty=True)
    SequenceIndex.ensure(files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=rules)
    return Genes(layout=layout, fingerprint="a1" * 32, unit_nt=9_000, worker_nt=20_000)


CHOSEN = np.arange(40) % 3 != 0
CHOSEN[20:36] = False


def write_genes(job, chosen, **arguments):
    job.choose(chosen)
    return compute([job], **arguments).counts["genes"]


def written(job, chosen=CHOSEN, **arguments):
    number = write_genes(job, chosen, **arguments)
    durable.remove_tree(job.layout.contig_parts)
    return number, job.layout.genes.read_bytes(), job.layout.gene_proteins.read_bytes()


@pytest.fixture
def here(monkeypatch):
    """Everything is computed in this process."""
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)


@pytest.mark.parametrize("chosen", [CHOSEN, np.ones(40, dtype=np.bool_), np.zeros(40, dtype=np.bool_)])
@pytest.mark.parametrize("workers", [1, 2])
def test_they_are_those_of_the_chosen_contigs_in_the_order_of_the_input(job, chosen, workers):
    telemetry = RunTelemetry()
    expected = gene_lines(contig for contig, has_genes in zip(contigs_of(), chosen, strict=True) if has_genes)
    found = written(job, chosen, workers=workers, telemetry=telemetry)
    assert found == (expected.genes, GFF_HEADER + expected.gff, expected.proteins)
    assert (expected.genes > 30) == chosen.any()
    shown = telemetry.snapshot().embeddings
    assert [(one.model, one.rows, one.records) for one in shown] == [("genes", chosen.sum(), chosen.sum())] * bool(
        chosen.any()
    )


@pytest.mark.usefixtures("here")
def test_a_start_after_a_kill_finds_those_of_the_other_units(job, monkeypatch):
    expected = written(job)
    find, calls = genes.gene_lines, []

    def killed(contigs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return find(contigs)

    monkeypatch.setattr(genes, "gene_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        write_genes(job, CHOSEN)
    parts = sorted(job.layout.contig_parts.glob("*.genes.*"))
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    del calls[:]
    monkeypatch.setattr(genes, "gene_lines", lambda contigs: calls.append(1) or find(contigs))
    assert written(job) == expected
    whole = len(calls)
    del calls[:]
    assert written(job) == expected
    assert len(calls) == whole + 1 > 3, "the damaged part is made again, the whole one is not"


@pytest.mark.usefixtures("here")
def test_an_error_leaves_neither_file(job, monkeypatch):
    read = Genes.read

    def refuse(job, contigs):
        if contigs.start:
            raise ResultError(job.path_of(contigs), "is damaged")
        return read(job, contigs)

    monkeypatch.setattr(Genes, "read", refuse)
    with pytest.raises(ResultError):
        write_genes(job, CHOSEN)
    assert [path.name for path in job.layout.output_dir.iterdir()] == [job.layout.work_dir.name]


def test_a_stop_ends_it(job):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        write_genes(job, CHOSEN, stop=stop)
    assert not job.layout.genes.exists()
