"""What a run cost: nothing is lost, nothing counts twice, and all starts in a folder add up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest

from tests import fake_gpus, fakes
from tests.contig_runs import compute, works_in
from tests.fakes import faulty_config
from tests.faults.processes import make_proteins, wait_until
from tests.predictions import hash_prediction, make_contigs, predict, tables
from virnucpro.config import RunLimits
from virnucpro.cost import Cost, CostRow
from virnucpro.errors import SettingsChangedError
from virnucpro.pipeline.devices import CPU, Device
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.prediction import contig_run
from virnucpro.pipeline.run.interruption import mark_interrupted
from virnucpro.run_layout import RunLayout
from virnucpro.store.manifest import CHECKSUM, read_manifest, with_checksum
from virnucpro.telemetry.run_telemetry import RunTelemetry

PROCESS_S = 0.35
"""Processor seconds of a process that nobody counts: the interpreter before our code, and the system's end of it."""
RARE = (pytest.mark.slow, pytest.mark.long)
SAMPLED_S = 3.0
"""Most seconds that a process may run on after its last sample."""

TO_BE_KILLED = (
    "import sys, pathlib; from tests.unit.test_cost import Job;Job(pathlib.Path(sys.argv[1])).run(plan={'burn_s': 1.0})"
)


class Job:
    """Proteins for a model that burns processor time."""

    def __init__(self, folder):
        self.out, self.fasta, self.control = folder / "out", folder / "in.fasta", folder / "model.json"
        self.sequences = make_proteins(self.fasta, random.Random(4), 40)

    def config(self, **plan):
        return faulty_config(self.control, {"how": "none", **plan})

    def run(self, *, devices=(CPU, CPU), plan=None, **options):
        return run_embedding([self.fasta], self.out, self.config(**(plan or {})), list(devices), **options)

    @property
    def cost(self):
        return cost_in(self.out)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def cost_in(folder):
    """The cost in a ``run.json``, whose sum is that of its rows."""
    cost = json.loads((folder / "run.json").read_text())["cost"]
    for name in ("cpu_seconds", "gpu_seconds", "tokens", "nucleotides", "restarts"):
        assert cost["total"][name] == pytest.approx(sum(row[name] for row in cost["rows"]), abs=1e-6), name
    for name in ("peak_memory_bytes", "peak_gpu_memory_bytes"):
        assert cost["total"][name] == max((row[name] for row in cost["rows"]), default=0)
    keys = [(row["stage"], row["worker"], row["host"], row["device"]) for row in cost["rows"]]
    assert len(keys) == len(set(keys))
    return cost


class Tree:
    """The processor seconds of this process and all its children, while a block runs, as the system counts them."""

    def __enter__(self):
        self._before = os.times()
        return self

    def __exit__(self, *_):
        self.seconds = sum(os.times()[:4]) - sum(self._before[:4])

    def is_counted(self, cost, *, processes, killed=0):
        counted = cost["total"]["cpu_seconds"]
        missing = self.seconds - counted
        assert -0.1 <= missing <= PROCESS_S * processes + 0.3 + SAMPLED_S * killed, (counted, self.seconds)
        return True


def test_the_workers_and_stages_of_a_run_cost_what_the_system_says(job):
    with Tree() as tree:
        job.run(plan={"burn_s": 0.1})
    cost = job.cost
    assert tree.is_counted(cost, processes=2)
    stages = [row["stage"] for row in cost["rows"] if row["worker"] is None]
    assert sorted(stages) == sorted(["run", "index", "embed", "aggregate", "validate"])
    workers = {row["worker"]: row for row in cost["rows"] if row["worker"] is not None}
    assert workers.keys() == {0, 1}
    burnt_s = 0.1 * json.loads((job.out / "run.json").read_text())["plan"]["blocks"]
    assert sum(row["cpu_seconds"] for row in workers.values()) > burnt_s
    assert {row["stage"] for row in workers.values()} == {"embed"}
    assert cost["total"]["tokens"] == sum(len(sequence) + 2 for sequence in set(job.sequences.values()))
    assert min(row["peak_memory_bytes"] for row in workers.values()) > 50 << 20
    assert next(row for row in cost["rows"] if row["stage"] == "run")["peak_memory_bytes"] > 50 << 20
    assert (cost["total"]["gpu_seconds"], cost["total"]["nucleotides"], cost["total"]["restarts"]) == (0, 0, 0)
    prom = (job.out / "metrics.prom").read_text()
    by_stage = [line for line in prom.splitlines() if line.startswith("virnucpro_stage_cpu_seconds_total")]
    own_s = sum(row["cpu_seconds"] for row in cost["rows"] if row["worker"] is None)
    assert sum(float(line.rpartition(" ")[2]) for line in by_stage) == pytest.approx(own_s, abs=0.001)
    assert "virnucpro_worker_gpu_seconds_total{" not in prom


