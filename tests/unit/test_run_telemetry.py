"""Everything that shows a run, put together: what it leaves, and that nothing of it can harm the run."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request

import h5py
import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from tests.fakes import hash_config
from tests.strategies import write_fasta
from virnucpro.errors import ConfigurationError, StoppedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.run_layout import RunLayout
from virnucpro.telemetry.metrics.exposition import LONGEST_PATIENCE_S, SCRAPER_HEADER, MetricsServer
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.run_telemetry import RunTelemetry

RECORDS = [("a", "MKVL"), ("b", "MKVLW"), ("c", "MKVL"), ("d", "ACDEFGHIKL")]
"""Four rows, of which one is a copy."""


class Seen:
    """A view that remembers."""

    def __init__(self):
        self.snapshots, self.said, self.closings = [], [], 0

    def update(self, snapshot):
        self.snapshots.append(snapshot)

    def say(self, text):
        self.said.append(text)

    def close(self):
        self.closings += 1


class Broken(Seen):
    def update(self, snapshot):
        super().update(snapshot)
        raise ZeroDivisionError("of the view")


@pytest.fixture
def fasta(tmp_path):
    return write_fasta(tmp_path / "in.fasta", RECORDS)


def embed(fasta, out, telemetry, **settings):
    with telemetry:
        return run_embedding([fasta], out, hash_config(**settings), [CPU], telemetry=telemetry)


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(text, name):
    return sum(value for (found, *_), value in samples(text).items() if found == name)


def test_a_run_leaves_its_last_figures_and_no_status(tmp_path, fasta):
    seen = Seen()
    result = embed(fasta, tmp_path / "out", RunTelemetry(views=[seen]))
    layout = RunLayout(tmp_path / "out")
    text = layout.metrics_textfile.read_text()
    with h5py.File(result.output_path) as file:
        assert total(text, "virnucpro_sequences_total") == file["embeddings"].shape[0] == 4
    assert total(text, "virnucpro_deduplicated_sequences_total") == 1
    assert total(text, "virnucpro_progress_ratio") == 1
    assert total(text, "virnucpro_stage_running") == 0
    assert not layout.live_status.exists()
    assert seen.closings == 1
    last = seen.snapshots[-1]
    assert [stage.name for stage in last.stages] == ["index", "embed", "aggregate", "validate"]
    assert set(result.stages_s) == {"index", "embed", "aggregate", "validate"}
    assert last.embedding.rows == 4
    again = embed(fasta, tmp_path / "out", RunTelemetry())
    assert not again.ranks, "it was complete"
    assert layout.metrics_textfile.read_text() == text


def test_textfiles_of_two_runs_share_no_series_so_that_one_folder_holds_both(tmp_path, fasta):
    texts = []
    for name in ("a", "b"):
        embed(fasta, tmp_path / name, RunTelemetry())
        texts.append(RunLayout(tmp_path / name).metrics_textfile.read_text())
    assert not samples(texts[0]).keys() & samples(texts[1]).keys()
    helps = {line for text in texts for line in text.splitlines() if line.startswith("# HELP")}
    names = {line.split()[2] for line in helps}
    assert len(helps) == len(names) > 10, "node_exporter refuses one name with two helps"


def test_a_run_that_continues_starts_at_the_rows_that_are_durable(tmp_path, fasta):
    stop, out = threading.Event(), tmp_path / "out"
    stop_after_first = lambda _, message: message.get("kind") == "progress" and stop.set()  # noqa: E731
    config = hash_config(token_budget=12, sequences_per_part=1)
    run_embedding([fasta], out, config, [CPU], on_message=stop_after_first, stop=stop)
    before = total((out / "metrics.prom").read_text(), "virnucpro_sequences_total")
    assert 0 < before < 4
    seen = Seen()
    with RunTelemetry(views=[seen]) as telemetry:
        run_embedding([fasta], out, config, [CPU], telemetry=telemetry)
    counts = [snapshot.embedding.ranks[0].rows for snapshot in seen.snapshots if snapshot.embedding]
    said = [count for count in counts if count is not None]
    assert min(said) >= before
    assert said[-1] == 4
    assert total((out / "metrics.prom").read_text(), "virnucpro_tokens_total") < sum(
        len(sequence) + 2 for _, sequence in RECORDS
    )


def test_metrics_are_served_while_the_run_goes_on_and_no_longer(tmp_path, fasta):
    targets, got = tmp_path / "targets", []

    class Reader(Seen):
        def update(self, snapshot):
            for path in targets.glob("*.json"):
                (target,) = json.loads(path.read_text())
                with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics") as answer:
                    got.append((target, answer.read().decode()))

    seen = Reader()
    result = embed(fasta, tmp_path / "out", RunTelemetry(MetricsOptions(port=0, targets_dir=str(targets)), [seen]))
    assert result.state == "complete"
    target, text = got[-1]
    assert total(text, "virnucpro_sequences_total") == 4
    run_info = next(key for key in samples(text) if key[0] == "virnucpro_run_info")
    assert ("run_id", target["labels"]["run_id"]) in run_info
    assert any(said.startswith(f"metrics: http://{target['targets'][0]}/") for said in seen.said)
    assert list(targets.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(target["targets"][0].split(":"), timeout=5)


def test_waiting_for_the_last_scrape_ends_with_a_signal_and_leaves_neither_target_nor_server(tmp_path):
    targets, out = tmp_path / "targets", tmp_path / "out"
    RunLayout(out).work_dir.mkdir(parents=True)

    def end_at_once(*_):
        raise SystemExit(130)

    def run():
        with RunTelemetry(MetricsOptions(port=0, targets_dir=str(targets))) as telemetry:
            with telemetry.running(RunLayout(out), "0123456789ab"):
                (target,) = json.loads(next(targets.iterdir()).read_text())
                asked.append(target["targets"][0])
                scrape = urllib.request.Request(f"http://{asked[0]}/metrics", headers={SCRAPER_HEADER: "10"})
                urllib.request.urlopen(scrape).close()
                while not telemetry._server.patience_s:  # its visit is noted after it has its answer
                    time.sleep(0.01)
            signal.setitimer(signal.ITIMER_REAL, 0.5)

    asked = []
    before = signal.signal(signal.SIGALRM, end_at_once)
    began_s = time.monotonic()
    try:
        with pytest.raises(SystemExit):
            run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0.5 <= time.monotonic() - began_s < LONGEST_PATIENCE_S
    assert list(targets.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(asked[0].split(":"), timeout=5)


def test_a_taken_port_is_a_warning_and_a_broken_view_harms_nothing(tmp_path, fasta):
    broken, seen = Broken(), Seen()
    with socket.socket() as holder, capture_logs() as logs:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = embed(fasta, tmp_path / "out", RunTelemetry(MetricsOptions(port=port), [broken, seen]))
    assert result.state == "complete"
    assert (len(broken.snapshots), broken.closings) == (1, 1)
    assert len(seen.snapshots) > 1
    first, second = [line for line in logs if line["log_level"] == "warning"]
    assert (first["event"], first["port"]) == ("metrics.not_served", port)
    assert (second["event"], second["reason"]) == ("telemetry.failed", "ZeroDivisionError: of the view")


def test_a_signal_that_comes_while_a_view_is_shown_ends_the_run(tmp_path, fasta):
    class Signalled(Seen):
        def close(self):
            raise StoppedError(signal.SIGTERM)

    with pytest.raises(StoppedError):
        embed(fasta, tmp_path / "out", RunTelemetry(views=[Signalled()]))


def test_targets_that_cannot_be_written_are_a_warning(tmp_path, fasta):
    (tmp_path / "targets").write_text("a file, no folder")
    options = MetricsOptions(port=0, targets_dir=str(tmp_path / "targets"))
    with capture_logs() as logs:
        result = embed(fasta, tmp_path / "out", RunTelemetry(options))
    assert result.state == "complete"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["metrics.no_target_file"]


def test_a_view_that_is_stuck_does_not_keep_the_run_from_ending(tmp_path, fasta, monkeypatch):
    monkeypatch.setattr("virnucpro.telemetry.run_telemetry._PATIENCE_S", 0.2)
    release = threading.Event()

    class Stuck(Seen):
        def update(self, snapshot):
            release.wait(60)

    began_s = time.monotonic()
    try:
        with RunTelemetry(views=[Stuck()]) as telemetry:
            result = run_embedding([fasta], tmp_path / "out", hash_config(), [CPU], telemetry=telemetry)
            assert result.state == "complete"
    finally:
        release.set()
    assert time.monotonic() - began_s < 45


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_the_last_scrape_and_nothing_else(tmp_path, monkeypatch, number):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    layout = RunLayout(tmp_path)
    seen = Seen()
    wait_for_scrape = MetricsServer.wait_for_scrape

    def told_while_it_waits(server, limit_s):
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        return wait_for_scrape(server, limit_s)

    monkeypatch.setattr(MetricsServer, "wait_for_scrape", told_while_it_waits)
    with RunTelemetry(MetricsOptions(port=0), [seen]) as telemetry:
        with telemetry.running(layout, "run"):
            while not seen.said:
                time.sleep(0.01)
            request = urllib.request.Request(seen.said[0].split()[1], headers={SCRAPER_HEADER: "10"})
            urllib.request.urlopen(request).close()
            while not telemetry._server.patience_s:  # its visit is noted after it has its answer
                time.sleep(0.01)
        began_s = time.monotonic()
    assert 0.1 < time.monotonic() - began_s < 25, "it waits 30 s for a scraper that has come once"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": -1},
        {"port": 70000},
        {"targets_dir": "/somewhere"},
        {"port": 0, "network": "10.1.0.0/33"},
        {"port": 0, "network": "node7"},
        {"pushgateway": "gateway:9091"},
    ],
)
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        MetricsOptions(**wrong)
