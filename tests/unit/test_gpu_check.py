"""The GPU check runs from end to end over tiny shapes, without the packages that a GPU machine need not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_dna, gpu_models, gpu_parity, gpu_runs, gpu_speed, gpu_steps, gpu_table
from benchmarks.gpu_measure import Check
from benchmarks.gpu_roofline import Rates
from tests.bare_machine import bare_environment
from tests.traces import copies_and_kernels, share_overlapped
from tools import gpu_kit
from tools.gpu_check_file import write_gpu_check
from virnucpro.models import esm2_flash
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.encoders.fused_linear import normalised

REPOSITORY = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--tiny")


def run(script, *arguments, **settings):
    command = [sys.executable, script, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, check=False, **settings)


@pytest.fixture
def check():
    return Check(torch.device("cpu"), is_tiny=True, seconds=600.0)


@pytest.mark.slow
def test_one_file_runs_every_section_or_says_why_not_where_only_torch_and_numpy_are(tmp_path):
    write_gpu_check(tmp_path / "one" / "gpu_check.pyz")
    done = run(Path("one", "gpu_check.pyz"), *TINY, cwd=tmp_path, env=bare_environment(tmp_path / "bare"))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("gpu_check_*.json")
    report = json.loads(path.read_text())
    sections = report["sections"]
    assert set(sections) == {section.name for section in gpu_check.SECTIONS}
    assert not [name for name, section in sections.items() if "error" in section]
    needs_a_package = {section.name for section in gpu_check.SECTIONS if section.needs}
    assert {name for name, one in sections.items() if "not installed" in one.get("left_out", "")} == needs_a_package
    needs_a_gpu = {"waits", "sanitizer", "step_parity"}
    assert {name for name, one in sections.items() if "left_out" in one} == needs_a_package | needs_a_gpu
    assert "left out: dna_from_letters (not installed: tokenizers)" in done.stdout
    assert sections["precision"]["bundled encoder"] == {"left_out": "safetensors is not installed"}
    assert sections["esm2_650m"]["float16, 168 tokens"]["tokens_per_second"] > 0
    assert sections["esm2_650m"]["transformers, 168 tokens"] == {"left_out": "transformers is not installed"}
    assert report["checks"]
    assert all(item["passed"] for item in report["checks"])
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert gpu_table.table(tmp_path).count("\n") == 1, "tiny shapes are no result"
    path.write_text(json.dumps({**report, "tiny": False}))
    header, _, row = gpu_table.table(tmp_path).splitlines()
    assert row.startswith("| cpu | 20")
    assert row.count("|") == header.count("|")
    assert row.endswith(f"| {len(report['checks'])} of {len(report['checks'])} |")


@pytest.mark.long
@pytest.mark.slow
def test_whole_runs_start_from_the_one_file_where_their_packages_are(tmp_path):
    write_gpu_check(tmp_path / "gpu_check.pyz")
    options = ("--out", tmp_path, "--only", "run_of_proteins", "run_that_is_killed", "run_of_dna")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = run("-P", "gpu_check.pyz", *TINY, *options, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DNA, 2 loaders: rows missing" in done.stdout
    assert "left out" not in done.stdout
    (path,) = tmp_path.glob("gpu_check_*.json")
    killed = json.loads(path.read_text())["sections"]["run_that_is_killed"]
    assert killed["run_killed"]
    assert killed["rank"]["sequences_resumed"] >= 4096


def test_the_one_file_says_what_it_needs_where_torch_is_missing(tmp_path):
    write_gpu_check(tmp_path / "gpu_check.pyz")
    done = run("-S", tmp_path / "gpu_check.pyz", cwd=tmp_path, env={})
    assert done.returncode == 1
    assert "needs torch 2.10 or later (its CUDA build) and numpy; not installed: torch, numpy" in done.stderr


def test_every_part_is_planned_for_one_call_and_all_for_half_an_hour():
    planned = {part: gpu_check.planned_seconds(part) for part in gpu_check.PARTS}
    assert {section.part for section in gpu_check.SECTIONS} == set(planned)
    assert max(planned.values()) <= gpu_check.PART_SECONDS <= 600 - 30, "a call takes time to start, too"
    assert sum(planned.values()) < 1800
    listed = [line.split(" | ") for line in gpu_table.PAGE.read_text().splitlines()]
    assert {row[0]: row[-1] for row in listed if row[0].removeprefix("| ") in planned} == {
        f"| {part}": f"{seconds} |" for part, seconds in planned.items()
    }


def test_sections_are_left_out_for_missing_packages_and_for_time(check, monkeypatch):
    monkeypatch.setattr(gpu_runs, "is_installed", lambda name: name != "h5py")
    sections = [
        gpu_check.Section("d", gpu_runs.run_of_proteins, 60, gpu_runs.NEEDED),
        gpu_check.Section("b", gpu_speed.rates, 601),
    ]
    found = gpu_check.run_sections(check, sections)
    assert found["run_of_proteins"]["left_out"] == "h5py not installed"
    assert "601 planned" in found["rates"]["left_out"]


def test_a_section_that_fails_is_a_failed_check_and_the_next_one_runs(check):
    def broken(_check):
        raise ValueError("broken on purpose")

    found = gpu_check.run_sections(
        check, [gpu_check.Section("b", broken, 1), gpu_check.Section("b", gpu_speed.rates, 1)]
    )
    assert found["broken"]["error"] == "ValueError: broken on purpose"
    assert [(item["check"], item["passed"]) for item in check.verdicts] == [("broken", False)]
    assert found["rates"]["tflops"]["float16"] > 0


def test_a_package_of_ours_without_its_version_is_not_installed(monkeypatch):
    monkeypatch.setattr(gpu_runs.importlib.metadata, "distributions", lambda **_: [])
    assert not gpu_runs.is_installed("virnucpro")


def test_the_page_about_gpus_has_the_table_of_the_results():
    text = gpu_table.PAGE.read_text()
    assert gpu_table.page(text, gpu_table.RESULTS) == text


def test_the_newest_parts_of_one_lease_are_one_row_and_older_ones_are_not_counted(tmp_path):
    def result(name, date, part, passed, sections, *, device="H100"):
        machine = {"device": device, "date": date, "versions": {"torch": "2.11.0"}}
        checks = [{"check": name, "passed": passed}]
        report = {"machine": machine, "part": part, "tiny": False, "checks": checks, "sections": sections}
        (tmp_path / f"gpu_check_{name}.json").write_text(json.dumps(report))

    fast, slow = ({"tokens_per_second": rate, "share_of_peak": 0.5} for rate in (2000.0, 1000.0))
    result("old", "2026-11-26T10:00:00+00:00", None, False, {"esm2_3b": {"float16, 168 tokens": fast}})
    result("b_first", "2026-11-28T10:00:00+00:00", "b", False, {"esm2_650m": {"float16, 168 tokens": slow}})
    result("b_again", "2026-11-28T10:20:00+00:00", "b", True, {"esm2_650m": {"float16, 168 tokens": fast}})
    result("c", "2026-11-28T10:10:00+00:00", "c", True, {"dnabert_s": {**slow, "share_of_roofline": 0.75}})
    result("other", "2026-11-28T10:15:00+00:00", "c", True, {"dnabert_s": fast}, device="H200")
    rows = gpu_table.table(tmp_path).splitlines()[2:]
    assert rows == [
        "| H100 | 2026-11-28 | 2.11.0 |  | 2,000 (50%) |  | 1,000 (50%, 75%) |  | 2 of 2 |",
        "| H200 | 2026-11-28 | 2.11.0 |  |  |  | 2,000 (50%) |  | 1 of 1 |",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_a_sentence(tmp_path):
    environment = bare_environment(tmp_path / "bare")
    done = run(REPOSITORY / "benchmarks" / "gpu_check.py", "--out", tmp_path / "out", env=environment)
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(tmp_path):
    script, out = REPOSITORY / "benchmarks" / "gpu_check.py", tmp_path / "file" / "out"
    out.parent.write_text("")
    environment = bare_environment(tmp_path / "bare")
    done = run(script, "--device", "cpu", "--tiny", "--only", "rates", "--out", out, env=environment)
    assert (done.returncode, done.stderr) == (
        1,
        f"gpu_check: {out} cannot be made (Not a directory): name another folder with --out\n",
    )


@pytest.mark.parametrize(
    ("code", "said", "passed"),
    [
        (0, "", [True, True]),
        (9, "hazard in _rotate_rows", [False, False]),
        (9, "hazard in flash_fwd_kernel", [False, True]),
        (3, "no device", None),
    ],
)
def test_what_compute_sanitizer_finds_is_a_check(check, tmp_path, monkeypatch, code, said, passed):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho {said}\nexit {code}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    check.device = torch.device("cuda:0")
    if passed is None:
        with pytest.raises(RuntimeError, match=r"memcheck ended with 3: .* no device"):
            gpu_parity.sanitizer(check)
        return
    gpu_parity.sanitizer(check)
    assert [item["passed"] for item in check.verdicts] == passed
    calls = (tmp_path / "calls").read_text()
    assert "--tool=memcheck --error-exitcode=9" in calls
    assert "--tool=racecheck --error-exitcode=9" in calls


SAMPLES = """\
1980, 2619, 690.11, 61, 0x0000000000000004
1725, 2619, 701.50, 62, 0x0000000000000004
1980, 2619, [N/A], 60, 0x0000000000000000
"""


def test_clocks_power_and_throttling_are_those_that_nvidia_smi_tells(check, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'EOF'\n{SAMPLES}EOF\necho \"$@\" > {tmp_path}/asked\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    check.device = torch.device("cuda:0")
    with gpu_speed.watched(check, "650M") as figures:
        pass
    assert "--id=3 --query-gpu=clocks.sm," in (tmp_path / "asked").read_text()
    assert (figures["samples"], figures["clocks.sm"], figures["temperature.gpu"]) == (3, 1980, 61)
    assert figures["power.draw"] == pytest.approx(695.805)
    assert figures["throttled"] == {"power cap": pytest.approx(2 / 3)}
    assert "power cap 67%" in check.rows[-1][1]


def test_why_there_are_no_clocks_is_told(check):
    assert "Field" in gpu_speed.summary("Field is not a valid field to query.")["left_out"]
    with gpu_speed.watched(check, "650M") as figures:
        pass
    assert figures["left_out"] == "no GPU"


USES_KIT = """
import subprocess, sys
from pathlib import Path
from benchmarks import gpu_check
gpu_check.use_kit(Path(sys.argv[1]))
import numpy, of_the_kit
subprocess.run([sys.executable, "-c", "import of_the_kit; print(of_the_kit.__file__)"], check=True)
"""


def test_a_kit_is_behind_what_is_installed_reaches_processes_and_is_left_as_it_was(tmp_path):
    with zipfile.ZipFile(tmp_path / "of_the_kit-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("of_the_kit.py", "")
        archive.writestr("numpy.py", "raise ImportError")
    done = run("-c", USES_KIT, tmp_path, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("of_the_kit.py")
    assert not Path(done.stdout.strip()).exists(), "what was unpacked goes at the end"
    assert [path.name for path in tmp_path.iterdir()] == ["of_the_kit-1.0-py3-none-any.whl"]


def test_the_kit_has_of_transformers_what_esm2_needs(tmp_path):
    wheel = tmp_path / "transformers-5.0-py3-none-any.whl"
    kept = {"transformers/__init__.py", "transformers/models/__init__.py", "transformers/models/esm/modeling_esm.py"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in {*kept, "transformers/models/bert/modeling_bert.py"}:
            archive.writestr(name, "")
    gpu_kit.shrink(wheel)
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    assert set(zipfile.ZipFile(wheel).namelist()) == kept


def test_lengths_are_those_of_the_bundled_proteins():
    tokens = gpu_models.protein_tokens(4000)
    assert tokens == sorted(tokens, reverse=True)
    assert (tokens[0], tokens[-1]) == (1024, 10)
    assert 270 <= tokens[2000] <= 310


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
    assert share_overlapped(copies, computations) == pytest.approx(share)


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


class PlainSteps:
    """What Triton's kernels do, by PyTorch's operators."""

    rotate = staticmethod(esm2_flash._rotate)

    @staticmethod
    def add_and_normalise(x_TD, y_TD, norm):
        return y_TD.copy_(normalised(norm, x_TD.add_(y_TD)))


def test_kernels_between_products_are_compared_with_operators_by_numbers_and_by_the_predicted_gain(check, monkeypatch):
    steps = esm2_flash.StepKernels(PlainSteps, "the test says so")
    monkeypatch.setattr(esm2_flash, "choose_step_kernels", lambda *_: steps)
    found = gpu_steps.step_parity(check)
    assert {key.split(", ")[1] for key in found} == {"rotary", "sum", "norm"}
    compared = gpu_steps.step_kernels(check)["650M, float16"]
    assert compared["difference"] < 1e-2
    assert compared["gain"][0] > 0
    assert compared["predicted_gain"] > 1
    monkeypatch.setattr(PlainSteps, "rotate", staticmethod(lambda *_: None))
    assert max(gpu_steps.step_parity(check).values()) > 0.1
    assert not all(item["passed"] for item in check.verdicts)


def test_targets_of_real_shapes_are_shares_of_the_roofline(monkeypatch):
    """On a card that does 1e12 operations and 1e10 bytes a second, at 0.8 and 0.6 of its roofline."""
    card = Rates(dict.fromkeys((torch.float16, torch.bfloat16), 1e12), 1e10)
    for module in (gpu_speed, gpu_dna):
        monkeypatch.setattr(module, "rates_of", lambda _: card)
    monkeypatch.setattr(gpu_models, "ESM2", dict.fromkeys(gpu_models.ESM2, gpu_models.TINY))
    monkeypatch.setattr(gpu_models, "mosaic_bert_config", lambda **_: MosaicBertConfig(num_hidden_layers=1))
    monkeypatch.setattr(gpu_speed.importlib.util, "find_spec", lambda _: None)
    passed = {}
    for share in (0.8, 0.6, 0.5):
        state = Check(torch.device("cpu"), is_tiny=False, seconds=600.0)

        def row(_check, _label, _model, _batches, seconds, share=share):
            return {"tokens_per_second": share / seconds[1], "share_of_roofline": share}

        for module in (gpu_speed, gpu_dna):
            monkeypatch.setattr(module, "speed_row", row)
        gpu_speed.esm2_650m(state)
        gpu_speed.esm2_8m(state)
        gpu_dna.dnabert_s(state)
        passed[share] = [item["passed"] for item in state.verdicts]
    assert passed == {0.8: [True] * 12, 0.6: [False] * 10 + [True] * 2, 0.5: [False] * 12}
