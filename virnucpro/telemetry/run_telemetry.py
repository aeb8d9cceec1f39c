"""
Everything that shows a run: views, metrics, status file; put together here, for a run as a whole.

One thread makes a snapshot twice a second and hands it to the views, so that a slow view holds up no worker. No failure
here ends a run: it is logged once.
"""

from __future__ import annotations

import hashlib
import queue
import shutil
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import structlog
from prometheus_client import CollectorRegistry, generate_latest

from virnucpro import durable
from virnucpro.cost import OUTSIDE, Cost, CostRow
from virnucpro.errors import OutputError, StoppedError
from virnucpro.telemetry.log_lines import log_sentence
from virnucpro.telemetry.metrics.exposition import (
    METRICS_PATH,
    MetricsServer,
    TargetFile,
    own_address,
    wait_for_last_scrape,
)
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor
from virnucpro.telemetry.metrics.options import MetricsOptions, metrics_options
from virnucpro.telemetry.metrics.process_monitor import sample_processes
from virnucpro.telemetry.metrics.pushgateway import Pushgateway
from virnucpro.telemetry.metrics.table import RunCollector
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.show.status_file import StatusFile
from virnucpro.telemetry.snapshot import GpuSample, RunSnapshot, StageSnapshot
from virnucpro.telemetry.trace import merge_trace
from virnucpro.telemetry.work_telemetry import WorkTelemetry
from virnucpro.telemetry.worker_logging import known_labels
from virnucpro.this_host import host_name, peak_resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from virnucpro.run_layout import FolderLayout
    from virnucpro.telemetry.snapshot import RankSnapshot, View, WorkFacts

log = structlog.get_logger(__name__)

TICK_S = 0.5
"""Seconds between two snapshots."""
SAMPLE_INTERVAL_S = 2.0
"""Seconds between two looks at GPUs, processes and the disk."""
_PATIENCE_S = 5.0
"""Seconds that the end of a run waits for a view that is stuck."""


@dataclass
class _Stage:
    name: str
    model: str
    depth: int
    """Stages that it is within."""
    began_s: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.time)
    ended_s: float | None = None
    waited_s: float = 0.0
    """Seconds in which the run stood still within it."""

    def snapshot(self) -> StageSnapshot:
        elapsed = (time.monotonic() if self.ended_s is None else self.ended_s) - self.began_s
        return StageSnapshot(
            name=self.name,
            model=self.model,
            started=self.started,
            seconds=elapsed - self.waited_s,
            elapsed=elapsed,
            depth=self.depth,
            is_over=self.ended_s is not None,
        )


