"""
Retention: deletes old runs' records on the server and, if asked for, their folders.

Only outermost runs of our deployments that have ended, with the runs within them, their artifacts and logs. A dry run,
the default, lists what would be deleted. A folder goes first and its record after it, so a killed retention forgets no
folder.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterParentTaskRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.runtime import deployment
from prefect.states import Completed

from flows.run.allowed_roots import data_roots
from flows.run.form import titled
from flows.run.outcome import ended
from virnucpro.allowed_roots import is_under
from virnucpro.errors import VirNucProError, printable
from virnucpro.pipeline.run.removal import remove_old_run
from virnucpro.report.formats import counted
from virnucpro.run_layout import FolderLayout
from virnucpro.telemetry.metrics.options import TEXTFILES

FLOWS = ["embed", "predict", "predict-inbox", "retention", "train"]
TAG = "virnucpro"
"""Of our deployments, and so of their runs."""
MAX_ROWS = 1000
"""Most rows of the artifact; the log has every run."""
_FINAL = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
_PAGE = 200
"""Runs and artifacts in one query: the server's limit."""


@flow(name="retention", flow_run_name="retention of {days} days", persist_result=False, validate_parameters=True)
def retention(
    days: Annotated[int, titled("Days to keep", ge=1, le=36500)] = 90,
    folders: Annotated[bool, titled("Delete folders, too")] = False,
    dry_run: Annotated[bool, titled("Dry run")] = True,
    max_runs: Annotated[int, titled("Most runs", ge=1, le=100000)] = 10000,
) -> State[Any]:
    """
    Delete the records of runs that ended long ago and, if asked for, their output folders.

    Args:
        days: Runs that ended within so many days stay.
        folders: Delete each run's output folder, too, if it lies under an allowed root, holds a run and nothing else,
            is not in use, and is named by no run that stays. Otherwise the record stays as well. Trained classifiers
            always stay.
        dry_run: Delete nothing, and list what would be deleted.
        max_runs: Most runs of one retention, oldest first.
    """

    def delete() -> State[Any]:
        with get_client(sync_client=True) as client:
            before = datetime.now(UTC) - timedelta(days=days)
            return _Retention(client, before, folders=folders, dry_run=dry_run).delete(max_runs)

    return ended(delete)


