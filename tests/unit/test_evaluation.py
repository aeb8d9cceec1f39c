"""Tables of truth and scores, their join, and what is measured of them: right, or refused by file and line."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_prediction import make_prediction
from virnucpro.errors import BadInputError
from virnucpro.run_layout import EvaluationLayout
from virnucpro.store.contig_table import COLUMNS
from virnucpro.training.evaluation.curves import CURVE_POINTS
from virnucpro.training.evaluation.document import evaluate_tables, write_evaluation
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.evaluation.strata import FEW_CONTIGS, LEAST_CONTIGS, evaluate, length_classes
from virnucpro.training.evaluation.tables import KnownContigs, join, read_scores, read_truth
from virnucpro.training.genomes import delimited_tables
from virnucpro.training.genomes.records import read_records

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
        genomes=[f"g{number // 4}" for number in range(num)],
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
    ("columns", "genomes"),
    [
        ("genome\taccession\tsource", ["A", "", "A", "C:x"]),
        ("source\taccession\tother", ["NC_1.1", "NC_1.1", "NC_1.1", "B"]),
        ("other\tSource\tthird", ["NC_1.1", "NC_1.1", "NC_1.1", "B"]),
        ("other\tsecond\tthird", None),
    ],
)
def test_genomes_are_read_from_the_first_column_of_theirs_without_the_range_of_a_window(tmp_path, columns, genomes):
    lines = ["a\t1\tA\tNC_1.1:5-90\tx", "b\t0\t\tNC_1.1\tx", "c\t1\tA\tNC_1.1:c90-5\tx", "d\t0\tC:x\tB\tx"]
    known = read_truth(write(tmp_path / "truth", "\n".join([f"contig\tlabel\t{columns}", *lines])))
    assert known.genomes == genomes
    if genomes is None:
        assert known.genome_numbers() is None
    else:
        first_seen = {genome: number for number, genome in reversed(list(enumerate(genomes)))}
        same = known.genome_numbers()[:, None] == known.genome_numbers()
        for one, other in itertools.combinations(range(4), 2):
            assert same[one, other] == (genomes[one] != "" and first_seen[genomes[one]] == first_seen[genomes[other]])
        assert known.take(np.array([3, 0])).genomes == [genomes[3], genomes[0]]


def test_windows_of_a_real_genome_count_once(data_dir):
    known = read_truth(data_dir / "genomes" / "dev_truth.tsv")
    assert (len(known), len(set(known.genome_numbers().tolist()))) == (643, 215)


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
        (gzip.compress(TRUTH.encode(), mtime=0)[:-9], "truth: truncated gzip"),
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
    assert list(found.by_group) == sorted(found.by_group, key=lambda group: found.by_group[group].auroc.value)
    phage = np.array([group == "phage" for group in known.groups])
    of_phage = found.by_group["phage"]
    assert of_phage.auroc.value == counts_of(scores[phage | ~virus], virus[phage | ~virus]).auroc()
    assert (of_phage.contigs, of_phage.viral, of_phage.others) == (phage.sum(), phage.sum(), (~virus).sum())
    assert of_phage.compared_with == "all contigs that are not viral"
    in_phage_or_other = phage | ~virus
    error = counts_of(scores[in_phage_or_other], virus[in_phage_or_other]).calibration_error(virus.mean(), 5)
    assert of_phage.calibration_error.value == error
    assert of_phage.genomes == len({genome for genome, mine in zip(known.genomes, phage, strict=True) if mine})
    bacteria = found.by_group["bacteria"]
    assert bacteria.false_positive_share_at_strict_threshold <= 0.01
    assert bacteria.compared_with == "all viral contigs"
    assert sum(one.contigs for one in found.calibration) == len(known)
    assert found.resampled == "genomes"
    assert found.notes[0] == "intervals resample 100 genomes, each with all its contigs"


def test_a_group_that_scores_as_its_whole_label_is_as_well_calibrated_as_all_contigs():
    half = known_contigs(300, groups=("one",))
    doubled = KnownContigs(
        contigs=[f"c{number}" for number in range(600)],
        is_virus_C=np.tile(half.is_virus_C, 2),
        groups=[f"{group}{copy}" for copy in (1, 2) for group in half.groups],
        lengths_nt_C=np.tile(half.lengths_nt_C, 2),
    )
    scores = np.tile(scores_of(half), 2)
    found = evaluate(scores, doubled, bootstrap_samples=20)
    expected = counts_of(scores, doubled.is_virus_C).calibration_error(bins=5)
    for stratum in found.by_group.values():
        assert stratum.calibration_error.value == pytest.approx(expected, abs=1e-12)


def test_a_group_that_no_score_tells_from_others_is_calibrated_only_at_its_share():
    virus = np.arange(200) < 120
    groups = ["seen" if number < 60 else "hidden" if number < 120 else "host" for number in range(200)]
    known = KnownContigs(
        contigs=[f"c{number}" for number in range(200)], is_virus_C=virus, groups=groups, lengths_nt_C=np.full(200, 400)
    )
    scores = np.where(np.arange(200) < 60, 1.0, 0.25)
    found = evaluate(scores, known, bootstrap_samples=20)
    assert found.by_group["hidden"].calibration_error.value == pytest.approx(0.6 - 0.25)
    assert found.by_group["seen"].calibration_error.value == pytest.approx(0.4 * 0.25)
    assert found.resampled == "contigs"
    assert any("contigs are resampled, so intervals are too narrow" in note for note in found.notes)


def test_the_worst_group_stands_first_and_those_of_few_contigs_last():
    known = known_contigs(400, groups=("easy", "hard", "middling"))
    groups, shift = (
        np.array(known.groups, dtype=object),
        {"easy": 0.2, "hard": -0.05, "middling": 0.02, "bacteria": 0.0},
    )
    scores = scores_of(known, shift=0) / 10 + np.array([shift[group] for group in groups])
    rare = np.flatnonzero(groups == "hard")[: FEW_CONTIGS - 1]
    groups[rare] = "rare"
    named = KnownContigs(
        contigs=known.contigs, is_virus_C=known.is_virus_C, groups=groups.tolist(), lengths_nt_C=known.lengths_nt_C
    )
    found = evaluate(scores, named, threshold=None, bootstrap_samples=20)
    order = [group for group in found.by_group if group != "bacteria"]
    assert order == ["hard", "middling", "easy", "rare"]
    assert list(found.by_group)[-1] == "rare"
    assert found.by_group["rare"].auroc.value < found.by_group["middling"].auroc.value
    assert list(found.by_group_and_length) == list(found.by_group)
    assert any(f"fewer than {FEW_CONTIGS} contigs after the others" in note for note in found.notes)


def test_a_group_in_a_length_class_is_measured_against_contigs_of_that_class():
    known = known_contigs(300, lengths=(300,) * 6 + (5000,))
    scores, virus = scores_of(known), known.is_virus_C
    phage, short = np.array([group == "phage" for group in known.groups]), known.lengths_nt_C == 300
    cells = evaluate(scores, known, bootstrap_samples=20).by_group_and_length["phage"]
    measured = short & (phage | ~virus)
    cell = cells["up to 500 nt"]
    assert cell.auroc.value == counts_of(scores[measured], virus[measured]).auroc()
    assert cell.contigs == (phage & short).sum()
    assert set(cells) == {"up to 500 nt", "2,000 nt and more"}
    few = known.take(np.concatenate([np.flatnonzero(phage)[: LEAST_CONTIGS - 1], np.flatnonzero(~virus)]))
    few_scores = scores[np.concatenate([np.flatnonzero(phage)[: LEAST_CONTIGS - 1], np.flatnonzero(~virus)])]
    assert (
        evaluate(few_scores, few, length_edges_nt=(), bootstrap_samples=20)
        .by_group_and_length["phage"]["all lengths"]
        .auroc
        is None
    )


def test_precision_is_measured_for_the_prevalence_that_is_asked_for():
    known = known_contigs(500)
    scores, virus = scores_of(known), known.is_virus_C
    rare, as_found = (evaluate(scores, known, prevalence=share, bootstrap_samples=20) for share in (0.01, None))
    hits, wrong = 0.01 * (scores[virus] >= 0.5).mean(), 0.99 * (scores[~virus] >= 0.5).mean()
    assert rare.overall.precision.value == pytest.approx(hits / (hits + wrong))
    assert rare.precision_recall[-1] == (1, pytest.approx(0.01))
    assert rare.overall.auprc.value < as_found.overall.auprc.value
    assert (rare.overall.auroc, rare.overall.calibration_error) == (
        as_found.overall.auroc,
        as_found.overall.calibration_error,
    )
    assert as_found.overall.precision.value == virus[scores >= 0.5].mean()


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
        prevalence=None,
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
    table = document["tables"][0]
    worst = next(iter(table["by_group"]))
    assert (rows[3]["value"], float(rows[3]["calibration_error"])) == (
        worst,
        table["by_group"][worst]["calibration_error"]["value"],
    )
    (cell,) = (row for row in rows if row["name"] == "better" and row["value"] == "phage, up to 500 nt")
    assert cell["stratum"] == "group and length"
    assert float(cell["auroc"]) == table["by_group_and_length"]["phage"]["up to 500 nt"]["auroc"]["value"]
    assert (cell["contigs"], cell["f1"]) == (str(table["by_group_and_length"]["phage"]["up to 500 nt"]["contigs"]), "")
    assert layout.left_out(1).read_text().split() == known.contigs[:5]
    write_evaluation(document, [[], []], layout)
    assert not layout.left_out(1).exists()


@pytest.mark.parametrize("read", [read_truth, read_records])
def test_a_pipe_or_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    assert f"{tmp_path}/pipe: not a regular file" in refused(read, tmp_path / "pipe")
    line = b">a virus\n" if read is read_records else b"contig\tlabel\n"
    bomb = write(tmp_path / "bomb.gz", gzip.compress(line + (b"\t" * 1023 + b"\n") * (65 << 10)))
    assert f"{bomb}: gzip that unpacks to more than {64 << 20} bytes" in refused(read, bomb)
