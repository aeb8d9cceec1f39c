"""
Runs of a deployment on a real server and a real worker: cancelled, killed, drained, retried, refused.

The flow is the real one with the hash model, which notes every batch that it computes: what was durable when a run was
interrupted is never computed again by the one that continues it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psutil
import pytest

pytest.importorskip("prefect")

import prefect

from tests.conftest import REPOSITORY
from tests.faults.processes import RowsFound, compare_rows, is_gone, make_proteins, seconds_until_gone
from tests.faults.test_prefect import computed, durable_sequences
from tests.hash_flows import RENEW_LEASE_S, VARIABLE, control_file
from tests.prefect_service import POOL, START_LIMIT_S, started, wait_until
from virnucpro.pipeline.run.run_status import status_of
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from pathlib import Path
    from uuid import UUID

    from tests.prefect_service import PrefectService

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUN_LIMIT_S = 180.0
"""Seconds after which a run is taken to hang: it takes about ten, on a machine that is busy some more."""
TWO_WORKERS = {"devices": "cpu", "workers": 2}
ENTRYPOINT = "tests/hash_flows.py:embed"


@dataclass
class Job:
    """A deployment, its input and its folder."""

    service: PrefectService
    deployment: UUID
    folder: Path
    fasta: Path
    sequences: dict[str, str]
    control: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def start(self, **parameters) -> UUID:
        given = {"fasta_files": [str(self.fasta)], "output_dir": str(self.out), "hardware": TWO_WORKERS, **parameters}
        return self.service.start(self.deployment, **given)

    def start_and_wait_for_parts(self, **parameters) -> UUID:
        run = self.start(**parameters)
        wait_until(lambda: len(list(self.out.glob("work/parts/part_*.h5"))) >= 3, limit_s=RUN_LIMIT_S)
        return run

    def durable(self) -> tuple[set[str], int]:
        """What is durable now, and how many sequences the model was given so far; from now on it is fast."""
        found = durable_sequences(self.out, self.sequences)
        assert 0 < len(found) < len(set(self.sequences.values()))
        control_file(self.control, calls=True)
        return found, len(computed(self.control))

    def check_complete(self, run: UUID, before: tuple[set[str], int]):
        """The run completes the folder, and computes nothing that was durable before."""
        durable, calls = before
        self.service.wait_for_state(run, "Completed", limit_s=RUN_LIMIT_S)
        again = {letters for _, letters in computed(self.control)[calls:]}
        assert again
        assert not again & durable
        assert compare_rows(self.out, self.sequences) == RowsFound()


@pytest.fixture
def job(prefect_server, tmp_path, request):
    fasta = tmp_path / "proteins.fasta"
    sequences = make_proteins(fasta, random.Random(4), 60)
    control = control_file(tmp_path / "control.json", slow_s=0.6, calls=True)
    environ = {VARIABLE: str(control), "VIRNUCPRO_DATA_ROOTS": str(tmp_path)}
    name = request.node.name.replace("_", "-").replace("[", "-").strip("]")[:80]
    deployment = prefect_server.deploy(ENTRYPOINT, name, **environ)
    return Job(prefect_server, deployment, tmp_path, fasta, sequences, control)


@pytest.fixture(scope="module")
def worker(prefect_server):
    with prefect_server.worker() as process:
        yield process


def processes_of(run: UUID) -> list[psutil.Process]:
    """Everything that runs for a flow run, but not its hooks."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run) and "hook" not in process.cmdline():
                found.append(process)
    return found


def logs_of(service, run: UUID) -> list[str]:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    with service.client() as client:
        return [line.message for line in client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run])))]


def artifacts_of(service, run: UUID) -> dict[str, str]:
    return {artifact.key: artifact.data for artifact in _artifacts(service, run)}


def progress_of(service, run: UUID) -> list[str]:
    return [artifact.description for artifact in _artifacts(service, run) if artifact.type == "progress"]


