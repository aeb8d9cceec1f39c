"""What Prometheus is given of a run: every metric that is declared, as Prometheus wants it."""

from __future__ import annotations

import math
import subprocess

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.debian_programs import program
from tests.snapshots import rank_snapshot, run_snapshot, work_snapshot
from virnucpro.cost import CostRow
from virnucpro.telemetry.metrics.table import METRICS, RunCollector
from virnucpro.telemetry.snapshot import CONTIGS, NT, BatchSeconds, GpuSample, RankState

HOSTILE = 'a"} 1\nvirnucpro_sequences_total{rank="9"} 9\n# EOF\\\x1b[2J'


def exposed(snapshot):
    registry = CollectorRegistry()
    registry.register(RunCollector(lambda: snapshot))
    return registry


def series(families):
    """Name, labels and value of everything but buckets, whose bounds the two formats write differently."""
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return sorted((sample.name, sorted(sample.labels.items()), sample.value) for sample in samples)


def whole_snapshot():
    """One in which every metric has a value."""
    used = {"cpu_s": 30.0, "resident_bytes": 2**30}
    ranks = [rank_snapshot(0, restarts={"died": 2}, **used), rank_snapshot(1, state=RankState.FAILED, **used)]
    gpu = GpuSample(
        device="cuda:0",
        uuid="GPU-0",
        host="node-1",
        utilization=0.5,
        memory_used_bytes=1,
        memory_total_bytes=2,
        power_watts=300.5,
        temperature_celsius=60,
        sm_clock_hertz=1.98e9,
        throttle={"power_cap": True},
    )
    embedding = work_snapshot(*ranks, failed={"out_of_memory": 1}, quarantined={"died": 1})
    contigs = work_snapshot(rank_snapshot(device="cpu"), model="composition", counts=CONTIGS, measure=NT)
    own = CostRow("dna/embed", None, "node-1", "cpu", cpu_seconds=1.5, peak_memory_bytes=5)
    of_worker = CostRow("dna/embed", 0, "node-1", "cuda:0", gpu_seconds=2.5, peak_gpu_memory_bytes=7)
    return run_snapshot(*ranks, gpus=(gpu,), embeddings=(contigs, embedding), cost=(own, of_worker))


def test_every_metric_that_is_declared_is_exposed_with_its_kind_labels_and_help():
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(generate_latest(exposed(whole_snapshot())).decode())
    }
    assert families.keys() == {metric.name for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels), sample
            assert not sample.name.endswith("_created")


def test_promtool_finds_nothing_to_say_of_them():
    text = generate_latest(exposed(whole_snapshot()))
    check = [program("promtool"), "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    bad = subprocess.run(check, input=text.replace(b"_total", b"_count"), capture_output=True, timeout=60, check=False)
    assert bad.returncode != 0


def test_openmetrics_as_prometheus_asks_for_it_holds_the_same():
    registry = exposed(whole_snapshot())
    plain = text_string_to_metric_families(generate_latest(registry).decode())
    other = read_openmetrics(openmetrics.generate_latest(registry).decode())
    assert series(other) == series(plain)


def test_the_buckets_of_a_histogram_are_cumulative():
    rank = rank_snapshot(
        host="node-1",
        batches=10,
        batch_seconds=BatchSeconds(bounds=(0.25, 1.0, 10.0), counts=(1, 0, 4, 5), total_s=99.5),
    )
    value = exposed(run_snapshot(rank)).get_sample_value
    labels = {"rank": "0", "host": "node-1", "device": "cuda:0", "model": "virnucpro-tiny-protein"}
    name = "virnucpro_batch_duration_seconds"
    buckets = [value(f"{name}_bucket", {**labels, "le": bound}) for bound in ("0.25", "1.0", "10.0", "+Inf")]
    assert buckets == [1, 1, 5, 10]
    assert (value(f"{name}_count", labels), value(f"{name}_sum", labels)) == (10, 99.5)


@pytest.mark.parametrize("state", RankState)
def test_a_worker_is_up_while_its_process_runs_and_has_no_series_when_none_is_needed(state):
    labels = {"rank": "0", "host": "node-1", "device": "cuda:0", "model": "virnucpro-tiny-protein"}
    snapshot = run_snapshot(rank_snapshot(host="node-1", state=state))
    up = exposed(snapshot).get_sample_value("virnucpro_worker_up", labels)
    needless = {RankState.WAITING, RankState.COMPLETE, RankState.STOPPED}
    assert up == (None if state in needless else float(state not in {RankState.FAILED, RankState.LOST}))


def test_what_is_not_known_has_no_series():
    rank = rank_snapshot(rows=None, model_load_s=None, packing_efficiency=None, batches=0, last_progress=None)
    text = generate_latest(exposed(run_snapshot(rank))).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    unknown = ["sequences", "model_load_seconds", "packing_efficiency_ratio", "batch_duration_seconds"]
    assert not names & {f"virnucpro_{name}" for name in [*unknown, "last_progress_timestamp_seconds"]}
    assert "virnucpro_tokens" in names
    assert not any("gpu" in name for name in names)
    assert not any(math.isnan(s.value) for family in text_string_to_metric_families(text) for s in family.samples)


def test_a_label_with_quotes_and_line_ends_forges_no_series():
    rank = rank_snapshot(host=HOSTILE, device=HOSTILE)
    snapshot = run_snapshot(rank, embeddings=(work_snapshot(rank, model=HOSTILE),))
    text = generate_latest(exposed(snapshot)).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "virnucpro_sequences"]
    ((name, labels, value, *_),) = family.samples
    assert (name, labels, value) == (
        "virnucpro_sequences_total",
        {"rank": "0", "host": HOSTILE, "device": HOSTILE, "model": HOSTILE},
        150,
    )
    assert text.count("\nvirnucpro_sequences_total{") == 1
