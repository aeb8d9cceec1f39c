"""Workers that claim their blocks in a shared folder: real processes, of different speed, killed and stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import fakes
from tests.settings import embedding_config
from virnucpro.config import RunLimits
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import GPU_WORKER, run_multi_gpu_inference
from virnucpro.pipeline.run.run_completion import aggregate_run, validate_run
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.work.rank_runner import run_rank
from virnucpro.pipeline.work.recovery import Recovery
from virnucpro.pipeline.work.unit_claims import UnitSource, numbers_in, owners_of_done, read_units, write_units
from virnucpro.store.locks.lease import Lease
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.parts import SealedBlocks, part_paths
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.ranks import Rank

RUN_ID = "abcdef012345"
EXAMPLE = Path(__file__).parents[2] / "examples" / "proteins.fasta"


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(5)
    sequences = {
        f"protein_{number}": "".join(chooser.choice("ACDEFGHIKLMNPQRSTVWY") for _ in range(chooser.randint(1, 40)))
        for number in range(120)
    }
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path, sequences


class SharedRun:
    """A prepared run whose units are written, and owners that claim them, each with one worker at a time."""

    def __init__(self, fasta, output_dir, config, *, owners=2, lease_s=60.0):
        self.lock = RunLock(output_dir / ".run.lock", run_id=RUN_ID)
        self.lock.__enter__()
        self.run = prepare_run([fasta], output_dir, config, [CPU] * owners, run_id=RUN_ID)
        self.layout, self.units = self.run.layout, self.run.layout.units(RUN_ID)
        self.plan = self.run.plan(self.run.open_index())
        write_units(
            self.units.folder,
            run_id=RUN_ID,
            plan_fingerprint=self.plan.fingerprint,
            blocks=range(len(self.plan)),
            tokens=self.plan.tokens,
            devices=owners,
            lease_s=lease_s,
        )
        self.outcomes = [Rank(rank=rank, device="cpu") for rank in range(owners)]
        self.messages = [[] for _ in range(owners)]
        self.stops = [threading.Event() for _ in range(owners)]
        self.leases = [
            Lease(self.units.owner(f"owner{rank}"), {"rank": rank}, lease_s=lease_s) for rank in range(owners)
        ]
        self.pids = {}
        self.threads = []

    def start(self, rank, *, config=None, worker_fn=GPU_WORKER):
        """Start the process of an owner, which renews its lease from now on."""
        if not self.leases[rank]._thread.is_alive():
            self.leases[rank].__enter__()
        thread = threading.Thread(target=self._run_rank, args=(rank, config or self.run.model_config, worker_fn))
        self.threads.append(thread)
        thread.start()
        return thread

    def _run_rank(self, rank, config, worker_fn):
        recovery = self.recovery(rank)
        with recovery.turn(rank, self.stops[rank]):
            run_rank(
                worker_fn,
                recovery.worker_args(rank, (str(self.layout.index), str(self.layout.output_dir), config)),
                rank=self.outcomes[rank],
                world_size=len(self.outcomes),
                device=CPU,
                limits=RunLimits(stop_grace_s=20),
                stop=self.stops[rank],
                on_message=lambda rank, message: self.messages[rank].append(message),
                on_start=lambda worker: self.pids.update({rank: worker.process.pid}),
            )

    def recovery(self, rank):
        return Recovery(
            [self.outcomes[rank]],
            num_blocks=len(self.plan),
            limits=RunLimits(),
            run_id=RUN_ID,
            units=UnitSource(self.units.folder, f"owner{rank}"),
        )

    def lose(self, rank):
        """Kill an owner's process with its host: nobody renews its lease any more."""
        lease = self.leases[rank]
        lease._ending.set()
        lease._thread.join()
        os.kill(self.pids[rank], signal.SIGKILL)

    def aggregate(self):
        aggregation = aggregate_run(self.run, self.outcomes, self.recovery(0))
        validate_run(self.run, aggregation)
        return aggregation

    def close(self):
        for stop in self.stops:
            stop.set()
        for thread in self.threads:
            thread.join()
        for lease in self.leases:
            if lease._thread.ident:
                lease.__exit__()
        self.lock.__exit__()


