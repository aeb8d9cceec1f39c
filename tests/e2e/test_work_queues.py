"""A queue for each class of hosts, as docs/prefect.md has it: a run goes to a worker of its queue, and to no other."""

from __future__ import annotations

import re

import pytest

from tests import hash_flows
from tests.conftest import REPOSITORY
from tests.prefect_service import POOL

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_run_is_taken_by_a_worker_of_its_queue_alone_and_a_queue_runs_no_more_at_a_time_than_its_limit(
    prefect_server, tmp_path
):
    service = prefect_server
    guide = (REPOSITORY / "docs" / "prefect.md").read_text()
    made = re.findall(r"^prefect (work-queue create .*?) *(?:#.*)?$", guide, re.MULTILINE)
    assert [line.split()[2] for line in made] == ["gpu-large", "gpu-small", "cpu"]
    for line in made:
        created = service.prefect(*line.split())
        assert created.returncode == 0, created.stderr
    fasta = tmp_path / "in.fasta"
    fasta.write_text(">a\nMKTAYIAKQR\n")
    control = hash_flows.control_file(tmp_path / "control.json")

    def start(queue, number):
        deployment = service.deploy(
            "tests/hash_flows.py:embed", f"on-{queue}", queue=queue, **{hash_flows.VARIABLE: str(control)}
        )
        hardware = {"devices": "cpu", "workers": 1}
        out = str(tmp_path / f"{queue}-{number}")
        return service.start(deployment, fasta_files=[str(fasta)], output_dir=out, hardware=hardware)

    roots = {"VIRNUCPRO_DATA_ROOTS": str(tmp_path), "VIRNUCPRO_MODEL_ROOTS": "/"}
    large, first, second = start("gpu-large", 0), start("cpu", 0), start("cpu", 1)
    with service.worker("--name", "a cpu host", "--work-queue", "cpu", **roots):
        runs = [service.wait_for_state(run, "Completed", limit_s=120) for run in (first, second)]
        waiting = service.flow_run(large)
        assert (waiting.state.type.value, waiting.work_queue_name) == ("SCHEDULED", "gpu-large")
    runs.sort(key=lambda run: run.start_time)
    assert runs[0].end_time <= runs[1].start_time  # the queue's limit is one
    assert {run.work_pool_name for run in runs} == {POOL}
    with service.worker("--name", "a large host", "--work-queue", "gpu-large", **roots):
        taken = service.wait_for_state(large, "Completed", limit_s=120)
    names = [run.labels["prefect.worker.name"] for run in (*runs, taken)]
    assert names == ["a cpu host", "a cpu host", "a large host"]
