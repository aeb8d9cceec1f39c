"""A deployment's parameters reach only what the worker allows."""

from __future__ import annotations

from uuid import uuid4

import pytest

pytest.importorskip("prefect")

from prefect.client.schemas.objects import FlowRun

from flows.embed import embed
from flows.predict import predict
from flows.run import hooks
from flows.run.allowed_roots import check_allowed
from flows.run.artifacts import REPORTS_URL, served_url
from virnucpro.allowed_roots import DATA_ROOTS, MODEL_ROOTS
from virnucpro.errors import PathNotAllowedError
from virnucpro.this_host import host_name


@pytest.fixture
def roots(tmp_path, monkeypatch):
    for name in ("data", "results", "models", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv(DATA_ROOTS, f"{tmp_path / 'data'}:{tmp_path / 'results'}")
    monkeypatch.setenv(MODEL_ROOTS, str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path / "data")
    return tmp_path


@pytest.fixture
def deployed(monkeypatch):
    """The run is one of a deployment, as a worker starts it."""
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "6b5b9f0c")


@pytest.mark.parametrize(
    "path",
    ["data/in.fasta", "data", "results/a/new/folder", "data/../results/x", "data/./in.fasta", "data/link_inside"],
)
def test_paths_under_a_root_are_allowed(roots, path):
    (roots / "data" / "link_inside").symlink_to(roots / "results")
    check_allowed(data={"fasta_files": [str(roots / path)], "output_dir": str(roots / path), "cache_dir": None})
    check_allowed(data={"fasta_files": ["relative.fasta"], "cache_dir": ""}, models={"model": str(roots / "models/m")})


@pytest.mark.parametrize(
    "path",
    [
        "elsewhere/in.fasta",
        "data/../elsewhere",
        "data_of_others",
        "data/link_outside",
        "data/link_outside/deep",
        "data/nul\0",
        "models/m",
    ],
)
def test_paths_that_lead_outside_are_refused(roots, path):
    (roots / "data" / "link_outside").symlink_to(roots / "elsewhere")
    outside = f"{roots}/{path}"
    with pytest.raises(PathNotAllowedError, match="output_dir") as caught:
        check_allowed(data={"fasta_files": [str(roots / "data" / "fine")], "output_dir": outside})
    assert caught.value.exit_code == 78
    with pytest.raises(PathNotAllowedError, match="fasta_files"):
        check_allowed(data={"fasta_files": ["fine.fasta", outside]})


def test_models_have_roots_of_their_own_and_without_them_those_of_data(roots, monkeypatch):
    with pytest.raises(PathNotAllowedError, match=rf"weights_dir: .*\({MODEL_ROOTS}: "):
        check_allowed(data={}, models={"weights_dir": str(roots / "data")})
    monkeypatch.delenv(MODEL_ROOTS)
    check_allowed(data={}, models={"weights_dir": str(roots / "data")})
    with pytest.raises(PathNotAllowedError, match=rf"weights_dir: .*\({DATA_ROOTS}: "):
        check_allowed(data={}, models={"weights_dir": str(roots / "models")})


def test_a_deployment_without_the_variable_has_its_own_folder_and_a_persons_own_run_has_all(
    roots, monkeypatch, request
):
    monkeypatch.delenv(DATA_ROOTS)
    monkeypatch.delenv(MODEL_ROOTS)
    check_allowed(data={"output_dir": "/etc"}, models={"model": "/etc"})
    request.getfixturevalue("deployed")
    check_allowed(data={"output_dir": "out"}, models={"model": str(roots / "data" / "m")})
    for given in ({"data": {"output_dir": "/etc"}}, {"data": {}, "models": {"model": "../models/m"}}):
        with pytest.raises(PathNotAllowedError, match=rf"{DATA_ROOTS}: {roots / 'data'}"):
            check_allowed(**given)


def test_an_empty_variable_allows_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_ROOTS, "")
    with pytest.raises(PathNotAllowedError, match=r"\(VIRNUCPRO_DATA_ROOTS: none\)"):
        check_allowed(data={"output_dir": str(tmp_path)})


