"""What each host of a cluster serves of a run: once, whoever of its tasks does it, and nothing that the driver has."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests import fakes
from tests.debian_programs import program
from tests.device_tasks import Host
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.unit.test_device_task import SharedRun, wait_until, with_its_sha256
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.hosts import host_metrics
from virnucpro.pipeline.work.unit_claims import new_owner
from virnucpro.run_layout import RunLayout, UnitsLayout
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor
from virnucpro.telemetry.metrics.options import HostMetricsOptions, MetricsOptions
from virnucpro.telemetry.metrics.table import RunCollector
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.this_host import host_name

RUN_ID = "abcdef012345"
UUIDS = ["GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"]
EVERYWHERE = "virnucpro_build_info"


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(host_metrics, "INTERVAL_S", 0.05)


@pytest.fixture
def units(tmp_path):
    layout = UnitsLayout(tmp_path / "units")
    layout.readings_dir.mkdir(parents=True)
    return layout


@pytest.fixture
def options(tmp_path):
    return HostMetricsOptions(
        run_id=RUN_ID, port=0, network="127.0.0.0/8", driver="elsewhere", targets_dir=str(tmp_path / "targets")
    )


def targets_in(folder):
    """Labels of each target -> its address."""
    found = {}
    for path in folder.glob("virnucpro-*.json"):
        try:
            (group,) = json.loads(path.read_bytes())
        except FileNotFoundError:  # it has just gone
            continue
        found[tuple(sorted(group["labels"].items()))] = group["targets"][0]
    return found


def served(address):
    """Text at an address; empty where nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=20) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def samples_of(text):
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def ranks_with_cost(text):
    return {labels["rank"] for name, labels, _ in samples_of(text) if name == "virnucpro_worker_resident_memory_bytes"}


def task(stack, options, units, *, rank=0, device=CPU, pid=None, uuid=""):
    """A device task of this process, as two threads of one Dask worker are; return what ends it, and what it tells."""
    inner = stack.enter_context(ExitStack())
    told = []
    about = {"rank": rank, "device": device, "model": "m", "on_message": lambda _, message: told.append(message)}
    hear = inner.enter_context(host_metrics.host_metrics(options, units, new_owner(), **about))
    hear(rank, {"kind": "heartbeat", "pid": os.getpid() if pid is None else pid})
    hear(rank, {"kind": "model_loaded", "seconds": 1.0, **({"gpu_uuid": uuid} if uuid else {})})
    return inner.close, told


def host_address(tmp_path, name=None):
    """Wait for the address of a host's target."""
    labels = (("host", name or host_name()), ("run_id", RUN_ID))
    wait_until(lambda: labels in targets_in(tmp_path / "targets"))
    return targets_in(tmp_path / "targets")[labels]


