"""Hosts as they are: MIG, old GPUs, lost ones and no NVML, by a driver's library that is built here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

H100 = "NVIDIA_H100 9.0"
DIVIDED = [f"GPU-a {H100} 0 -1", f"GPU-b {H100} 0 -1", f"MIG-a0 {H100} 0 0", f"MIG-a1 {H100} 0 0"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of a libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: install Debian's package gcc")
    source = Path(__file__).with_name("fake_nvidia_ml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@pytest.fixture
def host(tmp_path, library):
    """Return a function: what a program prints as JSON on a host with these GPUs, and what it says."""

    def told(program, gpus, **environ):
        listed = tmp_path / "gpus"
        if gpus is not None:
            listed.write_text("".join(f"{gpu}\n" for gpu in gpus))
        ours = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        place = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(listed), "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-c", f"import json\n{program}"]
        done = subprocess.run(
            command, env=ours | place | environ, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        *said, last = done.stdout.splitlines()
        return json.loads(last), "\n".join(said) + done.stderr

    return told


CHOSEN = """
from virnucpro.pipeline.devices import choose_devices
print(json.dumps([one.token for one in choose_devices("auto").candidates]))
"""


@pytest.mark.parametrize(
    ("gpus", "tokens"),
    [
        ([f"GPU-a {H100} 0 -1", f"GPU-b {H100} 0 -1"], ["0", "1"]),
        ([f"GPU-a {H100} 1 -1", f"GPU-b {H100} 0 -1"], ["0", "1"]),
        (DIVIDED, ["MIG-a0", "MIG-a1", "GPU-b"]),
        ([f"GPU-a {H100} 0 -1", f"GPU-b {H100} 1 -1", f"MIG-a0 {H100} 0 0"], ["MIG-a0"]),
        ([], [""]),
        (None, [""]),
    ],
    ids=["whole", "one lost: named by its worker", "two instances", "one lost beside MIG", "none", "no driver"],
)
def test_auto_takes_every_gpu_and_every_instance(host, gpus, tokens):
    assert host(CHOSEN, gpus)[0] == tokens


def test_the_monitor_reads_a_real_library_and_bears_a_loss(host):
    program = """
import os
from virnucpro.telemetry.metrics.gpu_monitor import GpuMonitor
monitor = GpuMonitor([(one, one) for one in ("GPU-b", "MIG-a0")])
before = monitor.sample()
lines = open(os.environ["FAKE_NVML"]).read()
open(os.environ["FAKE_NVML"], "w").write(lines.replace("GPU-b NVIDIA_H100 9.0 0", "GPU-b NVIDIA_H100 9.0 1"))
after = monitor.sample()
monitor.close()
print(json.dumps([[vars(one) for one in samples] for samples in (before, after)]))
"""
    (whole, instance), (left,) = host(program, DIVIDED)[0]
    assert (whole["device"], whole["uuid"], instance["uuid"]) == ("GPU-b", "GPU-b", "MIG-a0")
    assert (whole["utilization"], instance["utilization"]) == (0.37, None)
    assert (whole["memory_used_bytes"], whole["memory_total_bytes"]) == (5 << 30, 80 << 30)
    assert (whole["power_watts"], whole["temperature_celsius"], whole["sm_clock_hertz"]) == (345.0, 61.0, 1.41e9)
    assert [reason for reason, is_so in whole["throttle"].items() if is_so] == ["software_thermal"]
    assert left["device"] == "MIG-a0"


@pytest.mark.parametrize(
    ("gpus", "precision"),
    [
        ([f"GPU-a {H100} 0 -1"], "bf16"),
        (["GPU-a Tesla_V100 7.0 0 -1"], "fp16"),
        ([f"GPU-a {H100} 0 -1", "GPU-b Tesla_T4 7.5 0 -1"], "fp16"),
        (None, "bf16"),
    ],
)
def test_dnabert_s_takes_fp16_where_a_gpu_has_no_bf16_and_says_so(host, gpus, precision):
    program = """
from virnucpro.models.configuration import configure_model
from virnucpro.settings import EmbeddingSettings
found = [configure_model(EmbeddingSettings(model=name), device_type=kind).precision
         for name, kind in (("virnucpro-tiny-dna", "cuda"), ("virnucpro-tiny-dna", "cpu"))]
print(json.dumps(found))
"""
    found, said = host(program, gpus)
    assert found == [precision, "fp32"]
    assert ("does not compute in bf16" in said) == (precision == "fp16")


@pytest.mark.parametrize("count", [0, 3])
def test_without_nvml_torch_counts_and_no_run_is_silently_on_the_cpu(host, tmp_path, count):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"class cuda:\n    device_count = lambda: {count}\n")
    program = f"""
from virnucpro import host_gpus
host_gpus.SIGNS = ({str(tmp_path)!r},)
{CHOSEN}
"""
    tokens, said = host(program, None, PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    assert tokens == ([str(number) for number in range(count)] or [""])
    assert ("gpus.counted_by_torch" in said) == (count > 0)
    assert ("computing on the CPU" in said) == (count == 0)
