"""Before any worker starts: the input is good, the plan is settled, and a folder is continued or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.fakes import hash_config
from tests.strategies import write_fasta
from virnucpro import durable
from virnucpro.choices import LongPolicy
from virnucpro.errors import BadInputError, SettingsChangedError
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import RunManifest

RECORDS = [("a", "MKT"), ("b", "MKTAYIAKQR" * 8), ("c", "WY" * 9), ("d", "MKTAYIAKQR" * 5)]


@pytest.fixture
def fasta(tmp_path):
    return write_fasta(tmp_path / "in.fasta", RECORDS)


def prepare(tmp_path, files, *, run_id="one", devices=(CPU,), **changes):
    return prepare_run(files, tmp_path / "out", hash_config(**changes), devices, run_id=run_id)


def leave_work(run):
    """What makes a folder worth continuing."""
    run.layout.parts_dir.mkdir(parents=True, exist_ok=True)
    (run.layout.parts_dir / "part_000000000_x.h5").write_bytes(b"")


def finish(run):
    run.layout.embeddings.write_bytes(b"a result")
    manifest = RunManifest.read(run.layout.manifest)
    manifest.state = "complete"
    manifest.files = {"embeddings.h5": durable.sha256_of(run.layout.embeddings)}
    manifest.counts |= {"rows": len(RECORDS), "copies": 0, "truncated": 0}
    manifest.write(run.layout.manifest)


def test_a_prepared_run_has_its_index_plan_and_manifest(tmp_path, fasta):
    run = prepare(tmp_path, [fasta], devices=(CPU, CPU, CPU), token_budget=100)
    assert not run.already_complete
    assert run.world_size == 3
    assert run.worker_args == (str(run.layout.index), str(run.output_dir), run.model_config)
    index = run.open_index()
    assert len(index) == 4
    manifest = RunManifest.read(run.layout.manifest)
    assert (manifest.state, manifest.run_id) == ("running", "one")
    assert manifest.counts == {"records": 4, **index.counts}
    assert manifest.plan["fingerprint"] == run.plan(index).fingerprint
    assert manifest.plan["tokens"] == 5 + 82 + 20 + 52
    assert manifest.plan["longest_sequence_tokens"] == 82
    assert manifest.inputs == [
        {
            "path": str(fasta.resolve()),
            "size_bytes": fasta.stat().st_size,
            "sha256": durable.sha256_of(fasta),
        }
    ]


def test_a_record_without_a_row_is_missing_of_the_block_of_the_sequence_that_it_copies(tmp_path):
    records = [*RECORDS, ("copy_of_b", RECORDS[1][1]), ("copy_of_a", RECORDS[0][1])]
    run = prepare(tmp_path, [write_fasta(tmp_path / "in.fasta", records)], token_budget=100)
    index = run.open_index()
    plan = run.plan(index)
    names = {index.sequence_id(position): position for position in range(len(index))}
    missing = run.missing_of_blocks(np.array([names["b"], names["copy_of_b"], names["copy_of_a"]]))
    of_b, of_a = (plan.block_of(int(index.representatives[names[name]])) for name in ("b", "a"))
    assert of_b != of_a
    assert {block: count for block, count in enumerate(missing.tolist()) if count} == {of_b: 2, of_a: 1}
    assert len(missing) == len(plan)
    assert run.missing_of_blocks(np.empty(0, np.int64)).tolist() == [0] * len(plan)


@pytest.mark.parametrize(
    ("requested", "max_residues", "settled"),
    [(1, 1022, 82), (82, 1022, 82), (83, 1022, 83), (1, 10, 12), (500, 10, 500)],
)
def test_the_budget_is_never_smaller_than_the_longest_sequence(tmp_path, fasta, requested, max_residues, settled):
    run = prepare(tmp_path, [fasta], token_budget=requested, max_residues=max_residues)
    assert run.model_config.token_budget == settled
    assert RunManifest.read(run.layout.manifest).plan["token_budget"] == settled
    assert len(run.plan(run.open_index())) > 0


def test_a_long_sequence_that_must_not_be_cut_is_bad_input_with_file_and_line(tmp_path, fasta):
    with pytest.raises(BadInputError) as caught:
        prepare(tmp_path, [fasta], max_residues=49, long_policy=LongPolicy.ERROR)
    remedy = "raise --max-residues, or use --long truncate or window"
    assert str(caught.value).splitlines() == [
        f"{fasta}:3: 80 residues, more than --max-residues 49 (b): {remedy}",
        f"{fasta}:7: 50 residues, more than --max-residues 49 (d): {remedy}",
    ]
    assert not caught.value.more
    assert not prepare(tmp_path, [fasta], max_residues=80, long_policy=LongPolicy.ERROR).already_complete


def test_of_many_long_sequences_the_first_twenty_are_shown(tmp_path):
    fasta = write_fasta(tmp_path / "in.fasta", [(f"s{n}", "M" * 9) for n in range(25)])
    with pytest.raises(BadInputError, match="only the first 20") as caught:
        prepare(tmp_path, [fasta], max_residues=8, long_policy=LongPolicy.ERROR)
    assert [problem.line for problem in caught.value.problems] == list(range(1, 41, 2))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"weights_sha256": "1" * 64}, {"weights_sha256": ("0" * 64, "1" * 64)}),
        ({"model_name": "other"}, {"model_name": ("hash", "other")}),
        ({"precision": "bf16"}, {"precision": ("fp32", "bf16")}),
        ({"threads_per_worker": 2}, {"threads_per_worker": (1, 2)}),
        ({"max_residues": 1000}, {"max_residues": (1022, 1000)}),
        ({"token_budget": 999}, {"token_budget": (82, 999)}),
        ({"devices": (Device("0"),)}, {"device_type": ("cpu", "cuda")}),
    ],
)
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_setting_that_changed_is_refused_with_both_values(tmp_path, fasta, changes, difference, is_finished):
    run = prepare(tmp_path, [fasta])
    (finish if is_finished else leave_work)(run)
    before = run.layout.manifest.read_bytes()
    with pytest.raises(SettingsChangedError) as caught:
        prepare(tmp_path, [fasta], **changes)
    assert caught.value.differences == difference
    assert all(repr(value) in str(caught.value) for value in next(iter(difference.values())))
    assert run.layout.manifest.read_bytes() == before


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": (CPU,) * 5},
        {"token_budget": 3},
        {"sequences_per_part": 9},
        {"loader_processes": 2},
        {"weights_path": "/moved/here.pt"},
        {"log_level": "DEBUG"},
        {"profile": True},
    ],
)
@pytest.mark.parametrize("is_finished", [False, True])
def test_what_changes_no_row_may_change_on_resume(tmp_path, fasta, changes, is_finished):
    run = prepare(tmp_path, [fasta])
    (finish if is_finished else leave_work)(run)
    again = prepare(tmp_path, [fasta], run_id="two", **changes)
    assert again.already_complete is is_finished
    assert again.model_config.token_budget == run.model_config.token_budget
    assert again.plan(again.open_index()).fingerprint == run.plan(run.open_index()).fingerprint


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_input_whose_content_changed_is_refused(tmp_path, fasta, is_finished):
    run = prepare(tmp_path, [fasta])
    before = durable.sha256_of(fasta)
    (finish if is_finished else leave_work)(run)
    fasta.write_text(fasta.read_text().replace("MKT\n", "MKW\n"))
    with pytest.raises(SettingsChangedError) as caught:
        prepare(tmp_path, [fasta])
    assert caught.value.differences == {"sha256 of the input": ([before], [durable.sha256_of(fasta)])}


@pytest.mark.parametrize("is_finished", [False, True])
def test_another_list_of_files_is_refused(tmp_path, fasta, is_finished):
    other = write_fasta(tmp_path / "more.fasta", [("x", "ACD")])
    run = prepare(tmp_path, [fasta, other])
    (finish if is_finished else leave_work)(run)
    for files in ([other, fasta], [fasta], [fasta, other, other]):
        with pytest.raises(SettingsChangedError) as caught:
            prepare(tmp_path, files)
        names = [[str(path.resolve()) for path in listed] for listed in ([fasta, other], files)]
        assert caught.value.differences == {"input": tuple(names)}


def test_a_new_date_on_the_input_changes_nothing(tmp_path, fasta):
    run = prepare(tmp_path, [fasta])
    leave_work(run)
    fasta.write_text(fasta.read_text())
    assert not prepare(tmp_path, [fasta], run_id="two").already_complete


def test_a_folder_without_work_worth_keeping_takes_any_settings(tmp_path, fasta):
    prepare(tmp_path, [fasta])
    run = prepare(tmp_path, [fasta], weights_sha256="1" * 64)
    assert RunManifest.read(run.layout.manifest).settings["weights_sha256"] == "1" * 64


def test_a_finished_run_is_complete_already_and_is_left_as_it_is(tmp_path, fasta):
    run = prepare(tmp_path, [fasta])
    finish(run)
    before = run.layout.manifest.read_bytes()
    again = prepare(tmp_path, [fasta], run_id="two")
    assert again.already_complete
    assert run.layout.manifest.read_bytes() == before


@pytest.mark.parametrize("spoil", ["change", "remove"])
def test_a_finished_run_whose_result_is_damaged_or_gone_is_run_again(tmp_path, fasta, spoil):
    run = prepare(tmp_path, [fasta])
    finish(run)
    if spoil == "change":
        run.layout.embeddings.write_bytes(b"a Result")
    else:
        run.layout.embeddings.unlink()
    assert not prepare(tmp_path, [fasta], run_id="two").already_complete
    assert json.loads(run.layout.manifest.read_text())["state"] == "running"


@pytest.mark.parametrize("is_finished", [False, True])
def test_an_input_that_is_missing_is_bad_input_whatever_the_folder_holds(tmp_path, fasta, is_finished):
    run = prepare(tmp_path, [fasta])
    (finish if is_finished else leave_work)(run)
    for missing in (tmp_path / "absent.fasta", tmp_path):
        with pytest.raises(BadInputError) as caught:
            prepare(tmp_path, [missing])
        assert caught.value.problems[0].path == str(missing)
    fasta.unlink()
    with pytest.raises(BadInputError, match="No such file"):
        prepare(tmp_path, [fasta])


def test_what_hosts_wrote_in_an_earlier_start_is_removed(tmp_path, fasta):
    leave_work(prepare(tmp_path, [fasta]))
    written = prepare(tmp_path, [fasta], run_id="two").layout.shared_rows_dir
    written.mkdir(parents=True)
    (written / "0.01234567.h5").write_bytes(b"a shard that the driver did not live to move")
    assert not prepare(tmp_path, [fasta], run_id="three").layout.shared_rows_dir.exists()


def test_what_a_killed_run_was_writing_is_removed(tmp_path, fasta):
    run = prepare(tmp_path, [fasta])
    leave_work(run)
    layout = run.layout
    layout.unpacked_dir.mkdir()
    folders = (layout.output_dir, layout.parts_dir, layout.work_dir, layout.unpacked_dir)
    strays = [folder / ".x.h5.0123456789abcdef.4194305.0123abcd.tmp" for folder in folders]
    of_others = [folder / name for folder in folders for name in (".x.tmp", ".x.h5.99.tmp")]
    for path in (*strays, *of_others):
        path.write_bytes(b"half")
    layout.lock.write_text('{"mark": "0123456789abcdef"}')
    with RunLock(layout.lock, run_id="two"):
        with pytest.raises(BadInputError):
            prepare(tmp_path, [tmp_path / "absent.fasta"], run_id="two")
        assert all(stray.exists() for stray in strays)
        prepare(tmp_path, [fasta], run_id="two")
    assert not [stray for stray in strays if stray.exists()]
    assert all(path.read_bytes() == b"half" for path in of_others)
    assert layout.index.exists()
    assert len(list(layout.parts_dir.glob("part_*"))) == 1
