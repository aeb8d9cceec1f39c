"""
Rows 15 and 17 to 19: memory that runs out, workers that cannot start, ranks that are lost for good.

As long as one device works, every sequence gets its row, and the ranks that were lost are named.
"""

from __future__ import annotations

import json
import random
import time

import pytest

from tests import fakes
from tests.faults.processes import compare_rows, hash_command, make_proteins
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, WorkersFailedError
from virnucpro.pipeline import failures
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.verification import verify_run


@pytest.fixture
def proteins(tmp_path, seed):
    return tmp_path / "in.fasta", make_proteins(tmp_path / "in.fasta", random.Random(seed), 80)


def check_complete(out, sequences):
    found = compare_rows(out, sequences)
    assert (found.lost, found.duplicated, found.differing) == (0, 0, 0)
    assert verify_run(out).problems == []


def test_with_one_healthy_device_the_command_completes_and_names_the_ranks_that_were_lost(tmp_path, proteins):
    fasta, sequences = proteins
    command = hash_command(tmp_path / "run", fasta, rank=1, how="exit7", before_batch=0, times=99, failures_first=3)
    out = tmp_path / "out"
    assert command.run(out, workers=2) == 0, command.errors()
    check_complete(out, sequences)
    manifest = json.loads((out / "run.json").read_text())
    assert (manifest["state"], manifest["counts"]["missing"]) == ("complete", 0)
    assert [rank["state"] for rank in manifest["ranks"]] == ["complete", "failed"]
    failures = manifest["ranks"][1]["failures"]
    assert failures == ["died"] * len(failures)
    assert 3 <= len(failures) <= 5, "two more where only suspects were left to try"
    assert f"rank 1 on cpu failed in attempt {len(failures)} (died)" in command.errors()
    assert "ranks.lost" in command.errors()
    assert "Traceback" not in command.errors()


def test_a_device_that_goes_costs_no_sequence_its_row(tmp_path, proteins):
    fasta, sequences = proteins
    config = fakes.hash_config(
        loader="tests.fakes:load_model_whose_device_goes", weights_path=str(tmp_path / "gone"), token_budget=64
    )
    result = run_embedding([fasta], tmp_path / "out", config, [CPU] * 2)
    assert (result.state, result.failed_ranks, result.num_missing) == ("complete", [0], 0)
    assert set(result.ranks[0].failures) == {"device_error"}
    check_complete(tmp_path / "out", sequences)


