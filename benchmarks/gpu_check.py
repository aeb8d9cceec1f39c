"""
Everything that only a GPU can show, in five parts: ``python3 benchmarks/gpu_check.py --part a``, and so on to e.

It needs torch 2.10 or later and numpy; not Prefect, structlog, fair-esm or h5py; it makes its own random weights, and
sequences as long as those of ``examples/``. What else is installed lets it do more: safetensors the bundled encoder,
transformers the baseline, pytest and hypothesis ``tests/gpu``, flash-attn its kernel, tokenizers DNA from nucleotides,
and the packages of a run whole runs (``gpu_runs.py``). ``make gpu-kit`` puts wheels of these into ``build/gpu_kit``.

A section that fails is recorded, and the rest runs. Without ``--part`` all parts run. The figures go to
``benchmarks/results/gpu_check_DATE_PART.json`` (or into ``--out``, or ``$OUT``), a table to the screen; the exit code
is 1 when a check failed.

``--device cpu --tiny`` runs the same code over tiny shapes: this tests the script and measures nothing.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import gpu_dna, gpu_parity, gpu_runs, gpu_speed, gpu_steps  # noqa: E402
from benchmarks.gpu_measure import Check, free  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KIT = REPOSITORY / "build" / "gpu_kit"
PARTS = {
    "a": "parity, order, races",
    "b": "throughput of ESM-2, kernels, clocks",
    "c": "DNABERT-S and its tokenizer",
    "d": "whole runs in worker processes",
    "e": "Triton's kernels and PyTorch's operators",
}
PART_SECONDS = 560.0
"""After which no section of a part begins; a call to a rented machine may take ten minutes."""
PACKAGES = ("torch", "numpy", "triton", "safetensors", "tokenizers", "transformers", "flash-attn", "flash_attn")


@dataclass(frozen=True)
class Section:
    part: str
    run: Callable[[Check], dict[str, Any]]
    seconds: int
    """That it is planned to take on one H100: with fewer left it does not begin."""
    needs: tuple[str, ...] = ()
    """Packages besides torch and numpy."""

    @property
    def name(self) -> str:
        return self.run.__name__


SECTIONS = (
    Section("a", gpu_parity.attention_parity, 30),
    Section("a", gpu_parity.precision, 20),
    Section("a", gpu_parity.transformers_parity, 40, ("transformers",)),
    Section("a", gpu_parity.order_of_rows, 10),
    Section("a", gpu_parity.waits, 10),
    Section("a", gpu_parity.equal_batches, 15),
    Section("a", gpu_parity.sanitizer, 120),
    Section("a", gpu_parity.gpu_tests, 180, ("pytest", "hypothesis")),
    Section("b", gpu_speed.rates, 10),
    Section("b", gpu_speed.esm2_8m, 25),
    Section("b", gpu_speed.esm2_650m, 60),
    Section("b", gpu_speed.esm2_3b, 60),
    Section("b", gpu_speed.slowest_kernels, 25),
    Section("c", gpu_speed.rates, 10),
    Section("c", gpu_dna.dnabert_s, 10),
    Section("c", gpu_dna.dna_from_letters, 20, ("tokenizers",)),
    Section("c", gpu_runs.run_of_dna, 100, gpu_runs.NEEDED),
    Section("d", gpu_runs.run_of_proteins, 65, gpu_runs.NEEDED),
    Section("d", gpu_runs.run_that_is_killed, 120, gpu_runs.NEEDED),
    Section("d", gpu_runs.two_workers_on_one_gpu, 60, gpu_runs.NEEDED),
    Section("d", gpu_runs.run_without_memory, 40, gpu_runs.NEEDED),
    Section("e", gpu_speed.rates, 10),
    Section("e", gpu_steps.step_parity, 20),
    Section("e", gpu_steps.step_kernels, 60),
)


def planned_seconds(part: str) -> int:
    return sum(section.seconds for section in SECTIONS if section.part == part)


def missing(section: Section) -> list[str]:
    return [name for name in section.needs if not gpu_runs.is_installed(name)]


def run_sections(check: Check, sections: Sequence[Section]) -> dict[str, Any]:
    """Run *sections*; a failure is a failed check, and the rest runs."""
    found: dict[str, Any] = {}
    for section in sections:
        name = section.name
        if name in found:  # the rates, once for all parts
            continue
        print(f"{name} ... ", end="", file=sys.stderr, flush=True)
        check.rows.append((f"--- {name}", ""))
        started_s = time.monotonic()
        if absent := missing(section):
            found[name] = check.left_out(name, f"{', '.join(absent)} not installed")
        elif check.seconds_left < section.seconds:
            found[name] = check.left_out(name, f"{check.seconds_left:.0f} s left, {section.seconds} planned")
        else:
            try:
                found[name] = section.run(check)
            except Exception as error:  # noqa: BLE001  the other sections do not depend on this one
                sentence = f"{type(error).__name__}: {error}"
                found[name] = {"error": sentence, "traceback": traceback.format_exc()}
                check.fail(name)
                check.show(name, f"FAILED: {sentence.splitlines()[0][:300]}")
        found[name] |= {"seconds": round(time.monotonic() - started_s, 1), "planned_seconds": section.seconds}
        print(f"{found[name]['seconds']} s", file=sys.stderr, flush=True)
        free(check)
    return found


def machine(check: Check) -> dict[str, Any]:
    described: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {one.name: one.version for one in importlib.metadata.distributions() if one.name in PACKAGES},
        "device": "cpu",
    }
    if check.is_on_gpu:
        properties = torch.cuda.get_device_properties(check.device)
        described["device"] = properties.name
        described["memory_gib"] = round(properties.total_memory / 2**30, 1)
        described["capability"] = f"{properties.major}.{properties.minor}"
        described["cuda"] = torch.version.cuda
    return described


def use_kit(folder: Path) -> None:
    """Let this process and those that it starts import what the wheels in *folder*, if any, hold."""
    if not (wheels := sorted(folder.glob("*.whl"))):
        return
    site = Path(tempfile.mkdtemp(prefix="virnucpro_gpu_kit_"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for described in folder.glob("*.dist-info"):
        shutil.copytree(described, site / described.name, dirs_exist_ok=True)
    # here behind what is installed, as transformers of this machine fits its tokenizers
    sys.path.append(str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))


def say_what_is_missing(sections: Sequence[Section]) -> None:
    """Name the packages that are absent, and the sections that are left out without them."""
    by_packages: dict[str, list[str]] = {}
    for section in sections:
        if absent := missing(section):
            by_packages.setdefault(", ".join(absent), []).append(section.name)
    for packages, names in by_packages.items():
        print(f"left out: {', '.join(names)} (not installed: {packages})")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: tries the script out, measures nothing")
    parts = "; ".join(f"{part}: {what}, about {planned_seconds(part)} s" for part, what in PARTS.items())
    parser.add_argument("--part", choices=list(PARTS), help=parts)
    parser.add_argument("--seconds", type=float, help=f"no section begins after so many; {PART_SECONDS:.0f} a part")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--kit", type=Path, default=KIT, help="folder of wheels of packages that are missing here")
    names = list(dict.fromkeys(section.name for section in SECTIONS))
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=", ".join(names))
    options = parser.parse_args()
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
        sys.exit(f"gpu_check: torch {torch.__version__} is too old: 2.10 or later is needed (varlen_attn)")
    if options.device == "cpu" and not options.tiny:
        sys.exit("gpu_check: on a CPU there is nothing to measure: add --tiny to try the script out, or `make bench`")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"gpu_check: torch {torch.__version__} sees no CUDA device: run it on a machine with an NVIDIA GPU")
    return options


def main() -> None:
    options = _arguments()
    use_kit(options.kit)
    sections = [
        section
        for section in SECTIONS
        if options.part in {None, section.part} and (not options.only or section.name in options.only)
    ]
    seconds = options.seconds or PART_SECONDS * (1 if options.part else len(PARTS))
    check = Check(torch.device("cuda:0" if options.device == "cuda" else "cpu"), options.tiny, seconds)
    folder = options.out or Path(os.environ.get("OUT") or REPOSITORY / "benchmarks" / "results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"gpu_check: {folder} cannot be made ({error.strerror}): name another folder with --out")
    say_what_is_missing(sections)
    described = machine(check)
    found = run_sections(check, sections)
    report = {
        "machine": described,
        "part": options.part,
        "tiny": check.is_tiny,
        "seconds": round(time.monotonic() - check.started_s, 1),
        "checks": check.verdicts,
        "sections": found,
    }
    name = "_".join(filter(None, ["gpu_check", str(datetime.now(UTC).date()), options.part]))
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=2, default=str) + "\n")
    print(
        f"\n{described['device']}, torch {described['versions']['torch']}, {described['date']}, {report['seconds']} s"
    )
    for what, text in check.rows:
        print(f"{what:<70} {text}".rstrip())
    failed = [item["check"] for item in check.verdicts if not item["passed"]]
    print(f"\n{len(check.verdicts) - len(failed)} of {len(check.verdicts)} checks passed; {path}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
