"""The worker function, run in a real spawned process by the coordinator."""

from __future__ import annotations

import json
import random

import h5py
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tests import fakes
from virnucpro.choices import SequenceKind
from virnucpro.config import RunLimits
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex, get_worker_indices
from virnucpro.pipeline import gpu_worker as worker_module
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator
from virnucpro.pipeline.gpu_worker import LOADERS_TOKENS, gpu_worker, loader_processes
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import SealedBlocks, part_paths


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(5)
    sequences = {
        f"protein_{number}": "".join(chooser.choice("ACDEFGHIKLMNPQRSTVWY") for _ in range(chooser.randint(1, 40)))
        for number in range(60)
    }
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path, sequences


def index_into(layout, fasta):
    return SequenceIndex.build([fasta], layout.index, unpack_dir=layout.unpacked_dir)


def run_workers(layout, config, world_size, *, devices=None, attempts=1, on_message=None):
    coordinator = GPUProcessCoordinator(
        world_size,
        layout.output_dir,
        devices=devices or [CPU] * world_size,
        limits=RunLimits(attempts=attempts, stop_grace_s=5.0),
        on_message=on_message,
    )
    with coordinator:
        coordinator.spawn_workers(gpu_worker, (str(layout.index), str(layout.output_dir), config))
        coordinator.wait_for_completion(120)
        return coordinator.outcomes, {report["rank"]: report for report in coordinator.collect_results()}


