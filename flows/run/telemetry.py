"""
What a flow run shows in Prefect: the program's own log lines, and the progress of each rank as an artifact.

The library logs with structlog. Here its lines become records of the logger ``virnucpro``, which Prefect sends to its
API: through ``PREFECT_LOGGING_EXTRA_LOGGERS`` when our command runs the flow, through the handler added here when
Prefect's worker does. Artifacts are kept up to date by a thread of its own, so that an API that hangs or is gone does
not hold up the run; a run that is over waits for the thread a few seconds at most.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import asdict
from typing import Any, NamedTuple
from uuid import UUID

import structlog
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogHandler
from prefect.runtime import deployment

from flows.run.api import IS_QUIET, client_that_asks_once
from flows.run.names import artifact_key
from virnucpro.cost import Cost
from virnucpro.errors import VirNucProError, printable
from virnucpro.report.prediction.artifacts import markdown_text
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.show.progress import PlainView
from virnucpro.telemetry.snapshot import RankSnapshot, RankState, RunSnapshot, View, WorkSnapshot
from virnucpro.telemetry.worker_logging import LABEL_VARIABLES

LOOK_S = 1.0
"""Seconds between two looks at how the run is."""
INTERVAL_S = 15.0
"""Seconds between two updates of an artifact, at least: each is an event, and a row in the server's database."""
LINE_INTERVAL_S = 5.0
"""Seconds between two lines of a log about progress, at least, and before the first."""
PATIENCE_S = 5.0
"""Seconds that a run waits at its end for its last updates."""

_OF_PREFECT = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")
"""Prefect's loggers for the end of runs and tasks."""
_CURRENT: ContextVar[RunTelemetry | None] = ContextVar("_CURRENT", default=None)


class _Shown(NamedTuple):
    artifact: UUID
    percent: float
    description: str
    shown_s: float


class ProgressArtifacts:
    """A view that keeps the artifacts up to date; made in the flow run that they belong to."""

    def __init__(self) -> None:
        context = FlowRunContext.get()
        self._flow_name = context.flow.name if context is not None and context.flow is not None else "run"
        self._flow_run_id = context.flow_run.id if context is not None and context.flow_run is not None else None
        self._logger = get_run_logger()
        self._latest: RunSnapshot | None = None
        self._is_over = threading.Event()
        self._was_refused = False
        self._shown: dict[tuple[int, int], _Shown] = {}
        """Number of the embedding run, and rank -> its artifact."""
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._go_on,), name="progress-artifacts", daemon=True
        )
        self._thread.start()

    def update(self, snapshot: RunSnapshot) -> None:
        """Record how the run is; the thread shows it next."""
        self._latest = snapshot

    def say(self, text: str) -> None:
        """Do nothing: the flow run's log has it."""

    def close(self) -> None:
        """Show the last state, if the API answers soon."""
        self._is_over.set()
        self._thread.join(PATIENCE_S)

    def _go_on(self) -> None:
        """Run in the thread: show the latest snapshot until the run is over."""
        is_last = False
        while not is_last:
            is_last = self._is_over.wait(LOOK_S)
            try:
                with client_that_asks_once() as client:
                    while True:
                        self._show(client, is_last=is_last)
                        if is_last:
                            return
                        is_last = self._is_over.wait(LOOK_S)
            except Exception as error:  # noqa: BLE001  whatever the API does, the run is worth more
                if not self._was_refused:
                    self._was_refused = True
                    self._logger.warning("progress artifacts are not up to date: %s", error or repr(error))

    def _show(self, client: SyncPrefectClient, *, is_last: bool) -> None:
        """Make the artifacts of new ranks, and update those that are due; the last ones are, whatever the time."""
        snapshot = self._latest
        if snapshot is None:
            return
        for number, embedding in enumerate(snapshot.embeddings):
            for rank in embedding.ranks:
                before, now_s = self._shown.get((number, rank.rank)), time.monotonic()
                if before is not None and not is_last and now_s - before.shown_s < INTERVAL_S:
                    continue
                percent = int(wording.rank_share(rank) * 1000) / 10
                if rank.state is RankState.LOST:  # nothing is left to do for it
                    percent = 0.0 if before is None else before.percent
                description = f"{int(percent)} % · {_figures(rank, embedding, now=snapshot.now)}"
                if before is None:
                    artifact = client.create_artifact(self._new(rank, embedding.model, percent, description)).id
                elif (percent, description) == (before.percent, before.description):
                    continue
                else:
                    artifact = before.artifact
                    client.update_artifact(artifact, ArtifactUpdate(data=percent, description=description))
                self._shown[number, rank.rank] = _Shown(artifact, percent, description, now_s)
        if is_last and len(snapshot.stages) > 1:  # else the run was refused, or complete already
            client.create_artifact(self._cost(snapshot))

    def _cost(self, snapshot: RunSnapshot) -> ArtifactCreate:
        """Return the table of what all starts in the folder have cost, their sum first."""
        cost = Cost.of((*snapshot.cost_before, *snapshot.cost))
        rows = [asdict(row).items() for row in (cost.total, *cost.rows)]
        table = [{_title(name): value >> 20 if "bytes" in name else value for name, value in row} for row in rows]
        where = markdown_text(snapshot.output_dir)
        return ArtifactCreate(
            type="table",
            key=f"{self._flow_name}-cost",
            description=f"What {where} has cost, all starts together",
            data=json.dumps(table),
            flow_run_id=self._flow_run_id,
        )

    def _new(self, rank: RankSnapshot, model: str, percent: float, description: str) -> ArtifactCreate:
        kind = "cpu" if rank.device.startswith("cpu") else "gpu"
        return ArtifactCreate(
            type="progress",
            key=artifact_key(kind, str(rank.rank), model, "progress"),
            description=description,
            data=percent,
            flow_run_id=self._flow_run_id,
        )