def _artifacts(service, run: UUID):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    with service.client() as client:
        return client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run])))


def state_names(service, run: UUID) -> list[str]:
    with service.client() as client:
        return [state.name for state in client.read_flow_run_states(run)]


def check_it_says_how_to_continue(job: Job, run: UUID):
    """The folder says that the run has stopped, and so do log and artifact of the run."""
    wait_until(lambda: "embed-resume" in artifacts_of(job.service, run), limit_s=RUN_LIMIT_S)
    page = artifacts_of(job.service, run)["embed-resume"]
    assert page.startswith("# Nothing that was finished is lost")
    assert "computes nothing twice" in page
    wait_until(
        lambda: any("Nothing that was finished is lost." in line for line in logs_of(job.service, run)),
        limit_s=RUN_LIMIT_S,
    )
    assert status_of(job.out).state == "stopped"
    assert json.loads((job.out / "run.json").read_text())["state"] == "stopped"
    assert not (job.out / "work" / "status.json").exists()


@contextmanager
def draining_worker(service: PrefectService, **environ: str):
    """A worker of ``flows.worker``; yields its process, whose ``log`` is a file."""
    log = service.folder / f"draining-{time.monotonic_ns()}.log"
    command = [sys.executable, "-m", "flows.worker", "--pool", POOL]
    with started(command, log, cwd=REPOSITORY, environ={**service.environ, **environ}) as process:
        wait_until(lambda: " started!" in log.read_text(), limit_s=START_LIMIT_S, log=log)
        process.log = log
        yield process


# before the others of this file: no other worker may be there to take the run
def test_a_worker_that_is_told_to_go_lets_its_run_stop_and_the_next_worker_continues_it(job):
    service = job.service
    with draining_worker(service) as first:
        run = job.start_and_wait_for_parts()
        processes = psutil.Process(first.pid).children(recursive=True)
        began_s = time.monotonic()
        first.terminate()
        assert first.wait(90) == 0, first.log.read_text()
        print(f"the worker was gone {time.monotonic() - began_s:.1f} s after it was told to go")
        assert all(is_gone(process) for process in processes)
        before = job.durable()
        assert service.flow_run(run).state.name == "AwaitingRetry", first.log.read_text()
    check_it_says_how_to_continue(job, run)
    assert "stopping: workers end at their next batch boundary" in logs_of(service, run)
    forgotten = job.folder / f"virnucpro-{host_name()}-0123456789ab.json"  # by a worker that was killed with its run
    forgotten.write_text("[]")
    with draining_worker(service, VIRNUCPRO_METRICS_TARGETS=str(job.folder)):
        assert not forgotten.exists()
        job.check_complete(run, before)
    assert state_names(service, run)[-1] == "Completed"


@pytest.mark.long
@pytest.mark.parametrize("in_s", [0, 30])
def test_a_retry_between_the_two_reports_of_a_crash_is_not_lost(job, in_s):
    from prefect.states import AwaitingRetry

    service = job.service
    with draining_worker(service) as process:
        run = job.start_and_wait_for_parts()
        service.flow_process(run).kill()
        service.wait_for_state(run, "Crashed", limit_s=60)
        with service.client() as client:
            at = datetime.now(UTC) + timedelta(seconds=in_s)
            assert client.set_flow_run_state(run, AwaitingRetry(scheduled_time=at)).status.value == "ACCEPT"
        before = job.durable()
        job.check_complete(run, before)
        states = state_names(service, run)
        print(states, [line for line in process.log.read_text().splitlines() if "flows.worker" in line])
    assert states.count("Crashed") == 2
    assert states.count("AwaitingRetry") == 1 + (in_s > 0)


