"""The page of an evaluation: whole in itself, made of the document alone, and with nothing of the input as markup."""

from __future__ import annotations

import itertools
import json
import re

import plotly.graph_objects as go
import pytest

from tests.unit.test_evaluation import evaluated, known_contigs, scores_of, write
from tests.unit.test_report_page import Page, contrast
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
        tables.append(
            read_scores(write(folder / f"{name}{number}.tsv", f"contig\tscore\n{rows}"), name=f"{name}{number}")
        )
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
    assert {value for _, name, value in page.attributes if name == "href"} == {"data:,", "evaluation.json"}
    places = {value for tag, name, value in page.attributes if tag == "div" and name == "id"}
    assert set(page.figures) == places
    assert len(places) == 6
    assert page.figures["roc"]["data"][0]["x"] == [x for x, _ in document["tables"][0]["roc"]]
    recall = page.figures["recall-by-group"]["data"][0]
    assert sorted(recall["text"]) == ["giant", "phage"]
    assert recall["text"] == [name for name in document["tables"][0]["by_group"] if name != "bacteria"]
    of_phage = document["tables"][0]["by_group"]["phage"]["recall_at_1_percent_false_positives"]
    place = recall["text"].index("phage")
    assert recall["x"][place] == of_phage["value"]
    assert recall["x"][place] - recall["error_x"]["arrayminus"][place] == pytest.approx(of_phage["low"])
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
    assert "<" not in json.dumps([trace.get("text") for trace in hostile.figures["recall-by-group"]["data"]])


@pytest.mark.parametrize("num_tables", [1, plots.MOST_TABLES])
def test_figures_have_only_properties_and_values_that_plotly_knows(tmp_path, num_tables):
    page, _ = page_of(tmp_path, num_tables=num_tables)
    assert page.figures
    for figure in page.figures.values():
        go.Figure(figure)
        assert "template" not in figure["layout"]


def test_scores_that_are_no_probabilities_have_no_reliability_curve(tmp_path):
    page, document = page_of(tmp_path, scale=30.0)
    assert document["tables"][0]["threshold"] is None
    assert "reliability" not in page.figures
    assert page.says("calibration is left out")
    assert page.says("No threshold is known")


def test_every_colour_of_a_figure_has_its_counterpart_in_the_dark_and_is_seen_in_both(tmp_path):
    page, _ = page_of(tmp_path, num_tables=plots.MOST_TABLES)
    used = set(re.findall(r"#[0-9a-f]{6}", json.dumps(page.figures)))
    shown = plots.PAGE_COLOURS
    assert {colour.light for colour in plots.TABLE_COLOURS.values()} <= used
    assert used <= {colour.light for colour in shown.values()}
    assert len({colour.light for colour in shown.values()}) == len(shown)
    for theme, role in itertools.product(("light", "dark"), (*plots.TABLE_COLOURS, *CALL_COLOURS.values())):
        one = (plots.TABLE_COLOURS | COLOURS)[role]
        assert contrast(getattr(one, theme), getattr(COLOURS["surface"], theme)) >= 3, (theme, role)
