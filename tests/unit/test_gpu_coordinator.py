"""The coordinator with real spawned processes: isolation, failures, hangs, stopping."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from tests import fakes
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, DeviceError
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator

QUICK = RunLimits(attempts=1, stop_grace_s=1.0)


def cpu_coordinator(world_size, tmp_path, **changes):
    limits = RunLimits(**{"attempts": 1, "stop_grace_s": 1.0, **changes})
    return GPUProcessCoordinator(world_size, tmp_path, devices=[CPU] * world_size, limits=limits)


def run(coordinator, worker_fn, *args, timeout=60):
    with coordinator:
        coordinator.spawn_workers(worker_fn, args)
        completed = coordinator.wait_for_completion(timeout)
        return completed, coordinator.collect_results()


def test_every_rank_runs_in_its_own_spawned_process_and_reports(tmp_path):
    coordinator = cpu_coordinator(3, tmp_path)
    completed, reports = run(coordinator, fakes.report_environment, "an argument", 7)
    assert completed == {0: True, 1: True, 2: True}
    by_rank = {report["rank"]: report for report in reports}
    assert sorted(by_rank) == [0, 1, 2]
    assert len({report["pid"] for report in reports} | {os.getpid()}) == 4
    assert [by_rank[rank]["process_name"] for rank in range(3)] == ["gpu_worker_0", "gpu_worker_1", "gpu_worker_2"]
    assert all(report["world_size"] == 3 and report["args"] == ["an argument", 7] for report in reports)
    assert coordinator.world_size == 3
    assert coordinator.output_dir == tmp_path
    assert coordinator.ctx.get_start_method() == "spawn"
    assert {rank: process.pid for rank, process in coordinator.workers.items()} == {
        rank: by_rank[rank]["pid"] for rank in range(3)
    }


@pytest.mark.parametrize(("here", "there"), [("65536", None), ("131072", "131072")])
def test_what_dask_sets_for_its_own_memory_does_not_reach_a_worker(tmp_path, monkeypatch, here, there):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", here)
    _, reports = run(cpu_coordinator(1, tmp_path), fakes.report_environment)
    assert reports[0]["trim"] == there
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == here


GROWING = "expandable_segments:True"


@pytest.mark.parametrize(
    ("device", "here", "there"),
    [
        (Device("1"), {}, [GROWING, GROWING]),
        (CPU, {}, [None, None]),
        (Device("1"), {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, ["backend:native", None]),
        (Device("1"), {"PYTORCH_ALLOC_CONF": ""}, [None, ""]),
    ],
)
def test_memory_of_a_gpu_grows_in_place_unless_the_user_has_settings(tmp_path, monkeypatch, device, here, there):
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in here.items():
        monkeypatch.setenv(variable, value)
    before = dict(os.environ)
    _, reports = run(GPUProcessCoordinator(1, tmp_path, devices=[device]), fakes.report_environment)
    assert reports[0]["allocator"] == there
    assert dict(os.environ) == before


def test_numpy_has_one_thread_in_a_worker_and_here_as_many_as_before(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    _, reports = run(cpu_coordinator(1, tmp_path), fakes.report_environment)
    assert reports[0]["blas_threads"] == "1"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "5"


def test_a_worker_starts_in_under_two_seconds_without_torch_or_prefect(tmp_path):
    began_s = time.time()
    _, reports = run(cpu_coordinator(1, tmp_path), fakes.report_environment)
    seconds = reports[0]["started_s"] - began_s
    print(f"worker function entered {seconds:.2f} s after the call")
    assert reports[0]["modules"] == []
    assert seconds < 3 * 2.0


def test_prefect_in_the_parent_does_not_reach_the_worker(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import prefect, sys\n"
        "from pathlib import Path\n"
        "from tests import fakes\n"
        "from virnucpro.pipeline.devices import CPU\n"
        "from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator\n"
        "coordinator = GPUProcessCoordinator(1, Path('.'), devices=[CPU])\n"
        "coordinator.spawn_workers(fakes.report_environment, ())\n"
        "assert coordinator.wait_for_completion(60) == {0: True}\n"
        "report = coordinator.collect_results()[0]\n"
        "assert report['modules'] == [], report\n"
        "print('no prefect in the worker')\n"
    )  # no __main__ guard: the child must not import this file
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "no prefect in the worker\n", done.stderr


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,3", ["2", "3"]),
        ("3,1,0", ["3", "1"]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-d8d1a5ae-1b31-5f2d", None),
        ("", ["", ""]),
    ],
)
def test_rank_maps_to_the_parents_own_visible_list(tmp_path, monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, reports = run(GPUProcessCoordinator(2, tmp_path), fakes.report_environment)
    seen = [report["visible"] for report in sorted(reports, key=lambda report: report["rank"])]
    assert seen == (expected or visible.split(","))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_an_unset_visible_list_stays_unset_while_workers_start(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen, start = [], SpawnProcess.start

    def looking_on(process):  # as Prefect's threads may at any time
        start(process)
        seen.append("CUDA_VISIBLE_DEVICES" in os.environ)

    monkeypatch.setattr(SpawnProcess, "start", looking_on)
    _, reports = run(cpu_coordinator(1, tmp_path), fakes.report_environment)
    assert (seen, reports[0]["visible"]) == ([False], "")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_more_ranks_than_visible_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(DeviceError, match="3 workers requested, but only 2 GPUs are visible"):
        GPUProcessCoordinator(3, tmp_path)


def test_eight_threads_that_start_workers_at_once_never_mix_devices_up(tmp_path):
    barrier = threading.Barrier(8)
    seen: dict[int, list] = {}

    def start_two(number):
        devices = [Device(str(2 * number)), Device(f"GPU-{number}")]
        coordinator = GPUProcessCoordinator(2, tmp_path, devices=devices, limits=QUICK)
        barrier.wait()
        _, reports = run(coordinator, fakes.report_environment, timeout=120)
        seen[number] = [report["visible"] for report in sorted(reports, key=lambda report: report["rank"])]

    threads = [threading.Thread(target=start_two, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {number: [str(2 * number), f"GPU-{number}"] for number in range(8)}


@pytest.mark.parametrize(
    ("how", "exit_code", "failure"),
    [("sigkill", -9, "died"), ("exit7", 7, "died"), ("segfault", -11, "died"), ("raise", 70, "died")],
)
def test_a_rank_that_fails_leaves_the_others_alone(tmp_path, how, exit_code, failure):
    coordinator = cpu_coordinator(3, tmp_path)
    completed, reports = run(coordinator, fakes.fail_on_rank, 1, how)
    assert completed == {0: True, 1: False, 2: True}
    assert sorted(report["rank"] for report in reports if report["status"] == "complete") == [0, 2]
    outcome = coordinator.outcomes[1]
    assert (outcome.state, outcome.exit_code, outcome.failure) == ("failed", exit_code, failure)
    assert outcome.attempts == 1
    if how == "raise":
        assert "a fault that the test asked for" in outcome.reason


def test_an_exit_without_a_report_is_not_a_success(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path)
    completed, _ = run(coordinator, fakes.end_without_a_word)
    assert completed == {0: False}
    assert coordinator.outcomes[0].reason == "the process ended with exit code 0 and without a report"


def test_an_exit_code_other_than_0_after_the_report_is_not_a_success(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path)
    completed, _ = run(coordinator, fakes.report_and_exit, 7)
    assert completed == {0: False}
    assert (coordinator.outcomes[0].state, coordinator.outcomes[0].exit_code) == ("failed", 7)


def test_a_retry_is_a_new_process(tmp_path):
    coordinator = cpu_coordinator(2, tmp_path, attempts=3)
    completed, reports = run(coordinator, fakes.fail_until_attempt, str(tmp_path), "sigkill", 3)
    assert completed == {0: True, 1: True}
    for rank in range(2):
        pids = [int((tmp_path / f"{rank}_{number}").read_text()) for number in range(3)]
        assert len(set(pids)) == 3
        assert coordinator.outcomes[rank].pids == pids
        assert [report["pid"] for report in reports if report["rank"] == rank] == pids[-1:]


def test_attempts_are_bounded(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path, attempts=2)
    completed, _ = run(coordinator, fakes.fail_until_attempt, str(tmp_path), "exit7", 99)
    assert completed == {0: False}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_configuration_error_is_not_tried_again(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path, attempts=3)
    run(coordinator, fakes.fail_with_configuration_error)
    assert coordinator.outcomes[0].attempts == 1
    assert coordinator.outcomes[0].exit_code == 78
    assert coordinator.outcomes[0].failure == "configuration"


def test_a_stopped_process_is_found_by_its_silence_and_killed(tmp_path):
    coordinator = cpu_coordinator(2, tmp_path, heartbeat_timeout_s=2.0)
    began_s = time.monotonic()
    completed, _ = run(coordinator, fakes.fail_on_rank, 1, "sigstop")
    assert completed == {0: True, 1: False}
    assert coordinator.outcomes[1].failure == "hung"
    assert "no heartbeat for 2 s" in coordinator.outcomes[1].reason
    assert time.monotonic() - began_s < 2 + 6
    assert not psutil.pid_exists(coordinator.outcomes[1].pids[0])


def test_a_worker_that_never_gets_ready_is_killed(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path, startup_timeout_s=1.5)
    completed, _ = run(coordinator, fakes.sleep_long)
    assert completed == {0: False}
    assert coordinator.outcomes[0].reason == "not ready after 1.5 s"


def test_waiting_ends_at_the_timeout_and_the_worker_lives_on_until_it_is_terminated(tmp_path):
    coordinator = cpu_coordinator(2, tmp_path)
    coordinator.spawn_workers(fakes.sleep_long, ())
    began_s = time.monotonic()
    assert coordinator.wait_for_completion(1.0) == {0: False, 1: False}
    assert time.monotonic() - began_s < 5
    processes = list(coordinator.workers.values())
    assert all(process.is_alive() for process in processes)
    coordinator.terminate_all()
    assert not any(psutil.pid_exists(process.pid) for process in processes)
    assert {outcome.state for outcome in coordinator.outcomes.values()} == {"stopped"}


def test_an_error_in_the_parent_leaves_no_process(tmp_path):
    coordinator = cpu_coordinator(2, tmp_path)

    def fail_in_the_parent():
        with coordinator:
            coordinator.spawn_workers(fakes.sleep_long, ())
            raise KeyError("the parent's own")

    with pytest.raises(KeyError):
        fail_in_the_parent()
    assert not any(psutil.pid_exists(process.pid) for process in coordinator.workers.values())


def test_workers_end_with_their_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from tests import fakes\n"
        "from virnucpro.pipeline.devices import CPU\n"
        "from virnucpro.pipeline.gpu_coordinator import GPUProcessCoordinator\n"
        "coordinator = GPUProcessCoordinator(2, '.', devices=[CPU, CPU])\n"
        "coordinator.spawn_workers(fakes.sleep_after_report_of_start, ('.',))\n"
        "time.sleep(3600)\n"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    try:
        deadline_s = time.monotonic() + 60
        while len(list(tmp_path.glob("pid_*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        pids = [int(path.read_text() or 0) for path in tmp_path.glob("pid_*")]
        assert len(pids) == 2
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    killed_s = time.monotonic()
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() - killed_s < 10:
        time.sleep(0.01)
    seconds = time.monotonic() - killed_s
    print(f"workers outlived their parent by {seconds:.3f} s")
    assert seconds < 3 * 1.0


PARENT_THAT_LEAVES_A_WORKER = """
import os, signal, time
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.work.worker_process import WorkerProcess
function, arguments = "tests.fakes:sleep_after_report_of_start", (os.getcwd(),)
worker = WorkerProcess(function, rank=0, world_size=1, device=CPU, worker_args=arguments)
worker.start()
os.kill(worker.process.pid, signal.SIGSTOP)
if (other := os.fork()) == 0:
    time.sleep(600)
