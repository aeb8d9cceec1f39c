"""
Real clusters of two nodes with two logical GPUs each, which compute on CPUs: the bytes of a run on threads.

The nodes are hosts of their own (``tests.nodes``), the driver is a third. ``make clusters`` runs all of it on 20,000
proteins; with fewer it is part of ``make e2e``.
"""

from __future__ import annotations

import gzip
import json
import subprocess
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
TAKES_WORK_WITHIN_S = 30.0
"""What is promised of a node that comes later."""
KILLED_FOR_S, KILLED_EVERY_S = 600.0, 60.0
"""Of the node that vanishes again and again."""


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
    def ray(self, *, sees=(), has_second=True):
        """A cluster of Ray; yield its runner's name and what starts the second node, which may be there already."""
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

            if has_second:
                start_second()
            yield f"ray://{first.address}:{ports['client']}", start_second

    @contextmanager
    def dask(self, *, sees=(), has_first=True, has_second=True):
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

            if has_first:
                start(first)
            if has_second:
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
def proteins(data_dir, tmp_path_factory, request):
    """The input: as many real proteins as were asked for."""
    number, path = request.config.getoption("--cluster-proteins"), data_dir / "proteins" / "uniprot_20000.fasta.gz"
    if number == 20_000:
        return path
    few = tmp_path_factory.mktemp("proteins") / "few.fasta"
    with gzip.open(path, "rt") as file:
        few.write_text("".join(f">{record}" for record in file.read().split(">")[1 : number + 1]))
    return few


@pytest.fixture(scope="module")
def expected(proteins, hosts, tmp_path_factory):
    """The bytes that a run without a cluster gives."""
    return computed_by_threads(hosts, proteins, tmp_path_factory.mktemp("threads"))


@pytest.fixture(scope="module")
def twice_the_proteins(proteins, tmp_path_factory):
    """Real proteins and the same ones reversed: more than ten minutes of work for two cores."""
    if proteins.suffix != ".gz":
        pytest.skip("the short run is over in less than a minute: make clusters has the long one")
    path = tmp_path_factory.mktemp("twice") / "proteins.fasta"
    with gzip.open(proteins, "rt") as file:
        records = [record.partition("\n") for record in f"\n{file.read()}".split("\n>")[1:]]
    found = [(name.split()[0], letters.replace("\n", "")) for name, _, letters in records]
    found += [(f"{name}_reversed", letters[::-1]) for name, letters in found]
    path.write_text("".join(f">{name}\n{letters}\n" for name, letters in found))
    return path


@pytest.fixture(scope="module")
def expected_of_twice(twice_the_proteins, hosts, tmp_path_factory):
    """The bytes that a run without a cluster gives."""
    return computed_by_threads(hosts, twice_the_proteins, tmp_path_factory.mktemp("threads"))


def computed_by_threads(hosts, fasta, folder):
    """Embed on this machine; return the bytes."""
    layout = RunLayout(folder / "out")
    began_s = time.monotonic()
    with hosts.command(fasta, layout.output_dir, "--workers", "2") as run:
        assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
    print(f"threads: {time.monotonic() - began_s:.0f} s")
    return layout.embeddings.read_bytes()