@pytest.mark.slow
@pytest.mark.parametrize("seed_of_lengths", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_a_device_that_goes_slowly_costs_no_row_and_is_named(tmp_path, seed_of_lengths):
    sequences = make_proteins(tmp_path / "in.fasta", random.Random(seed_of_lengths), 80)
    config = fakes.hash_config(
        loader="tests.fakes:load_model_whose_device_fails_slowly", weights_path=str(tmp_path / "gone"), token_budget=64
    )
    result = run_embedding([tmp_path / "in.fasta"], tmp_path / "out", config, [CPU] * 2)
    print(f"missing {result.num_missing}, failed ranks {result.failed_ranks}, failures {result.ranks[0].failures}")
    assert (result.state, result.failed_ranks, result.num_missing) == ("complete", [0], 0)
    check_complete(tmp_path / "out", sequences)


def test_a_worker_that_cannot_start_ends_the_run_at_once_with_78(tmp_path, proteins):
    command = hash_command(tmp_path / "run", proteins[0], while_loading="import_error")
    began_s = time.monotonic()
    assert command.run(tmp_path / "out", workers=1) == 78, command.errors()
    seconds = time.monotonic() - began_s
    print(f"a worker that cannot start: the command ended after {seconds:.1f} s, promised 10 s")
    assert seconds < 30
    assert "no such package, said the fake" in command.errors()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["ranks"][0]["attempts"] == 1


def test_a_worker_function_that_cannot_be_imported_is_not_tried_again(tmp_path, proteins):
    with pytest.raises(ConfigurationError, match=r"tests\.fakes:nothing_like_it cannot be imported"):
        run_embedding(
            [proteins[0]], tmp_path / "out", fakes.hash_config(), [CPU], worker_fn="tests.fakes:nothing_like_it"
        ).raise_unless(allow_partial=False)


@pytest.mark.slow
@pytest.mark.long
def test_a_working_folder_that_was_removed_is_named_and_not_tried_again(tmp_path, proteins, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    result = run_embedding([proteins[0]], tmp_path / "out", fakes.hash_config(), [CPU])
    assert [(rank.attempts, rank.failure) for rank in result.ranks] == [(1, "configuration")]
    with pytest.raises(ConfigurationError, match="the folder that this command was started in was removed"):
        result.raise_unless(allow_partial=False)


def test_after_a_kill_for_lack_of_memory_the_rank_waits_until_another_has_ended(tmp_path, proteins, monkeypatch):
    fasta, sequences = proteins
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 3\n")
    monkeypatch.setenv("FAKE_MEMORY_EVENTS", str(events))
    monkeypatch.setattr(failures, "_own_events_file", lambda: events)
    plan = {"rank": 0, "how": "oom_kill", "before_batch": 0, "slow_s": 0.2}
    config = fakes.faulty_config(tmp_path / "faults.json", plan)
    said = []
    result = run_embedding([fasta], tmp_path / "out", config, [CPU] * 2, on_message=lambda *what: said.append(what))
    assert result.state == "complete"
    assert result.ranks[0].failures == ["oom_kill"]
    assert (result.ranks[0].attempts, result.ranks[1].attempts) == (2, 1)
    check_complete(tmp_path / "out", sequences)
    other_ended = next(number for number, (rank, message) in enumerate(said) if rank == 1 and "status" in message)
    started = [number for number, (rank, message) in enumerate(said) if rank == 0 and message.get("kind") == "resumed"]
    assert len(started) == 2
    assert started[0] < other_ended < started[1]


def test_a_device_that_holds_less_than_a_block_splits_it_and_says_so(tmp_path, proteins):
    fasta, sequences = proteins
    (tmp_path / "tokens.txt").write_text("45")
    config = fakes.hash_config(
        loader="tests.fakes:load_small_memory_model", weights_path=str(tmp_path / "tokens.txt"), token_budget=128
    )
    result = run_embedding([fasta], tmp_path / "out", config, [CPU])
    assert (result.state, result.promise) == ("complete", "tolerance")
    assert result.num_resplit_blocks > 0
    assert result.ranks[0].attempts == 1
    check_complete(tmp_path / "out", sequences)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("lost", [1, 3])
def test_all_ranks_but_some_lost_for_good_deliver_every_row(tmp_path, proteins, lost):
    fasta, sequences = proteins
    (tmp_path / "lost.txt").write_text(str(lost))
    config = fakes.hash_config(weights_path=str(tmp_path / "lost.txt"), loader="tests.fakes:load_model_that_ranks_lose")
    result = run_embedding([fasta], tmp_path / "out", config, [CPU] * 4)
    assert (result.state, result.failed_ranks) == ("complete", list(range(lost)))
    result.raise_unless(allow_partial=False)
    check_complete(tmp_path / "out", sequences)


@pytest.mark.slow
@pytest.mark.long
def test_when_every_rank_is_lost_nothing_is_blamed_on_the_sequences(tmp_path, proteins):
    fasta, sequences = proteins
    config = fakes.faulty_config(tmp_path / "faults.json", {"while_loading": "exit7"})
    result = run_embedding([fasta], tmp_path / "out", config, [CPU] * 2, limits=RunLimits(attempts=2))
    assert (result.state, result.num_rows, result.failed_ranks) == ("failed", 0, [0, 1])
    with pytest.raises(WorkersFailedError, match="2 of 2 workers failed, 80 of 80 sequences missing") as caught:
        result.raise_unless(allow_partial=True)
    assert caught.value.exit_code == 70
    (tmp_path / "faults.json").write_text(json.dumps({"times": 0, "before_batch": -1}))
    assert run_embedding([fasta], tmp_path / "out", config, [CPU]).state == "complete"
    check_complete(tmp_path / "out", sequences)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_lost_ranks_many_times(tmp_path, seed, soak_table):
    chooser = random.Random(seed)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        sequences = make_proteins(folder / "in.fasta", chooser, 200)
        lost = chooser.randint(1, 3)
        (folder / "lost.txt").write_text(str(lost))
        config = fakes.hash_config(
            weights_path=str(folder / "lost.txt"), loader="tests.fakes:load_model_that_ranks_lose"
        )
        result = run_embedding([folder / "in.fasta"], folder / "out", config, [CPU] * 4)
        found = compare_rows(folder / "out", sequences)
        # a rank that has attempts left when the others have computed everything is not lost
        is_wrong = result.state != "complete" or not set(result.failed_ranks) <= set(range(lost))
        soak_table(
            "one to three of four ranks lost for good",
            tries=1,
            lost=found.lost,
            duplicated=found.duplicated,
            differing=found.differing + is_wrong,
        )
        assert not is_wrong
        assert (found.lost, found.duplicated, found.differing) == (0, 0, 0)
