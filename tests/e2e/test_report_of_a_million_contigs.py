"""A report of a million contigs: its memory and the size of its page are those of a report of twenty thousand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.made_prediction import FINGERPRINT, Contig, make_prediction
from virnucpro.store.contig_table import COLUMNS

pytestmark = [pytest.mark.slow, pytest.mark.long]

MEMORY_MARGIN_MIB = 24
PAGE_MARGIN_BYTES = 200_000

WRITE_AND_MEASURE = """
import resource, sys
from pathlib import Path
from virnucpro.report.prediction.page import write_report
from virnucpro.run_layout import PredictionLayout
print(write_report(PredictionLayout(Path(sys.argv[1]))).stat().st_size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def lay_down(folder, contigs):
    """Contigs of 400 to 9,399 nt, every 40th of them viral, every 100th without an open frame."""
    layout = make_prediction(folder, [Contig("k0", 2000)]).layout
    with layout.contigs.open("w") as file:
        file.write("\t".join(COLUMNS) + "\n")
        for number in range(contigs):
            score = 0.5 + (number % 1000) / 2001 if number % 40 == 0 else (number % 997) / 1995
            scored = f"1\t6\t3\t0.500\t{score:.7f}\t{score:.7f}\t{'virus' if score >= 0.5 else 'not virus'}\t"
            closed = "0\t0\t0\t\t\t\tno open frame\tevery reading frame of every chunk holds a stop codon"
            ending = closed if number % 100 == 99 else scored
            length = 400 + 7919 * number % 9000
            file.write(f"contig_{number:07}\t{length}\t4\t3\t{ending}\t{FINGERPRINT}\n")
    return layout


def test_memory_and_page_do_not_grow_with_the_contigs(tmp_path):
    sizes, memory = {}, {}
    for contigs in (20_000, 1_000_000):
        layout = lay_down(tmp_path / str(contigs), contigs)
        command = [sys.executable, "-c", WRITE_AND_MEASURE, layout.output_dir]
        sizes[contigs], memory[contigs] = map(int, subprocess.check_output(command, text=True).split())
    print(f"bytes of the page {sizes}, peak memory in MiB {memory}")
    assert abs(sizes[1_000_000] - sizes[20_000]) < PAGE_MARGIN_BYTES
    assert memory[1_000_000] - memory[20_000] < MEMORY_MARGIN_MIB
    text = re.sub(r"\s+", " ", layout.report.read_text())
    assert "25,000 of 1,000,000 contigs (2.5%) are called viral" in text
    assert "The 2,000 contigs with the highest P(virus), of 1,000,000." in text
    assert "5,000 of 990,000, 2,500 of the 25,000 called viral, and 2,500 of the others, drawn evenly" in text
