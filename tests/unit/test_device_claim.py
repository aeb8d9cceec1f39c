"""What a run does about devices that others hold: it waits, shows for whom, can be stopped, and keeps what it gets."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

import pytest

from tests import fakes
from tests.fake_gpus import probe_a_fake_gpu
from tests.fake_nvml import FakeNvml
from tests.strategies import edit_manifest
from virnucpro.errors import SettingsChangedError, StoppedError
from virnucpro.pipeline.devices import CPU, Device, choose_devices
from virnucpro.pipeline.hardware import device_claim
from virnucpro.pipeline.hardware.device_claim import DeviceClaim, claim_of
from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show import wording


class Listener:
    """A view that keeps what it is told."""

    def __init__(self):
        self.texts = []

    def update(self, snapshot):
        pass

    def note(self, text):
        self.texts.append(text)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _locks_of_this_test(tmp_path, monkeypatch):
    monkeypatch.setenv("VIRNUCPRO_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr(device_claim, "LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr(device_claim, "lock_names", partial(lock_names, nvml=FakeNvml(has_driver=False)))


@pytest.fixture
def others():
    """Another run that holds devices 0 and 1."""
    locks = DeviceLocks()
    assert locks.take(["GPU-0", "GPU-1"], least=2, most=2, run_id="theirs")
    yield locks
    locks.release()


def claim(choice, *, gpus=2, **settings):
    return claim_of(choose_devices(choice, environ={}, present=[str(number) for number in range(gpus)], **settings))


def said(telemetry):
    texts = []
    while not telemetry._sayings.empty():
        texts.append(telemetry._sayings.get_nowait())
    return texts


def test_what_is_free_is_had_at_once_and_kept_to_the_end():
    telemetry, ours = RunTelemetry(), claim("auto", workers_per_device=2)
    with ours.held(telemetry, run_id="ours"):
        assert (
            [device.token for device in ours.devices()]
            == ["0", "1", "0", "1"]
            == [device.token for device in ours.devices()]
        )
        theirs = claim("auto:1")
        stop = threading.Event()
        stop.set()
        with pytest.raises(StoppedError), theirs.held(RunTelemetry(), run_id="theirs", stop=stop):
            theirs.devices()
    assert said(telemetry) == []
    assert telemetry.snapshot().stages == ()
    with claim("0,1").held(telemetry, run_id="next"):
        pass


def test_auto_takes_what_is_free_and_leaves_the_rest():
    one, other = claim("auto:1", gpus=3), claim("auto", gpus=3)
    with one.held(RunTelemetry(), run_id="one"), other.held(RunTelemetry(), run_id="other"):
        assert one.devices() == [Device("0")]
        assert other.devices() == [Device("1"), Device("2")]


@pytest.mark.parametrize("choice", ["auto", "auto:2", "0,1", "1"])
def test_a_run_waits_until_it_has_what_it_needs_and_says_who_holds_it(others, choice):
    telemetry, ours = RunTelemetry(), claim(choice)
    threading.Timer(0.15, others.release).start()
    with telemetry.stage("index"), ours.held(telemetry, run_id="ours"):
        assert {device.token for device in ours.devices()} <= {"0", "1"}
    waiting, got = said(telemetry)
    wanted = {"auto": "any of", "auto:2": "all of", "0,1": "all of", "1": "all of"}[choice]
    assert waiting.startswith(f"waiting for GPUs ({wanted} these): cuda:")
    holder = others.holder("GPU-0") or DeviceLocks().holder("GPU-1")
    assert "held by process" in waiting or holder is None
    assert got.startswith("got cuda:")
    seconds = telemetry.stages_s()
    assert seconds["devices"] > 0.1 > seconds["index"]  # waiting is no part of the stage that it interrupts


def test_who_holds_a_device_is_told_again_from_time_to_time_and_cannot_act_on_the_terminal(others, monkeypatch):
    monkeypatch.setattr(device_claim, "NOTICE_INTERVAL_S", 0.05)
    (others.folder / "GPU-1.lock").write_text(
        '{"host": "h", "pid": 1, "user": "eve\\u001b[2J", "run_id": "r", "since": "\\u0007"}'
    )
    telemetry, ours = RunTelemetry(), claim("auto:2")
    threading.Timer(0.3, others.release).start()
    with ours.held(telemetry, run_id="ours"):
        ours.devices()
    *waiting, _ = said(telemetry)
    assert len(waiting) >= 2
    assert "process 1 of eve\\x1b[2J on h since \\x07" in waiting[0]
    assert all(text.isprintable() for text in waiting)


def test_a_run_that_waits_says_so_wherever_it_is_looked_at(others, tmp_path):
    telemetry, ours = RunTelemetry(), claim("auto")
    seen = []

    def look():
        seen.append(wording.doing(telemetry.snapshot()))
        others.release()

    threading.Timer(0.1, look).start()
    with telemetry.stage("index", model="hash"), ours.held(telemetry, run_id="ours"):
        ours.devices()
    assert seen == ["checking the input and the devices: waiting for devices that other runs hold"]


def test_a_run_that_waits_can_be_stopped(others):
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    ours = claim("auto:2")
    with pytest.raises(StoppedError), ours.held(RunTelemetry(), run_id="ours", stop=stop):
        ours.devices()
    others.release()
    with ours.held(RunTelemetry(), run_id="ours"):
        assert len(ours.devices()) == 2


def test_a_signal_ends_the_waiting_and_nothing_stays_locked(others, monkeypatch):
    monkeypatch.setattr(device_claim, "LOOK_INTERVAL_S", 60)

    def ring(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    began_s = time.monotonic()
    ours = claim("auto", gpus=2)
    try:
        with pytest.raises(TimeoutError), ours.held(RunTelemetry(), run_id="ours"):
            ours.devices()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < 5
    others.release()
    assert DeviceLocks().take(["GPU-0", "GPU-1"], least=2, most=2, run_id="third")


def test_a_claim_within_a_claim_keeps_the_devices_until_the_outer_one_ends():
    ours = claim("0")
    with ours.held(RunTelemetry(), run_id="whole"):
        for part in ("dna", "protein"):
            with ours.held(RunTelemetry(), run_id=part):
                assert ours.devices() == [Device("0")]
            assert DeviceLocks().take(["GPU-0"], least=1, most=1, run_id="third") is None
    third = DeviceLocks()
    assert third.take(["GPU-0"], least=1, most=1, run_id="third") == ["GPU-0"]
    third.release()


def test_cpus_and_devices_that_are_ours_already_need_no_lock(others, tmp_path):
    for granted in (claim("cpu", workers=3), DeviceClaim.of([CPU] * 3)):
        assert granted.devices() == [CPU] * 3
    given = DeviceClaim.of([Device("0"), Device("1"), Device("0")])
    assert given.devices() == [Device("0"), Device("1"), Device("0")]
    assert DeviceClaim.of(given) is given


def test_neither_a_finished_folder_nor_one_with_other_settings_waits_for_devices(others, tmp_path):
    fasta, layout = tmp_path / "in.fasta", RunLayout(tmp_path / "out")
    fasta.write_text(">a\nMKV\n>b\nMKVL\n")
    config = fakes.hash_config()
    assert run_embedding([fasta], layout.output_dir, config, [CPU], keep_shards=True).state == "complete"
    made_on_a_cpu = layout.manifest.read_text()
    edit_manifest(layout.manifest, lambda values: values["settings"].update(device_type="cuda"))
    again = run_embedding([fasta], layout.output_dir, config, claim("auto:2"), keep_shards=True)
    assert (again.state, again.ranks) == ("complete", ())
    layout.manifest.write_text(made_on_a_cpu)
    for damage in (lambda: None, layout.embeddings.unlink):
        damage()
        with pytest.raises(SettingsChangedError, match="device_type"):
            run_embedding([fasta], layout.output_dir, config, claim("auto:2"))


def test_a_run_that_waits_holds_its_folder_and_stops_without_a_trace_of_a_result(others, tmp_path):
    fasta, out = tmp_path / "in.fasta", tmp_path / "out"
    fasta.write_text(">a\nMKV\n")
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(StoppedError):
        run_embedding([fasta], out, fakes.hash_config(), claim("auto:2"), stop=stop)
    assert not RunLayout(out).manifest.exists()
    others.release()
    ours = claim("auto:2")
    with RunLock(RunLayout(out).lock, run_id="two"), ours.held(RunTelemetry(), run_id="two"):
        run = prepare_run([fasta], out, fakes.hash_config(), ours, run_id="two", probe_fn=probe_a_fake_gpu)
    assert [device.token for device in run.devices] == ["0", "1"]
