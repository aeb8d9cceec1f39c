"""
Wheels of what a bare machine with a GPU lacks for ``benchmarks/gpu_check.py``, in one folder that is carried there.

The machine has Python, torch (CUDA build), numpy, safetensors and tokenizers. Of transformers the kit takes ESM-2's
files alone. Prints what is carried, kit and tree, and the commands to run there. Run it as
``python -m tools.gpu_kit FOLDER [--python 3.12]``, or ``make gpu-kit``.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
OF_A_RUN = (
    *("structlog", "h5py", "fair-esm", "orjson", "psutil", "pydustmasker", "prometheus-client"),
    *("nvidia-ml-py", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("typer", "annotated-doc", "shellingham", "click", "rich", "pygments", "markdown-it-py", "mdurl"),
    *("dnaio", "xopen", "isal", "zlib-ng", "backports.zstd"),
)
OF_TESTS = (
    *("pytest", "pytest-timeout", "pluggy", "iniconfig", "hypothesis", "sortedcontainers", "attrs", "threadpoolctl"),
)
OF_TRANSFORMERS = ("transformers", "regex")
KEPT_MODELS = ("__init__.py", "auto", "esm")
"""Of transformers' folder of models, which is 80 % of the wheel."""
PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in (12, 17, 24, 27, 28)))
MOST_BYTES = 64 << 20
"""Of kit and tree, which are carried together."""


def fetch(folder: Path, python: str) -> None:
    """Download the wheels for CPython *python* on Linux x86_64 into *folder*, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    which = [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:", *platforms]
    constraints = ["--constraint", str(REPOSITORY / "constraints.txt")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        *which,
        *constraints,
        "--dest",
        str(folder),
    ]
    subprocess.run([*command, *OF_A_RUN, *OF_TESTS, *OF_TRANSFORMERS], check=True)
    (wheel,) = folder.glob("transformers-*.whl")
    shrink(wheel)
    # runs record the version of this package; the code is the tree's
    described = Path(str(distribution("virnucpro")._path))  # type: ignore[attr-defined]  # noqa: SLF001
    shutil.copytree(described, folder / described.name)


def shrink(wheel: Path) -> None:
    """Take all models but ESM-2 out of transformers' wheel."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as kept:
        for info in source.infolist():
            folders = info.filename.split("/")
            if folders[:2] != ["transformers", "models"] or folders[2] in KEPT_MODELS:
                kept.writestr(info, source.read(info), zipfile.ZIP_DEFLATED)
    whole.unlink()


def tree_bytes() -> int:
    """Return the bytes of the files that git does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
    return sum(path.stat().st_size for name in names if name and (path := REPOSITORY / name).is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine, as 3.12")
    options = parser.parse_args()
    gpu_check = importlib.import_module("benchmarks.gpu_check")  # not typed, and it needs torch
    fetch(options.folder, options.python)
    kit = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    both = kit + tree_bytes()
    mib = [f"{size / 2**20:.1f}" for size in (kit, both - kit, both, MOST_BYTES)]
    lines = [f"{options.folder}: {mib[0]} MiB, the tree {mib[1]} MiB, together {mib[2]} of at most {mib[3]} MiB", ""]
    lines.append(f"Carry {options.folder} with the tree. One call a part, each under ten minutes:")
    planned = {part: gpu_check.planned_seconds(part) for part in gpu_check.PARTS}
    for part, what in gpu_check.PARTS.items():
        lines.append(f"python3 benchmarks/gpu_check.py --part {part}    # about {planned[part]} s: {what}")
    lines.append(
        f"Together about {sum(planned.values()) / 60:.0f} minutes. Results go to $OUT, or to the folder of --out."
    )
    sys.stdout.write("\n".join([*lines, ""]))
    sys.exit(f"more than {mib[3]} MiB" if both > MOST_BYTES else 0)


if __name__ == "__main__":
    main()
