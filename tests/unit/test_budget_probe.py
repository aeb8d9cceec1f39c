"""GPUs are tried out before the plan is made: real processes on a machine without GPUs, with findings of the test."""

from __future__ import annotations

import json
import os
import threading

import pytest
from structlog.testing import capture_logs

from tests.fakes import fake_probe, hash_config
from tests.strategies import write_fasta
from virnucpro.choices import AUTO_TOKEN_BUDGET
from virnucpro.data.packing import make_plan
from virnucpro.errors import ConfigurationError, DeviceError, ExitCode, SettingsChangedError, StoppedError
from virnucpro.pipeline.devices import CPU, Device, DeviceChoice
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.store.manifest import RunManifest

RECORDS = [("a", "MKT"), ("b", "MKTAYIAKQR" * 8), ("c", "WY" * 9), ("d", "MKTAYIAKQR" * 5)]
GPUS = (Device("3"), Device("5"))


@pytest.fixture
def prepare(tmp_path):
    """Prepare a run on GPUs that have what the test says; what a probe cost is counted by ``asked``."""
    fasta = write_fasta(tmp_path / "in.fasta", RECORDS)
    control = tmp_path / "gpus.json"

    def run(found, *, devices=GPUS, stop=None, token_budget=AUTO_TOKEN_BUDGET, **changes):
        control.write_text(json.dumps(found))
        config = hash_config(weights_path=str(control), token_budget=token_budget, **changes)
        return prepare_run([fasta], tmp_path / "out", config, devices, run_id="one", probe_fn=fake_probe, stop=stop)

    return run


def asked(tmp_path):
    """Processes that tried a GPU out."""
    return len(list(tmp_path.glob("gpus.failed*")))


def leave_work(run):
    run.layout.parts_dir.mkdir(parents=True, exist_ok=True)
    (run.layout.parts_dir / "part_000000000_x.h5").write_bytes(b"")


def test_the_smallest_budget_over_the_devices_is_planned_with_and_recorded(tmp_path, prepare):
    run = prepare([{"token_budget": 500}, {"token_budget": 90}])
    assert run.model_config.token_budget == 90
    assert run.model_config.attention_kernel == "varlen_attn"
    manifest = RunManifest.read(run.layout.manifest)
    assert manifest.plan["token_budget"] == manifest.settings["token_budget"] == 90
    assert manifest.settings["attention_kernel"] == "varlen_attn"
    assert [(probe["device"], probe["device_name"], probe["token_budget"]) for probe in manifest.plan["probes"]] == [
        ("cuda:3", "GPU of rank 0 seen as 3", 500),
        ("cuda:5", "GPU of rank 1 seen as 5", 90),
    ]
    assert manifest.plan["probes"][1]["trials"] == [{"tokens": 90, "tokens_per_second": 1000, "peak_mib": 10}]
    assert len(run.plan(run.open_index())) == 2


def test_a_gpu_that_workers_share_is_tried_out_once(tmp_path, prepare):
    run = prepare([{"token_budget": 500}, {"token_budget": 90}], devices=GPUS * 2)
    assert asked(tmp_path) == 2
    assert run.world_size == 4
    assert run.model_config.token_budget == 90
    probes = RunManifest.read(run.layout.manifest).plan["probes"]
    assert [probe["device"] for probe in probes] == ["cuda:3", "cuda:5"]


def test_a_budget_smaller_than_the_longest_sequence_is_raised_to_it(prepare):
    assert prepare([{"token_budget": 7}, {"token_budget": 90}]).model_config.token_budget == 82


def test_a_run_that_is_continued_uses_the_recorded_budget_without_asking_again(tmp_path, prepare):
    first = prepare([{"token_budget": 500}, {"token_budget": 90}])
    leave_work(first)
    probes = RunManifest.read(first.layout.manifest).plan["probes"]
    assert asked(tmp_path) == 2
    again = prepare([{"token_budget": 300}] * 3, devices=(*GPUS, Device("7")))
    assert asked(tmp_path) == 2
    assert again.model_config.token_budget == 90
    assert again.plan(again.open_index()).fingerprint == first.plan(first.open_index()).fingerprint
    assert RunManifest.read(again.layout.manifest).plan["probes"] == probes


def test_a_given_budget_is_kept_and_only_the_kernel_is_asked_for(prepare):
    run = prepare([{}, {"kernel": "sdpa-padded"}], token_budget=100)
    assert run.model_config.token_budget == 100
    assert run.model_config.attention_kernel == "sdpa-padded + varlen_attn"


