"""
Real clusters of two nodes with two logical GPUs each, which compute on CPUs: the bytes of a run on threads.

The nodes are hosts of their own (``tests.nodes``), the driver is a third. ``make clusters`` runs all of it on 20,000
proteins; with fewer it is part of ``make e2e``.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.clusters import ray_program
from tests.faults.processes import ROOT
from tests.nodes import network
from tests.prefect_service import prefect_service, started, wait_until
from virnucpro.run_layout import RunLayout
from virnucpro.this_host import HOST_NAME_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # that of the first test holds the fixtures, too

SLOTS = 2
"""Logical GPUs of a node."""
RUN_LIMIT_S = 1500.0
REFUSED_WITHIN_S = 10.0
"""What is promised of a host that sees something else."""


class Hosts:
    """Two nodes, and a Prefect server that they reach from where they are."""

    def __init__(self, place, service, folder):
        self.place = place
        self.nodes = place.nodes
        self.service = service
        self.folder = folder
        self.environ = {
            **service.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": "a-token-for-tests-only-of-some-length",
            "NO_PROXY": "*",
            "no_proxy": "*",
            "PYTHONPATH": str(ROOT),
        }

    @contextmanager
    def ray(self, *, sees=()):
        """A cluster of Ray on both nodes; yield its runner's name and what starts the second node again."""
        first, second = self.nodes
        ports = {"head": "6379", "client": "10001"} if self.place.is_real else {"head": "26379", "client": "26001"}
        slots = ["--num-cpus", str(SLOTS), "--num-gpus", str(SLOTS)]
        head = ["--head", "--node-ip-address", first.address, "--port", ports["head"], "--include-dashboard", "false"]
        other = ["--address", f"{first.address}:{ports['head']}", "--node-ip-address", second.address]
        with ExitStack() as stack:
            ray, temporary = stack.enter_context(ray_program())
            head += ["--ray-client-server-port", ports["client"], "--temp-dir", str(temporary)]
            self._begin(stack, first, [*ray, *slots, *head], says="Ray runtime started")

            def start_second():
                self._begin(stack, second, [*ray, *slots, *other], says="Ray runtime started", sees=sees)

            start_second()
            yield f"ray://{first.address}:{ports['client']}", start_second

    @contextmanager
    def dask(self, *, sees=()):
        """A scheduler of Dask where the driver is, and a worker on each node; yield as ``ray`` does."""
        first, second = self.nodes
        scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", self.place.address]
        told = self.folder / "scheduler.json"
        told.unlink(missing_ok=True)
        scheduler += ["--port", "0", "--no-dashboard", "--scheduler-file", str(told)]
        with ExitStack() as stack:
            log = self.folder / "scheduler.log"
            stack.enter_context(started(scheduler, log, cwd=self.folder, environ=self.environ))
            wait_until(lambda: told.exists() and told.read_text().endswith("}"), limit_s=60, log=log)
            address = json.loads(told.read_text())["address"]
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--no-dashboard"]
            worker += ["--nthreads", str(SLOTS), "--resources", f"GPU={SLOTS}", "--local-directory", str(self.folder)]

            def start(node, **options):
                self._begin(stack, node, [*worker, "--host", node.address], says="Registered to", **options)

            start(first)
            start(second, sees=sees)
            yield address.replace("tcp://", "dask://"), lambda: start(second)

    def _begin(self, stack, node, command, *, says, sees=()):
        log = self.folder / f"{node.name}-{time.monotonic_ns()}.log"
        environ = {**self.environ, "RAY_AUTH_MODE": "token"}
        stack.enter_context(node.run(command, log, environ, sees=sees))
        stack.callback(node.kill)
        wait_until(lambda: says in log.read_text(), limit_s=90, log=log)

    @contextmanager
    def command(self, fasta, out, *options):
        """``virnucpro embed`` on this machine; what it says is in ``stderr`` beside its folder."""
        command = [sys.executable, "-m", "virnucpro", "embed", str(fasta), "--output", str(out), "--devices", "cpu"]
        log = out.parent / "stderr"
        environ = {**self.environ, HOST_NAME_VARIABLE: "driver"}
        with started([*command, *options], log, cwd=out.parent, environ=environ) as process:
            process.log = log
            yield process


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with network("node-a", "node-b") as place:
        print(f"a network namespace for each node: {'yes' if place.is_real else 'no, this machine does not let us'}")
        folder = tmp_path_factory.mktemp("service")
        with prefect_service(folder, place.address) as service:
            yield Hosts(place, service, tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def proteins(examples_dir, data_dir, request):
    """The input: the examples, or as many real proteins as were asked for."""
    return {400: examples_dir / "proteins.fasta", 20_000: data_dir / "proteins" / "uniprot_20000.fasta.gz"}[
        request.config.getoption("--cluster-proteins")
    ]


@pytest.fixture(scope="module")
def expected(proteins, hosts, tmp_path_factory):
    """The bytes that a run without a cluster gives."""
    layout = RunLayout(tmp_path_factory.mktemp("threads") / "out")
    began_s = time.monotonic()
    with hosts.command(proteins, layout.output_dir, "--workers", "2") as run:
        assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
    print(f"threads: {time.monotonic() - began_s:.0f} s")
    return layout.embeddings.read_bytes()


def claimed_by(layout, node):
    """Return the owners on a node that have claimed something."""
    found = set()
    for units in layout.all_units_dir.glob("*"):
        for path in (units / "owners").glob("*"):
            with suppress(OSError, ValueError):
                if json.loads(path.read_text())["host"] == node.name:
                    found |= {path.name}
        claims = ""
        for path in (units / "claims").glob("*"):
            with suppress(OSError):  # it was given back meanwhile
                claims += path.read_text()
        found = {owner for owner in found if owner in claims}
    return found


def rows_done(layout):
    """Return how many parts are durable."""
    return len(list(layout.parts_dir.glob("*.h5"))) if layout.parts_dir.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_cluster_that_loses_a_node_and_gets_it_back_gives_the_bytes_of_threads(
    engine, hosts, proteins, expected, tmp_path
):
    layout = RunLayout(tmp_path / "out")
    second = hosts.nodes[1]
    with getattr(hosts, engine)() as (runner, start_second):
        began_s = time.monotonic()
        with hosts.command(proteins, layout.output_dir, "--runner", runner) as run:
            wait_until(
                lambda: run.poll() is not None or all(len(claimed_by(layout, node)) == SLOTS for node in hosts.nodes),
                limit_s=120,
                log=run.log,
            )
            if proteins.suffix == ".gz":  # the shorter run has rows at its end only
                wait_until(lambda: run.poll() is not None or rows_done(layout), limit_s=300, log=run.log)
            assert run.poll() is None, run.log.read_text()
            before = claimed_by(layout, second)
            second.kill()
            killed_s = time.monotonic()
            start_second()
            wait_until(lambda: run.poll() is not None or claimed_by(layout, second) - before, limit_s=300, log=run.log)
            took_part = bool(claimed_by(layout, second) - before)
            print(f"{engine}: the node that came back took part after {time.monotonic() - killed_s:.0f} s: {took_part}")
            assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
        print(f"{engine}: two nodes, one killed and started again: {time.monotonic() - began_s:.0f} s")
    assert layout.embeddings.read_bytes() == expected
    assert not [process for node in hosts.nodes for process in node.processes()]


@pytest.mark.parametrize("engine", ["dask", pytest.param("ray", marks=pytest.mark.long)])
def test_a_node_that_sees_another_input_or_a_folder_that_it_cannot_write_is_named_before_anything_is_embedded(
    engine, hosts, tmp_path
):
    fasta, other, open_dir, closed_dir = (tmp_path / name for name in ("in.fasta", "other.fasta", "open", "closed"))
    fasta.write_text(">a\nMKTAYIAKQR\n>b\nMKTAYIAKQRQISFVKSHF\n")
    other.write_text(">a\nMKTAYIAKQR\n>b\nMKTAYIAKQRQISFVKSHW\n")
    open_dir.mkdir()
    closed_dir.mkdir()
    with getattr(hosts, engine)(sees=[(fasta, other), (closed_dir, None)]) as (runner, _):
        for out, input_path, code, says in (
            (open_dir / "out", fasta, 78, f"{fasta}: its content is not that of the run's input"),
            (closed_dir / "out", other, 73, f"{closed_dir / 'out'}: cannot be written to"),
        ):
            layout = RunLayout(out)
            with hosts.command(input_path, out, "--runner", runner) as run:
                wait_until(lambda out=out: run.poll() is not None or any(out.rglob("units.json")), limit_s=120)
                began_s = time.monotonic()
                assert run.wait(60) == code, run.log.read_text()
                took_s = time.monotonic() - began_s
            print(f"{engine}: {says!r} after {took_s:.1f} s")
            assert hosts.nodes[1].name in run.log.read_text()
            assert says in run.log.read_text()
            assert took_s < 3 * REFUSED_WITHIN_S
            assert not rows_done(layout)
            assert not layout.worker_log(0).exists()
