"""A device of a host of a cluster: a real process computes unit after unit, and no failure there is raised."""

from __future__ import annotations

import json
import pickle
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import psutil
import pytest

from tests import fakes
from tests.faults.processes import wait_until
from tests.prepared_runs import COUNT, faulty_config, prepared_run, write_proteins
from tests.strategies import edit_manifest
from virnucpro import durable
from virnucpro.config import RunLimits
from virnucpro.errors import ExitCode, HostCheckError
from virnucpro.pipeline.blocks.finished_blocks import find_finished_blocks
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hosts import unit_worker
from virnucpro.pipeline.hosts.unit_worker import UnitWorker
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.run_completion import aggregate_run, validate_run
from virnucpro.pipeline.work.units import Unit, UnitBook
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.snapshot import RankState
from virnucpro.telemetry.work_telemetry import WorkTelemetry


class Workplace:
    """A prepared run, and workers that are closed at its end."""

    def __init__(self, stack, run, sequences):
        self.stack, self.run, self.sequences = stack, run, sequences
        self.index = run.open_index()
        self.plan = run.plan(self.index)
        self.blocks = list(range(len(self.plan)))

    def worker(self, rank=0, *, attempts=3, **settings):
        worker = UnitWorker(self.run, rank, RunLimits(attempts=attempts, stop_grace_s=20), **settings)
        self.stack.callback(worker.close, at_once=True)
        return worker

    def position_of(self, name):
        return next(place for place in range(len(self.index)) if self.index.sequence_id(place) == name)

    def rows_in(self, blocks):
        return sum(len(self.plan.block_positions(block)) for block in blocks)

    def durable(self, quarantined=()):
        return find_finished_blocks(self.run.layout, self.plan, quarantined=set(quarantined)).blocks

    def check_result(self, book, outcomes, *, without=()):
        aggregation = aggregate_run(self.run, outcomes, book)
        validate_run(self.run, aggregation)
        with read_embeddings(aggregation.output_path) as rows:
            assert set(rows) == self.sequences.keys() - set(without)
            assert all(np.array_equal(rows[name], fakes.hash_vector(self.sequences[name])) for name in rows)
        return aggregation.output_path


@pytest.fixture
def workplace(tmp_path):
    with ExitStack() as stack:
        yield lambda config=None, **settings: Workplace(
            stack, *stack.enter_context(prepared_run(tmp_path, config or fakes.hash_config(), **settings))
        )


def hear(telemetry, worker):
    """Bring what a worker says to its driver, as an engine does."""
    for entry in json.loads(json.dumps(worker.messages())):
        telemetry.apply_entry(entry)


def test_one_process_computes_unit_after_unit_and_its_driver_counts_every_row(workplace, monkeypatch):
    monkeypatch.setattr(unit_worker, "SAMPLE_INTERVAL_S", 0.0)
    place = workplace()
    telemetry, worker = WorkTelemetry(place.run.facts()), place.worker(rank=3)
    middle, records = len(place.blocks) // 3, []
    for part in (place.blocks[:middle], place.blocks[middle:], place.blocks[:2]):
        record = pickle.loads(pickle.dumps(worker.compute(Unit(blocks=part))))
        assert (record.left, record.is_lost, record.is_proved, record.error) == ([], False, True, None)
        assert (record.rank.rank, record.rank.state, record.rank.attempts) == (3, "complete", 1)
        assert place.durable() >= set(part)
        hear(telemetry, worker)
        records.append(record)
    (pid,) = record.rank.pids
    assert telemetry.ranks[3].resident_bytes > 0
    worker.close()
    assert not psutil.pid_exists(pid)
    hear(telemetry, worker)
    snapshot = telemetry.snapshot()
    assert (snapshot.rows, snapshot.tokens_left) == (len(place.sequences), 0)
    (rank,) = [rank for rank in snapshot.ranks if rank.rows]
    assert (rank.rank, rank.host, rank.device) == (3, record.rank.host, "cpu")
    assert (rank.state, rank.sequences, rank.attempts) == (RankState.COMPLETE, len(place.sequences), 1)
    assert [one.rows for one in records] == [place.rows_in(part) for part in (range(middle), place.blocks[middle:], [])]
    assert sum(one.tokens for one in records) == rank.tokens == records[-1].rank.tokens


def test_what_another_has_made_durable_is_not_computed_again(workplace):
    place = workplace()
    telemetry = WorkTelemetry(place.run.facts())
    for rank, blocks in enumerate([place.blocks[1::2], place.blocks]):
        worker = place.worker(rank)
        assert worker.compute(Unit(blocks=blocks)).left == []
        worker.close()
        hear(telemetry, worker)
    computed = [place.rows_in(place.blocks[1::2]), place.rows_in(place.blocks[::2])]
    assert [rank.sequences for rank in telemetry.ranks] == computed
    assert place.durable() == set(place.blocks)