def _title(name: str) -> str:
    return name.replace("cpu", "CPU").replace("gpu", "GPU").replace("bytes", "MiB").replace("_", " ")


def _figures(rank: RankSnapshot, embedding: WorkSnapshot, *, now: float) -> str:
    """Return what an artifact shows after the percent, the most wanted first: a page cuts off what is too long."""
    state = wording.rank_state(rank, now=now)
    if state is not None:
        figures = ["lost" if rank.state is RankState.LOST and embedding.is_over else state]
    else:
        left = [] if rank.seconds_left is None else [f"{wording.about(rank.seconds_left)} left"]
        figures = [*left, f"{rank.tokens_per_second:,.0f} {embedding.measure}/s"]
    where = [wording.rank_place(rank), printable(embedding.model)]
    return " · ".join([*figures, *where, f"{wording.computed(rank, embedding):,} {embedding.counts}"])


class LoggedTenths:
    """A view that logs a line for every tenth of what ranks compute; the end of a stage has a line of its own."""

    def __init__(self) -> None:
        self._logger = get_run_logger()
        self._said: dict[int, tuple[int, float]] = {}
        """Number of the work -> the tenths of its last line, and when that was."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Log how far the work is that began last."""
        embedding = snapshot.embedding
        if embedding is None or embedding.is_over:
            return
        number, tenths, now_s = len(snapshot.embeddings), int(10 * embedding.progress + 1e-9), time.monotonic()
        said, said_s = self._said.setdefault(number, (0, now_s))
        if said < tenths < 10 and now_s - said_s >= LINE_INTERVAL_S:
            self._said[number] = tenths, now_s
            self._logger.info("%s", f"{printable(embedding.model)}: {wording.progress_of(embedding)}")

    def say(self, text: str) -> None:
        """Do nothing: the log has it."""

    def close(self) -> None:
        """Do nothing: the log has it."""


class _Lines(PlainView):
    """Lines on standard error, as without a flow: a command's embedded server has no UI. A worker shows the log."""

    def say(self, text: str) -> None:
        """Do nothing: the flow run's log shows the same line."""


@contextmanager
def run_telemetry(metrics: MetricsOptions) -> Iterator[RunTelemetry]:
    """Yield the telemetry of this flow run, shared with an enclosing flow of VirNucPro."""
    current = _CURRENT.get()
    if current is not None:
        yield current
        return
    views: list[View] = [ProgressArtifacts(), LoggedTenths()]
    if deployment.id is None and not IS_QUIET.get():
        views.append(_Lines())
    with labelled_run(), RunTelemetry(metrics, views) as telemetry:
        token = _CURRENT.set(telemetry)
        try:
            yield telemetry
        finally:
            _CURRENT.reset(token)


def send_lines_to_prefect() -> None:
    """Send the lines of this process from INFO on to Prefect; called at the start of a flow."""
    logger = logging.getLogger("virnucpro")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
        logger.addHandler(APILogHandler())
    for name in _OF_PREFECT:
        logging.getLogger(name).addFilter(_without_our_tracebacks)  # added once only
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, structlog.contextvars.merge_contextvars, _to_record],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def log_level(name: str) -> int:
    return logging.getLevelNamesMapping()[name.upper()]


def _without_our_tracebacks(record: logging.LogRecord) -> bool:
    """Keep Prefect's lines without tracebacks of expected errors, whose message is logged anyway."""
    error = record.exc_info[1] if record.exc_info else None
    if record.exc_info and (error is None or isinstance(error, VirNucProError)):
        record.exc_info = None  # None would be logged as "NoneType: None"
    return not (isinstance(error, VirNucProError) and "unexpected exception" in record.getMessage())


def _to_record(_logger: object, _method: str, event: MutableMapping[str, Any]) -> tuple[tuple[str], dict[str, Any]]:
    fields = {name: value for name, value in event.items() if name not in {"event", "exc_info"}}
    return (log_sentence({"event": event["event"], "fields": fields}),), {"exc_info": event.get("exc_info")}


@contextmanager
def labelled_run() -> Iterator[None]:
    """Set the labels of this flow run for the processes and metrics of the block."""
    before = {variable: os.environ.get(variable) for variable in LABEL_VARIABLES.values()}
    os.environ.update({LABEL_VARIABLES[label]: value for label, value in _labels().items()})
    try:
        yield
    finally:
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def _labels() -> dict[str, str]:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return {"flow_run": "", "deployment": ""}
    run, flow = context.flow_run, context.flow
    deployment = ""
    if run.deployment_id is not None and flow is not None:
        try:
            with client_that_asks_once() as client:
                deployment = f"{flow.name}/{client.read_deployment(run.deployment_id).name}"
        except Exception as error:  # noqa: BLE001  the run is worth more than its label
            get_run_logger().warning("metrics and logs do not name the deployment: %s", error or repr(error))
    return {"flow_run": str(run.id), "deployment": deployment}
