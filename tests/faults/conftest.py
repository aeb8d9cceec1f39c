"""
The fault suite: each row of the fault matrix that needs no GPU, and what its tests share.

A test's name says what it shows, its file's docstring names the rows. Each fault has a short version for ``make test``;
the version that tries it hundreds of times is marked ``soak``.

A row of the table that ``make soak`` prints, and writes into ``docs/reliability.md``, comes from the fixture
``soak_table``, which any test may call, once or many times; rows of one fault are added up::

    @pytest.mark.soak
    @pytest.mark.timeout(600)
    def test_the_fault_many_times(soak_table): ...
        soak_table("worker or parent killed", tries=200, lost=0, duplicated=0, differing=0, note="seed 7")

Rules: a process that a test starts has a deadline and is ended with the test (``tests.faults.processes``), a test kills
its own children only, and what is chosen at random comes from the fixture ``seed``, which prints it.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

TABLE_BEGIN, TABLE_END = "<!-- {}: begin -->", "<!-- {}: end -->"
PACKAGES = ("virnucpro", "torch", "h5py", "numpy")
_PROPERTY = "soak_table"


@dataclass
class TableRow:
    """What the tests found of one fault."""

    fault: str
    tries: int = 0
    broken: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, found: dict) -> None:
        self.tries += found["tries"]
        self.broken += found["lost"] + found["duplicated"] + found["differing"]
        if found["note"] and found["note"] not in self.notes:
            self.notes.append(found["note"])


@pytest.fixture
def soak_table(request):
    """
    ``soak_table(fault, *, tries, lost=0, duplicated=0, differing=0, note="")`` adds to the fault's row.

    ``lost`` and ``duplicated`` count sequences, ``differing`` results that are not what was promised: bytes that
    differ, damage that went unseen, another exit code or state. Call it before asserting, so that a failure stands in
    the table too.
    """

    def add(fault, *, tries, lost=0, duplicated=0, differing=0, note=""):
        found = {"tries": tries, "lost": lost, "duplicated": duplicated, "differing": differing, "note": note}
        request.node.user_properties.append((_PROPERTY, (fault, found)))

    return add


@pytest.fixture
def seed(request) -> int:
    """Where chance begins: the same each time in short tests, another one in each soak; printed."""
    given = os.environ.get("FAULT_SEED")
    chosen = random.SystemRandom().randrange(2**32) if request.node.get_closest_marker("soak") else 20261121
    chosen = chosen if given is None else int(given)
    print(f"seed {chosen} (FAULT_SEED={chosen} repeats it)")
    return chosen


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--soak-table", type=Path, help="file whose table of faults is replaced by this session's")
    parser.addoption("--soak-name", default="soak table", help="what the table's place in the file is called")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    rows: dict[str, TableRow] = {}
    for report in (item for reports in terminalreporter.stats.values() for item in reports):
        if getattr(report, "when", None) == "call":
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    rows.setdefault(value[0], TableRow(value[0])).add(value[1])
    if not rows:
        return
    table = as_markdown(rows.values())
    terminalreporter.section("faults")
    terminalreporter.write_line(table)
    path = config.getoption("--soak-table", default=None)
    if path is not None and exitstatus == pytest.ExitCode.OK:
        text = path.read_text(encoding="utf-8")
        begin, end = (mark.format(config.getoption("--soak-name")) for mark in (TABLE_BEGIN, TABLE_END))
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{path} has no place for the table: {begin} ... {end}"
        path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def as_markdown(rows) -> str:
    when = datetime.now(UTC).date().isoformat()
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])
    lines = [
        f"{when}, {os.cpu_count()} cores, {platform.system()} {platform.release().split('-')[0]}, {versions}.",
        "",
        "| fault | tries | broken |",
        "| --- | ---: | ---: |",
        *(f"| {'; '.join([row.fault, *row.notes])} | {row.tries:,} | {row.broken:,} |" for row in rows),
    ]
    return "\n".join(lines)