@pytest.mark.long
def test_after_worker_and_run_were_killed_a_retry_leaves_no_task_running(job):
    from prefect.states import Crashed

    service = job.service
    with service.worker() as first:
        run = job.start_and_wait_for_parts()
        process = service.flow_process(run)
        first.kill()
        process.kill()
    before = job.durable()
    assert open_tasks(service, run), "nobody is there to end them"
    with service.client() as client:  # as an automation does that misses its heartbeat
        client.set_flow_run_state(run, Crashed(message="no heartbeat"), force=True)
    with service.worker():
        retry(service, run)
        job.check_complete(run, before)
    wait_until(lambda: not open_tasks(service, run), limit_s=30)
    names = {name: task.state_name for name, task in ranks_of(service, run).items()}
    assert set(names.values()) <= {"Completed", "Crashed"}, names


@pytest.mark.long
def test_a_run_that_was_suspended_just_before_its_worker_is_told_to_go_stays_suspended(job):
    from prefect.states import Suspended

    service = job.service
    with draining_worker(service) as process:
        control_file(job.control, slow_s=3.0, calls=True)
        run = job.start_and_wait_for_parts()
        with service.client() as client:
            client.set_flow_run_state(run, Suspended(timeout_seconds=600))
        process.terminate()
        assert process.wait(90) == 0, process.log.read_text()
        before = job.durable()
        assert service.flow_run(run).state.name == "Suspended", process.log.read_text()
    with draining_worker(service), service.client() as client:
        client.resume_flow_run(run)
        job.check_complete(run, before)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["just taken", "told twice at once"])
def test_a_worker_hands_back_a_run_that_it_has_only_just_taken_and_one_that_it_is_told_not_to_wait_for(job, moment):
    service = job.service
    with draining_worker(service) as process:
        if moment == "just taken":
            run = job.start()
            wait_until(lambda: service.flow_run(run).state.type == "PENDING", limit_s=RUN_LIMIT_S, interval_s=0.02)
        else:
            run = job.start_and_wait_for_parts()
        processes = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        if moment == "told twice at once":
            process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0, process.log.read_text()
        assert all(is_gone(process) for process in processes)
        assert service.flow_run(run).state.name == "AwaitingRetry", process.log.read_text()


def test_a_cancelled_run_leaves_no_process_and_a_folder_that_the_next_run_completes(worker, job):
    service = job.service
    run = job.start_and_wait_for_parts()
    processes = processes_of(run)
    assert len(processes) >= 3
    service.cancel(run)
    seconds = seconds_until_gone(processes, limit_s=60)
    before = job.durable()
    began_s = time.monotonic()
    service.wait_for_state(run, "Cancelled", limit_s=90)
    print(f"gone {seconds:.1f} s after it was asked for, Cancelled {seconds + time.monotonic() - began_s:.1f} s")
    assert {rank.state_name for rank in ranks_of(service, run).values()} == {"Cancelled"}
    assert seconds < 30
    assert seconds + time.monotonic() - began_s < 90
    assert processes_of(run) == []
    check_it_says_how_to_continue(job, run)
    job.check_complete(job.start(), before)


def test_a_run_that_is_suspended_and_then_cancelled_stops_within_seconds_and_can_be_continued(worker, job):
    from prefect.states import Cancelling, Suspended

    service = job.service
    control_file(job.control, slow_s=3.0, calls=True)
    run = job.start_and_wait_for_parts()
    processes = processes_of(run)
    with service.client() as client:
        assert client.set_flow_run_state(run, Suspended(timeout_seconds=600)).status.value == "ACCEPT"
        assert client.set_flow_run_state(run, Cancelling()).state.name == "Cancelled"  # no worker hears of it
    seconds = seconds_until_gone(processes, limit_s=60)
    before = job.durable()
    print(f"gone {seconds:.1f} s after it was asked for")
    assert seconds < 3 * 15  # ten until it looks at its state, and a batch
    check_it_says_how_to_continue(job, run)
    assert state_names(service, run)[-2:] == ["Suspended", "Cancelled"]
    job.check_complete(job.start(), before)


