"""
Every question of the dashboard has an answer in a real Prometheus, and of the chosen run alone.

Half an hour of two runs with the same models, ranks and devices is put into its database as it would have been scraped.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from dataclasses import replace

import pytest

from tests.dashboard import OBSERVABILITY, panels, substituted, variables
from tests.debian_programs import Prometheus, program, started
from tests.snapshots import rank_snapshot, run_snapshot, stage_snapshot, work_snapshot
from virnucpro.cost import CostRow
from virnucpro.telemetry.metrics.table import RunCollector
from virnucpro.telemetry.snapshot import CONTIGS, NT, BatchSeconds, GpuSample, RankState

CHOSEN, OTHER, ENDED = "0123456789ab", "ba9876543210", "000000000000"
MINUTES = 30
STEP_S = 15
TOKENS_PER_SECOND = {CHOSEN: 1000, OTHER: 17}
"""Of rank 0; rank 1 has twice as many."""


def rank_at(rank, elapsed_s, now_s, run_id):
    batches = elapsed_s * (rank + 1) // 10
    return rank_snapshot(
        rank,
        host=f"node-{rank + 1}",
        state=RankState.COMPUTING if rank == 0 else RankState.FAILED,
        rows=500 + 3 * elapsed_s,
        tokens=TOKENS_PER_SECOND[run_id] * (rank + 1) * elapsed_s,
        batches=batches + 1,
        batch_seconds=BatchSeconds(bounds=(0.5, 1.0), counts=(batches, 1, 0), total_s=0.4 * batches + 0.7),
        restarts={"died": 1},
        last_progress=now_s - 2,
        cache_hits=5,
        cpu_s=1.5 * elapsed_s,
        resident_bytes=2**30,
    )


def contigs_at(elapsed_s, run_id):
    """Contigs of a run whose workers go on with its embedding."""
    ranks = [
        rank_snapshot(
            rank,
            host=f"node-{rank + 1}",
            device="cpu",
            state=RankState.COMPLETE,
            rows=100 + elapsed_s,
            tokens=TOKENS_PER_SECOND[run_id] * elapsed_s,
            batches=1,
            tokens_left=0,
            seconds_left=None,
            last_progress=None,
        )
        for rank in (0, 1)
    ]
    return work_snapshot(*ranks, model="composition", counts=CONTIGS, measure=NT)


def snapshot_at(elapsed_s, now_s, run_id):
    made = work_snapshot(
        *(rank_at(rank, elapsed_s, now_s, run_id) for rank in (0, 1)),
        failed={"application_error": 2},
        quarantined={"died": 1},
        copies=4,
        skipped=3,
    )
    gpus = [
        GpuSample(
            device=rank.device,
            host=rank.host,
            uuid=f"GPU-{rank.rank}",
            utilization=0.9 - 0.5 * rank.rank,
            memory_used_bytes=8 << 30,
            memory_total_bytes=80 << 30,
            power_watts=310.0,
            temperature_celsius=61,
            sm_clock_hertz=1.7e9,
            throttle={"power_cap": elapsed_s < 600, "hardware_thermal": False},
        )
        for rank in made.ranks
    ]
    stages = (
        stage_snapshot("fragments", is_over=True, seconds=5.0),
        stage_snapshot("embed", model=made.model, seconds=float(elapsed_s)),
    )
    peaks = {"peak_memory_bytes": 2**30, "peak_gpu_memory_bytes": 2**33}
    of_worker = CostRow("protein/embed", 0, "node-1", "cuda:0", gpu_seconds=float(elapsed_s), **peaks)
    return replace(
        run_snapshot(run_id=run_id, now=now_s),
        cost=(CostRow("protein/embed", None, "node-1", "cpu", cpu_seconds=0.2 * elapsed_s), of_worker),
        embeddings=(contigs_at(elapsed_s, run_id), made),
        gpus=tuple(gpus),
        stages=stages,
    )


def scraped(run_id, began_s):
    """Yield what Prometheus would have of a run, as lines of the OpenMetrics format with times."""
    for elapsed_s in range(0, MINUTES * 60 + 1, STEP_S):
        at = began_s + elapsed_s
        for family in RunCollector(lambda at=at, s=elapsed_s: snapshot_at(s, at, run_id)).collect():
            for sample in family.samples:
                labels = {"job": "virnucpro", "instance": "127.0.0.1:9", **sample.labels, "run_id": run_id}
                yield line(sample.name, labels, sample.value, at)
        alert = {"alertname": "VirnucproWorkerLost", "alertstate": "firing", "severity": "warning", "run_id": run_id}
        yield line("ALERTS", alert, 1, at)


def line(name, labels, value, at):
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value} {at}\n"


@pytest.fixture(scope="module")
def end_s():
    """When both runs were last seen: some time ago, so that the database takes it as history."""
    return int(time.time()) // 3600 * 3600 - 4 * 3600


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, end_s):
    folder = tmp_path_factory.mktemp("prometheus")
    metrics, began_s = folder / "scraped.om", end_s - MINUTES * 60
    with metrics.open("w") as file:
        for run_id in (CHOSEN, OTHER):
            file.writelines(scraped(run_id, began_s))
        labels = {"run_id": ENDED, "model": "virnucpro-tiny-protein"}
        file.writelines(line("virnucpro_run_info", labels, 1, began_s + s) for s in range(0, 600, STEP_S))
        file.write("# EOF\n")
    made = ["tsdb", "create-blocks-from", "--quiet", "openmetrics", str(metrics), str(folder / "data")]
    subprocess.run([program("promtool"), *made], check=True, capture_output=True, timeout=60)
    shutil.copy(OBSERVABILITY / "prometheus.yml", folder)
    shutil.copytree(OBSERVABILITY / "rules", folder / "rules")
    options = (f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}")
    with started("prometheus", *options, folder=folder) as url:
        yield Prometheus(url)


def questions():
    """Those about one run; those about the server have their answers in ``test_prefect_in_prometheus``."""
    asked = [(panel["title"], target["expr"]) for panel in panels() for target in panel.get("targets", [])]
    return [(title, expr) for title, expr in asked if "$run_id" in expr]


@pytest.mark.parametrize(("title", "expr"), questions())
def test_every_question_of_the_dashboard_is_answered_for_the_chosen_run_alone(prometheus, end_s, title, expr):
    answer = prometheus.vector(substituted(expr), at=end_s)
    assert answer, f"{title} shows nothing"
    assert not any(math.isnan(value) for value in answer.values())
    assert {dict(labels).get("run_id", CHOSEN) for labels in answer} == {CHOSEN}
    assert not prometheus.vector(substituted(expr, run_id="ffffffffffff"), at=end_s)


def test_the_figures_are_those_of_the_chosen_run(prometheus, end_s):
    def shown(title):
        """Return label values -> value of a panel's first question."""
        expr = next(expr for name, expr in questions() if name == title)
        found = prometheus.vector(substituted(expr), at=end_s)
        return {
            tuple(value for key, value in labels if key in {"device", "model"}): value
            for labels, value in found.items()
        }

    assert shown("Tokens per second") == pytest.approx({("cuda:0",): 1000, ("cuda:1",): 2000})
    assert shown("Sequences per second") == pytest.approx({("cuda:0",): 3, ("cuda:1",): 3})
    assert shown("Contigs per second, by worker") == pytest.approx({("composition",): 1})
    assert shown("Rows, contigs") == {("virnucpro-tiny-protein",): 2 * (500 + 3 * 60 * MINUTES)}
    assert shown("$device") == pytest.approx({("cuda:0",): 0.9, ("cuda:1",): 0.4})
    assert shown("Done at") == {("virnucpro-tiny-protein",): (end_s + 8.0) * 1000}
    assert shown("Time left") == {("virnucpro-tiny-protein",): 8.0}
    assert shown("Workers")[()] == 1
    assert set(shown("Processor").values()) == {1.5}
    assert shown("Throttling") == {("cuda:0",): 0, ("cuda:1",): 0}


def test_the_runs_to_choose_from_are_all_there_those_seen_last_first(prometheus, end_s):
    variable = next(each for each in variables() if each["name"] == "run_id")
    question = substituted(variable["query"].removeprefix("query_result(").removesuffix(")"))
    runs = {dict(labels)["run_id"]: value for labels, value in prometheus.vector(question, at=end_s + 60).items()}
    assert runs == {CHOSEN: end_s, OTHER: end_s, ENDED: end_s - MINUTES * 60 + 600 - STEP_S}
    assert list(runs)[-1] == ENDED
