"""``examples/prefect_flow.py`` as it stands, on a real server and worker: killed, cancelled, resumed."""

from __future__ import annotations

from contextlib import suppress

import psutil
import pytest

pytest.importorskip("prefect")

from tests.faults.processes import seconds_until_gone
from tests.prefect_service import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLE = "examples/prefect_flow.py"
UNITS = 60
RUN_LIMIT_S = 120.0


@pytest.fixture(scope="module")
def deployment(prefect_server):
    with prefect_server.worker():
        yield prefect_server.deploy(f"{EXAMPLE}:on_gpus", "read-first")


class Run:
    """A run in a folder of its own; what it computed is known by the files' inodes and times."""

    def __init__(self, server, deployment, folder, **parameters):
        self.server, self.folder = server, folder
        self.id = server.start(deployment, folder=str(folder), units=UNITS, **parameters)

    def done(self):
        """Return the whole units: name of the file -> inode and time in nanoseconds."""
        return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in self.folder.glob("*.txt")}

    def wait_for(self, number):
        wait_until(lambda: len(self.done()) >= number, limit_s=RUN_LIMIT_S, interval_s=0.02)

    def children(self):
        """The processes of its GPUs: device -> process."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environ = process.environ()
                if environ.get("PREFECT__FLOW_RUN_ID") == str(self.id) and process.cmdline()[-1:] == ["work"]:
                    found[environ["CUDA_VISIBLE_DEVICES"]] = process
        return found

    def completes(self):
        self.server.wait_for_state(self.id, "Completed", limit_s=RUN_LIMIT_S)
        texts = {int(path.stem): path.read_text() for path in self.folder.glob("*.txt")}
        assert texts == {n: f"{(10**7 + n) * (10**7 + n - 1) // 2}\n" for n in range(UNITS)}
        assert not list(self.folder.glob("*.tmp"))


def test_a_killed_process_is_started_again_and_computes_only_what_is_missing(prefect_server, deployment, tmp_path):
    run = Run(prefect_server, deployment, tmp_path / "units", gpus=["0", "GPU-1"])
    run.wait_for(8)
    children = run.children()
    assert children.keys() == {"0", "GPU-1"}
    for process in children.values():
        assert not [one.path for one in process.memory_maps() if "pydantic" in one.path], "Prefect is in the child"
    children["0"].kill()
    before = run.done()
    wait_until(lambda: run.children().get("0", children["0"]).pid != children["0"].pid, limit_s=RUN_LIMIT_S)
    assert run.children()["GPU-1"] == children["GPU-1"]
    run.completes()
    assert 8 <= len(before) < UNITS
    assert {name: run.done()[name] for name in before} == before
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with prefect_server.client() as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
    assert {task.name: task.run_count for task in tasks} == {"on 0": 2, "on GPU-1": 1}


@pytest.mark.long
def test_a_cancelled_and_a_killed_run_leave_no_process_and_the_next_one_computes_the_rest(
    prefect_server, deployment, tmp_path
):
    first = Run(prefect_server, deployment, tmp_path / "units")
    first.wait_for(4)
    processes = list(first.children().values())
    prefect_server.cancel(first.id)
    print(f"gone {seconds_until_gone(processes, limit_s=60):.1f} s after the cancellation")
    prefect_server.wait_for_state(first.id, "Cancelled", limit_s=90)
    second = Run(prefect_server, deployment, tmp_path / "units")
    before = first.done()
    assert len(before) < UNITS
    second.wait_for(len(before) + 4)
    processes = list(second.children().values())
    assert processes
    processes[0].parent().kill()  # the flow's own process
    assert seconds_until_gone(processes, limit_s=30) < 3
    before |= second.done()
    assert len(before) < UNITS
    third = Run(prefect_server, deployment, tmp_path / "units")
    third.completes()
    assert {name: third.done()[name] for name in before} == before


@pytest.mark.long
def test_a_gpu_whose_process_always_fails_leaves_its_units_missing_and_the_run_says_so(
    prefect_server, deployment, tmp_path
):
    (tmp_path / "units" / "0.tmp").mkdir(parents=True)  # the first unit of the first GPU cannot be written
    run = Run(prefect_server, deployment, tmp_path / "units")
    failed = prefect_server.wait_for_state(run.id, "Failed", limit_s=RUN_LIMIT_S)
    assert f"{UNITS // 2} of {UNITS} units are missing: run again" in failed.state.message
    (tmp_path / "units" / "0.tmp").rmdir()
    before = run.done()
    Run(prefect_server, deployment, tmp_path / "units").completes()
    assert {name: run.done()[name] for name in before} == before
