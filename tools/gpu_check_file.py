"""
One file that checks an NVIDIA GPU anywhere, ``build/gpu_check.pyz``: ``benchmarks/gpu_check.py`` and what that needs.

``python gpu_check.pyz`` needs torch 2.10 or later and numpy, says so where they are missing, and leaves its result in
the working folder; ``--help`` lists what more lets it do more. Run it as ``python -m tools.gpu_check_file [PATH]``.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WEIGHTS = "virnucpro/models/weights"
FILES = (
    "benchmarks/gpu_*.py",
    "examples/proteins.fasta",
    f"{WEIGHTS}/virnucpro-tiny-protein/*",
    f"{WEIGHTS}/virnucpro-tiny-dna/tokenizer.json",
)
MODULES = "virnucpro/**/*.py"
MAIN = """\
import os, runpy, sys, tempfile, zipfile
from importlib.util import find_spec
from pathlib import Path

if missing := [name for name in ("torch", "numpy") if find_spec(name) is None]:
    sys.exit(
        f"gpu_check.pyz needs torch 2.10 or later (its CUDA build) and numpy; not installed: {', '.join(missing)}. "
        "Sections that need more packages are left out by name where these are missing."
    )
with tempfile.TemporaryDirectory() as folder:
    zipfile.ZipFile(sys.argv[0]).extractall(folder)
    os.environ.setdefault("OUT", os.getcwd())
    runpy.run_path(str(Path(folder, "benchmarks", "gpu_check.py")), run_name="__main__")
"""


def write_gpu_check(path: Path) -> None:
    """Write the file; the folder is made where it is absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", MAIN)
        for pattern in (*FILES, MODULES):
            for file in sorted(REPOSITORY.glob(pattern)):
                archive.write(file, file.relative_to(REPOSITORY))


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "build" / "gpu_check.pyz"
    write_gpu_check(path)
    sys.stdout.write(f"{path}: {path.stat().st_size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
