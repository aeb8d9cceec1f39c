"""
`make demo`: the flows predict and embed on real sequences; one of embed's two workers is killed on purpose.

One process and one embedded server of Prefect for both runs; then every task run with its state and its retries.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import TaskRunFilter, TaskRunFilterFlowRunId
from prefect.client.schemas.sorting import FlowRunSort, TaskRunSort

from flows.run.api import prefect_api
from virnucpro.cli import command_line
from virnucpro.failpoints import VARIABLE

if TYPE_CHECKING:
    from uuid import UUID

FOLDER = Path(sys.argv[1])
KILLED = FOLDER / "killed"
"""Made by the worker that is killed, so that its next process is not."""


def virnucpro(*words: str | Path) -> None:
    """Run a command, and show it."""
    print(f"\n$ {shlex.join(['virnucpro', *map(str, words)])}", flush=True)
    command_line(str(words[0]))([*map(str, words)], standalone_mode=False)


def show_tasks(flow_run: UUID) -> int:
    """Print the task runs of a flow run, in the order of their start; return their retries."""
    with get_client(sync_client=True) as client:
        is_own = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run]))
        tasks = client.read_task_runs(task_run_filter=is_own, sort=TaskRunSort.END_TIME_DESC)
    print(f"{'task run':<30}{'state':<12}{'retries':>7}{'seconds':>9}")
    for one in sorted(tasks, key=lambda task: str(task.start_time)):
        seconds = one.total_run_time.total_seconds()
        print(f"{one.name:<30}{one.state_name:<12}{one.run_count - 1:>7}{seconds:>9.1f}")
    return sum(one.run_count - 1 for one in tasks)


def main() -> None:
    started_s = time.monotonic()
    calls, rows = FOLDER / "predict", FOLDER / "embed"
    with prefect_api():
        virnucpro("predict", "examples/contigs.fasta", "-o", calls, "--devices", "cpu", "--workers", "2", "--flow")
        os.environ[VARIABLE] = f"gpu_worker_1/file.open:3:kill:{KILLED}"  # after its first rows are on disk
        print("\nNow two workers embed 400 proteins, and one of them is killed on purpose:")
        embed = ("--model", "virnucpro-tiny-protein", "--devices", "cpu", "--workers", "2", "--flow")
        virnucpro("embed", "examples/proteins.fasta", "-o", rows, *embed)
        with get_client(sync_client=True) as client:
            latest = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=2)
        retries = 0
        for run in reversed(latest):
            print(f"\nflow run {run.name}: {run.state_name}")
            retries += show_tasks(run.id)
    assert retries == 1, "a worker was to be killed once"
    assert KILLED.exists()
    virnucpro("verify", calls)
    virnucpro("verify", rows)
    print(f"""
Calls:   {calls}/contigs.tsv, viral.fasta; true kinds: examples/contigs_truth.tsv
Rows:    {rows}/embeddings.h5
Logs:    {rows}/logs
Metrics: {rows}/metrics.prom
Report, to open in a browser:

    {calls}/report.html

All of it took {time.monotonic() - started_s:.0f} s.""")


if __name__ == "__main__":
    main()
