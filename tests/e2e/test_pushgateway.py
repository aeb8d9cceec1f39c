"""What a real Pushgateway keeps of runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram

from tests.debian_programs import get, started
from tests.strategies import write_fasta
from virnucpro.telemetry.metrics import pushgateway
from virnucpro.telemetry.metrics.pushgateway import Pushgateway

pytestmark = pytest.mark.slow


def a_gateway(folder):
    """A gateway that keeps what it holds in memory; Debian's keeps it in /var/lib otherwise."""
    return started("prometheus-pushgateway", "--persistence.file=", folder=folder)


def groups(url):
    """What the gateway holds: run -> value."""
    listed = json.loads(get(f"{url}/api/v1/metrics"))["data"]
    for group in listed:
        assert group["labels"]["instance"] == socket.gethostname()
        assert group["labels"]["job"] == "virnucpro"
    return {group["labels"]["run_id"]: float(group["answer"]["metrics"][0]["value"]) for group in listed}


def test_a_real_gateway_keeps_the_last_push_of_each_run_until_it_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    registry = CollectorRegistry()
    answer = Gauge("answer", 'With a quote " and a\nline.', ["who"], registry=registry)
    with a_gateway(tmp_path) as url:
        told = []
        runs = [Pushgateway(url, registry, run_id) for run_id in ("first", "second")]
        for number, run in enumerate(runs):
            answer.labels('a"b\nc').set(number)
            run.start(told.append)
            run.stop()
        assert groups(url) == {"first": 0, "second": 1}
        runs[1].remove_forgotten()
        assert groups(url) == {"first": 0, "second": 1}  # both were pushed a moment ago
        monkeypatch.setattr(pushgateway, "FORGOTTEN_S", -60)
        Pushgateway(url, registry, "third").remove_forgotten()
        assert groups(url) == {}
        assert told == []


def test_what_a_real_gateway_refuses_is_told_in_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    registry = CollectorRegistry()
    Gauge("answer", "What it is.", registry=registry).set(42)
    other = CollectorRegistry()
    Histogram("answer", "Another kind of thing under the same name.", registry=other)
    with a_gateway(tmp_path) as url:
        assert Pushgateway(url, registry, "first").push() is None
        problem = Pushgateway(url, other, "second").push()
    assert problem is not None
    assert problem.startswith(f"the pushgateway {url} refused the metrics: 400 pushed metrics are invalid or inconsis")


def test_a_whole_run_is_at_the_gateway_when_it_has_ended(tmp_path):
    fasta = tmp_path / "proteins.fasta"
    write_fasta(fasta, [(f"p{number}", "MKV" * (number + 1)) for number in range(5)])
    with a_gateway(tmp_path) as url:
        command = [sys.executable, "-m", "virnucpro", "embed", fasta, "-o", tmp_path / "out", "--devices", "cpu"]
        environ = {**os.environ, "no_proxy": "127.0.0.1", "VIRNUCPRO_PUSHGATEWAY": url}
        done = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=True)
        (run,) = json.loads(get(f"{url}/api/v1/metrics"))["data"]
    assert "metrics.not_pushed" not in done.stderr
    (rows,) = run["virnucpro_sequences_total"]["metrics"]
    assert rows["value"] == "5"
    assert rows["labels"].items() >= {"rank": "0", "device": "cpu", "run_id": run["labels"]["run_id"]}.items()
    (seconds,) = run["virnucpro_batch_duration_seconds"]["metrics"]
    assert seconds["count"] == "1"
    stages = run["virnucpro_stage_running"]["metrics"]
    assert {stage["labels"]["stage"]: stage["value"] for stage in stages}.items() >= {"embed": "0"}.items()
