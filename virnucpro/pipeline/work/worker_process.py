"""
One worker process, from both ends of its pipe.

Child side: ``run_isolated`` is what a spawned process runs first. It is torch-free: it proves that the process sees
exactly its device before anything can import the framework, then imports the worker function by name. Parent side:
``WorkerProcess`` starts the process, reads its messages and answers its requests.

Each worker has a pipe of its own with messages of at most 4096 bytes, which the kernel writes whole or not at all:
a worker killed while it writes can neither block its parent nor tear a message. Messages are small records; where a
record has a ``kind`` it is telemetry (heartbeat, progress), otherwise it is the worker's report.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any

from virnucpro.errors import ConfigurationError, ExitCode, SurroundingsError, VirNucProError, of_surroundings, printable
from virnucpro.pipeline.devices import CPU, VISIBLE_VARIABLE, Device
from virnucpro.run_folders import worker_environment
from virnucpro.this_host import open_standard_streams, peak_resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnContext, SpawnProcess

    WorkerFunction = Callable[..., None] | str
    """A function of an importable module, or ``module:function``, which the parent then need not import."""
    NextWork = tuple[int, int, tuple[Any, ...]]
    """Rank, number of ranks and arguments of a worker function."""

MAX_MESSAGE_BYTES = 4096 - 4
"""Bytes of one message: PIPE_BUF less the length that ``Connection`` puts before it, so that one write carries both."""
_MAX_SENTENCE_BYTES = 600
"""Most bytes of an error's text."""
HEARTBEAT_INTERVAL_S = 1.0
_PR_SET_PDEATHSIG = 1
_OF_THE_GROUP = (signal.SIGINT, signal.SIGHUP)
"""Signals with which a terminal reaches the whole process group: the parent decides, workers ignore them."""
BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"
"""Threads that numpy starts as it is loaded, else one a core, in each of as many workers; torch has its own setting."""
TRIM_VARIABLE, DASKS_TRIM = "MALLOC_TRIM_THRESHOLD_", "65536"
"""Of the C library, in bytes; what Dask's nannies set it to."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Of torch's memory on GPUs. Both: up to 2.9 torch takes these settings from the first alone, and from 2.9 to 2.11 the
first alone costs a warning. Source: https://github.com/pytorch/pytorch/issues/183387"""
_SCRIPT, _MAIN_OF_WORKER = ".py", "__mp_main__"
_START_LOCK = threading.Lock()
"""Held while a process starts: the environment and ``__main__`` belong to the whole parent process."""


class ReportPipe:
    """The object that a worker function gets as ``results_queue``; its ``put`` may be called from any thread."""

    def __init__(self, connection: Connection, answers: Connection) -> None:
        self._connection = connection
        self._answers = answers
        self._lock = threading.RLock()  # a warning that is raised while we send is sent as well

    def put(self, message: dict[str, Any]) -> None:
        """
        Send a small record to the parent.

        Raises:
            ConfigurationError: It is not a dict.
            TypeError: It holds something that JSON has no form for.
            ValueError: It is longer than a pipe takes in one piece.
        """
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise ConfigurationError(
                f"results_queue takes a dict, such as {{'rank': 0, 'status': 'complete'}}, not a {kind}"
            )
        data = json.dumps(message, default=_plain, ensure_ascii=False).encode("utf-8", "backslashreplace")
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes: at most {MAX_MESSAGE_BYTES} fit, put the rest in a file")
        with self._lock:
            self._connection.send_bytes(data)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the parent's next answer; None when none came in time."""
        if not self._answers.poll(timeout_s):
            return None
        answer: dict[str, Any] = json.loads(self._answers.recv_bytes())
        return answer

    def next_work(self) -> NextWork:
        """Wait for the parent's ``go_on``."""
        rank, world_size, worker_args = self._answers.recv()
        multiprocessing.current_process().name = f"gpu_worker_{rank}"
        return rank, world_size, worker_args


def error_sentence(error: BaseException) -> str:
    """Return what went wrong in one printable line, short enough for one message; the whole is in the log."""
    error = of_surroundings(error) or error
    text = str(error) if isinstance(error, VirNucProError) else f"{type(error).__name__}: {error}"
    return printable(text).encode()[:_MAX_SENTENCE_BYTES].decode("utf-8", "ignore")


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} does not go through the pipe: send numbers, text, lists and dicts")


