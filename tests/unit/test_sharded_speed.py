"""A sharded result opens and finds an id at once: the benchmark of ten million rows, smaller, at 3x its limits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPEN_S, FIND_MS = 1.0, 5.0
"""What ten million rows must take at the most; limits of time in tests are three times as large."""


def test_a_result_in_shards_opens_and_finds_an_id_without_reading_all_ids(tmp_path):
    command = [sys.executable, "benchmarks/sharded_output.py", "--rows", "100000", "--lookups", "300"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for state in ("cold", "warm"):
        found = report["sharded"][state]
        print(state, found)
        assert found["open_seconds"] < 3 * OPEN_S
        assert found["find_ms_median"] < 3 * FIND_MS
    assert report["sharded"]["warm"]["resident_megabytes"] < report["single"]["warm"]["resident_megabytes"]
