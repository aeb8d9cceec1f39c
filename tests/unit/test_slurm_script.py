"""What the batch script does with signals, settings and exit codes; programs of ours stand for SLURM's and a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "deployments" / "slurm" / "worker.sbatch"
SETTINGS = REPOSITORY / "deployments" / "slurm" / "worker.env"

WORKER = """#!/bin/bash
# stands for `python -m flows.worker`: says what it was given, drains for a moment when it is told to, ends with a code
echo "$@" > arguments
echo "$PREFECT_HOME" > prefect_home
trap 'echo TERM >> told; sleep 0.3; echo drained >> told; exit ${CODE_AFTER_TERM:-0}' TERM
[ -z "${CODE:-}" ] || exit "$CODE"
touch up
for _ in {1..300}; do sleep 0.1 & wait $!; done
"""
SQUEUE = '#!/bin/bash\n[ "$*" = "--noheader --job 7 --format %T" ] && cat state\n'
SCONTROL = '#!/bin/bash\necho "$*" >> scontrol\n'


class Job:
    """The script in an allocation that is made of files."""

    def __init__(self, folder, password="virnucpro:0123456789abcdef"):
        self.folder = folder
        for path, text in {
            ".venv/bin/python": WORKER,
            "bin/squeue": SQUEUE,
            "bin/scontrol": SCONTROL,
            "deployments/with-password": (REPOSITORY / "deployments" / "with-password").read_text(),
            "settings": SETTINGS.read_text().replace("AUTH_STRING=\n", f"AUTH_STRING={password}\n"),
        }.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o600 if path == "settings" else 0o755)
        (folder / "state").write_text("RUNNING\n")
        (folder / "tmp").mkdir()

    def start(self, **environ):
        return subprocess.Popen(
            ["bash", SCRIPT],
            env={
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "SLURM_SUBMIT_DIR": str(self.folder),
                "SLURM_JOB_ID": "7",
                "TMPDIR": str(self.folder / "tmp"),
                "VIRNUCPRO_WORKER_ENV": str(self.folder / "settings"),
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self, process):
        said, _ = process.communicate(timeout=30)
        assert list((self.folder / "tmp").iterdir()) == []  # Prefect's own files are gone
        return said

    def read(self, name):
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, name):
        deadline_s = time.monotonic() + 20
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline_s, name
            time.sleep(0.02)


def test_before_the_time_limit_the_worker_drains_and_the_job_is_queued_again(tmp_path):
    job = Job(tmp_path)
    process = job.start(CUDA_VISIBLE_DEVICES="2,3", SLURM_RESTART_COUNT="4")
    job.wait_for("up")
    process.send_signal(signal.SIGTERM)
    said = job.end(process)
    assert process.returncode == 0
    assert job.read("told") == ["TERM", "drained"]
    assert job.read("scontrol") == ["requeue 7"]
    assert "job 7, start 4, on" in said
    assert "GPUs 2,3" in said
    assert job.read("arguments")[0].startswith("-m flows.worker --pool virnucpro --name ")
    assert job.read("prefect_home")[0].startswith(str(tmp_path / "tmp"))


def test_scancel_is_not_passed_on_since_the_worker_has_it_already_and_the_job_stays_away(tmp_path):
    job = Job(tmp_path)
    process = job.start()
    job.wait_for("up")
    (tmp_path / "state").write_text("COMPLETING\n")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert job.read("told") == []
    subprocess.run(["pkill", "-TERM", "-P", str(process.pid)], check=True)  # as SLURM tells every process
    job.end(process)
    assert job.read("told") == ["TERM", "drained"]
    assert job.read("scontrol") == []


@pytest.mark.parametrize("code", [0, 70])
def test_the_workers_exit_code_is_the_jobs(tmp_path, code):
    job = Job(tmp_path)
    process = job.start(CODE=str(code))
    job.end(process)
    assert process.returncode == code
    assert job.read("scontrol") == []


def test_settings_that_others_may_read_or_that_lack_the_password_are_refused(tmp_path):
    job = Job(tmp_path / "open")
    (tmp_path / "open" / "settings").chmod(0o644)
    process = job.start()
    assert "chmod 600" in job.end(process)
    assert process.returncode == 78
    job = Job(tmp_path / "empty", password="")
    process = job.start()
    assert "PREFECT_API_AUTH_STRING must be NAME:PASSWORD" in job.end(process)
    assert process.returncode == 78
    assert job.read("arguments") == []
