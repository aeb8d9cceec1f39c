"""The form: what the server refuses before a run exists, the flow refuses as well, and every field has its help."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect")

import yaml
from prefect.exceptions import ParameterTypeError
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from flows.embed import embed
from flows.inbox import predict_inbox
from flows.predict import predict
from flows.run.form import settings_of_form
from flows.train import train
from tests.conftest import REPOSITORY
from virnucpro.choices import CLASSIFIERS, DNA_MODELS, PROTEIN_MODELS
from virnucpro.errors import ConfigurationError
from virnucpro.models.classifier_files.card import BUNDLED_CLASSIFIERS
from virnucpro.models.registry import models_table
from virnucpro.settings import PredictionSettings

NEEDED = {
    embed: {"fasta_files": ["a.fasta"], "output_dir": "out"},
    predict: {"input_files": ["a.fasta"], "output_dir": "out"},
    train: {"labelled": ["virus.fa", "nonviral.fa"], "output_dir": "out"},
    predict_inbox: {"inbox_dir": "inbox", "output_root": "out"},
}
EACH = pytest.mark.parametrize("flow", [embed, predict, train], ids=lambda flow: flow.name)


def schema(flow):
    """What a deployment of the flow has, and the server checks with."""
    return parameter_schema(flow).model_dump_for_openapi()


def server_refuses(flow, parameters):
    return bool(validate(parameters, schema(flow), raise_on_error=False))


def flow_refuses(flow, parameters):
    try:
        flow.validate_parameters(parameters)
    except (ParameterTypeError, ValidationError):
        return True
    return False


@EACH
@pytest.mark.parametrize(
    "box",
    [
        {},
        {"hardware": {"devices": "cpu", "workers": 4}},
        {"hardware": {"devices": " cpu ", "threads": 2}},
        {"hardware": {"devices": "auto:2", "workers_per_device": 2}},
        {"hardware": {"devices": "0, 1"}},
        {"hardware": {"devices": "GPU-4e2c8d5a-1, MIG-1/2"}},
        {"hardware": {"workers": 3}},
        {"hardware": {"runner": "dask://head:8786", "devices": "auto", "workers": 3}},
        {"limits": {"time_limit_minutes": 0.5, "worker_retries": 0}},
        {"monitoring": {"metrics_port": None, "pushgateway": "http://gateway:9091"}},
        {"monitoring": {"metrics_port": 0, "metrics_network": "10.1.0.0/16"}},
    ],
)
def test_what_makes_sense_is_taken(flow, box):
    parameters = {**NEEDED[flow], **box}
    assert not server_refuses(flow, parameters)
    assert not flow_refuses(flow, parameters)


@EACH
@pytest.mark.parametrize(
    "box",
    [
        {"hardware": {"devices": "cpu", "workers_per_device": 2}},
        {"hardware": {"devices": "0,1", "workers": 2}},
        {"hardware": {"devices": "auto:1", "workers": 1}},
        {"hardware": {"runner": "ray", "devices": "0"}},
        {"hardware": {"runner": "dask://slurm", "workers_per_device": 2}},
        {"hardware": {"runner": "spark"}},
        {"hardware": {"devices": "cuda:0"}},
        {"hardware": {"devices": "0,GPU-1"}},
        {"hardware": {"devices": ""}},
        {"hardware": {"workers": -1}},
        {"hardware": {"precision": "fp8"}},
        {"hardware": {"worker": 2}},
        {"limits": {"worker_retries": 64}},
        {"limits": {"time_limit_minutes": -1}},
        {"monitoring": {"metrics_port": 65536}},
        {"monitoring": {"metrics_network": "node7"}},
        {"monitoring": {"pushgateway": "file:///etc/passwd"}},
        {"cache": {"cache_gib": 0}},
        {"output_dir": ""},
    ],
)
def test_what_makes_none_is_refused_by_the_server_and_by_the_flow(flow, box):
    parameters = {**NEEDED[flow], **box}
    assert server_refuses(flow, parameters)
    assert flow_refuses(flow, parameters)


@pytest.mark.parametrize(
    ("flow", "box"),
    [
        (embed, {"fasta_files": []}),
        (embed, {"fasta_files": [""]}),
        (embed, {"sequences": {"long": "cut"}}),
        (embed, {"result": {"form": "many"}}),
        (predict, {"threshold": 1.0}),
        (predict, {"prior": "0.0"}),
        (predict, {"fdr": 0}),
        (predict, {"models": {"chunk": -1}}),
        (predict, {"result": {"formats": ["csv"]}}),
        (train, {"labelled": []}),
        (train, {"leave_out": [""]}),
        (train, {"training": {"num_fragments": 10}}),
        (train, {"training": {"chunk_nt": 400}}),
        (train, {"training": {"group_weights": {"phage": -1}}}),
        (train, {"result": {"allow_partial": True}}),
    ],
)
def test_so_is_what_only_one_of_them_knows(flow, box):
    parameters = {**NEEDED[flow], **box}
    assert server_refuses(flow, parameters)
    assert flow_refuses(flow, parameters)


@pytest.mark.parametrize(
    ("flow", "box", "sentences"),
    [
        (embed, {"fasta_files": []}, ["[] should be non-empty"]),
        (embed, {"hardware": {"workers": 2000}}, ["2000 is greater than the maximum of 1024"]),
        (embed, {"hardware": {"devices": "gpu7"}}, ["'auto, auto:N, cpu, or a list such as 0,1' was expected"]),
        (
            embed,
            {"hardware": {"devices": "cpu", "workers_per_device": 2}},
            ["'1, because only GPUs are shared by several workers' was expected"],
        ),
        (
            embed,
            {"hardware": {"devices": "0,1", "workers": 2}},
            ["'0, because CPU workers are not for a list of GPUs' was expected"],
        ),
        (
            embed,
            {"hardware": {"runner": "dask", "devices": "0,1", "workers_per_device": 2}},
            [
                "'auto or cpu, because a cluster gives each task its device' was expected",
                "'1, because a cluster gives each task its device' was expected",
            ],
        ),
        (
            embed,
            {"monitoring": {"pushgateway": "gateway"}},
            ["'an http:// or https:// address, such as http://gateway:9091' was expected"],
        ),
        (predict, {"threshold": 1.5}, ["1.5 is greater than or equal to the maximum of 1"]),
        (predict, {"prior": "2"}, ["'auto, off, or a share of viruses such as 0.05' was expected"]),
        (predict, {"cascade": "0.5"}, ["'auto, off, or two scores such as 0.02,0.98' was expected"]),
        (predict_inbox, {"deployment": "predict"}, ["'a flow and its deployment, as in predict/predict' was expected"]),
    ],
)
def test_the_server_says_what_is_taken(flow, box, sentences):
    parameters = {**NEEDED[flow], **box}
    assert [error.message for error in validate(parameters, schema(flow))] == sentences
    assert flow_refuses(flow, parameters)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"fdr": 0.1, "threshold": 0.5},
            "a threshold and a false discovery rate exclude each other: give one of them",
        ),
        ({"fdr": 0.05, "prior": "off"}, "a false discovery rate needs the prior: choose auto or a share"),
        ({"cascade": "0.9,0.1"}, "the cascade is 0.9,0.1: the lower score comes first"),
    ],
)
def test_what_only_the_worker_can_check_is_one_sentence(fields, sentence):
    assert not server_refuses(predict, {**NEEDED[predict], **fields})
    with pytest.raises(ConfigurationError) as refused:
        settings_of_form(PredictionSettings, fields)
    assert str(refused.value) == sentence


def deployments():
    """Every deployment: name -> the schema of its form."""
    for one in yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]:
        flow = load_flow_from_entrypoint(str(REPOSITORY / one["entrypoint"]), use_placeholder_flow=False)
        yield pytest.param(schema(flow), id=one["name"])


def lines_of(form, box=None, place=""):
    """Every line of a form, at any depth, as its page has it: place -> its schema."""
    for name, own in (box or form)["properties"].items():
        line = {**form["definitions"][own["$ref"].rpartition("/")[2]], **own} if "$ref" in own else own
        yield f"{place}{name}", line
        if "properties" in line:
            yield from lines_of(form, line, f"{place}{name}.")


@pytest.mark.parametrize("form", list(deployments()))
def test_every_field_of_every_deployment_has_a_title_and_help_and_an_order(form):
    positions = [line["position"] for line in form["properties"].values()]
    assert positions == sorted(positions)
    for name, box in form.get("definitions", {}).items():
        assert box["additionalProperties"] is False, f"a typo in {name} would be ignored"
    lines = dict(lines_of(form))
    assert len(lines) > 3
    for place, line in lines.items():
        name, title, help_text = place.rpartition(".")[2], line.get("title", ""), line.get("description", "")
        assert title[:1].isupper(), f"{place} is shown as {title or name}"
        assert "_" not in title, place
        assert len(help_text) > 10, place
        assert help_text.endswith("."), place
        ways = [way.get("title", way["type"]) for way in line.get("anyOf", [])]
        assert len(ways) == len(set(ways)), f"{place}: {ways}"
        assert not {"string", "integer", "number", "object"} & set(ways), f"{place}: {ways}"


LISTED = {
    "model": {*PROTEIN_MODELS, *DNA_MODELS},
    "models.dna_model": {*DNA_MODELS},
    "training.protein_model": {*PROTEIN_MODELS},
    "classifier": {"virnucpro-tiny"},
    "hardware.runner": {"threads", "ray", "dask", "dask://slurm"},
    "hardware.devices": {"auto", "cpu", "auto:1", "auto:2", "auto:4"},
    "hardware.precision": {"auto", "fp32", "bf16", "fp16"},
    "prior": {"auto", "off"},
    "cascade": {"auto", "off"},
    "result.form": {"auto", "single", "sharded", "parquet"},
    "monitoring.log_level": {"DEBUG", "INFO", "WARNING", "ERROR"},
    "deployment": {"predict/predict", "embed/embed"},
}


def test_choices_are_lists_and_what_is_in_no_list_is_taken_as_well():
    found = {}
    for flow in NEEDED:
        for place, line in lines_of(schema(flow)):
            ways = line.get("anyOf", [line])
            for way in (one for one in ways if "enum" in one and place in LISTED):
                found[place] = flow, set(way["enum"])
    assert {place: listed for place, (_, listed) in found.items()} == LISTED
    typed = {
        "model": "/w/a.pt",
        "classifier": "/c",
        "prior": ".07",
        "cascade": "0.1,0.9",
        "deployment": "embed/large",
        "hardware": {"runner": "ray://head:10001"},
        "models": {"dna_model": "/w/b.bin"},
        "training": {"protein_model": "/w/c.pt"},
    }
    for name, value in typed.items():
        places = [place for place in found if place.split(".")[0] == name]
        flow = found[places[0]][0]
        assert not server_refuses(flow, {**NEEDED[flow], name: value}), name
        assert not flow_refuses(flow, {**NEEDED[flow], name: value}), name


def test_the_listed_models_and_classifiers_are_those_there_are():
    assert {spec.name for spec, _ in models_table()} == {*PROTEIN_MODELS, *DNA_MODELS}
    assert CLASSIFIERS == BUNDLED_CLASSIFIERS
