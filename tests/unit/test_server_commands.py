"""``deployments/server`` without a server: a new password, and mistakes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SERVER = REPOSITORY / "deployments" / "server"
NAMES = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING", "PREFECT_AUTH_STRING")


def server(*arguments):
    return subprocess.run(
        [sys.executable, SERVER, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_file_gets_the_same_new_password_and_keeps_the_rest(tmp_path):
    values = ("virnucpro:0123456789abcdef", '"virnucpro:with spaces and 16"', "virnucpro:another:one")
    for name, value in zip(NAMES, values, strict=True):
        path = tmp_path / name
        path.write_text(f"# {name}=x\nA=1\n{name}={value}\nB={value}\n")
        path.chmod(0o640)
    done = server("rotate-password", *(tmp_path / name for name in NAMES))
    assert done.returncode == 0, done.stderr
    passwords = set()
    for name, value in zip(NAMES, values, strict=True):
        first, second, changed, last = (tmp_path / name).read_text().splitlines()
        assert (first, second, last) == (f"# {name}=x", "A=1", f"B={value}")
        passwords.add(re.fullmatch(rf"{name}=(virnucpro:[0-9a-f]{{48}})", changed)[1])
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o640
    (password,) = passwords
    assert password.partition(":")[2] not in done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("text", ["", "PREFECT_API_AUTH_STRING=\n", "PREFECT_API_AUTH_STRING=other:0123456789abcdef\n"])
def test_a_file_without_a_password_or_of_another_name_changes_none(tmp_path, text):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("PREFECT_API_AUTH_STRING=virnucpro:0123456789abcdef\n")
    second.write_text(text)
    done = server("rotate-password", first, second)
    assert done.returncode == 78
    assert "nothing was changed" in done.stderr
    assert first.read_text() == "PREFECT_API_AUTH_STRING=virnucpro:0123456789abcdef\n"
    assert second.read_text() == text
