"""Tables of truth and scores, their join, and what is measured of them: right, or refused by file and line."""

from __future__ import annotations

import gzip
import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_prediction import make_prediction
from virnucpro.errors import BadInputError
from virnucpro.run_layout import EvaluationLayout
from virnucpro.store.contig_table import COLUMNS
from virnucpro.training.evaluation.document import evaluate_tables, write_evaluation
from virnucpro.training.evaluation.curves import CURVE_POINTS
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.evaluation.strata import evaluate, length_classes
from virnucpro.training.evaluation.tables import KnownContigs, join, read_scores, read_truth
from virnucpro.training.genomes import delimited_tables

TRUTH = (
    "contig\tlabel\tgroup\tlength\na\tvirus\tphage\t300\nb\tnonviral\tbacteria\t900\nc\tViral\tphage\t5000\nd\t0\t\t\n"
)


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(call, *args, **options):
    with pytest.raises(BadInputError) as caught:
        call(*args, **options)
    return str(caught.value)


def known_contigs(num=400, seed=1, *, groups=("phage", "giant"), lengths=(300, 900, 5000)):
    random = np.random.default_rng(seed)
    virus = random.random(num) < 0.5
    return KnownContigs(
        contigs=[f"c{number}" for number in range(num)],
        is_virus_C=virus,
        groups=[groups[number % len(groups)] if viral else "bacteria" for number, viral in enumerate(virus)],
        lengths_nt_C=random.choice(lengths, num),
    )


def scores_of(known, seed=2, shift=1.0):
    random = np.random.default_rng(seed)
    return 1 / (1 + np.exp(-random.normal(np.where(known.is_virus_C, shift, -shift), 1.0)))


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        TRUTH,
        TRUTH.replace("\n", "\r\n"),
        TRUTH.replace("\n", "\r"),
        "\ufeff" + TRUTH,
        TRUTH.replace("\t", ","),
        TRUTH.replace("\t", " , "),
        gzip.compress(TRUTH.encode(), mtime=0),
        TRUTH.replace("contig\t", "#Contig\t") + "\n\n",
        TRUTH.replace("\tgroup", "\tgroup").rstrip("\n"),
    ],
)
def test_a_truth_is_read_whatever_wrote_it(tmp_path, content):
    known = read_truth(write(tmp_path / "truth", content))
    assert known.contigs == ["a", "b", "c", "d"]
    assert known.is_virus_C.tolist() == [True, False, True, False]
    assert known.groups == ["phage", "bacteria", "phage", ""]
    assert known.lengths_nt_C.tolist() == [300, 900, 5000, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "truth: empty: no header"),
        ("contig\tlabel\n", "truth: no contig after its header"),
        ("contig\tkind\na\tvirus\n", "truth:1: no column 'label'; the header has: contig, kind"),
        ("contig\tlabel\na\tvirus\nb\tplasmid\n", "truth:3: label 'plasmid' is not known"),
        ("contig\tlabel\na\tvirus\nb\t\n", "truth:3: no label"),
        ("contig\tlabel\na\tvirus\nb\t0\na\t0\n", "truth:4: duplicate id, first at"),
        ("contig\tlabel\n\tvirus\n", "truth:2: no id"),
        ("contig\tlabel\tlength\na\tvirus\t1.5\n", "truth:2: length '1.5' is not a number of nucleotides"),
        ("contig\tlabel\na\tvirus\t5\n", "truth:2: 3 columns where the header has 2: R writes such tables"),
        ("contig\tlabel\na\n", "truth:2: 1 columns where the header has 2"),
        ("contig\tlabel\tlabel\na\t1\t1\n", "truth:1: column 'label' occurs twice"),
        ('contig,label\n"a,virus\n', "truth:"),
        (b"contig\tlabel\na\xff\tvirus\n", "truth:2: not UTF-8 text"),
        (gzip.compress(TRUTH.encode(), mtime=0)[:-9], "truth: damaged gzip"),
        (f"contig\tlabel\tlength\na\tvirus\t{'9' * 30}\n", "truth:2: length '9"),
        (f"contig\tlabel\tlength\na\tvirus\t{'9' * 5000}\n", "truth:2: 5,000 characters in the column 'length'"),
        (f"contig\tlabel\n{'a' * 2000}\tvirus\n", "truth:2: 2,000 characters in the column 'contig'"),
        (f"{'a' * 200_000}\n", "truth:1: cannot be read as the header of a table"),
        (f"{'a,' * 100_000}\n", "truth:1: column 'a' occurs twice"),
        (f"contig,label,{','.join(map(str, range(30_000)))}\na,virus\n", "truth:2: 2 columns where"),
    ],
)
def test_a_truth_that_cannot_be_used_is_refused_by_file_and_line(tmp_path, content, said):
    message = refused(read_truth, write(tmp_path / "truth", content))
    assert f"{tmp_path}/{said}" in message


