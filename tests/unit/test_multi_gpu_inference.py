"""The main job with real processes: result, failures, resumption, identity of bytes."""

from __future__ import annotations

import json
import random
import shutil
import threading

import psutil
import pytest

from tests import fakes
from tests.settings import embedding_config
from tests.strategies import MadeRun, edit_manifest
from virnucpro.config import RunLimits
from virnucpro.errors import (
    BadInputError,
    ConfigurationError,
    OutputError,
    SettingsChangedError,
    WorkersFailedError,
)
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding, run_esm2_multi_gpu, run_multi_gpu_inference
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import RunLayout
from virnucpro.store.parts import write_part
from virnucpro.store.reader import read_embeddings
from virnucpro.store.schema import BlockOrigin

ONCE = RunLimits(attempts=1, stop_grace_s=1.0)


@pytest.fixture(scope="module")
def proteins(tmp_path_factory):
    chooser = random.Random(11)
    sequences = {
        f"p{number}|é": "".join(chooser.choice("ACDEFGHIKLMNPQRSTVWY") for _ in range(chooser.randint(1, 40)))
        for number in range(80)
    }
    sequences["a_copy"] = sequences["p7|é"]
    path = tmp_path_factory.mktemp("input") / "proteins.fasta"
    path.write_text("".join(f">{name} described\n{sequence}\n" for name, sequence in sequences.items()))
    return path, sequences


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory, proteins):
    out = tmp_path_factory.mktemp("finished") / "out"
    run_embedding([proteins[0]], out, fakes.hash_config(), [CPU])
    return out


@pytest.fixture
def finished(tmp_path, finished_once):
    """The folder of a complete run of ``proteins``, which the test may change."""
    shutil.copytree(finished_once, tmp_path / "out")
    return tmp_path / "out"


def check_rows(path, sequences, *, missing=()):
    with read_embeddings(path) as embeddings:
        assert embeddings.ids == tuple(name for name in sequences if name not in missing)
        for name in embeddings.ids:
            assert (embeddings[name] == fakes.hash_vector(sequences[name])).all(), name


def failed_ids(layout):
    lines = layout.failed_sequences.read_text().splitlines()
    assert lines[0] == "sequence_id\treason\tattempts"
    return [line.split("\t") for line in lines[1:]]


def test_every_sequence_gets_its_row_in_the_order_of_the_input(tmp_path, proteins):
    fasta, sequences = proteins
    path, failed_ranks = run_multi_gpu_inference([fasta], tmp_path / "out", fakes.hash_config(), world_size=2)
    assert (path, failed_ranks) == (tmp_path / "out" / "embeddings.h5", [])
    check_rows(path, sequences)
    found = verify_run(tmp_path / "out")
    assert (found.state, found.num_rows, found.problems) == ("complete", len(sequences), [])


def test_files_keep_the_order_in_which_they_are_given(tmp_path):
    (tmp_path / "z.fa").write_text(">z\nMKVLA\n")
    (tmp_path / "a.fa").write_text(">a\nMKVLAMKV\n")
    path, _ = run_multi_gpu_inference([tmp_path / "z.fa", tmp_path / "a.fa"], tmp_path / "out", fakes.hash_config())
    assert read_embeddings(path).ids == ("z", "a")


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, proteins):
    fasta, _ = proteins
    results = {
        world_size: run_multi_gpu_inference([fasta], tmp_path / str(world_size), fakes.hash_config(), world_size)[0]
        for world_size in (1, 2, 3)
    }
    assert len({path.read_bytes() for path in results.values()}) == 1


@pytest.mark.slow
def test_more_workers_than_sequences(tmp_path):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">one\nMKV\n>two\nMKVA\n")
    path, failed_ranks = run_multi_gpu_inference([fasta], tmp_path / "out", fakes.hash_config(), world_size=4)
    assert failed_ranks == []
    check_rows(path, {"one": "MKV", "two": "MKVA"})