def test_a_worker_that_was_killed_counts_up_to_its_last_sample_and_with_those_that_follow(job):
    plan = {"rank": 0, "how": "sigkill", "before_batch": 5, "burn_s": 0.3, "failures_first": 1}
    with Tree() as tree:
        result = job.run(plan=plan)
    assert result.state == "complete"
    cost = job.cost
    assert tree.is_counted(cost, processes=3, killed=1)
    by_worker = {row["worker"]: row for row in cost["rows"] if row["worker"] is not None}
    assert (by_worker[0]["restarts"], by_worker[1]["restarts"], cost["total"]["restarts"]) == (1, 0, 1)


@pytest.mark.parametrize("state", ["failed", pytest.param("partial", marks=RARE), "stopped"])
def test_a_run_without_a_whole_result_has_its_cost(job, state):
    stop, plan, options = threading.Event(), {"burn_s": 0.05}, {}
    if state == "failed":
        plan |= {"while_loading": "raise"}
    elif state == "partial":
        poisoned = next(iter(job.sequences.values()))
        plan |= {"poison": {poisoned: "segfault"}}
    else:
        options = {"stop": stop, "on_message": lambda _, message: message.get("kind") == "progress" and stop.set()}
    with Tree() as tree:
        result = job.run(devices=[CPU], plan=plan, limits=RunLimits(attempts=2), **options)
    assert result.state == state == json.loads((job.out / "run.json").read_text())["state"]
    processes = result.ranks[0].attempts
    assert tree.is_counted(job.cost, processes=processes, killed=processes - 1 if state == "partial" else 0)
    (worker,) = [row for row in job.cost["rows"] if row["worker"] is not None]
    assert worker["cpu_seconds"] > 0.3, "a process that failed, or was stopped, says itself what it used"


def test_starts_in_a_folder_add_up_and_one_that_computes_nothing_changes_nothing(job):
    stop = threading.Event()
    with Tree() as tree:
        job.run(
            plan={"burn_s": 0.05},
            stop=stop,
            on_message=lambda _, message: message.get("kind") == "progress" and stop.set(),
        )
        first = job.cost
        seen = first["total"]["tokens"]
        assert seen > 0
        job.run(plan={"burn_s": 0.05})
    cost = job.cost
    assert tree.is_counted(cost, processes=4)
    assert cost["total"]["tokens"] == sum(len(sequence) + 2 for sequence in set(job.sequences.values()))
    assert {row["worker"] for row in cost["rows"] if row["stage"] == "embed"} == {None, 0, 1}
    before = job.out.joinpath("run.json").read_bytes()
    assert job.run(plan={"burn_s": 0.05}).ranks == ()
    with pytest.raises(SettingsChangedError):
        run_embedding([job.fasta], job.out, fakes.hash_config(max_residues=5), [CPU])
    assert job.out.joinpath("run.json").read_bytes() == before


def test_a_folder_of_an_earlier_version_is_continued_and_counts_from_then_on(job):
    stop = threading.Event()
    job.run(stop=stop, on_message=lambda _, message: message.get("kind") == "progress" and stop.set())
    values = json.loads((job.out / "run.json").read_text())
    first = values.pop("cost")["total"]["tokens"]
    del values[CHECKSUM]
    (job.out / "run.json").write_bytes(with_checksum(values))
    assert read_manifest(job.out / "run.json").cost == Cost()
    assert job.run().state == "complete"
    assert first + job.cost["total"]["tokens"] == sum(len(one) + 2 for one in set(job.sequences.values()))


@pytest.mark.parametrize("is_marked", [pytest.param(False, marks=RARE), True])
def test_a_start_that_was_killed_counts_up_to_its_last_status(job, is_marked):
    """*is_marked*: a hook notes that it was killed, before it is continued."""
    layout = RunLayout(job.out)
    run = subprocess.Popen([sys.executable, "-c", TO_BE_KILLED, job.out.parent], start_new_session=True)

    def seen():
        try:
            return json.loads(layout.live_status.read_text())["snapshot"]["cost"]
        except (FileNotFoundError, ValueError):
            return []

    wait_until(lambda: sum(row["cpu_seconds"] for row in seen() if row["worker"] is not None) > 4)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    killed = sum(row["cpu_seconds"] for row in seen())
    assert killed > 4
    if is_marked:
        mark_interrupted(job.out)
        assert not layout.live_status.exists()
        assert job.cost["total"]["cpu_seconds"] == pytest.approx(killed, abs=0.01)
    with Tree() as tree:
        job.run(plan={"burn_s": 0.0})
    assert job.cost["total"]["cpu_seconds"] == pytest.approx(killed + tree.seconds, abs=2 * PROCESS_S + 0.3)