@pytest.mark.long
def test_a_suspended_run_stops_and_goes_on_when_it_is_resumed(worker, job):
    from prefect.states import Suspended

    control_file(job.control, slow_s=2.0, calls=True)
    run = job.start_and_wait_for_parts()
    processes = processes_of(run)
    with job.service.client() as client:
        client.set_flow_run_state(run, Suspended(timeout_seconds=600))
    assert seconds_until_gone(processes, limit_s=60) < 3 * 15
    before = job.durable()
    assert job.service.flow_run(run).state.name == "Suspended"
    wait_until(lambda: not open_tasks(job.service, run), limit_s=30)
    assert {rank.state_name for rank in ranks_of(job.service, run).values()} == {"Cancelled"}
    with job.service.client() as client:
        client.resume_flow_run(run)
    job.check_complete(run, before)


@pytest.mark.long
@pytest.mark.parametrize("then", ["Crashed", "Cancelled"])
def test_a_run_that_loses_the_lease_of_its_limit_stops_at_once_and_a_cancel_meanwhile_ends_it_cancelled(
    worker, prefect_server, job, then
):
    """Prefect injects an error into the main thread, which must not sit in one long wait."""
    from prefect.client.schemas.actions import DeploymentUpdate

    variables = {VARIABLE: str(job.control), "VIRNUCPRO_DATA_ROOTS": str(job.folder), RENEW_LEASE_S: "2"}
    update = DeploymentUpdate(concurrency_limit=1, job_variables={"env": variables})
    with prefect_server.client() as client:
        client.update_deployment(job.deployment, update)
    # a rank that hangs is killed ten seconds after it was told to stop: there is time between both
    hangs = {"rank": 0, "how": "hang", "before_batch": 2, "times": 1} if then == "Cancelled" else {}
    control_file(job.control, slow_s=2.0, calls=True, **hangs)
    run = job.start_and_wait_for_parts()
    processes = processes_of(run)
    lease = job.service.flow_run(run).state.state_details.deployment_concurrency_lease_id
    with prefect_server.client() as client:
        client.request("POST", "/v2/concurrency_limits/decrement-with-lease", json={"lease_id": str(lease)})
    if then == "Cancelled":
        wait_until(lambda: any("stopping: workers" in line for line in logs_of(job.service, run)), limit_s=60)
        job.service.cancel(run)
    seconds = seconds_until_gone(processes, limit_s=120)
    before = job.durable()
    print(f"gone {seconds:.1f} s after the lease was lost")
    assert seconds < 3 * 20
    job.service.wait_for_state(run, then, limit_s=90)
    with prefect_server.client() as client:
        client.update_deployment(job.deployment, DeploymentUpdate(concurrency_limit=None))
    job.check_complete(job.start(), before)


def test_a_run_whose_process_is_killed_is_crashed_and_leaves_no_orphan_and_a_retry_completes_it(worker, job):
    service = job.service
    run = job.start_and_wait_for_parts(result={"restart": True})  # which a retry does not do again
    processes = processes_of(run)
    service.flow_process(run).kill()
    seconds = seconds_until_gone(processes, limit_s=30)
    before = job.durable()
    crashed = service.wait_for_state(run, "Crashed", limit_s=180)
    print(f"no orphan {seconds:.2f} s after the kill")
    assert seconds < 3
    assert "-9" in crashed.state.message
    check_it_says_how_to_continue(job, run)
    wait_until(lambda: not open_tasks(service, run), limit_s=30)
    assert {rank.state_name for rank in ranks_of(service, run).values()} == {"Crashed"}
    wait_until(lambda: {text.split(" · ")[1] for text in progress_of(service, run)} == {"stopped"}, limit_s=30)
    let_both_report(worker, run)
    retry(service, run)
    job.check_complete(run, before)