@pytest.mark.parametrize(
    "how",
    [
        "sigkill",
        *(pytest.param(how, marks=[pytest.mark.slow, pytest.mark.long]) for how in ("refuse", "exit7", "sigstop")),
    ],
)
def test_what_a_failed_run_finished_is_kept_and_a_second_run_completes_it(tmp_path, proteins, how):
    fasta, sequences = proteins
    out = tmp_path / "out"
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": how, "before_batch": 8})
    limits = RunLimits(attempts=1, heartbeat_timeout_s=4.0, stop_grace_s=1.0)
    result = run_embedding([fasta], out, config, [CPU], limits=limits)
    assert result.failed_ranks == [0]
    assert result.state == "partial"
    assert result.output_path == out / "embeddings.partial.h5"
    assert not (out / "embeddings.h5").exists()
    missing = failed_ids(RunLayout(out))
    assert 0 < len(missing) < len(sequences)
    expected_class = {"refuse": "configuration", "sigstop": "hung"}.get(how, "died")
    assert {tuple(line[1:]) for line in missing} == {(expected_class, "1")}
    check_rows(result.output_path, sequences, missing={line[0] for line in missing})
    assert result.num_missing == len(missing)
    assert verify_run(out).problems == []

    first_pid = result.ranks[0].pids[0]
    again = run_embedding([fasta], out, config, [CPU] * 2, limits=limits)
    assert again.state == "complete"
    assert again.ranks[0].pids[0] != first_pid
    computed = sum(rank.sequences for rank in again.ranks)
    resumed = sum(rank.sequences_resumed for rank in again.ranks)
    unique_missing = {sequences[line[0]] for line in missing}
    assert computed == len(unique_missing)
    assert resumed == len(set(sequences.values())) - computed
    check_rows(out, sequences)
    assert not (out / "embeddings.partial.h5").exists()
    assert not (out / "failed_sequences.tsv").exists()

    undisturbed, _ = run_multi_gpu_inference([fasta], tmp_path / "whole", config, 1)
    assert undisturbed.read_bytes() == (out / "embeddings.h5").read_bytes()


@pytest.mark.slow
def test_the_work_of_a_worker_that_never_starts_is_done_by_the_other(tmp_path, proteins):
    fasta, sequences = proteins
    worker = "tests.fakes:gpu_worker_that_never_starts_on_rank_0"
    limits = RunLimits(startup_timeout_s=10, attempts=1)
    result = run_embedding([fasta], tmp_path / "out", fakes.hash_config(), [CPU] * 2, limits=limits, worker_fn=worker)
    assert (result.state, result.failed_ranks, result.ranks[0].failure) == ("complete", [0], "hung")
    assert any(
        "the remaining workers did the work of rank 0 on cpu (hung: not ready after 10 s)" in note
        for note in result.notes()
    )
    check_rows(result.output_path, sequences)


@pytest.mark.slow
def test_a_retry_resumes_in_a_new_process_within_one_run(tmp_path, proteins):
    fasta, sequences = proteins
    config = fakes.faulty_config(
        tmp_path / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 4, "times": 1, "slow_s": 0.05}
    )
    result = run_embedding([fasta], tmp_path / "out", config, [CPU] * 2, limits=RunLimits(attempts=3))
    assert result.state == "complete"
    assert result.failed_ranks == []
    rank = result.ranks[0]
    assert (rank.attempts, len(set(rank.pids))) == (2, 2)
    assert rank.sequences_resumed > 0
    check_rows(tmp_path / "out", sequences)


def test_it_raises_only_when_no_worker_succeeded(tmp_path, proteins):
    fasta, _ = proteins
    with pytest.raises(WorkersFailedError) as caught:
        run_multi_gpu_inference(
            [fasta], tmp_path / "a", fakes.hash_config(), 2, limits=ONCE, worker_fn=fakes.always_exit7
        )
    assert "2 of 2 workers failed, 81 of 81 sequences missing, no row was finished" in str(caught.value)
    assert caught.value.failures.keys() == {0, 1}
    assert caught.value.exit_code == 70
    with pytest.raises(ConfigurationError, match="this cannot work"):
        run_multi_gpu_inference(
            [fasta], tmp_path / "b", fakes.hash_config(), 2, worker_fn=fakes.fail_with_configuration_error
        )


def test_run_esm2_multi_gpu_is_a_runtime_error_when_a_row_is_missing():
    assert issubclass(WorkersFailedError, RuntimeError)


def test_run_esm2_multi_gpu_embeds_with_the_bundled_model(tmp_path):
    fasta = tmp_path / "two.fasta"
    fasta.write_text(">one\nMKVLAAGIVG\n>two\nMKVW\n")
    path = run_esm2_multi_gpu([fasta], tmp_path / "out", world_size=1)
    assert path == tmp_path / "out" / "embeddings.h5"
    with read_embeddings(path) as embeddings:
        assert embeddings.ids == ("one", "two")
        assert embeddings.hidden_dim > 0
        assert abs(embeddings["one"]).sum() > 0


