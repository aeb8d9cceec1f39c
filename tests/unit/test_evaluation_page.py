"""The page of an evaluation: whole in itself, made of the document alone, and with nothing of the input as markup."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from tests.unit.test_evaluation import evaluated, known_contigs, scores_of, write
from tests.unit.test_report_page import PAPER, Page, contrast
from virnucpro.report.evaluation import plots
from virnucpro.report.evaluation.page import write_page
from virnucpro.report.html_page import COLOURS
from virnucpro.report.prediction.plots import CALL_COLOURS
from virnucpro.training.evaluation.tables import read_scores

HOSTILE = "</script><script>alert(1)</script><img/src=x/onerror=alert(2)>"


def page_of(folder, *, num_tables=1, groups=("phage", "giant"), name="scores", shift=1.0, scale=1.0):
    known = known_contigs(200, groups=groups)
    tables = []
    for number in range(num_tables):
        lines = zip(known.contigs, scale * scores_of(known, seed=number, shift=shift), strict=True)
        rows = "".join(f"{contig}\t{float(score)!r}\n" for contig, score in lines)
        table = read_scores(write(folder / f"{number}.tsv", f"contig\tscore\n{rows}"))
        tables.append(replace(table, name=f"{name}{number}"))
    document, _ = evaluated(known, tables)
    write_page(document, folder / "evaluation.html", [folder / "evaluation.json"])
    return Page(folder / "evaluation.html"), document


def test_the_page_says_what_the_document_says_without_other_files(tmp_path):
    page, document = page_of(tmp_path)
    overall = document["tables"][0]["overall"]
    assert page.says(f"AUROC {overall['auroc']['value']:.3f} on {overall['viral']} viral and {overall['others']} other")
    for measure in ("auroc", "auprc", "f1", "recall_at_1_percent_false_positives", "calibration_error"):
        one = overall[measure]
        assert page.says(f"{one['value']:.3f}")
        assert page.says(f"({one['low']:.3f} to {one['high']:.3f})")
    for name in (*document["tables"][0]["by_length"], *document["tables"][0]["by_group"]):
        assert page.says(name)
    assert [value for tag, name, value in page.attributes if name in {"src", "srcset", "data", "action"}] == []
    assert {value for _, name, value in page.attributes if name == "href"} == {"data:,", PAPER}
    assert [value for _, name, value in page.attributes if name == "data-file"] == ["evaluation.json"]
    assert len(page.paths) == 6
    (curve,) = [path for kind, path in page.paths["roc"] if kind == "curve dash-0 table-1"]
    x, y = document["tables"][0]["roc"][-1]
    assert curve.startswith("M0 2000")
    assert page.tips["roc"][-1] == [2000, 0, f"false positives {x:.3f}, recall {y:.3f}"]
    assert len(page.tips["roc"]) == len(document["tables"][0]["roc"])
    groups = [name for name in document["tables"][0]["by_group"] if name != "bacteria"]
    assert page.labels["recall-by-group"]["at-y"] == groups
    assert sorted(groups) == ["giant", "phage"]
    of_phage = document["tables"][0]["by_group"]["phage"]["recall_at_1_percent_false_positives"]
    value, low, high = (of_phage[name] for name in ("value", "low", "high"))
    (tip,) = [tip for tip in page.tips["recall-by-group"] if tip[2].startswith("phage")]
    assert tip[2] == f"phage: recall {value:.3f} ({low:.3f}\u2013{high:.3f})"
    place, left, right = (round(2000 * (one + 0.02) / 1.04) for one in (value, low, high))
    assert tip[0] == place
    (whiskers,) = [path for kind, path in page.paths["recall-by-group"] if kind == "curve thin table-1"]
    assert f"M{left} {tip[1]}H{right}" in whiskers
    table = document["tables"][0]
    for one in (
        table["by_group"]["phage"]["calibration_error"],
        table["by_length"]["up to 500 nt"]["calibration_error"],
    ):
        assert page.says(f"{one['value']:.3f} ({one['low']:.3f}\u2013{one['high']:.3f})")
    cell = table["by_group_and_length"]["phage"]["up to 500 nt"]
    assert page.says(f"{cell['auroc']['value']:.3f} ({cell['auroc']['low']:.3f}\u2013{cell['auroc']['high']:.3f}), ")
    assert page.says(f", {cell['contigs']} / {cell['genomes']}")
    assert page.says("50 bootstrap samples of genomes, seed 1")


def test_what_is_noted_of_every_table_stands_once(tmp_path):
    page, document = page_of(tmp_path, num_tables=plots.MOST_TABLES)
    notes = document["tables"][0]["notes"]
    assert len(notes) > 1
    assert [page.text.count(note) for note in notes] == [1] * len(notes)
    assert page.says("scores5: precision at the threshold")


def test_no_name_of_the_input_becomes_markup(tmp_path):
    for folder in ("plain", "hostile"):
        (tmp_path / folder).mkdir()
    plain, _ = page_of(tmp_path / "plain", num_tables=2)
    hostile, _ = page_of(tmp_path / "hostile", num_tables=2, groups=(HOSTILE, "giant"), name="<svg onload=alert(3)>")
    assert hostile.tags == plain.tags
    assert len(hostile.scripts) == len(plain.scripts)
    assert not [name for _, name, _ in hostile.attributes if name.startswith("on")]
    assert "<svg onload=alert(3)>" in hostile.text
    assert hostile.labels["recall-by-group"]["at-y"].count(HOSTILE[:27] + "\u2026") == 1


def test_scores_that_are_no_probabilities_have_no_reliability_curve(tmp_path):
    page, document = page_of(tmp_path, scale=30.0)
    assert document["tables"][0]["threshold"] is None
    assert "reliability" not in page.paths
    assert page.says("calibration is left out")
    assert page.says("No threshold is known")


def test_every_table_has_a_colour_and_a_dash_that_are_seen_in_light_and_dark(tmp_path):
    page, _ = page_of(tmp_path, num_tables=plots.MOST_TABLES)
    curves = {kind for kind, _ in page.paths["roc"] if "table-" in kind}
    assert curves == {f"curve dash-{n} table-{n + 1}" for n in range(plots.MOST_TABLES)}
    shown = plots.PAGE_COLOURS
    text = (tmp_path / "evaluation.html").read_text()
    for role in plots.TABLE_COLOURS:
        assert re.search(rf"\.{role}\{{--mark:var\(--{role}\)\}}", text)
    for theme, role in itertools.product(("light", "dark"), (*plots.TABLE_COLOURS, *CALL_COLOURS.values())):
        assert contrast(getattr(shown[role], theme), getattr(COLOURS["surface"], theme)) >= 3, (theme, role)
