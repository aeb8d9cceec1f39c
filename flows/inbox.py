"""
A scheduled scan of a folder: every new file becomes one run of another deployment.

Every content is taken once, whatever its name, across restarts of scan, worker and server (see
``virnucpro.store.inbox``). Nothing is moved, so a file must stay until its run has ended. The runs are
independent of the scan.
"""

import shlex
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.states import Completed, Scheduled
from pydantic import AfterValidator, Field

from flows.run.allowed_roots import check_allowed
from flows.run.form import titled
from flows.run.names import run_name
from flows.run.outcome import ended
from virnucpro.errors import ConfigurationError, PathNotAllowedError, RunLockedError, VirNucProError, printable
from virnucpro.knobs import Text
from virnucpro.pipeline.run.run import new_run_id
from virnucpro.report.formats import counted
from virnucpro.store.inbox import (
    FASTA_PATTERNS,
    STILL_CHANGING,
    ArrivedFile,
    Claim,
    FileChangedError,
    InboxMemory,
    SkippedFile,
    content_of,
    scan_inbox,
)
from virnucpro.store.locks.run_lock import RunLock

INPUT_PARAMETERS = ("input_files", "fasta_files")
"""Names of the parameter for input files in our flows."""
DEPLOYMENT = Text(
    usual=("predict/predict", "embed/embed"),
    other="Another",
    pattern="^[^/]+/[^/]+$",
    sentence="choose a flow and its deployment, as in predict/predict",
)
AsJson = Annotated[dict[str, Any], Field(title="JSON")]
MAX_ROWS = 1000
"""Most rows of the artifact; the log has every file."""
_RUNS_ASKED = 200
"""Runs in one query: the server's limit."""
_FAILED = [StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]

_ORDER = ["taken", "waits", "left for later", "skipped", "failed before", "taken before"]
"""States of files, in the order of the table."""


@flow(name="predict-inbox", flow_run_name=run_name("inbox {inbox_dir}"), persist_result=False, validate_parameters=True)
def predict_inbox(
    inbox_dir: Annotated[str, titled("Inbox", min_length=1)],
    output_root: Annotated[str, titled("Folder of the results", min_length=1)],
    deployment: Annotated[str, AfterValidator(DEPLOYMENT.check), titled("Deployment", DEPLOYMENT)] = "predict/predict",
    parameters: Annotated[AsJson | None, titled("Parameters of each run")] = None,
    patterns: Annotated[list[str], titled("Names of files", min_length=1)] = FASTA_PATTERNS,
    subfolders: Annotated[bool, titled("Sub-folders")] = False,
    settle_seconds: Annotated[int, titled("Seconds at rest", ge=0, le=86400)] = 60,
    max_runs: Annotated[int, titled("Runs of one scan", ge=1, le=10000)] = 100,
) -> State[Any]:
    """
    Start one run of a deployment for every new file of an inbox.

    Args:
        inbox_dir: Folder that is looked through. Nothing in it is moved, written or removed.
        output_root: Each run writes to a folder of its own in here, named after file and content; .inbox in here is
            the memory. Must not lie in the inbox.
        deployment: What is run for each file.
        parameters: Given to every run beside its input and output; by default what the deployment has set. A content
            that was taken is not run again because they changed.
        patterns: Only files whose names match one of these are looked at, letter case aside.
        subfolders: Look into folders of the inbox, too.
        settle_seconds: Seconds for which a file must be unchanged; until then it is left for later.
        max_runs: Most runs that one scan starts, oldest files first; the next scan continues.
    """

    def scan() -> State[Any]:
        check_allowed(data={"inbox_dir": inbox_dir, "output_root": output_root})
        root = Path(output_root).resolve()
        if root.is_relative_to(Path(inbox_dir).resolve()):
            raise ConfigurationError(f"output_root {printable(output_root)} lies in the inbox: choose another folder")
        given = set(parameters or {}) & {*INPUT_PARAMETERS, "output_dir"}
        if given:
            raise ConfigurationError(f"parameters must not contain {', '.join(sorted(given))}: the scan sets it")
        arrived, left = scan_inbox(
            Path(inbox_dir),
            patterns=patterns,
            idle_s=settle_seconds,
            subfolders=subfolders,
            is_allowed=_is_allowed,
        )
        memory = InboxMemory(root)
        try:
            with RunLock(memory.lock, run_id=new_run_id()), get_client(sync_client=True) as client:
                target = _read(client, deployment)
                return _Scan(client, target, deployment, root, memory, parameters or {}).take(
                    arrived, left, max_runs=max_runs
                )
        except RunLockedError as error:
            return Completed(message=f"another scan is running, nothing was taken: {error.holder}")

    return ended(scan)


