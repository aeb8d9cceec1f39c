"""A run on a standing cluster of two hosts, each a Dask worker of another name, as a real Prometheus sees it."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack

import psutil
import pytest
import yaml

from tests.clusters import SlowRun, dask_scheduler, dask_workers, environment_of_commands, rows_done, wait_until
from tests.debian_programs import Prometheus, started
from tests.e2e.test_prometheus import CONFIG, SCRAPE_INTERVAL, TARGETS
from virnucpro.run_layout import RunLayout

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def prometheus(tmp_path):
    """One with the settings that we deliver, but looking often."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL}
    config["rule_files"] = [str(CONFIG.parent / path) for path in config["rule_files"]]
    (tmp_path / "targets").mkdir()
    (tmp_path / "prometheus.yml").write_text(json.dumps(config).replace(TARGETS, str(tmp_path / "targets")))
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=warn"]
    with started("prometheus", *arguments, folder=tmp_path) as url:
        yield Prometheus(url)


def test_prometheus_sees_the_workers_of_all_hosts_at_the_driver_and_a_killed_one_as_lost(tmp_path, prometheus):
    def hosts(query):
        """Host -> value of a series a host."""
        return {dict(labels).get("host", ""): value for labels, value in prometheus.vector(query).items()}

    environment = environment_of_commands(tmp_path / "prefect")
    layout, targets = RunLayout(tmp_path / "run" / "out"), tmp_path / "targets"
    with ExitStack() as stack:
        _, address = dask_scheduler(stack, tmp_path, environment)
        names = ("node-1", "node-2")
        environments = [{**environment, "VIRNUCPRO_HOST_NAME": name} for name in names]
        workers = dict(zip(names, dask_workers(stack, environments, address, tmp_path), strict=True))
        slow = SlowRun.made(tmp_path)  # else all may be computed before the host is killed
        options = ("--runner", f"dask://{address}", "--metrics-targets", str(targets))
        run = stack.enter_context(slow.on(environment, layout.output_dir, *options))
        wait_until(lambda: hosts("virnucpro_worker_resident_memory_bytes").keys() == workers.keys(), seconds=120)
        wait_until(lambda: hosts("virnucpro_worker_tokens_left").keys() >= workers.keys(), seconds=60)
        assert list(prometheus.vector('up{job="virnucpro"}').values()) == [1], "one target a run"
        wait_until(lambda: rows_done(layout), seconds=120)
        below = [child for one in workers.values() for child in psutil.Process(one.pid).children(recursive=True)]
        servers = [child for child in below if "uvicorn" in " ".join(child.cmdline())]
        assert not servers, "a host has a Prefect server of its own"
        workers["node-1"].kill()
        wait_until(lambda: hosts("virnucpro_worker_up") == {"node-1": 0, "node-2": 1}, seconds=60)
        assert run.wait(300) == 0, (tmp_path / "run" / "stderr").read_text()
    assert list(targets.iterdir()) == []
    time.sleep(1)
    by_rank = "max by (rank) (last_over_time(virnucpro_sequences_total[10m]))"
    assert prometheus.number(f"sum({by_rank})") == json.loads(layout.manifest.read_text())["counts"]["rows"]
