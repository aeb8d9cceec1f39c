"""The commands with which docs/monitoring.md reads the logs of workers."""

from __future__ import annotations

import shlex
import subprocess

from tests.conftest import REPOSITORY
from tests.debian_programs import program
from tests.unit.test_command_blocks import blocks


def queries(out):
    """Return the page's commands for the logs in a folder: warnings, all lines by time, the last line, following."""
    program("jq")
    page = blocks(REPOSITORY / "docs" / "monitoring.md")
    found = [command for block in page for command, _ in block.steps() if "emb/logs" in command]
    warnings, by_time, last, following = [command.replace("emb/", f"{shlex.quote(str(out))}/") for command in found]
    return warnings, by_time.removesuffix(" \\\n    | tail -n 2\n"), last, following


def shown(command):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout.split("\n")[:-1]
