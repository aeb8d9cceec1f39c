"""Tasks of a cluster that end before the run does: which are submitted again, how often, and when."""

import logging
import random
import threading
import time
from collections import defaultdict
from contextlib import nullcontext

import pytest
from prefect.task_runners import ThreadPoolTaskRunner

from flows.clusters import cluster_embedding
from flows.clusters.cluster import Cluster
from flows.clusters.cluster_embedding import OnCluster
from tests import fakes
from tests.faults.processes import make_proteins
from virnucpro.config import RunLimits
from virnucpro.errors import HostCheckError
from virnucpro.pipeline.hosts.device_task import DeviceOutcome
from virnucpro.pipeline.hosts.host_run import device_tasks
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.work.unit_claims import UnitClaims, UnitSource, new_owner
from virnucpro.telemetry.embedding_telemetry import EmbeddingTelemetry
from virnucpro.telemetry.ranks import Rank

PAUSES_S = (0.1, 0.3)
NO_SHARE = HostCheckError("host-b", "/shared/run", "did not answer for 8 s: is it mounted?")


class Scripted(Cluster):
    """A cluster whose tasks end at once, as the script of their rank says: by an error, with an outcome, by working."""

    engine = "scripted"

    def __init__(self, **scripts):
        super().__init__(ThreadPoolTaskRunner(), len(scripts), has_gpus=False, on_cpus=True)
        self.submitted = defaultdict(list)
        self._scripts = [iter(script) for script in scripts.values()]

    def submit(self, _task, parameters):
        rank = parameters["rank"]
        self.submitted[rank].append(time.monotonic())
        return next(self._scripts[rank]), parameters["run"], rank

    def has_ended(self, future):
        return future[0] != "waits"

    def has_begun(self, future):
        return self.has_ended(future)

    def drop(self, _future):
        pass

    def result(self, future):
        script, run, rank = future
        if isinstance(script, Exception):
            return script
        if script == "works":
            claims = UnitClaims(UnitSource(run.layout.units(run.run_id).folder, new_owner()))
            for unit in claims.iter_now():
                claims.mark_durable(unit.blocks)
        state = {"works": "complete"}.get(script, script)
        failure = None if state == "complete" else "died"
        return DeviceOutcome(host="host-b", owner="", rank=Rank(rank=rank, device="cpu", state=state, failure=failure))

    def on_every_host(self, *_, **__):
        return ["host-b"]

    def _call_hosts(self, *_, **__):
        raise NotImplementedError

    _is_over = _answer = _cancel = _call_hosts

    def _resources(self):
        return nullcontext()


@pytest.fixture
def embed(tmp_path, monkeypatch):
    """Embed something on a cluster; return what has embedded it, and the error that ended it."""
    monkeypatch.setattr(cluster_embedding, "LATER_S", PAUSES_S)
    monkeypatch.setattr(cluster_embedding, "LOOK_S", 0.02)
    monkeypatch.setattr(cluster_embedding, "get_run_logger", logging.getLogger)
    make_proteins(tmp_path / "in.fasta", random.Random(3), 40)

    def embedded(cluster, attempts=3):
        fasta, devices = tmp_path / "in.fasta", device_tasks(cluster.slots, "cpu")
        run = prepare_run([fasta], tmp_path / "out", fakes.hash_config(), devices, run_id="abcdef012345")
        on_cluster = OnCluster(cluster, metrics=lambda: None)
        try:
            on_cluster.embed(run, RunLimits(attempts=attempts), EmbeddingTelemetry(run.facts()), threading.Event())
        except HostCheckError as error:
            return on_cluster, error
        return on_cluster, None

    return embedded


@pytest.mark.parametrize("lost", [NO_SHARE, RuntimeError("the engine lost it"), "stopped"])
def test_a_task_that_is_lost_is_submitted_again_after_a_pause(embed, lost):
    cluster = Scripted(task=[lost, "works"])
    on_cluster, error = embed(cluster)
    (outcome,) = on_cluster.outcomes()
    assert (outcome.state, error) == ("complete", None)
    first_s, second_s = cluster.submitted[0]
    assert second_s - first_s >= PAUSES_S[0]


def test_a_task_is_submitted_as_often_as_a_worker_is_started_and_then_the_first_problem_ends_the_run(embed):
    other = HostCheckError("host-b", "/shared/run", "is not there")
    cluster = Scripted(task=[NO_SHARE, other, other, "works"])
    on_cluster, error = embed(cluster)
    assert error is NO_SHARE
    (outcome,) = on_cluster.outcomes()
    assert (outcome.state, outcome.reason) == ("failed", str(other))
    first_s, second_s, third_s = cluster.submitted[0]
    assert second_s - first_s >= PAUSES_S[0]
    assert third_s - second_s >= PAUSES_S[1]


def test_a_run_that_starts_no_worker_again_submits_no_task_again(embed):
    cluster = Scripted(task=[NO_SHARE, "works"])
    assert embed(cluster, attempts=1)[1] is NO_SHARE
    assert len(cluster.submitted[0]) == 1


def test_a_task_whose_workers_have_used_up_their_attempts_is_not_submitted_again(embed):
    cluster = Scripted(task=["failed", "works"])
    on_cluster, error = embed(cluster)
    assert ([outcome.state for outcome in on_cluster.outcomes()], error) == (["failed"], None)
    assert len(cluster.submitted[0]) == 1


def test_once_all_is_done_a_lost_task_is_not_waited_for(embed, monkeypatch):
    monkeypatch.setattr(cluster_embedding, "LATER_S", (60.0,))
    cluster = Scripted(lost=[NO_SHARE], other=["works"])
    began_s = time.monotonic()
    on_cluster, error = embed(cluster)
    assert time.monotonic() - began_s < 30
    assert ([outcome.state for outcome in on_cluster.outcomes()], error) == (["failed", "complete"], None)


def test_who_stops_the_run_gets_no_task_submitted_again(embed, monkeypatch):
    cluster = Scripted(task=["waits", "works"])
    monkeypatch.setattr(cluster, "look", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(cluster, "has_ended", lambda _future: True)
    monkeypatch.setattr(cluster, "result", lambda _future: NO_SHARE)
    with pytest.raises(KeyboardInterrupt):
        embed(cluster)
    assert len(cluster.submitted[0]) == 1


def test_a_run_none_of_whose_tasks_has_begun_says_once_that_it_waits(embed, monkeypatch, caplog):
    monkeypatch.setattr(cluster_embedding, "NOTICE_S", 0.1)
    cluster = Scripted(task=["waits"])
    ended_s = time.monotonic() + 0.5
    monkeypatch.setattr(cluster, "has_ended", lambda _future: time.monotonic() > ended_s)
    monkeypatch.setattr(cluster, "result", lambda future: Scripted.result(cluster, ("works", *future[1:])))
    embed(cluster)
    (said,) = [record.message for record in caplog.records if "waiting" in record.message]
    assert said.startswith("waiting for a slot of the cluster: no task of this run computes yet")
