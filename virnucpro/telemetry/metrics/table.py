"""
Every metric of a run, declared once: name, kind, unit, labels, help, and how a ``RunSnapshot`` gives its values.

``RunCollector`` reads them at each scrape. Names follow Prometheus: base units, ``_total`` on counters, and no label
whose values grow with the input.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric as MetricFamily

    from virnucpro.telemetry.snapshot import (
        BatchSeconds,
        EmbeddingSnapshot,
        GpuSample,
        RankSnapshot,
        RunSnapshot,
        WorkerCost,
    )

    Sample = tuple[tuple[str, ...], float | BatchSeconds]
    """Label values, and the value."""
    Reader = Callable[[RunSnapshot], Iterable[Sample]]

RANK = ("rank", "host", "device", "model")
MODEL = ("model",)
STAGE = ("stage", "model")
GPU = ("host", "device", "uuid")


@dataclass(frozen=True)
class Metric:
    name: str
    kind: str
    """counter, gauge or histogram."""
    unit: str
    labels: tuple[str, ...]
    help: str
    read: Reader
    """Label values and value of each series that has a value."""


def _of_ranks(value: Callable[[RankSnapshot], float | BatchSeconds | None]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        for embedding in snapshot.embeddings:
            for rank in embedding.ranks:
                if (number := value(rank)) is not None:
                    yield (str(rank.rank), rank.host, rank.device, embedding.model), number

    return read


def _restarts(snapshot: RunSnapshot) -> Iterator[Sample]:
    for embedding in snapshot.embeddings:
        for rank in embedding.ranks:
            for failure, number in rank.restarts.items():
                yield (str(rank.rank), rank.host, rank.device, embedding.model, failure), number


def _of_costs(value: Callable[[WorkerCost], float | None]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        for cost in snapshot.costs:
            if (number := value(cost)) is not None:
                yield (str(cost.rank), cost.host, cost.device, cost.model), number

    return read


def _of_embeddings(value: Callable[[EmbeddingSnapshot], float | None]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        for embedding in snapshot.embeddings:
            if (number := value(embedding)) is not None:
                yield (embedding.model,), number

    return read


def _by_reason(value: Callable[[EmbeddingSnapshot], Iterable[tuple[str, int]]]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        for embedding in snapshot.embeddings:
            for reason, number in value(embedding):
                yield (embedding.model, reason), number

    return read


def _of_gpus(value: Callable[[GpuSample], float | None]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        for gpu in snapshot.gpus:
            if (number := value(gpu)) is not None:
                yield (gpu.host, gpu.device, gpu.uuid), number

    return read


def _throttled(snapshot: RunSnapshot) -> Iterator[Sample]:
    for gpu in snapshot.gpus:
        for reason, is_so in gpu.throttle.items():
            yield (gpu.host, gpu.device, gpu.uuid, reason), float(is_so)


def _of_run(value: Callable[[RunSnapshot], float | None]) -> Reader:
    def read(snapshot: RunSnapshot) -> Iterator[Sample]:
        if (number := value(snapshot)) is not None:
            yield (), number

    return read


def _stage_seconds(snapshot: RunSnapshot) -> Iterator[Sample]:
    for stage in snapshot.stages:
        yield (stage.name, stage.model), stage.seconds


def _stage_running(snapshot: RunSnapshot) -> Iterator[Sample]:
    for stage in snapshot.stages:
        yield (stage.name, stage.model), float(not stage.is_over)


def _build_info(_: RunSnapshot) -> Iterator[Sample]:
    yield (version("virnucpro"), version("torch"), platform.python_version()), 1


def _run_info(snapshot: RunSnapshot) -> Iterator[Sample]:
    for embedding in snapshot.embeddings:
        budget, workers = str(embedding.token_budget), str(len(embedding.ranks))
        yield (snapshot.run_id, embedding.model, embedding.precision, budget, workers), 1


METRICS = (
    Metric(
        "virnucpro_sequences_total",
        "counter",
        "sequences",
        RANK,
        "Rows that are durable, each counted once: those of earlier starts of the run, copies of identical sequences "
        "and rows from the embedding cache included.",
        _of_ranks(lambda rank: rank.rows),
    ),
    Metric(
        "virnucpro_tokens_total",
        "counter",
        "tokens",
        RANK,
        "Tokens computed in this start of the run, special tokens included.",
        _of_ranks(lambda rank: rank.tokens),
    ),
    Metric(
        "virnucpro_batches_total",
        "counter",
        "batches",
        RANK,
        "Batches computed in this start of the run.",
        _of_ranks(lambda rank: rank.batches),
    ),
    Metric(
        "virnucpro_written_bytes_total",
        "counter",
        "bytes",
        RANK,
        "Bytes of results made durable in this start of the run.",
        _of_ranks(lambda rank: rank.written_bytes),
    ),
    Metric(
        "virnucpro_cache_hits_total",
        "counter",
        "sequences",
        RANK,
        "Sequences whose rows came from the embedding cache.",
        _of_ranks(lambda rank: rank.cache_hits),
    ),
    Metric(
        "virnucpro_oom_splits_total",
        "counter",
        "batches",
        RANK,
        "Batches computed in halves because they did not fit into memory.",
        _of_ranks(lambda rank: rank.oom_splits),
    ),
    Metric(
        "virnucpro_worker_restarts_total",
        "counter",
        "processes",
        (*RANK, "failure"),
        "Restarts of worker processes, by the class of the failure before.",
        _restarts,
    ),
    Metric(
        "virnucpro_worker_cpu_seconds_total",
        "counter",
        "seconds",
        RANK,
        "Processor seconds, user and system, of a rank's processes.",
        _of_costs(lambda cost: cost.cpu_s),
    ),
    Metric(
        "virnucpro_failed_sequences_total",
        "counter",
        "sequences",
        (*MODEL, "reason"),
        "Sequences, copies included, that got no row because computing them failed, by failure class.",
        _by_reason(lambda embedding: embedding.failed.items()),
    ),
    Metric(
        "virnucpro_quarantined_sequences_total",
        "counter",
        "sequences",
        (*MODEL, "reason"),
        "Sequences, copies included, that are not computed any more because they ended processes, by failure class.",
        _by_reason(lambda embedding: embedding.quarantined.items()),
    ),
    Metric(
        "virnucpro_deduplicated_sequences_total",
        "counter",
        "sequences",
        MODEL,
        "Records that take the row of an identical sequence.",
        _of_embeddings(lambda embedding: embedding.copies),
    ),
    Metric(
        "virnucpro_skipped_records_total",
        "counter",
        "records",
        MODEL,
        "Invalid records of the input that were skipped, as the run's settings allow.",
        _of_embeddings(lambda embedding: embedding.skipped),
    ),
    Metric(
        "virnucpro_batch_duration_seconds",
        "histogram",
        "seconds",
        RANK,
        "Seconds a batch took, from the end of the one before or its own start, whichever is later, to its rows.",
        _of_ranks(lambda rank: rank.batch_seconds if rank.batches else None),
    ),
    Metric(
        "virnucpro_packing_efficiency_ratio",
        "gauge",
        "0 to 1",
        RANK,
        "Tokens over token budget of the batches computed, 0 to 1.",
        _of_ranks(lambda rank: rank.packing_efficiency),
    ),
    Metric(
        "virnucpro_model_load_seconds",
        "gauge",
        "seconds",
        RANK,
        "Seconds that the rank's last process took to load the model.",
        _of_ranks(lambda rank: rank.model_load_s),
    ),
    Metric(
        "virnucpro_worker_up",
        "gauge",
        "0 or 1",
        RANK,
        "1 while the rank's process runs, 0 when it failed or was lost; absent while none is needed.",
        _of_ranks(lambda rank: None if rank.has_process is None else float(rank.has_process)),
    ),
    Metric(
        "virnucpro_worker_resident_memory_bytes",
        "gauge",
        "bytes",
        RANK,
        "Bytes of resident memory of the rank's process.",
        _of_costs(lambda cost: cost.resident_bytes),
    ),
    Metric(
        "virnucpro_worker_tokens_left",
        "gauge",
        "tokens",
        RANK,
        "Planned tokens that the rank was given and has not computed yet.",
        _of_ranks(lambda rank: rank.tokens_left),
    ),
    Metric(
        "virnucpro_last_progress_timestamp_seconds",
        "gauge",
        "Unix time",
        RANK,
        "Unix time at which the rank last finished a batch or made rows durable.",
        _of_ranks(lambda rank: rank.last_progress),
    ),
    Metric(
        "virnucpro_progress_ratio",
        "gauge",
        "0 to 1",
        MODEL,
        "Share of the plan's tokens that is done, 0 to 1.",
        _of_embeddings(lambda embedding: embedding.progress),
    ),
    Metric(
        "virnucpro_tokens_left",
        "gauge",
        "tokens",
        MODEL,
        "Planned tokens that are not computed yet.",
        _of_embeddings(lambda embedding: embedding.tokens_left),
    ),
    Metric(
        "virnucpro_estimated_seconds_left",
        "gauge",
        "seconds",
        MODEL,
        "Estimated seconds until the slowest rank has computed its share; absent while there is no rate.",
        _of_embeddings(lambda embedding: embedding.seconds_left),
    ),
    Metric(
        "virnucpro_stage_duration_seconds",
        "gauge",
        "seconds",
        STAGE,
        "Seconds that a stage took, or has taken so far; model is empty for stages of the whole run.",
        _stage_seconds,
    ),
    Metric(
        "virnucpro_stage_running",
        "gauge",
        "0 or 1",
        STAGE,
        "1 while a stage runs, 0 once it has ended.",
        _stage_running,
    ),
    Metric(
        "virnucpro_disk_free_bytes",
        "gauge",
        "bytes",
        (),
        "Bytes that may still be written to the file system of the output folder.",
        _of_run(lambda run: run.disk_free_bytes),
    ),
    Metric(
        "virnucpro_disk_size_bytes",
        "gauge",
        "bytes",
        (),
        "Bytes of the file system of the output folder.",
        _of_run(lambda run: run.disk_size_bytes),
    ),
    Metric(
        "virnucpro_gpu_utilization_ratio",
        "gauge",
        "0 to 1",
        GPU,
        "Share of the driver's last sampling period in which the GPU computed, 0 to 1.",
        _of_gpus(lambda gpu: gpu.utilization),
    ),
    Metric(
        "virnucpro_gpu_memory_used_bytes",
        "gauge",
        "bytes",
        GPU,
        "Bytes of GPU memory in use, by any process.",
        _of_gpus(lambda gpu: gpu.memory_used_bytes),
    ),
    Metric(
        "virnucpro_gpu_memory_total_bytes",
        "gauge",
        "bytes",
        GPU,
        "Bytes of GPU memory.",
        _of_gpus(lambda gpu: gpu.memory_total_bytes),
    ),
    Metric(
        "virnucpro_gpu_power_watts",
        "gauge",
        "watts",
        GPU,
        "Watts that the GPU draws.",
        _of_gpus(lambda gpu: gpu.power_watts),
    ),
    Metric(
        "virnucpro_gpu_temperature_celsius",
        "gauge",
        "degrees Celsius",
        GPU,
        "Temperature of the GPU in degrees Celsius.",
        _of_gpus(lambda gpu: gpu.temperature_celsius),
    ),
    Metric(
        "virnucpro_gpu_sm_clock_hertz",
        "gauge",
        "hertz",
        GPU,
        "Clock of the GPU's multiprocessors in hertz.",
        _of_gpus(lambda gpu: gpu.sm_clock_hertz),
    ),
    Metric(
        "virnucpro_gpu_throttled",
        "gauge",
        "0 or 1",
        (*GPU, "reason"),
        "1 while the GPU is slowed down for this reason, else 0.",
        _throttled,
    ),
    Metric(
        "virnucpro_build_info",
        "gauge",
        "1",
        ("version", "torch", "python"),
        "Versions that compute; always 1.",
        _build_info,
    ),
    Metric(
        "virnucpro_run_info",
        "gauge",
        "1",
        ("run_id", "model", "precision", "token_budget", "workers"),
        "What is computed, and how; always 1.",
        _run_info,
    ),
)


class RunCollector(Collector):
    """Gives the metrics of a run; *snapshot* is called in the thread of the scrape."""

    def __init__(self, snapshot: Callable[[], RunSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[MetricFamily]:
        """Return nothing: there may be no run yet."""
        return []

    def collect(self) -> Iterator[MetricFamily]:
        """Yield every metric that has a series now."""
        snapshot = self._snapshot()
        for metric in METRICS:
            samples = list(metric.read(snapshot))
            if samples:
                yield _family(metric, samples)


def _family(metric: Metric, samples: list[Sample]) -> MetricFamily:
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
        family.add_metric(labels, value)
    return family


def _cumulative(seconds: BatchSeconds) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: upper bound, and batches up to it."""
    buckets, through = [], 0
    for bound, count in zip((*seconds.bounds, float("inf")), seconds.counts, strict=True):
        through += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(through)))
    return buckets
