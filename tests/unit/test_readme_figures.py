"""The README's figures are those of the benchmarks' last results."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def test_the_readme_shows_the_table_and_the_plot_that_the_benchmarks_wrote():
    readme = (REPOSITORY / "README.md").read_text()
    assert (RESULTS / "table.md").read_text().strip() in readme
    shown = re.findall(r"!\[[^\]]*\]\((benchmarks/results/[^)]+)\)", readme)
    assert shown == ["benchmarks/results/speed.svg"]
    assert (REPOSITORY / shown[0]).read_text().rstrip().endswith("</svg>")
