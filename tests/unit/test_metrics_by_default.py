"""Where a worker's runs serve metrics: where the shipped Prometheus looks, unless its environment says otherwise."""

from __future__ import annotations

import pytest

from flows.run import metrics_by_default
from flows.run.metrics_by_default import TARGETS, serve_by_default
from tests.fakes import another_user
from virnucpro.settings import Monitoring
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.telemetry.worker_logging import LABEL_VARIABLES, known_labels, started_by

GATEWAY = "http://127.0.0.1:9091"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The machine's folder and the checkout's, in an environment without settings."""
    for name in (TARGETS, "VIRNUCPRO_METRICS_PORT", "VIRNUCPRO_METRICS_NETWORK", "VIRNUCPRO_PUSHGATEWAY"):
        monkeypatch.delenv(name, raising=False)
    machine, own = tmp_path / "machine", tmp_path / "own"
    machine.mkdir(mode=0o777)
    own.mkdir()
    monkeypatch.setattr(metrics_by_default, "MACHINE_FOLDER", machine)
    monkeypatch.setattr(metrics_by_default, "OWN_FOLDER", own)
    tmp_path.chmod(0o755)
    return machine, own


def test_without_any_setting_runs_are_found_in_the_machines_folder_else_in_the_checkouts(folders, monkeypatch):
    machine, own = folders
    assert serve_by_default() == f"{TARGETS}={machine} by default"
    assert (metrics_options().port, metrics_options().targets_dir) == (0, str(machine))
    monkeypatch.delenv(TARGETS)
    machine.rmdir()
    assert str(own) in serve_by_default()
    assert metrics_options().targets_dir == str(own)


def test_a_folder_that_cannot_be_written_is_not_taken_and_nothing_fails(folders):
    for folder in folders:
        folder.chmod(0o555)
    with another_user():
        assert serve_by_default().startswith("not served: neither ")
    assert metrics_options().port is None


@pytest.mark.parametrize(
    ("name", "value", "port"),
    [(TARGETS, "", None), ("VIRNUCPRO_METRICS_PORT", "9400", 9400), ("VIRNUCPRO_PUSHGATEWAY", GATEWAY, None)],
)
def test_the_environment_turns_the_default_off(folders, monkeypatch, name, value, port):
    monkeypatch.setenv(name, value)
    assert name in serve_by_default()
    found = metrics_options()
    assert (found.port, found.targets_dir) == (port, None)


def test_a_run_that_asks_to_push_is_not_scraped_as_well(folders):
    serve_by_default()
    pushed = metrics_options(Monitoring(pushgateway=GATEWAY))
    assert (pushed.port, pushed.targets_dir, pushed.pushgateway) == (None, None, GATEWAY)
    both = metrics_options(Monitoring(pushgateway=GATEWAY, metrics_targets=str(folders[1])))
    assert both.targets_dir == str(folders[1])


def test_log_lines_have_the_labels_that_are_set(tmp_path, monkeypatch):
    monkeypatch.setenv(LABEL_VARIABLES["flow_run"], "run-1")
    monkeypatch.delenv(LABEL_VARIABLES["deployment"], raising=False)
    assert started_by() == {"flow_run": "run-1", "deployment": ""}
    assert known_labels() == {"flow_run": "run-1"}
