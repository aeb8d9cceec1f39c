"""A report of a million contigs: its memory and the size of its page are those of a report of sixty thousand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.made_prediction import FINGERPRINT, Contig, make_prediction
from virnucpro.store.contig_table import UNSCORED, Call, ContigTable

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


def call_of(number):
    """A contig of 400 to 9,399 nt; every 40th is viral, every 100th without an open frame."""
    score = 0.5 + (number % 1000) / 2001 if number % 40 == 0 else (number % 997) / 1995
    is_open = number % 100 != 99
    score = round(score, 7) if is_open else None
    call = Call.NO_OPEN_FRAME if score is None else Call.VIRUS if score >= 0.5 else Call.NOT_VIRUS
    return UNSCORED._replace(
        contig=f"contig_{number:07}",
        length=400 + 7919 * number % 9000,
        chunks=4,
        embedded=True,
        open_chunks=3 if is_open else 0,
        viral_chunks=int(is_open),
        frames=6 if is_open else 0,
        viral_frames=3 if is_open else 0,
        frame_support=0.5 if is_open else None,
        score=score,
        max_score=score,
        call=call,
        reason="" if is_open else "every reading frame of every chunk holds a stop codon",
        fingerprint=FINGERPRINT,
    )


def lay_down(folder, contigs):
    layout = make_prediction(folder, [Contig("k0", 2000)]).layout
    with ContigTable(layout.contigs) as table:
        for start in range(0, contigs, 1000):
            table.write([call_of(number) for number in range(start, start + 1000)])
    return layout


def test_memory_and_page_do_not_grow_with_the_contigs(tmp_path):
    sizes, memory = {}, {}
    for contigs in (60_000, 1_000_000):
        layout = lay_down(tmp_path / str(contigs), contigs)
        command = [sys.executable, "-c", WRITE_AND_MEASURE, layout.output_dir]
        sizes[contigs], memory[contigs] = map(int, subprocess.check_output(command, text=True).split())
    print(f"bytes of the page {sizes}, peak memory in MiB {memory}")
    assert abs(sizes[1_000_000] - sizes[60_000]) < PAGE_MARGIN_BYTES
    assert memory[1_000_000] - memory[60_000] < MEMORY_MARGIN_MIB
    text = re.sub(r"\s+", " ", layout.report.read_text())
    assert "25,000 of 1,000,000 contigs (2.5%) are called viral" in text
    assert (
        "reach the 50,000 contigs with the highest score, of 1,000,000. The other 950,000 are in contigs.tsv only"
        in text
    )
    assert "2,000 of 990,000, 1,000 of the 25,000 called viral, and 1,000 of the others, drawn evenly" in text
