"""
A real SLURM on this host, with Debian's packages: munged, slurmctld and one slurmd, with a folder and ports of its own.

The node has two GPUs, which are none, and as many CPUs as the test says, so that jobs wait in the queue when a test
wants it. Nothing is kept when the block ends, and no job is left.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.clusters import free_port, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo")


class Slurm:
    """A SLURM that is running."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command):
        """Run one of SLURM's programs; return what it says."""
        return subprocess.run(
            command, env=self.environ, cwd=self.folder, check=True, capture_output=True, text=True, timeout=30
        ).stdout.strip()

    def jobs(self):
        """Return number -> state of the jobs that wait or run."""
        return dict(line.split() for line in self.run("squeue", "--noheader", "--format=%i %T").splitlines())

    def occupy(self, cpus):
        """Give CPUs of the node to a job that does nothing; return its number."""
        script = self.folder / "occupy.sh"
        script.write_text("#!/bin/sh\nexec sleep 600\n")
        return self.run(
            "sbatch", "--parsable", "--output=/dev/null", f"--cpus-per-task={cpus}", "--mem=1M", str(script)
        )

    def cancel(self, *jobs):
        """End jobs."""
        self.run("scancel", *jobs)


@contextmanager
def slurm(folder, *, cpus):
    """Start it, in a folder with a short name; skip the test where it is not installed."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)}: install Debian's packages slurm-wlm and munge")
    socket = folder / "munge" / "socket"
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o600)
    (folder / "slurm.conf").write_text(
        f"""
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
KillWait=2
NodeName=node NodeHostname=localhost NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
    )
    # without it slurmd looks for cgroups, which it finds in no container
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    service = Slurm(folder)
    with ExitStack() as stack:
        files = (f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file"))
        _started(stack, service, "munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_until(socket.exists, seconds=20)
        _started(stack, service, "slurmctld", "-D", "-c")
        _started(stack, service, "slurmd", "-D", "-N", "node")
        try:
            wait_until(lambda: "idle" in service.run("sinfo", "--noheader", "--format=%t"), seconds=30)
            yield service
        finally:
            _end_jobs(service)


def _started(stack, service, program, *arguments):
    with (service.folder / f"{program}.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *arguments], env=service.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )

    def end():
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _end_jobs(service):
    left = service.jobs()
    if left:
        service.cancel(*left)
        deadline_s = time.monotonic() + 30
        while service.jobs() and time.monotonic() < deadline_s:
            time.sleep(0.2)
