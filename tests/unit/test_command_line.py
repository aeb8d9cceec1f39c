"""What makes the command line easy: groups of options, help without a word, quiet runs, completion, the man page."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.command_line import run
from tests.debian_programs import program
from tests.snapshots import ShownTerminal, rank_snapshot, run_snapshot, stage_snapshot, work_snapshot
from tools.man_page import PAGE, page
from virnucpro.errors import ExitCode
from virnucpro.knobs import settings_of
from virnucpro.settings import PredictionSettings
from virnucpro.telemetry.show.progress import PlainView
from virnucpro.telemetry.show.standard_error import wrapped
from virnucpro.telemetry.show.status_file import from_json, to_json
from virnucpro.telemetry.show.terminal import Terminal, lines_of
from virnucpro.telemetry.snapshot import WorkSnapshot


@pytest.mark.parametrize("command", ["", "predict", "models", "models list", "status", "label-reads"])
def test_h_is_help_everywhere(command):
    short, long = run(*command.split(), "-h"), run(*command.split(), "--help")
    assert (short.code, short.out) == (0, long.out)
    assert "Usage: " in short.out


@pytest.mark.parametrize("command", [[], ["models"]])
def test_a_command_alone_shows_its_help_and_succeeds(command):
    assert run(*command) == run(*command, "--help")


def test_the_ten_options_that_most_people_use_come_first_and_the_others_under_advanced():
    headings = re.split(r"^(\S.*):$", run("predict", "--help").out, flags=re.MULTILINE)
    sections = dict(zip(headings[1::2], headings[2::2], strict=True))
    assert [*sections][:2] == ["Arguments", "Options"]
    for setting in settings_of(PredictionSettings, face="command"):
        where = [
            title
            for title, text in sections.items()
            if re.search(rf"^  (-o, )?{setting.option}(?![\w-])", text, re.MULTILINE)
        ]
        assert where == [setting.panel]
    often = re.findall(r"^  (?:-\w, )?(--[\w-]+)", sections["Options"], re.MULTILINE)
    assert set(often) - {"--help"} == {
        *("--output", "--threshold", "--fdr", "--min-length", "--format", "--devices", "--workers"),
        *("--flow", "--json", "--quiet"),
    }
    assert all(title.startswith("Advanced (") for title in [*sections][2:])


def test_a_sentence_is_broken_between_words_on_a_narrow_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def fileno(self):
            return 0

    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((30, 24)))
    text = (
        "29 contigs: 15 virus\n  Too few contigs (29; 200 needed) to estimate the share of viruses\n/a/path/" + "x" * 40
    )
    assert wrapped(text, Terminal()).split("\n") == [
        "29 contigs: 15 virus",
        "  Too few contigs (29; 200",
        "    needed) to estimate the",
        "    share of viruses",
        "/a/path/" + "x" * 40,
    ]
    assert wrapped(text, io.StringIO()) == text


@pytest.fixture(scope="module")
def finished(tmp_path_factory, examples_dir):
    out = tmp_path_factory.mktemp("quiet") / "out"
    done = run("predict", examples_dir / "contigs.fasta", "-o", out, "--devices", "cpu", "--quiet")
    return out, done


def test_a_quiet_run_says_nothing_and_a_quiet_mistake_says_what_it_is(finished, examples_dir):
    out, done = finished
    assert (done.code, done.out, done.err) == (0, "", "")
    assert run("verify", out, "-q") == (0, "", "")
    for options in (("--threshold", "0.8"), (), ("--metrics-port", "0"), ("--threshold", "0.71")):  # kept, changed
        again = run("predict", examples_dir / "contigs.fasta", "-o", out, *options, "--quiet")
        assert again == (0, "", ""), options
    changed = run("predict", examples_dir / "contigs.fasta", "-o", out, "--min-length", "400", "--quiet")
    assert (changed.code, changed.out) == (78, "")
    assert "minimal length was 0, now 400" in changed.err


def test_u_is_read_as_t_for_models_of_dna_alone(tmp_path):
    rna = tmp_path / "rna.fa"
    rna.write_text(">a\nACGUuAAC\n")
    of_dna = ("--model", "virnucpro-tiny-dna", "--devices", "cpu", "--workers", "1", "-q")
    assert run("embed", rna, "-o", tmp_path / "out", *of_dna, "--rna") == (0, "", "")
    (tmp_path / "dna.fa").write_text(">a\nACGTTAAC\n")
    assert run("embed", tmp_path / "dna.fa", "-o", tmp_path / "plain", *of_dna) == (0, "", "")
    rows = [(tmp_path / folder / "embeddings.h5").read_bytes() for folder in ("out", "plain")]
    assert rows[0] == rows[1]
    recorded = [json.loads((tmp_path / folder / "run.json").read_text())["settings"] for folder in ("out", "plain")]
    assert [settings.get("rna") for settings in recorded] == [True, None]
    of_proteins = run("embed", rna, "-o", tmp_path / "no", "--rna", "-q")
    assert (of_proteins.code, "for nucleotides" in of_proteins.err) == (78, True), of_proteins.err
    assert run("index", rna, "-o", tmp_path / "index", "--kind", "dna", "--rna", "-q") == (0, "", "")


def test_a_summary_says_what_to_do_next(finished, examples_dir):
    out, _ = finished
    again = ("predict", examples_dir / "contigs.fasta", "-o", out)
    assert run(*again).out.endswith("next:   open the report in a browser\n")
    assert run(*again, "--keep", "tables").out.endswith(
        f"next:   continue with the viral contigs, {out / 'viral.fasta'}\n"
    )


def test_workers_on_contigs_are_shown_with_contigs_and_nucleotides(capsys):
    ranks = [rank_snapshot(rank, device="cpu", sequences=999) for rank in range(2)]
    work = work_snapshot(*ranks, model="composition", counts="contigs", measure="nt")
    stages = (stage_snapshot("composition", seconds=12.0),)
    view, snapshot = PlainView(), replace(run_snapshot(*ranks), stages=stages, embeddings=(work,))
    view.update(snapshot)
    view.update(replace(snapshot, now=snapshot.now + 31))
    assert "60.0 %, 10,000 nt/s, about 8 s left, 300 of 1,000 contigs on disk" in capsys.readouterr().err
    terminal = Terminal(ShownTerminal(columns=80))
    head, first, _, every, note = (line.plain for line in lines_of(snapshot, terminal, tick=0))
    assert head == "⠋ scoring contigs: composition, genes, homology, 12 s"
    assert first.startswith("rank 0 cpu")
    assert first.endswith("60 %  150 contigs   5,000 nt/s  0:08 left")
    assert every.endswith("60 %  300 contigs  10,000 nt/s  0:08 left")
    assert note == "300 of 1,000 contigs on disk"
    assert from_json(WorkSnapshot, json.dumps(to_json(work)).encode()) == work


BASH = """
source <(_VIRNUCPRO_COMPLETE=source_bash virnucpro)
COMP_WORDS=({words}); COMP_CWORD={last}
_virnucpro_completion virnucpro
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("virnucpro pre", {"predict"}),
        ("virnucpro predict --th", {"--threshold", "--threads"}),
        ("virnucpro models con", {"convert-classifier"}),
        ("virnucpro embed x.fasta --log-level W", {"WARNING"}),
    ],
)
def test_bash_completes_commands_options_and_choices(tmp_path, line, expected):
    program_file, command = tmp_path / "program" / "virnucpro", tmp_path / "virnucpro"
    program_file.parent.mkdir()
    program_file.write_text("from virnucpro.__main__ import main\nmain()\n")
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(program_file))} "$@"\n')
    command.chmod(0o755)
    words = line.split()
    script = BASH.format(words=" ".join(words), last=len(words) - 1)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    bash = shutil.which("bash")
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert set(done.stdout.split()) == expected, done.stderr


def test_the_man_page_is_that_of_this_command_line():
    assert PAGE.read_text() == page(), "`python -m tools.man_page` writes it"
    codes = re.findall(r"^\.B (\d+(?:, \d+)*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert {int(code) for one in codes for code in one.split(", ")} == set(map(int, ExitCode))


def test_the_man_page_is_one_that_readers_of_man_pages_understand():
    done = subprocess.run(
        [program("mandoc"), "-T", "lint", "-W", "warning", PAGE], capture_output=True, text=True, check=False
    )
    found = [line for line in done.stdout.splitlines() if "missing date" not in line]  # it is of no day
    assert found == []
