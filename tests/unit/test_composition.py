"""Composition scores: the same bytes by any number of processes, after a kill, a damaged file, and a lost process."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.contig_runs import CHUNK_NT, compute, homology, job_in
from tests.settings import prediction_config
from tests.strategies import write_fasta
from virnucpro import durable
from virnucpro.calls.evidence import COLUMNS
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.choices import DEFAULT_CLASSIFIER, WrittenGenes
from virnucpro.config import RunLimits
from virnucpro.data.frames import chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ExitCode, OutputError, StoppedError, WorkersFailedError
from virnucpro.models.classifier_files.card import locate_classifier, read_card
from virnucpro.models.contigs.contig_model import CompositionModel
from virnucpro.models.contigs.homology import is_searched
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.executor import LocalRanks
from virnucpro.pipeline.prediction import composition, contig_run, contig_work, genes
from virnucpro.pipeline.prediction.composition import Composition, Homology
from virnucpro.pipeline.prediction.contig_work import ContigUnits, divided, units_of
from virnucpro.pipeline.prediction.contig_worker import contig_worker
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.run.stages import StagedRun
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.report.prediction.page import write_report
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.telemetry.run_telemetry import RunTelemetry

RARE = (pytest.mark.slow, pytest.mark.long)
UNIT_NT = 250_000


@pytest.fixture(scope="module")
def model():
    folder = locate_classifier(DEFAULT_CLASSIFIER)
    return CompositionModel(folder, read_card(folder), searches_proteins=True)


@pytest.fixture
def job(tmp_path, model):
    return the_job(tmp_path, model)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, model):
    """Counts and bytes, computed in this process."""
    with pytest.MonkeyPatch.context() as patch:
        return here(the_job(tmp_path_factory.mktemp("expected"), model), patch)


def the_job(tmp_path, model):
    chooser = random.Random(3)
    contigs = [(f"k{n}", "".join(chooser.choices("ACGT", k=chooser.randint(1, 3_000)))) for n in range(20)]
    contigs[7] = ("unknown", "N" * 700)
    contigs[11] = ("long", "".join(chooser.choices("ACGT", k=2 * LONG_CONTIG_NT)))
    files = [write_fasta(tmp_path / "a.fa", contigs[:9]), write_fasta(tmp_path / "b.fa", contigs[9:])]
    return job_in(tmp_path / "out", files, model)


def worker(name):
    return f"{__name__}:{name}"


def done(job, **arguments):
    return compute([job, homology(job)], **arguments)


def scores(job, **arguments):
    counts = done(job, **arguments).counts
    durable.remove_tree(job.layout.contig_parts)
    return counts, *(path.read_bytes() for path in (job.layout.composition_scores, job.layout.composition_windows))


def here(job, monkeypatch):
    """Have everything computed in this process."""
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    return scores(job)


def test_every_contig_is_in_one_unit_and_units_are_of_like_size(monkeypatch):
    chooser = np.random.default_rng(1)
    lengths = chooser.integers(1, 50_000, 3_000)
    units = units_of(lengths, UNIT_NT)
    assert [contig for unit in units for contig in unit] == list(range(len(lengths)))
    sizes = [int(lengths[unit.start : unit.stop].sum()) for unit in units]
    assert max(sizes) <= UNIT_NT
    assert min(sizes[:-1]) > UNIT_NT - 50_000
    assert [len(unit) for unit in units_of(np.array([9_000_000, 5, 5]), UNIT_NT)] == [1, 2]
    assert max(map(len, units_of(np.ones(10_000), UNIT_NT))) == contig_work.UNIT_CONTIGS
    monkeypatch.setattr(contig_work, "MOST_UNITS", 10)
    assert len(units_of(lengths, UNIT_NT)) <= 11
    assert units_of(np.empty(0, dtype=np.int64), UNIT_NT) == []


@pytest.mark.parametrize("number", [1, 2, 15, 16, 17, 4096])
def test_a_unit_is_divided_into_parts_of_like_size_until_a_contig_is_alone(number):
    contigs = range(7, 7 + number)
    parts = divided(contigs, 16)
    assert [contig for part in parts for contig in part] == list(contigs)
    assert len(parts) == min(number, 16)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_any_number_of_processes_gives_the_same_bytes(job, expected):
    counts, contigs, windows = dict(expected[0]), *expected[1:]
    of_contigs = np.frombuffer(contigs, np.float32)
    index = SequenceIndex.open(job.layout.contig_index)
    order = index.in_input_order()
    too_short = index.lengths[order] < job.min_nt
    assert np.isnan(of_contigs[too_short]).all()
    assert np.isnan(of_contigs[[name == "unknown" for name in index.sequence_ids(order)]]).all()
    searched = counts.pop("searched")
    assert 0 < searched <= counts["scored"]
    assert counts == {"contigs": 20, "scored": int((~np.isnan(of_contigs)).sum())}
    assert counts["scored"] == 19 - too_short.sum() > 15
    assert len(windows) == 4 * chunks_per_contig(np.array([2 * LONG_CONTIG_NT]), CHUNK_NT)[0]
    for workers in (1, 2, None):
        assert scores(job, workers=workers) == expected


def test_contigs_that_are_searched_are_judged_and_no_others(job, expected, monkeypatch):
    plain = replace(job, model=replace(job.model, searches_proteins=False))
    before, (counts, contigs, _) = np.frombuffer(here(plain, monkeypatch)[1], np.float32), expected
    after = np.frombuffer(contigs, np.float32)
    searched = is_searched(before)
    assert searched.sum() == counts["searched"] > 5
    np.testing.assert_array_equal(after[~searched], before[~searched])
    assert (after[searched] != before[searched]).all()
    assert ((after[searched] > 0) & (after[searched] < 1)).all()


@pytest.mark.parametrize(
    ("searched_mb", "workers", "number"),
    [(50, 16, 32), (5, 16, 16), (5, 2, 4), (500, 16, 256), (100, 1, 50), (0.4, 1, 1), (2, 3, 3), (0.4, 16, 1)],
)
def test_each_process_has_as_many_units_to_search_and_all_are_as_large(searched_mb, workers, number, model, tmp_path):
    lengths = np.resize([20_000, 0, 300, 5_000, 0, 1_500], int(searched_mb * 1e6) // 26_800 * 6)
    work = Homology(layout=PredictionLayout(tmp_path), model=model, chunk_nt=500, min_nt=0, fingerprint="")
    units = work.units(lengths, workers)
    assert [one.start for one in units] == [0, *(one.stop for one in units[:-1])]
    assert units[-1].stop == len(lengths)
    assert len(units) == number
    sizes = [lengths[one.start : one.stop].sum() for one in units]
    assert max(sizes) - min(sizes) <= 2 * 20_000


def test_a_contig_that_is_longer_than_a_unit_is_one(job):
    units = homology(job, unit_nt=1_000).units(np.array([0, 5_000, 0, 0, 100]), 1)
    assert [one.stop for one in units] == sorted({one.stop for one in units})
    assert units[0].start == 0
    assert units[-1].stop == 5


def nothing(share):
    pass


def test_a_start_after_a_kill_in_the_search_gives_the_same(job, expected, monkeypatch):
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    judge, calls = composition.judge_by_homology, []

    def killed(index, unit, model, found, on_share):
        calls.append(unit)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return judge(index, unit, model, found, on_share)

    monkeypatch.setattr(composition, "judge_by_homology", killed)
    with pytest.raises(KeyboardInterrupt):
        done(job)
    assert len(list(job.layout.contig_parts.glob("*.homology.*"))) == 1
    assert here(job, monkeypatch) == expected
    assert len(calls) == len(set(calls)) + 1, "the unit that was whole is not searched again"


def test_files_of_another_division_of_the_search_are_not_taken(job, expected, monkeypatch):
    judge, late = composition.judge_by_homology, homology(job)

    def judged(index, unit, model, found, on_share):
        durable.write_bytes(
            late.path_of(range(20)), b"4" * 20 * 4 * len(COLUMNS), seal=True
        )  # by a worker of a start that was killed
        return judge(index, unit, model, found, on_share)

    monkeypatch.setattr(composition, "judge_by_homology", judged)
    assert here(job, monkeypatch) == expected


def test_what_is_there_is_not_computed_again_unless_it_is_damaged(job, expected, monkeypatch):
    job.layout.contig_parts.mkdir()
    units = ContigUnits([job], 1)
    parts = units.of(job)
    assert len(parts) > 4
    for part in parts[:4]:
        job.write(units.index, part, job.load(), nothing)
    damaged = bytearray(job.path_of(parts[1]).read_bytes())
    damaged[2] ^= 1
    job.path_of(parts[1]).write_bytes(damaged)
    job.path_of(parts[2]).write_bytes(b"")
    durable.write_bytes(job.path_of(parts[3]), b"other scores", seal=True)  # of other contigs
    other = job.path_of(parts[0]).with_name("0123456789abcdef.0.f32")  # of other settings
    other.write_bytes(b"x")
    computed, score = [], composition.score_by_composition

    def noted(index, part, *args, **settings):
        computed.append(part)
        return score(index, part, *args, **settings)

    monkeypatch.setattr(composition, "score_by_composition", noted)
    assert here(job, monkeypatch) == expected
    assert sorted(computed, key=parts.index) == [*parts[1:4], *parts[4:]]


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_computes_with_one_thread_and_leaves_others_what_they_had(job, monkeypatch, fails):
    def threads():
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    def noted(*_, **__):
        seen.extend(threads())
        if fails:
            raise KeyboardInterrupt
        return b"", b""

    seen: list[int] = []
    monkeypatch.setattr(composition, "score_by_composition", noted)
    with threadpool_limits(3, user_api="blas"):
        with suppress(KeyboardInterrupt):
            job.write(job.open_index(), range(2), None, nothing)
        assert set(threads()) == {3}
    assert set(seen) == {1}


def test_a_process_that_scores_starts_without_what_it_does_not_use():
    code = "import sys, virnucpro.pipeline.work.worker_process, virnucpro.pipeline.prediction.contig_worker, "
    code += "virnucpro.pipeline.prediction.composition, virnucpro.pipeline.prediction.genes; "
    code += "print({'torch', 'prefect', 'pydantic', 'prometheus_client', 'urllib.request'} & {*sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert loaded.stdout == "set()\n"


def test_an_input_without_contigs_has_empty_files(tmp_path, model):
    (tmp_path / "in.fa").write_text("")
    assert scores(job_in(tmp_path / "out", [tmp_path / "in.fa"], model)) == (
        {"contigs": 0, "scored": 0, "searched": 0},
        b"",
        b"",
    )


def worker_that_dies(rank, world_size, results_queue, works, *more):
    """The first process dies with the unit that it was given."""
    if rank == 0 and more[-1].attempt == 1:
        composition.score_by_composition = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    contig_worker(rank, world_size, results_queue, works, *more)


def worker_that_notes_its_units(rank, world_size, results_queue, works, *more):
    """Every unit takes so long that each process has one."""
    score, folder = composition.score_by_composition, works[0].layout.output_dir

    def noted(index, unit, *args, **settings):
        time.sleep(0.2)
        (folder / f"scored.{unit.start}.{os.getpid()}").touch()
        return score(index, unit, *args, **settings)

    composition.score_by_composition = noted
    contig_worker(rank, world_size, results_queue, works, *more)


def worker_that_notes_itself(rank, world_size, results_queue, works, *more):
    (works[0].layout.output_dir / f"process.{os.getpid()}").touch()
    contig_worker(rank, world_size, results_queue, works, *more)


def worker_that_dies_in_the_search(rank, world_size, results_queue, works, *more):
    """The first process dies with the first unit that it is to search."""
    if rank == 0 and more[-1].attempt == 1:
        composition.judge_by_homology = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    contig_worker(rank, world_size, results_queue, works, *more)


def worker_that_cannot_write(rank, world_size, results_queue, works, *more):
    raise OutputError(works[0].layout.contig_parts, os.strerror(errno.ENOSPC))


def worker_that_fails(rank, world_size, results_queue, works, *more):
    raise RuntimeError("no luck")


@pytest.mark.parametrize("name", ["worker_that_dies", "worker_that_dies_in_the_search"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_process_that_dies_costs_time_only(job, expected, name, attempts):
    run = done(job, workers=2, worker_fn=worker(name), limits=RunLimits(attempts=attempts))
    assert (job.layout.composition_scores.read_bytes(), job.layout.composition_windows.read_bytes()) == expected[1:]
    assert run.quarantined == {}


POISON, NAME = 2, "k2"
"""Number and name of the contig that ends processes."""


def worker_with_poison(rank, world_size, results_queue, works, *more):
    """Die wherever the contig is scored."""
    score = composition.score_by_composition

    def poisoned(index, contigs, *args, **settings):
        if POISON in contigs:
            os.kill(os.getpid(), signal.SIGKILL)
        return score(index, contigs, *args, **settings)

    composition.score_by_composition = poisoned
    contig_worker(rank, world_size, results_queue, works, *more)


def worker_that_hangs(*arguments):
    os.kill = lambda *_: time.sleep(1_000)
    worker_with_poison(*arguments)


def worker_with_poison_in_the_search(rank, world_size, results_queue, works, *more):
    judge = composition.judge_by_homology

    def poisoned(index, contigs, model, found, on_share):
        if POISON in contigs:
            os.kill(os.getpid(), signal.SIGKILL)
        return judge(index, contigs, model, found, on_share)

    composition.judge_by_homology = poisoned
    contig_worker(rank, world_size, results_queue, works, *more)


@pytest.mark.parametrize(
    ("name", "workers", "unit_nt"),
    [
        ("worker_with_poison", 1, 40_000),
        pytest.param("worker_with_poison", 2, 4_000, marks=RARE),
        pytest.param("worker_that_hangs", 1, 4_000, marks=RARE),
        pytest.param("worker_with_poison_in_the_search", 1, 4_000, marks=RARE),
    ],
)
def test_a_contig_that_ends_processes_costs_its_own_score(job, expected, monkeypatch, name, workers, unit_nt):
    job = replace(job, unit_nt=unit_nt)
    _, contigs, windows = expected
    if "search" not in name:
        job = replace(job, model=replace(job.model, searches_proteins=False))
        with monkeypatch.context() as patch:
            _, contigs, windows = here(job, patch)
    limits = RunLimits(progress_timeout_s=4)
    run = done(job, workers=workers, worker_fn=worker(name), limits=limits)
    assert list(run.quarantined) == [POISON]
    failure, attempts = run.quarantined[POISON]
    assert failure == ("hung" if "hangs" in name else "died")
    assert attempts >= (2 if unit_nt == 4_000 else 4)
    found, wanted = (
        np.array(np.frombuffer(data, np.float32)) for data in (job.layout.composition_scores.read_bytes(), contigs)
    )
    assert np.isnan(found[POISON])
    assert not np.isnan(wanted[POISON])
    wanted[POISON] = np.nan
    np.testing.assert_array_equal(found, wanted)
    assert job.layout.composition_windows.read_bytes() == windows
    assert (run.counts["scored"], run.counts["contigs"]) == (int((~np.isnan(found)).sum()) + ("search" in name), 20)
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    again = done(job)
    assert job.layout.composition_scores.read_bytes() == contigs, "the next start tries it again"
    assert again.quarantined == {}


def test_the_processes_that_score_also_search(job):
    counts, *_ = scores(job, workers=2, worker_fn=worker("worker_that_notes_itself"))
    assert counts["searched"] > 5
    assert len(list(job.layout.output_dir.glob("process.*"))) == 2


@pytest.mark.parametrize("kind", [Composition, Homology])
def test_what_goes_wrong_when_scores_are_joined_is_said(job, monkeypatch, kind):
    def refuse(*_):
        raise OutputError(job.layout.composition_scores, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kind, "join", refuse)
    with pytest.raises(OutputError, match="free some space"):
        scores(job, workers=2)


def test_no_unit_is_computed_by_two_processes(job):
    scores(job, workers=3, worker_fn=worker("worker_that_notes_its_units"))
    noted = [path.name.split(".")[1:] for path in job.layout.output_dir.glob("scored.*")]
    assert sorted(int(start) for start, _ in noted) == [unit.start for unit in ContigUnits([job], 3).of(job)]
    assert len({pid for _, pid in noted}) == 3


@pytest.mark.parametrize(
    ("cores", "memory_mb", "asked", "number"), [(3, 64_000, None, 3), (16, 1_300, None, 2), (16, 1_300, 3, 3)]
)
def test_there_is_a_process_a_core_as_far_as_memory_allows(job, monkeypatch, cores, memory_mb, asked, number):
    monkeypatch.setattr(contig_run, "usable_cores", lambda: cores)
    monkeypatch.setattr(contig_run, "free_memory_bytes", lambda: memory_mb * 1_000_000)
    run = contig_run.ContigRun(run_id="r1", works=(job,), task="t", workers=asked, log_level="INFO")
    assert (run.world_size, run.is_small) == (number, False)


def test_one_unit_takes_one_process_and_little_work_none(tmp_path, model):
    contig = "".join(random.Random(4).choices("ACGT", k=9_000))
    job = job_in(tmp_path / "out", [write_fasta(tmp_path / "in.fa", [("k", contig)])], model)
    made = {"run_id": "r1", "task": "t", "workers": 4, "log_level": "INFO"}
    large = contig_run.ContigRun(**made, works=(replace(job, worker_nt=1_000),))
    assert (large.world_size, large.is_small) == (1, False)
    assert contig_run.ContigRun(**made, works=(job,)).is_small
    counts, *_ = scores(job, worker_fn="nowhere:nothing")
    assert counts["contigs"] == counts["scored"] == 1


def test_a_full_disk_ends_it_as_such(job):
    with pytest.raises(OutputError, match="free some space"):
        scores(job, workers=2, worker_fn=worker("worker_that_cannot_write"), limits=RunLimits(attempts=1))


@pytest.mark.parametrize("is_here", [False, True])
def test_a_file_in_place_of_their_folder_is_refused(job, monkeypatch, is_here):
    job.layout.contig_parts.touch()
    with pytest.raises(OutputError):
        here(job, monkeypatch) if is_here else scores(job, workers=2, limits=RunLimits(attempts=1))


def test_where_every_process_fails_the_error_says_why_and_what_is_missing(job):
    with pytest.raises(WorkersFailedError, match="20 of 20 sequences missing") as caught:
        scores(job, workers=2, worker_fn=worker("worker_that_fails"), limits=RunLimits(attempts=1))
    assert "no luck" in str(caught.value)
    assert "failed_sequences.tsv" not in str(caught.value), "there is none yet"
    assert caught.value.exit_code is ExitCode.INTERNAL


@pytest.mark.parametrize("is_here", [False, True])
def test_what_is_shown_of_it_ends_with_all_contigs_and_nucleotides(job, monkeypatch, is_here):
    if is_here:
        monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    telemetry = RunTelemetry()
    run = done(job, workers=2, telemetry=telemetry)
    (shown,) = telemetry.snapshot().embeddings
    units = run.units
    of_both = [int(units.work_nt(work).sum()) for work in run.works]
    assert (shown.counts, shown.measure, shown.rows, shown.records) == ("contigs", "nt", 20, 20)
    assert (shown.tokens, sum(rank.tokens for rank in shown.ranks)) == (sum(of_both), sum(of_both))
    assert shown.progress == 1
    assert telemetry.has_workers() is False
    assert [len(shown.ranks), sum(rank.rows for rank in shown.ranks)] == [1 if is_here else 2, 20]


def test_what_is_shown_of_a_resumed_run_counts_what_was_done_before(job, monkeypatch):
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    score, stop = composition.score_by_composition, threading.Event()

    def score_until_stopped(*arguments, **settings):
        stop.set()
        return score(*arguments, **settings)

    monkeypatch.setattr(composition, "score_by_composition", score_until_stopped)
    with pytest.raises(StoppedError):
        done(job, stop=stop)
    assert len(list(job.layout.contig_parts.glob("*.composition.*"))) == 1
    monkeypatch.setattr(composition, "score_by_composition", score)
    telemetry = RunTelemetry()
    done(job, telemetry=telemetry)
    (shown,) = telemetry.snapshot().embeddings
    assert shown.rows == 20
    assert 0 < shown.tokens_before < shown.tokens


@pytest.mark.parametrize("is_here", [False, True])
def test_a_stop_ends_it(job, monkeypatch, is_here):
    if is_here:
        monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        done(job, stop=stop)


def worker_with_poison_in_genes(*arguments):
    find = genes.gene_lines

    def poisoned(contigs):
        found = list(contigs)
        if any(name == NAME for name, _ in found):
            os.kill(os.getpid(), signal.SIGKILL)
        return find(found)

    genes.gene_lines = poisoned
    contig_worker(*arguments)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("worker_with_poison", "composition"),
        pytest.param("worker_with_poison_in_genes", "genes", marks=RARE),
    ],
)
def test_a_prediction_lists_a_contig_that_ends_processes_and_the_next_start_computes_it(
    tmp_path, monkeypatch, name, what
):
    monkeypatch.setattr(contig_run, "HERE", 0)  # a process, however small the input
    chooser = random.Random(9)
    records = [(f"k{n}", "".join(chooser.choices("ACGT", k=900))) for n in range(12)]
    fasta, out = write_fasta(tmp_path / "in.fa", records), tmp_path / "out"
    config = replace(prediction_config(), genes=WrittenGenes.ALL)
    arguments = {"write_report": write_report, "limits": RunLimits()}
    whole = run_prediction([fasta], tmp_path / "whole", config, [CPU], **arguments)
    poisoned = partial(LocalRanks, worker(name))
    result = run_prediction([fasta], out, config, [CPU], **arguments, executor=poisoned)
    assert (result.state, result.counts["quarantined"]) == ("partial", 1)
    with pytest.raises(WorkersFailedError, match="1 of 12 sequences missing") as caught:
        result.raise_unless(allow_partial=False)
    assert caught.value.exit_code is ExitCode.PARTIAL
    result.raise_unless(allow_partial=True)
    layout = PredictionLayout(out)
    assert re.fullmatch(
        rf"sequence_id\treason\tattempts\n{NAME}\t{what}: died\t\d\n", layout.failed_sequences.read_text()
    )
    assert verify_run(out).problems == []
    calls = {call.contig: call for call in read_contig_calls(layout.contigs)}
    others = {call.contig: call for call in read_contig_calls(PredictionLayout(tmp_path / "whole").contigs)}
    if what == "composition":
        assert (calls[NAME].call, calls[NAME].score) == (Call.UNDECIDED, None)
        assert re.match(r"not scored: it ended \d processes \(died\)", calls[NAME].reason)
        del calls[NAME], others[NAME]
    else:
        assert not re.search(rf"^{NAME}\t", layout.genes.read_text(), re.MULTILINE)
    assert calls == others
    again = run_prediction([fasta], out, config, [CPU], **arguments)
    assert (again.state, again.counts) == ("complete", whole.counts)
    assert not layout.failed_sequences.exists()
    assert not layout.contig_parts.exists()
    for path in (layout.contigs, layout.genes, layout.gene_proteins, layout.viral_fasta):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_kill_before_a_stage_is_recorded_costs_nothing_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(contig_run, "HERE", 0)  # a process, however small the input
    chooser = random.Random(9)
    records = [(f"k{n}", "".join(chooser.choices("ACGT", k=900))) for n in range(12)]
    fasta, out = write_fasta(tmp_path / "in.fa", records), tmp_path / "out"
    arguments = {"write_report": write_report, "limits": RunLimits()}

    def is_killed(_run, stage, *_args, **_more):
        assert stage == "composition"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StagedRun, "record", is_killed)
        with pytest.raises(KeyboardInterrupt):
            run_prediction([fasta], out, prediction_config(), [CPU], **arguments)
    ends_if_it_computes = partial(LocalRanks, worker("worker_with_poison"))
    result = run_prediction([fasta], out, prediction_config(), [CPU], **arguments, executor=ends_if_it_computes)
    assert (result.state, result.counts.get("quarantined", 0)) == ("complete", 0)
    assert not PredictionLayout(out).contig_parts.exists()