@pytest.mark.parametrize(
    ("bomb", "said"),
    [
        (b"x" * (1 << 26), "truth:2: a row of more than 1,048,576 characters"),
        (b'"' + b"\n" * (1 << 26), "truth:"),
        (b'"a\n",' * (1 << 24), "a row of more than 1,048,576 characters"),
        (b"\n" * (1 << 22), "truth:300001: more than 300,000 lines"),
    ],
    ids=["a line", "a cell", "a row of many cells", "blank lines"],
)
def test_a_table_that_was_compressed_without_end_is_refused_and_takes_no_memory(tmp_path, monkeypatch, bomb, said):
    monkeypatch.setattr(delimited_tables, "MOST_LINES", 300_000)
    path = write(tmp_path / "truth", gzip.compress(b"contig,label\n" + bomb, compresslevel=1))
    del bomb
    tracemalloc.start()
    try:
        message = refused(read_truth, path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert said in message
    assert len(message) < 1000
    assert peak_bytes < 1 << 26


def test_every_problem_of_a_table_is_told_and_a_file_that_is_not_there_too(tmp_path):
    rows = "".join(f"c{number}\tplasmid\n" for number in range(30))
    message = refused(read_truth, write(tmp_path / "truth", f"contig\tlabel\n{rows}"))
    assert message.count("plasmid") == BadInputError.MAX_PROBLEMS
    assert "... and more" in message
    assert "No such file" in refused(read_truth, tmp_path / "absent")
    assert "Is a directory" in refused(read_truth, tmp_path)


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("name\tscore\na\t1\n", {}, "scores:1: no column 'contig'; the header has: name, score"),
        ("contig\tp\na\t1\n", {}, "name the right one with --score-column"),
        ("contig\tscore\na\thigh\n", {}, "scores:2: score 'high' is not a number from -1e+100 to 1e+100 (a)"),
        ("contig\tscore\na\tinf\n", {}, "scores:2: score 'inf' is not a number from -1e+100 to 1e+100 (a)"),
        ("contig\tscore\na\t-1e308\n", {}, "scores:2: score '-1e308' is not a number from -1e+100 to 1e+100 (a)"),
        (f"contig\tscore\tlength\na\t1\t{'9' * 5000}\n", {}, "scores:2: 5,000 characters in the column 'length'"),
        (f"contig\tscore\tlength\na\t1\t{'9' * 30}\n", {}, "scores:2: length '9"),
        (f"{'x' * 200}\tscore\n", {}, f"no column 'contig'; the header has: {'x' * 80}..., score"),
        ("contig\tscore\na\t1\na\t1\n", {}, "scores:3: duplicate id, first at"),
        ("contig\tscore\n", {}, "no contig after its header"),
        ("seq,p\na,1\n", {"id_column": "seq", "score_column": "q"}, "no column 'q'"),
    ],
)
def test_scores_that_cannot_be_used_are_refused_by_file_and_line(tmp_path, content, options, said):
    assert said in refused(read_scores, write(tmp_path / "scores", content), **options)