def test_one_endpoint_has_the_gpus_and_processes_of_all_tasks_of_its_host(tmp_path, units, options, monkeypatch):
    gpus = [FakeGpu(uuid, utilization_percent=10 * number, memory_total_bytes=2) for number, uuid in enumerate(UUIDS)]
    monkeypatch.setattr(host_metrics, "GpuMonitor", partial(GpuMonitor, nvml=FakeNvml(gpus)))
    with ExitStack() as stack:
        for rank in (0, 1):
            # CUDA counts otherwise than NVML here: the UUID tells
            task(stack, options, units, rank=rank, device=Device(str(rank)), uuid=UUIDS[1 - rank])
        address = host_address(tmp_path)
        wait_until(lambda: ranks_with_cost(served(address)) == {"0", "1"})
        wait_until(lambda: served(address).count("virnucpro_gpu_utilization_ratio{") == 2)
        text = served(address)
    found = {
        (name, labels.get("rank"), labels["device"], labels.get("uuid")): value
        for name, labels, value in samples_of(text)
        if name != EVERYWHERE and labels["host"] == host_name() and "reason" not in labels
    }
    for rank in (0, 1):
        of_gpu = (None, f"cuda:{rank}", UUIDS[1 - rank])
        assert found["virnucpro_gpu_utilization_ratio", *of_gpu] == (1 - rank) / 10
        assert found["virnucpro_gpu_memory_total_bytes", *of_gpu] == 2
        assert found["virnucpro_worker_cpu_seconds_total", str(rank), f"cuda:{rank}", None] > 0
        assert found["virnucpro_worker_resident_memory_bytes", str(rank), f"cuda:{rank}", None] > 2**20
    assert list((tmp_path / "targets").iterdir()) == []
    assert list(units.readings_dir.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(address.split(":"), timeout=5)


def test_promtool_finds_nothing_to_say_of_it(tmp_path, units, options):
    with ExitStack() as stack:
        task(stack, options, units)
        address = host_address(tmp_path)
        wait_until(lambda: ranks_with_cost(served(address)))
        text = served(address)
    check = [program("promtool"), "check", "metrics"]
    done = subprocess.run(check, input=text.encode(), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_when_the_task_that_serves_ends_another_one_of_the_host_does(tmp_path, units, options):
    with ExitStack() as stack:
        ends, _ = task(stack, options, units, rank=0)
        first = host_address(tmp_path)
        task(stack, options, units, rank=1)
        wait_until(lambda: ranks_with_cost(served(first)) == {"0", "1"})
        ends()
        wait_until(lambda: host_address(tmp_path) != first)
        assert ranks_with_cost(served(host_address(tmp_path))) == {"1"}


def test_processor_time_adds_up_over_the_processes_of_a_worker(tmp_path, units, options):
    def used(text):
        return next((value for name, _, value in samples_of(text) if name == "virnucpro_worker_cpu_seconds_total"), 0)

    with ExitStack() as stack, subprocess.Popen(["sleep", "60"]) as idle:
        inner = stack.enter_context(ExitStack())
        hear = inner.enter_context(
            host_metrics.host_metrics(
                options, units, new_owner(), rank=0, device=CPU, model="m", on_message=lambda *_: None
            )
        )
        hear(0, {"kind": "heartbeat", "pid": os.getpid()})
        address = host_address(tmp_path)
        wait_until(lambda: used(served(address)))
        before = used(served(address))
        hear(0, {"kind": "heartbeat", "pid": idle.pid})
        time.sleep(0.3)
        assert used(served(address)) >= before
        idle.kill()


def test_a_reading_that_is_not_renewed_is_shown_no_more(tmp_path, units, options, monkeypatch):
    with ExitStack() as stack:
        task(stack, options, units)
        address = host_address(tmp_path)
        wait_until(lambda: ranks_with_cost(served(address)) == {"0"})
        (mine,) = units.readings_dir.glob(f"{host_name()}.*")
        reading = json.loads(mine.read_text())
        reading["cost"]["rank"] = 7
        units.reading(f"{host_name()}.1.ab").write_text(json.dumps(reading))
        units.reading("node-9.1.ab").write_text(json.dumps(reading))  # another host's
        units.reading(f"{host_name()}.2.ab").write_text('{"written": 1')  # torn
        assert ranks_with_cost(served(address)) == {"0", "7"}
        monkeypatch.setattr(host_metrics, "STALE_S", 0.5)
        wait_until(lambda: ranks_with_cost(served(address)) == {"0"})


def test_a_host_serves_another_one_only_in_a_network_that_was_named(tmp_path, units, options):
    unnamed = {**vars(options), "network": ""}
    with ExitStack() as stack:
        task(stack, HostMetricsOptions(**unnamed), units)
        task(stack, None, units)
        time.sleep(0.3)
        assert not (tmp_path / "targets").exists()
        assert list(units.readings_dir.iterdir()) == []
        task(stack, HostMetricsOptions(**{**unnamed, "driver": host_name()}), units)
        assert host_address(tmp_path).startswith("127.0.0.1:")


def test_a_network_that_the_host_is_not_in_and_a_folder_that_cannot_be_made_end_nothing(tmp_path, units, options):
    (tmp_path / "file").write_text("")
    elsewhere = {**vars(options), "network": "198.51.100.0/24"}
    nowhere = {**vars(options), "run_id": "ba9876543210", "targets_dir": str(tmp_path / "file")}
    with ExitStack() as stack:
        _, told_there = task(stack, HostMetricsOptions(**elsewhere), units)
        _, told_here = task(stack, HostMetricsOptions(**nowhere), units)
        wait_until(lambda: len(told_there) == 1 and len(told_here) == 2)
        time.sleep(0.3)
        assert len(list(units.readings_dir.glob(f"{host_name()}.*"))) == 2
    assert [(each["level"], each["event"]) for each in (*told_there, *told_here)] == [
        ("warning", "metrics.not_served"),
        ("info", "metrics.served"),
        ("warning", "metrics.no_target_file"),
    ]
    assert told_there[0]["fields"] == {"reason": "this host has no address in 198.51.100.0/24"}
    assert not (tmp_path / "targets").exists()


def test_where_the_drivers_port_is_taken_the_host_has_a_free_one(tmp_path, units, options):
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        task(stack, HostMetricsOptions(**{**vars(options), "port": port}), units)
        address = host_address(tmp_path)
        assert address != f"127.0.0.1:{port}"
        wait_until(lambda: ranks_with_cost(served(address)))


# --- hosts and driver of a run ---


@pytest.fixture
def slow_run(tmp_path):
    """A run that waits for its hosts, of which each sequence takes a moment."""
    chooser = random.Random(5)
    sequences = ["".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=20 + number % 20)) for number in range(150)]
    lines = [f">protein_{number}\n{sequence}\n" for number, sequence in enumerate(sequences)]
    (tmp_path / "proteins.fasta").write_text("".join(lines))
    slow = fakes.faulty_config(tmp_path / "faults.json", {"how": "none", "slow_s": 0.3}, sequences_per_part=1)
    with ExitStack() as stack:
        yield SharedRun(stack, tmp_path, tmp_path / "proteins.fasta", with_its_sha256(slow), tasks=3, run_id=RUN_ID)