@pytest.fixture
def shared():
    runs = []

    def make(*args, **settings):
        runs.append(SharedRun(*args, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def wait_until(is_so, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def events(layout, rank, event):
    lines = [json.loads(line) for line in layout.worker_log(rank).read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def check_rows(path, sequences):
    with read_embeddings(path) as rows:
        assert list(rows) == list(sequences)
        for name, sequence in sequences.items():
            assert np.array_equal(rows[name], fakes.hash_vector(sequence))


def test_two_workers_share_the_blocks_each_is_computed_once_and_each_model_is_loaded_once(tmp_path, proteins, shared):
    fasta, sequences = proteins
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.05})
    run = shared(fasta, tmp_path / "out", config)
    for thread in [run.start(0), run.start(1)]:
        thread.join()
    assert [outcome.state for outcome in run.outcomes] == ["complete"] * 2
    assert [outcome.sequences > 0 for outcome in run.outcomes] == [True, True]
    assert sum(outcome.sequences for outcome in run.outcomes) == len(sequences)
    units = range(len(read_units(run.units.folder)))
    assert set(owners_of_done(run.units.folder, units).values()) == {"owner0", "owner1"}
    for rank in range(2):
        assert len(events(run.layout, rank, "model.loaded")) == 1
        assert len(SealedBlocks.open(run.layout.shard(rank)).positions) == run.outcomes[rank].sequences
    assert part_paths(run.layout.parts_dir) == []
    check_rows(run.aggregate().output_path, sequences)


@pytest.mark.slow
@pytest.mark.long
def test_two_claiming_workers_of_different_speed_give_the_bytes_of_a_normal_run(tmp_path, shared):
    config = replace(embedding_config(), token_budget=1024, sequences_per_part=16)
    expected, _ = run_multi_gpu_inference([EXAMPLE], tmp_path / "alone", config, 1)
    run = shared(EXAMPLE, tmp_path / "shared", config)
    slow = replace(run.run.model_config, loader="tests.fakes:load_slow_bundled_encoder")
    for thread in [run.start(0), run.start(1, config=slow)]:
        thread.join()
    fast, slow = (outcome.sequences for outcome in run.outcomes)
    assert fast > slow > 0
    assert run.aggregate().output_path.read_bytes() == expected.read_bytes()


def test_a_worker_alone_does_everything_and_names_what_it_claims(tmp_path, proteins, shared):
    fasta, sequences = proteins
    run = shared(fasta, tmp_path / "out", fakes.hash_config())
    run.start(0).join()
    claimed = [
        tuple(runs) for message in run.messages[0] if message.get("kind") == "claimed" for runs in message["runs"]
    ]
    blocks = [block for first, last, step in claimed for block in range(first, last + 1, step)]
    assert sorted(blocks) == list(range(len(run.plan)))
    assert run.outcomes[0].state == "complete"
    check_rows(run.aggregate().output_path, sequences)


def test_a_killed_hosts_units_are_done_by_the_other_after_the_lease(tmp_path, proteins, shared):
    fasta, sequences = proteins
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.05})
    run = shared(fasta, tmp_path / "out", config, lease_s=2.0)
    threads = [run.start(0), run.start(1)]
    wait_until(lambda: run.outcomes[0].sequences and run.outcomes[1].sequences)
    run.lose(0)
    for thread in threads:
        thread.join()
    assert [outcome.state for outcome in run.outcomes] == ["failed", "complete"]
    assert events(run.layout, 1, "unit.taken_over")
    check_rows(run.aggregate().output_path, sequences)


def test_the_next_process_of_an_owner_goes_on_with_its_units_and_resumes_what_is_durable(tmp_path, proteins, shared):
    fasta, sequences = proteins
    plan = {"rank": 0, "how": "sigkill", "before_batch": 12}
    config = fakes.faulty_config(tmp_path / "faults.json", plan, sequences_per_part=1)
    run = shared(fasta, tmp_path / "out", config, owners=1)
    run.start(0).join()
    assert run.outcomes[0].state == "failed"
    undone = numbers_in(run.units.claims_dir) - numbers_in(run.units.done_dir)
    begun = {block for unit in undone for block in read_units(run.units.folder).blocks(unit)}
    parts = [SealedBlocks.open(path) for path in part_paths(run.layout.parts_dir)]
    durable = sum(rows for part in parts for block, rows, _ in part.blocks.tolist() if block in begun)
    assert durable
    run.start(0).join()
    assert (run.outcomes[0].state, run.outcomes[0].sequences_resumed) == ("complete", durable)
    assert run.outcomes[0].sequences == len(sequences)
    check_rows(run.aggregate().output_path, sequences)


def test_sigterm_stops_at_a_batch_boundary_keeps_the_blocks_and_gives_the_units_back(tmp_path, proteins, shared):
    fasta, _ = proteins
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.1}, sequences_per_part=1000)
    run = shared(fasta, tmp_path / "out", config, owners=1)
    thread = run.start(0)
    wait_until(lambda: run.outcomes[0].sequences >= 5)
    run.stops[0].set()
    thread.join()
    outcome = run.outcomes[0]
    assert (outcome.state, outcome.exit_code) == ("stopped", 143)
    kept = sum(len(SealedBlocks.open(path).positions) for path in part_paths(run.layout.parts_dir))
    assert 5 <= kept == outcome.sequences
    assert numbers_in(run.units.claims_dir) == numbers_in(run.units.done_dir)