def run_isolated(
    worker: tuple[str, str],
    rank: int,
    world_size: int,
    connection: Connection,
    answers: Connection,
    device: Device,
    worker_args: tuple[Any, ...],
) -> None:
    """Run a worker function, given by module and name, in this freshly spawned process, then end the process."""
    for number in _OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_GROUP)
    _end_worker_with_parent()
    reports = ReportPipe(connection, answers)
    threading.Thread(target=_beat, args=(reports,), name="heartbeat", daemon=True).start()
    exit_code = 0
    try:
        _check_isolation(device)
        function = _imported(*worker)
        function(rank, world_size, reports, *worker_args)
    except SystemExit as stop:
        exit_code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # noqa: BLE001  # the boundary of the process: reported, then turned into its exit code
        error = of_surroundings(error) or error
        if not isinstance(error, SurroundingsError):
            traceback.print_exc()
        exit_code = int(getattr(error, "exit_code", ExitCode.INTERNAL))
        reports.put({"rank": rank, "status": "failed", "error": error_sentence(error)})
    finally:
        with suppress(OSError):  # the parent may be gone
            reports.put(_usage())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # HDF5's own teardown after a full disk can crash, which would look like a poisoned input


def _usage() -> dict[str, Any]:
    """Return the last message: what this process, and its children that have ended, used; not the system's own end."""
    usage = {"kind": "usage", "cpu_s": sum(os.times()[:4]), "peak_bytes": peak_resident_bytes()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        with suppress(Exception):  # the device may be gone
            usage["peak_gpu_bytes"] = torch.cuda.max_memory_allocated()
    return usage


def _imported(module: str, name: str) -> Callable[..., None]:
    """Return a worker function; *module* is a name, or the path of the script that started this process."""
    try:
        found = _script(module) if module.endswith(_SCRIPT) else importlib.import_module(module)
        function: Callable[..., None] = getattr(found, name)
    except Exception as error:
        what = f"worker function {module}:{name} cannot be imported: {error}"
        raise of_surroundings(error) or ConfigurationError(what) from error
    return function


def _script(path: str) -> ModuleType:
    """Run a script under the name that multiprocessing gives it, so that what its ``__main__`` guards is not run."""
    loader = SourceFileLoader(_MAIN_OF_WORKER, path)
    module = sys.modules[_MAIN_OF_WORKER] = ModuleType(_MAIN_OF_WORKER)
    module.__file__ = path
    loader.exec_module(module)
    return module


def _check_isolation(device: Device) -> None:
    seen = os.environ.get(VISIBLE_VARIABLE)
    if seen != device.token:
        raise ConfigurationError(f"{VISIBLE_VARIABLE} is {seen!r} in the worker, expected {device.token!r}")
    if "torch" in sys.modules:
        raise ConfigurationError(
            "torch was imported before the worker's device was checked: pass plain arguments to workers"
        )


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _end_worker_with_parent() -> None:
    """
    End this process when the one that started it is gone.

    The kernel does it at once, even to a process that stands still or holds the interpreter inside a library. It goes
    by the thread that started us, which waits as long as we run (``run_rank``, ``outlive``). A parent that was gone
    before the kernel was asked has left us to another.
    """
    end_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(ExitCode.TERMINATED)


def _beat(reports: ReportPipe) -> None:
    message: dict[str, Any] = {"kind": "heartbeat", "pid": os.getpid()}
    while True:
        try:
            reports.put(message)
        except OSError:  # the parent closed its end: it has stopped listening
            return
        time.sleep(HEARTBEAT_INTERVAL_S)


class WorkerProcess:
    """One spawned process as its parent sees it; ``ConfigurationError`` where *worker_fn* has no importable name."""

    def __init__(
        self, worker_fn: WorkerFunction, *, rank: int, world_size: int, device: Device, worker_args: tuple[Any, ...]
    ) -> None:
        name = importable_name(worker_fn)
        ctx: SpawnContext = multiprocessing.get_context("spawn")
        self._device = device
        open_standard_streams()  # a pipe in place of one would be the child's
        self._connection, self._child_end = ctx.Pipe(duplex=False)
        self._childs_answers, self._answers = ctx.Pipe(duplex=False)
        self._next_work: SimpleQueue[NextWork | None] = SimpleQueue()
        self.process: SpawnProcess = ctx.Process(
            target=run_isolated,
            name=f"gpu_worker_{rank}",
            args=(name, rank, world_size, self._child_end, self._childs_answers, device, worker_args),
        )

    def start(self) -> None:
        """Start the process with its device as the only visible one; safe from any thread."""
        self.started_s = time.monotonic()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)  # inherited, until the child ignores them
        try:
            changes = {
                VISIBLE_VARIABLE: self._device.token,
                BLAS_VARIABLE: "1",
                **worker_environment(),
                **_without_dasks(),
                **_allocator_settings(self._device),
            }
            with _START_LOCK, _environment(changes), _hidden_main():
                self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._child_end.close()
            self._childs_answers.close()

    def wait_for_messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the messages that have come; waits up to *timeout_s* seconds for one, or for the process to end."""
        wait([self._connection, self.process.sentinel], timeout_s)
        messages = []
        try:
            while self._connection.poll():
                messages.append(json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES)))
        except (EOFError, OSError):  # ended: all its messages were read before
            pass
        return messages

    def answer(self, answers: Iterable[dict[str, Any]]) -> None:
        """
        Send a few records, each as small as the worker's own.

        Only a request is answered, so that a worker that stands still has at most one answer unread: the pipe takes it
        at once, and the parent never waits.
        """
        with suppress(OSError):  # it has ended
            for record in answers:
                self._answers.send_bytes(json.dumps(record).encode("ascii"))

    def go_on(self, work: NextWork) -> None:
        """Give a process that waits in ``next_work`` what that returns; returns at once."""
        self._next_work.put(work)

    def outlive(self) -> None:
        """Send what ``go_on`` gives, and return when the process has ended; for the thread that started it."""
        if (work := self._next_work.get()) is not None:
            with suppress(OSError):  # it has ended; one that does not read is watched by who runs the rank
                self._answers.send(work)
        wait([self.process.sentinel])

    def end(self, grace_s: float) -> None:
        """Make the process end: SIGTERM, then SIGKILL after *grace_s* seconds. Returns when it is gone."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(grace_s)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Returns when it is gone."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def dismiss(self) -> None:
        """End a process that waits, at once."""
        self.kill()
        self.close()

    def close(self) -> None:
        self._connection.close()
        self._answers.close()
        self._next_work.put(None)


