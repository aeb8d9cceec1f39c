"""``virnucpro evaluate`` as a user types it: scores of any tool, a whole prediction, mistakes, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.strategies import write_fasta
from virnucpro.cli import command_line
from virnucpro.errors import BadInputError, ConfigurationError

TRUTH = "contig\tlabel\tgroup\n" + "".join(f"v{n}\tvirus\tphage\nb{n}\tnonviral\tbacteria\n" for n in range(20))
SCORES = "contig\tscore\tlength\n" + "".join(f"v{n}\t{(16 + n) / 40}\t400\nb{n}\t{n / 40}\t3000\n" for n in range(20))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "truth.tsv").write_text(TRUTH)
    (tmp_path / "scores.tsv").write_text(SCORES)
    return tmp_path


def command(folder, *arguments):
    """Run the command in this process; errors that end it with a code of their own are left as they are."""
    shown = [str(folder / one) if one.endswith((".tsv", ".csv", ".fa", "out")) else one for one in arguments]
    return CliRunner().invoke(command_line(), ["evaluate", *shown, "--samples", "20"])


def test_scores_of_a_tool_are_measured_and_shown(folder):
    done = subprocess.run(
        [sys.executable, "-m", "virnucpro", "evaluate", "--scores", "scores.tsv", "--truth", "truth.tsv", "-o", "out"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((folder / "out" / "evaluation.json").read_text())
    (table,) = document["tables"]
    assert table["overall"]["auroc"]["value"] == 1 - (3 + 2 + 1 + 4 / 2) / 400
    assert f"{table['overall']['auroc']['value']:.3f}" in done.stdout
    assert "scores: 20 viral contigs, 20 others" in done.stdout
    assert list(table["by_length"]) == ["up to 500 nt", "2,000 nt and more"]
    assert table["threshold"] == 0.5
    for name in ("evaluation.html", "evaluation.tsv"):
        assert str(name) in done.stdout
        assert (folder / "out" / name).stat().st_size > 500


def test_tables_with_columns_of_their_own_are_compared(folder):
    (folder / "other.csv").write_text(
        "name,p,extra\n" + "".join(f"v{n},{n % 3},x\nb{n},{n % 2},x\n" for n in range(20))
    )
    arguments = ["--scores", "scores.tsv", "--scores", "other.csv", "--truth", "truth.tsv", "-o", "out", "--json"]
    columns = ["--id-column", "contig", "--id-column", "name", "--score-column", "score", "--score-column", "p"]
    done = command(folder, *arguments, *columns)
    assert done.exit_code == 0, done.output
    first, other = json.loads(done.stdout)["tables"]
    assert (first["name"], other["name"]) == ("scores", "other")
    assert other["auroc_above_first"]["value"] < 0
    assert other["threshold"] is None


def test_genomes_and_a_prevalence_are_said_on_terminal_page_and_in_the_document(folder):
    lines = [line + ("\tgenome" if line.startswith("contig") else f"\tg{line[:2]}") for line in TRUTH.splitlines()]
    (folder / "genomes.tsv").write_text("\n".join(lines))
    arguments = ["--scores", "scores.tsv", "--truth", "genomes.tsv", "--threshold", "0.4", "--prevalence", "0.01"]
    done = command(folder, *arguments, "-o", "out")
    assert done.exit_code == 0, done.output
    (table,) = json.loads((folder / "out" / "evaluation.json").read_text())["tables"]
    assert table["overall"]["precision"]["value"] == round(0.01 / (0.01 + 0.99 * 4 / 20), 6)
    assert (table["prevalence"], table["resampled"], table["overall"]["genomes"]) == (0.01, "genomes", 20)
    page = (folder / "out" / "evaluation.html").read_text()
    assert "intervals resample 20 genomes" in done.stdout
    assert "intervals resample 20 genomes" in page
    assert "where 1 % of all contigs are viral" in done.stdout
    assert "where 1\u00a0% of all contigs are viral" in page


def test_the_same_command_gives_the_same_bytes_and_another_seed_other_intervals(folder):
    arguments = ["--scores", "scores.tsv", "--truth", "truth.tsv", "-o", "out"]
    written = []
    for seed in ("1", "1", "2"):
        assert command(folder, *arguments, "--seed", seed).exit_code == 0
        written.append([(folder / "out" / f"evaluation.{kind}").read_bytes() for kind in ("json", "tsv", "html")])
    assert written[0] == written[1]
    assert written[0][0] != written[2][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "either contigs to score, or --scores"),
        (["contigs.fa", "--scores", "scores.tsv"], "either contigs to score, or --scores"),
        (["--scores", "scores.tsv", "--classifier", "virnucpro-tiny"], "--classifier"),
        (["contigs.fa", "--id-column", "x"], "--id-column"),
        (["--scores", "scores.tsv", "--threshold", "nan"], "--threshold"),
        (["contigs.fa", "--threshold", "7"], "above 0 and below 1"),
        (["--scores", "scores.tsv", "--prevalence", "0"], "--prevalence"),
        (["--scores", "scores.tsv", "--prevalence", "1"], "--prevalence"),
        (["--scores", "scores.tsv", "--prevalence", "nan"], "--prevalence"),
        (["--scores", "scores.tsv", "--length-classes", "500,100"], "--length-classes"),
        (["--scores", "scores.tsv", "--length-classes", ""], "--length-classes"),
        (["--scores", "scores.tsv", "--length-classes", "9" * 5000], "--length-classes"),
        (["--scores", "scores.tsv", "--missing", "zero"], "--missing"),
        (["--scores", "scores.tsv", "--id-column", "a", "--id-column", "b"], "once a table"),
        (["--scores", "scores.tsv"] * 7, "more than 6"),
        (["--scors", "scores.tsv"], "--scors"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_no_folder(folder, arguments, said):
    done = command(folder, *arguments, "--truth", "truth.tsv", "-o", "out")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())
    assert not (folder / "out").exists()


def test_bad_tables_and_an_unknown_classifier_end_with_codes_of_their_own(folder):
    (folder / "bad.tsv").write_text("contig\tlabel\nv0\tvirus\nb0\tmaybe\n")
    done = command(folder, "--scores", "scores.tsv", "--truth", "bad.tsv", "-o", "out")
    assert isinstance(done.exception, BadInputError)
    assert f"{folder}/bad.tsv:3: label 'maybe'" in str(done.exception)
    done = command(folder, "--scores", "absent.tsv", "--truth", "truth.tsv", "-o", "out")
    assert "absent.tsv: No such file or directory" in str(done.exception)
    (folder / "contigs.fa").write_text(">a\nACGT\n")
    done = command(folder, "contigs.fa", "--classifier", "nonsense", "--truth", "truth.tsv", "-o", "out")
    assert isinstance(done.exception, ConfigurationError)
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_contigs_are_scored_as_predict_does_and_not_again(tmp_path):
    contigs = write_fasta(tmp_path / "contigs.fa", [("a", "ATGGCC" * 100), ("none", "CTAACTAACTAGTTAGTTAG")])
    (tmp_path / "truth.tsv").write_text("contig\tlabel\na\t1\nnone\t0\nelsewhere\t0\n")
    arguments = ["contigs.fa", "--truth", "truth.tsv", "-o", "out", "--devices", "cpu"]
    done = command(tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    assert contigs.exists()
    (table,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["tables"]
    assert table["name"] == "virnucpro-tiny"
    assert any("1 contig of the truth not in the scores (elsewhere)" in note for note in table["notes"])
    report = tmp_path / "out" / "prediction" / "report.html"
    before = report.stat().st_mtime_ns
    assert command(tmp_path, *arguments).exit_code == 0
    assert report.stat().st_mtime_ns == before
