"""The GPU check runs from end to end over tiny shapes, without the packages that a GPU machine need not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_models, gpu_runs, gpu_table
from benchmarks.gpu_check import Check, copies_and_kernels
from tools.gpu_check_file import write_gpu_check
from virnucpro.models.encoders.esm2_checkpoint import Architecture

REPOSITORY = Path(__file__).parents[2]
WITHOUT = """
import runpy, sys
for name in ("esm", "structlog", "h5py", "prefect", "typer", "rich", "hypothesis", "pydantic"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gpu_check(script, *arguments, **settings):
    command = [sys.executable, "-c", WITHOUT, script, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=200, check=False, **settings)


@pytest.mark.slow
def test_every_section_runs_over_tiny_shapes_from_one_file_without_the_products_other_packages(tmp_path, monkeypatch):
    write_gpu_check(tmp_path / "one" / "gpu_check.pyz")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("OUT", raising=False)
    done = gpu_check(Path("one", "gpu_check.pyz"), "--device", "cpu", "--tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu_check_*.json")
    report = json.loads(path.read_text())
    assert not [name for name, section in report["sections"].items() if "error" in section]
    named = {"peak", "kernels", "esm2_8m", "esm2_650m", "esm2_3b", "dnabert_s", "precision", "overlap", "timeline"}
    assert named <= set(report["sections"])
    assert report["checks"]
    assert all(check["passed"] for check in report["checks"])
    assert report["sections"]["esm2_650m"]["float16, 168 tokens"]["tokens_per_second"] > 0
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert "checks passed" in done.stdout
    assert gpu_table.table(tmp_path).count("\n") == 1, "tiny shapes are no result"
    path.write_text(json.dumps({**report, "tiny": False}))
    header, _, row = gpu_table.table(tmp_path).splitlines()
    assert row.startswith("| cpu | 20")
    assert row.count("|") == header.count("|")
    assert row.endswith(f"| {len(report['checks'])} of {len(report['checks'])} |")


@pytest.mark.slow
def test_whole_runs_start_from_the_one_file_where_their_packages_are(tmp_path):
    write_gpu_check(tmp_path / "gpu_check.pyz")
    options = ("--device", "cpu", "--tiny", "--only", "run_of_proteins", "run_of_dna")
    command = [sys.executable, "-P", "gpu_check.pyz", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DNA, 2 loaders: rows missing" in done.stdout
    assert "left out" not in done.stdout


def test_whole_runs_are_left_out_where_the_product_does_not_tell_its_version(monkeypatch):
    monkeypatch.setattr(gpu_runs.importlib.metadata, "distributions", lambda **_: [])
    state = Check(torch.device("cpu"), is_tiny=True, seconds=60.0)
    assert gpu_runs.run_of_dna(state) == {"left_out": "['virnucpro'] not installed"}


def test_the_page_about_gpus_has_the_table_of_the_results():
    text = gpu_table.PAGE.read_text()
    assert gpu_table.page(text, gpu_table.RESULTS) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_a_sentence(tmp_path):
    done = gpu_check(REPOSITORY / "benchmarks" / "gpu_check.py", "--out", tmp_path)
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("copies", "computations", "share"),
    [
        ([(0, 10)], [(0, 10)], 1.0),
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10)], [(10, 20)], 0.0),
        ([(0, 10), (20, 30)], [(0, 5), (3, 10), (25, 26)], 0.55),
        ([(0, 10)], [(1, 3), (2, 8), (2, 3)], 0.7),
        ([], [(0, 10)], 0.0),
    ],
)
def test_share_of_the_copies_time_in_which_something_is_computed(copies, computations, share):
    assert gpu_models.share_overlapped(copies, computations) == pytest.approx(share)


def test_copies_and_kernels_are_told_apart_in_a_trace():
    def event(category, name, start):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 2.0}

    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1.0),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5.0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 6.0),
        event("kernel", "sm90_gemm", 2.0),
        event("cpu_op", "aten::mm", 0.0),
        {"ph": "M", "name": "process_name"},
    ]
    assert copies_and_kernels(events, "HtoD") == ([(1.0, 3.0)], [(2.0, 4.0)])
    assert copies_and_kernels(events, "DtoH")[0] == [(5.0, 7.0)]


def test_useful_operations_are_those_of_the_formula():
    architecture = Architecture(num_layers=3, hidden_dim=8, attention_heads=2)
    assert gpu_models.esm2_flops(architecture, [5, 2]) == 5 * 3 * (24 * 64 + 4 * 5 * 8) + 2 * 3 * (24 * 64 + 4 * 2 * 8)