def let_both_report(worker, run: UUID):
    """Runner and worker each report a crash; of a plain worker, a second Retry after one in between runs twice."""
    with suppress(AssertionError):
        wait_until(lambda: worker.log.read_text().count(f"'{run}' as crashed") > 1, limit_s=15)


def retry(service, run: UUID):
    """Press Retry, and again where the worker reports the crash after that."""
    from prefect.states import AwaitingRetry

    def has_begun():
        with service.client() as client:
            state = client.read_flow_run(run).state
            if state.is_crashed() or state.is_failed():
                assert client.set_flow_run_state(run, AwaitingRetry()).status.value == "ACCEPT"
        return state.is_running() or state.is_completed()

    wait_until(has_begun, limit_s=RUN_LIMIT_S, interval_s=1)


def ranks_of(service, run: UUID) -> dict[str, object]:
    """Task runs of a flow run whose task is a rank, by name."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with service.client() as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    return {task.name: task for task in found if task.name.startswith("embed_shard")}


def open_tasks(service, run: UUID) -> list[str]:
    """Names of the tasks of a flow run that have not ended."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    with service.client() as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
    return [task.name for task in found if not task.state.is_final()]


def test_a_rank_that_fails_twice_is_tried_three_times_and_the_run_completes(worker, job):
    control_file(job.control, rank=0, how="sigkill", before_batch=0, times=2, failures_first=2)
    run = job.start()
    job.service.wait_for_state(run, "Completed", limit_s=RUN_LIMIT_S)
    rank = ranks_of(job.service, run)["embed_shard 0 on cpu"]
    with job.service.client() as client:
        found = client.read_task_run_states(rank.id)
    states, messages = ([getattr(state, name) for state in found] for name in ("name", "message"))
    print(states, messages)
    assert rank.run_count == 3
    assert states.count("AwaitingRetry") == 2
    assert len([text for text in messages if text and "signal 9" in text and text.startswith("died: ")]) == 2
    assert any(" - Retry 2/2 will start " in line for line in logs_of(job.service, run))
    assert compare_rows(job.out, job.sequences) == RowsFound()


def test_the_others_do_the_work_of_a_rank_that_never_succeeds_and_the_run_names_it(worker, job):
    control_file(job.control, rank=0, how="exit7", before_batch=0, times=99, failures_first=2)
    run = job.start(limits={"worker_retries": 1})
    ended = job.service.wait_for_state(run, "Completed", limit_s=RUN_LIMIT_S)
    assert "rank 0" in ended.state.message
    assert "exit code 7" in artifacts_of(job.service, run)["embed-hash-summary"]
    assert compare_rows(job.out, job.sequences) == RowsFound()


@pytest.mark.long
def test_with_no_healthy_device_left_the_result_is_partial_as_asked_for(worker, job):
    run = job.start_and_wait_for_parts()
    job.service.cancel(run)
    job.service.wait_for_state(run, "Cancelled", limit_s=90)
    before = job.durable()
    control_file(job.control, rank=0, how="exit7", before_batch=0, times=99, calls=True)
    limits = {"worker_retries": 0}
    alone = {"devices": "cpu", "workers": 1}
    run = job.start(hardware=alone, limits=limits)
    failed = job.service.wait_for_state(run, "Failed", limit_s=RUN_LIMIT_S)
    assert "of 60 sequences missing, partial result at" in failed.state.message
    assert (job.out / "embeddings.partial.h5").exists()
    run = job.start(hardware=alone, limits=limits, result={"allow_partial": True})
    partial = job.service.wait_for_state(run, "Partial", limit_s=RUN_LIMIT_S)
    assert partial.state.is_completed()
    assert "embed-hash-missing" in artifacts_of(job.service, run)
    control_file(job.control, calls=True)
    job.check_complete(job.start(), before)