def test_a_table_of_ours_is_known_by_its_header_and_brings_its_threshold(tmp_path):
    made = make_prediction(tmp_path / "run")
    table = read_scores(made.layout.contigs)
    assert (table.name, table.threshold) == (
        "virnucpro-tiny",
        json.loads(made.layout.manifest.read_text())["output_settings"]["threshold"],
    )
    assert list(table.scores) == [row["contig"] for row in made.rows]
    assert {name for name, score in table.scores.items() if math.isnan(score)} == {
        row["contig"] for row in made.rows if row["score"] == ""
    }
    copied = read_scores(write(tmp_path / "copy.tsv.gz", gzip.compress(made.layout.contigs.read_bytes())))
    assert (copied.name, copied.threshold) == ("copy", None)
    np.testing.assert_equal(copied.scores, table.scores)


def test_a_record_that_was_left_out_does_not_take_the_score_of_the_one_whose_id_it_shares(tmp_path):
    row = dict.fromkeys(COLUMNS, "1") | {"contig": 'a"b', "length": "300", "score": "0.75"}
    left_out = row | {"length": "", "score": "", "reason": "duplicate"}
    lines = ["\t".join(COLUMNS), *("\t".join(one.values()) for one in (row, left_out))]
    assert read_scores(write(tmp_path / "contigs.tsv", "\n".join(lines))).scores == {'a"b': 0.75}
    lines.append("\t".join(row.values()))
    assert "contigs.tsv:4: duplicate id, first at" in refused(
        read_scores, write(tmp_path / "contigs.tsv", "\n".join(lines))
    )


def test_ids_are_joined_as_they_stand_and_lengths_come_from_where_they_are_known(tmp_path):
    truth = write(tmp_path / "truth", TRUTH)
    scores = write(tmp_path / "scores", "contig\tscore\tlength\nc\t0.5\t7\nd\tNA\t800\nx\t1\t9\na\t-2\t\n")
    joined = join(read_scores(scores), read_truth(truth), truth)
    np.testing.assert_equal(joined.scores_C, [-2, np.nan, 0.5, np.nan])
    assert joined.known.lengths_nt_C.tolist() == [300, 900, 5000, 800]
    assert (joined.not_in_table, joined.not_in_truth) == (["b"], 1)
    other = read_scores(write(tmp_path / "other", "contig\tscore\nA 1\t1\n"))
    message = refused(join, other, read_truth(truth), truth)
    assert "none of its 1 contigs (such as A 1)" in message
    nothing = read_scores(write(tmp_path / "nothing", "contig\tscore\na\tNA\n"))
    assert "it has no score for any contig of the truth" in refused(join, nothing, read_truth(truth), truth)


# --- measures --------------------------------------------------------------------------------------------------------


def test_every_stratum_is_measured_on_its_own_contigs():
    known = known_contigs()
    scores, virus = scores_of(known), known.is_virus_C
    found = evaluate(scores, known, threshold=0.6, bootstrap_samples=50)
    assert found.overall.auroc.value == counts_of(scores, virus).auroc()
    assert found.overall.auroc.low < found.overall.auroc.value < found.overall.auroc.high
    assert (found.overall.viral, found.overall.others) == (virus.sum(), (~virus).sum())
    assert list(found.by_length) == ["up to 500 nt", "501 to 1,000 nt", "2,000 nt and more"]
    short = known.lengths_nt_C == 300
    assert found.by_length["up to 500 nt"].auroc.value == counts_of(scores[short], virus[short]).auroc()
    assert found.by_length["up to 500 nt"].recall == (scores[short & virus] >= 0.6).mean()
    strict = counts_of(scores, virus).strict_threshold()
    assert found.strict_threshold == strict
    assert found.by_length["up to 500 nt"].recall_at_strict_threshold == (scores[short & virus] >= strict).mean()
    assert list(found.by_group) == ["bacteria", "giant", "phage"]
    phage = np.array([group == "phage" for group in known.groups])
    of_phage = found.by_group["phage"]
    assert of_phage.auroc.value == counts_of(scores[phage | ~virus], virus[phage | ~virus]).auroc()
    assert (of_phage.contigs, of_phage.viral, of_phage.others) == (phage.sum(), phage.sum(), (~virus).sum())
    assert of_phage.compared_with == "all contigs that are not viral"
    assert of_phage.calibration_error is None
    bacteria = found.by_group["bacteria"]
    assert bacteria.false_positive_share_at_strict_threshold <= 0.01
    assert bacteria.compared_with == "all viral contigs"
    assert sum(one.contigs for one in found.calibration) == len(known)
    assert found.notes == []