@pytest.mark.slow
@pytest.mark.long
def test_run_multi_gpu_inference_serves_both_bundled_models(tmp_path):
    for model, sequences in (
        ("virnucpro-tiny-protein", ["MKVLAAGIVG", "MKVW"]),
        ("virnucpro-tiny-dna", ["ACGTN", "GG"]),
    ):
        fasta, out = tmp_path / f"{model}.fasta", tmp_path / model
        fasta.write_text("".join(f">s{number}\n{sequence}\n" for number, sequence in enumerate(sequences)))
        path, failed = run_multi_gpu_inference([fasta], out, embedding_config(model=model), 1)
        assert (path, failed) == (out / "embeddings.h5", [])
        with read_embeddings(path) as embeddings:
            assert embeddings.ids == ("s0", "s1")
            assert not (embeddings["s0"] == embeddings["s1"]).any()


def test_a_finished_run_is_not_computed_again(finished, proteins):
    fasta, sequences = proteins
    result = finished / "embeddings.h5"
    before = (result.read_bytes(), result.stat().st_mtime_ns)
    again = run_embedding([fasta], finished, fakes.hash_config(), [CPU] * 2)
    assert (again.state, again.ranks, again.num_rows) == ("complete", (), len(sequences))
    assert (again.output_path.read_bytes(), again.output_path.stat().st_mtime_ns) == before


def test_a_damaged_result_is_computed_again(finished, proteins):
    fasta, sequences = proteins
    out = finished
    whole = (out / "embeddings.h5").read_bytes()
    damaged = bytearray(whole)
    damaged[-1] ^= 1
    (out / "embeddings.h5").write_bytes(damaged)
    assert verify_run(out).problems != []
    run_embedding([fasta], out, fakes.hash_config(), [CPU])
    assert (out / "embeddings.h5").read_bytes() == whole
    check_rows(out, sequences)


@pytest.mark.parametrize(
    "changes",
    [{"max_residues": 30}, {"weights_sha256": "1" * 64}, {"token_budget": 128}],
)
def test_another_setting_in_the_same_folder_is_refused_with_what_differs(finished, proteins, changes):
    fasta, _ = proteins
    out = finished
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != ".run.lock"}
    with pytest.raises(SettingsChangedError, match=next(iter(changes))) as caught:
        run_embedding([fasta], out, fakes.hash_config(**changes), [CPU])
    assert caught.value.exit_code == 78
    assert before == {
        path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != ".run.lock"
    }


def test_bad_input_is_refused_before_any_worker_starts(tmp_path):
    fasta = tmp_path / "bad.fasta"
    fasta.write_text(">one\nMKV\n>one\nMK-V\n")
    with pytest.raises(BadInputError, match=r"bad\.fasta:3: .*\(one\): "):
        run_embedding([fasta], tmp_path / "out", fakes.hash_config(), [CPU], worker_fn=fakes.always_exit7)
    assert not (tmp_path / "out" / "logs").exists()


def test_a_stopped_run_keeps_what_is_finished_and_can_be_continued(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.1})
    stop = threading.Event()

    def stop_in_the_middle(rank, message):
        if message.get("sequences", 0) > 10 and message["kind"] == "progress":
            stop.set()

    result = run_embedding([fasta], out, config, [CPU], on_message=stop_in_the_middle, stop=stop)
    assert result.state == "stopped"
    assert result.output_path is None
    assert json.loads((out / "run.json").read_text())["state"] == "stopped"
    again = run_embedding([fasta], out, config, [CPU])
    assert again.ranks[0].sequences_resumed >= 10
    check_rows(out, sequences)


def test_a_run_that_is_stopped_before_there_are_workers_can_be_continued(tmp_path, proteins):
    fasta, sequences = proteins
    stop = threading.Event()
    stop.set()
    result = run_embedding([fasta], tmp_path / "out", fakes.hash_config(), [CPU, CPU], stop=stop)
    assert (result.state, [outcome.state for outcome in result.ranks]) == ("stopped", ["stopped"] * 2)
    result = run_embedding([fasta], tmp_path / "out", fakes.hash_config(), [CPU, CPU])
    check_rows(result.output_path, sequences)


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path, proteins):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file"):
        run_embedding([proteins[0]], tmp_path / "file" / "out", fakes.hash_config(), [CPU])


@pytest.mark.slow
def test_a_worker_that_somebody_else_stops_is_started_again(tmp_path, proteins):
    fasta, sequences = proteins
    config = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.05})
    terminated = []

    def terminate_once(rank, message):
        if message.get("sequences", 0) > 10 and not terminated:
            (worker,) = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
            terminated.append(worker.pid)
            worker.terminate()

    result = run_embedding([fasta], tmp_path / "out", config, [CPU], on_message=terminate_once)
    assert result.state == "complete"
    assert result.ranks[0].attempts == 2
    assert result.ranks[0].pids[0] == terminated[0]
    check_rows(tmp_path / "out", sequences)


