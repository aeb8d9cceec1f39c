"""The process that probed a GPU becomes its worker: one load a GPU, and none is left where no rank takes it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests import fake_gpus, fakes
from tests.faults.processes import RowsFound, compare_rows, make_proteins, wait_until
from virnucpro.choices import AUTO_TOKEN_BUDGET
from virnucpro.config import RunLimits
from virnucpro.errors import DiskSpaceError, StoppedError
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.plan.budget_probe import probe_devices
from virnucpro.pipeline.run import run_preparation
from virnucpro.pipeline.work import warm_process
from virnucpro.pipeline.work.warm_process import kept_warm
from virnucpro.pipeline.work.worker_process import WorkerProcess
from virnucpro.run_layout import RunLayout

GPUS = (Device("3"), Device("5"))
ANOTHER_WORKER = "tests.unit.test_warm_process:another_worker"


def another_worker(*args):
    fake_gpus.gpu_worker_on_a_fake_gpu(*args)


def add_up_what_comes(rank, world_size, results_queue):
    """Report how many bytes this process is given."""
    rank, world_size, (data,) = results_queue.next_work()
    results_queue.put({"rank": rank, "ranks": world_size, "bytes": len(data), "status": "complete"})


class Job:
    """Proteins, a model on two fake GPUs, and what became of the processes."""

    def __init__(self, folder):
        self.out, self.fasta, self.control = folder / "out", folder / "in.fasta", folder / "model.json"
        self.sequences = make_proteins(self.fasta, random.Random(4), 40)

    def run(self, *, devices=GPUS, after_probes=lambda _: None, plan=None, changes=None, **more):
        def stage(name, work):
            done = work()
            if name == "index":
                after_probes(waiting_pids())
            return done

        options = {"stage_runner": stage, "worker_fn": fake_gpus.WORKER, "probe_fn": fake_gpus.PROBE, **more}
        plan = {"how": "none", "loads": True, **(plan or {})}
        config = fakes.faulty_config(self.control, plan, **(changes or {}))
        return run_embedding([self.fasta], self.out, config, devices, **options)

    @property
    def loads(self):
        return [int(line) for line in self.control.with_suffix(".loads").read_text().split()]

    def check_rows(self):
        assert compare_rows(self.out, self.sequences) == RowsFound()

    def events(self, rank):
        return [json.loads(line) for line in RunLayout(self.out).worker_log(rank).read_text().splitlines()]


@pytest.fixture
def job(tmp_path):
    yield Job(tmp_path)
    assert not warm_process._waiting


def waiting_pids():
    return [worker.process.pid for run in warm_process._waiting.values() for worker, _ in run.values()]


def test_each_gpu_loads_the_model_once(job):
    result = job.run()
    assert result.state == "complete"
    assert sorted(job.loads) == sorted(pid for rank in result.ranks for pid in rank.pids)
    assert [(rank.attempts, rank.exit_code, rank.failures, len(rank.pids)) for rank in result.ranks] == [
        (1, 0, [], 1)
    ] * 2
    job.check_rows()
    for rank in result.ranks:
        lines = job.events(rank.rank)
        (kept,) = [line for line in lines if line["event"] == "model.kept"]
        assert kept["run_id"] == json.loads(RunLayout(job.out).manifest.read_text())["run_id"]
        assert (kept["rank"], kept["attempt"], kept["device"]) == (rank.rank, 1, rank.device)
        assert not any("run_id" in line for line in lines if line["event"] == "model.loaded"), "before there was a rank"
    devices = {use["device"] for use in fake_gpus.uses_of(job.control)}
    assert devices == {"3", "5"}


def test_it_goes_on_with_what_the_trials_found(job):
    result = job.run(changes={"token_budget": AUTO_TOKEN_BUDGET}, probe_fn=fake_gpus.PROBE_WITH_TRIALS)
    assert result.state == "complete"
    assert len(job.loads) == 2
    probes = json.loads(RunLayout(job.out).manifest.read_text())["plan"]["probes"]
    assert all(probe["trials"] for probe in probes)
    job.check_rows()


def test_of_two_workers_on_a_gpu_one_goes_on_with_its_model(job):
    result = job.run(devices=(GPUS[0],) * 2)
    assert result.state == "complete"
    assert len(job.loads) == len({pid for rank in result.ranks for pid in rank.pids}) == 2
    job.check_rows()


@pytest.mark.slow
@pytest.mark.long
def test_one_that_has_died_is_replaced_and_is_no_failure(job):
    def kill_one(pids):
        os.kill(pids[0], signal.SIGKILL)
        os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)

    result = job.run(after_probes=kill_one)
    assert [(rank.attempts, rank.failures) for rank in result.ranks] == [(1, [])] * 2
    assert len(job.loads) == 3
    job.check_rows()


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


def is_gone_or_zombie(pid):
    return is_gone(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_is_killed_at_its_work_starts_again_as_any_worker(job):
    result = job.run(plan={"rank": 0, "how": "sigkill", "before_batch": 1})
    assert [(rank.attempts, rank.failures) for rank in result.ranks] == [(2, ["died"]), (1, [])]
    assert len(job.loads) == 3
    assert job.loads.count(result.ranks[0].pids[1]) == 1
    job.check_rows()


@pytest.mark.slow
@pytest.mark.long
def test_one_that_stands_still_is_overdue_as_any_worker(job):
    limits = RunLimits(heartbeat_timeout_s=3)
    result = job.run(after_probes=lambda pids: os.kill(pids[0], signal.SIGSTOP), limits=limits)
    assert sorted(rank.failures for rank in result.ranks) == [[], ["hung"]]
    job.check_rows()


@pytest.mark.slow
@pytest.mark.long
def test_another_worker_function_does_not_get_it(job):
    result = job.run(worker_fn=ANOTHER_WORKER)
    assert result.state == "complete"
    assert len(job.loads) == 4
    assert not set(job.loads[:2]) & {pid for rank in result.ranks for pid in rank.pids}
    job.check_rows()


@pytest.mark.slow
@pytest.mark.long
def test_a_finished_folder_and_cpus_have_none(job):
    assert job.run().state == "complete"
    assert job.run(after_probes=lambda pids: pytest.fail(str(pids)) if pids else None).state == "complete"
    assert len(job.loads) == 2


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupt_before_the_ranks_ends_them(job):
    seen = []

    def interrupted(pids):
        seen.extend(pids)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(after_probes=interrupted)
    assert len(seen) == 2
    assert all(is_gone(pid) for pid in seen)


def test_a_stop_before_the_ranks_ends_them(job):
    stop, seen = threading.Event(), []

    def stopped(pids):
        seen.extend(pids)
        stop.set()

    assert job.run(after_probes=stopped, stop=stop).state == "stopped"
    assert len(seen) == 2
    assert all(is_gone(pid) for pid in seen)


def test_a_stop_while_another_gpu_is_tried_out_ends_them(job, monkeypatch):
    stop, seen = threading.Event(), []
    leave = warm_process.leave_waiting
    monkeypatch.setattr(
        "virnucpro.pipeline.plan.budget_probe.leave_waiting",
        lambda *args: (leave(*args), seen.extend(waiting_pids()), stop.set()),
    )
    with pytest.raises(StoppedError):
        job.run(stop=stop)
    assert seen
    assert all(is_gone(pid) for pid in seen)


@pytest.mark.slow
@pytest.mark.long
def test_a_disk_without_room_ends_them(job, monkeypatch):
    seen = []

    def no_room(layout, *_args, **_more):
        seen.extend(waiting_pids())
        raise DiskSpaceError(layout.output_dir, needed_bytes=2, available_bytes=1)

    monkeypatch.setattr(run_preparation, "take_space", no_room)
    with pytest.raises(DiskSpaceError):
        job.run()
    assert len(seen) == 2
    assert all(is_gone(pid) for pid in seen)


def test_without_a_run_that_waits_for_them_they_end(tmp_path):
    job = Job(tmp_path)
    config = fakes.faulty_config(job.control, {"how": "none", "loads": True})
    args = (str(tmp_path / "no index"), str(tmp_path / "out"), config)
    assert len(probe_devices(GPUS, args, probe_fn=fake_gpus.PROBE)) == 2
    assert len(job.loads) == 2
    assert all(is_gone(pid) for pid in job.loads)


def test_they_end_with_their_parent(tmp_path):
    job = Job(tmp_path)
    code = f"""
