"""Runners by name, the clusters that a worker allows, and what is said of one without GPUs."""

import logging
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from flows.clusters import hardware
from flows.clusters.hardware import Runner, check_runner_allowed, runner_of
from flows.clusters.ray_engine import show_token
from virnucpro.errors import ConfigurationError


@pytest.mark.parametrize(("address", "on_cpus", "warns"), [("h:1", False, 1), ("h:1", True, 0), ("", False, 0)])
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_standing_cluster_without_gpus_computes_on_cpus_and_says_so(
    monkeypatch, caplog, engine, address, on_cpus, warns
):
    of_cpus = SimpleNamespace(slots=2, device_type="cpu")
    monkeypatch.setattr(hardware, f"{engine}_engine", lambda *_, **__: nullcontext(of_cpus))
    monkeypatch.setattr(hardware, "get_run_logger", logging.getLogger)
    with hardware.started(Runner(engine, address), workers=0, on_cpus=on_cpus) as found:
        assert found is of_cpus
    assert caplog.text.count("declares no GPU") == warns


def test_a_cluster_without_a_worker_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "dask_engine", lambda *_, **__: nullcontext(SimpleNamespace(slots=0)))
    with (
        pytest.raises(ConfigurationError, match="the cluster of dask has no worker"),
        hardware.started(Runner("dask", "h:1"), workers=0),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize("name", ["ray", "dask", "threads"])
def test_a_runner_without_an_address_is_on_this_machine(name):
    assert runner_of(name) == Runner(name)


@pytest.mark.parametrize("name", ["rays", "ray://", "ray:x", "slurm", "threads://x", "dask://a b"])
def test_a_name_that_no_runner_has_is_refused(name):
    with pytest.raises(ConfigurationError, match="no runner is called"):
        runner_of(name)


@pytest.mark.parametrize(
    ("name", "setting", "is_deployed", "is_allowed"),
    [
        ("dask", None, True, True),
        ("dask://elsewhere:8786", None, False, True),
        ("dask://elsewhere:8786", None, True, False),
        ("dask://elsewhere:8786", "ray://head:10001, dask://slurm", True, False),
        ("dask://elsewhere:8786", "ray://head:10001", False, False),
        ("dask://slurm", "ray://head:10001, dask://slurm", True, True),
    ],
)
def test_a_run_of_a_deployment_uses_the_clusters_that_its_worker_names(
    name, setting, is_deployed, is_allowed, monkeypatch
):
    monkeypatch.delenv("VIRNUCPRO_RUNNERS", raising=False)
    if setting is not None:
        monkeypatch.setenv("VIRNUCPRO_RUNNERS", setting)
    if is_deployed:
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "6b5b9f0c")
    with nullcontext() if is_allowed else pytest.raises(ConfigurationError, match="dask://elsewhere:8786 is not one"):
        check_runner_allowed(name)


@pytest.mark.parametrize("where", ["home", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "nowhere"])
def test_rays_client_is_told_to_show_its_token_where_there_is_one(where, tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # put back at the end, also what is set below
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if where == "home":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    elif where != "nowhere":
        monkeypatch.setenv(where, "secret")
    show_token()
    assert os.environ.get("RAY_AUTH_MODE") == (None if where == "nowhere" else "token")


def test_who_has_switched_rays_tokens_off_keeps_them_off(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    show_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
