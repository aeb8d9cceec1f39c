"""Tables as geNomad, VirSorter2, DeepMicroClass and CheckV write them, with a truth and, without one, side by side."""

from __future__ import annotations

import csv
import json
import math

import pytest

from tests.conftest import REPOSITORY
from tests.unit.test_evaluate_command import command
from tests.unit.test_evaluation import refused, write
from virnucpro.errors import BadInputError
from virnucpro.store.contig_table import SHORT_COLUMNS
from virnucpro.training.evaluation.agreement import compare_tables
from virnucpro.training.evaluation.tables import read_scores

GENOMAD = REPOSITORY / "examples" / "contigs_genomad.tsv"
"""Of geNomad 1.13, ``nn-classification`` of ``contigs.fasta``."""
DEEPMICROCLASS = REPOSITORY / "examples" / "contigs_deepmicroclass.tsv"
"""Of DeepMicroClass 1.0.6 and ``contigs.fasta``."""
TABLES = REPOSITORY / "tests" / "unit" / "tool_tables"
GENOMAD_SUMMARY = (TABLES / "genomad_virus_summary.tsv").read_text()
"""Of geNomad, as its documentation shows it."""
VIRSORTER2 = (TABLES / "virsorter2_final-viral-score.tsv").read_text()
"""Of VirSorter2 and its own test contigs; the last line as it writes a contig of fewer than two genes."""
CHECKV = (TABLES / "checkv_quality_summary.tsv").read_text()
"""Of CheckV and real contigs, two of them without their range in a host; columns as in 1.1."""


def ours(folder, *contigs):
    """Write a contigs.tsv of contig, length, score, call, evidence."""
    cells = [dict(zip(("contig", "length", "score", "call", "evidence"), one, strict=True)) for one in contigs]
    lines = ["\t".join(str(one.get(name, "")) for name in SHORT_COLUMNS) for one in cells]
    return write(folder / "contigs.tsv", "\n".join(["\t".join(SHORT_COLUMNS), *lines]))


def compared(*paths, threshold=None, edges=(500, 1000, 1999), **columns):
    tables = [read_scores(path, by_contig=True, **columns) for path in paths]
    document, rows = compare_tables(tables, threshold=threshold, length_edges_nt=edges)
    return document, {row.contig: row for row in rows}


@pytest.mark.parametrize(
    ("text", "name", "scores", "lengths"),
    [
        (
            GENOMAD_SUMMARY,
            "geNomad",
            {"NZ_CP045015.1": 0.9776, "NZ_CP045018.1": 0.9774},
            {"NZ_CP045018.1": 51887},
        ),
        (
            VIRSORTER2,
            "VirSorter2",
            {"Caudo-circular": 0.993, "RNA-linear": 0.5, "Caudo-provirus": 0.893, "short": None},
            {"Caudo-circular": 31746, "RNA-linear": 5538, "short": 1501},
        ),
        (
            CHECKV,
            "CheckV",
            {"k141_93512": None, "k141_111526": None, "k141_64932": None},
            {"k141_111526": 48552, "k141_64932": 13101},
        ),
    ],
)
def test_a_table_of_a_tool_is_known_by_its_header_and_parts_count_for_their_contig(
    tmp_path, text, name, scores, lengths
):
    table = read_scores(write(tmp_path / "table.tsv", text))
    assert table.name == name
    assert {contig: None if math.isnan(score) else score for contig, score in table.scores.items()} == scores
    assert table.lengths_nt == lengths


def test_what_counts_as_viral_is_the_tools_own_rule(tmp_path):
    summary, virsorter2, checkv = (
        write(tmp_path / str(number), text) for number, text in enumerate((GENOMAD_SUMMARY, VIRSORTER2, CHECKV))
    )
    document, rows = compared(summary, virsorter2, checkv)
    assert [(one["name"], one["rule"], one["viral"], one["absent"]) for one in document["tables"]] == [
        ("geNomad", "listed", 2, 0),
        ("VirSorter2", "listed", 4, 0),
        ("CheckV", "CheckV makes no calls; here: more viral than host genes", 1, 6),
    ]
    assert rows["short"].calls == ("not listed", "virus", "absent")
    assert rows["k141_64932"].calls == ("not listed", "not listed", "virus")
    assert (rows["k141_64932"].pattern, rows["k141_111526"].pattern) == ("only CheckV", "none")
    assert (rows["k141_64932"].length, rows["k141_93512"].length) == (13101, None)


