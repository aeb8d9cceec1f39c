"""Runners by name, and calls on hosts of which some answer late, with hosts that are threads."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from prefect.logging import disable_run_logger
from prefect.states import Running
from prefect.task_runners import ThreadPoolTaskRunner

from flows.clusters import runners
from flows.clusters.cluster import Cluster
from flows.clusters.ray_cluster import show_token
from flows.clusters.runners import Runner, check_runner_allowed, runner_of
from virnucpro.errors import ClusterLostError, ConfigurationError, HostCheckError

LATE_S = 0.5


class Threads(Cluster):
    """A cluster whose hosts are threads: ``slow`` and ``other``, of which the first waits until it may go on."""

    engine = "threads"

    def __init__(self, pool, may_go_on):
        super().__init__(ThreadPoolTaskRunner(), 2, has_gpus=True, on_cpus=True)
        self.cancelled = []
        self.gpus_asked = set()
        self.scheduler_is_there = True
        self._pool, self._may_go_on = pool, may_go_on

    def is_there(self):
        return self.scheduler_is_there

    def _call_hosts(self, function, args, *, gpus):
        self.gpus_asked |= {gpus}
        self._calls = {
            "slow": self._pool.submit(lambda: self._may_go_on.wait(30) and function("slow", *args)),
            "other": self._pool.submit(function, "other", *args),
        }
        return self._calls

    def _is_over(self, call):
        return call.done()

    def _answer(self, call, host):
        return call.result()

    def _cancel(self, call):
        self.cancelled += [host for host, one in self._calls.items() if one is call]

    def _resources(self):
        return nullcontext()


@pytest.fixture
def may_go_on():
    return threading.Event()


@pytest.fixture
def cluster(may_go_on):
    with ThreadPoolExecutor() as pool, disable_run_logger():
        yield Threads(pool, may_go_on)
        may_go_on.set()


def ask(host, word):
    return f"{host} {word}"


def test_every_host_is_asked_without_taking_a_gpu(cluster, may_go_on):
    may_go_on.set()
    assert cluster.on_every_host(ask, "here", timeout_s=10) == ["slow here", "other here"]
    assert cluster.gpus_asked == {0}


def test_a_host_that_does_not_answer_in_time_is_named(cluster):
    with pytest.raises(ConfigurationError, match="slow did not answer"):
        cluster.on_every_host(ask, "here", timeout_s=LATE_S)
    assert "slow" in cluster.cancelled


def test_what_a_host_says_against_the_run_is_raised_at_once(cluster):
    def refuse(host):
        raise HostCheckError(host, "in.fasta", "is not there")

    began_s = time.monotonic()
    with pytest.raises(HostCheckError, match="host other cannot take part"):
        cluster.on_every_host(refuse, timeout_s=20)
    assert time.monotonic() - began_s < 10
    assert set(cluster.cancelled) == {"slow", "other"}


def test_a_host_whose_gpus_are_all_taken_is_left_out(cluster):
    assert cluster.on_a_gpu_of_every_host(ask, "probed", timeout_s=LATE_S) == ["other probed"]
    assert cluster.gpus_asked == {1}
    assert cluster.cancelled == ["slow"]


def test_where_all_gpus_are_taken_the_first_that_is_free_is_waited_for(cluster, may_go_on):
    waited = threading.Event()
    threading.Timer(3 * LATE_S, lambda: (waited.set(), may_go_on.set())).start()

    def probe(host):
        may_go_on.wait(30)
        return host

    assert set(cluster.on_a_gpu_of_every_host(probe, timeout_s=LATE_S)) == {"slow", "other"}
    assert waited.is_set()


@pytest.mark.parametrize("ask_them", ["on_every_host", "on_a_gpu_of_every_host"])
def test_a_scheduler_that_goes_while_hosts_are_asked_is_told_as_such_and_nobody_is_told_to_stop(cluster, ask_them):
    threading.Timer(LATE_S, lambda: setattr(cluster, "scheduler_is_there", False)).start()
    with pytest.raises(ClusterLostError, match="the scheduler of threads was lost"):
        getattr(cluster, ask_them)(ask, "here", timeout_s=20)
    assert cluster.cancelled == []


def test_of_a_cluster_that_is_gone_nothing_is_asked(cluster):
    class Future:
        wrapped_future = None

    cluster.scheduler_is_there = False
    assert not cluster.has_ended(Future())
    cluster.drop(Future())
    assert cluster.cancelled == []
    assert isinstance(cluster.result(Future()), ClusterLostError)
    for ask_it in (cluster.look, lambda: cluster.submit(None, {}), lambda: cluster.on_every_host(ask, timeout_s=1)):
        with pytest.raises(ClusterLostError):
            ask_it()


def test_ends_of_a_task_that_prefect_never_heard_of_are_errors_and_not_defects(cluster):
    class Unheard:
        def wait(self):
            pass

        @property
        def state(self):
            return Running()

    assert "RUNNING" in str(cluster.result(Unheard()))


@pytest.mark.parametrize(("address", "on_cpus", "warns"), [("h:1", False, 1), ("h:1", True, 0), ("", False, 0)])
def test_a_standing_cluster_without_gpus_computes_on_cpus_and_says_so(monkeypatch, caplog, address, on_cpus, warns):
    class OfCpus(Threads):
        def __init__(self):
            Cluster.__init__(self, ThreadPoolTaskRunner(), 2, has_gpus=False, on_cpus=on_cpus)

    monkeypatch.setattr(runners, "ray_cluster", lambda *_, **__: nullcontext(OfCpus()))
    monkeypatch.setattr(runners, "get_run_logger", logging.getLogger)
    with runners.started(Runner("ray", address), workers=0, on_cpus=on_cpus) as found:
        assert found.device_type == "cpu"
    assert caplog.text.count("declares no GPU") == warns


@pytest.mark.parametrize("name", ["ray", "dask", "threads"])
def test_a_runner_without_an_address_is_on_this_machine(name):
    assert runner_of(name) == Runner(name)


@pytest.mark.parametrize("name", ["rays", "ray://", "ray:x", "slurm", "threads://x", "dask://a b"])
def test_a_name_that_no_runner_has_is_refused(name):
    with pytest.raises(ConfigurationError, match="no runner is called"):
        runner_of(name)


@pytest.mark.parametrize(
    ("name", "setting", "is_deployed", "is_allowed"),
    [
        ("dask", None, True, True),
        ("dask://elsewhere:8786", None, False, True),
        ("dask://elsewhere:8786", None, True, False),
        ("dask://elsewhere:8786", "ray://head:10001, dask://slurm", True, False),
        ("dask://elsewhere:8786", "ray://head:10001", False, False),
        ("dask://slurm", "ray://head:10001, dask://slurm", True, True),
    ],
)
def test_a_run_of_a_deployment_uses_the_clusters_that_its_worker_names(
    name, setting, is_deployed, is_allowed, monkeypatch
):
    monkeypatch.delenv("VIRNUCPRO_RUNNERS", raising=False)
    if setting is not None:
        monkeypatch.setenv("VIRNUCPRO_RUNNERS", setting)
    if is_deployed:
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "6b5b9f0c")
    with nullcontext() if is_allowed else pytest.raises(ConfigurationError, match="dask://elsewhere:8786 is not one"):
        check_runner_allowed(name)


@pytest.mark.parametrize("where", ["home", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "nowhere"])
def test_rays_client_is_told_to_show_its_token_where_there_is_one(where, tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # put back at the end, also what is set below
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if where == "home":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    elif where != "nowhere":
        monkeypatch.setenv(where, "secret")
    show_token()
    assert os.environ.get("RAY_AUTH_MODE") == (None if where == "nowhere" else "token")


def test_who_has_switched_rays_tokens_off_keeps_them_off(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    show_token()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
