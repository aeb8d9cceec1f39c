"""Composition scores: the same bytes by any number of processes, after a kill, a damaged part, and a lost process."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.strategies import write_fasta
from virnucpro import durable
from virnucpro.calls.viral_regions import LONG_CONTIG_NT
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.config import InputRules, RunLimits
from virnucpro.data.frames import chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ExitCode, OutputError, StoppedError, WorkersFailedError
from virnucpro.models.classifier_files.card import locate_classifier, read_card
from virnucpro.models.contigs.contig_model import CompositionModel
from virnucpro.models.contigs.homology import is_ambiguous
from virnucpro.pipeline.prediction import composition, part_jobs, part_processes, part_work
from virnucpro.pipeline.prediction.composition import score_composition
from virnucpro.pipeline.prediction.part_jobs import CompositionJob, compute_part
from virnucpro.pipeline.prediction.part_work import parts_of
from virnucpro.run_layout import PredictionLayout

CHUNK_NT = 500


@pytest.fixture(scope="module")
def model():
    folder = locate_classifier(DEFAULT_CLASSIFIER)
    return CompositionModel(folder, read_card(folder), searches_proteins=True)


@pytest.fixture
def job(tmp_path, model, monkeypatch):
    monkeypatch.setattr(composition, "PART_NT", 4_000)
    monkeypatch.setattr(composition, "SEARCH_PART_NT", 12_000)
    monkeypatch.setattr(CompositionJob, "worker_nt", 10_000)
    monkeypatch.setattr(part_jobs.HomologyJob, "worker_nt", 5_000)
    chooser = random.Random(3)
    contigs = [(f"k{n}", "".join(chooser.choices("ACGT", k=chooser.randint(1, 3_000)))) for n in range(20)]
    contigs[7] = ("unknown", "N" * 700)
    contigs[11] = ("long", "".join(chooser.choices("ACGT", k=2 * LONG_CONTIG_NT)))
    files = [write_fasta(tmp_path / "a.fa", contigs[:9]), write_fasta(tmp_path / "b.fa", contigs[9:])]
    return job_in(tmp_path / "out", files, model)


def job_in(folder, files, model):
    layout = PredictionLayout(folder)
    layout.work_dir.mkdir(parents=True)
    rules = InputRules(sequence_kind="DNA", allow_empty=True)
    SequenceIndex.ensure(files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=rules)
    return CompositionJob(layout=layout, model=model, chunk_nt=CHUNK_NT, min_nt=100, fingerprint="f1" * 32)


def scores(job, **arguments):
    counts = score_composition(job, **arguments)
    assert not job.layout.contig_parts.exists()
    return counts, *(path.read_bytes() for path in (job.layout.composition_scores, job.layout.composition_windows))


def test_every_contig_is_in_one_part_and_parts_are_of_like_size(monkeypatch):
    chooser = np.random.default_rng(1)
    lengths = chooser.integers(1, 50_000, 3_000)
    parts = parts_of(lengths, composition.PART_NT)
    assert [contig for part in parts for contig in part] == list(range(len(lengths)))
    sizes = [int(lengths[part.start : part.stop].sum()) for part in parts]
    assert max(sizes) <= composition.PART_NT
    assert min(sizes[:-1]) > composition.PART_NT - 50_000
    assert [len(part) for part in parts_of(np.array([9_000_000, 5, 5]), composition.PART_NT)] == [1, 2]
    assert max(map(len, parts_of(np.ones(10_000), composition.PART_NT))) == part_work.PART_CONTIGS
    monkeypatch.setattr(part_work, "MOST_PARTS", 10)
    assert len(parts_of(lengths, composition.PART_NT)) <= 11
    assert parts_of(np.empty(0, dtype=np.int64), composition.PART_NT) == []


def test_any_number_of_processes_gives_the_same_bytes(job):
    counts, contigs, windows = scores(job, workers=1)
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
    assert scores(job, workers=2)[1:] == (contigs, windows)
    assert scores(job)[1:] == (contigs, windows)


@pytest.fixture
def first_bytes(job):
    """What the job gives without a search: the composition scores."""
    plain = replace(job, model=replace(job.model, searches_proteins=False))
    return scores(plain, workers=1)[1]


def test_ambiguous_scores_are_refined_and_no_others(job, first_bytes):
    before, (counts, contigs, _) = np.frombuffer(first_bytes, np.float32), scores(job, workers=2)
    after = np.frombuffer(contigs, np.float32)
    ambiguous = is_ambiguous(before)
    assert ambiguous.sum() == counts["searched"] > 5
    np.testing.assert_array_equal(after[~ambiguous], before[~ambiguous])
    assert (after[ambiguous] != before[ambiguous]).all()
    assert ((after[ambiguous] > 0) & (after[ambiguous] < 1)).all()


@pytest.mark.parametrize(
    ("searched_mb", "workers", "number"),
    [(50, 16, 32), (5, 16, 16), (5, 2, 4), (500, 16, 256), (100, 1, 50), (0.4, 1, 1), (2, 3, 3)],
)
def test_each_process_has_as_many_parts_to_search_and_all_are_as_large(searched_mb, workers, number):
    lengths = np.resize([20_000, 0, 300, 5_000, 0, 1_500], int(searched_mb * 1e6) // 26_800 * 6)
    parts = composition.search_parts(lengths, workers)
    assert [one.start for one in parts] == [0, *(one.stop for one in parts[:-1])]
    assert parts[-1].stop == len(lengths)
    assert len(parts) == number
    sizes = [lengths[one.start : one.stop].sum() for one in parts]
    assert max(sizes) - min(sizes) <= 2 * 20_000


def test_a_contig_that_is_longer_than_a_part_is_one(monkeypatch):
    monkeypatch.setattr(composition, "SEARCH_PART_NT", 1_000)
    parts = composition.search_parts(np.array([0, 5_000, 0, 0, 100]), 1)
    assert [one.stop for one in parts] == sorted({one.stop for one in parts})
    assert parts[0].start == 0
    assert parts[-1].stop == 5


def test_a_start_after_a_kill_in_the_search_gives_the_same(job, monkeypatch):
    _, *expected = scores(job, workers=1)
    refine, calls = part_jobs.refine_scores, []

    def killed(index, part, model, found):
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return refine(index, part, model, found)

    monkeypatch.setattr(part_jobs, "refine_scores", killed)
    with pytest.raises(KeyboardInterrupt):
        score_composition(job, workers=1)
    assert len(list(job.layout.contig_parts.glob("*.homology.*"))) == 1
    assert scores(job, workers=1)[1:] == tuple(expected)
    assert len(calls) == len(set(calls)) + 1, "the part that was whole is not searched again"


def test_parts_of_another_division_of_the_search_are_not_taken(job, monkeypatch):
    _, *expected = scores(job, workers=1)
    refine, late = part_jobs.refine_scores, part_jobs.HomologyJob(**vars(job))

    def refined(index, part, model, found):
        durable.write_bytes(late.path_of(range(20)), b"4" * 80, seal=True)  # by a worker of a start that was killed
        return refine(index, part, model, found)

    monkeypatch.setattr(part_jobs, "refine_scores", refined)
    assert scores(job, workers=1)[1:] == tuple(expected)


def test_what_is_there_is_not_computed_again_unless_it_is_damaged(job, monkeypatch):
    _, *expected = scores(job, workers=1)
    job.layout.contig_parts.mkdir()
    index = SequenceIndex.open(job.layout.contig_index)
    parts = parts_of(index.lengths[index.in_input_order()], composition.PART_NT)
    assert len(parts) > 4
    for part in parts[:4]:
        compute_part(job, index, part, job.load())
    damaged = bytearray(job.path_of(parts[1]).read_bytes())
    damaged[2] ^= 1
    job.path_of(parts[1]).write_bytes(damaged)
    job.path_of(parts[2]).write_bytes(b"")
    durable.write_bytes(job.path_of(parts[3]), b"other scores", seal=True)  # of other contigs
    other = job.path_of(parts[0]).with_name("0123456789abcdef.0.f32")  # of other settings
    other.write_bytes(b"x")
    computed, compute = [], part_jobs.score_by_composition

    def noted(index, part, *args, **settings):
        computed.append(part)
        return compute(index, part, *args, **settings)

    monkeypatch.setattr(part_jobs, "score_by_composition", noted)
    assert scores(job, workers=1)[1:] == tuple(expected)
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
    monkeypatch.setattr(part_jobs, "score_by_composition", noted)
    with threadpool_limits(3, user_api="blas"):
        with suppress(KeyboardInterrupt):
            compute_part(job, job.open_index(), range(2), None)
        assert set(threads()) == {3}
    assert set(seen) == {1}


def test_a_process_that_scores_starts_without_what_it_does_not_use():
    code = "import sys, virnucpro.pipeline.work.worker_process, virnucpro.pipeline.prediction.part_jobs; "
    code += "print({'torch', 'prefect', 'rich', 'structlog', 'pydantic', 'asyncio', 'urllib.request'} & {*sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert loaded.stdout == "set()\n"


def test_an_input_without_contigs_has_empty_files(tmp_path, model):
    (tmp_path / "in.fa").write_text("")
    assert scores(job_in(tmp_path / "out", [tmp_path / "in.fa"], model)) == (
        {"contigs": 0, "scored": 0, "searched": 0},
        b"",
        b"",
    )


def worker_that_dies(rank, world_size, results_queue, job):
    """The first process dies with the part that it was given."""
    if rank == 0:
        next(part_jobs._handed_out(results_queue))
        os.kill(os.getpid(), signal.SIGKILL)
    part_jobs.part_worker(rank, world_size, results_queue, job)


def worker_that_notes_its_parts(rank, world_size, results_queue, job):
    """Every part takes so long that each process has one."""
    compute = part_jobs.score_by_composition

    def noted(index, part, *args, **settings):
        time.sleep(0.2)
        (job.layout.output_dir / f"scored.{part.start}.{os.getpid()}").touch()
        return compute(index, part, *args, **settings)

    part_jobs.score_by_composition = noted
    part_jobs.part_worker(rank, world_size, results_queue, job)


def worker_that_notes_itself(rank, world_size, results_queue, job):
    (job.layout.output_dir / f"process.{os.getpid()}").touch()
    part_jobs.part_worker(rank, world_size, results_queue, job)


def worker_that_dies_in_the_search(rank, world_size, results_queue, job):
    """The first process dies with the first part that it is to search."""
    if rank == 0:
        part_jobs.refine_scores = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    part_jobs.part_worker(rank, world_size, results_queue, job)


def worker_that_cannot_write(rank, world_size, results_queue, job):
    raise OutputError(job.layout.contig_parts, os.strerror(errno.ENOSPC))


def worker_that_fails(rank, world_size, results_queue, job):
    raise RuntimeError("no luck")


def test_a_process_that_dies_costs_time_only(job, monkeypatch):
    _, *expected = scores(job, workers=1)
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_dies")
    assert scores(job, workers=2, limits=RunLimits(attempts=1))[1:] == tuple(expected)


def test_a_process_that_dies_in_the_search_costs_time_only(job, monkeypatch):
    _, *expected = scores(job, workers=1)
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_dies_in_the_search")
    assert scores(job, workers=2, limits=RunLimits(attempts=1))[1:] == tuple(expected)


def test_the_processes_that_score_also_search(job, monkeypatch):
    seen = []
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_notes_itself")
    counts, *_ = scores(job, workers=2, advance=lambda *progress: seen.append(progress))
    assert counts["searched"] > 5
    assert seen[-1] == (counts["searched"], counts["searched"], "compared with known proteins")
    assert len(list(job.layout.output_dir.glob("process.*"))) == 2


@pytest.mark.parametrize("step", ["_join_parts", "_is_there"])
def test_what_goes_wrong_between_scoring_and_searching_is_said(job, monkeypatch, step):
    where = composition if step == "_join_parts" else part_work
    do = getattr(where, step)

    def refuse(job, parts, *more):
        if step == "_is_there" and not job.searches:
            return do(job, parts, *more)
        raise OutputError(job.layout.composition_scores, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(where, step, refuse)
    with pytest.raises(OutputError, match="free some space"):
        scores(job, workers=2)


def test_no_part_is_computed_by_two_processes(job, monkeypatch):
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_notes_its_parts")
    scores(job, workers=3)
    index = SequenceIndex.open(job.layout.contig_index)
    parts = parts_of(index.lengths[index.in_input_order()], composition.PART_NT)
    noted = [path.name.split(".")[1:] for path in job.layout.output_dir.glob("scored.*")]
    assert sorted(int(start) for start, _ in noted) == [part.start for part in parts]
    assert len({pid for _, pid in noted}) == 3


@pytest.mark.parametrize(
    ("cores", "memory_mb", "asked", "number"), [(3, 64_000, None, 3), (16, 1_300, None, 2), (16, 1_300, 3, 3)]
)
def test_there_is_a_process_a_core_as_far_as_memory_allows(job, monkeypatch, cores, memory_mb, asked, number):
    class Began(Exception):  # noqa: N818  no error
        pass

    def begin(_work, _then, num_workers, *_):
        raise Began(num_workers)

    monkeypatch.setattr(part_work, "usable_cores", lambda: cores)
    monkeypatch.setattr(part_work, "free_memory_bytes", lambda: memory_mb * 1_000_000)
    monkeypatch.setattr(part_work, "compute_in_processes", begin)
    with pytest.raises(Began, match=f"^{number}$"):
        score_composition(job, workers=asked)


def test_one_part_takes_one_process(tmp_path, model, monkeypatch):
    monkeypatch.setattr(CompositionJob, "worker_nt", 1_000)
    monkeypatch.setattr(part_work, "compute_in_processes", None)
    contig = "".join(random.Random(4).choices("ACGT", k=9_000))
    counts, *_ = scores(job_in(tmp_path / "out", [write_fasta(tmp_path / "in.fa", [("k", contig)])], model), workers=4)
    assert counts["contigs"] == counts["scored"] == 1


def test_a_full_disk_ends_it_as_such(job, monkeypatch):
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_cannot_write")
    with pytest.raises(OutputError, match="free some space"):
        scores(job, workers=2, limits=RunLimits(attempts=1))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_in_place_of_their_folder_is_refused(job, workers):
    job.layout.contig_parts.touch()
    with pytest.raises(OutputError):
        score_composition(job, workers=workers, limits=RunLimits(attempts=1))


def test_where_every_process_fails_the_error_says_why_and_what_is_missing(job, monkeypatch):
    monkeypatch.setattr(part_processes, "WORKER", f"{__name__}:worker_that_fails")
    with pytest.raises(WorkersFailedError, match="20 of 20 sequences missing") as caught:
        scores(job, workers=2, limits=RunLimits(attempts=1))
    assert "no luck" in str(caught.value)
    assert "failed_sequences.tsv" not in str(caught.value), "there is none yet"
    assert caught.value.exit_code is ExitCode.INTERNAL


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_of_contigs_and_ends_with_all_of_them(job, workers):
    seen = []
    counts = score_composition(job, workers=workers, advance=lambda *progress: seen.append(progress))
    for work, total in (("scored", counts["contigs"]), ("compared with known proteins", counts["searched"])):
        done = [one for one, of, what in seen if (of, what) == (total, work)]
        assert len(done) >= 2
        assert done == sorted(set(done))
        assert (done[0] > 0, done[-1]) == (True, total)
    assert len(seen) == len(set(seen))


def test_progress_of_a_resumed_run_counts_what_was_done_before(job, monkeypatch):
    compute = part_work.compute_part
    stop, before, seen = threading.Event(), [], []

    def score_until_stopped(*arguments):
        compute(*arguments)
        stop.set()

    monkeypatch.setattr(part_work, "compute_part", score_until_stopped)
    with pytest.raises(StoppedError):
        score_composition(job, workers=1, stop=stop, advance=lambda *progress: before.append(progress))
    monkeypatch.setattr(part_work, "compute_part", compute)
    score_composition(job, workers=1, advance=lambda *progress: seen.append(progress))
    assert len(before) == 1
    assert seen[0][0] > before[0][0] > 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_stop_ends_it(job, workers):
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        score_composition(job, workers=workers, stop=stop)