@pytest.mark.slow
@pytest.mark.long
def test_a_sequence_that_ends_its_process_costs_its_row_and_the_worker_goes_on(workplace, tmp_path):
    killer, sequences = "protein_31", write_proteins(tmp_path / "proteins.fasta", COUNT)
    place = workplace(faulty_config(tmp_path, {"poison": {sequences[killer]: "segfault"}}))
    worker, position = place.worker(), place.position_of(killer)
    its_block = place.plan.block_of(position)
    record = worker.compute(Unit(blocks=[block for block in place.blocks if block % 2 == its_block % 2]))
    assert (record.left, record.suspects, record.is_lost, record.rank.state) == ([], {}, False, "complete")
    ((found, (block, (failure, attempts))),) = record.quarantined.items()
    assert (found, block, failure) == (position, its_block, "died")
    rest = worker.compute(Unit(blocks=[block for block in place.blocks if block % 2 != its_block % 2]))
    assert (rest.left, rest.quarantined, rest.is_lost) == ([], {}, False)
    assert rest.rank.pids == record.rank.pids, "its process waited for more"
    book = UnitBook([], place.plan.tokens)
    book._quarantined = {position: (failure, attempts)}
    place.check_result(book, [rest.rank], without=[killer])
    listed = place.run.layout.failed_sequences.read_text().splitlines()
    assert listed[1:] == [f"{killer}\tdied\t{attempts}"]


def test_what_is_known_of_a_unit_is_not_tried_again(workplace, tmp_path):
    killer, sequences = "protein_31", write_proteins(tmp_path / "proteins.fasta", COUNT)
    place = workplace(faulty_config(tmp_path, {"poison": {sequences[killer]: "segfault"}}))
    position = place.position_of(killer)
    known = {position: (place.plan.block_of(position), ("died", 5))}
    record = place.worker().compute(Unit(blocks=place.blocks, quarantined=known, losses=1))
    assert (record.left, record.quarantined, record.rank.attempts) == ([], known, 1)
    assert place.durable(quarantined=known) == set(place.blocks)


def test_a_device_that_only_fails_gives_its_blocks_back_and_is_not_tried_again(workplace, tmp_path):
    (tmp_path / "lost").write_text("1")
    config = fakes.hash_config(loader="tests.fakes:load_model_that_ranks_lose", weights_path=str(tmp_path / "lost"))
    place = workplace(replace(config, weights_sha256=durable.sha256_of(tmp_path / "lost")))
    worker = place.worker(attempts=2)
    record = worker.compute(Unit(blocks=place.blocks))
    assert (record.left, record.is_lost, record.is_proved) == (place.blocks, True, False)
    assert record.quarantined == {}
    assert record.rows == 0
    assert (record.rank.state, record.rank.failure) == ("failed", "died")
    assert record.suspects == {}, "it proves nothing"
    again = worker.compute(Unit(blocks=place.blocks[:2]))
    assert (again.left, again.is_lost, again.rank.pids) == (place.blocks[:2], True, record.rank.pids)


def test_a_sequence_that_fails_without_ending_its_process_does_not_keep_its_unit_open(workplace, tmp_path):
    sequences = write_proteins(tmp_path / "proteins.fasta", COUNT)
    longest = max(sequences, key=lambda name: len(sequences[name]))
    place = workplace(faulty_config(tmp_path, {"poison": {sequences[longest]: "raise"}}, token_budget=42))
    block = place.plan.block_of(place.position_of(longest))
    assert len(place.plan.block_positions(block)) == 1, "a block of which nothing is left"
    record = place.worker().compute(Unit(blocks=place.blocks))
    assert (record.left, record.is_lost) == ([], False)
    assert record.quarantined == {place.position_of(longest): (block, ("application_error", 1))}


# --- the end of the process ---


def test_a_worker_without_a_unit_ends_its_process_and_the_next_unit_gets_another(workplace, monkeypatch):
    monkeypatch.setattr(unit_worker, "IDLE_S", 0.1)
    place = workplace()
    worker = place.worker()
    (pid,) = worker.compute(Unit(blocks=place.blocks[:3])).rank.pids
    wait_until(lambda: not psutil.pid_exists(pid), what="the end of the process")
    record = worker.compute(Unit(blocks=place.blocks))
    assert (record.left, record.is_lost) == ([], False)
    assert len(record.rank.pids) == 2
    assert place.durable() == set(place.blocks)