print(worker.process.pid, other, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_whose_parent_went_before_it_began_does_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PARENT_THAT_LEAVES_A_WORKER]
    with (tmp_path / "out").open("wb") as out:  # the worker holds it, too: a pipe would not end
        parent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
        assert parent.wait(60) == -signal.SIGKILL
    worker, other = [psutil.Process(int(pid)) for pid in (tmp_path / "out").read_text().split()]
    try:
        worker.resume()
        worker.wait(20)
        assert list(tmp_path.glob("pid_*")) == []
    finally:
        for process in filter(psutil.Process.is_running, (worker, other)):
            process.kill()


def test_a_flood_of_messages_does_not_hang_or_lose_the_report(tmp_path):
    heard = []
    coordinator = GPUProcessCoordinator(
        1, tmp_path, devices=[CPU], limits=QUICK, on_message=lambda _, message: heard.append(message)
    )
    completed, reports = run(coordinator, fakes.flood, 20_000)
    assert completed == {0: True}
    assert [report["messages"] for report in reports] == [20_000]
    assert sum(message.get("kind") == "progress" for message in heard) == 20_000


def test_a_message_that_does_not_fit_is_refused_at_the_sender(tmp_path):
    coordinator = cpu_coordinator(1, tmp_path)
    completed, _ = run(coordinator, fakes.send_too_much)
    assert completed == {0: False}
    assert "a message of 8000" in coordinator.outcomes[0].reason