def test_what_two_hosts_and_the_driver_serve_is_the_run_each_series_once(tmp_path, slow_run, options):
    with ExitStack() as stack:
        for rank, name in enumerate(("host-a", "host-a", "host-b")):
            host = Host(name, slow_run.run, rank, tmp_path, metrics=options)
            stack.callback(host.close)
        addresses = {name: host_address(tmp_path, name) for name in ("host-a", "host-b")}
        wait_until(lambda: ranks_with_cost(served(addresses["host-a"])) == {"0", "1"})
        wait_until(lambda: ranks_with_cost(served(addresses["host-b"])) == {"2"})
        telemetry = slow_run.telemetry
        wait_until(lambda: all(rank.sequences for rank in telemetry.snapshot().ranks))
        shown = RunTelemetry()
        shown._embeddings = [telemetry]
        registry = CollectorRegistry()
        registry.register(RunCollector(shown.snapshot))
        of_driver = samples_of(generate_latest(registry).decode())
        of_hosts = [samples_of(served(address)) for address in addresses.values()]

        where = {labels["rank"]: labels["host"] for _, labels, _ in of_driver if "rank" in labels}
        assert where == {"0": "host-a", "1": "host-a", "2": "host-b"}
        assert {labels["host"] for name, labels, _ in of_hosts[0] if name != EVERYWHERE} == {"host-a"}
        names = [{name for name, _, _ in found} - {EVERYWHERE} for found in (of_driver, *of_hosts)]
        assert (
            names[1]
            == names[2]
            == {
                "virnucpro_worker_cpu_seconds_total",
                "virnucpro_worker_resident_memory_bytes",
            }
        )
        assert not names[0] & names[1]
        assert {"virnucpro_sequences_total", "virnucpro_tokens_total", "virnucpro_worker_up"} <= names[0]
    logged = slow_run.run.layout.worker_log(2).read_text().splitlines()
    assert {json.loads(line)["host"] for line in logged} == {"host-b"}


def test_when_the_process_that_serves_is_killed_another_of_its_host_takes_over(tmp_path, slow_run, options):
    with ExitStack() as stack:
        first = Host("host-a", slow_run.run, 0, tmp_path, metrics=options)
        stack.callback(first.close)
        address = host_address(tmp_path, "host-a")
        second = Host("host-a", slow_run.run, 1, tmp_path, metrics=options)
        stack.callback(second.close)
        wait_until(lambda: ranks_with_cost(served(address)) == {"0", "1"})
        first.lose()
        slow_run.hosts.take_lost(0, "host-a lost a task")
        assert served(address) == ""
        wait_until(lambda: host_address(tmp_path, "host-a") != address)
        wait_until(lambda: "1" in ranks_with_cost(served(host_address(tmp_path, "host-a"))))
        assert slow_run.telemetry.snapshot().ranks[0].state.value == "lost"
        second.lose()
    assert len(targets_in(tmp_path / "targets")) == 1, "nobody could take it away"
    layout = RunLayout(tmp_path / "another")
    layout.work_dir.mkdir(parents=True)
    driver = MetricsOptions(port=0, targets_dir=options.targets_dir)
    with RunTelemetry(driver) as telemetry, telemetry.running(layout, RUN_ID):
        assert len(targets_in(tmp_path / "targets")) == 2
    assert targets_in(tmp_path / "targets") == {}, "the end of the run takes away what its hosts left"
