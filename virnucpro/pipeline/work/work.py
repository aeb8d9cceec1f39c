"""What is computed, as workers and whatever starts them know it: blocks of an embedding run, or contigs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import threading
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from virnucpro.arrays import IntArray
    from virnucpro.config import RunLimits
    from virnucpro.data.sequence_index import SequenceIndex
    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.work.recovery import Recovery
    from virnucpro.pipeline.work.units import Why
    from virnucpro.pipeline.work.worker_process import WorkerFunction
    from virnucpro.run_layout import FolderLayout
    from virnucpro.telemetry.work_telemetry import WorkTelemetry


class Units(Protocol):
    """The units of some work by number, as a process has them open."""

    @property
    def sizes(self) -> IntArray:
        """Tokens or nucleotides of each, int64."""

    def durable(self, numbers: Collection[int], quarantined: Collection[int] = (), /) -> set[int]:
        """Return the units that are complete on disk, except for *quarantined* sequences."""


class Work(Protocol):
    """What executors know of the work of ranks; it travels to other hosts."""

    @property
    def run_id(self) -> str: ...

    @property
    def layout(self) -> FolderLayout: ...

    @property
    def task(self) -> str:
        """Name of a rank's task under Prefect."""

    @property
    def output_dir(self) -> Path: ...

    @property
    def devices(self) -> Sequence[Device]:
        """One a rank."""

    @property
    def world_size(self) -> int: ...

    @property
    def worker_fn(self) -> WorkerFunction: ...

    @property
    def worker_args(self) -> tuple[Any, ...]:
        """Passed on after the pipe, before the assignment."""

    @property
    def is_small(self) -> bool:
        """Whether it is so little that no process is started."""

    def open_index(self) -> SequenceIndex: ...

    def open_units(self) -> Units: ...

    def more(self, quarantined: Mapping[int, Why], telemetry: WorkTelemetry, /) -> Sequence[int]:
        """Return the units that follow once the earlier ones are done, except for *quarantined* sequences."""
        ...

    def recovery(self, limits: RunLimits, telemetry: WorkTelemetry, /) -> Recovery:
        """Return what decides about failures."""
        ...

    def compute_here(self, recovery: Recovery, stop: threading.Event, /) -> None:
        """Compute all of it in this process; an error is raised."""
        ...
