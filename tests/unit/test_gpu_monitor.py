"""What is shown of the GPUs, by an NVML that the test describes."""

from __future__ import annotations

import inspect
import threading
import time

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.fake_nvml import FakeGpu, FakeNvml
from tests.snapshots import run_snapshot
from virnucpro.host_gpus import host_tokens
from virnucpro.pipeline.devices import choose_devices
from virnucpro.telemetry.metrics import gpu_monitor
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor, HostGpus
from virnucpro.telemetry.metrics.table import METRICS, HostCollector, RunCollector
from virnucpro.telemetry.snapshot import GpuSample
from virnucpro.this_host import host_name

UUIDS = [f"GPU-{number}932f937-d72c-4106-c12f-20bd9faed9f6" for number in range(4)]
MIG = "MIG-fd3b6f1a-0000-1111-2222-333344445555"


def four_gpus(**changes):
    return FakeNvml([FakeGpu(uuid, utilization_percent=10 * number, **changes) for number, uuid in enumerate(UUIDS)])


def sampled(devices, nvml, *, said=(), environ=None):
    """What a new monitor gives, once."""
    monitor = GpuMonitor(devices, nvml, environ={} if environ is None else environ)
    for label, uuid in said:
        monitor.found(label, uuid)
    try:
        return monitor.sample()
    finally:
        monitor.close()


def uuids(samples):
    return {sample.device: sample.uuid for sample in samples}


def test_the_fake_has_the_functions_of_nvml_with_their_parameters():
    functions = [name for name in vars(FakeNvml) if name.startswith("nvml") and callable(getattr(FakeNvml, name))]
    assert len(functions) == 14
    for name in functions:
        mine = list(inspect.signature(getattr(FakeNvml(), name)).parameters.values())
        theirs = list(inspect.signature(getattr(pynvml, name)).parameters.values())
        assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in theirs], name
    for name in gpu_monitor.THROTTLE_REASONS.values():
        assert getattr(FakeNvml, name) == getattr(pynvml, name)


def test_two_devices_chosen_as_3_and_1_have_their_own_values():
    nvml = FakeNvml(
        [
            FakeGpu(UUIDS[0], utilization_percent=1),
            FakeGpu(
                UUIDS[1],
                utilization_percent=97,
                memory_used_bytes=60 << 30,
                memory_total_bytes=141 << 30,
                power_milliwatts=512_345,
                temperature_celsius=61,
                sm_clock_megahertz=1980,
                reasons=pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
            ),
            FakeGpu(UUIDS[2], utilization_percent=2),
            FakeGpu(UUIDS[3], utilization_percent=3, reasons=pynvml.nvmlClocksEventReasonGpuIdle),
        ]
    )
    third, first = sampled([("cuda:3", "3"), ("cuda:1", "1")], nvml)
    nothing = dict.fromkeys(gpu_monitor.THROTTLE_REASONS, False)
    assert first == GpuSample(
        device="cuda:1",
        uuid=UUIDS[1],
        host=host_name(),
        utilization=0.97,
        memory_used_bytes=60 << 30,
        memory_total_bytes=141 << 30,
        power_watts=512.345,
        temperature_celsius=61.0,
        sm_clock_hertz=1.98e9,
        throttle={**nothing, "power_cap": True},
    )
    assert (third.device, third.uuid, third.utilization, third.throttle) == ("cuda:3", UUIDS[3], 0.03, nothing)
    assert nvml.users == 0
    assert nvml.threads == {"gpu-monitor"}


def test_the_series_of_two_devices_chosen_as_3_and_1_carry_their_labels():
    nvml = four_gpus(memory_total_bytes=141 << 30, power_milliwatts=700_500, sm_clock_megahertz=1980)
    nvml.gpus[1].reasons = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    chosen = choose_devices("3,1", environ={}, present=["0", "1", "2", "3"]).candidates
    samples = sampled([(device.label, device.token) for device in chosen], nvml)
    snapshot = run_snapshot(gpus=samples)
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: snapshot))
    third, first = ({"host": host_name(), "device": f"cuda:{number}", "uuid": UUIDS[number]} for number in (3, 1))
    value = registry.get_sample_value
    assert [value("virnucpro_gpu_utilization_ratio", labels) for labels in (third, first)] == [0.3, 0.1]
    for labels in (third, first):
        assert value("virnucpro_gpu_memory_total_bytes", labels) == 141 << 30
        assert value("virnucpro_gpu_power_watts", labels) == 700.5
        assert value("virnucpro_gpu_sm_clock_hertz", labels) == 1.98e9
    throttled = [value("virnucpro_gpu_throttled", {**labels, "reason": "power_brake"}) for labels in (third, first)]
    assert throttled == [0, 1]
    text = generate_latest(registry).decode()
    assert text.count("\nvirnucpro_gpu_utilization_ratio{") == 2
    assert UUIDS[0] not in text