def test_a_group_of_both_labels_is_measured_by_itself():
    known = known_contigs(groups=("bacteria", "phage"))
    scores = scores_of(known)
    mine = np.array([group == "bacteria" for group in known.groups])
    found = evaluate(scores, known, bootstrap_samples=20).by_group["bacteria"]
    assert found.compared_with is None
    assert (found.contigs, found.viral + found.others) == (mine.sum(), mine.sum())
    assert found.auroc.value == counts_of(scores[mine], known.is_virus_C[mine]).auroc()
    assert found.calibration_error is not None


def test_what_cannot_be_measured_is_none_and_said():
    known = known_contigs(30)
    one_kind = KnownContigs(
        contigs=known.contigs, is_virus_C=np.ones(30, bool), groups=[""] * 30, lengths_nt_C=np.zeros(30, dtype=int)
    )
    scores = scores_of(known) * 10 - 5
    scores[3] = np.nan
    found = evaluate(scores, one_kind, threshold=None, bootstrap_samples=20)
    overall = found.overall
    assert overall.auroc is overall.auprc is overall.f1 is overall.recall_at_1_percent_false_positives is None
    assert (overall.recall, overall.calibration_error, found.calibration, found.strict_threshold) == (None,) * 4
    assert (found.by_length, found.by_group, found.roc) == ({}, {}, [])
    said = " ".join(found.notes)
    for words in (
        "without a score: 1 of 30 contigs",
        "all contigs are viral",
        "no probabilities",
        "no threshold is known",
        "of unknown length, and in no length class: 30 of 30",
        "no groups",
    ):
        assert words in said
    json.dumps(found.to_json(), allow_nan=False)


def test_curves_run_from_nothing_called_to_everything_and_stay_small():
    known = known_contigs(5000)
    found = evaluate(scores_of(known), known, bootstrap_samples=20)
    assert (found.roc[0], found.roc[-1]) == ((0, 0), (1, 1))
    assert found.precision_recall[-1] == (1, pytest.approx(known.is_virus_C.mean()))
    assert len(found.roc) <= CURVE_POINTS
    area = sum((x - x0) * (y + y0) / 2 for (x0, y0), (x, y) in zip(found.roc, found.roc[1:], strict=False))
    assert area == pytest.approx(found.overall.auroc.value, abs=2e-3)
    assert sum(found.histogram["viral"]) + sum(found.histogram["others"]) == 5000


@given(st.lists(st.integers(0, 3000), min_size=1), st.sets(st.integers(1, 2500), min_size=1, max_size=4))
def test_every_contig_of_known_length_is_in_one_class(lengths, edges):
    classes = length_classes(np.array(lengths), sorted(edges))
    in_classes = sum(mine.astype(int) for mine in classes.values()) if classes else np.zeros(len(lengths), int)
    np.testing.assert_array_equal(in_classes, np.array(lengths) > 0)


