"""The timeline of a profiled run, with real processes: what the trace event format asks for, and what must be in it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from tests import fakes
from tests.predictions import hash_prediction, make_contigs, predict
from virnucpro import spans
from virnucpro.config import RunLimits
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.telemetry.snapshot import StageSnapshot
from virnucpro.telemetry.trace import merge_trace

METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
"""Metadata events of the format that we use, and the argument that each has."""


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(3)
    path = tmp_path / "proteins.fasta"
    letters = "ACDEFGHIKLMNPQRSTVWY"
    sequences = ("".join(chooser.choice(letters) for _ in range(chooser.randint(1, 40))) for _ in range(80))
    path.write_text("".join(f">p{number}\n{sequence}\n" for number, sequence in enumerate(sequences)))
    return path


@pytest.fixture
def folder(tmp_path):
    yield tmp_path / "spans"
    spans.disable()


def enable(folder, rank=0, attempt=1, model="tiny"):
    process = {"model": model, "rank": rank, "device": "cpu", "attempt": attempt}
    spans.enable(folder, process, block_of=lambda position: position)


def stage(name, started, seconds, *, depth=0, model="", is_over=True):
    times = {"started": started, "seconds": seconds, "elapsed": seconds}
    return StageSnapshot(name=name, model=model, **times, depth=depth, is_over=is_over)


class Trace:
    """A timeline that keeps to the format; lanes by process and name."""

    def __init__(self, path):
        whole = json.loads(path.read_bytes())
        assert whole["displayTimeUnit"] in {"ms", "ns"}
        self.processes, lane_of, orders = {}, {}, {}
        complete = []
        self.instants = []
        for event in whole["traceEvents"]:
            assert isinstance(event["name"], str)
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            if event["ph"] == "M":
                value = event["args"][METADATA[event["name"]]]
                if event["name"] == "process_name":
                    assert event["pid"] not in self.processes
                    self.processes[event["pid"]] = value
                elif event["name"] == "process_sort_index":
                    orders[event["pid"]] = value
                elif event["name"] == "thread_name":
                    assert event["tid"] not in lane_of, "a thread belongs to one process"
                    lane_of[event["tid"]] = (event["pid"], value)
            elif event["ph"] == "i":
                assert event["s"] in {"g", "p", "t"}
                self.instants.append(event)
            else:
                assert event["ph"] == "X"
                assert event["ts"] >= 0
                assert event["dur"] >= 0
                complete.append(event)
        number_of = {pid: number for number, pid in enumerate(sorted(self.processes, key=orders.__getitem__), start=1)}
        self.processes = {number: self.processes[pid] for pid, number in number_of.items()}
        """Processes, in the order in which they are shown."""
        self.lanes = defaultdict(list)
        for event in complete:
            process, lane = lane_of[event["tid"]]
            assert process == event["pid"]
            self.lanes[number_of[process], lane].append(event)
        for events in self.lanes.values():
            events.sort(key=lambda event: (event["ts"], event["dur"]))

    def assert_no_overlaps(self):
        for where, events in self.lanes.items():
            for before, after in pairwise(events):
                assert before["ts"] + before["dur"] <= after["ts"] + 0.001, where  # a nanosecond

    def of_lane(self, lane):
        return [event for (_, name), events in self.lanes.items() if name == lane for event in events]


def plan_of(layout, config):
    return make_plan(SequenceIndex.open(layout.index), config, device_type="cpu")


def test_the_timeline_of_two_workers_has_every_block_once_in_every_lane_of_a_cpu(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    config = fakes.hash_config(profile=True)
    began_ns = time.monotonic_ns()
    run_embedding([proteins], layout.output_dir, config, [CPU] * 2)
    wall_us = (time.monotonic_ns() - began_ns) / 1000
    plan = plan_of(layout, config)
    trace = Trace(layout.trace)
    trace.assert_no_overlaps()
    assert len(trace.processes) == 3
    assert [name.split(" (")[0] for name in trace.processes.values()] == [
        "run",
        "hash, rank 0, cpu",
        "hash, rank 1, cpu",
    ]
    for lane in (spans.READING, spans.TOKENISING, spans.PACKING, spans.COMPUTE):
        assert Counter(event["args"]["block"] for event in trace.of_lane(lane)) == Counter(range(len(plan))), lane
    computed = {event["args"]["block"]: event["args"] for event in trace.of_lane(spans.COMPUTE)}
    assert [computed[block]["tokens"] for block in range(len(plan))] == plan.tokens.tolist()
    assert sum(args["sequences"] for args in computed.values()) == len(plan.positions)
    assert sum(event["args"]["blocks"] for event in trace.of_lane(spans.WRITING)) == len(plan)
    assert len(trace.of_lane(spans.SEALING)) == 2
    assert [event["name"] for event in trace.lanes[2, spans.PREPARING]] == [
        "start process",
        "check what is done",
        "load model",
    ]
    assert [event["name"] for event in trace.lanes[1, "stages"]] == ["index", "embed", "aggregate", "validate"]
    for process in (2, 3):  # one thread: what it does in all lanes together is not more than the time there was
        spent_us = [event["dur"] for (of, _), events in trace.lanes.items() if of == process for event in events]
        assert sum(spent_us) < wall_us
    ends = [event["ts"] + event["dur"] for events in trace.lanes.values() for event in events]
    assert max(ends) <= began_ns / 1000 + wall_us + 10_000
    embed = trace.lanes[1, "stages"][1]
    for event in trace.of_lane(spans.COMPUTE):  # stages and spans are on one clock
        assert embed["ts"] - 20_000 <= event["ts"] <= event["ts"] + event["dur"] <= embed["ts"] + embed["dur"] + 20_000
    assert not layout.spans_dir.exists()
    assert not list(layout.output_dir.glob(".trace*"))


def test_the_rows_are_the_same_with_and_without_and_without_leaves_nothing(tmp_path, proteins):
    plain, profiled = RunLayout(tmp_path / "plain"), RunLayout(tmp_path / "profiled")
    enable(plain.spans_dir)  # as a profiled run that was killed leaves it
    spans.disable()
    run_embedding([proteins], plain.output_dir, fakes.hash_config(), [CPU])
    run_embedding([proteins], profiled.output_dir, fakes.hash_config(profile=True), [CPU])
    assert profiled.embeddings.read_bytes() == plain.embeddings.read_bytes()
    assert profiled.trace.exists()
    assert not plain.spans_dir.exists()
    assert not plain.trace.exists()


@pytest.mark.slow
def test_what_a_killed_worker_did_is_in_the_timeline_and_its_successor_stands_apart(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    faults = {"rank": 0, "how": "sigkill", "before_batch": 5}
    config = fakes.faulty_config(tmp_path / "faults.json", faults, profile=True)
    result = run_embedding([proteins], layout.output_dir, config, [CPU], limits=RunLimits(stop_grace_s=1.0))
    assert result.state == "complete"
    plan = plan_of(layout, config)
    trace = Trace(layout.trace)
    trace.assert_no_overlaps()
    pids = result.ranks[0].pids
    assert list(trace.processes.values())[1:] == [
        f"hash, rank 0, cpu (pid {pids[0]})",
        f"hash, rank 0, cpu, attempt 2 (pid {pids[1]})",
    ]
    of_the_first = [event["args"]["block"] for event in trace.lanes[2, spans.COMPUTE]]
    assert of_the_first == list(range(5)), "all that it had computed when it was killed"
    assert [event["args"]["block"] for event in trace.lanes[2, spans.READING]] == list(range(6))
    by_both = of_the_first + [event["args"]["block"] for event in trace.lanes[3, spans.COMPUTE]]
    assert set(by_both) == set(range(len(plan)))
    last_of_the_first = max(event["ts"] for event in trace.lanes[2, spans.COMPUTE])
    assert last_of_the_first < trace.lanes[3, spans.PREPARING][0]["ts"]


@pytest.mark.slow
def test_loader_processes_have_lanes_of_their_own(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    config = fakes.hash_config(profile=True, loader_processes=2)
    run_embedding([proteins], layout.output_dir, config, [CPU])
    plan = plan_of(layout, config)
    trace = Trace(layout.trace)
    trace.assert_no_overlaps()
    assert sorted(name.split(" (")[0] for name in trace.processes.values()) == [
        "hash, rank 0, cpu",
        "hash, rank 0, cpu, loader 0",
        "hash, rank 0, cpu, loader 1",
        "run",
    ]
    for lane in (spans.READING, spans.TOKENISING, spans.COMPUTE):
        assert Counter(event["args"]["block"] for event in trace.of_lane(lane)) == Counter(range(len(plan))), lane
    assert {name for (process, name) in trace.lanes if "loader" in trace.processes[process]} == {
        spans.READING,
        spans.TOKENISING,
        spans.PACKING,
    }


@pytest.mark.slow
def test_a_prediction_has_one_timeline_of_both_embedding_runs(tmp_path):
    make_contigs(tmp_path / "contigs.fasta")
    given = {"allow_empty": True, "profile": True}
    dna = fakes.hash_config(model_name="hash-dna", sequence_kind="DNA", max_residues=10**9, **given)
    config = hash_prediction(tmp_path, dna=dna, protein=fakes.hash_config(model_name="hash-protein", **given))
    layout = PredictionLayout(tmp_path / "out")
    predict([tmp_path / "contigs.fasta"], layout.output_dir, config)
    trace = Trace(layout.trace)
    trace.assert_no_overlaps()
    assert sorted(name.split(" (")[0] for name in trace.processes.values()) == [
        "hash-dna, rank 0, cpu",
        "hash-protein, rank 0, cpu",
        "run",
    ]
    stages = [event["name"] for event in trace.lanes[1, "stages"]]
    assert stages == ["index", "fragments", "dna", "protein", "classify", "contigs", "report"]
    within = [event["name"] for event in trace.lanes[1, "stages within"]]
    assert within == [*["index", "embed", "aggregate", "validate"] * 2, "aggregate_genes"]
    assert trace.lanes[2, spans.COMPUTE]
    assert trace.lanes[3, spans.COMPUTE]
    assert not RunLayout(layout.dna_dir).trace.exists()
    assert not RunLayout(layout.dna_dir).spans_dir.exists()


@pytest.mark.slow
def test_the_command_writes_the_timeline_when_it_is_asked_to(tmp_path, proteins):
    command = [sys.executable, "-m", "virnucpro", "embed", str(proteins), "-o", str(tmp_path / "out"), "--workers", "1"]
    done = subprocess.run([*command, "--profile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(Trace(tmp_path / "out" / "trace.json").of_lane(spans.COMPUTE)) == 1


def test_two_embedding_runs_are_told_apart_and_stages_within_others_have_lanes_of_their_own(tmp_path, folder):
    now = time.time()
    for label in ("dna", "protein"):
        enable(folder / label, model=label)
        with spans.span(spans.COMPUTE):
            time.sleep(0.001)
    spans.disable()
    stages = [
        stage("fragments", now - 3.0, 1.0),
        stage("dna", now - 2.0, 1.5),
        stage("index", now - 2.0, 0.5, model="tiny-dna", depth=1),
        stage("embed", now - 1.5000001, 0.9, model="tiny-dna", depth=1),
        stage("validate", now - 0.501, 0.001, model="tiny-dna", depth=1),
        stage("classify", now - 0.5000001, 0.5, is_over=False),
    ]
    merge_trace([folder / label for label in ("dna", "protein")], stages, tmp_path / "trace.json")
    trace = Trace(tmp_path / "trace.json")
    trace.assert_no_overlaps()
    assert sorted(name.split(" (")[0] for name in trace.processes.values()) == [
        "dna, rank 0, cpu",
        "protein, rank 0, cpu",
        "run",
    ]
    assert [event["name"] for event in trace.lanes[1, "stages"]] == ["fragments", "dna", "classify"]
    assert [event["name"] for event in trace.lanes[1, "stages within"]] == ["index", "embed", "validate"]
    assert trace.lanes[1, "stages within"][0]["args"] == {"model": "tiny-dna"}


def test_where_recording_ended_stands_in_the_timeline(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(spans, "MOST_SPANS", 3)
    enable(folder)
    for _ in range(6):
        with spans.span(spans.COMPUTE):
            pass
    spans.disable()
    merge_trace([folder], [], tmp_path / "trace.json")
    trace = Trace(tmp_path / "trace.json")
    assert len(trace.of_lane(spans.COMPUTE)) == 2
    (end,) = trace.instants
    assert (end["name"], end["args"]["why"]) == (
        "recording ends",
        "3 spans of this process are recorded, the limit",
    )
    assert end["ts"] >= trace.of_lane(spans.COMPUTE)[-1]["ts"]


@pytest.mark.parametrize("cut_bytes", [1, 10])
def test_a_line_that_was_cut_short_is_left_out(tmp_path, folder, cut_bytes):
    enable(folder)
    for block in range(3):
        with spans.span(spans.COMPUTE, block=block):
            pass
    spans.disable()
    enable(folder / "apart")  # a process that was killed while it wrote its first line
    spans.disable()
    (apart,) = (folder / "apart").iterdir()
    (folder / "process_1_1.jsonl").write_bytes(apart.read_bytes()[:20])
    path = max(folder.glob("process_*.jsonl"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-cut_bytes])
    merge_trace([folder], [], tmp_path / "trace.json")
    trace = Trace(tmp_path / "trace.json")
    assert len(trace.processes) == 2
    assert [event["args"]["block"] for event in trace.of_lane(spans.COMPUTE)] == [0, 1]


@pytest.mark.slow
def test_what_a_killed_run_has_measured_is_not_in_the_timeline_of_the_next(tmp_path, proteins):
    layout = RunLayout(tmp_path / "out")
    enable(layout.spans_dir, rank=7)
    spans.disable()
    run_embedding([proteins], layout.output_dir, fakes.hash_config(profile=True), [CPU])
    assert len(Trace(layout.trace).processes) == 2
    assert not any("rank 7" in name for name in Trace(layout.trace).processes.values())