@pytest.mark.parametrize("reason", gpu_monitor.THROTTLE_REASONS)
def test_each_reason_to_be_slowed_down_has_its_own_bit(reason):
    bit = getattr(pynvml, gpu_monitor.THROTTLE_REASONS[reason])
    (sample,) = sampled([("cuda:0", "0")], FakeNvml([FakeGpu(UUIDS[0], reasons=bit)]))
    assert [name for name, is_so in sample.throttle.items() if is_so] == [reason]


def test_workers_that_share_a_gpu_give_one_sample_and_cpu_workers_none():
    assert uuids(sampled([("cuda:1", "1"), ("cuda:1", "1"), ("cpu", "")], four_gpus())) == {"cuda:1": UUIDS[1]}
    nvml = four_gpus()
    assert sampled([("cpu", ""), ("cpu", "")], nvml) == ()
    assert nvml.threads == set()


@pytest.mark.parametrize("token", [UUIDS[2], "GPU-2932f937", "GPU-2"])
def test_a_uuid_is_found_by_as_much_of_it_as_is_unique(token):
    label = f"cuda:{token}"
    assert uuids(sampled([(label, token)], four_gpus())) == {label: UUIDS[2]}


@pytest.mark.parametrize("token", ["GPU-", "GPU-77", MIG, "4", "99999999999999999999"])
def test_a_device_that_is_not_there_or_not_certain_has_no_sample(token):
    assert sampled([(f"cuda:{token}", token)], four_gpus()) == ()