def importable_name(worker_fn: WorkerFunction) -> tuple[str, str]:
    """
    Return module (of a script its path) and name under which another process finds *worker_fn*.

    Raises:
        ConfigurationError: It is defined inside a function, or in a ``__main__`` that is no script.
    """
    if isinstance(worker_fn, str):
        module, _, name = worker_fn.rpartition(":")
        return module, name
    module, name = worker_fn.__module__, worker_fn.__qualname__
    if module == _MAIN_OF_WORKER:
        raise ConfigurationError('this script starts workers as it is imported: begin with if __name__ == "__main__":')
    if module == "__main__":
        main = sys.modules[module]
        module = str(Path(getattr(main, "__file__", None) or "").absolute())
        if not module.endswith(_SCRIPT) or getattr(main, name, None) is not worker_fn:
            raise ConfigurationError(
                f"worker function {name} is not in a script: move it into a module that can be imported"
            )
    if "." in name:
        raise ConfigurationError(
            f"worker function {name} is not at the top level of {module}: workers import it by name"
        )
    return module, name


def _without_dasks() -> dict[str, str | None]:
    """
    Return what takes back a setting that Dask's nannies make: to give every freed 64 KiB back to the system.

    It costs a worker on CPUs half as much time again, for pages that it touches anew (deployments/clusters/README.md).
    Source: https://distributed.dask.org/en/stable/worker-memory.html#automatically-trim-memory
    """
    return {TRIM_VARIABLE: None} if os.environ.get(TRIM_VARIABLE) == DASKS_TRIM else {}


def _allocator_settings(device: Device) -> dict[str, str | None]:
    """Return what lets torch's memory on a GPU grow in place, unless the user has settings: blocks differ in size."""
    if device == CPU or any(variable in os.environ for variable in ALLOCATOR_VARIABLES):
        return {}
    return dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """
    Give the processes that are started in the block other values of variables, or None of them.

    It is put past ``os.environ``, which stays as it is: Prefect's threads walk through that at any time, and fail on a
    variable that goes away meanwhile.
    """
    _put(changes)
    try:
        yield
    finally:
        _put({variable: os.environ.get(variable) for variable in changes})


def _put(values: Mapping[str, str | None]) -> None:
    for variable, value in values.items():
        if value is None:
            os.unsetenv(variable)
        else:
            os.putenv(variable, value)


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep the child from importing our ``__main__`` again (Prefect and all), which would cost it 6 to 12 s."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__ = None
    if path is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if path is not None:
            main.__file__ = path
