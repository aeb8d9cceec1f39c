"""What is found out before a cluster is asked for anything: SLURM that is not here, an API that a host cannot reach."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from flows.clusters.api_reach import check_api_reached
from flows.clusters.runners import runner_of, started
from tests.clusters import free_port
from virnucpro.errors import ConfigurationError


def refusal(name):
    with pytest.raises(ConfigurationError) as refused, started(runner_of(name), workers=2):
        pytest.fail("it started")
    return str(refused.value)


def test_a_host_without_slurm_is_named_by_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal("dask://slurm").startswith("no SLURM on this host: sbatch, squeue, scancel not found")


def test_slurm_without_settings_of_dask_jobqueue_leads_to_the_guide(monkeypatch, tmp_path):
    for program in ("sbatch", "squeue", "scancel"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "~/.config/dask/jobqueue.yaml, as deployments/clusters/slurm.md shows" in refusal("dask://slurm")


@contextmanager
def api_that_answers(status):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [200, 401])
def test_an_api_that_answers_is_reached_also_where_it_wants_a_password(status):
    with api_that_answers(status) as url:
        check_api_reached(url)


def test_a_host_that_does_not_reach_the_api_is_named_with_what_to_set(monkeypatch):
    monkeypatch.setenv("VIRNUCPRO_HOST_NAME", "node7")
    url = f"http://127.0.0.1:{free_port()}/api"
    with pytest.raises(
        ConfigurationError, match=rf"host node7 does not reach the Prefect API at {url} .*PREFECT_API_URL"
    ):
        check_api_reached(url)