def test_a_worker_that_waits_for_others_says_that_it_lives_and_ends_when_they_are_done(tmp_path, proteins, shared):
    fasta, sequences = proteins
    gate = tmp_path / "gate"
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "gate": str(gate)})
    run = shared(fasta, tmp_path / "out", config)
    slow = run.start(0)
    wait_until(lambda: any(message.get("kind") == "start" for message in run.messages[0]))
    quick = run.start(1, config=replace(run.run.model_config, loader="tests.fakes:load_hash_model"))
    wait_until(lambda: run.outcomes[1].sequences and run.messages[1][-1].get("kind") == "step")
    assert quick.is_alive()
    gate.write_text("")
    quick.join()
    slow.join()
    assert [outcome.state for outcome in run.outcomes] == ["complete"] * 2
    check_rows(run.aggregate().output_path, sequences)


def test_a_sequence_without_a_usable_row_does_not_keep_its_unit_open(tmp_path, proteins, shared):
    fasta, sequences = proteins
    longest = max(sequences, key=lambda name: len(sequences[name]))
    config = fakes.hash_config(
        loader="tests.fakes:load_poisoned_model", weights_path=sequences[longest], token_budget=42
    )
    run = shared(fasta, tmp_path / "out", config, owners=1)
    assert len(run.plan.block_positions(0)) == 1, "a block of which nothing is left"
    run.start(0).join()
    assert run.outcomes[0].state == "complete"
    assert run.aggregate().num_missing == 1


@pytest.mark.slow
@pytest.mark.long
def test_rows_of_the_cache_are_claimed_like_others_and_nothing_is_computed(tmp_path, proteins, shared):
    fasta, sequences = proteins
    config = fakes.hash_config(cache_dir=str(tmp_path / "cache"))
    run_multi_gpu_inference([fasta], tmp_path / "first", config, 1)
    run = shared(fasta, tmp_path / "out", config, owners=1)
    run.start(0).join()
    assert (run.outcomes[0].state, run.outcomes[0].sequences) == ("complete", 0)
    assert run.outcomes[0].sequences_cached == len(sequences)
    check_rows(run.aggregate().output_path, sequences)


@pytest.mark.slow
@pytest.mark.long
def test_blocks_are_claimed_in_the_thread_that_reads_ahead_of_a_gpu_too(tmp_path, proteins, shared):
    fasta, sequences = proteins
    half = tmp_path / "half.fasta"
    half.write_text("".join(f">{name}\n{sequences[name]}\n" for name in list(sequences)[::2]))
    config = fakes.hash_config(cache_dir=str(tmp_path / "cache"), token_budget=42)  # rows of the cache are taken there
    run_multi_gpu_inference([half], tmp_path / "first", config, 1)
    run = shared(fasta, tmp_path / "out", config)
    for thread in [run.start(rank, worker_fn=fakes.gpu_worker_that_reads_ahead) for rank in range(2)]:
        thread.join()
    assert [outcome.state for outcome in run.outcomes] == ["complete"] * 2
    assert [outcome.cache_problem for outcome in run.outcomes] == [None, None]
    assert sum(outcome.sequences_cached for outcome in run.outcomes) > 0
    assert sum(outcome.sequences + outcome.sequences_cached for outcome in run.outcomes) == len(sequences)
    check_rows(run.aggregate().output_path, sequences)


@pytest.mark.slow
@pytest.mark.long
def test_loader_processes_bring_claimed_blocks_too(tmp_path, proteins, shared):
    fasta, sequences = proteins
    run = shared(fasta, tmp_path / "out", fakes.hash_config(loader_workers=1), owners=1)
    run.start(0).join()
    assert run.outcomes[0].state == "complete", run.outcomes[0].reason
    check_rows(run.aggregate().output_path, sequences)


def test_a_worker_of_another_start_of_the_run_is_refused(tmp_path, proteins, shared):
    run = shared(proteins[0], tmp_path / "out", fakes.hash_config(), owners=1)
    run.layout.lock.write_text(json.dumps({"host": "a", "pid": os.getpid(), "run_id": "the next", "since": "now"}))
    run.start(0).join()
    assert run.outcomes[0].state == "failed"
    assert "in use by another run" in run.outcomes[0].reason
    assert SequenceIndex.open(run.layout.index)