def test_a_path_outside_the_roots_is_a_failed_run_that_says_so_and_nothing_was_opened(worker, prefect_server, tmp_path):
    roots, outside, sibling = tmp_path / "data", tmp_path / "outside", tmp_path / "data-of-others"
    for folder in (roots, outside, sibling):
        folder.mkdir()
    inside = roots / "p.fasta"
    inside.write_text(">a\nMKV\n")
    secrets = [outside / "p.fasta", sibling / "p.fasta", tmp_path / "read.fasta"]
    for path in secrets:
        path.write_text(">a\nMKV\n")
        os.utime(path, (1_000_000_000, 1_100_000_000))
    (roots / "link").symlink_to(outside)
    secrets[2].read_bytes()
    assert secrets[2].stat().st_atime > 1_000_000_001, "reading leaves no trace here: the test would prove nothing"
    environ = {"VIRNUCPRO_DATA_ROOTS": str(roots)}
    deployment = prefect_server.deploy("flows/embed.py:embed", "roots", **environ)
    asked = {
        "a sibling with the same prefix": {"fasta_files": [str(sibling / "p.fasta")]},
        "..": {"fasta_files": [f"{roots}/../outside/p.fasta"]},
        "a link out": {"fasta_files": [str(roots / "link" / "p.fasta")]},
        "an output folder": {"output_dir": str(outside / "out")},
    }
    given = {"fasta_files": [str(inside)], "output_dir": str(roots / "out"), "hardware": {"devices": "cpu"}}
    runs = {what: prefect_server.start(deployment, **{**given, **parameters}) for what, parameters in asked.items()}
    for what, run in runs.items():
        failed = prefect_server.wait_for_state(run, "Failed", limit_s=RUN_LIMIT_S)
        parameter = next(iter(asked[what]))
        assert failed.state.message.startswith(f"{parameter}: "), what
        assert "is not under a folder that the worker allows" in failed.state.message
    assert [path.stat().st_atime for path in secrets[:2]] == [1_000_000_000] * 2
    assert {path.name for path in outside.iterdir()} == {"p.fasta"}
    assert {path.name for path in roots.iterdir()} == {"p.fasta", "link"}


@pytest.mark.long
@pytest.mark.long
def test_an_input_that_becomes_a_link_out_of_the_roots_is_read_neither_by_the_next_process_nor_by_the_next_run(
    worker, job
):
    run = job.start_and_wait_for_parts()
    outside = job.folder.with_name(f"{job.folder.name}-elsewhere")
    job.fasta.rename(outside)  # what is read would be the same: its place alone is wrong
    job.fasta.symlink_to(outside)
    for process in job.service.flow_process(run).children():
        if "spawn_main" in " ".join(process.cmdline()):
            process.kill()
    for refused in (run, job.start()):
        ended = job.service.wait_for_state(refused, "Failed", limit_s=RUN_LIMIT_S)
        assert "VIRNUCPRO_DATA_ROOTS" in ended.state.message, ended.state.message
    assert not (job.out / "embeddings.h5").exists()


def test_a_second_signal_ends_a_run_whose_batch_hangs_at_once_enough_and_leaves_no_process(worker, job):
    control_file(job.control, rank=0, how="hang", before_batch=2, times=1, slow_s=0.1, failures_first=1)
    run = job.start()
    wait_until(job.control.with_suffix(".failed0").exists, limit_s=RUN_LIMIT_S)
    processes = processes_of(run)
    flow = job.service.flow_process(run)
    job.service.cancel(run)
    wait_until(lambda: job.service.flow_run(run).state.name == "Cancelling", limit_s=30)
    wait_until(lambda: any("stopping: workers" in line for line in logs_of(job.service, run)), limit_s=60)
    began_s = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        flow.terminate()
    seconds_until_gone(processes, limit_s=60)
    seconds = time.monotonic() - began_s
    print(f"gone {seconds:.1f} s after the second signal, in the middle of a batch that hangs")
    assert seconds < 30
    job.service.wait_for_state(run, "Cancelled", limit_s=90)
    check_it_says_how_to_continue(job, run)


