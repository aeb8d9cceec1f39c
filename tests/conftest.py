"""What all tests share: where the real data is, that CI does not skip in silence, and that no test hangs for good."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import sys
import tempfile
import tomllib
import tracemalloc
from pathlib import Path

import hypothesis
import pytest

# The same examples every time: what passes here passes in CI. `make soak` looks for new ones. No deadline:
# on a busy machine any example may wait.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")

REPOSITORY = Path(__file__).parents[1]
NO_DATA = "no real data"
RELEASE = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"]
"""The number that a release sets where a tag of git does not reach."""

HANG_GRACE_S = 30.0
"""Seconds after a test's own time limit at which the whole process is ended."""
STANDARD_ERROR = pytest.StashKey[int]()


LONGEST_FILES = (
    "test_multi_gpu_inference.py",
    "test_embed_flow.py",
    "test_cli.py",
    "test_run_against_fair_esm.py",
    "test_bad_input.py",
    "test_cached_blocks.py",
    # and of the minutes-long tests
    "test_prefect_behaviour.py",
    "test_prefect_service.py",
    "test_real_proteins.py",
    "test_recovery.py",
)
"""Begun first where files run side by side, so that none of them is left over for the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]):
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)


def pytest_configure(config: pytest.Config):
    config.stash[STANDARD_ERROR] = os.dup(2)  # pytest captures the other one while a test runs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """A test that hangs where its time limit does not reach (inside a library) ends with every thread's traceback."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + HANG_GRACE_S, exit=True, file=item.config.stash[STANDARD_ERROR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True, scope="module")
def _logging_stays_within_a_module():
    """A flow sends the lines of its process to Prefect; the tests that come after it in this process do not."""
    logger = logging.getLogger("virnucpro")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    if structlog := sys.modules.get("structlog"):  # a machine with a GPU may lack it
        structlog.reset_defaults()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The real data: proteins, weights, golden outputs."""
    folder = Path(os.environ.get("VIRNUCPRO_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"{NO_DATA} at {folder}: set VIRNUCPRO_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def examples_dir() -> Path:
    """The bundled input."""
    return REPOSITORY / "examples"


@pytest.fixture
def little_memory():
    """Fail where Python takes 32 MiB during the test: nothing is to be built for each item that a file only states."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def for_all_users():
    """A folder that every user can look into: pytest's are the user's, and each start of it makes them so again."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def threads_as_before():
    """Training sets the threads of the process: give the next test those of before."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(threads_as_before):
    """As a worker computes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def logging_as_before():
    """Undo what a worker's logging does to this process."""
    import structlog

    from virnucpro.telemetry.worker_logging import HANDLER_NAME

    root = logging.getLogger()
    level = root.level
    yield
    logging.captureWarnings(capture=False)
    for handler in [item for item in root.handlers if item.get_name() == HANDLER_NAME]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """
    With VIRNUCPRO_NO_SKIPS set, a skip for a missing tool or missing data fails; ``gpu`` and ``may_skip`` may, and with
    the value ``but-data`` missing data.

    Of a test that passed only what it printed is kept, so that ``-rP`` does not bury the failures in other lines.
    """
    report = yield
    if report.passed:
        report.sections = [section for section in report.sections if section[0].startswith("Captured stdout")]
    if (
        report.skipped
        and os.environ.get("VIRNUCPRO_NO_SKIPS")
        and not any(item.get_closest_marker(name) for name in ("gpu", "may_skip"))
        and not (os.environ["VIRNUCPRO_NO_SKIPS"] == "but-data" and NO_DATA in str(report.longrepr))
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
    return report