def test_a_full_disk_is_not_excused_by_allowing_a_partial_result(tmp_path, proteins):
    fasta, _ = proteins
    result = run_embedding(
        [fasta], tmp_path / "out", fakes.hash_config(), [CPU] * 2, worker_fn=fakes.disk_full_on_rank_1
    )
    assert result.state == "partial"
    with pytest.raises(OutputError, match="No space left on device"):
        result.raise_unless(allow_partial=True)


def test_the_list_of_skipped_records_of_a_finished_run_is_written_again(tmp_path):
    fasta = tmp_path / "in.fasta"
    fasta.write_text(">one\nMKV\n>two\nM!V\n")
    out = tmp_path / "out"
    config = fakes.hash_config(on_bad_record="skip")
    run_embedding([fasta], out, config, [CPU])
    path = out / "failed_sequences.tsv"
    listed = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(listed + b"junk")):
        damage()
        assert verify_run(out).problems != []
        assert run_embedding([fasta], out, config, [CPU]).ranks == ()
        assert path.read_bytes() == listed
        assert verify_run(out).problems == []


def test_a_manifest_without_the_results_checksum_does_not_vouch_for_it(finished):
    edit_manifest(finished / "run.json", lambda values: values.update(files={}))
    assert "has no sha256 of embeddings.h5" in verify_run(finished).problems[0]


def test_files_of_somebody_else_are_not_replaced(tmp_path, proteins):
    fasta, _ = proteins
    (tmp_path / "embeddings.h5").write_text("precious")
    with pytest.raises(OutputError, match=r"no run\.json that tells whose"):
        run_embedding([fasta], tmp_path, fakes.hash_config(), [CPU])
    assert (tmp_path / "embeddings.h5").read_text() == "precious"


def test_a_finished_run_is_judged_by_the_policy_for_long_sequences_that_is_asked_for_now(tmp_path, proteins):
    fasta, _ = proteins
    out = tmp_path / "out"
    run_embedding([fasta], out, fakes.hash_config(max_residues=30), [CPU])
    with pytest.raises(BadInputError, match="more than --max-residues 30"):
        run_embedding([fasta], out, fakes.hash_config(max_residues=30, long_policy="error"), [CPU])


def test_a_finished_run_without_its_work_folder_can_be_made_verifiable_again(finished, proteins):
    fasta, _ = proteins
    out = finished
    shutil.rmtree(out / "work")
    assert verify_run(out).problems != []
    assert run_embedding([fasta], out, fakes.hash_config(), [CPU]).ranks == ()
    assert verify_run(out).problems == []


def test_what_a_survivor_computed_is_returned_when_another_met_a_full_disk(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    worker = fakes.disk_full_on_rank_1
    path, failed_ranks = run_multi_gpu_inference([fasta], out, fakes.hash_config(), 2, worker_fn=worker)
    assert (path, failed_ranks) == (out / "embeddings.partial.h5", [1])
    check_rows(path, sequences, missing={line[0] for line in failed_ids(RunLayout(out))})


def test_a_broken_device_is_named_and_its_work_is_done_by_the_others(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    worker = fakes.broken_device_on_rank_1
    path, failed_ranks = run_multi_gpu_inference([fasta], out, fakes.hash_config(), 2, worker_fn=worker)
    assert (path, failed_ranks) == (out / "embeddings.h5", [1])
    check_rows(path, sequences)


def test_a_run_with_split_blocks_promises_tolerance_in_its_manifest_and_to_its_caller(tmp_path):
    made = MadeRun(tmp_path, [(f"s{n}", "MKV" * n) for n in range(1, 20)])
    rows = [made.rows(block, BlockOrigin.RESPLIT) for block in (0, 3)]
    write_part(made.layout.parts_dir, rows, plan_fingerprint=made.plan.fingerprint)
    result = run_embedding([made.fasta], made.layout.output_dir, made.config, [CPU])
    again = run_embedding([made.fasta], made.layout.output_dir, made.config, [CPU])
    for found in (result, again):
        assert (found.num_resplit_blocks, found.num_cached_blocks, found.promise) == (2, 0, "tolerance")
        assert found.to_json()["promise"] == "tolerance"
        assert any("2 blocks did not fit the device" in note for note in found.notes())
    manifest = json.loads(made.layout.manifest.read_text())
    assert (manifest["counts"]["resplit_blocks"], manifest["promise"]) == (2, "tolerance")
    whole = run_embedding([made.fasta], tmp_path / "whole", made.config, [CPU])
    assert whole.promise == json.loads((tmp_path / "whole" / "run.json").read_text())["promise"] == "bytes"
    assert whole.output_path.read_bytes() == result.output_path.read_bytes()