def test_real_tables_of_the_example_are_read_in_full_with_calls_of_their_own_rules():
    with GENOMAD.open() as file:
        genomad = {row["seq_name"]: float(row["virus_score"]) for row in csv.DictReader(file, delimiter="\t")}
    with DEEPMICROCLASS.open() as file:
        classes = {row["Sequence Name"].split()[0]: row for row in csv.DictReader(file, delimiter="\t")}
    document, rows = compared(GENOMAD, DEEPMICROCLASS)
    assert list(rows) == list(genomad) == list(classes)
    for contig, row in rows.items():
        of_both = row.calls[0] == "virus", row.calls[1] == "virus"
        assert of_both == (genomad[contig] >= 0.7, classes[contig]["best_choice"] in {"2", "5"})
        assert row.scores[0] == genomad[contig]
        assert (row.scores[1] is None) == (classes[contig]["best_choice"] == "")
        assert row.scores[1] is None or 0 <= row.scores[1] <= 1
    assert sum(document["patterns"].values()) == 29
    assert [one["absent"] for one in document["tables"]] == [0, 0]


def test_contigs_are_counted_by_who_calls_them_by_length_and_by_evidence(tmp_path):
    mine = ours(
        tmp_path,
        ("every", 9000, 0.9, "virus", "both"),
        ("nobody", 400, 0.1, "not virus", "none"),
        ("mine", 700, 0.8, "virus", "homology"),
        ("theirs", 5000, 0.5, "undecided", "none"),
        ("genomad", 3000, 0.2, "not virus", "both"),
        ("elsewhere", 450, 0.9, "virus", "both"),
    )
    genomad = write(
        tmp_path / "g.tsv",
        "seq_name\tchromosome_score\tplasmid_score\tvirus_score\nevery\t0.1\t0.1\t0.8\nnobody\t0.3\t0.01\t0.69\n"
        "mine\t1\t0\t0\ntheirs\t0\t0\t1\ngenomad\t0.2\t0.1\t0.7\n",
    )
    virsorter2 = write(
        tmp_path / "v.tsv",
        "seqname\tdsDNAphage\tmax_score\tmax_score_group\tlength\nevery||full\t1\t1\tdsDNAphage\t8000\n"
        "theirs||0_partial\t0.6\t0.6\tdsDNAphage\t20\ntheirs||1_partial\t0.9\t0.9\tdsDNAphage\t20\n",
    )
    document, rows = compared(mine, genomad, virsorter2)
    assert {contig: row.pattern for contig, row in rows.items()} == {
        "every": "all",
        "nobody": "none",
        "mine": "only contigs",
        "theirs": "all but contigs",
        "genomad": "only geNomad",
        "elsewhere": "only contigs",
    }
    assert rows["theirs"].scores == [0.5, 1, 0.9]
    assert rows["theirs"].calls == ("undecided", "virus", "virus")
    assert rows["elsewhere"].calls == ("virus", "absent", "not listed")
    counts = {"all": 1, "none": 1, "only contigs": 2, "all but contigs": 1, "only geNomad": 1}
    assert document["patterns"] == counts
    assert list(document["patterns"]) == list(counts)
    assert document["by_length"] == {
        "up to 500 nt": {"none": 1, "only contigs": 1},
        "501 to 1,000 nt": {"only contigs": 1},
        "2,000 nt and more": {"all": 1, "all but contigs": 1, "only geNomad": 1},
    }
    assert document["by_evidence"] == {
        "both": {"all": 1, "only geNomad": 1, "only contigs": 1},
        "homology": {"only contigs": 1},
        "none": {"none": 1, "all but contigs": 1},
    }
    assert [one["contig"] for one in document["look_at"]] == ["theirs", "genomad", "mine", "elsewhere"]
    assert [(one["viral"], one["absent"]) for one in document["tables"]] == [(3, 0), (3, 1), (2, 0)]


def test_more_than_one_but_not_all_are_named_and_a_contig_of_one_table_is_no_disagreement(tmp_path):
    header = "contig\tscore\n"
    texts = ("x\t1\ny\t1\n", "x\t1\ny\t1\n", "x\t0\ny\t0\n", "x\t0\nlone\t1\n")
    paths = [write(tmp_path / f"t{number}.tsv", header + text) for number, text in enumerate(texts)]
    document, rows = compared(*paths)
    assert [row.pattern for row in rows.values()] == ["only t0 and t1", "all but t2", "in one table only"]
    assert [one["contig"] for one in document["look_at"]] == ["x", "y"]