def test_another_budget_than_the_recorded_one_is_refused(prepare):
    leave_work(prepare([{"token_budget": 500}, {"token_budget": 90}]))
    with pytest.raises(SettingsChangedError) as caught:
        prepare([], token_budget=100)
    assert caught.value.differences == {"token_budget": (90, 100)}


def test_gpus_do_not_continue_what_a_cpu_began(prepare):
    run = prepare([], devices=(CPU,))
    assert run.model_config.attention_kernel == ""
    leave_work(run)
    with pytest.raises(SettingsChangedError) as caught:
        prepare([{"token_budget": 90}] * 2)
    assert caught.value.differences == {"device_type": ("cpu", "cuda")}


def test_a_cpu_is_not_tried_out(tmp_path, prepare):
    run = prepare([], devices=(CPU, CPU))
    assert asked(tmp_path) == 0
    assert run.model_config.token_budget > 1000


def test_rows_of_another_kernel_are_another_plan(prepare):
    run = prepare([{"token_budget": 90}, {"token_budget": 90}])
    index = run.open_index()
    config = hash_config(token_budget=90, attention_kernel="flash-attn 2.8.3")
    assert make_plan(index, config, device_type="cuda").fingerprint != run.plan(index).fingerprint


def test_a_device_that_cannot_be_used_says_why(prepare):
    with pytest.raises(ConfigurationError, match="cuda:5: no kernel for this GPU") as caught:
        prepare([{"token_budget": 90}, {"refuse": "no kernel for this GPU"}])
    assert caught.value.exit_code is ExitCode.CONFIGURATION


def test_with_auto_a_gpu_that_cannot_be_used_is_left_out_by_name(prepare):
    auto = DeviceClaim(DeviceChoice(candidates=GPUS, least=1, most=2), GPUS)
    with capture_logs() as lines:
        run = prepare([{"refuse": "no kernel for this GPU"}, {"token_budget": 90}], devices=auto)
    assert run.devices == (Device("5"),)
    assert run.model_config.token_budget == 90
    manifest = RunManifest.read(run.layout.manifest)
    assert [probe["device"] for probe in manifest.plan["probes"]] == ["cuda:5"]
    assert [rank["device"] for rank in manifest.ranks] == ["cuda:5"]
    left_out = [line for line in lines if line["event"] == "device.left_out"]
    assert [line["reason"] for line in left_out] == ["cuda:3: no kernel for this GPU"]


def test_with_auto_a_run_without_any_gpu_that_can_be_used_says_why(prepare):
    auto = DeviceClaim(DeviceChoice(candidates=GPUS, least=1, most=2), GPUS)
    with pytest.raises(ConfigurationError, match="cuda:3: no kernel for this GPU"):
        prepare([{"refuse": "no kernel for this GPU"}] * 2, devices=auto)


def test_a_device_whose_process_dies_is_named_with_what_to_do(tmp_path, prepare):
    with pytest.raises(DeviceError, match=r"cuda:3 could not be tried out \(died: .*signal 9.*--devices"):
        prepare([{"fail": "sigkill"}, {"token_budget": 90}])
    assert not (tmp_path / "out" / "run.json").exists()


def test_a_stop_ends_the_trial_and_its_processes(tmp_path, prepare):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(StoppedError):
        prepare([{"fail": "hang"}, {"fail": "hang"}], stop=stop)
    pids = [int(path.read_text()) for path in tmp_path.glob("gpus.failed*")]
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]  # noqa: PTH110


def test_every_device_is_tried_at_the_same_time_in_a_process_of_its_own(tmp_path, prepare):
    prepare([{"token_budget": 90}] * 2)
    pids = {path.read_text() for path in tmp_path.glob("gpus.failed*")}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids


def test_probing_leaves_the_parent_free_of_the_framework(tmp_path):
    import subprocess
    import sys

    code = "import sys, virnucpro.pipeline.run.run_preparation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_real_probe_on_a_machine_without_gpus_is_a_configuration_error(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    fasta = write_fasta(tmp_path / "in.fasta", RECORDS)
    config = hash_config(token_budget=AUTO_TOKEN_BUDGET)
    with pytest.raises(ConfigurationError, match=r"cuda:0: .*sees no CUDA device.*--devices cpu"):
        prepare_run([fasta], tmp_path / "out", config, (Device("0"),), run_id="one")
