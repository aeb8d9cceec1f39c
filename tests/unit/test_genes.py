"""Genes of the chosen contigs: the same files by any number of processes, after a kill, and of no other contigs."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.strategies import write_fasta
from virnucpro.calls.gene_files import GFF_HEADER, gene_lines
from virnucpro.config import InputRules
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError, StoppedError
from virnucpro.pipeline.prediction import genes, part_jobs, part_work
from virnucpro.pipeline.prediction.genes import write_genes
from virnucpro.pipeline.prediction.part_jobs import GeneJob
from virnucpro.run_layout import PredictionLayout


def contigs_of(seed=5, count=40):
    chooser = np.random.default_rng(seed)
    return [(f"k{n}", "".join(chooser.choice(list("ACGT"), chooser.integers(50, 6_000)))) for n in range(count)]


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(genes, "PART_NT", 9_000)
    monkeypatch.setattr(GeneJob, "worker_nt", 20_000)
    layout = PredictionLayout(tmp_path / "out")
    layout.work_dir.mkdir(parents=True)
    files = [write_fasta(tmp_path / "a.fa", contigs_of()[:25]), write_fasta(tmp_path / "b.fa", contigs_of()[25:])]
    rules = InputRules(sequence_kind="DNA", allow_empty=True)
    SequenceIndex.ensure(files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=rules)
    return GeneJob(layout=layout, fingerprint="a1" * 32)


CHOSEN = np.arange(40) % 3 != 0
CHOSEN[20:36] = False


def written(job, chosen=CHOSEN, **arguments):
    number = write_genes(job, chosen, **arguments)
    assert not job.layout.contig_parts.exists()
    return number, job.layout.genes.read_bytes(), job.layout.gene_proteins.read_bytes()


@pytest.mark.parametrize("chosen", [CHOSEN, np.ones(40, dtype=np.bool_), np.zeros(40, dtype=np.bool_)])
@pytest.mark.parametrize("workers", [1, 2])
def test_they_are_those_of_the_chosen_contigs_in_the_order_of_the_input(job, chosen, workers):
    seen = []
    expected = gene_lines(contig for contig, has_genes in zip(contigs_of(), chosen, strict=True) if has_genes)
    found = written(job, chosen, workers=workers, advance=lambda *progress: seen.append(progress))
    assert found == (expected.genes, GFF_HEADER + expected.gff, expected.proteins)
    assert (expected.genes > 30) == chosen.any()
    assert seen[-1:] == [(chosen.sum(), chosen.sum(), "searched for genes")] * bool(chosen.any())


def test_a_start_after_a_kill_finds_those_of_the_other_parts(job, monkeypatch):
    expected = written(job, workers=1)
    find, calls = part_jobs.gene_lines, []

    def killed(contigs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return find(contigs)

    monkeypatch.setattr(part_jobs, "gene_lines", killed)
    with pytest.raises(KeyboardInterrupt):
        write_genes(job, CHOSEN, workers=1)
    parts = sorted(job.layout.contig_parts.glob("*.genes.*"))
    assert len(parts) == 2
    parts[0].write_bytes(parts[0].read_bytes()[:-1])
    del calls[:]
    monkeypatch.setattr(part_jobs, "gene_lines", lambda contigs: calls.append(1) or find(contigs))
    assert written(job, workers=1) == expected
    whole = len(calls)
    del calls[:]
    assert written(job, workers=1) == expected
    assert len(calls) == whole + 1 > 3, "the damaged part is made again, the whole one is not"


def test_other_hosts_get_parts_where_there_is_much_to_do(job, monkeypatch):
    expected, given = written(job, workers=1), []

    def elsewhere(work, parts):
        given.extend(parts)
        return [work(part) for part in parts]

    monkeypatch.setattr(part_work, "taking_part", lambda _: np.errstate())
    assert written(job, elsewhere=elsewhere) == expected
    assert len(given) > 3
    del given[:]
    monkeypatch.setattr(GeneJob, "worker_nt", 10**9)
    assert written(job, elsewhere=elsewhere) == expected
    assert not given


def test_an_error_leaves_neither_file(job, monkeypatch):
    read = genes.read_part

    def refuse(job, part):
        if part.start:
            raise ResultError(job.path_of(part), "is damaged")
        return read(job, part)

    monkeypatch.setattr(genes, "read_part", refuse)
    with pytest.raises(ResultError):
        write_genes(job, CHOSEN)
    assert [path.name for path in job.layout.output_dir.iterdir()] == [job.layout.work_dir.name]


def test_a_stop_ends_it(job):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        write_genes(job, CHOSEN, stop=stop)
    assert not job.layout.genes.exists()
