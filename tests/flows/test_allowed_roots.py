"""A deployment's parameters reach only what the worker allows."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect")

from flows.allowed_roots import VARIABLE, PathNotAllowedError, check_allowed
from flows.embed import embed
from flows.predict import predict


@pytest.fixture
def roots(tmp_path, monkeypatch):
    for name in ("data", "results", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'data'}:{tmp_path / 'results'}")
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    ["data/in.fasta", "data", "results/a/new/folder", "data/../results/x", "data/./in.fasta", "data/link_inside"],
)
def test_paths_under_a_root_are_allowed(roots, path):
    (roots / "data" / "link_inside").symlink_to(roots / "results")
    check_allowed(fasta_files=[str(roots / path)], output_dir=str(roots / path), weights_dir=None)
    check_allowed(fasta_files=["relative.fasta"])


@pytest.mark.parametrize(
    "path",
    ["elsewhere/in.fasta", "data/../elsewhere", "data_of_others", "data/link_outside", "data/link_outside/deep", ""],
)
def test_paths_that_lead_outside_are_refused(roots, path):
    (roots / "data" / "link_outside").symlink_to(roots / "elsewhere")
    with pytest.raises(PathNotAllowedError, match="output_dir") as caught:
        check_allowed(fasta_files=[str(roots / "data" / "fine")], output_dir=str(roots / path))
    assert caught.value.exit_code == 78
    with pytest.raises(PathNotAllowedError, match="fasta_files"):
        check_allowed(fasta_files=["fine.fasta", str(roots / path)])


def test_without_the_variable_every_path_is_allowed_and_with_an_empty_one_none_is(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    check_allowed(output_dir="/etc")
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(PathNotAllowedError, match=r"\(none\)"):
        check_allowed(output_dir=str(tmp_path))


@pytest.mark.parametrize("parameter", ["fasta_files", "output_dir", "model", "weights_dir", "cache_dir"])
def test_the_flow_checks_each_of_its_paths_before_it_does_anything(roots, parameter):
    inside, outside = str(roots / "data" / "x"), str(roots / "elsewhere" / "x.pt")
    given = {"fasta_files": [inside], "output_dir": str(roots / "results" / "out"), "devices": "cpu"}
    given[parameter] = [outside] if parameter == "fasta_files" else outside
    state = embed.fn(**given)
    assert state.is_failed()
    assert f"{parameter} {outside} is not under a folder" in state.message
    assert list((roots / "results").iterdir()) == list((roots / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("parameter", ["input_files", "output_dir", "classifier", "dna_model", "protein_model"])
def test_so_does_the_flow_that_identifies(roots, parameter):
    inside, outside = str(roots / "data" / "x"), str(roots / "elsewhere" / "x.pt")
    given = {"input_files": [inside], "output_dir": str(roots / "results" / "out"), "devices": "cpu"}
    given[parameter] = [outside] if parameter == "input_files" else outside
    state = predict.fn(**given)
    assert state.is_failed()
    assert f"{parameter} {outside} is not under a folder" in state.message
    assert list((roots / "results").iterdir()) == list((roots / "elsewhere").iterdir()) == []