def test_gpu_seconds_are_those_for_which_workers_held_one_from_its_probe_on_divided_by_those_that_share_it(job):
    began_s = time.monotonic()
    shared = [Device("3"), Device("3"), Device("5")]
    job.run(devices=shared, plan={"burn_s": 0.3}, worker_fn=fake_gpus.WORKER, probe_fn=fake_gpus.PROBE)
    passed_s = time.monotonic() - began_s
    workers = [row for row in job.cost["rows"] if row["worker"] is not None]
    assert [row["device"] for row in workers] == ["cuda:3", "cuda:3", "cuda:5"]
    ranks = json.loads((job.out / "run.json").read_text())["ranks"]
    held_s = [rank["seconds"] for rank in ranks]
    assert [row["gpu_seconds"] for row in workers] == pytest.approx(
        [held_s[0] / 2, held_s[1] / 2, held_s[2]], abs=0.002
    )
    assert max(held_s) < passed_s
    logs = [RunLayout(job.out).worker_log(rank).read_text().splitlines() for rank in (0, 2)]
    uses = map(json.loads, job.control.with_suffix(".devices").read_text().splitlines())
    began_s, ended_s = (use["time"] for use in uses if use["device"] == "5")
    assert held_s[2] > ended_s - began_s + 0.5, "the probe, which imports torch and loads the model, is part of it"
    assert all("model.kept" in "".join(lines) for lines in logs)
    assert "virnucpro_worker_gpu_seconds_total{" in (job.out / "metrics.prom").read_text()


def test_a_prediction_has_its_embedding_runs_and_stages_in_one_table(tmp_path):
    make_contigs(tmp_path / "in.fa")
    config = hash_prediction(tmp_path)
    with Tree() as tree:
        predict([tmp_path / "in.fa"], tmp_path / "out", config)
    cost = cost_in(tmp_path / "out")
    assert tree.is_counted(cost, processes=2)
    by_stage = {(row["stage"], row["worker"]): row for row in cost["rows"]}
    assert {("dna/embed", 0), ("protein/embed", 0), ("classify", None), ("contigs", None)} < by_stage.keys()
    assert by_stage["dna/embed", 0]["tokens"] > by_stage["protein/embed", 0]["tokens"] > 0
    assert by_stage["contigs", None]["nucleotides"] == cost["total"]["nucleotides"] > 0, "genes, found in this process"
    for part in ("dna", "protein"):
        assert cost_in(tmp_path / "out" / part) == asdict(Cost()) | {"rows": []}, "or a sum of files counts them twice"
    before = tables(tmp_path / "out"), (tmp_path / "out" / "run.json").read_bytes()
    predict([tmp_path / "in.fa"], tmp_path / "out", config)
    assert (tables(tmp_path / "out"), (tmp_path / "out" / "run.json").read_bytes()) == before


@pytest.mark.parametrize("is_here", [False, True])
def test_contigs_count_as_nucleotides_of_their_workers_or_of_the_run_itself(tmp_path, monkeypatch, is_here):
    if is_here:
        monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    telemetry = RunTelemetry()
    with telemetry.stage("composition"):
        run = compute(works_in(tmp_path), workers=2, telemetry=telemetry)
    rows = [row for row in telemetry.cost() if row.stage == "composition"]
    nt = sum(int(run.units.work_nt(work).sum()) for work in run.works)
    assert sum(row.nucleotides for row in rows) == nt
    assert [row.worker for row in rows] == ([None] if is_here else [None, 0, 1])
    assert all(row.cpu_seconds > 0.1 and not row.tokens for row in rows if is_here or row.worker is not None)


def test_seconds_of_stages_within_stages_count_once():
    telemetry = RunTelemetry()
    with telemetry.stage("outer"):
        burn(0.2)
        with telemetry.stage("inner"):
            burn(0.4)
        burn(0.1)
    found = {row.stage: row.cpu_seconds for row in telemetry.cost()}
    assert found["outer/inner"] == pytest.approx(0.4, abs=0.1)
    assert found["outer"] == pytest.approx(0.3, abs=0.1)


def test_sums_and_peaks():
    rows = [
        CostRow("embed", 0, "a", "cuda:0", cpu_seconds=1.25, tokens=5, peak_memory_bytes=7),
        CostRow("embed", 0, "a", "cuda:0", cpu_seconds=0.5, tokens=1, peak_memory_bytes=3, restarts=2),
        CostRow("embed", 0, "b", "cuda:0", gpu_seconds=3.0, peak_gpu_memory_bytes=9),
    ]
    cost = Cost.of(rows)
    assert cost.rows == (
        CostRow("embed", 0, "a", "cuda:0", cpu_seconds=1.75, tokens=6, peak_memory_bytes=7, restarts=2),
        rows[2],
    )
    assert (cost.total.cpu_seconds, cost.total.gpu_seconds, cost.total.tokens, cost.total.restarts) == (1.75, 3, 6, 2)
    assert (cost.total.peak_memory_bytes, cost.total.peak_gpu_memory_bytes) == (7, 9)
    assert Cost.of(cost.rows) == cost


def burn(seconds):
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass
