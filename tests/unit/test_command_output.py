"""What a command prints: nothing is cut, and no path forges a line."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tests.command_line import run
from virnucpro.api import embed_fasta, predict_fasta
from virnucpro.commands.output import print_renderable
from virnucpro.errors import BadInputError
from virnucpro.pipeline.multi_gpu_inference import run_esm2_multi_gpu


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


@pytest.mark.parametrize("command", ["verify {out}", "embed {fasta} --allow-empty -o {out} --json"])
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


@pytest.mark.parametrize(
    "command",
    [
        "embed nowhere.fa -o out --model {model}",
        "predict nowhere.fa -o out --dna-model {model}",
        "evaluate nowhere.fa -o out --truth truth.tsv --classifier nonesuch",
        "train nowhere.fa -o out --dna-model {model}",
        "train truth.tsv -o out --genomes nowhere.fa --dna-model {model}",
    ],
)
def test_a_missing_input_is_told_before_any_model_is_looked_for(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "truth.tsv").write_text("contig\tlabel\na\tvirus\n")
    ended = run(*command.format(model=tmp_path / "absent.pt").split())
    assert (ended.code, ended.err.splitlines()[-1]) == (
        65,
        "nowhere.fa: No such file or directory: check the name and the permissions",
    )
    assert not (tmp_path / "out").exists()


def test_a_missing_input_of_the_library_is_told_before_any_model_is_looked_for(tmp_path):
    with pytest.raises(BadInputError, match="No such file"):
        embed_fasta(tmp_path / "nowhere.fa", tmp_path / "out", model=tmp_path / "absent.pt")
    with pytest.raises(BadInputError, match="No such file"):
        predict_fasta(tmp_path / "nowhere.fa", tmp_path / "out", dna_model=tmp_path / "absent.pt")
    with pytest.raises(BadInputError, match="No such file"):
        run_esm2_multi_gpu([tmp_path / "nowhere.fa"], tmp_path / "out", str(tmp_path / "absent.pt"))
