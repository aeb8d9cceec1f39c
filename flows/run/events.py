"""
The event of a run's end: ``virnucpro.run.completed``, ``.partial`` or ``.failed``, for automations and webhooks.

One for each run that ended by itself, sent once the server has its final state; a run within another sends none. A run
that is cancelled or killed sends none either, because it may be gone with its host: Prefect's server emits
``prefect.flow-run.Cancelled`` and ``prefect.flow-run.Crashed``. Payloads have counts and paths, no ids of sequences.
"""

from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.exceptions import MissingResult

from virnucpro.errors import ExitCode, VirNucProError, WorkersFailedError
from virnucpro.pipeline.prediction.result import PredictionResult
from virnucpro.pipeline.run.run_result import RunResult

PATIENCE_S = 10.0
"""Seconds that a run waits at its end for its event to leave."""


def emit_end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Emit the event of a run that has ended; a hook of Prefect, which logs what it raises."""
    if flow_run.parent_task_run_id is not None:
        return
    try:
        outcome = state.result(raise_on_failure=False)
    except MissingResult:  # it ended before there was one
        outcome = None
    output_dir = flow_run.parameters.get("output_dir")
    folder = str(Path(output_dir).absolute()) if isinstance(output_dir, str) else ""
    kind = "failed" if state.is_failed() else "partial" if state.name == "Partial" else "completed"
    related = [(f"prefect.flow.{flow_run.flow_id}", "flow", flow.name)]
    if flow_run.deployment_id is not None:
        related.append((f"prefect.deployment.{flow_run.deployment_id}", "deployment", ""))
    related += [(f"prefect.tag.{tag}", "tag", tag) for tag in flow_run.tags]
    emit_event(
        f"virnucpro.run.{kind}",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
            "prefect.resource.name": flow_run.name,
            "virnucpro.flow": flow.name,
            "virnucpro.output-dir": folder,
        },
        related=[
            {
                "prefect.resource.id": key,
                "prefect.resource.role": role,
                **({"prefect.resource.name": name} if name else {}),
            }
            for key, role, name in related
        ],
        payload={
            "flow": flow.name,
            "state": state.name,
            "exit_code": int(_exit_code(kind, outcome)),
            "error": type(outcome).__name__ if isinstance(outcome, BaseException) else None,
            "counts": _counts(outcome),
            "paths": {"output_dir": folder, **_paths(outcome)},
        },
    )
    EventsWorker.drain_all(timeout=PATIENCE_S, at_exit=False)  # the process is about to end


def _exit_code(kind: str, outcome: Any) -> ExitCode:
    if isinstance(outcome, VirNucProError):
        return outcome.exit_code
    return {"completed": ExitCode.COMPLETE, "partial": ExitCode.PARTIAL}.get(kind, ExitCode.INTERNAL)


def _counts(outcome: Any) -> dict[str, int]:
    if isinstance(outcome, PredictionResult):
        return dict(outcome.counts)
    if isinstance(outcome, RunResult):
        return {"records": outcome.num_records, "rows": outcome.num_rows, "missing": outcome.num_missing}
    if isinstance(outcome, WorkersFailedError):
        return {"records": outcome.total_sequences, "missing": outcome.missing_sequences}
    return {}


def _paths(outcome: Any) -> dict[str, str]:
    found: dict[str, Path | str | None] = {}
    if isinstance(outcome, PredictionResult):
        found = {"contigs": outcome.contigs_path, "report": outcome.report_path}
    elif isinstance(outcome, RunResult):
        found = {"embeddings": outcome.output_path}
    elif isinstance(outcome, WorkersFailedError):
        found = {"partial": outcome.partial_path}
    return {name: str(Path(path).absolute()) for name, path in found.items() if path is not None}
