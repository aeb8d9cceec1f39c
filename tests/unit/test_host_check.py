"""What a host is asked before it takes part in a run, and the device that it gives."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import pytest

from tests import fakes
from tests.prepared_runs import prepared_run
from tests.settings import embedding_config
from tests.strategies import edit_manifest
from virnucpro import durable
from virnucpro.errors import ExitCode, HostCheckError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hosts import host_check
from virnucpro.pipeline.hosts.host_check import check_host, weights_here
from virnucpro.pipeline.hosts.unit_worker import device_here


@pytest.fixture(autouse=True)
def _on_host_x(monkeypatch):
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "host-x")


@pytest.fixture
def run(tmp_path):
    with prepared_run(tmp_path, fakes.hash_config()) as (prepared, _):
        yield prepared


@pytest.fixture
def fasta(tmp_path):
    return tmp_path / "proteins.fasta"


def expect_refusal(run, *words, exit_code=ExitCode.CONFIGURATION, path=None):
    with pytest.raises(HostCheckError) as caught:
        check_host(run)
    assert caught.value.exit_code == exit_code
    assert "host host-x cannot take part" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    if path is not None:
        assert caught.value.path == str(path)


def turn_a_sequence_round(fasta):
    lines = fasta.read_text().splitlines(keepends=True)
    fasta.write_text("".join([lines[0], lines[1].strip()[::-1] + "\n", *lines[2:]]))


def test_a_host_that_sees_everything_is_fine_and_leaves_nothing_behind(run):
    before = sorted(path.name for path in run.output_dir.iterdir())
    assert check_host(run) == run
    assert sorted(path.name for path in run.output_dir.iterdir()) == before


def test_an_input_of_another_size_is_named(run, fasta):
    with fasta.open("a") as file:
        file.write(">one_more\nMKV\n")
    expect_refusal(run, "it is another file", "bytes", path=fasta)


@pytest.mark.parametrize("hashed_bytes", [host_check.HASHED_BYTES, 10])
def test_an_input_of_the_same_size_and_other_content_is_named_also_by_a_sample(run, fasta, monkeypatch, hashed_bytes):
    check_host(run)
    monkeypatch.setattr(host_check, "HASHED_BYTES", hashed_bytes)
    turn_a_sequence_round(fasta)
    expect_refusal(run, "it is another file", path=fasta)


def test_an_input_that_is_not_there_is_named(run, fasta):
    fasta.rename(fasta.with_suffix(".elsewhere"))
    expect_refusal(run, "No such file", "every host needs the input under the same path", path=fasta)


def test_a_folder_that_is_not_the_runs_is_named(run, tmp_path):
    expect_refusal(replace(run, output_dir=tmp_path / "local"), "no run", path=tmp_path / "local")
    run.layout.lock.write_text(json.dumps({"run_id": "the next"}))
    expect_refusal(run, "is not the output folder of this run (it belongs to the next)", path=run.output_dir)


def test_a_folder_that_cannot_be_written_is_named_with_the_exit_code_for_it(for_all_users):
    with prepared_run(for_all_users, fakes.hash_config()) as (run, _), fakes.another_user():
        expect_refusal(run, "cannot be written", "denied", exit_code=ExitCode.CANNOT_WRITE, path=run.output_dir)


def test_other_versions_are_named(run):
    edit_manifest(run.layout.manifest, lambda values: values["settings"].update({"torch version": "1.0"}))
    expect_refusal(run, "torch version is 1.0")


def test_a_program_that_plans_other_blocks_is_named(run):
    expect_refusal(replace(run, model_config=fakes.hash_config(token_budget=80)), "plans other blocks")


# --- weights ---


def test_weights_that_are_elsewhere_on_this_host_are_found_by_the_models_name():
    config = embedding_config()
    assert weights_here(replace(config, weights_path="/another/host/model.safetensors")) == config


def test_other_weights_under_the_same_path_are_refused(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"others")
    config = replace(embedding_config(), weights_path=str(tmp_path / "model.pt"))
    with pytest.raises(HostCheckError, match=r"host-x.*the run's weights have"):
        weights_here(config)


def test_a_file_is_hashed_once_and_again_when_it_changes(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(b"one")
    config = replace(embedding_config(), weights_path=str(path), weights_sha256=durable.sha256_of(path))
    about = path.stat()
    weights_here(config)
    path.write_bytes(b"two")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    weights_here(config)  # it was not read again
    os.utime(path)
    with pytest.raises(HostCheckError, match="the run's weights have"):
        weights_here(config)


# --- devices ---


def test_the_gpu_that_the_orchestrator_chose_is_taken_and_of_several_each_worker_gets_another(monkeypatch, tmp_path):
    monkeypatch.setenv("VIRNUCPRO_LOCK_DIR", str(tmp_path / "locks"))
    stop = threading.Event()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with device_here("cuda", run_id="r", stop=stop) as one, device_here("cuda", run_id="r", stop=stop) as other:
        assert (one.token, other.token) == ("3", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with device_here("cuda", run_id="r", stop=stop) as one, device_here("cuda", run_id="r", stop=stop) as other:
        assert (one.token, other.token) == ("4", "5")
        waiting = threading.Timer(0.5, stop.set)
        waiting.start()
        with device_here("cuda", run_id="r", stop=stop):
            assert stop.is_set(), "a third worker waits until it is told to stop"
    with device_here("cpu", run_id="r", stop=stop) as device:
        assert device == CPU


def test_a_host_without_a_visible_gpu_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with (
        pytest.raises(HostCheckError, match=r"host-x.*none is visible here"),
        device_here("cuda", run_id="r", stop=threading.Event()),
    ):
        pass