def ranks_on(layout, node):
    """Return the log files of workers that a node has had."""
    found = set()
    for path in layout.worker_logs():
        with suppress(OSError, ValueError, IndexError):  # it is being written
            if json.loads(path.read_text().splitlines()[0])["host"] == node.name:
                found.add(path.name)
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
                lambda: run.poll() is not None or all(len(ranks_on(layout, node)) == SLOTS for node in hosts.nodes),
                limit_s=120,
                log=run.log,
            )
            wait_until(lambda: run.poll() is not None or rows_done(layout), limit_s=300, log=run.log)
            assert run.poll() is None, run.log.read_text()
            before = ranks_on(layout, second)
            second.kill()
            killed_s = time.monotonic()
            start_second()
            wait_until(lambda: run.poll() is not None or ranks_on(layout, second) - before, limit_s=300, log=run.log)
            took_part = bool(ranks_on(layout, second) - before)
            print(f"{engine}: the node that came back took part after {time.monotonic() - killed_s:.0f} s: {took_part}")
            assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
        print(f"{engine}: two nodes, one killed and started again: {time.monotonic() - began_s:.0f} s")
    assert layout.embeddings.read_bytes() == expected
    assert not [process for node in hosts.nodes for process in node.processes()]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_node_that_joins_while_a_run_computes_takes_work_from_it(engine, hosts, proteins, expected, tmp_path):
    layout, second = RunLayout(tmp_path / "out"), hosts.nodes[1]
    with (
        getattr(hosts, engine)(has_second=False) as (runner, start_second),
        hosts.command(proteins, layout.output_dir, "--runner", runner) as run,
    ):
        wait_until(lambda: run.poll() is not None or rows_done(layout), limit_s=300, log=run.log)
        assert run.poll() is None, run.log.read_text()
        start_second()
        joined_s = time.monotonic()
        wait_until(lambda: run.poll() is not None or ranks_on(layout, second), limit_s=300, log=run.log)
        took_s = time.monotonic() - joined_s
        print(f"{engine}: a node that joined took work after {took_s:.1f} s")
        assert ranks_on(layout, second), run.log.read_text()
        assert took_s < 3 * TAKES_WORK_WITHIN_S
        assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_driver_that_is_killed_and_started_again_loses_nothing(engine, hosts, proteins, expected, tmp_path):
    layout = RunLayout(tmp_path / "out")
    with getattr(hosts, engine)() as (runner, _):
        with hosts.command(proteins, layout.output_dir, "--runner", runner) as run:
            wait_until(lambda: run.poll() is not None or rows_done(layout), limit_s=300, log=run.log)
            assert run.poll() is None, run.log.read_text()
            run.kill()
        with hosts.command(proteins, layout.output_dir, "--runner", runner) as run:
            assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
    assert layout.embeddings.read_bytes() == expected


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "dask"])
def test_a_node_that_is_killed_every_minute_costs_its_units_only(
    engine, hosts, twice_the_proteins, expected_of_twice, tmp_path
):
    layout, second = RunLayout(tmp_path / "out"), hosts.nodes[1]
    with getattr(hosts, engine)() as (runner, start_second):
        began_s, kills = time.monotonic(), 0
        with hosts.command(twice_the_proteins, layout.output_dir, "--runner", runner) as run:
            while run.poll() is None and time.monotonic() - began_s < KILLED_FOR_S:
                with suppress(subprocess.TimeoutExpired):
                    run.wait(KILLED_EVERY_S)
                    break
                second.kill()
                kills += 1
                start_second()
            assert run.wait(RUN_LIMIT_S) == 0, run.log.read_text()
        print(f"{engine}: a node killed {kills} times: {time.monotonic() - began_s:.0f} s")
    assert kills
    assert layout.embeddings.read_bytes() == expected_of_twice


@pytest.mark.long
@pytest.mark.parametrize("engine", ["dask", "ray"])
def test_a_node_that_sees_another_input_is_named_and_computes_nothing(engine, hosts, examples_dir, tmp_path):
    fasta, other = tmp_path / "in.fasta", tmp_path / "other.fasta"
    text = (examples_dir / "proteins.fasta").read_text()
    fasta.write_text(text)
    other.write_text(text[:-3] + ("A" if text[-3] != "A" else "G") + text[-2:])
    layout = RunLayout(tmp_path / "out")
    with (
        getattr(hosts, engine)(sees=[(fasta, other)]) as (runner, _),
        hosts.command(fasta, layout.output_dir, "--runner", runner) as run,
    ):
        assert run.wait(300) == 0, run.log.read_text()
        says = f"host {hosts.nodes[1].name} cannot take part in this run: {fasta}: its content is not that of the run's"
        assert says in run.log.read_text()
    assert not ranks_on(layout, hosts.nodes[1])


@pytest.mark.long
def test_a_cluster_whose_only_node_cannot_write_the_folder_is_an_error_that_names_it(hosts, examples_dir, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    with (
        hosts.dask(sees=[(closed, None)], has_first=False) as (runner, _),
        hosts.command(examples_dir / "proteins.fasta", closed / "out", "--runner", runner) as run,
    ):
        assert run.wait(300) == 73, run.log.read_text()
        assert f"host {hosts.nodes[1].name} cannot take part" in run.log.read_text()
        assert f"{closed / 'out'}: cannot be written to" in run.log.read_text()