def test_numbers_of_unlike_gpus_mean_something_only_in_the_order_of_the_bus():
    nvml = four_gpus()
    nvml.gpus[0].name = "NVIDIA T400"  # CUDA counts fast ones first
    devices = [("cuda:0", "0")]
    assert sampled(devices, nvml) == ()
    assert uuids(sampled(devices, nvml, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == {"cuda:0": UUIDS[0]}
    assert sampled(devices, nvml, environ={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == ()


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_what_the_worker_says_beats_its_number(prefix):
    nvml = four_gpus()
    nvml.gpus[0].name = "NVIDIA T400"
    said = [("cuda:0", prefix + UUIDS[1].removeprefix("GPU-"))]
    assert uuids(sampled([("cuda:0", "0")], nvml, said=said)) == {"cuda:0": UUIDS[1]}


def test_a_worker_may_say_it_between_two_samples():
    monitor = GpuMonitor([("cuda:0", "0")], four_gpus(), environ={})
    assert uuids(monitor.sample()) == {"cuda:0": UUIDS[0]}
    monitor.found("cuda:0", UUIDS[3])
    assert uuids(monitor.sample()) == {"cuda:0": UUIDS[3]}
    monitor.close()


def test_a_mig_instance_is_itself_by_its_token_and_by_what_its_worker_says():
    unknown = dict.fromkeys(
        ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"], pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    nvml = four_gpus()
    nvml.gpus[0].instances.append(FakeGpu(MIG, memory_used_bytes=7, memory_total_bytes=10 << 30, failing=unknown))
    (sample,) = sampled([(f"cuda:{MIG}", MIG)], nvml)
    assert (sample.uuid, sample.memory_used_bytes, sample.utilization, sample.power_watts) == (MIG, 7, None, None)
    assert sampled([("cuda:0", "0")], nvml) == ()  # CUDA's device 0 is an instance, NVML's a GPU
    assert uuids(sampled([("cuda:0", "0")], nvml, said=[("cuda:0", MIG.removeprefix("MIG-"))])) == {"cuda:0": MIG}


@pytest.mark.parametrize(
    ("function", "field", "absent"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization", None),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes", None),
        ("nvmlDeviceGetPowerUsage", "power_watts", None),
        ("nvmlDeviceGetTemperature", "temperature_celsius", None),
        ("nvmlDeviceGetClockInfo", "sm_clock_hertz", None),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle", {}),
    ],
)
def test_what_the_driver_does_not_tell_is_absent_by_itself(function, field, absent):
    whole = FakeNvml([FakeGpu(UUIDS[0])])
    lacking = FakeNvml([FakeGpu(UUIDS[0], failing={function: pynvml.NVML_ERROR_NOT_SUPPORTED})])
    (expected,) = sampled([("cuda:0", "0")], whole)
    (sample,) = sampled([("cuda:0", "0")], lacking)
    assert getattr(sample, field) == absent
    assert getattr(expected, field) != absent
    differing = {name for name in vars(sample) if getattr(sample, name) != getattr(expected, name)}
    assert differing - {"memory_total_bytes"} == {field}


VALUES = [name for name in vars(FakeNvml) if name.startswith("nvmlDeviceGet") and name[13:16] not in ("UUI", "Han")]
LOST = [{"lost": True}, {"failing": dict.fromkeys(VALUES, pynvml.NVML_ERROR_GPU_IS_LOST)}]
"""A GPU that tells nothing, and one that tells its UUID alone."""


@pytest.mark.parametrize("how", LOST)
def test_a_gpu_that_falls_off_the_bus_is_absent_and_the_others_stay(how):
    nvml = four_gpus()
    monitor = GpuMonitor([("cuda:0", "0"), ("cuda:2", "2")], nvml, environ={})
    assert uuids(monitor.sample()) == {"cuda:0": UUIDS[0], "cuda:2": UUIDS[2]}
    vars(nvml.gpus[0]).update(how)
    assert uuids(monitor.sample()) == {"cuda:2": UUIDS[2]}
    monitor.close()


def test_numbers_behind_a_gpu_that_was_lost_before_wait_for_the_worker():
    nvml = four_gpus()
    nvml.gpus[0].lost = True  # CUDA's device 0 is the next one
    assert sampled([("cuda:0", "0"), ("cuda:1", "1")], nvml) == ()
    said = [("cuda:0", UUIDS[1]), ("cuda:1", UUIDS[2])]
    assert uuids(sampled([("cuda:0", "0"), ("cuda:1", "1")], nvml, said=said)) == dict(said)


def test_without_a_driver_there_are_no_samples_and_no_waiting():
    began_s = time.monotonic()
    assert sampled([("cuda:0", "0")], FakeNvml(has_driver=False)) == ()
    assert time.monotonic() - began_s < gpu_monitor.ANSWER_LIMIT_S


def test_a_driver_that_goes_in_the_middle_leaves_no_samples_and_no_error():
    nvml = four_gpus()
    monitor = GpuMonitor([("cuda:0", "0")], nvml, environ={})
    assert len(monitor.sample()) == 1
    nvml.has_driver = False
    assert monitor.sample() == ()
    monitor.close()


def test_a_driver_that_hangs_holds_up_nobody(monkeypatch):
    nvml = four_gpus()
    monitor = GpuMonitor([("cuda:0", "0")], nvml, environ={})
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 30)
    assert len(monitor.sample()) == 1
    nvml.goes_on.clear()
    began_s = time.monotonic()
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 0.1)
    assert [monitor.sample(), monitor.sample()] == [(), ()]
    nvml.goes_on.set()
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 30)
    assert len(monitor.sample()) == 1
    nvml.goes_on.clear()
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 0.1)
    monitor.close()
    assert time.monotonic() - began_s < 5
    nvml.goes_on.set()


def host_series(gpus):
    """Name without its prefix -> UUID, reason included -> value, of what the exporter of a host would serve."""
    series = {}
    for family in HostCollector(gpus.samples).collect():
        for sample in family.samples:
            name = sample.name.removeprefix("virnucpro_host_gpu_")
            labels = dict(sample.labels)
            assert labels.pop("host") == host_name()
            series.setdefault(name, {})[(labels.pop("uuid"), *labels.values())] = sample.value
    return series


