"""What a folder holds is continued or refused with every difference named; ``--restart`` removes what is ours only."""

from __future__ import annotations

import pytest

import virnucpro.commands.embed
from tests import command_line
from tests.fakes import hash_config
from tests.faults.forked import run_forked, small_input
from tests.trainings import hash_training, make_genomes
from virnucpro.errors import BadInputError, OutputError, ResultError, SettingsChangedError
from virnucpro.models.classifier_files.card import CARD_NAME
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import RunLayout
from virnucpro.training.training_run import prepare_training


@pytest.fixture
def finished(tmp_path):
    """A finished run, its input and its folder; beside it files of somebody else."""
    fasta, out = small_input(tmp_path), tmp_path / "out"
    assert run_forked(fasta, out, hash_config()).code == 0
    for name in ("notes.txt", "work/mine.h5", "shard_x.h5", "logs/worker_0.log.old", ".hidden"):
        (out / name).write_text("somebody's")
    return fasta, out


def tree_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepare(fasta, out, *, restart=False, **changes):
    return prepare_run([fasta], out, hash_config(**changes), [CPU], run_id="again", restart=restart)


def test_a_refusal_names_every_difference_and_the_way_out(finished):
    fasta, out = finished
    before = fasta.read_bytes()
    fasta.write_text(">other\nMKVVV\n")
    with pytest.raises(SettingsChangedError) as caught:
        prepare(fasta, out, max_residues=3, weights_sha256="1" * 64)
    assert list(caught.value.differences) == ["sha256 of the input", "max_residues", "weights_sha256"]
    assert "--restart" in str(caught.value)
    assert caught.value.exit_code == 78
    fasta.write_bytes(before)
    with pytest.raises(SettingsChangedError) as caught:
        prepare(fasta, out, max_residues=3, weights_sha256="1" * 64)
    assert list(caught.value.differences) == ["max_residues", "weights_sha256"]


def test_a_restart_removes_what_is_ours_and_nothing_else(finished):
    fasta, out = finished
    run = prepare(fasta, out, restart=True, max_residues=3)
    assert not run.already_complete
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    kept = {"notes.txt", "work/mine.h5", "shard_x.h5", "logs/worker_0.log.old", ".hidden"}
    assert found == kept | {"run.json", "work/sequences.index", "work/.reserved", ".run.lock"}
    assert all((out / name).read_text() == "somebody's" for name in kept)


def test_a_restart_with_an_input_that_cannot_be_used_removes_nothing(finished):
    fasta, out = finished
    before = (out / "embeddings.h5").read_bytes()
    with pytest.raises(BadInputError):
        prepare(fasta.with_name("absent.fasta"), out, restart=True)
    assert (out / "embeddings.h5").read_bytes() == before
    assert run_forked(fasta, out, hash_config()).code == 0


def test_a_restart_touches_no_folder_whose_owner_is_not_known(finished):
    fasta, out = finished
    manifest = RunLayout(out).manifest
    manifest.write_text('{"somebody": "else"}')
    with pytest.raises(ResultError, match="not a run manifest"):
        prepare(fasta, out, restart=True)
    manifest.unlink()
    with pytest.raises(OutputError, match=r"no run\.json that tells whose"):
        prepare(fasta, out, restart=True)
    assert (out / "embeddings.h5").exists()


def test_the_commands_option_starts_afresh_in_a_folder_that_it_refuses_otherwise(finished, monkeypatch):
    fasta, out = finished
    monkeypatch.setattr(virnucpro.commands.embed, "configure_model", lambda *_, **__: hash_config(max_residues=3))
    arguments = ("embed", fasta, "--output", out, "--devices", "cpu", "--workers", 1)
    refused = command_line.run(*arguments)
    assert (refused.code, "max_residues was 1022, now 3" in refused.err) == (78, True)
    assert command_line.run(*arguments, "--restart").code == 0
    assert verify_run(out).problems == []


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_a_restart_that_is_interrupted_is_finished_by_the_next_one(finished, number):
    fasta, out = finished
    whole = (out / "embeddings.h5").read_bytes()
    spec = f"MainProcess/file.unlink:{number}:kill"
    assert run_forked(fasta, out, hash_config(), failpoint=spec, restart=True).code == -9
    again = run_forked(fasta, out, hash_config(), restart=True)
    assert again.code == 0, again.errors
    assert (out / "embeddings.h5").read_bytes() == whole


def test_a_training_that_is_restarted_with_any_file_that_cannot_be_read_removes_nothing(tmp_path):
    files, out = make_genomes(tmp_path, count=3, codons=200), tmp_path / "out"
    prepare_training(files, out, hash_training(), "cpu", run_id="one")
    (out / CARD_NAME).write_text("of the earlier one")
    before = tree_of(out)
    for name in ("genomes", "annotations", "leave_out"):
        absent = tmp_path / "absent.fa"
        config = hash_training(**{name: absent if name == "genomes" else (absent,)})
        with pytest.raises(BadInputError, match=r"absent\.fa"):
            prepare_training(files, out, config, "cpu", run_id="two", restart=True)
        assert tree_of(out) == before