@settings(max_examples=10)
@given(st.integers(0, 2**32))
def test_shuffled_labels_are_worth_a_half_in_every_stratum(seed):
    known = known_contigs(3000, seed)
    scores = np.random.default_rng(seed).permutation(scores_of(known))
    found = evaluate(scores, known, bootstrap_samples=20)
    for stratum in (found.overall, *found.by_length.values(), *found.by_group.values()):
        assert stratum.auroc.value == pytest.approx(0.5, abs=0.12)
        assert stratum.recall_at_1_percent_false_positives.value < 0.12
    assert found.overall.auroc.value == pytest.approx(0.5, abs=0.06)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_tables(tmp_path):
    known = known_contigs(200)
    better, worse = scores_of(known, shift=1.5), scores_of(known, seed=3, shift=0.5)
    tables = []
    for name, scores in (("better", better), ("worse", worse)):
        rows = "".join(
            f"{contig}\t{float(score)!r}\n" for contig, score in zip(known.contigs[5:], scores[5:], strict=True)
        )
        tables.append(read_scores(write(tmp_path / f"{name}.tsv", f"contig\tscore\n{rows}")))
    return known, better, worse, tables


def evaluated(known, tables, *, leave_out=False, threshold=None):
    return evaluate_tables(
        tables,
        known,
        tables[0].path,
        threshold=threshold,
        leave_out_missing=leave_out,
        length_edges_nt=(500,),
        bootstrap_samples=50,
        seed=1,
    )


def test_tables_are_compared_with_the_first_on_the_same_samples(two_tables):
    known, better, worse, tables = two_tables
    document, without = evaluated(known, tables)
    above = document["tables"][1]["auroc_above_first"]
    better[:5] = worse[:5] = np.nan
    virus = known.is_virus_C
    assert above["value"] == pytest.approx(counts_of(worse, virus).auroc() - counts_of(better, virus).auroc(), abs=1e-6)
    assert above["low"] < above["value"] < above["high"] < 0
    assert document["tables"][0]["auroc_above_first"] is None
    assert without == [known.contigs[:5]] * 2
    (one,) = evaluated(known, tables[:1])[0]["tables"]
    assert one == document["tables"][0]


def test_contigs_without_a_score_rank_lowest_or_are_left_out(two_tables):
    known, better, _, tables = two_tables
    virus = known.is_virus_C
    lowest, left_out = (evaluated(known, tables[:1], leave_out=choice)[0]["tables"][0] for choice in (False, True))
    below = np.append(np.full(5, -1.0), better[5:])
    assert lowest["overall"]["auroc"]["value"] == pytest.approx(counts_of(below, virus).auroc(), abs=1e-6)
    assert lowest["overall"]["recall"] == pytest.approx((below[virus] >= 0.5).mean(), abs=1e-6)
    assert lowest["overall"]["without_score"] == 5
    assert left_out["overall"]["auroc"]["value"] == pytest.approx(counts_of(better[5:], virus[5:]).auroc(), abs=1e-6)
    strict = left_out["overall"]["recall_at_1_percent_false_positives"]["value"]
    assert strict == pytest.approx(counts_of(better[5:], virus[5:]).strict_recall(), abs=1e-6)
    assert left_out["overall"]["contigs"] == 195
    assert any("5 contigs without a score, left out of everything" in note for note in left_out["notes"])


def test_the_table_says_what_the_document_says(two_tables, tmp_path):
    known, _, _, tables = two_tables
    document, without = evaluated(known, tables)
    layout = EvaluationLayout(tmp_path / "out")
    write_evaluation(document, without, layout)
    assert json.loads(layout.document.read_text()) == document
    lines = [line.split("\t") for line in layout.table.read_text().splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [(row["name"], row["stratum"]) for row in rows[:4]] == [
        ("better", "overall"),
        ("better", "length"),
        ("better", "length"),
        ("better", "group"),
    ]
    assert float(rows[0]["auroc_low"]) == document["tables"][0]["overall"]["auroc"]["low"]
    assert rows[3]["calibration_error"] == ""
    assert layout.left_out(1).read_text().split() == known.contigs[:5]
    write_evaluation(document, [[], []], layout)
    assert not layout.left_out(1).exists()
