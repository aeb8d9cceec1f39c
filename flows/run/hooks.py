"""
What happens when a run fails, crashes or is cancelled: its folder is left resumable, and its log says how to resume.

Prefect runs a hook in the flow's process, in the worker's, or in a new one that imports the flow; all that the hook has
are the run's parameters and folder. A killed run is marked as stopped in ``run.json``, its live status and Prometheus
target are removed, the flow run's log and an artifact say what is there and how to resume, and tasks and flow runs
within it that are still open on the server end with it. No error of a hook is raised, since it would hide how the run
ended, and a hook waits for one answer of the API, ten seconds at most.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterType,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.logging.handlers import APILogWorker
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Crashed

from flows.run.allowed_roots import data_roots
from flows.run.api import REQUEST_TIMEOUT_S, client_that_asks_once
from virnucpro.allowed_roots import is_under
from virnucpro.errors import ResultError, VirNucProError, printable
from virnucpro.pipeline.run.interruption import mark_interrupted
from virnucpro.pipeline.run.run_status import RunStatus
from virnucpro.report.prediction.artifacts import markdown_text
from virnucpro.run_layout import RunLayout
from virnucpro.store.manifest import PredictionManifest, TrainingManifest
from virnucpro.telemetry.metrics.exposition import remove_forgotten_targets
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.telemetry.snapshot import RankState

LAST_STATES = {RankState.COMPLETE, RankState.LOST, RankState.STOPPED}
"""Of a worker; its progress is as it was when the run ended."""


def say_how_to_continue(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """
    Leave the folder of a run that failed, crashed or was cancelled resumable, and say how to resume.

    A run that is a part of another reports nothing: the outer run does.
    """
    if flow_run.parent_task_run_id is not None:
        return
    logger = flow_run_logger(flow_run, flow)
    try:
        lines = _aftermath(flow_run, has_failed=state.is_failed())
    except (OSError, ValueError, VirNucProError) as error:
        logger.warning("what the run has left could not be looked at: %s", printable(str(error)))
        return
    logger.warning("%s", " ".join(lines))
    APILogWorker.drain_all(timeout=REQUEST_TIMEOUT_S, at_exit=False)  # the process may be about to end by a signal
    ending = markdown_text(f"{state.name}: {state.message}" if state.message else str(state.name))
    if state.is_crashed() or state.is_cancelled() or state.is_paused():  # else its tasks ended by themselves, or go on
        end_what_is_open(flow_run.id, Crashed if state.is_crashed() else Cancelled, before=state.timestamp)
    page = "\n\n".join([f"# {markdown_text(lines[0])}", *map(markdown_text, lines[1:]), f"The run: {ending}", ""])
    with (
        suppress(Exception),  # the log has it; an API that does not answer now is not waited for
        client_that_asks_once() as client,
    ):
        where = markdown_text(str(flow_run.parameters.get("output_dir")))
        new = ArtifactCreate(
            key=f"{flow.name}-resume", type="markdown", description=where, data=page, flow_run_id=flow_run.id
        )
        client.create_artifact(new)


def end_what_is_open(run_id: UUID, ending: Callable[..., State[Any]], *, before: datetime) -> None:
    """
    End tasks, flow runs and progress within a run whose process is gone: no other process would, and they would stay.

    *before*: Only those made before it, as the run may have begun again.
    """
    ended = ending(message="The process of this run has ended.")
    with (
        suppress(Exception),  # they are for show alone
        client_that_asks_once() as client,
    ):
        parts = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run_id]))
        )
        for part in parts:
            if _is_open(part, before):
                client.set_flow_run_state(part.id, ended, force=True)
        of_these = FlowRunFilter(id=FlowRunFilterId(any_=[run_id, *(part.id for part in parts)]))
        for one in client.read_task_runs(flow_run_filter=of_these):
            if _is_open(one, before):
                client.set_task_run_state(one.id, ended, force=True)
        of_progress = ArtifactFilterType(any_=["progress"])
        for shown in client.read_artifacts(artifact_filter=ArtifactFilter(type=of_progress), flow_run_filter=of_these):
            share, *figures = (shown.description or "").split(" · ")
            if figures and figures[0] not in LAST_STATES and (shown.created is None or shown.created < before):
                as_it_is = " · ".join([share, RankState.STOPPED, *figures[-3:]])
                client.update_artifact(shown.id, ArtifactUpdate(description=as_it_is))


def _is_open(run: FlowRun | TaskRun, before: datetime) -> bool:
    is_earlier = run.created is None or run.created < before
    return is_earlier and (run.state is None or not run.state.is_final())


def _aftermath(flow_run: FlowRun, *, has_failed: bool) -> list[str]:
    """Mark a killed run as stopped; return what is there and what to do, a sentence each, a short one first."""
    given = flow_run.parameters.get("output_dir")
    roots = data_roots(is_deployed=flow_run.deployment_id is not None)
    if not isinstance(given, str) or not given:
        return ["The run has no output folder.", "Nothing was computed."]
    if roots is not None and not is_under(given, roots):
        return ["The output folder is not one that the worker allows.", "It was not looked into."]
    asked = _box(flow_run, "monitoring").get("metrics_targets")
    is_allowed = isinstance(asked, str) and asked and (roots is None or is_under(asked, roots))
    if targets := asked if is_allowed else metrics_options().targets_dir:
        with suppress(OSError):
            remove_forgotten_targets(Path(targets))
    folder = Path(given).absolute()
    try:
        status = mark_interrupted(folder)
    except ResultError:
        return [
            "There is nothing to continue.",
            f"{printable(str(folder))} holds no run: this one ended before it began.",
            "Fix the problem that the log of the run names, then start it again."
            if has_failed
            else "Start it again with the same parameters.",
        ]
    if has_failed and status.state == "complete":
        return [*_what_is_there(status), "This run changed nothing: do what its message says, then start it again."]
    restarts = _box(flow_run, "result").get("restart") or flow_run.parameters.get("restart")
    return [*_what_is_there(status), *_what_to_do(status, restarts=bool(restarts))]


def _what_is_there(status: RunStatus) -> list[str]:
    where = printable(str(status.output_dir))
    if status.state == "running" and status.holder is not None:
        return [
            "Another run has the folder.",
            f"Process {status.holder.pid} on {printable(status.holder.host)} works in {where}; it was left alone.",
        ]
    if status.state == "silent":
        return ["Whether the run is still running is not known.", f"{where} is held from another host."]
    if status.state == "complete":
        return ["The result is complete.", f"It is in {where}."]
    layout = RunLayout(status.output_dir)
    shards, parts = len(layout.shards()), len(list(layout.parts_dir.glob("part_*.h5")))
    found = f"{parts} parts and {shards} shards of finished rows"
    if isinstance(status.manifest, PredictionManifest | TrainingManifest):
        done = ", ".join(sorted(status.manifest.stages)) or "none"
        found = f"the finished stages ({done}) and every finished row of the others"
    return ["Nothing that was finished is lost.", f"{where} is {status.state} and keeps {found}."]


def _what_to_do(status: RunStatus, *, restarts: bool) -> list[str]:
    if status.state == "complete":
        return ["Running it again with the same parameters takes it from there."]
    if status.state in {"running", "silent"}:
        return ["Run it again with the same parameters once the other one is over."]
    press = "Press Retry (Resume if it is suspended)"
    how = [f"{press}, or run it again with the same parameters: it continues, and computes nothing twice."]
    if restarts:
        how = [
            f"{press}: it continues, and computes nothing twice.",
            "A new run with the same parameters would start from scratch, as they say.",
        ]
    logs = f"If it fails again: `tail {printable(status.worker_logs)}` on the worker shows why."
    why = [logs] if status.state == "failed" else []
    return [*how, *why, "Nothing has to be cleaned up."]


def _box(flow_run: FlowRun, name: str) -> Mapping[str, Any]:
    """Return a box of the run's parameters as it was given."""
    box = flow_run.parameters.get(name)
    return box if isinstance(box, Mapping) else {}
