"""The form: what the server refuses before a run exists, the flow refuses as well, and every field has its help."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect")

from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from flows.embed import embed
from flows.predict import predict
from flows.train import train

NEEDED = {
    embed: {"fasta_files": ["a.fasta"], "output_dir": "out"},
    predict: {"input_files": ["a.fasta"], "output_dir": "out"},
    train: {"labelled": ["virus.fa", "nonviral.fa"], "output_dir": "out"},
}
EACH = pytest.mark.parametrize("flow", list(NEEDED), ids=lambda flow: flow.name)


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
        (train, {"training": {"num_pieces": 10}}),
        (train, {"training": {"chunk_nt": 400}}),
        (train, {"training": {"group_weights": {"phage": -1}}}),
        (train, {"result": {"allow_partial": True}}),
    ],
)
def test_so_is_what_only_one_of_them_knows(flow, box):
    parameters = {**NEEDED[flow], **box}
    assert server_refuses(flow, parameters)
    assert flow_refuses(flow, parameters)


@EACH
def test_every_field_has_a_title_and_help_and_an_order(flow):
    form = schema(flow)
    lines = dict(form["properties"])
    positions = [line["position"] for line in lines.values()]
    assert positions == sorted(positions)
    for name, box in form["definitions"].items():
        assert box["additionalProperties"] is False, f"a typo in {name} would be ignored"
        lines |= {f"{name}.{field}": line for field, line in box["properties"].items()}
        assert all(line["title"] != field and "_" not in line["title"] for field, line in box["properties"].items())
    assert len(lines) > 25
    for name, line in lines.items():
        assert len(line.get("description", "")) > 10, name
        assert line["description"].endswith("."), name
