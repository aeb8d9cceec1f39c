"""
The progress of each rank of an embedding run in Prefect's UI: one progress artifact a rank.

A thread of its own calls the API, so that an API that hangs or is gone does not hold up the run; a run that is over
waits for the thread a few seconds at most.
"""

import threading
from contextvars import copy_context
from typing import TYPE_CHECKING

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from virnucpro.errors import printable
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.snapshot import RankSnapshot, RunSnapshot

if TYPE_CHECKING:
    from uuid import UUID

INTERVAL_S = 2.0
"""Seconds between two updates, at least."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds for one answer of the API; a failed update is repeated with the next one."""
PATIENCE_S = 5.0
"""Seconds that a run waits at its end for its last update."""

_Content = tuple[float, str]
"""Percent and description."""


class ProgressArtifacts:
    """A view that keeps the artifacts up to date; made in the flow run that they belong to."""

    def __init__(self) -> None:
        context = FlowRunContext.get()
        self._flow_run_id = context.flow_run.id if context is not None and context.flow_run is not None else None
        self._logger = get_run_logger()
        self._latest: RunSnapshot | None = None
        self._is_over = threading.Event()
        self._was_refused = False
        self._made: dict[tuple[int, int], UUID] = {}
        self._shown: dict[tuple[int, int], _Content] = {}
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._go_on,), name="progress-artifacts", daemon=True
        )
        self._thread.start()

    def update(self, snapshot: RunSnapshot) -> None:
        """Take in how the run is; the thread shows it next."""
        self._latest = snapshot

    def say(self, text: str) -> None:
        """Ignore it: the flow run's log has it."""

    def close(self) -> None:
        """Show the last state, if the API answers soon."""
        self._is_over.set()
        self._thread.join(PATIENCE_S)

    def _go_on(self) -> None:
        """Run in the thread: show the latest snapshot until the run is over."""
        is_last = False
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while not is_last:
                is_last = self._is_over.wait(INTERVAL_S)
                try:
                    with get_client(httpx_settings={"timeout": REQUEST_TIMEOUT_S}, sync_client=True) as client:
                        while True:
                            self._show(client)
                            if is_last:
                                return
                            is_last = self._is_over.wait(INTERVAL_S)
                except Exception as error:  # noqa: BLE001  whatever the API does, the run is worth more
                    if not self._was_refused:
                        self._was_refused = True
                        self._logger.warning("progress artifacts are not up to date: %s", error or repr(error))

    def _show(self, client: SyncPrefectClient) -> None:
        snapshot = self._latest
        if snapshot is None:
            return
        for number, embedding in enumerate(snapshot.embeddings):
            for rank in embedding.ranks:
                key, content = (number, rank.rank), _content(rank, embedding.model, now=snapshot.now)
                if self._shown.get(key) == content:
                    continue
                percent, description = content
                if key in self._made:
                    client.update_artifact(self._made[key], ArtifactUpdate(data=percent, description=description))
                else:
                    kind = "cpu" if rank.device.startswith("cpu") else "gpu"
                    new = ArtifactCreate(
                        type="progress",
                        key=f"{kind}-{rank.rank}-progress",
                        description=description,
                        data=percent,
                        flow_run_id=self._flow_run_id,
                    )
                    self._made[key] = client.create_artifact(new).id
                self._shown[key] = content


def _content(rank: RankSnapshot, model: str, *, now: float) -> _Content:
    """Return what the artifact of a rank shows."""
    figures = [f"{rank.sequences:,} sequences"]
    state = wording.rank_state(rank, now=now)
    if state is not None:
        figures.append(state)
    else:
        figures.append(f"{rank.tokens_per_second:,.0f} tokens/s")
        if rank.seconds_left is not None:
            figures.append(f"{wording.about(rank.seconds_left)} left")
    return int(
        wording.rank_share(rank) * 1000
    ) / 10, f"{wording.rank_name(rank)}, {printable(model)}: {', '.join(figures)}"
