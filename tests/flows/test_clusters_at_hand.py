"""What is found out before a cluster is asked for anything: SLURM that is not here, or that nobody has described."""

from __future__ import annotations

import pytest

from flows.clusters.hardware import runner_of, started
from virnucpro.errors import ConfigurationError


def refusal(name):
    with pytest.raises(ConfigurationError) as refused, started(runner_of(name), workers=2):
        pytest.fail("it started")
    return str(refused.value)


def test_a_host_without_slurm_is_named_by_what_it_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal("dask://slurm").startswith("no SLURM on this host: sbatch, squeue, scancel not found")


def test_slurm_without_settings_of_dask_jobqueue_leads_to_the_guide(monkeypatch, tmp_path):
    for program in ("sbatch", "squeue", "scancel"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "~/.config/dask/jobqueue.yaml, as deployments/clusters/slurm.md shows" in refusal("dask://slurm")