@dataclass
class _Scan:
    client: SyncPrefectClient
    target: DeploymentResponse
    name: str
    root: Path
    memory: InboxMemory
    parameters: dict[str, Any]
    rows: list[dict[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    before: list[tuple[Path, Claim]] = field(default_factory=list)
    """Files taken by an earlier scan."""
    refusal: ConfigurationError | None = None

    def __post_init__(self) -> None:
        properties = (self.target.parameter_openapi_schema or {}).get("properties", {})
        known = [parameter for parameter in INPUT_PARAMETERS if parameter in properties]
        if not known or "output_dir" not in properties:
            raise ConfigurationError(f"{self.name} takes no {' or '.join(INPUT_PARAMETERS)} and output_dir")
        self.input_parameter = known[0]

    def take(self, arrived: list[ArrivedFile], left: list[SkippedFile], *, max_runs: int) -> State[Any]:
        """Start what is new, publish the table, and return the scan's final state."""
        left = list(left)
        for file in arrived:
            try:
                sha256 = self._content(file)
                claim = self.memory.claim_of(sha256)
            except FileChangedError:
                left.append(SkippedFile(file.path, STILL_CHANGING, is_later=True))
            except (OSError, VirNucProError) as error:
                left.append(SkippedFile(file.path, str(error)))
            else:
                self._take_one(file, sha256, claim, max_runs=max_runs)
        self._look_at_earlier_runs()
        for item in left:
            self._row(item.path, "left for later" if item.is_later else "skipped", item.reason)
        self.memory.save_contents()
        self._publish()
        return self._state()

    def _take_one(self, file: ArrivedFile, sha256: str, claim: Claim | None, *, max_runs: int) -> None:
        if claim is not None and claim.flow_run_id is not None:
            self.before.append((file.path, claim))
            return
        if self.refusal is None and not self.target.paused and self.counts["taken"] < max_runs:
            claim = claim or self.memory.take(file.path, sha256)
            try:
                self._start(file, claim)
            except ConfigurationError as error:
                self.refusal = error  # the same for all other files
            else:
                self._row(file.path, "taken", claim.run_folder)
                return
        self._row(file.path, "waits")

    def _look_at_earlier_runs(self) -> None:
        """List the files taken before, and the files of failed runs."""
        failed: dict[str, FlowRun] = {}
        ids = [UUID(claim.flow_run_id) for _, claim in self.before]
        for begin in range(0, len(ids), _RUNS_ASKED):
            asked = FlowRunFilter(
                id=FlowRunFilterId(any_=ids[begin : begin + _RUNS_ASKED]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_FAILED)),
            )
            failed |= {str(run.id): run for run in self.client.read_flow_runs(flow_run_filter=asked)}
        for path, claim in self.before:
            run = failed.get(str(claim.flow_run_id))
            if run is None:
                self._row(path, "taken before", claim.run_folder)
                continue
            forget = f"rm {shlex.quote(printable(str(self.memory.path_of(claim.sha256))))}"
            why = f"{run.state_name}: {run.state.message}" if run.state and run.state.message else run.state_name
            note = (
                f"run {run.id} ended as {printable(str(why))}; press Retry there, or, to take it again, run: {forget}"
            )
            self._row(path, "failed before", note)

    def _state(self) -> State[Any]:
        taken = self.counts["taken"]
        counts = f"{counted(taken, 'run')} of {self.name} started" + "".join(
            f", {self.counts[state]:,} {state}" for state in _ORDER[1:] if self.counts[state]
        )
        if self.refusal is not None:
            raise ConfigurationError(f"{self.refusal} ({counts})") from self.refusal
        if self.target.paused:
            return Completed(message=f"{self.name} is paused, so nothing was taken: {counts}")
        return Completed(message=counts)

    def _content(self, file: ArrivedFile) -> str:
        sha256 = self.memory.content_seen(file.target, file.identity)
        if sha256 is None:
            sha256 = content_of(file)
            self.memory.note_content(file.target, file.identity, sha256)
        return sha256

    def _start(self, file: ArrivedFile, claim: Claim) -> None:
        """Create the run of a claim; a repeated request returns the same run."""
        paths = {self.input_parameter: [str(file.path.absolute())], "output_dir": str(self.root / claim.run_folder)}
        try:
            run = self.client.create_flow_run_from_deployment(
                self.target.id,
                parameters={**self.parameters, **paths},
                state=Scheduled(),
                idempotency_key=claim.key,
                tags=["inbox"],
            )
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
                raise
            detail = error.response.json().get("detail", error)
            raise ConfigurationError(f"{self.name} refuses its parameters: {detail}") from error
        self.memory.note_run(claim, str(run.id))

    def _row(self, path: Path, state: str, note: str = "") -> None:
        shown = printable(str(path))
        level = {"taken before": "debug", "skipped": "warning", "failed before": "warning"}.get(state, "info")
        getattr(get_run_logger(), level)("%s: %s%s", shown, state, f": {note}" if note else "")
        self.counts[state] += 1
        self.rows.append({"file": shown, "state": state, "note": note})

    def _publish(self) -> None:
        rows = sorted(self.rows, key=lambda row: _ORDER.index(row["state"]))
        shown = f"{min(len(rows), MAX_ROWS):,} of {len(rows):,} files"
        create_table_artifact(table=rows[:MAX_ROWS], key="inbox-summary", description=shown)


def _read(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound as error:
        raise ConfigurationError(f"the server has no deployment {name}: deploy it, or name another one") from error


def _is_allowed(path: str) -> bool:
    try:
        check_allowed(data={"inbox_dir": path})
    except PathNotAllowedError:
        return False
    return True