class RunTelemetry:
    """
    Context manager around a run of any kind; ``running`` marks the time in which it holds its folder.

    Args:
        metrics: Where metrics go beside the folder; None: as the environment sets it.
        notes: Whether they show what is neither an error nor a warning.
    """

    def __init__(
        self, metrics: MetricsOptions | None = None, views: Sequence[View] = (), *, notes: bool = True
    ) -> None:
        self._shows_notes = notes
        self._options = metrics_options() if metrics is None else metrics
        self._views = list(views)
        self._lock = threading.Lock()
        self._stages: list[_Stage] = []
        self._own_cpu_s: dict[str, float] = {}
        """Stage with those around it -> processor seconds of this process, without those of stages within it."""
        self._cpu_counted_s = 0.0
        self.cost_before: tuple[CostRow, ...] = ()
        """Of earlier starts in the folder."""
        self._works: list[WorkTelemetry] = []
        self._layout: FolderLayout | None = None
        self._run_id = ""
        self._started = time.time()
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(self.snapshot))
        self._server: MetricsServer | None = None
        self._target: TargetFile | None = None
        self._pushgateway: Pushgateway | None = None
        self._gpus: GpuMonitor | None = None
        self._gpu_samples: tuple[GpuSample, ...] = ()
        self._disk: tuple[int, int] | None = None
        self._sayings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._sampled_s = 0.0
        self._complaints: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with ExitStack() as ending:  # whatever interrupts the end, such as a second Ctrl-C
            if self._gpus is not None:
                ending.callback(self._guarded, self._gpus.close)
            if self._server is not None:
                ending.callback(self._server.stop)
            if self._target is not None:
                ending.callback(self._target.stop)  # first, so that no scraper finds a dead target
            self._close_views()
            has_failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
            if self._server is not None and (error is None or has_failed):
                wait_for_last_scrape(self._server, is_quiet=not self._shows_notes)

    @contextmanager
    def running(self, layout: FolderLayout, run_id: str) -> Iterator[None]:
        """Show the run for the time of the block, then leave its last figures in its folder."""
        self._layout, self._run_id, self._started = layout, run_id, time.time()
        self._own_cpu_s, self._cpu_counted_s = {}, time.process_time()
        self._guarded(self._begin)
        try:
            yield
        finally:
            self._guarded(self._finish)
            self._layout = None

    @contextmanager
    def stage(self, name: str, *, model: str = "") -> Iterator[None]:
        """Record a stage for the time of the block; *model*: the embedding run of the stage."""
        with self._lock:
            self._count_cpu()
            depth = sum(around.ended_s is None for around in self._stages)
            stage = _Stage(name, model, depth)
            self._stages.append(stage)
        try:
            yield
        finally:
            with self._lock:
                self._count_cpu()
                stage.ended_s = time.monotonic()

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Record a wait for the time of the block: a stage with seconds that count in no other stage."""
        with self._lock:
            around = [stage for stage in self._stages if stage.ended_s is None]
        began_s = time.monotonic()
        try:
            with self.stage(name):
                yield
        finally:
            waited_s = time.monotonic() - began_s
            for stage in around:
                stage.waited_s += waited_s

    def stages_s(self, model: str = "") -> dict[str, float]:
        """Return the seconds of each finished stage of an embedding run, or of the whole run."""
        stages = self._stages_now()
        return {stage.name: stage.seconds for stage in stages if stage.model == model and stage.is_over}

    def _count_cpu(self) -> str:
        """Count this process's seconds since the last call in the innermost running stage; return that."""
        stage = "/".join(stage.name for stage in self._stages if stage.ended_s is None) or OUTSIDE
        now_s = self._cpu_counted_s if self._is_over.is_set() else time.process_time()
        self._own_cpu_s[stage] = self._own_cpu_s.get(stage, 0.0) + now_s - self._cpu_counted_s
        self._cpu_counted_s = now_s
        return stage

    def cost(self) -> tuple[CostRow, ...]:
        """Return what this start has cost so far; the peak of its own process is in the row of what is no stage."""
        with self._lock:
            self._count_cpu()
            own, works = dict(self._own_cpu_s), list(self._works)
        here = None, host_name(), "cpu"
        rows = [CostRow(stage, *here, cpu_seconds=seconds) for stage, seconds in own.items()]
        rows.append(CostRow(OUTSIDE, *here, peak_memory_bytes=peak_resident_bytes()))
        return Cost.of([*rows, *(row for work in works for row in work.cost())]).rows

    @property
    def is_running(self) -> bool:
        return self._layout is not None

    def begin_work(self, facts: WorkFacts) -> WorkTelemetry:
        self._guarded(durable.remove_tree, facts.layout.spans_dir)  # of a run that was killed
        if self._gpus is None and facts.host and any(token for _, token in facts.devices):
            self._gpus = GpuMonitor(facts.devices)
        work = WorkTelemetry(
            facts,
            on_gpu=self._gpus.found if self._gpus is not None else lambda *_: None,
            on_log=self._tell_log,
            on_failure=self.say,
        )
        with self._lock:
            work.stage = self._count_cpu()
            self._works.append(work)
        return work

    def has_workers(self) -> bool:
        """Whether there is work with a worker that has sent a message."""
        return any(work.has_workers for work in self._works)

    def say(self, text: str) -> None:
        """Show lines to the user, soon; never waits."""
        self._sayings.put(text)

    def note(self, text: str) -> None:
        """Show lines that are neither errors nor warnings."""
        if self._shows_notes:
            self.say(text)

    def snapshot(self) -> RunSnapshot:
        with self._lock:
            works = list(self._works)
        free, size = self._disk or (None, None)
        return RunSnapshot(
            run_id=self._run_id,
            output_dir="" if self._layout is None else str(self._layout.output_dir),
            started=self._started,
            now=time.time(),
            stages=self._stages_now(),
            embeddings=tuple(work.snapshot() for work in works),
            gpus=(*self._gpu_samples, *(gpu for work in works for gpu in work.gpus())),
            disk_free_bytes=free,
            disk_size_bytes=size,
            cost=self.cost(),
            cost_before=self.cost_before,
        )

    def _stages_now(self) -> tuple[StageSnapshot, ...]:
        with self._lock:
            return tuple(stage.snapshot() for stage in self._stages)

    def _close_views(self) -> None:
        views, self._views = self._views, []
        for view in views:
            self._guarded(view.close)

    def _begin(self) -> None:
        assert self._layout is not None
        log.info("run.began", run_id=self._run_id, host=host_name(), **known_labels())
        self._views.append(StatusFile(self._layout.live_status))
        if self._options.port is not None:
            self._serve(self._options.port)
        if self._options.pushgateway is not None:
            self._pushgateway = Pushgateway(self._options.pushgateway, self._registry, self._run_id)
            self._pushgateway.start(partial(self._complain, "metrics.not_pushed"))
        self._is_over.clear()
        self._thread = threading.Thread(target=self._go_on, name="telemetry", daemon=True)
        self._thread.start()

    def _serve(self, port: int) -> None:
        try:
            server = MetricsServer(self._registry, port, own_address(self._options.network))
            address = f"{server.address}:{server.start()}"
        except OSError as error:
            log.warning("metrics.not_served", port=port, reason=error.strerror or str(error))
            return
        self._server = server
        url = f"http://{address}{METRICS_PATH}"
        self.note(f"metrics: {url}")
        log.info("metrics.served", address=url)  # for Prefect; a terminal has the line above
        if self._options.targets_dir is not None:
            target = TargetFile(Path(self._options.targets_dir), self._run_id, address)
            try:
                target.start()
                self._target = target
            except OutputError as error:
                log.warning("metrics.no_target_file", path=error.path, reason=error.what)

    def _finish(self) -> None:
        with self._lock:
            self._count_cpu()
        self._stop_thread()
        if self._views:
            self._sample()
            self._show()
        self._close_views()
        if self._works:  # else the figures of the run that did it stay
            self._guarded(self._leave_files)
        if self._pushgateway is not None:
            self._pushgateway.stop()

    def _leave_files(self) -> None:
        """Write the last figures, and the timeline of a profiled run, which stay in the folder."""
        assert self._layout is not None
        try:
            registry = CollectorRegistry()
            registry.register(RunCollector(self.snapshot, names_run=True))  # files of several runs share a folder
            figures = generate_latest(registry)
            durable.write_bytes(self._layout.metrics_textfile, figures)
            merge_trace([work.facts.layout.spans_dir for work in self._works], self._stages_now(), self._layout.trace)
            if self._options.textfiles_dir is not None:
                _write_textfile(Path(self._options.textfiles_dir), self._layout.output_dir.absolute(), figures)
        except OutputError as error:
            log.warning("telemetry.not_written", path=error.path, reason=error.what)

    def _stop_thread(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                self._views = []  # the thread is inside one of them, or of the systems they look at
                self._complain("telemetry.stuck", f"what shows the run has not answered for {_PATIENCE_S:g} s")
            self._thread = None

    def _go_on(self) -> None:
        """Run in the thread: show and sample until the run is over."""
        while not self._is_over.is_set():
            now_s = time.monotonic()
            if now_s - self._sampled_s >= SAMPLE_INTERVAL_S:
                self._sampled_s = now_s
                self._sample()
            self._show()
            self._is_over.wait(TICK_S)

    def _show(self) -> None:
        snapshot = self.snapshot()
        texts = []
        with suppress(queue.Empty):
            while True:
                texts.append(self._sayings.get_nowait())
        for view in list(self._views):
            for text in texts:
                self._guarded(view.say, text, of=view)
            self._guarded(view.update, snapshot, of=view)

    def _sample(self) -> None:
        self._guarded(self._sample_disk)
        self._guarded(self._sample_processes)
        if self._gpus is not None:
            self._guarded(self._sample_gpus)

    def _sample_disk(self) -> None:
        if self._layout is not None:
            usage = shutil.disk_usage(self._layout.output_dir)
            self._disk = usage.free, usage.total

    def _sample_processes(self) -> None:
        with self._lock:
            works = list(self._works)
        for work in works:
            pids = work.pids()
            for rank, used in sample_processes(pids).items():
                work.used(rank, pids[rank], cpu_s=used.cpu_s, resident_bytes=used.resident_bytes)

    def _sample_gpus(self) -> None:
        assert self._gpus is not None
        self._gpu_samples = self._gpus.sample()

    def _tell_log(self, rank: RankSnapshot, message: dict[str, Any]) -> None:
        where = wording.rank_place(rank)
        self.say(f"{message.get('level', 'warning')}: rank {rank.rank} ({where}): {log_sentence(message)}")

    def _guarded(self, call: Callable[..., None], *args: Any, of: View | None = None) -> None:
        """Call what must never end the run; a view that fails shows no more."""
        try:
            call(*args)
        except StoppedError:  # a signal, which has nothing to do with the call that it came in
            raise
        except Exception as error:  # noqa: BLE001  no failure of a view ends a run
            self._complain("telemetry.failed", f"{type(error).__name__}: {error}")
            if of is not None and of in self._views:
                self._views.remove(of)
                self._guarded(of.close)  # what it holds: standard error, a file that shows the run as running

    def _complain(self, event: str, reason: str) -> None:
        if event not in self._complaints:
            self._complaints.add(event)
            log.warning(event, reason=reason)


def _write_textfile(folder: Path, output_dir: Path, figures: bytes) -> None:
    """Write the last figures for node_exporter, in place of those of earlier starts of the run."""
    if not folder.is_dir():
        raise OutputError(folder, "there is no such folder")
    durable.write_bytes(folder / f"virnucpro-{hashlib.sha256(bytes(output_dir)).hexdigest()[:12]}.prom", figures)