@dataclass
class _Retention:
    client: SyncPrefectClient
    before: datetime
    folders: bool
    dry_run: bool
    rows: list[dict[str, str]] = field(default_factory=list)
    num_runs: int = 0
    freed_bytes: dict[Path, int] = field(default_factory=dict)
    in_use: set[Path] = field(default_factory=set)
    """Folders of runs that stay."""

    def delete(self, max_runs: int) -> State[Any]:
        old = self._runs(max_runs, end_time=FlowRunFilterEndTime.model_validate({"before_": self.before}), is_old=True)
        if self.folders:
            for kept in ({"after_": self.before}, {"is_null_": True}):
                end_time = FlowRunFilterEndTime.model_validate(kept)
                self.in_use |= {folder for run in self._runs(None, end_time=end_time) if (folder := _folder(run))}
        for run in old:
            try:
                note = self._delete_folder(run) if self.folders else ""
            except (OSError, VirNucProError) as error:
                self._row(run, "kept", printable(str(error)))
                continue
            if not self.dry_run and not self._delete_record(run):
                self._row(run, "kept", "it was started again just now")
                continue
            self.num_runs += 1
            self._row(run, "would be deleted" if self.dry_run else "deleted", note)
        self._delete_textfiles()
        shown = f"{min(len(self.rows), MAX_ROWS):,} of {len(self.rows):,} old runs"
        create_table_artifact(table=self.rows[:MAX_ROWS], key="retention-summary", description=shown)
        return Completed(message=self._message(len(old) - self.num_runs))

    def _delete_textfiles(self) -> None:
        """Delete old files of runs' last figures where node_exporter reads them, which would show them for ever."""
        folder = os.environ.get(TEXTFILES)
        for path in sorted(Path(folder).glob("virnucpro-*.prom")) if folder else ():
            try:
                if path.is_file() and path.stat().st_mtime < self.before.timestamp():
                    if not self.dry_run:
                        path.unlink()
                    self._note(path.name, "would be deleted" if self.dry_run else "deleted", str(path))
            except OSError as error:
                self._note(path.name, "kept", error.strerror or str(error))

    def _message(self, num_kept: int) -> str:
        size = sum(self.freed_bytes.values()) / 1e9
        folders = f" and {counted(len(self.freed_bytes), 'folder')} ({size:,.2f} GB)" if self.folders else ""
        kept = f"; {num_kept:,} kept, see retention-summary" if num_kept else ""
        runs = counted(self.num_runs, "run")
        done = "a dry run: would delete" if self.dry_run else "deleted"
        return f"{done} {runs} that ended before {self.before:%Y-%m-%d %H:%M} UTC{folders}{kept}"

    def _runs(self, limit: int | None, *, end_time: FlowRunFilterEndTime, is_old: bool = False) -> list[FlowRun]:
        """Return outermost runs of our flows; *is_old*: only final ones of our deployments."""
        state = FlowRunFilterState(type=FlowRunFilterStateType(any_=_FINAL)) if is_old else None
        asked = FlowRunFilter(
            end_time=end_time,
            parent_task_run_id=FlowRunFilterParentTaskRunId(is_null_=True),
            state=state,
            tags=FlowRunFilterTags(all_=[TAG]) if is_old else None,
        )
        return list(_pages(self.client, asked, limit))

    def _delete_folder(self, run: FlowRun) -> str:
        """Delete a run's folder, where it has one; return what became of it. Raises what keeps it."""
        folder = _folder(run)
        if folder is None or folder in self.freed_bytes:
            return ""
        roots = data_roots(is_deployed=deployment.id is not None)
        if roots is not None and (str(folder) in roots or not is_under(str(folder), roots)):
            raise OSError(f"{folder} is not below a folder that the worker allows")
        if not FolderLayout(folder).manifest.exists():
            return f"{printable(str(folder))} holds no run"
        for other in self.in_use:
            if other == folder or other.is_relative_to(folder) or folder.is_relative_to(other):
                raise OSError(f"{folder} is used by a run that stays")
        self.freed_bytes[folder] = remove_old_run(folder, ended_before=self.before, dry_run=self.dry_run)
        return f"{printable(str(folder))}: {self.freed_bytes[folder] / 1e6:,.1f} MB"

    def _delete_record(self, run: FlowRun) -> bool:
        """Delete a run, the runs within it and their artifacts, unless it was started again; its logs go with it."""
        try:
            now = self.client.read_flow_run(run.id)
        except ObjectNotFound:
            return True
        if now.state is None or not now.state.is_final() or now.end_time != run.end_time:
            return False
        parts = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id]))
        for part in [*_pages(self.client, parts, None, any_flow=True), run]:
            self._delete_artifacts(part.id)
            with suppress(ObjectNotFound):
                self.client.delete_flow_run(part.id)
        return True

    def _delete_artifacts(self, run_id: UUID) -> None:
        of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
        while found := self.client.read_artifacts(artifact_filter=of_run, limit=_PAGE):
            for artifact in found:
                with suppress(ObjectNotFound):
                    self.client.delete_artifact(artifact.id)

    def _row(self, run: FlowRun, became: str, note: str) -> None:
        self._note(run.name, became, note, "" if run.end_time is None else f"{run.end_time:%Y-%m-%d %H:%M}")

    def _note(self, name: str, became: str, note: str, ended: str = "") -> None:
        get_run_logger().info("%s%s: %s%s", name, ended and f", ended {ended}", became, f": {note}" if note else "")
        self.rows.append({"run": printable(name), "ended": ended, "state": became, "note": printable(note)})


def _pages(
    client: SyncPrefectClient, asked: FlowRunFilter, limit: int | None, *, any_flow: bool = False
) -> Iterator[FlowRun]:
    """Yield the runs of a query, those that began first before others."""
    flows = None if any_flow else FlowFilter(name=FlowFilterName(any_=FLOWS))
    num_read = 0
    while limit is None or num_read < limit:
        size = _PAGE if limit is None else min(_PAGE, limit - num_read)
        page = client.read_flow_runs(
            flow_filter=flows,
            flow_run_filter=asked,
            sort=FlowRunSort.START_TIME_ASC,
            limit=size,
            offset=num_read,
        )
        yield from page
        num_read += len(page)
        if len(page) < size:
            return


def _folder(run: FlowRun) -> Path | None:
    """Return the output folder of a run, links resolved."""
    given = run.parameters.get("output_dir")
    return Path(given).resolve() if isinstance(given, str) and given and "\0" not in given else None