def test_a_worker_writes_its_shard_and_reports_it(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index = index_into(layout, fasta)
    outcomes, reports = run_workers(layout, fakes.hash_config(), 2)
    plan = make_plan(index, fakes.hash_config(), device_type="cpu")
    seen = {}
    for rank in range(2):
        mine = get_worker_indices(index, rank, 2, plan)
        assert reports[rank] == {
            "rank": rank,
            "status": "complete",
            "shard_path": str(layout.shard(rank)),
            "num_sequences": len(mine),
        }
        with h5py.File(layout.shard(rank)) as shard:
            assert shard["embeddings"].dtype == np.float32
            assert shard["embeddings"].shape == (len(mine), fakes.HASH_WIDTH)
            names = [name.decode() for name in shard["sequence_ids"][:]]
            assert names == index.sequence_ids(mine)
            seen.update(zip(names, shard["embeddings"][:], strict=True))
        assert outcomes[rank].sequences == len(mine)
    assert sorted(seen) == sorted(sequences)
    for name, sequence in sequences.items():
        assert np.array_equal(seen[name], fakes.hash_vector(sequence))
    assert part_paths(layout.parts_dir) == []


def test_logging_is_the_first_act_tells_rank_and_device_and_sums_the_shard_up(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    outcomes, _ = run_workers(layout, fakes.hash_config(), 2)
    for rank in range(2):
        lines = [json.loads(line) for line in (layout.log_dir / f"worker_{rank}.log").read_text().splitlines()]
        assert lines[0]["event"] == "worker.started"
        assert {(line["rank"], line["device"]) for line in lines} == {(rank, "cpu")}
        (summary,) = [line for line in lines if line["event"] == "shard.finished"]
        assert summary["rows"] == summary["sequences"] == outcomes[rank].sequences > 0
        assert summary["tokens"] == outcomes[rank].tokens > 0
        assert 0 < summary["seconds"] <= outcomes[rank].seconds
        assert summary["tokens_per_second"] >= summary["tokens"] / summary["seconds"] - 1


def test_logging_works_even_when_the_index_does_not(tmp_path):
    layout = RunLayout(tmp_path / "out")
    layout.work_dir.mkdir(parents=True)
    layout.index.write_bytes(b"not an index")
    outcomes, reports = run_workers(layout, fakes.hash_config(), 1, attempts=3)
    assert (outcomes[0].exit_code, outcomes[0].attempts, outcomes[0].failure) == (65, 1, "bad_input")
    assert reports[0]["status"] == "failed"
    assert "not a usable sequence index" in reports[0]["error"]
    assert "worker.failed" in (layout.log_dir / "worker_0.log").read_text()


def test_a_worker_that_may_not_even_begin_has_said_why_in_its_log(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    layout.lock.write_text(json.dumps({"pid": 1, "run_id": "another"}))  # the first thing that a worker looks at
    outcomes, _ = run_workers(layout, fakes.hash_config(), 1)
    assert outcomes[0].state == "failed"
    events = [json.loads(line)["event"] for line in (layout.log_dir / "worker_0.log").read_text().splitlines()]
    assert events == ["worker.failed"]


def test_the_attention_kernel_is_logged_with_its_reason_and_reported(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    outcomes, _ = run_workers(layout, fakes.hash_config(), 1)
    lines = [json.loads(line) for line in (layout.log_dir / "worker_0.log").read_text().splitlines()]
    (chosen,) = [line for line in lines if line["event"] == "attention.chosen"]
    assert (chosen["kernel"], chosen["reason"]) == ("no attention", "a hash needs none")
    assert outcomes[0].to_json()["attention_kernel"] == "no attention"


@pytest.mark.parametrize(
    ("of_the_run", "state"), [("varlen_attn", "failed"), ("no attention + varlen_attn", "complete")]
)
def test_rows_are_only_computed_with_the_attention_kernels_of_the_run(tmp_path, proteins, of_the_run, state):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    outcomes, _ = run_workers(layout, fakes.hash_config(attention_kernel=of_the_run), 1, attempts=3)
    assert (outcomes[0].state, outcomes[0].attempts) == (state, 1)
    if state == "failed":
        assert outcomes[0].failure == "configuration"
        assert "kernel varlen_attn, but this device would use no attention" in outcomes[0].reason


def test_zero_sequences_is_a_success_with_an_empty_shard(tmp_path):
    layout = RunLayout(tmp_path / "out")
    fasta = tmp_path / "one.fasta"
    fasta.write_text(">only\nMKV\n")
    index_into(layout, fasta)
    outcomes, reports = run_workers(layout, fakes.hash_config(), 3)
    assert [outcomes[rank].state for rank in range(3)] == ["complete"] * 3
    assert [reports[rank]["num_sequences"] for rank in range(3)] == [1, 0, 0]
    with h5py.File(layout.shard(2)) as shard:
        assert shard["embeddings"].shape == (0, fakes.HASH_WIDTH)
        assert shard["sequence_ids"].shape == (0,)


def test_a_worker_that_fails_reports_why_and_exits_non_zero(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    config = fakes.faulty_config(tmp_path / "faults.json", {"while_loading": "raise"})
    outcomes, reports = run_workers(layout, config, 1)
    assert outcomes[0].exit_code == 70
    assert reports[0]["status"] == "failed"
    assert reports[0]["error"] == "RuntimeError: a fault that the test asked for"
    assert reports[0]["failure"] == "application_error"
    last = json.loads((layout.log_dir / "worker_0.log").read_text().splitlines()[-1])
    assert last["event"] == "worker.failed"
    assert last["exception"][0]["exc_value"] == "a fault that the test asked for"


def test_a_loader_that_is_not_there_is_a_mistake_of_settings(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    outcomes, _ = run_workers(layout, fakes.hash_config(loader="tests.fakes:nope"), 1)
    assert outcomes[0].failure == "configuration"
    assert "the loader tests.fakes:nope of hash cannot be used" in outcomes[0].reason


def test_a_number_that_is_not_finite_names_its_sequence_to_the_parent_and_in_the_log(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index = index_into(layout, fasta)
    name = "protein_31"
    config = fakes.hash_config(loader="tests.fakes:load_poisoned_model", weights_path=sequences[name])
    heard = []
    outcomes, reports = run_workers(layout, config, 1, on_message=lambda _, message: heard.append(message))
    (failed,) = [message for message in heard if message.get("kind") == "sequence_failed"]
    assert (index.sequence_id(failed["position"]), failed["failure"]) == (name, "not_finite")
    lines = [json.loads(line) for line in (layout.log_dir / "worker_0.log").read_text().splitlines()]
    (line,) = [line for line in lines if line["event"] == "sequence.failed"]
    assert (line["sequence_id"], line["reason"]) == (name, "the model gave a number that is not finite")
    assert outcomes[0].state == "complete"
    assert reports[0]["num_sequences"] == len(sequences) - 1
    names = [some for part in SealedBlocks.open(layout.shard(0)).iter_sequence_ids() for some in part]
    assert sorted(names) == sorted(sequences.keys() - {name})


def test_what_was_finished_before_a_failure_is_kept_and_not_computed_again(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index = index_into(layout, fasta)
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": "refuse", "before_batch": 3})
    run_workers(layout, config, 1)
    plan = make_plan(index, config, device_type="cpu")
    finished = sum(len(plan.block_positions(block)) for block in range(3))
    kept = [SealedBlocks.open(path) for path in part_paths(layout.parts_dir)]
    assert sum(len(part.positions) for part in kept) == finished
    outcomes, reports = run_workers(layout, config, 1)  # the fault is used up
    assert outcomes[0].sequences_resumed == finished
    assert outcomes[0].sequences == len(sequences) - finished
    assert reports[0]["num_sequences"] == len(sequences)


def test_a_corrupt_part_is_computed_again(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index_into(layout, fasta)
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 6})
    run_workers(layout, config, 1)
    first, *others = part_paths(layout.parts_dir)
    rows_intact = sum(len(SealedBlocks.open(path).positions) for path in others)
    damaged = bytearray(first.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    first.write_bytes(damaged)
    outcomes, _ = run_workers(layout, config, 1)
    assert outcomes[0].sequences_resumed == rows_intact
    assert outcomes[0].sequences == len(sequences) - rows_intact


def test_a_kill_costs_at_most_the_blocks_since_the_last_part(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 10})
    outcomes, _ = run_workers(layout, config, 1)
    assert outcomes[0].exit_code == -9
    kept = sum(len(SealedBlocks.open(path).positions) for path in part_paths(layout.parts_dir))
    assert 0 <= outcomes[0].sequences - kept < config.sequences_per_part


def test_sigterm_stops_at_a_batch_boundary_and_keeps_the_finished_blocks(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index_into(layout, fasta)
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.2}, sequences_per_part=1000)
    coordinator = GPUProcessCoordinator(1, layout.output_dir, devices=[CPU], limits=RunLimits(stop_grace_s=10.0))
    with coordinator:
        coordinator.spawn_workers(gpu_worker, (str(layout.index), str(layout.output_dir), config))
        while coordinator.outcomes[0].sequences < 5 and coordinator.workers[0].is_alive():
            coordinator.wait_for_completion(0.05)
        coordinator.terminate_all()
        outcome = coordinator.outcomes[0]
    assert (outcome.state, outcome.exit_code) == ("stopped", 143)
    kept = sum(len(SealedBlocks.open(path).positions) for path in part_paths(layout.parts_dir))
    assert 5 <= kept == outcome.sequences < len(sequences)


def test_an_input_that_changed_after_it_was_indexed_is_refused(tmp_path, proteins):
    fasta, sequences = proteins
    layout = RunLayout(tmp_path / "out")
    index_into(layout, fasta)
    text = fasta.read_text()
    longest = max(sequences.values(), key=len)
    fasta.write_text(text.replace(longest, longest[::-1]))
    outcomes, reports = run_workers(layout, fakes.hash_config(), 1, attempts=3)
    assert (outcomes[0].exit_code, outcomes[0].attempts) == (65, 1)
    assert "the file changed after it was indexed" in reports[0]["error"]


def test_a_gpu_that_is_not_there_is_a_configuration_error(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    index_into(layout, proteins[0])
    outcomes, reports = run_workers(layout, fakes.hash_config(), 1, devices=[Device("97")], attempts=3)
    assert (outcomes[0].exit_code, outcomes[0].attempts) == (78, 1)
    assert "device 97 was asked for" in reports[0]["error"]


MUCH = LOADERS_TOKENS


@pytest.mark.parametrize(
    ("asked", "device", "kind", "tokens", "cores", "chosen"),
    [
        (None, "cuda", SequenceKind.DNA, MUCH, 3, 2),
        (None, "cuda", SequenceKind.DNA, MUCH, 64, 2),
        (None, "cuda", SequenceKind.DNA, MUCH, 2, 0),
        (None, "cuda", SequenceKind.DNA, MUCH - 1, 64, 0),
        (None, "cuda", SequenceKind.PROTEIN, MUCH, 64, 0),
        (None, "cpu", SequenceKind.DNA, MUCH, 64, 0),
        (0, "cuda", SequenceKind.DNA, MUCH, 64, 0),
        (5, "cuda", SequenceKind.PROTEIN, 1, 1, 5),
        (5, "cpu", SequenceKind.DNA, 1, 1, 5),
    ],
)
@pytest.mark.parametrize("workers", [1, 4])
def test_much_dna_on_a_gpu_with_cores_to_spare_gets_loaders(
    monkeypatch, asked, device, kind, tokens, cores, chosen, workers
):
    monkeypatch.setattr(worker_module, "usable_cores", lambda: cores * workers)
    config = fakes.hash_config(sequence_kind=kind, loader_processes=asked)
    assert loader_processes(config, torch.device(device), tokens=tokens * workers, workers=workers) == chosen


def test_without_shared_memory_there_are_no_loaders_and_the_log_says_why(monkeypatch):
    class Full:
        def Event(self):  # noqa: N802  multiprocessing's name
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("virnucpro.data.collators.multiprocessing.get_context", lambda _method: Full())
    monkeypatch.setattr(worker_module, "usable_cores", lambda: 8)
    config = fakes.hash_config(sequence_kind=SequenceKind.DNA)
    with capture_logs() as lines:
        assert loader_processes(config, torch.device("cuda"), tokens=MUCH, workers=1) == 0
    assert [(line["event"], line["log_level"]) for line in lines] == [("loaders.left_out", "warning")]
    assert "/dev/shm (No space left on device)" in lines[0]["reason"]
