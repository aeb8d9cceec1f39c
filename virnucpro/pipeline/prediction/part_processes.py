"""
The pool of processes that score contigs by composition and refine ambiguous scores by homology, or find genes.

They get one part at a time from their parent; the part of a lost process goes to the next that asks.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from virnucpro.errors import ExitCode, OutputError, StoppedError, WorkersFailedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.failures import FailureClass, exit_code_of
from virnucpro.pipeline.gpu_coordinator import CountedAttempts, GPUProcessCoordinator
from virnucpro.telemetry.ranks import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virnucpro.config import RunLimits
    from virnucpro.pipeline.prediction.part_work import Work

WORKER = "virnucpro.pipeline.prediction.part_jobs:part_worker"


def compute_in_processes(
    work: Work,
    then: Callable[[], Work | None],
    num_workers: int,
    limits: RunLimits,
    stop: threading.Event,
) -> None:
    """
    Have the parts of *work* computed by so many processes, which go on with those of *then*, a search.

    Raises:
        StoppedError: *stop* was set.
        OutputError: A part cannot be written.
        WorkersFailedError: No process got to the end.
    """
    layout = work.job.layout
    ranks_of = [Rank(rank=rank, device=CPU.label) for rank in range(num_workers)]
    policy = _PartPolicy(ranks_of, limits, work, then)
    with GPUProcessCoordinator(
        num_workers, layout.output_dir, devices=[CPU] * num_workers, limits=limits, stop=stop, policy=policy
    ) as ranks:
        ranks.spawn_workers(WORKER, (work.job,))
        ranks.wait_for_completion()
        failed = [outcome for outcome in ranks.outcomes.values() if outcome.failure]
    refuse_to_go_on(stop)
    missing = [part for one in policy.works for part in one.parts if not one.job.path_of(part).exists()]
    if missing:
        classes = {FailureClass(outcome.failure or FailureClass.DIED) for outcome in failed}
        reasons = {outcome.rank: outcome.reason or "" for outcome in failed}
        if FailureClass.CANNOT_WRITE in classes:
            raise OutputError(layout.contig_parts, next(iter(reasons.values())))
        raise WorkersFailedError(
            reasons,
            world_size=num_workers,
            missing_sequences=sum(map(len, missing)),
            total_sequences=sum(len(part) for part in policy.works[-1].parts),
            partial_path=None,
            exit_code=exit_code_of(classes.pop()) if len(classes) == 1 else ExitCode.INTERNAL,
            is_listed=False,
        )


class _PartPolicy(CountedAttempts):
    """
    Hands out parts one at a time; those of a process that has failed go to the next that asks.

    When all of *work* is done, *then* gives more.
    """

    def __init__(self, ranks: Sequence[Rank], limits: RunLimits, work: Work, then: Callable[[], Work | None]) -> None:
        super().__init__(ranks, limits)
        self.works = [work]
        self._then: Callable[[], Work | None] | None = then
        self._left = deque((work, part) for part in work.missing())
        self._held: dict[int, tuple[Work, range]] = {}
        self._changing = threading.Lock()

    def next_blocks(self, rank: int) -> list[dict[str, Any]]:
        """Return the next part; nothing while another process may lose its part; no contigs at the end."""
        with self._changing:
            if (finished := self._held.pop(rank, None)) is not None:
                work, part = finished
                work.done(part)
            if not self._left and not self._held:
                self._go_on()
            if self._left:
                work, part = self._held[rank] = self._left.popleft()
                return [{"searches": work.job.searches, "contigs": [part.start, part.stop]}]
            return [] if self._held else [{"contigs": []}]

    def _go_on(self) -> None:
        then, self._then = self._then, None
        with suppress(Exception):  # who started the processes calls it again, and meets what is wrong
            if then is not None and (work := then()) is not None:
                parts = work.missing()
                self.works.append(work)
                self._left.extend((work, part) for part in parts)

    def another_attempt(self, outcome: Rank) -> bool:
        """Take back what a process had, and say whether attempts are left."""
        with self._changing:
            if (lost := self._held.pop(outcome.rank, None)) is not None:
                self._left.append(lost)
        return super().another_attempt(outcome)


def refuse_to_go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise StoppedError
