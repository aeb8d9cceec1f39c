"""Runs of real proteins, watched by a real Prometheus that finds them by itself."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.dashboard import panels, substituted
from tests.debian_programs import Prometheus, get, program, started
from tests.strategies import write_fasta
from virnucpro.run_layout import RunLayout
from virnucpro.store.reader import read_embeddings
from virnucpro.telemetry.show.status_file import read_status

pytestmark = [pytest.mark.slow, pytest.mark.data, pytest.mark.timeout(600)]

SCRAPE_INTERVAL = "250ms"
LIMIT_S = 240.0
CONFIG = REPOSITORY / "deployments" / "observability" / "prometheus.yml"
TARGETS = "/var/lib/virnucpro/targets"
CONTIGS = 10_000
"""Enough for some seconds of two fast workers."""
PREDICT = ("virnucpro", "predict", "--devices", "cpu", "--workers", "2", "--metrics-port", "0", "--json")
EMBED = ("virnucpro", "embed", "--devices", "cpu", "--workers", "2", "--metrics-port", "0", "--json")


@pytest.fixture(scope="module")
def watch(tmp_path_factory):
    """A Prometheus with the settings that we deliver, but looking often; and its folder of targets."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
    config["rule_files"] = [str(CONFIG.parent / path) for path in config["rule_files"]]
    text = json.dumps(config)
    assert TARGETS in text
    (folder / "prometheus.yml").write_text(text.replace(TARGETS, str(folder / "targets")))
    (folder / "targets").mkdir()
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    with started("prometheus", *arguments, folder=folder) as url:
        yield Prometheus(url), folder / "targets"


def proteins(data_dir, count, *, distinct):
    """The first *count* proteins of the real ones, by id."""
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as file:
        records = [record.split("\n", 1) for record in ("\n" + file.read()).split("\n>")[1:]]
    chosen, seen = [], set()
    for header, sequence in records:
        if not distinct or sequence not in seen:
            chosen.append((header.split()[0], sequence.replace("\n", "")))
        seen.add(sequence)
        if len(chosen) == count:
            return chosen
    raise AssertionError(count)


class Run:
    """A run that goes on, and what Prometheus knows of it."""

    def __init__(self, watch, command, out, **environ):
        self.prometheus, self.targets = watch
        self.out = out
        with out.with_name(out.name + ".stderr").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                cwd=REPOSITORY,
                env={**os.environ, **environ},
                stdout=subprocess.PIPE,
                stderr=said,
            )
        before = {path.name for path in self.targets.iterdir()}
        self.wait_until(lambda: {path.name for path in self.targets.glob("virnucpro-*.json")} - before)
        (name,) = {path.name for path in self.targets.glob("virnucpro-*.json")} - before
        (group,) = json.loads((self.targets / name).read_bytes())
        (self.address,), self.run_id = group["targets"], group["labels"]["run_id"]

    def series(self, metric):
        return f'{metric}{{run_id="{self.run_id}"}}'

    def number(self, expression):
        """A query of one number, with {s} for the run's sequences."""
        return self.prometheus.number(expression.replace("{s}", self.series("virnucpro_sequences_total")))

    def rows(self):
        """Rows that Prometheus has seen so far."""
        return self.number("sum({s})") or 0

    def wait_until(self, is_so):
        deadline_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert self.process.poll() is None, self.out.with_name(self.out.name + ".stderr").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def workers(self):
        """Process of each rank, as `virnucpro status` finds them."""
        saved = read_status(RunLayout(self.out).live_status)
        return {rank.rank: rank.pid for rank in saved.snapshot.embeddings[0].ranks}

    def result(self):
        """What the run says at its end."""
        said, _ = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == 0, self.out.with_name(self.out.name + ".stderr").read_text()
        return json.loads(said.splitlines()[-1])


def check_metrics(text):
    """`promtool check metrics`, which says nothing of what is as it should be."""
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def first_above(samples, limit):
    """Unix time of the first sample above *limit*."""
    return next(time_s for time_s, value in samples if value > limit)


def rows_in(out):
    with read_embeddings(out) as embeddings:
        return len(embeddings)


def test_a_run_of_two_workers_is_watched_from_its_start_to_its_last_row(watch, tmp_path, data_dir):
    fasta = tmp_path / "proteins.fasta"
    write_fasta(fasta, proteins(data_dir, 600, distinct=False))
    prometheus, targets = watch
    run = Run(watch, [*EMBED, "--metrics-targets", targets, fasta, "-o", tmp_path / "out"], tmp_path / "out")
    run.wait_until(lambda: run.number(f"sum({run.series('virnucpro_worker_up')})") == 2)
    run.wait_until(lambda: run.number(f"sum({run.series('virnucpro_tokens_total')})"))
    check_metrics(get(f"http://{run.address}/metrics"))
    result = run.result()

    assert list(targets.iterdir()) == []
    assert result["copies"] > 0
    assert run.number("sum(last_over_time({s}[10m]))") == rows_in(tmp_path / "out") == result["rows"] == 600
    textfile = (tmp_path / "out" / "metrics.prom").read_bytes()
    check_metrics(textfile)
    assert b"virnucpro_sequences_total{" in textfile

    # what a rank's line of the dashboard shows, over the time in which it computed; the summary's column tokens/s
    rate = own = 0.0
    for rank in result["ranks"]:
        tokens = f"virnucpro_tokens_total{{run_id='{run.run_id}',rank='{rank['rank']}'}}"
        samples = prometheus.samples(f"{tokens}[10m]")
        began, ended = first_above(samples, 0), first_above(samples, rank["tokens"] - 1)
        rate += prometheus.number(f"sum(rate({tokens}[{(ended - began) * 1000:.0f}ms]))", at=ended)
        own += rank["tokens_per_second"]
    print(f"{rate:.0f} tokens/s by PromQL, {own:.0f} by the run's own summary")
    assert rate == pytest.approx(own, rel=0.3)  # of samples a second apart, of some seconds on busy cores


