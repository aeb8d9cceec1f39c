"""
One device of a host of a cluster: a worker process that computes one unit after the other.

An engine makes a ``UnitWorker`` and keeps it from one unit to the next, so the model is loaded once. The process is
recovered here as on one machine: a sequence that ends it costs its own row. What is durable is looked for on disk
before a unit is computed, so a unit may be given to any worker, again and again, and to two at the same time.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from virnucpro.errors import DeviceError, HostCheckError, VirNucProError
from virnucpro.host_gpus import host_tokens
from virnucpro.pipeline.devices import CPU, VISIBLE_VARIABLE, Device, visible_tokens
from virnucpro.pipeline.failures import FailureClass
from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names
from virnucpro.pipeline.hosts.host_check import check_folder, check_host, weights_here
from virnucpro.pipeline.plan.budget_probe import PROBE_WORKER, probe_devices
from virnucpro.pipeline.work.block_pool import BlockPool
from virnucpro.pipeline.work.rank_runner import run_worker
from virnucpro.pipeline.work.recovery import Death, Quarantine, Recovery
from virnucpro.pipeline.work.units import UnitRecord
from virnucpro.store.locks.worker_lock import taking_part
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor
from virnucpro.telemetry.metrics.process_monitor import sample_processes
from virnucpro.telemetry.ranks import Rank
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from virnucpro.config import ModelConfig, RunLimits
    from virnucpro.pipeline.plan.budget_probe import DeviceProbe
    from virnucpro.pipeline.work.units import Unit
    from virnucpro.pipeline.work.work import Units, Work
    from virnucpro.pipeline.work.worker_process import WorkerFunction

IDLE_S = 60.0
"""Seconds without a unit after which the process ends: its driver may be gone. Another unit starts another process."""
REPORT_S = 5.0
"""Most seconds to wait for what is reported of blocks that are durable."""
ELSEWHERE = -1
"""In place of a rank's number: another worker of the run."""
END_S = 30.0
"""Seconds that the process has to end once there is nothing left to do."""
SAMPLE_INTERVAL_S = 5.0
"""Seconds between two samples of GPU and process."""
_OF_THE_HOST = frozenset({"heartbeat", "step", "wants"})
"""Kinds of messages that mean nothing elsewhere."""


class UnitPool(BlockPool):
    """The blocks of one rank, which gets them unit by unit; everything is done only once the pool is closed."""

    is_on_cluster = True

    def __init__(self, rank: Rank) -> None:
        super().__init__(0, [rank])
        self.is_open = True

    @property
    def is_done(self) -> bool:
        return not self.is_open and super().is_done

    def feed(self, blocks: Iterable[int]) -> None:
        """Add blocks that are not durable."""
        for block in blocks:
            unknown = max(0, block + 1 - len(self._is_done))
            self._is_done.extend(b"\1" * unknown)
            self._is_checked.extend(bytes(unknown))
            self._is_done[block], self._is_checked[block] = False, True
            self._free.append(block)

    def undone(self, blocks: Iterable[int]) -> list[int]:
        """Return those of *blocks* that are to be computed still."""
        return [block for block in blocks if not self._is_done[block]]

    def blocks_of(self, rank: int) -> Sequence[int]:
        return self.undone(sorted({*self._given[rank], *self._unstarted[rank], *self._free}))

    def close(self, rank: int) -> None:
        self._ended.add(rank)


class _UnitRecovery(Recovery):
    def compute(self, todo: Sequence[int], unit: Unit, thread: threading.Thread) -> list[int]:
        """Have blocks of a unit computed; return those that were not when *thread*, which runs the rank, ended."""
        assert isinstance(self._pool, UnitPool)
        with self._changed:
            known = self._suspects()
            for block, deaths in unit.suspects.items():
                elsewhere = Death(ELSEWHERE, FailureClass.DIED, frozenset([block]), {})
                self._deaths += [elsewhere] * (deaths - known.get(block, 0))
            for position, (block, (failure, attempts)) in unit.quarantined.items():
                self._known[position] = Quarantine(block, FailureClass(failure), attempts)
            self._pool.feed(todo)
            while (left := self._pool.undone(todo)) and thread.is_alive():
                self._changed.wait(0.2)
            end_s = time.monotonic() + REPORT_S
            while self.ranks[0].attempt.in_flight and thread.is_alive() and time.monotonic() < end_s:
                self._changed.wait(0.2)
            return left

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        super().on_message(rank, message)
        if message.get("kind") == "progress":
            with self._changed:
                self._changed.notify_all()

    def record(self, unit: Unit, left: Sequence[int]) -> dict[str, Any]:
        """Return what is known of failures in a unit."""
        with self._changed:
            found = {position: why for position, why in self._quarantined().items() if why.block in set(unit.blocks)}
            deaths = [self._lone_deaths(position) for position in found.keys() - self._known.keys()]
            return {
                "suspects": {block: deaths for block, deaths in self._suspects().items() if block in left},
                "quarantined": {
                    position: (why.block, (why.failure.value, why.attempts)) for position, why in found.items()
                },
                "is_proved": self.ranks[0].sequences > 0
                and all(any(death.is_proved for death in on_it) for on_it in deaths if on_it),
            }

    def end(self) -> None:
        """Let the process end once it has computed what it has."""
        assert isinstance(self._pool, UnitPool)
        with self._changed:
            self._pool.is_open = False