def test_a_table_of_an_unknown_tool_takes_named_columns_and_a_threshold(tmp_path):
    table = write(tmp_path / "dvf.tsv", "name\tlen\tscore\na first\t300\t0.5\nb second\t300\t0.4\nc\t300\t\n")
    other = write(tmp_path / "other.tsv", "name\tscore\na\t7\nb\t-3\nc\t0\n")
    document, rows = compared(table, table, id_column="name")
    assert (list(rows), document["patterns"]) == (["a", "b", "c"], {"all": 1, "none": 2})
    assert document["tables"][0]["rule"] == "score at least 0.5"
    assert compared(table, other, id_column="name", threshold=0.3)[0]["patterns"] == {
        "all": 1,
        "none": 1,
        "only dvf": 1,
    }
    assert "other.tsv: its scores are not all between 0 and 1, and no threshold is known" in refused(
        compared, table, other, id_column="name"
    )
    named = {"id_column": "seq_name", "score_column": "plasmid_score"}
    assert read_scores(GENOMAD, **named).scores["d0064"] == 0.176  # a column that is named wins


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (VIRSORTER2 + VIRSORTER2.splitlines()[1], "table:6: duplicate id, first at"),
        (VIRSORTER2.replace("0.993\tdsDNA", "high\tdsDNA"), "table:2: max_score 'high' is not a number"),
        (VIRSORTER2.replace("0.993\tdsDNA", "1e999\tdsDNA"), "table:2: max_score '1e999' is not a number"),
        (CHECKV.replace("\t5\t0\t", "\tfive\t0\t"), "table:4: viral_genes 'five' is not a number"),
        (
            GENOMAD_SUMMARY.replace("virus_score", "plasmid_score"),
            "no column 'contig'; the header has: seq_name, length",
        ),
        (GENOMAD.read_text() + "d0064 again\t0\t0\t1\n", "table:31: duplicate id, first at"),
        (GENOMAD.read_text().splitlines()[0], "no contig after its header"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_by_file_and_line(tmp_path, text, said):
    assert said in refused(read_scores, write(tmp_path / "table", text), by_contig=True)


def test_a_list_of_no_viruses_is_a_result_and_hostile_ids_stay_in_their_cells(tmp_path):
    virsorter2 = write(tmp_path / "vs2.tsv", VIRSORTER2.splitlines()[0])
    table = write(tmp_path / "[red]t.csv", 'contig,score\n"=1+1\n\x1b[31m",0.9\n||full,nan\n')
    done = command(tmp_path, "--scores", "vs2.tsv", "--scores", "[red]t.csv", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    written = (tmp_path / "out" / "agreement.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in written] == ["contig", "=1+1\\n\\x1b[31m", "||full"]
    assert written[1].endswith("\tnot listed\t0.9\tvirus\tonly [red]t")
    assert "[red]t" in done.stdout
    assert command(tmp_path, "--scores", "vs2.tsv", "--scores", "vs2.tsv", "-o", "out").exit_code == 0
    assert "no contig after its header" in refused(read_scores, virsorter2)
    assert table.exists()


def test_the_command_compares_tables_without_a_truth_and_says_what_to_look_at(tmp_path):
    tables = ["--scores", str(GENOMAD), "--scores", str(DEEPMICROCLASS)]
    done = command(tmp_path, *tables, "-o", "out")
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "out" / "agreement.json").read_text())
    assert document == json.loads(command(tmp_path, *tables, "-o", "out", "--json").stdout)
    assert "geNomad: 13 viral contigs (virus_score at least 0.7)" in done.stdout
    for pattern, number in document["patterns"].items():
        assert any(line.startswith(pattern) and line.split()[-1] == str(number) for line in done.stdout.splitlines())
    assert document["look_at"][0]["contig"] in done.stdout
    rows = (tmp_path / "out" / "agreement.tsv").read_text().splitlines()
    assert len(rows) == 30
    assert rows[0].split("\t")[-5:-1] == [
        "geNomad score",
        "geNomad call",
        "DeepMicroClass score",
        "DeepMicroClass call",
    ]
    assert all(str(tmp_path / "out" / f"agreement.{kind}") in done.stdout for kind in ("tsv", "json"))


def test_the_same_tables_are_measured_against_a_truth(tmp_path):
    truth = str(REPOSITORY / "examples" / "contigs_truth.tsv")
    tables = ["--scores", str(GENOMAD), "--scores", str(DEEPMICROCLASS)]
    done = command(tmp_path, *tables, "--truth", truth, "-o", "out", "--json")
    assert done.exit_code == 0, done.output
    first, other = json.loads(done.stdout)["tables"]
    assert (first["name"], first["threshold"], first["overall"]["without_score"]) == ("geNomad", 0.7, 0)
    assert (other["name"], other["overall"]["without_score"]) == ("DeepMicroClass", 3)
    assert first["overall"]["auroc"]["value"] > 0.5
    write(tmp_path / "checkv.tsv", CHECKV)
    write(tmp_path / "k.tsv", "contig\tlabel\nk141_111526\t0\nk141_64932\t1\n")
    done = command(tmp_path, "--scores", "checkv.tsv", "--truth", "k.tsv", "-o", "out")
    assert isinstance(done.exception, BadInputError)
    assert "checkv.tsv: it has no score for any contig of the truth" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scores", "one.tsv"], "--truth: give it, or two or more tables with --scores"),
        (["contigs.fa"], "--truth: give it, or two or more tables with --scores"),
        (["--scores", "one.tsv", "--scores", "two.tsv", "--prevalence", "0.1"], "need --truth"),
    ],
)
def test_a_mistake_without_a_truth_is_told_and_leaves_no_folder(tmp_path, arguments, said):
    done = command(tmp_path, *arguments, "-o", "out")
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
