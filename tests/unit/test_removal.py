"""What retention removes: the folder of an old run, and no other."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta

import pytest

from tests.predictions import hash_prediction, make_contigs, predict_forked
from tests.strategies import edit_manifest
from virnucpro.errors import ResultError, RunLockedError
from virnucpro.pipeline.run.removal import remove_old_run
from virnucpro.store.locks.run_lock import RunLock

LATER = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_contigs(folder / "in.fa", count=6)
    ended = predict_forked([folder / "in.fa"], folder / "out", hash_prediction(folder))
    assert ended.code == 0, ended.errors
    return folder / "out"


@pytest.fixture(params=["prediction", "embedding"])
def folder(made, tmp_path, request):
    """A finished run of each kind."""
    shutil.copytree(made if request.param == "prediction" else made / "dna", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_is_removed_and_a_dry_run_says_its_bytes(folder):
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert remove_old_run(folder, ended_before=LATER, dry_run=True) == size
    assert folder.is_dir()
    assert remove_old_run(folder, ended_before=LATER) >= size  # the lock file has its holder
    assert not folder.exists()


@pytest.mark.parametrize(
    "name", ["notes.txt", ".hidden", "dna/notes.txt", "input.fasta", "work.tar", "embeddings.copy.h5", "other"]
)
def test_a_folder_with_any_other_file_stays(made, tmp_path, name):
    folder = tmp_path / "run"
    shutil.copytree(made, folder)
    (folder / name).write_text("precious")
    with pytest.raises(ResultError, match=f"files that no run wrote, such as {name}"):
        remove_old_run(folder, ended_before=LATER)
    assert sorted(path.name for path in made.rglob("*")) == sorted(
        path.name for path in folder.rglob("*") if path != folder / name
    )


def test_what_is_recent_in_use_or_no_run_stays(folder, tmp_path):
    with pytest.raises(ResultError, match="was used since"):
        remove_old_run(folder, ended_before=datetime.now(UTC) - timedelta(days=1))
    with RunLock(folder / ".run.lock", run_id="another"), pytest.raises(RunLockedError):
        remove_old_run(folder, ended_before=LATER)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "empty").mkdir()
    for path, why in ((tmp_path / "link", "is not a folder"), (tmp_path / "empty", "run.json")):
        with pytest.raises(ResultError, match=why):
            remove_old_run(path, ended_before=LATER)
    edit_manifest(folder / "run.json", lambda values: values.update(counts={}))
    os.truncate(folder / "run.json", 100)
    with pytest.raises(ResultError):
        remove_old_run(folder, ended_before=LATER)
    assert folder.is_dir()


def test_links_in_a_folder_are_not_followed(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    (folder / "work" / "link").symlink_to(tmp_path / "elsewhere")
    shutil.rmtree(folder / "logs", ignore_errors=True)
    (folder / "logs").symlink_to(tmp_path / "elsewhere")
    remove_old_run(folder, ended_before=LATER)
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"
