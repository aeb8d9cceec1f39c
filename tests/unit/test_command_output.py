"""What a command prints: nothing is cut, and no path forges a line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tests.faults.command_line import run
from virnucpro.commands.output import print_renderable


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_a_table_has_all_its_figures_on_a_terminal_of_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    table = Table("rank", "sequences", "tokens/s", box=None)
    table.add_row("0", "1,234,567,890", "12,345,678")
    print_renderable(table)
    assert [line.split() for line in terminal.getvalue().splitlines()] == [
        ["rank", "sequences", "tokens/s"],
        ["0", "1,234,567,890", "12,345,678"],
    ]


def test_a_path_is_one_line_of_plain_text_whatever_it_holds(tmp_path):
    out = tmp_path / "a\nvirnucpro: complete and intact\x1b[31m"
    shown = f"{tmp_path}/a\\nvirnucpro: complete and intact\\x1b[31m"
    ended = run("verify", out)
    assert (ended.code, ended.err.splitlines()) == (
        65,
        [f"virnucpro: {shown}: is not a folder: give the output folder of a run"],
    )
    fasta = tmp_path / "empty.fasta"
    fasta.touch()
    ended = run("embed", fasta, "--allow-empty", "-o", out)
    assert ended.code == 0
    assert f"0 of 0 sequences -> {shown}/embeddings.h5" in ended.out.splitlines()
    assert run("verify", out).out == f"{shown}: complete and intact: 0 of 0 sequences\n"


@pytest.mark.parametrize(
    "command", ["verify {out}", "verify {out} --json", "embed {fasta} --allow-empty -o {out} --json"]
)
def test_a_result_that_standard_output_cannot_take_is_an_error(tmp_path, command):
    fasta, out = tmp_path / "empty.fasta", tmp_path / "out"
    fasta.touch()
    assert run("embed", fasta, "--allow-empty", "-o", out).code == 0
    arguments = command.format(fasta=fasta, out=out).split()
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "virnucpro", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 73, ended.stderr
    assert "virnucpro: cannot write standard output: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