class UnitWorker:
    """One device of this host; ``compute`` is called for one unit at a time, everything else from any thread."""

    def __init__(self, run: Work, rank: int, limits: RunLimits, *, worker_fn: WorkerFunction | None = None) -> None:
        self._run, self._limits, self._worker_fn = run, limits, worker_fn or run.worker_fn
        self._rank = Rank(rank=rank, device="", host=host_name(), state="complete")
        self._stop = threading.Event()
        self._held = ExitStack()
        self._recovery: _UnitRecovery | None = None
        self._thread: threading.Thread | None = None
        self._units: Units | None = None
        self._is_lost = False
        self._lock = threading.Lock()
        self._entries: list[dict[str, Any]] = []
        self._gpus: GpuMonitor | None = None
        self._sampled_s = time.monotonic()
        self._using = threading.Lock()
        """Held while a unit is computed, or the process is ended."""
        self._idle = threading.Timer(IDLE_S, self._end_if_idle)

    def compute(self, unit: Unit) -> UnitRecord:
        """Compute what is not durable of *unit*; no failure of host, device or process is raised."""
        with self._using:
            self._idle.cancel()
            try:
                return self._computed(unit)
            finally:
                self._idle = threading.Timer(IDLE_S, self._end_if_idle)
                self._idle.daemon = True
                self._idle.start()

    def _computed(self, unit: Unit) -> UnitRecord:
        began_s, before = time.monotonic(), (self._rank.sequences, self._rank.tokens)
        try:
            check_folder(self._run)
            if self._recovery is None:
                self._begin()
            assert self._units is not None
            durable = self._units.durable(unit.blocks, unit.quarantined)
            todo = [block for block in unit.blocks if block not in durable]
        except VirNucProError as error:
            if self._recovery is None:
                self._held.close()  # this host may be asked again
            return UnitRecord(rank=self._rank_so_far(), rows=0, tokens=0, seconds=0.0, is_lost=True, error=error)
        assert self._recovery is not None
        assert self._thread is not None
        left = todo if self._is_lost else self._recovery.compute(todo, unit, self._thread)
        self._is_lost |= bool(left)
        return UnitRecord(
            rank=self._rank_so_far(),
            rows=self._rank.sequences - before[0],
            tokens=self._rank.tokens - before[1],
            seconds=time.monotonic() - began_s,
            left=left,
            is_lost=self._is_lost,
            **self._recovery.record(unit, left),
        )

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for the driver since the last call, ready for JSON (see ``apply_entry``)."""
        if time.monotonic() - self._sampled_s > SAMPLE_INTERVAL_S:
            self._sampled_s = time.monotonic()
            self._sample()
        with self._lock:
            entries, self._entries = self._entries, []
        return entries

    def close(self, *, at_once: bool = False) -> None:
        """End the process: at its next batch boundary if *at_once*, else when its unit is done."""
        if at_once:
            self._stop.set()
        with self._using:
            self._idle.cancel()
            self._end()

    # --- the observer of the rank ---

    def assigned(self, _rank: int, _blocks: Sequence[int]) -> None:
        self._note({"assigned": None})

    def on_message(self, _rank: int, message: dict[str, Any]) -> None:
        if message.get("kind") == "model_loaded" and "gpu_uuid" in message and self._gpus is not None:
            self._gpus.found(self._rank.device, message["gpu_uuid"])
        if message.get("kind") not in _OF_THE_HOST:
            self._note({"message": {name: value for name, value in message.items() if name != "gpu_uuid"}})

    def ended(self, _rank: int, starts_again: bool, quarantined: Mapping[int, str]) -> None:
        rank, known = self._rank, list(quarantined.items())
        end = {"state": rank.state, "failure": rank.failure, "reason": rank.reason, "exit_code": rank.exit_code}
        self._note({"ended": {**end, "starts_again": starts_again, "quarantined": known}})

    # --- the process ---

    def _rank_so_far(self) -> Rank:
        """Return the record of the rank as if its process, which waits for another unit, had ended well now."""
        attempt = replace(self._rank.attempt)
        rank = replace(self._rank, attempt=attempt, failed_sequences=dict(self._rank.failed_sequences))
        if not self._is_lost and rank.state == "failed" and rank.failure is None:
            rank.state = "complete"
            rank.end_attempt()
        return rank

    def _begin(self) -> None:
        """Check the host, take a device, and start the thread that keeps the process."""
        run = check_host(self._run)
        self._units = run.open_units()
        self._held.enter_context(taking_part(run.output_dir))
        device = self._held.enter_context(device_here(run.devices[0].type, run_id=run.run_id, stop=self._stop))
        self._rank.device = device.label
        self._gpus = GpuMonitor([(device.label, device.token)])
        self._held.callback(self._gpus.close)
        self._note({"message": {"kind": "placed", "host": host_name(), "device": device.label}})
        self._recovery = _UnitRecovery(
            [self._rank],
            num_blocks=0,
            limits=self._limits,
            run_id=run.run_id,
            observer=self,
            pool=UnitPool(self._rank),
        )
        keep_process = partial(
            run_worker,
            self._worker_fn,
            run.worker_args,
            rank=self._rank,
            policy=self._recovery,
            world_size=run.world_size,
            device=device,
            stop=self._stop,
        )
        self._thread = threading.Thread(target=keep_process, name="unit-worker", daemon=True)
        self._thread.start()

    def _end_if_idle(self) -> None:
        if self._using.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._using.release()

    def _end(self) -> None:
        recovery, thread = self._recovery, self._thread
        if recovery is None or thread is None:
            return
        recovery.end()
        thread.join(END_S)
        self._stop.set()
        thread.join()
        self._held.close()
        self._recovery, self._thread, self._stop = None, None, threading.Event()

    def _note(self, entry: dict[str, Any]) -> None:
        with self._lock:
            self._entries.append({"rank": self._rank.rank, **entry})

    def _sample(self) -> None:
        number, pid = self._rank.rank, self._rank.pid
        used = sample_processes({number: pid} if pid is not None else {}).get(number)
        gpus = [] if self._gpus is None else [asdict(sample) for sample in self._gpus.sample()]
        self._note({"used": None if used is None else asdict(used), "gpus": gpus})


@contextmanager
def device_here(device_type: str, *, run_id: str, stop: threading.Event) -> Iterator[Device]:
    """
    Yield a device of this host: the only visible GPU, else a free one; no lock for the CPU.

    A single visible GPU was assigned by Ray or SLURM. Of several, one is locked, and awaited. *stop* ends the wait; the
    yielded device must not be used then.
    """
    if device_type == "cpu":
        yield CPU
        return
    try:
        visible = visible_tokens(os.environ, present=host_tokens())
    except DeviceError as error:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, str(error)) from error
    if not visible:
        raise HostCheckError(host_name(), VISIBLE_VARIABLE, "the run needs GPUs, but none is visible here")
    if len(visible) == 1:
        yield Device(visible[0])
        return
    names = lock_names([Device(token) for token in visible])
    locks = DeviceLocks()
    try:
        while not (taken := locks.take(list(names), least=1, most=1, run_id=run_id)) and not stop.wait(0.5):
            pass
        yield names[taken[0]] if taken else Device(visible[0])
    finally:
        locks.release()


def probe_device_here(
    index_path: str,
    output_dir: str,
    model_config: ModelConfig,
    _slot: int = 0,
    *,
    run_id: str,
    probe_fn: WorkerFunction = PROBE_WORKER,
) -> list[DeviceProbe]:
    """Probe a GPU of this host before a run is planned: its attention kernel and its best token budget."""
    with device_here("cuda", run_id=run_id, stop=threading.Event()) as device:
        return probe_devices([device], (index_path, output_dir, weights_here(model_config)), probe_fn=probe_fn)
