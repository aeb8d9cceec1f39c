"""
The notebook examples/tour.ipynb: its cells, run one after another as a notebook runs them, and what they print.

``python -m tests.tour`` runs it and writes the outputs into it; ``tests/unit/test_tour.py`` compares them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tour.ipynb"
INPUTS = ("contigs.fasta", "contigs_truth.tsv", "proteins.fasta")
_RUN = """
import ast, contextlib, io, json, sys
names, outputs = {"__name__": "__main__"}, []
for number, source in enumerate(json.load(sys.stdin), start=1):
    *lines, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(lines if shows else [*lines, last], []), f"cell {number}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if shows else None
    outputs.append([printed.getvalue(), None if value is None else repr(value)])
print(json.dumps(outputs))
"""


def cells_of(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs_of(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the cells in a fresh process beside a copy of the examples; return the outputs of each."""
    sources = ["".join(cell["source"]) for cell in cells_of(notebook)]
    with tempfile.TemporaryDirectory() as folder:
        for name in INPUTS:
            shutil.copy(NOTEBOOK.parent / name, folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))}
        done = subprocess.run(
            [sys.executable, "-c", _RUN],
            input=json.dumps(sources),
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [_as_outputs(number, *output) for number, output in enumerate(json.loads(done.stdout), start=1)]


def _as_outputs(number: int, printed: str, shown: str | None) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if shown is not None:
        data = {"text/plain": shown.splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def main() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    for number, (cell, outputs) in enumerate(zip(cells_of(notebook), outputs_of(notebook), strict=True), start=1):
        cell |= {"execution_count": number, "outputs": outputs}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
