"""
A real Prefect server and real process workers, on this host, as a core facility runs them: with a password and CSRF.

Everything they write is in one folder, the server listens on a free port (of 127.0.0.1, unless the test has a network
of its own), and nothing is left when the block ends. The intervals at which server and worker look for work are seconds
instead of a minute.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING
from uuid import UUID

import prefect
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate

from tests.conftest import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from prefect.client.schemas.objects import FlowRun

START_LIMIT_S = 180.0
COMMAND_LIMIT_S = 120.0
POOL = "virnucpro"
PASSWORD = "admin:a password for tests only"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PrefectService:
    """A server that is running, the command line against it, and workers of it."""

    def __init__(self, folder: Path, host: str, port: int, environ: dict[str, str]) -> None:
        self.folder = folder
        self.server = ExitStack()
        """Ends the server."""
        self.server_python = sys.executable
        """Of its next start."""
        self.url = f"http://{host}:{port}"
        self.password = PASSWORD
        """Of the next start of the server, and of clients."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "VIRNUCPRO_"))}
        self.environ = {
            **ours,
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "OMP_NUM_THREADS": "1",
            "TESTED_PREFECT": prefect.__version__,  # and no other, tests.hash_flows asserts
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            **environ,
        }

    def serve(self) -> None:
        """Start the server, and wait until it answers."""
        log = self.folder / "server.log"
        settings = {
            **({"PREFECT_SERVER_API_AUTH_STRING": self.password} if self.password else {}),
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_METRICS_ENABLED": "true",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_SERVER_SERVICES_SCHEDULER_DEPLOYMENT_BATCH_SIZE": "20",
            "PREFECT_UI_API_URL": f"{self.url}/api",
        }
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        command = [self.server_python, "-m", "prefect", "server", "start", "--host", host, "--port", port]
        self.server.enter_context(started(command, log, cwd=self.folder, environ={**self.environ, **settings}))
        wait_until(lambda: is_healthy(self.url), limit_s=START_LIMIT_S, log=log)

    def be_away(self, seconds: float) -> None:
        """Stop the server, and start it again after so many seconds."""
        began_s = time.monotonic()
        self.server.close()
        time.sleep(seconds)
        self.serve()
        print(f"the server was away for {time.monotonic() - began_s:.0f} s")

    def server_version(self) -> str:
        """Return the version of Prefect that the server is."""
        with self.client() as client:
            return client.request("GET", "/admin/version").json()

    def client(self) -> SyncPrefectClient:
        """Return a client of the API, to be used in a ``with``."""
        return SyncPrefectClient(api=f"{self.url}/api", auth_string=self.password)

    def prefect(self, *arguments: str, cwd: Path = REPOSITORY, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``prefect ARGUMENTS`` against the server, as at a terminal that is wide."""
        return self.run(sys.executable, "-m", "prefect", *arguments, cwd=cwd, COLUMNS="400", **environ)

    def run(self, *command: str, cwd: Path = REPOSITORY, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run any command against the server, to its end."""
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )

    def deploy(self, entrypoint: str, name: str, *, queue: str | None = None, **environ: str) -> UUID:
        """
        Make a deployment of the pool as ``prefect deploy`` would, without starting a program for it; return its id.

        Args:
            entrypoint: ``FILE:FLOW`` under the repository, which the flow runs in.
            name: Of the deployment.
            queue: Of the pool that its runs go to.
            environ: Variables of the flow's process.
        """
        from prefect.flows import load_flow_from_entrypoint
        from prefect.utilities.callables import parameter_schema

        flow = load_flow_from_entrypoint(str(REPOSITORY / entrypoint), use_placeholder_flow=False)
        with self.client() as client:
            return client.create_deployment(
                client.create_flow_from_name(flow.name),
                name,
                work_pool_name=POOL,
                work_queue_name=queue,
                entrypoint=entrypoint,
                pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(REPOSITORY)}}],
                job_variables={"env": environ},
                parameter_openapi_schema=parameter_schema(flow).model_dump_for_openapi(),
                enforce_parameter_schema=True,
            )

    def start(self, deployment: UUID, **parameters: object) -> UUID:
        """Ask for a run of a deployment; return its id."""
        with self.client() as client:
            return client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def cancel(self, run_id: UUID) -> None:
        """Cancel a run, as the button in the UI does."""
        from prefect.states import Cancelling

        with self.client() as client:
            client.set_flow_run_state(run_id, Cancelling())

    def flow_run(self, run_id: UUID | str) -> FlowRun:
        """Return what the API knows of a flow run now."""
        with self.client() as client:
            return client.read_flow_run(UUID(str(run_id)))

    def wait_for_state(self, run_id: UUID | str, *names: str, limit_s: float) -> FlowRun:
        """Return the flow run once its state has one of these names; fail after *limit_s* seconds."""
        began_s = time.monotonic()
        while True:
            run = self.flow_run(run_id)
            state = run.state
            if state is not None and state.name in names:
                print(f"{run.name}: {state.name} after {time.monotonic() - began_s:.1f} s")
                return run
            if time.monotonic() - began_s > limit_s:
                raise AssertionError(f"{run.name} is {state and state.name} ({state and state.message}), not {names}")
            time.sleep(0.2)

    def flow_process(self, run_id: UUID | str) -> psutil.Process:
        """Return the process that runs the flow: the innermost one that has the run's id in its environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("PREFECT__FLOW_RUN_ID") == str(run_id) and "multiprocessing" not in " ".join(
                    process.cmdline()
                ):
                    found.append(process)
        assert found, f"no process of flow run {run_id}"
        parents = {process.ppid() for process in found}
        (innermost,) = [process for process in found if process.pid not in parents]
        return innermost

    @contextmanager
    def worker(self, *arguments: str, cwd: Path | None = None, **environ: str):
        """
        Start a process worker of the pool; yield it (``.log`` is its file); SIGTERM, then SIGKILL, at the end.

        The pool has no limit, whichever tests of ``bootstrap``, which sets one, came before.
        """
        with self.client() as client:
            client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=None))
        log = self.folder / f"worker-{time.monotonic_ns()}.log"
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process", *arguments]
        with started(command, log, cwd=cwd or self.folder, environ={**self.environ, **environ}) as process:
            wait_until(lambda: " started!" in log.read_text(), limit_s=START_LIMIT_S, log=log)
            process.log = log
            yield process


@contextmanager
def started(command: list[str], log: Path, *, cwd: Path, environ: dict[str, str]):
    """Start a program in a group of its own; whatever of the group is left at the end is killed."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until(condition, *, limit_s: float, log: Path | None = None, interval_s: float = 0.1) -> float:
    """Return the seconds until *condition* held; fail after *limit_s* with what the log says."""
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > limit_s:
            raise AssertionError(f"not after {limit_s:g} s: {log.read_text()[-3000:] if log else condition}")
        time.sleep(interval_s)
    return time.monotonic() - began_s


@contextmanager
def prefect_service(folder: Path, host: str = "127.0.0.1", **environ: str):
    """Start a server whose database is in *folder* (SQLite, unless *environ* says otherwise), and make the pool."""
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    (folder / "home").mkdir(parents=True)
    service = PrefectService(folder, host, port, environ)
    with service.server:
        service.serve()
        made = service.prefect("work-pool", "create", POOL, "--type", "process")
        assert made.returncode == 0, made.stderr
        yield service


def is_healthy(url: str) -> bool:
    """Whether the server answers."""
    try:
        with _DIRECT.open(f"{url}/api/health", timeout=5):
            return True
    except OSError:
        return False