import os, signal
from tests import fake_gpus, fakes
from virnucpro.pipeline.devices import Device
from virnucpro.pipeline.plan.budget_probe import probe_devices
from virnucpro.pipeline.work.warm_process import kept_warm
if __name__ == "__main__":
    config = fakes.hash_config(weights_path={str(job.control)!r}, loader="tests.fakes:load_faulty_model")
    with kept_warm("one"):
        args = ("", {str(tmp_path / "out")!r}, config)
        probe_devices([Device("3")], args, probe_fn=fake_gpus.PROBE, run_id="one")
        os.kill(os.getpid(), signal.SIGKILL)
"""
    job.control.write_text(json.dumps({"loads": True}))
    (tmp_path / "parent.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, tmp_path / "parent.py"], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    (pid,) = job.loads
    wait_until(lambda: is_gone_or_zombie(pid), what="its end")


def test_work_that_no_pipe_takes_at_once_is_handed_over():
    worker = WorkerProcess(add_up_what_comes, rank=0, world_size=1, device=CPU, worker_args=())
    worker.start()
    worker.go_on((4, 9, (b"x" * 1_000_000,)))
    worker.outlive()
    messages = [message for message in worker.wait_for_messages(5) if "kind" not in message]
    worker.kill()
    worker.close()
    assert messages == [{"rank": 4, "ranks": 9, "bytes": 1_000_000, "status": "complete"}]
    with kept_warm("one"):
        assert warm_process.take_waiting("one", CPU, "", (0, 1, ())) is None