def in_boxes(parameter, value):
    """The flow's parameters with one path in its place."""
    for box, names in {"cache": ("weights_dir", "cache_dir"), "models": ("dna_model", "protein_model")}.items():
        if parameter in names:
            return {box: {parameter: value}}
    return {"monitoring": {"metrics_targets": value}} if parameter == "metrics_targets" else {parameter: value}


@pytest.mark.parametrize(
    "parameter", ["fasta_files", "output_dir", "model", "weights_dir", "cache_dir", "metrics_targets"]
)
def test_the_flow_checks_each_of_its_paths_before_it_does_anything(roots, parameter):
    check_flow(embed, roots, "fasta_files", parameter)


@pytest.mark.parametrize(
    "parameter",
    ["input_files", "output_dir", "classifier", "dna_model", "protein_model", "weights_dir", "cache_dir"],
)
def test_so_does_the_flow_that_identifies(roots, parameter):
    check_flow(predict, roots, "input_files", parameter)


@pytest.mark.parametrize(("asked", "said", "left"), [(None, "elsewhere", []), ("elsewhere", None, ["elsewhere"])])
def test_the_worker_itself_may_name_any_folder_of_targets(roots, monkeypatch, asked, said, left):
    """What a killed run left there is removed; a parameter that names such a folder has nothing removed."""
    target = roots / "elsewhere" / f"virnucpro-{host_name()}-0123456789ab.json"
    target.write_text("[]")
    monitoring = {"metrics_targets": str(roots / asked)} if asked else {}
    if said:
        monkeypatch.setenv("VIRNUCPRO_METRICS_TARGETS", str(roots / said))
    run = FlowRun(flow_id=uuid4(), parameters={"output_dir": str(roots / "results"), "monitoring": monitoring})
    hooks._aftermath(run, has_failed=False)
    assert [path.parent.name for path in target.parent.iterdir()] == left


def check_flow(flow, roots, inputs, parameter):
    inside, outside = str(roots / "data" / "x"), str(roots / "elsewhere" / "x.pt")
    given = {inputs: [inside], "output_dir": str(roots / "results" / "out"), "hardware": {"devices": "cpu"}}
    given |= in_boxes(parameter, [outside] if parameter == inputs else outside)
    state = flow.fn(**flow.validate_parameters(given))
    assert state.is_failed()
    assert f"{parameter}: {outside} is not under a folder" in state.message
    assert list((roots / "results").iterdir()) == list((roots / "elsewhere").iterdir()) == []


def test_a_report_under_a_root_has_an_address_that_no_name_breaks_and_one_elsewhere_has_none(roots, monkeypatch):
    report = roots / "data" / "a #1 100%25 ?(b)[c] \u00fc" / "report.html"
    (roots / "data" / "link").symlink_to(report.parent)
    (roots / "data" / "link_outside").symlink_to(roots / "elsewhere")
    assert served_url(report) is None
    for base in ("https://h:8443/reports", "https://h:8443/reports/", "http://127.0.0.1:4201"):
        monkeypatch.setenv(REPORTS_URL, base)
        address = served_url(report)
        assert address == f"{base.rstrip('/')}{roots}/data/a%20%231%20100%2525%20%3F%28b%29%5Bc%5D%20%C3%BC/report.html"
        assert served_url(roots / "data" / "link" / "report.html") == address
    for outside in ("elsewhere", "data/../elsewhere", "data/link_outside"):
        assert served_url(roots / outside / "report.html") is None
    for base in ("", "prefect.example.org/reports", "javascript:alert(1)//", "file:///"):
        monkeypatch.setenv(REPORTS_URL, base)
        assert served_url(report) is None
    monkeypatch.setenv(REPORTS_URL, "https://h/reports")
    monkeypatch.delenv(DATA_ROOTS)
    assert served_url(report) is None, "no roots are known outside of a deployment"
