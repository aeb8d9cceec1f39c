"""One Prefect server for all tests of a process, and one browser for those of a file."""

from __future__ import annotations

import shutil

import pytest


def pytest_addoption(parser: pytest.Parser):
    parser.addoption(
        "--cluster-proteins", type=int, choices=[1500, 20_000], default=1500, help="input of the clusters of two nodes"
    )
    parser.addoption("--hours", type=float, default=0.1, help="of runs one after the other on a Prefect server")
    parser.addoption("--run-seconds", type=float, default=150.0, help="length of the run over restarts of its server")


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """
    A real server with a password and CSRF; see ``tests.prefect_service``.

    On PostgreSQL: SQLite stands still for a minute now and then, and drops events, as automations write to it, too.
    """
    from tests.debian_programs import postgresql
    from tests.prefect_service import prefect_service

    with postgresql() as url:
        folder = tmp_path_factory.mktemp("prefect")
        with prefect_service(folder, PREFECT_SERVER_DATABASE_CONNECTION_URL=url) as service:
            yield service


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium that reaches this host only; see ``tests.chromium``."""
    from tests.chromium import Browser

    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        pytest.skip("no chromium and chromedriver: install Debian's packages chromium and chromium-driver")
    browser = Browser(chromium, chromedriver, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()
