"""One Prefect server for all tests of a process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """A real server with a password and CSRF; see ``tests.prefect_service``."""
    from tests.prefect_service import prefect_service

    with prefect_service(tmp_path_factory.mktemp("prefect")) as service:
        yield service
