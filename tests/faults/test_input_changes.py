"""
Row 22: the input changes between runs, or between indexing and reading: refused or computed anew, never garbage.

Seven edits: a new date with other content, an older file put back, other content under the same date, a change in
place, another file moved over it, a shorter list of files, and a date alone, which is no change.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import fakes
from tests.fakes import hash_config, hash_vector
from virnucpro.errors import BadInputError, ExitCode, InputChangedError, SettingsChangedError, VirNucProError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.store.reader import read_embeddings

if TYPE_CHECKING:
    from pathlib import Path

FIRST = b">a\nMKTAYIAKQR\n>b\nMKT\n"
SECOND = b">c\nWWWWW\n>d\nMKTAY\n"
CHANGED = FIRST.replace(b"YIAK", b"YIAC")


def new_date(path: Path) -> None:
    path.write_bytes(CHANGED)
    os.utime(path, (2e9, 2e9))


def older_file(path: Path) -> None:
    path.write_bytes(CHANGED)
    os.utime(path, (1e9, 1e9))


def same_date(path: Path) -> None:
    before = path.stat()
    path.write_bytes(CHANGED)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(CHANGED.index(b"YIAC") + 3)
        file.write(b"C")


def moved_over(path: Path) -> None:
    path.with_suffix(".new").write_bytes(CHANGED)
    path.with_suffix(".new").replace(path)


def touched(path: Path) -> None:
    os.utime(path, (2e9, 2e9))


CONTENT_EDITS = [new_date, older_file, same_date, in_place, moved_over]


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "1.fasta", tmp_path / "2.fasta"]
    for path, content in zip(paths, (FIRST, SECOND), strict=True):
        path.write_bytes(content)
    return paths


def embed(files, tmp_path, **options):
    return run_embedding(files, tmp_path / "out", hash_config(), [CPU], **options)


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".run.lock"}


@pytest.fixture
def finished(files, tmp_path):
    assert embed(files, tmp_path).state == "complete"
    return files


@pytest.fixture
def unfinished(files, tmp_path):
    """A folder with work in it that is worth keeping."""
    run = prepare_run(files, tmp_path / "out", hash_config(), [CPU], run_id="one")
    run.layout.parts_dir.mkdir(parents=True)
    (run.layout.parts_dir / "part_000000000_x.h5").write_bytes(b"")
    return files


@pytest.mark.parametrize("edit", CONTENT_EDITS)
def test_another_content_between_runs_is_refused_and_changes_nothing(unfinished, tmp_path, edit):
    edit(unfinished[0])
    before = state_of(tmp_path / "out")
    with pytest.raises(SettingsChangedError, match="sha256 of the input was") as caught:
        embed(unfinished, tmp_path)
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert state_of(tmp_path / "out") == before


def test_a_finished_run_is_compared_with_the_input_in_all_seven_edits(finished, tmp_path):
    before = state_of(tmp_path / "out")
    assert before
    for edit in CONTENT_EDITS:
        edit(finished[0])
        with pytest.raises(SettingsChangedError, match="sha256 of the input was"):
            embed(finished, tmp_path)
        finished[0].write_bytes(FIRST)
    with pytest.raises(SettingsChangedError, match=r"input was .*2\.fasta.*, now"):
        embed(finished[:1], tmp_path)
    touched(finished[0])
    again = embed(finished, tmp_path)
    assert (again.state, again.ranks) == ("complete", ())
    assert state_of(tmp_path / "out") == before


def test_a_shorter_list_between_runs_is_refused(unfinished, tmp_path):
    before = state_of(tmp_path / "out")
    for fewer in (unfinished[:1], unfinished[1:], unfinished[::-1]):
        with pytest.raises(SettingsChangedError, match="input was"):
            embed(fewer, tmp_path)
    assert state_of(tmp_path / "out") == before


@pytest.mark.parametrize("edit", [*CONTENT_EDITS, touched])
def test_what_is_read_after_indexing_is_what_was_indexed_or_an_error(files, tmp_path, edit):
    run = prepare_run(files, tmp_path / "out", hash_config(), [CPU], run_id="one")
    edit(files[0])
    index = run.open_index()
    expected = {"a": "MKTAYIAKQR", "b": "MKT", "c": "WWWWW", "d": "MKTAY"}
    refused = set()
    for position in range(len(index)):
        try:
            assert index.read(position).sequence == expected[index.sequence_id(position)]
        except InputChangedError as error:
            refused.add((error.path, error.sequence_id))
    assert refused == (set() if edit is touched else {(str(files[0]), "a")})


@pytest.mark.parametrize(
    "edit",
    [
        same_date,
        *(
            pytest.param(edit, marks=[pytest.mark.slow, pytest.mark.long])
            for edit in CONTENT_EDITS
            if edit is not same_date
        ),
    ],
)
def test_an_input_that_changes_under_a_run_ends_it_with_65_and_no_garbage(files, tmp_path, edit):
    (tmp_path / "new").write_bytes(CHANGED)
    os.environ["EDIT_INPUT"] = f"{edit.__name__}:{files[0]}"
    try:
        with pytest.raises(VirNucProError, match="changed after it was indexed") as caught:
            embed(files, tmp_path, worker_fn="tests.fakes:gpu_worker_after_an_edit").raise_unless(allow_partial=False)
    finally:
        del os.environ["EDIT_INPUT"]
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not (tmp_path / "out" / "embeddings.h5").exists()


def test_without_work_to_keep_a_changed_input_is_computed_anew(files, tmp_path):
    prepare_run(files, tmp_path / "out", hash_config(), [CPU], run_id="one")
    same_date(files[0])
    assert embed(files, tmp_path).state == "complete"
    with read_embeddings(tmp_path / "out") as rows:
        np.testing.assert_array_equal(rows["a"], hash_vector("MKTAYIACQR"))


def test_an_input_that_is_gone_is_bad_input(finished, tmp_path):
    finished[0].unlink()
    with pytest.raises(BadInputError, match="No such file or directory"):
        embed(finished, tmp_path)


assert fakes.gpu_worker_after_an_edit, "the worker above is named by text"