@pytest.mark.long
def test_a_run_that_is_cancelled_while_it_reads_its_input_ends_and_says_that_there_is_nothing_to_continue(
    worker, prefect_server, tmp_path
):
    fasta = tmp_path / "p.fasta"
    fasta.write_text(">a\nMKV\n")
    reached = tmp_path / "reached"
    environ = {"VIRNUCPRO_DATA_ROOTS": str(tmp_path), "VIRNUCPRO_FAILPOINT": f"MainProcess/file.write:1:hang:{reached}"}
    deployment = prefect_server.deploy("flows/embed.py:embed", "reads", **environ)
    run = prefect_server.start(
        deployment, fasta_files=[str(fasta)], output_dir=str(tmp_path / "out"), hardware={"devices": "cpu"}
    )
    wait_until(reached.exists, limit_s=RUN_LIMIT_S)
    processes = processes_of(run)
    prefect_server.cancel(run)
    seconds = seconds_until_gone(processes, limit_s=60)
    print(f"gone {seconds:.1f} s after it was asked for")
    assert seconds < 30
    prefect_server.wait_for_state(run, "Cancelled", limit_s=90)
    assert "embed-resume" in artifacts_of(prefect_server, run)


@pytest.mark.long
def test_a_prediction_that_is_cancelled_is_continued_by_the_next_run(worker, prefect_server, examples_dir, tmp_path):
    contigs = tmp_path / "contigs.fasta"
    contigs.write_bytes((examples_dir / "contigs.fasta").read_bytes())
    out = tmp_path / "out"
    deployment = prefect_server.deploy("flows/predict.py:predict", "cancelled", VIRNUCPRO_DATA_ROOTS=str(tmp_path))
    given = {"input_files": [str(contigs)], "output_dir": str(out), "hardware": TWO_WORKERS, "cascade": "off"}
    run = prefect_server.start(deployment, **given)
    wait_until(lambda: list(out.glob("*/work/parts/part_*.h5")), limit_s=RUN_LIMIT_S)
    processes = processes_of(run)
    prefect_server.cancel(run)
    seconds = seconds_until_gone(processes, limit_s=60)
    print(f"gone {seconds:.1f} s after it was asked for")
    assert seconds < 30
    prefect_server.wait_for_state(run, "Cancelled", limit_s=90)
    wait_until(lambda: "predict-resume" in artifacts_of(prefect_server, run), limit_s=RUN_LIMIT_S)
    assert "keeps the finished stages" in artifacts_of(prefect_server, run)["predict-resume"]
    assert status_of(out).state == "stopped"
    run = prefect_server.start(deployment, **given)
    prefect_server.wait_for_state(run, "Completed", limit_s=RUN_LIMIT_S)
    assert status_of(out).state == "complete"


@pytest.mark.long
def test_a_prediction_whose_process_is_killed_leaves_no_flow_run_within_it_running_and_a_retry_completes_it(
    worker, prefect_server, examples_dir, tmp_path
):
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

    contigs = tmp_path / "contigs.fasta"
    contigs.write_bytes((examples_dir / "contigs.fasta").read_bytes())
    out = tmp_path / "out"
    deployment = prefect_server.deploy("flows/predict.py:predict", "killed", VIRNUCPRO_DATA_ROOTS=str(tmp_path))
    run = prefect_server.start(
        deployment,
        input_files=[str(contigs)],
        output_dir=str(out),
        hardware=TWO_WORKERS,
        cascade="off",
        result={"restart": True},
    )
    wait_until(lambda: list(out.glob("*/work/parts/part_*.h5")), limit_s=RUN_LIMIT_S)
    prefect_server.flow_process(run).kill()
    prefect_server.wait_for_state(run, "Crashed", limit_s=180)
    within = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run]))
    with prefect_server.client() as client:
        wait_until(
            lambda: (
                {part.state.name for part in client.read_flow_runs(flow_run_filter=within)} <= {"Crashed", "Completed"}
            ),
            limit_s=RUN_LIMIT_S,
        )
    let_both_report(worker, run)
    retry(prefect_server, run)
    prefect_server.wait_for_state(run, "Completed", limit_s=RUN_LIMIT_S)
    assert status_of(out).state == "complete"


