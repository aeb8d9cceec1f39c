"""
Every metric of a run, declared once: name, kind, unit, labels, help, and how a ``RunSnapshot`` gives its values.

``RunCollector`` reads them at each scrape, ``HostCollector`` those of GPUs for a whole host, under other names. Names
follow Prometheus: base units, ``_total`` on counters, and no label whose values grow with the input.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from virnucpro.config import torch_version
from virnucpro.telemetry.snapshot import CONTIGS, SEQUENCES, RunSnapshot
from virnucpro.telemetry.worker_logging import LABEL_VARIABLES, started_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric as MetricFamily

    from virnucpro.cost import CostRow
    from virnucpro.telemetry.snapshot import (
        BatchSeconds,
        GpuSample,
        RankSnapshot,
        StageSnapshot,
        WorkSnapshot,
    )

    Labels = tuple[str, ...]
    Value = float | BatchSeconds
    Reader = Callable[[RunSnapshot], Iterable[tuple[Labels, Value]]]

RANK = ("rank", "host", "device", "model")
MODEL = ("model",)
STAGE = ("stage", "model")
GPU = ("host", "device", "uuid")

One = TypeVar("One")


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    """counter, gauge or histogram."""
    unit: str
    labels: Labels
    read: Reader
    """Label values and value of each series that has a value."""
    help: str


def _ranks(run: RunSnapshot, counts: str = "") -> Iterator[tuple[Labels, RankSnapshot]]:
    for embedding in run.embeddings:
        for rank in embedding.ranks if embedding.counts == counts or not counts else ():
            yield (str(rank.rank), rank.host, rank.device, embedding.model), rank


def _works(run: RunSnapshot) -> Iterator[tuple[Labels, WorkSnapshot]]:
    for work in run.embeddings:
        yield (work.model,), work


def _embeddings(run: RunSnapshot) -> Iterator[tuple[Labels, WorkSnapshot]]:
    return ((named, work) for named, work in _works(run) if work.counts == SEQUENCES)


def _gpus(run: RunSnapshot) -> Iterator[tuple[Labels, GpuSample]]:
    for gpu in run.gpus:
        yield (gpu.host, gpu.device, gpu.uuid), gpu


def _costs(run: RunSnapshot) -> Iterator[tuple[Labels, CostRow]]:
    for row in run.cost:
        yield (row.stage, "" if row.worker is None else str(row.worker), row.host, row.device), row


def _run(run: RunSnapshot) -> Iterator[tuple[Labels, RunSnapshot]]:
    yield (), run


def _metric_of(
    labels: Labels, each: Callable[[RunSnapshot], Iterable[tuple[Labels, One]]]
) -> Callable[[str, str, str, Callable[[One], Value | None], str], Metric]:
    """Return what makes a metric with one value for each thing of a kind, None for those that have none now."""

    def metric(name: str, kind: str, unit: str, value: Callable[[One], Value | None], text: str) -> Metric:
        def read(run: RunSnapshot) -> Iterator[tuple[Labels, Value]]:
            return ((named, number) for named, one in each(run) if (number := value(one)) is not None)

        return Metric(name, kind, unit, labels, read, text)

    return metric


_of_workers = _metric_of(RANK, _ranks)
_of_ranks, _of_contigs = (_metric_of(RANK, partial(_ranks, counts=counts)) for counts in (SEQUENCES, CONTIGS))
_of_works, _of_embeddings = _metric_of(MODEL, _works), _metric_of(MODEL, _embeddings)
_of_gpus, _of_run = _metric_of(GPU, _gpus), _metric_of((), _run)
_of_costs = _metric_of(("stage", "rank", "host", "device"), _costs)


def _counts(
    each: Callable[[RunSnapshot], Iterable[tuple[Labels, One]]], counts: Callable[[One], Mapping[str, int | bool]]
) -> Reader:
    """Return a reader of the numbers under each name, which becomes the last label."""

    def read(run: RunSnapshot) -> Iterator[tuple[Labels, Value]]:
        for named, one in each(run):
            for name, number in counts(one).items():
                yield (*named, name), number

    return read


def _stages(value: Callable[[StageSnapshot], float]) -> Reader:
    return lambda run: (((stage.name, stage.model), value(stage)) for stage in run.stages)


def _build_info(_: RunSnapshot) -> Iterator[tuple[Labels, Value]]:
    yield (version("virnucpro"), torch_version(), platform.python_version()), 1


def _run_info(run: RunSnapshot) -> Iterator[tuple[Labels, Value]]:
    flow = tuple(started_by().values())
    for _, one in _works(run):
        yield (run.run_id, one.model, one.precision, str(one.token_budget or ""), str(len(one.ranks)), *flow), 1


# A table: each metric in as few lines as it takes.
# fmt: off
METRICS = (
    _of_ranks("virnucpro_sequences_total", "counter", "sequences", lambda rank: rank.rows,
              "Rows that are durable, each counted once: those of earlier starts of the run, copies of identical "
              "sequences and rows from the embedding cache included."),
    _of_ranks("virnucpro_tokens_total", "counter", "tokens", lambda rank: rank.tokens,
              "Tokens computed in this start of the run, special tokens included."),
    _of_contigs("virnucpro_contigs_total", "counter", "contigs", lambda rank: rank.rows,
                "Contigs of which what was found is durable, each counted once: those of earlier starts included."),
    _of_contigs("virnucpro_nucleotides_total", "counter", "nucleotides", lambda rank: rank.tokens,
                "Nucleotides of contigs computed in this start of the run; those that are searched count again."),
    _of_workers("virnucpro_batches_total", "counter", "batches", lambda rank: rank.batches,
              "Batches computed in this start of the run."),
    _of_workers("virnucpro_written_bytes_total", "counter", "bytes", lambda rank: rank.written_bytes,
              "Bytes of results made durable in this start of the run."),
    _of_ranks("virnucpro_cache_hits_total", "counter", "sequences", lambda rank: rank.cache_hits,
              "Sequences whose rows came from the embedding cache."),
    _of_ranks("virnucpro_oom_splits_total", "counter", "batches", lambda rank: rank.oom_splits,
              "Batches computed in halves because they did not fit into memory."),
    Metric("virnucpro_worker_restarts_total", "counter", "processes",
           (*RANK, "failure"), _counts(_ranks, lambda rank: rank.restarts),
           "Restarts of worker processes, by the class of the failure before."),
    _of_workers("virnucpro_worker_cpu_seconds_total", "counter", "seconds", lambda cost: cost.cpu_s,
              "Processor seconds, user and system, of a rank's processes."),
    _of_costs("virnucpro_worker_gpu_seconds_total", "counter", "seconds", lambda row: row.gpu_seconds or None,
              "Seconds for which a worker's processes held a GPU, divided by the workers that share it."),
    _of_costs("virnucpro_stage_cpu_seconds_total", "counter", "seconds",
              lambda row: row.cpu_seconds if row.worker is None else None,
              "Processor seconds of the run's own process by stage, without those of stages within it (`dna/embed`); "
              "stage `run`: outside of stages."),
    Metric("virnucpro_failed_sequences_total", "counter", "sequences",
           (*MODEL, "reason"), _counts(_works, lambda run: run.failed),
           "Sequences, copies included, that got no row because computing them failed, by failure class."),
    Metric("virnucpro_quarantined_sequences_total", "counter", "sequences",
           (*MODEL, "reason"), _counts(_works, lambda run: run.quarantined),
           "Sequences, copies included, that are not computed any more because they ended processes, by failure "
           "class."),
    _of_embeddings("virnucpro_deduplicated_sequences_total", "counter", "sequences", lambda run: run.copies,
                   "Records that take the row of an identical sequence."),
    _of_embeddings("virnucpro_skipped_records_total", "counter", "records", lambda run: run.skipped,
                   "Invalid records of the input that were skipped, as the run's settings allow."),
    _of_workers("virnucpro_batch_duration_seconds", "histogram", "seconds",
              lambda rank: rank.batch_seconds if rank.batches else None,
              "Seconds a batch took, from the end of the one before or its own start, whichever is later, to its "
              "rows."),
    _of_ranks("virnucpro_packing_efficiency_ratio", "gauge", "0 to 1", lambda rank: rank.packing_efficiency,
              "Tokens over token budget of the batches computed, 0 to 1."),
    _of_workers("virnucpro_model_load_seconds", "gauge", "seconds", lambda rank: rank.model_load_s,
              "Seconds that the rank's last process took to load the model."),
    _of_workers("virnucpro_worker_up", "gauge", "0 or 1",
              lambda rank: rank.has_process,
              "1 while the rank's process runs, 0 when it failed or was lost; absent while none is needed."),
    _of_workers("virnucpro_worker_resident_memory_bytes", "gauge", "bytes", lambda cost: cost.resident_bytes,
              "Bytes of resident memory of the rank's process."),
    _of_costs("virnucpro_peak_memory_bytes", "gauge", "bytes", lambda row: row.peak_memory_bytes or None,
              "Most resident memory of one of a worker's processes so far, or of the run's own, whose rank is empty."),
    _of_costs("virnucpro_peak_gpu_memory_bytes", "gauge", "bytes", lambda row: row.peak_gpu_memory_bytes or None,
              "Most GPU memory that torch's tensors took in one of a worker's processes that have ended."),
    _of_ranks("virnucpro_worker_tokens_left", "gauge", "tokens", lambda rank: rank.tokens_left,
              "Planned tokens that the rank was given and has not computed yet."),
    _of_workers("virnucpro_last_progress_timestamp_seconds", "gauge", "Unix time", lambda rank: rank.last_progress,
              "Unix time at which the rank last finished a batch or made rows durable."),
    _of_contigs("virnucpro_worker_nucleotides_left", "gauge", "nucleotides", lambda rank: rank.tokens_left,
                "Nucleotides of contigs that the worker was given and has not computed yet."),
    _of_works("virnucpro_progress_ratio", "gauge", "0 to 1", lambda run: run.progress,
                   "Share of the tokens, or of the nucleotides of contigs, that is done, 0 to 1."),
    _of_embeddings("virnucpro_tokens_left", "gauge", "tokens", lambda run: run.tokens_left,
                   "Planned tokens that are not computed yet."),
    _of_works("virnucpro_estimated_seconds_left", "gauge", "seconds", lambda run: run.seconds_left,
                   "Estimated seconds until the slowest rank has computed its share; absent while there is no rate."),
    Metric("virnucpro_stage_duration_seconds", "gauge", "seconds", STAGE, _stages(lambda stage: stage.seconds),
           "Seconds that a stage took, or has taken so far; model is empty for stages of the whole run."),
    Metric("virnucpro_stage_running", "gauge", "0 or 1", STAGE, _stages(lambda stage: not stage.is_over),
           "1 while a stage runs, 0 once it has ended."),
    _of_run("virnucpro_disk_free_bytes", "gauge", "bytes", lambda run: run.disk_free_bytes,
            "Bytes that may still be written to the file system of the output folder."),
    _of_run("virnucpro_disk_size_bytes", "gauge", "bytes", lambda run: run.disk_size_bytes,
            "Bytes of the file system of the output folder."),
    _of_gpus("virnucpro_gpu_utilization_ratio", "gauge", "0 to 1", lambda gpu: gpu.utilization,
             "Share of the driver's last sampling period in which the GPU computed, 0 to 1."),
    _of_gpus("virnucpro_gpu_memory_used_bytes", "gauge", "bytes", lambda gpu: gpu.memory_used_bytes,
             "Bytes of GPU memory in use, by any process."),
    _of_gpus("virnucpro_gpu_memory_total_bytes", "gauge", "bytes", lambda gpu: gpu.memory_total_bytes,
             "Bytes of GPU memory."),
    _of_gpus("virnucpro_gpu_power_watts", "gauge", "watts", lambda gpu: gpu.power_watts,
             "Watts that the GPU draws."),
    _of_gpus("virnucpro_gpu_temperature_celsius", "gauge", "degrees Celsius", lambda gpu: gpu.temperature_celsius,
             "Temperature of the GPU in degrees Celsius."),
    _of_gpus("virnucpro_gpu_sm_clock_hertz", "gauge", "hertz", lambda gpu: gpu.sm_clock_hertz,
             "Clock of the GPU's multiprocessors in hertz."),
    Metric("virnucpro_gpu_throttled", "gauge", "0 or 1", (*GPU, "reason"), _counts(_gpus, lambda gpu: gpu.throttle),
           "1 while the GPU is slowed down for this reason, else 0."),
    Metric("virnucpro_build_info", "gauge", "1", ("version", "torch", "python"), _build_info,
           "Versions that compute; always 1."),
    Metric("virnucpro_run_info", "gauge", "1",
           ("run_id", "model", "precision", "token_budget", "workers", *LABEL_VARIABLES), _run_info,
           "What is computed, how, and by which flow run and deployment of Prefect; always 1."),
)
HOST_METRICS = (
    *(replace(one, name=one.name.replace("virnucpro_gpu", "virnucpro_host_gpu"))
      for one in METRICS if one.labels[:len(GPU)] == GPU),
    _of_gpus("virnucpro_host_gpu_lost", "gauge", "0 or 1", lambda gpu: gpu.is_lost,
             "1 for a GPU that the exporter has seen and that does not answer now: lost, or its driver hangs; else 0."),
)
# fmt: on


class RunCollector(Collector):
    """
    Gives the metrics of a run; *snapshot* is called in the thread of the scrape.

    *names_run*: Each series has the label ``run_id``, which a scraped run gets from its target.
    """

    metrics: tuple[Metric, ...] = METRICS

    def __init__(self, snapshot: Callable[[], RunSnapshot], *, names_run: bool = False) -> None:
        self._snapshot, self._names_run = snapshot, names_run

    def describe(self) -> Iterable[MetricFamily]:
        """Return nothing: there may be no run yet."""
        return []

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every metric that has a series now."""
        snapshot = self._snapshot()
        for metric in self.metrics:
            samples = list(metric.read(snapshot))
            if self._names_run and "run_id" not in metric.labels:
                metric = replace(metric, labels=("run_id", *metric.labels))  # noqa: PLW2901
                samples = [((snapshot.run_id, *labels), value) for labels, value in samples]
            if samples:
                yield _family(metric, samples)


class HostCollector(RunCollector):
    """Gives the metrics of a host's GPUs; *samples* is called in the thread of the scrape."""

    metrics = HOST_METRICS

    def __init__(self, samples: Callable[[], tuple[GpuSample, ...]]) -> None:
        nothing = RunSnapshot(
            run_id="", output_dir="", started=0, now=0, stages=(), embeddings=(), gpus=(),
            disk_free_bytes=None, disk_size_bytes=None,
        )  # fmt: skip
        super().__init__(lambda: replace(nothing, gpus=samples()))


def _family(metric: Metric, samples: list[tuple[Labels, Value]]) -> MetricFamily:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, seconds in samples:
            assert not isinstance(seconds, float | int)
            histogram.add_metric(labels, _cumulative(seconds), seconds.total_s)
        return histogram
    family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = family_type(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        assert isinstance(value, float | int)
        family.add_metric(labels, float(value))
    return family


def _cumulative(seconds: BatchSeconds) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: upper bound, and batches up to it."""
    buckets, through = [], 0
    for bound, count in zip((*seconds.bounds, float("inf")), seconds.counts, strict=True):
        through += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(through)))
    return buckets
