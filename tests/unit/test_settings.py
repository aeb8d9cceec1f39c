"""Settings are written once: options, forms, arguments and the page in the docs agree, and refuse the same values."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import virnucpro
from tests.faces import EXAMPLES, help_text
from tests.settings import embedding_config, prediction_config
from tools.settings_page import PAGE, page
from virnucpro.cli import command_line
from virnucpro.commands.train import command_of
from virnucpro.errors import ConfigurationError, TimeLimitError
from virnucpro.knobs import UsageError, from_flat, recorded_settings, settings_of
from virnucpro.settings import (
    EmbeddingSettings,
    Hardware,
    PredictionSettings,
    SequenceRules,
)
from virnucpro.training.training_knobs import Training, TrainingSettings

KINDS = {"embed": EmbeddingSettings, "predict": PredictionSettings, "train": TrainingSettings}
EVERYWHERE = {
    *("worker_retries", "time_limit_minutes", "log_level", "metrics_port", "profile", "restart"),
    *("metrics_targets", "metrics_network", "pushgateway", "devices", "workers", "precision", "threads"),
}


@pytest.mark.parametrize("command", list(KINDS))
def test_every_setting_is_an_option(command):
    shown = help_text(command)
    for setting in settings_of(KINDS[command], face="command"):
        assert f"  {setting.option}" in shown


@pytest.mark.parametrize(("name", "kind"), [("embed_fasta", EmbeddingSettings), ("predict_fasta", PredictionSettings)])
def test_every_setting_is_an_argument_with_its_help(name, kind):
    function = getattr(virnucpro, name)
    for setting in settings_of(kind, face="library"):
        assert setting.argument in inspect.signature(function).parameters
        assert f"{setting.argument}: {setting.knob.help}" in function.__doc__


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
def test_what_any_run_has_is_on_every_face(kind):
    for face in ("command", "form", "library"):
        assert {setting.argument for setting in settings_of(kind, face=face)} >= EVERYWHERE


STANDS_FOR = {
    "model": "virnucpro-tiny-protein",
    "max_residues": 1022,
    "min_length": 0,
    "classifier": "virnucpro-tiny",
    "threshold": 0.5,
    "prior": "auto",
    "dna_model": "virnucpro-tiny-dna",
    "protein_model": "virnucpro-tiny-protein",
    "chunk": 500,
    "formats": ["tsv"],
    "genes": "viral",
}
"""Argument -> what its automatic default is, for the bundled models."""
FOUND_OUT = {
    *("workers", "token_budget", "fdr", "time_limit_minutes", "weights_dir", "cache_dir", "metrics_port"),
    *("metrics_targets", "metrics_network", "pushgateway", "loader_processes"),
}
"""Settings whose default stands for nothing, or for what only the machine knows."""


@pytest.mark.parametrize(("command", "resolved"), [("embed", embedding_config), ("predict", prediction_config)])
def test_a_default_that_is_given_is_the_same_as_none(command, resolved):
    """What a folder keeps of its earlier starts (``not_given``) is the documented default of some settings."""
    kind, plain = KINDS[command], resolved()
    for setting in settings_of(kind, face="command"):
        given = {setting.argument: setting.info.default}
        assert from_flat(kind, given) == from_flat(kind, {}), given
        if setting.argument in FOUND_OUT:
            continue
        assert setting.argument in STANDS_FOR or not setting.knob.auto, given
        given = {setting.argument: STANDS_FOR.get(setting.argument, setting.info.default)}
        found = resolved(**given)
        if command == "predict":
            assert replace(found, not_given=plain.not_given, dna=None, protein=None) == replace(plain, dna=None), given
        else:
            assert (found.result_settings(), found.input_rules, found.cache_space(), found.most_kept_residues) == (
                (plain.result_settings(), plain.input_rules, plain.cache_space(), plain.most_kept_residues)
            ), given


@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
def test_no_two_settings_of_a_run_have_one_name(kind):
    settings = settings_of(kind)
    for names in ([one.argument for one in settings], [one.option for one in settings]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"workers": 1025}, "workers is 1025: it should be less than or equal to 1024"),
        ({"precision": "fp8"}, "precision is fp8: it should be 'auto', 'fp32', 'bf16' or 'fp16'"),
        ({"gaps": "keep"}, "gaps is keep: it should be 'error' or 'remove'"),
        ({"devices": "gpu7"}, "devices is gpu7: choose auto"),
        ({"devices": "cpu", "workers_per_device": 2}, "several workers per device are for GPUs"),
        ({"workers": 1025, "threads": 0}, "workers is 1025.*threads is 0"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_is_taken(values, says):
    with pytest.raises(ConfigurationError, match=says) as refused:
        from_flat(EmbeddingSettings, values)
    assert not isinstance(refused.value, UsageError)


def test_a_runner_with_devices_of_its_own_is_a_mistake_of_usage():
    with pytest.raises(UsageError, match="the runner ray gives each task its device"):
        from_flat(EmbeddingSettings, {"runner": "ray", "devices": "0"})


def test_a_name_that_is_no_setting_is_named():
    with pytest.raises(TypeError, match=r"no setting .worker.: choose from .*workers"):
        from_flat(EmbeddingSettings, {"worker": 2})


def test_what_is_not_given_has_its_default_and_is_known_as_not_given():
    settings = from_flat(PredictionSettings, {"classifier": None, "threshold": 0.4})
    assert settings.classifier == "virnucpro-tiny"
    assert settings.model_fields_set == {"threshold"}


def test_what_decides_the_bytes_is_recorded_by_its_name_in_the_manifest():
    assert recorded_settings(Hardware(threads=3)) == {"precision": "auto", "token_budget": 0, "threads_per_worker": 3}
    assert set(recorded_settings(SequenceRules())) == {
        *("max_residues", "gaps", "stops", "on_bad_record", "rna", "long_policy"),
    }


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--workers", "1025"], 2, "1024"),
        (["--threshold", "1"], 2, "not above 0 and below 1"),
        (["--runner", "spark"], 2, "choose threads, ray"),
        (["--precision", "fp8"], 2, "fp8"),
        (["--token-budget", "many"], 2, "neither auto nor a number"),
    ],
)
def test_a_command_refuses_it_as_a_mistake_of_usage(arguments, code, says, tmp_path):
    result = CliRunner().invoke(
        command_line(), ["predict", str(tmp_path / "a.fa"), "-o", str(tmp_path / "out"), *arguments]
    )
    assert result.exit_code == code
    assert says in " ".join(result.output.split())


def test_a_command_line_is_recorded_for_the_card_with_what_differs_from_the_defaults(tmp_path):
    training = Training(
        name="mine", also_chunk_nt=[300], num_fragments=240, group_weights={"a b": 2}, shuffle_labels=True
    )
    settings = TrainingSettings(genomes=str(tmp_path / "labels.tsv"), leave_out=["x/y.fa", "z.fa"], training=training)
    assert command_of([tmp_path / "virus.fa"], settings) == (
        "virnucpro train virus.fa -o DIR --genomes labels.tsv --leave-out y.fa --leave-out z.fa --name mine "
        "--also-chunk 300 --fragments 240 --group-weight 'a b=2' --shuffle-labels --seed 1"
    )


def test_the_page_in_the_docs_is_made_from_the_settings():
    assert PAGE.read_text() == page(), "python -m tools.settings_page"


def test_a_time_limit_stops_a_call_of_the_library(tmp_path):
    proteins = EXAMPLES / "proteins.fasta"
    with pytest.raises(TimeLimitError, match=r"time limit of 0\.02 minutes"):
        virnucpro.embed_fasta(proteins, tmp_path / "out", devices="cpu", workers=1, time_limit_minutes=0.02)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"] == "stopped"