@contextmanager
def served(job: Job):
    """The flow as ``.serve()`` runs it; yields the serving process and its deployment."""
    service, name = job.service, f"served-{time.monotonic_ns()}"
    log = job.folder / "serve.log"
    # a run's process gets the flow pickled, by its name: it would find the one with the real model
    by_value = "import cloudpickle, flows.embed; cloudpickle.register_pickle_by_value(flows.embed)"
    command = [sys.executable, "-c", f"{by_value}; from tests.hash_flows import embed; embed.serve({name!r})"]
    environ = {**service.environ, VARIABLE: str(job.control), "VIRNUCPRO_DATA_ROOTS": str(job.folder)}
    with started(command, log, cwd=REPOSITORY, environ=environ) as process:
        wait_until(lambda: "Your flow" in log.read_text(), limit_s=START_LIMIT_S, log=log)
        with service.client() as client:
            job.deployment = client.read_deployment_by_name(f"embed/{name}").id
        yield process


def below(process) -> tuple[psutil.Process, list[psutil.Process]]:
    """The flow's process below the one that serves it, and everything below both."""
    everything = psutil.Process(process.pid).children(recursive=True)
    (flow,) = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(everything) >= 3
    return flow, everything


@pytest.mark.long
def test_cancelled_under_serve_it_leaves_no_process_and_the_next_run_completes_it(job):
    with served(job) as process:
        run = job.start_and_wait_for_parts()
        _, processes = below(process)
        processes = [one for one in processes if "resource_tracker" not in " ".join(one.cmdline())]
        job.service.cancel(run)
        seconds = seconds_until_gone(processes, limit_s=60)
        before = job.durable()
        job.service.wait_for_state(run, "Cancelled", limit_s=90)
        print(f"gone {seconds:.1f} s after it was asked for")
        assert seconds < 30
        check_it_says_how_to_continue(job, run)
        job.check_complete(job.start(), before)


@pytest.mark.long
def test_killed_under_serve_it_is_crashed_without_an_orphan_and_a_retry_completes_it(job):
    with served(job) as process:
        run = job.start_and_wait_for_parts()
        flow, processes = below(process)
        processes = [one for one in processes if "resource_tracker" not in " ".join(one.cmdline())]
        flow.kill()
        seconds = seconds_until_gone(processes, limit_s=30)
        before = job.durable()
        job.service.wait_for_state(run, "Crashed", limit_s=180)
        print(f"no orphan {seconds:.2f} s after the kill")
        assert seconds < 3
        check_it_says_how_to_continue(job, run)
        retry(job.service, run)
        job.check_complete(run, before)


@pytest.mark.long
def test_who_serves_and_is_told_to_go_leaves_no_process_and_its_run_complete_or_ready_to_be_continued(job):
    """Prefect 3.8 waits for the run, 3.9 cancels it."""
    ends = "Completed" if prefect.__version__.startswith("3.8.") else "Cancelled"
    with served(job) as process:
        run = job.start_and_wait_for_parts()
        _, processes = below(process)
        process.terminate()
        assert process.wait(RUN_LIMIT_S) == 0
        assert seconds_until_gone(processes, limit_s=30) < 3
    assert job.service.flow_run(run).state.name == ends
    if ends == "Cancelled":
        before = job.durable()
        check_it_says_how_to_continue(job, run)
        with served(job):
            job.check_complete(job.start(), before)
    assert compare_rows(job.out, job.sequences) == RowsFound()
