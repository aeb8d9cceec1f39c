"""
The Prefect API of a flow run: a client that asks once, and a server for one command where none is configured.

Prefect's own ephemeral server shares our process group: Ctrl-C would end it before the flow reports its end, and a kill
would orphan it. This one has its own session and ends with us, however we end. A flow in the process of a command has
the errors and the signals of the plain command.

CONTRIBUTING.md lists the Prefect versions and issues that make this necessary.
"""

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, cast

from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SyncClientContext
from prefect.exceptions import ParameterTypeError, PrefectSignal
from prefect.logging.handlers import APILogWorker, PrefectConsoleHandler
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

from virnucpro.errors import ConfigurationError, ExitCode, VirNucProError, printable
from virnucpro.pipeline.work.worker_process import end_with_parent
from virnucpro.run_folders import only_regular
from virnucpro.this_host import terminating_signals

IS_QUIET: ContextVar[bool] = ContextVar("IS_QUIET", default=False)
"""Whether the command shows errors and warnings only."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds for one answer of the API."""
LOG_DRAIN_S = 10.0
"""Seconds that the last log lines have to reach the API."""
_STOP_S = 10.0
# What these imports make lives as long as the server: the garbage collector would look through it again and again, for
# a third of the CPU time that the server's start costs.
_UVICORN = (
    "import gc; gc.disable(); import prefect.server.api.server, uvicorn; gc.freeze(); gc.enable(); uvicorn.main()"
)
_SERVER_SETTINGS = {
    "PREFECT_UI_ENABLED": "0",
    # Types of blocks are for a UI. Nor does this server note them as registered: a later one in the same home does it.
    "PREFECT_API_BLOCKS_REGISTER_ON_START": "0",
    "PREFECT_MEMOIZE_BLOCK_AUTO_REGISTRATION": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


class ServerError(VirNucProError):
    """The embedded Prefect server did not start."""


def run_here(flow: Flow[..., Any], /, *, is_quiet: bool = False, **parameters: Any) -> Any:
    """
    Run a flow in this process, against the API that the environment names or an embedded server; return its outcome.

    *is_quiet*: no lines about progress on standard error.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    IS_QUIET.set(is_quiet)
    with _terminable(), prefect_api():
        try:
            state = cast("Any", flow)(**parameters, return_state=True)
        except ParameterTypeError as error:  # where the form's bounds are narrower than the options'
            raise ConfigurationError(str(error)) from None
        except PrefectSignal as ended:  # the server no longer has it as running
            raise (ended.__cause__ or ended) from None
        # the last log lines leave while there is a server: at exit Prefect would try for a minute
        APILogWorker.drain_all(timeout=LOG_DRAIN_S, at_exit=False)
        outcome = state.result(raise_on_failure=False)
        if isinstance(outcome, ParameterTypeError):
            raise ConfigurationError(str(outcome)) from None
        if isinstance(outcome, BaseException):
            raise outcome
    return outcome


@contextmanager
def client_that_asks_once() -> Iterator[SyncPrefectClient]:
    """Yield a client of the API that does not wait for one that does not answer now: the run is worth more."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings={"timeout": REQUEST_TIMEOUT_S}, sync_client=True) as client,
    ):
        yield client


@contextmanager
def prefect_api() -> Iterator[None]:
    """Ensure that there is an API: the configured one, which has to answer, or our own server until the block ends."""
    if PREFECT_API_URL.value():
        try:
            with SyncClientContext.get_or_create():  # as the flow will
                pass
        except Exception as error:
            raise ConfigurationError(
                f"{printable((str(error) or repr(error)).splitlines()[0])}: start the server of PREFECT_API_URL, or"
                " unset that (`prefect config view` tells where it is set) for a server of this command's own, or go"
                " without --flow"
            ) from error
        yield
        return
    settings = get_current_settings()
    try:
        settings.home.mkdir(parents=True, exist_ok=True)  # for the server's database
        lock = os.fdopen(only_regular(f"{settings.home}/virnucpro-server.lock", os.O_WRONLY | os.O_CREAT), "w")
    except OSError as error:
        raise ConfigurationError(
            f"the Prefect server of this command keeps its database in {settings.home}, which cannot be written"
            f" ({error.strerror}): set PREFECT_HOME to a folder that can be written"
        ) from error
    _reach_without_proxy("127.0.0.1")
    with lock as starting:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(starting, fcntl.LOCK_EX)  # of two servers that make one database at once, one fails
        port = _free_port()
        server = _start(port)
        try:
            url = f"http://127.0.0.1:{port}/api"
            _wait_until_healthy(url, server, float(settings.server.ephemeral.startup_timeout_seconds))
            starting.close()
            _show_warnings_only()
            with temporary_settings({PREFECT_API_URL: url}):
                yield
        finally:
            server.terminate()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _reach_without_proxy(host: str) -> None:
    """Have this process and its children go to *host* past the proxies of the site."""
    hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or host
    os.environ["no_proxy"] = hosts if hosts == "*" or host in hosts.split(",") else f"{hosts},{host}"
    for name, value in list(os.environ.items()):
        if name.lower().endswith("_proxy") and value.startswith("socks") and find_spec("socksio") is None:
            del os.environ[name]  # with which Prefect's client would not even be made


def _start(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-c", _UVICORN, "--factory", "prefect.server.api.server:create_app"),
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"),
        ],
        env={**os.environ, **_SERVER_SETTINGS},
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509  there is one thread yet
    )


def _show_warnings_only() -> None:
    """Show only Prefect's warnings on the terminal: its links lead to a server that ends with the command."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(_is_for_the_user)
            handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))


def _is_for_the_user(record: logging.LogRecord) -> bool:
    """Whether it is a warning, and not that Prefect's log lines are still on their way."""
    return record.levelno >= logging.WARNING and not record.getMessage().startswith("Still processing items")


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise ServerError(f"the embedded Prefect server ended with exit code {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310  our own server
                return
        except OSError:  # not listening yet
            time.sleep(0.1)
    raise ServerError(f"the embedded Prefect server did not answer within {timeout_s:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the flow, which stops workers and server on the way out, and end with 143."""
    signals: list[int] = []

    def leave(number: int, _frame: object) -> None:
        signals.append(number)
        raise SystemExit(int(ExitCode.TERMINATED))

    before = {number: signal.signal(number, leave) for number in terminating_signals()}
    try:
        yield
    except Exception as error:
        if signals:  # in some of Prefect's own code the exit becomes another error
            raise SystemExit(int(ExitCode.TERMINATED)) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