def test_a_worker_that_is_told_to_stop_does_so_at_a_batch_boundary_and_gives_the_rest_back(workplace, tmp_path):
    place = workplace(faulty_config(tmp_path, {"slow_s": 0.1}, sequences_per_part=1000))
    worker, records = place.worker(), []
    telemetry = WorkTelemetry(place.run.facts())
    thread = threading.Thread(target=lambda: records.append(worker.compute(Unit(blocks=place.blocks))))
    thread.start()
    wait_until(lambda: hear(telemetry, worker) or telemetry.ranks[0].sequences, what="the first batch")
    worker.close(at_once=True)
    thread.join()
    (record,) = records
    assert (record.is_lost, record.error, record.rank.state, record.rank.failure) == (True, None, "stopped", "stopped")
    assert not psutil.pid_exists(record.rank.pids[0])
    assert 0 < len(record.left) < len(place.blocks)
    done = place.durable()
    assert place.rows_in(done) == record.rows > 0, "what it had computed is durable"
    assert done.isdisjoint(record.left)
    assert done.union(record.left) == set(place.blocks)


# --- hosts that are refused ---


def of_another_input(place):
    with (place.run.output_dir.parent / "proteins.fasta").open("a") as file:
        file.write(">one_more\nMKV\n")


def of_another_version(place):
    edit_manifest(place.run.layout.manifest, lambda values: values["settings"].update({"torch version": "1.0"}))


def of_other_weights(place):
    (place.run.output_dir.parent / "faults.json").write_text("{}")


def of_another_run(place):
    place.run.layout.lock.write_text(json.dumps({"run_id": "the next"}))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (of_another_input, "it is another file"),
        (of_another_version, "torch version is 1.0"),
        (of_other_weights, "the run's weights have"),
        (of_another_run, "it belongs to the next"),
    ],
)
def test_a_host_that_sees_another_run_says_so_and_starts_nothing(workplace, tmp_path, change, word):
    place = workplace(faulty_config(tmp_path, {}))
    change(place)
    expect_refusal(place, word)


def test_a_host_that_cannot_write_says_so_and_starts_nothing(for_all_users):
    with prepared_run(for_all_users, fakes.hash_config()) as prepared, ExitStack() as stack, fakes.another_user():
        error = expect_refusal(Workplace(stack, *prepared), "cannot be written")
        assert error.exit_code == ExitCode.CANNOT_WRITE


def expect_refusal(place, word):
    worker = place.worker()
    record = pickle.loads(pickle.dumps(worker.compute(Unit(blocks=place.blocks))))
    assert isinstance(record.error, HostCheckError)
    assert word in str(record.error)
    assert (record.is_lost, record.rows, record.rank.pids) == (True, 0, [])
    assert worker.messages() == []
    assert place.run.layout.worker_logs() == []
    return record.error


def test_a_worker_whose_folder_has_gone_to_another_run_computes_nothing_more(workplace):
    place = workplace()
    worker = place.worker()
    assert worker.compute(Unit(blocks=place.blocks[:2])).left == []
    of_another_run(place)
    record = worker.compute(Unit(blocks=place.blocks))
    assert "it belongs to the next" in str(record.error)
    assert record.is_lost
    assert place.durable() == set(place.blocks[:2])


def test_a_host_that_was_refused_computes_once_what_was_wrong_is_mended(workplace):
    place = workplace()
    holder = place.run.layout.lock.read_text()
    of_another_run(place)
    worker = place.worker()
    assert worker.compute(Unit(blocks=place.blocks[:4])).error is not None
    place.run.layout.lock.write_text(holder)
    record = worker.compute(Unit(blocks=place.blocks[:4]))
    assert (record.left, record.is_lost, record.error) == ([], False, None)
    assert place.durable() == set(place.blocks[:4])


# --- several workers ---


@pytest.mark.slow
def test_workers_of_different_speed_one_of_which_is_lost_give_the_bytes_of_one_machine(workplace, tmp_path):
    config = faulty_config(tmp_path, {"slow_s": 0.02})
    alone = tmp_path / "alone"
    place = workplace(config, count=120)
    expected = run_embedding([tmp_path / "proteins.fasta"], alone, config, [CPU]).output_path
    book, lock, ranks = UnitBook(place.blocks, place.plan.tokens), threading.Lock(), {}

    def compute(worker, loses):
        while True:
            with lock:
                unit = book.next(2)
                if unit is None and book.is_done:
                    return
            if unit is None:
                time.sleep(0.05)
                continue
            record = worker.compute(unit)
            with lock:
                if loses:  # its host is gone before it could answer
                    book.lost(unit)
                    return
                book.take(unit, record)
                ranks[record.rank.rank] = record.rank

    workers = [place.worker(rank) for rank in range(3)]
    threads = [threading.Thread(target=compute, args=(worker, worker is workers[2])) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.close()
    assert book.given_up == {}
    assert all(ranks[rank].sequences for rank in range(2))
    assert place.check_result(book, list(ranks.values())).read_bytes() == expected.read_bytes()
