"""Several hosts, each a process group of its own with another name, that share one run through its folder."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import fakes
from tests.device_tasks import Host
from tests.settings import embedding_config
from tests.strategies import edit_manifest
from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.errors import ExitCode, HostCheckError, OutputError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hosts import host_check, host_run
from virnucpro.pipeline.hosts.device_task import device_here, weights_here
from virnucpro.pipeline.hosts.host_check import check_host
from virnucpro.pipeline.hosts.host_memory import sha256_once
from virnucpro.pipeline.hosts.host_run import HostRun, device_tasks
from virnucpro.pipeline.multi_gpu_inference import run_embedding, run_multi_gpu_inference
from virnucpro.pipeline.run.run_completion import aggregate_run, close_run, validate_run
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.pipeline.work.unit_claims import owners_of_done
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.lease import Lease
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry

EXAMPLE = Path(__file__).parents[2] / "examples" / "proteins.fasta"
CHECK_S = 10.0


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
    """One start of a run on several hosts."""

    def __init__(self, stack, tmp_path, fasta, config, *, tasks=2, lease_s=60.0, run_id="abcdef012345", **prepared):
        layout = RunLayout(tmp_path / "out")
        self.tmp_path, self.stack = tmp_path, stack
        stack.enter_context(RunLock(layout.lock, run_id=run_id))
        self.run = prepare_run(
            [fasta], layout.output_dir, config, device_tasks(tasks, "cpu"), run_id=run_id, **prepared
        )
        self.telemetry = EmbeddingTelemetry(self.run.facts())
        self.hosts = HostRun(self.run, self.telemetry, lease_s=lease_s)
        stack.enter_context(self.hosts)

    def host(self, name, rank, run=None):
        host = Host(name, run or self.run, rank, self.tmp_path)
        self.stack.callback(host.close)
        return host

    def aggregate(self):
        aggregation = aggregate_run(self.run, self.hosts.outcomes, self.hosts.excuses())
        validate_run(self.run, aggregation)
        return aggregation


@pytest.fixture
def shared(tmp_path):
    with ExitStack() as stack:
        yield lambda *args, **settings: SharedRun(stack, tmp_path, *args, **settings)


@pytest.fixture
def prepared(shared, proteins):
    """A run that waits for its hosts."""
    return shared(proteins[0], fakes.hash_config()).run


def with_its_sha256(config):
    return replace(config, weights_sha256=durable.sha256_of(Path(config.weights_path)))


def wait_until(is_so, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


# --- a run on two hosts ---


def test_two_hosts_share_a_run_which_is_counted_and_closed_like_any_other(tmp_path, proteins, shared):
    fasta, sequences = proteins
    slow = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.1}, sequences_per_part=1)
    run = shared(fasta, with_its_sha256(slow))
    tasks = [run.host("host-a", 0), run.host("host-b", 1)]
    outcomes = [task.outcome() for task in tasks]
    for outcome in outcomes:
        run.hosts.take(outcome)
    assert [(outcome.host, outcome.rank.state) for outcome in outcomes] == [
        ("host-a", "complete"),
        ("host-b", "complete"),
    ]
    assert run.hosts.is_done()
    assert [outcome.host for outcome in run.hosts.outcomes] == ["host-a", "host-b"]
    owners = owners_of_done(run.run.layout.units(run.run.run_id).folder, range(len(run.hosts.units)))
    assert {owner.split(".")[0] for owner in owners.values()} == {"host-a", "host-b"}
    run.hosts.__exit__()
    snapshot = run.telemetry.snapshot()
    assert (snapshot.rows, snapshot.tokens_left) == (len(sequences), 0)
    assert [rank.state.value for rank in snapshot.ranks] == ["complete", "complete"]
    assert [rank.sequences for rank in snapshot.ranks] == [outcome.rank.sequences for outcome in outcomes]
    result = close_run(run.run, run.hosts.outcomes, run.aggregate(), stages_s={})
    assert result.state == "complete"
    with read_embeddings(result.output_path) as rows:
        assert all(np.array_equal(rows[name], fakes.hash_vector(sequence)) for name, sequence in sequences.items())
    assert not run.run.layout.all_units_dir.exists()
    assert len(run.run.layout.worker_logs()) == 2


@pytest.mark.slow
@pytest.mark.long  # the cluster tests show the same with a real engine
def test_hosts_that_share_a_run_give_the_shards_of_one_machine(tmp_path, proteins, shared):
    fasta, sequences = proteins
    config = with_its_sha256(fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.05}))
    alone = run_embedding([fasta], tmp_path / "alone", config, [CPU], result_form=ResultForm.SHARDED).output_path
    run = shared(fasta, config, result_form=ResultForm.SHARDED)
    for task in [run.host("host-a", 0), run.host("host-b", 1)]:
        run.hosts.take(task.outcome())
    aggregation = run.aggregate()
    assert close_run(run.run, run.hosts.outcomes, aggregation, stages_s={}).state == "complete"
    together = aggregation.output_path
    assert [path.name for path in sorted(together.iterdir())] == [path.name for path in sorted(alone.iterdir())]
    assert all(path.read_bytes() == (alone / path.name).read_bytes() for path in together.iterdir())
    with read_embeddings(together) as rows:
        assert all(np.array_equal(rows[name], fakes.hash_vector(sequence)) for name, sequence in sequences.items())
    assert verify_run(run.run.layout.output_dir).problems == []


def test_a_folder_that_does_not_answer_is_asked_again_for_as_long_as_a_lease_lasts(proteins, shared, monkeypatch):
    run = shared(proteins[0], fakes.hash_config(), lease_s=0.4)

    def away(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(host_run, "numbers_in", away)
    assert not run.hosts.is_done()
    time.sleep(0.5)
    with pytest.raises(OutputError, match="Stale file handle"):
        run.hosts.is_done()
    monkeypatch.undo()
    assert not run.hosts.is_done()


def test_ranks_whose_tasks_show_that_they_live_are_told(proteins, shared):
    run = shared(proteins[0], fakes.hash_config(), lease_s=0.4)
    units = run.run.layout.units(run.run.run_id)
    assert run.hosts.ranks_at_work() == set()
    with Lease(units.owner("host-a.1.x"), {"rank": 1}, lease_s=0.4):
        time.sleep(0.6)
        assert run.hosts.ranks_at_work() == {1}
    assert run.hosts.ranks_at_work() == set()
    units.owner("host-b.1.x").write_text('{"rank": 0}')  # killed: nobody renews it
    assert run.hosts.ranks_at_work() == {0}
    time.sleep(0.6)
    assert run.hosts.ranks_at_work() == set()


@pytest.mark.slow
@pytest.mark.long  # a minute; the cluster of two nodes shows the same in the shorter form
def test_a_host_that_is_lost_in_mid_run_is_replaced_and_the_bytes_are_those_of_one_machine(tmp_path, shared):
    config = replace(embedding_config(), token_budget=1024, sequences_per_part=16)
    expected, _ = run_multi_gpu_inference([EXAMPLE], tmp_path / "alone", config, 1)
    run = shared(EXAMPLE, replace(config, loader="tests.fakes:load_slow_bundled_encoder"), lease_s=3.0)
    tasks = [run.host("host-a", 0), run.host("host-b", 1)]
    wait_until(lambda: all(rank.sequences for rank in run.telemetry.snapshot().ranks))
    tasks[0].lose()
    assert not run.hosts.is_done()
    run.hosts.take_lost(0, "host-a is gone")
    run.hosts.take(tasks[1].outcome())
    assert [outcome.state for outcome in run.hosts.outcomes] == ["failed", "complete"]
    assert run.hosts.is_done()
    assert run.aggregate().output_path.read_bytes() == expected.read_bytes()


@pytest.mark.slow
@pytest.mark.long  # the cluster tests show the same with a real engine
def test_a_host_that_comes_later_or_comes_back_takes_part(tmp_path, proteins, shared):
    fasta, sequences = proteins
    slow = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.2}, sequences_per_part=1)
    run = shared(fasta, with_its_sha256(slow), lease_s=2.0)
    lost = run.host("host-a", 0)
    wait_until(lambda: run.telemetry.snapshot().ranks[0].sequences)
    lost.lose()
    later = run.host("host-b", 1)
    back = run.host("host-a", 0)
    for task in (later, back):
        run.hosts.take(task.outcome())
    assert [outcome.state for outcome in run.hosts.outcomes] == ["complete"] * 2
    assert all(outcome.sequences for outcome in run.hosts.outcomes)
    assert run.aggregate().num_rows == len(sequences)


def test_a_task_that_begins_when_nothing_is_left_starts_no_process_and_one_that_never_began_is_no_failure(
    tmp_path, proteins, shared
):
    config = with_its_sha256(fakes.faulty_config(tmp_path / "faults.json", {"how": "none"}))
    run = shared(proteins[0], config, tasks=3)
    run.hosts.take(run.host("host-a", 0).outcome())
    late = run.host("host-b", 1).outcome()
    run.hosts.take(late)
    run.hosts.take_unused(2)
    assert (late.rank.state, late.rank.host, late.rank.pids) == ("complete", "host-b", [])
    assert [outcome.state for outcome in run.hosts.outcomes] == ["complete", "complete", "stopped"]
    aggregation = run.aggregate()
    assert aggregation.is_complete
    assert close_run(run.run, run.hosts.outcomes, aggregation, stages_s={}).lost_ranks == ""


def test_a_sequence_that_kills_its_process_is_given_up_there_and_listed_with_its_reason(tmp_path, proteins, shared):
    fasta, sequences = proteins
    with fasta.open("a") as file:
        file.write(f">its_copy\n{sequences['protein_31']}\n")
    control = {"how": "none", "poison": {sequences["protein_31"]: "segfault"}}
    run = shared(fasta, with_its_sha256(fakes.faulty_config(tmp_path / "faults.json", control)), tasks=1)
    outcome = run.host("host-a", 0).outcome()
    run.hosts.take(outcome)
    assert outcome.rank.state == "complete"
    ((position, (failure, attempts)),) = outcome.quarantined.items()
    assert (run.run.open_index().sequence_id(position), failure) == ("protein_31", "died")
    aggregation = run.aggregate()
    listed = run.run.layout.failed_sequences.read_text().splitlines()
    assert listed[1:] == [f"{name}\tdied\t{attempts}" for name in ("protein_31", "its_copy")]
    deaf = EmbeddingTelemetry(run.run.facts())
    deaf.aggregated(run.run.missing_of_blocks(aggregation.missing_positions))
    assert deaf.snapshot().rows == aggregation.num_rows == len(sequences) - 1


@pytest.mark.slow
@pytest.mark.long  # the cluster tests show the same with a real engine
def test_the_units_of_a_host_whose_device_is_broken_are_free_for_the_others_at_once(tmp_path, proteins, shared):
    fasta, sequences = proteins
    (tmp_path / "lost").write_text("1")
    broken = fakes.hash_config(loader="tests.fakes:load_model_that_ranks_lose", weights_path=str(tmp_path / "lost"))
    run = shared(fasta, with_its_sha256(broken), lease_s=1000.0)
    failed = run.host("host-a", 0).outcome()
    run.hosts.take(failed)
    assert (failed.rank.state, failed.rank.failure) == ("failed", "died")
    run.hosts.take(run.host("host-b", 1).outcome())
    assert run.hosts.outcomes[1].sequences == len(sequences)
    assert run.aggregate().is_complete


@pytest.mark.slow
@pytest.mark.long  # the cluster tests show the same with a real engine
def test_a_run_that_is_told_to_stop_stops_on_every_host_and_the_next_start_does_the_rest(tmp_path, proteins, shared):
    fasta, sequences = proteins
    slow = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.2})
    run = shared(fasta, with_its_sha256(slow))
    tasks = [run.host("host-a", 0), run.host("host-b", 1)]
    wait_until(lambda: all(rank.sequences for rank in run.telemetry.snapshot().ranks))
    run.hosts.stop()
    outcomes = [task.outcome() for task in tasks]
    assert [outcome.rank.state for outcome in outcomes] == ["stopped"] * 2
    run.stack.close()
    kept = sum(outcome.rank.sequences for outcome in outcomes)
    with ExitStack() as stack:
        again = SharedRun(stack, tmp_path, fasta, with_its_sha256(slow), tasks=1, run_id="fedcba543210")
        outcome = again.host("host-c", 0).outcome()
        again.hosts.take(outcome)
        assert outcome.rank.sequences == len(sequences) - kept
        assert again.telemetry.snapshot().tokens_left == 0 or again.hosts.is_done()
        assert again.aggregate().is_complete


def test_device_tasks_end_when_their_driver_is_gone(tmp_path, proteins, shared):
    slow = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.5})
    run = shared(proteins[0], with_its_sha256(slow), tasks=1, lease_s=2.0)
    task = run.host("host-a", 0)
    wait_until(lambda: run.telemetry.snapshot().ranks[0].sequences)
    run.hosts._lease._ending.set()  # as if it had been killed
    assert task.outcome(30).rank.state == "stopped"
    assert not run.hosts.is_done()


# --- what a host is asked before ---


def expect_refusal(run, *words, exit_code=ExitCode.CONFIGURATION, path=None):
    began_s = time.monotonic()
    with pytest.raises(HostCheckError) as caught:
        check_host(run, "host-x.1.ab")
    assert time.monotonic() - began_s < CHECK_S
    assert caught.value.exit_code == exit_code
    assert "host host-x cannot take part" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    if path is not None:
        assert caught.value.path == str(path)


@pytest.fixture
def on_host_x(monkeypatch, tmp_path):
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "host-x")
    (tmp_path / "host-x").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "host-x"))


def test_a_host_that_sees_everything_is_fine_and_leaves_nothing_behind(prepared, on_host_x):
    before = sorted(path.name for path in prepared.output_dir.iterdir())
    check_host(prepared, "host-x.1.ab")
    assert sorted(path.name for path in prepared.output_dir.iterdir()) == before


@pytest.mark.usefixtures("on_host_x")
def test_an_input_of_another_size_is_named(prepared, proteins):
    with proteins[0].open("a") as file:
        file.write(">one_more\nMKV\n")
    expect_refusal(prepared, "it is another file", "bytes", path=proteins[0])


@pytest.mark.usefixtures("on_host_x")
@pytest.mark.parametrize("sample", [64, 0])
def test_an_input_of_the_same_size_and_other_content_is_named(prepared, proteins, monkeypatch, sample):
    monkeypatch.setattr(host_check, "SAMPLE", sample)
    text = proteins[0].read_text()
    longest = max(proteins[1].values(), key=len)
    proteins[0].write_text(text.replace(longest, longest[::-1]))
    expect_refusal(prepared, "it is another file", path=proteins[0])


@pytest.mark.usefixtures("on_host_x")
def test_a_large_input_is_checked_by_a_sample(prepared, proteins, monkeypatch):
    monkeypatch.setattr(host_check, "HASHED_BYTES", 10)
    longest = max(proteins[1].values(), key=len)
    proteins[0].write_text(proteins[0].read_text().replace(longest, longest[::-1]))
    expect_refusal(prepared, "another file of the same size", path=proteins[0])


@pytest.mark.usefixtures("on_host_x")
def test_an_input_that_is_not_there_is_named(prepared, proteins):
    proteins[0].rename(proteins[0].with_suffix(".elsewhere"))
    expect_refusal(prepared, "No such file", "every host needs the input under the same path", path=proteins[0])


@pytest.mark.usefixtures("on_host_x")
def test_another_folder_under_the_same_name_is_named(prepared, tmp_path):
    shutil.copytree(prepared.output_dir, tmp_path / "local")
    shutil.rmtree(RunLayout(tmp_path / "local").all_units_dir)
    expect_refusal(
        replace(prepared, output_dir=tmp_path / "local"), "is not the output folder", path=tmp_path / "local"
    )


def test_a_folder_that_cannot_be_written_is_named_with_the_exit_code_for_it(for_all_users, proteins, on_host_x):
    fasta = shutil.copy(proteins[0], for_all_users)
    with ExitStack() as stack:
        run = SharedRun(stack, for_all_users, fasta, fakes.hash_config()).run
        with fakes.another_user():
            expect_refusal(run, "cannot be written", "denied", exit_code=ExitCode.CANNOT_WRITE, path=run.output_dir)


@pytest.mark.usefixtures("on_host_x")
def test_other_versions_are_named(prepared):
    edit_manifest(prepared.layout.manifest, lambda values: values["settings"].update({"torch version": "1.0"}))
    expect_refusal(prepared, "torch version is 1.0")


@pytest.mark.usefixtures("on_host_x")
def test_a_folder_that_does_not_answer_is_named_in_time(prepared, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(host_check, "read_units", lambda _: answers.wait(60))
    expect_refusal(prepared, "did not answer", path=prepared.output_dir)
    answers.set()


def test_a_refused_host_embeds_nothing_and_the_error_crosses_processes(proteins, shared, tmp_path):
    run = shared(proteins[0], fakes.hash_config(), tasks=1)
    with proteins[0].open("a") as file:
        file.write(">one_more\nMKV\n")
    with pytest.raises(HostCheckError, match="host host-y cannot take part"):
        run.host("host-y", 0).outcome()
    assert run.hosts.num_done() == 0
    assert run.run.layout.worker_logs() == []


@pytest.mark.usefixtures("on_host_x")
def test_a_file_is_hashed_once_for_a_start_of_a_run_and_again_when_it_changes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    about, first = path.stat(), sha256_once(path, run_id="r")
    path.write_bytes(b"two")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert sha256_once(path, run_id="r") == first, "it was read again"
    assert sha256_once(path, run_id="the next") == durable.sha256_of(path) != first
    os.utime(path)
    assert sha256_once(path, run_id="r") == durable.sha256_of(path)


@pytest.mark.usefixtures("on_host_x")
def test_a_memory_that_others_could_write_is_not_believed(tmp_path):
    (tmp_path / "host-x" / f"virnucpro-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / "host-x" / f"virnucpro-{os.geteuid()}").chmod(0o777)
    (tmp_path / "file").write_bytes(b"one")
    assert sha256_once(tmp_path / "file", run_id="r") == durable.sha256_of(tmp_path / "file")
    assert list((tmp_path / "host-x").glob("*/*")) == []


@pytest.mark.usefixtures("on_host_x")
def test_weights_that_are_elsewhere_on_this_host_are_found_by_the_models_name():
    config = embedding_config()
    found = weights_here(replace(config, weights_path="/another/host/model.safetensors"), run_id="r")
    assert found == config


@pytest.mark.usefixtures("on_host_x")
def test_other_weights_under_the_same_path_are_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"others")
    config = replace(embedding_config(), weights_path=str(tmp_path / "model.pt"))
    with pytest.raises(HostCheckError, match=r"host-x.*the run's weights have"):
        weights_here(config, run_id="r")


# --- devices ---


def test_the_gpu_that_the_orchestrator_chose_is_taken_and_of_several_each_task_gets_another(monkeypatch, tmp_path):
    monkeypatch.setenv("VIRNUCPRO_LOCK_DIR", str(tmp_path / "locks"))
    stop = threading.Event()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with device_here("cuda", run_id="r", stop=stop) as one, device_here("cuda", run_id="r", stop=stop) as other:
        assert (one.token, other.token) == ("3", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with device_here("cuda", run_id="r", stop=stop) as one, device_here("cuda", run_id="r", stop=stop) as other:
        assert (one.token, other.token) == ("4", "5")
        waiting = threading.Timer(0.5, stop.set)
        waiting.start()
        with device_here("cuda", run_id="r", stop=stop):
            assert stop.is_set(), "a third task waits until it is told to stop"
    with device_here("cpu", run_id="r", stop=stop) as device:
        assert device == CPU


@pytest.mark.usefixtures("on_host_x")
def test_a_host_without_a_visible_gpu_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.raises(HostCheckError, match=r"host-x.*none is visible here"),
        device_here("cuda", run_id="r", stop=threading.Event()),
    ):
        pass
