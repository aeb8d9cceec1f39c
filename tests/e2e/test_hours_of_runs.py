"""
Runs one after the other on a real server: what a run leaves behind does not grow with its length, nor the worker.

``--hours`` says for how long; every fourth run is a long one. Measured between two runs: the rows of each table of the
server's database, events by name, and the resident memory of the worker's processes.
"""

from __future__ import annotations

import random
import sqlite3
import statistics
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest

pytest.importorskip("prefect")

from tests.conftest import REPOSITORY
from tests.faults.processes import make_proteins
from tests.hash_flows import VARIABLE, control_file
from tests.prefect_service import POOL, prefect_service, started, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(4 * 3600)]

SLOW_S = 2.0
"""Seconds of a block, which has a few sequences."""
SHORT, LONG = 12, 240
"""Sequences of a run."""
HEARTBEAT_S, PROGRESS_S = 30.0, 15.0
"""Least seconds between two events of a run, and of an artifact of a device."""
GROWTH_MB = 5.0


class Seen(NamedTuple):
    is_long: bool
    seconds: float
    rows: Counter[str]
    """Rows that the run added, by table."""
    events: Counter[str]
    memory_mb: float
    """Of the worker and its children, between two runs."""


def test_what_a_run_leaves_does_not_grow_with_its_length_nor_the_worker_with_their_number(tmp_path, request):
    ends_s = time.monotonic() + 3600 * request.config.getoption("--hours")
    control = control_file(tmp_path / "control.json", slow_s=SLOW_S)
    for name, number in (("short", SHORT), ("long", LONG)):
        make_proteins(tmp_path / f"{name}.fasta", random.Random(number), number)
    found: list[Seen] = []
    with prefect_service(tmp_path / "server") as service:
        deployment = service.deploy("tests/hash_flows.py:embed", "hours", **{VARIABLE: str(control)})
        log, command = tmp_path / "worker.log", [sys.executable, "-m", "flows.worker", "--pool", POOL]
        environ = {**service.environ, "VIRNUCPRO_DATA_ROOTS": str(tmp_path)}
        with started(command, log, cwd=REPOSITORY, environ=environ) as worker:
            wait_until(lambda: " started!" in log.read_text(), limit_s=180, log=log)
            while len(found) < 8 or time.monotonic() < ends_s:
                is_long = len(found) % 4 == 3
                before = database(service.folder / "home" / "prefect.db")
                began_s = time.monotonic()
                run = service.start(
                    deployment,
                    fasta_files=[str(tmp_path / f"{'long' if is_long else 'short'}.fasta")],
                    output_dir=str(tmp_path / f"out{len(found)}"),
                    hardware={"devices": "cpu", "workers": 2},
                )
                service.wait_for_state(run, "Completed", limit_s=900)
                seconds = time.monotonic() - began_s
                time.sleep(5)  # the last events are on their way
                after = database(service.folder / "home" / "prefect.db")
                rows, events = (now - then for now, then in zip(after, before, strict=True))
                found.append(Seen(is_long, seconds, rows, events, memory_mb(worker.pid)))
    report(found)
    short, long = ([one for one in found[1:] if one.is_long == is_long] for is_long in (False, True))
    more_s = median(long, "seconds") - median(short, "seconds")
    more_events = sum(middle(long, "events").values()) - sum(middle(short, "events").values())
    assert more_events <= more_s / HEARTBEAT_S + 2 * more_s / PROGRESS_S + 6
    for table, rows in middle(long, "rows").items():
        if table not in {"events", "event_resources", "log"}:
            assert rows <= middle(short, "rows")[table] + 2, table
    assert middle(long, "rows")["log"] <= middle(short, "rows")["log"] + 12  # a line for every tenth
    for kind in (short, long):
        quarter = max(1, len(kind) // 4)
        first, last = (sum(middle(part, "events").values()) for part in (kind[:quarter], kind[-quarter:]))
        assert last <= first + 4
    quarters = quarters_of_memory(found)
    assert quarters[3] <= quarters[2] + GROWTH_MB  # it grows over the first runs: 224 to 257 MB of 140, then not at all


def database(path: Path) -> tuple[Counter[str], Counter[str]]:
    """Return the rows of each table, and the events by name."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60) as connection:
        tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        rows = Counter({name: connection.execute(f'select count(*) from "{name}"').fetchone()[0] for name in tables})
        events = Counter(dict(connection.execute("select event, count(*) from events group by event").fetchall()))
    return rows, events


def memory_mb(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)]) / 1e6


def quarters_of_memory(found: list[Seen]) -> list[float]:
    """Return the median of each quarter of the runs, MB."""
    size = len(found) // 4
    return [median(found[number * size : (number + 1) * size], "memory_mb") for number in range(4)]


def median(runs: list[Seen], field: str) -> float:
    return statistics.median(getattr(one, field) for one in runs)


def middle(runs: list[Seen], field: str) -> Counter[str]:
    """Return the median of each count."""
    names = {name for one in runs for name in getattr(one, field)}
    return Counter({name: int(statistics.median(getattr(one, field)[name] for one in runs)) for name in names})


def report(found: list[Seen]) -> None:
    """Print what was measured."""
    for is_long in (False, True):
        runs = [one for one in found[1:] if one.is_long == is_long]
        print(f"{len(runs)} {'long' if is_long else 'short'} runs, {median(runs, 'seconds'):.0f} s each (median):")
        for field in ("events", "rows"):
            counts = ", ".join(f"{name} {number}" for name, number in middle(runs, field).most_common() if number)
            print(f"  {field}: {counts}")
    quarters = ", ".join(f"{mb:.1f}" for mb in quarters_of_memory(found))
    print(f"memory of the worker, MB, median of each quarter of {len(found)} runs: {quarters}")