def test_a_host_shows_all_its_gpus_with_the_numbers_of_nvidia_smi_and_under_names_of_its_own():
    nvml = four_gpus(
        memory_used_bytes=7, memory_total_bytes=141 << 30, power_milliwatts=700_500, temperature_celsius=61
    )
    nvml.gpus[2].name = "NVIDIA T400"  # which CUDA would count last
    nvml.gpus[3].reasons = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
    series = host_series(HostGpus(nvml))
    assert series["utilization_ratio"] == {(uuid, str(n)): n / 10 for n, uuid in enumerate(UUIDS)}
    assert series["memory_used_bytes"][UUIDS[1], "1"] == 7
    assert series["power_watts"][UUIDS[1], "1"] == 700.5
    assert {key for key, value in series["throttled"].items() if value} == {(UUIDS[3], "3", "power_brake")}
    assert series["lost"] == {(uuid, str(n)): 0 for n, uuid in enumerate(UUIDS)}
    of_runs = {one.name.removeprefix("virnucpro_gpu_") for one in METRICS if one.name.startswith("virnucpro_gpu_")}
    assert set(series) == {*of_runs, "lost"}
    assert nvml.threads == {"gpu-monitor"}


@pytest.mark.parametrize("how", LOST)
def test_a_gpu_that_the_host_has_lost_is_said_to_be_and_comes_back(how):
    nvml, last = four_gpus(), (UUIDS[1], "1")
    gpus = HostGpus(nvml)
    host_series(gpus)
    vars(nvml.gpus[1]).update(how)
    series = host_series(gpus)
    assert {key for key, is_lost in series["lost"].items() if is_lost} == {last}
    assert len(series["lost"]) == 4
    assert {name for name in series if last in series[name]} == {"lost"}, "no old value of it is served"
    vars(nvml.gpus[1]).update(lost=False, failing={})
    assert set(host_series(gpus)["lost"].values()) == {0}
    nvml.gpus.pop(0)  # opened anew, the driver counts those that are left
    assert {key for key, is_lost in host_series(gpus)["lost"].items() if is_lost} == {(UUIDS[0], "0")}


def test_all_gpus_of_a_host_are_lost_while_its_driver_hangs_and_not_while_it_is_slow(monkeypatch):
    nvml = four_gpus()
    gpus = HostGpus(nvml)
    host_series(gpus)
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 0.1)
    nvml.goes_on.clear()
    began_s = time.monotonic()
    series = host_series(gpus)
    assert time.monotonic() - began_s < 2
    assert series == {"lost": {(uuid, str(n)): 1 for n, uuid in enumerate(UUIDS)}}
    nvml.goes_on.set()
    assert set(host_series(gpus)["lost"].values()) == {0}
    monkeypatch.setattr(gpu_monitor, "ANSWER_LIMIT_S", 0.5)
    nvml.goes_on.clear()
    threading.Timer(0.6, nvml.goes_on.set).start()
    assert set(host_series(gpus)["lost"].values()) == {0}


def test_a_host_without_a_driver_has_no_series_until_there_is_one():
    nvml = four_gpus()
    nvml.has_driver = False
    gpus = HostGpus(nvml)
    began_s = time.monotonic()
    assert host_series(gpus) == {}
    assert time.monotonic() - began_s < gpu_monitor.ANSWER_LIMIT_S
    nvml.has_driver = True
    assert len(host_series(gpus)["lost"]) == 4


def test_a_gpu_that_is_divided_by_mig_is_one_of_the_host_without_utilisation():
    unknown = {"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml = FakeNvml([FakeGpu(UUIDS[0], failing=unknown, memory_used_bytes=7, instances=[FakeGpu(MIG)])])
    series = host_series(HostGpus(nvml))
    assert series["memory_used_bytes"] == {(UUIDS[0], "0"): 7}
    assert "utilization_ratio" not in series


def test_the_real_nvml_gives_samples_where_there_is_a_driver_and_else_nothing():
    monitor = GpuMonitor([("cuda:0", "0")], environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    samples = monitor.sample()
    monitor.close()
    assert len(samples) == min(len(host_tokens()), 1)
