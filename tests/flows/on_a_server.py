"""What the tests of flows look at and do while a private Prefect server runs."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time

import psutil
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.logging.handlers import APILogWorker


def worker_processes():
    return {
        child.pid: child
        for child in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline() if child.is_running() else [])
    }


class FirstWorkerKiller(threading.Thread):
    """Kills the first *kills* worker processes that appear, for real."""

    def __init__(self, kills: int) -> None:
        super().__init__(daemon=True)
        self.kills = kills
        self.killed: list[int] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set() and len(self.killed) < self.kills:
            for pid in worker_processes():
                if pid not in self.killed and len(self.killed) < self.kills:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)
            time.sleep(0.05)


def artifacts(key):
    """All artifacts of this name, the newest first."""
    with get_client(sync_client=True) as client:
        return client.request(
            "POST",
            "/artifacts/filter",
            json={
                "artifacts": ArtifactFilter(key=ArtifactFilterKey(any_=[key])).model_dump(mode="json"),
                "sort": "CREATED_DESC",
            },
        ).json()


def artifact(key):
    return artifacts(key)[0]["data"]


def edges_of(client, run_id):
    """The graph of a flow run as Prefect's page draws it: each box -> those that it follows."""
    nodes = dict(client.request("GET", f"/flow_runs/{run_id}/graph-v2").json()["nodes"])
    labels = {name: re.sub(r"-[0-9a-f]{3}$| / .*", "", node["label"]) for name, node in nodes.items()}
    parents = {name: sorted({labels[parent["id"]] for parent in node["parents"]}) for name, node in nodes.items()}
    return [(labels[name], parents[name]) for name in nodes]


def logs_of_runs():
    """The newest 200 lines that the API has, by time: (level, message, task run or None)."""
    APILogWorker.drain_all(timeout=30, at_exit=False)
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/logs/filter", json={"sort": "TIMESTAMP_DESC", "limit": 200}).json()
    return [(logging.getLevelName(item["level"]), item["message"], item["task_run_id"]) for item in reversed(found)]