def test_functions_that_another_process_cannot_import_are_refused(tmp_path):
    def local(rank, world_size, results_queue):
        pass

    with pytest.raises(ConfigurationError, match="not at the top level"):
        cpu_coordinator(1, tmp_path).spawn_workers(local, ())
    in_main = type(local)(local.__code__, {}, "worker")
    in_main.__module__ = "__main__"
    in_main.__qualname__ = "worker"
    with pytest.raises(ConfigurationError, match="is not in a script: move it into a module"):
        cpu_coordinator(1, tmp_path).spawn_workers(in_main, ())


def test_no_rank_at_all_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="at least 1"):
        GPUProcessCoordinator(0, tmp_path)


def test_an_interrupt_while_ranks_are_being_started_is_what_is_raised_and_leaves_no_process(tmp_path, monkeypatch):
    starts = []
    start = threading.Thread.start

    def interrupted_at_the_second(thread):
        if thread.name.startswith("rank-"):
            starts.append(thread.name)
            if len(starts) == 2:
                raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted_at_the_second)
    with (
        pytest.raises(KeyboardInterrupt),
        GPUProcessCoordinator(3, tmp_path, devices=[CPU] * 3, limits=RunLimits(stop_grace_s=1.0)) as coordinator,
    ):
        coordinator.spawn_workers(fakes.sleep_long, ())
    assert not any(process.is_alive() for process in coordinator.workers.values())