def test_a_worker_that_is_killed_counts_one_restart_and_no_sequence_twice(watch, tmp_path, data_dir):
    fasta = tmp_path / "proteins.fasta"
    write_fasta(fasta, proteins(data_dir, 300, distinct=True))
    run = Run(watch, ["tests.watched_run", fasta, tmp_path / "out", watch[1]], tmp_path / "out")
    run.wait_until(lambda: run.rows() >= 30)
    os.kill(run.workers()[1], signal.SIGKILL)
    result = run.result()
    assert result["ranks"][1]["failures"] == ["died"]
    restarts = run.series("virnucpro_worker_restarts_total")
    (labels,) = run.prometheus.vector(f"last_over_time({restarts}[10m])")
    assert dict(labels).items() >= {"rank": "1", "device": "cpu", "failure": "died"}.items()
    assert run.number(f"sum(last_over_time({restarts}[10m]))") == 1
    assert run.number("sum(last_over_time({s}[10m]))") == rows_in(tmp_path / "out") == 300
    assert run.number("max_over_time(sum({s})[10m:250ms])") == 300
    assert run.number("sum(resets({s}[10m]))") == 0


@pytest.mark.long
def test_a_run_that_was_killed_shows_as_down_and_its_next_start_begins_at_the_durable_rows(watch, tmp_path, data_dir):
    fasta = tmp_path / "proteins.fasta"
    write_fasta(fasta, proteins(data_dir, 900, distinct=True))
    command = ["tests.watched_run", fasta, tmp_path / "out", watch[1]]
    killed = Run(watch, command, tmp_path / "out")
    killed.wait_until(lambda: killed.rows() >= 30)
    killed.process.kill()
    killed.process.communicate()
    seen = killed.number("sum(max_over_time({s}[10m]))")
    deadline_s = time.monotonic() + LIMIT_S
    while killed.number(killed.series("up")) != 0:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)

    run = Run(watch, command, tmp_path / "out")
    result = run.result()
    resumed = {rank["rank"]: rank["sequences_resumed"] for rank in result["ranks"]}
    assert sum(resumed.values()) >= seen
    first = run.prometheus.vector(f"min_over_time({run.series('virnucpro_sequences_total')}[10m])")
    least = {int(dict(labels)["rank"]): value for labels, value in first.items()}
    assert least.keys() == resumed.keys()
    assert all(least[rank] >= resumed[rank] for rank in resumed), "the first scrape may be late, but never of fewer"
    assert run.number("sum(last_over_time({s}[10m]))") == rows_in(tmp_path / "out") == 900
    assert list(watch[1].iterdir()) == []


def test_a_default_prediction_shows_contigs_and_nucleotides_of_each_worker_and_a_killed_one_starts_again(
    watch, tmp_path
):
    chooser = random.Random(5)
    lengths_nt = [int(chooser.lognormvariate(7.5, 1.0)) + 100 for _ in range(CONTIGS)]
    contigs = [(f"k{n}", "".join(chooser.choices("ACGT", k=nt))) for n, nt in enumerate(lengths_nt)]
    fasta, out = write_fasta(tmp_path / "contigs.fasta", contigs), tmp_path / "out"
    hangs = tmp_path / "hangs"  # the second worker, after some of its contigs, until it is killed
    command = [*PREDICT, "--metrics-targets", watch[1], fasta, "-o", out]
    run = Run(watch, command, out, VIRNUCPRO_FAILPOINT=f"gpu_worker_1/file.rename:20:hang:{hangs}")
    done, rate = run.series("virnucpro_contigs_total"), run.series("virnucpro_nucleotides_total")
    run.wait_until(lambda: len(run.prometheus.vector(f"{rate} > 0")) == 2)
    run.wait_until(lambda: run.number(f"sum(rate({rate}[2s]))"))
    check_metrics(get(f"http://{run.address}/metrics"))
    assert 0 < run.number(f"max({run.series('virnucpro_progress_ratio')})") < 1
    chosen = {"run_id": run.run_id, "model": ".+", "host": ".+", "device": ".+", "__rate_interval": "2s"}
    asked = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    of_contigs = {substituted(expr, **chosen) for expr in asked if "contigs_" in expr or "nucleotides_" in expr}
    run.wait_until(lambda: all(run.prometheus.vector(expr) for expr in of_contigs))
    run.wait_until(hangs.exists)
    os.kill(run.workers()[1], signal.SIGKILL)
    result = run.result()
    assert (result["state"], result["counts"]["contigs"]) == ("complete", CONTIGS)
    restarts = run.series("virnucpro_worker_restarts_total")
    (labels,) = run.prometheus.vector(f"last_over_time({restarts}[10m])")
    assert dict(labels).items() >= {"rank": "1", "device": "cpu", "failure": "died", "model": "composition"}.items()
    of_composition = done.replace("}", ',model="composition"}')
    assert run.number(f"sum(last_over_time({of_composition}[10m]))") == CONTIGS
    assert run.number(f"sum(resets({done}[10m]))") == 0
