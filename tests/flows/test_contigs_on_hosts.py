"""Work on contigs by hosts of a cluster: real processes of unit workers, whose engine is played by threads."""

from __future__ import annotations

import logging
from contextlib import contextmanager

import pytest

from flows.clusters import engine, on_cluster
from flows.clusters.on_cluster import OnCluster
from tests.contig_runs import RUN_ID, compute, works_in
from tests.flows.test_on_cluster import Threads, Workers
from tests.strategies import edit_manifest
from tests.unit.test_composition import POISON
from virnucpro import durable
from virnucpro.config import RunLimits, computing_versions
from virnucpro.errors import HostCheckError
from virnucpro.pipeline.hosts.unit_worker import UnitWorker
from virnucpro.pipeline.prediction import contig_run
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.manifest import PredictionManifest
from virnucpro.telemetry.run_telemetry import RunTelemetry

POISONED = "tests.unit.test_composition:worker_with_poison"


class Hosts(Workers):
    """A unit worker a slot, each called from a thread."""

    def __init__(self, run, limits, number, worker_fn):
        self.all = [UnitWorker(run, rank, limits, worker_fn=worker_fn) for rank in range(number)]
        super().__init__(number, lambda rank, unit, _: self.all[rank].compute(unit))

    def say(self, rank, *messages):
        """Nothing: the unit workers do."""

    def messages(self):
        return [entry for worker in self.all for entry in worker.messages()]

    def stop(self):
        for worker in self.all:
            worker.close(at_once=True)

    def close(self):
        for worker in self.all:
            worker.close()
        super().close()


class Cluster(Threads):
    def __init__(self, *, worker_fn=None):
        super().__init__(slots=2)
        self._worker_fn, self.hosts = worker_fn, None

    @contextmanager
    def unit_workers(self, run, limits):
        self.hosts = Hosts(run, limits, self.slots_now, self._worker_fn)
        try:
            yield self.hosts
        finally:
            self.hosts.close()


@pytest.fixture
def works(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cluster, "LOOK_S", 0.01)
    for module in (on_cluster, engine):
        monkeypatch.setattr(module, "get_run_logger", logging.getLogger)
    works = works_in(tmp_path)
    layout = works[0].layout
    versions = computing_versions()
    about = {
        "sequences": "contigs",
        "output_settings": {},
        "models": {},
        "fingerprint": "",
        "outputs": [],
        "stages": {},
    }
    manifest = PredictionManifest.begin(RUN_ID, inputs=[], settings=versions, devices=[], **about)
    manifest.write(layout.manifest)
    with RunLock(layout.lock, run_id=RUN_ID):
        yield works


def scores_of(works):
    layout = works[0].layout
    return layout.composition_scores.read_bytes(), layout.composition_windows.read_bytes()


def test_hosts_compute_the_units_of_each_kind_with_the_bytes_of_one_machine_and_show_their_workers(works):
    compute(works, workers=1)
    expected = scores_of(works)
    durable.remove_tree(works[0].layout.contig_parts)
    cluster, telemetry = Cluster(), RunTelemetry()
    run = compute(works, executor=OnCluster(cluster), telemetry=telemetry)
    assert scores_of(works) == expected
    assert run.counts["searched"] > 0
    assert len(cluster.hosts.units) > 4
    (shown,) = telemetry.snapshot().embeddings
    assert (shown.counts, shown.rows, shown.tokens_left) == ("contigs", run.counts["scored"], 0)
    assert [rank.state for rank in shown.ranks[:2]] == ["complete"] * 2
    assert all(rank.host and rank.batches for rank in shown.ranks[:2])


def test_what_is_durable_is_not_computed_again(works):
    compute(works, workers=2)
    units = sorted(works[0].layout.contig_parts.iterdir())
    expected, kept = scores_of(works), units[1:]
    durable.remove(units[0])
    before = {path: path.stat().st_mtime_ns for path in kept}
    cluster = Cluster()
    compute(works, workers=2, executor=OnCluster(cluster))
    assert scores_of(works) == expected
    assert len(cluster.hosts.units) == 1
    assert {path: path.stat().st_mtime_ns for path in kept} == before


@pytest.mark.slow
@pytest.mark.long
def test_a_contig_that_ends_every_worker_costs_its_own_score_only(works):
    compute(works, workers=1)
    (expected, _), number = scores_of(works), 4 * POISON
    durable.remove_tree(works[0].layout.contig_parts)
    cluster = Cluster(worker_fn=POISONED)
    run = compute(works[:1], executor=OnCluster(cluster), limits=RunLimits(attempts=3))
    assert list(run.quarantined) == [POISON]
    assert run.quarantined[POISON][0] == "died"
    scores, _ = scores_of(works)
    assert scores[number : number + 4] != expected[number : number + 4]
    again = compute(works, executor=OnCluster(Cluster()))
    assert again.quarantined == {}
    assert scores_of(works)[0] == expected


def test_hosts_with_other_versions_are_refused(works):
    edit_manifest(works[0].layout.manifest, lambda values: values["settings"].update({"torch version": "1"}))
    with pytest.raises(HostCheckError, match="torch version is 1, but here"):
        compute(works, executor=OnCluster(Cluster()))


def test_little_is_computed_by_the_driver(works, monkeypatch):
    monkeypatch.setattr(contig_run, "HERE", 1 << 40)
    cluster = Cluster()
    run = compute(works, executor=OnCluster(cluster))
    assert cluster.hosts is None
    assert run.counts["scored"] == 60
