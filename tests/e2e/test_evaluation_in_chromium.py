"""The page of an evaluation in a real Chromium: from disk, without network, light and dark, on a phone and a desk."""

from __future__ import annotations

import pytest

from tests.chromium import WIDTHS_PX
from tests.unit.test_evaluation_page import HOSTILE, page_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page_of(folder, num_tables=2, groups=(HOSTILE, "g" * 300), name="scores <script>alert(1)<")
    return folder / "evaluation.html"


@pytest.mark.parametrize("width", ["phone", "desk"])
def test_it_opens_from_disk_without_complaint_request_or_sideways_scroll(browser, path, width):
    browser.open(path, width=width, theme="dark")
    for theme in ("dark", "light"):
        browser.turn(theme)
        assert browser.js("return document.querySelectorAll('.plot path').length") > 20
        empty = "return [...document.querySelectorAll('.plot')].filter(p => !p.querySelector('path')).length"
        assert browser.js(empty) == 0
        assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX[width]
        fits = "return [...document.querySelectorAll('.wide')].every(box => box.scrollWidth === box.clientWidth)"
        assert browser.js(fits) == (width == "desk")  # on a phone each table scrolls in its own box
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]


def test_every_curve_is_drawn_with_its_points(browser, path):
    browser.open(path)
    for place in ("roc", "precision-recall", "reliability", "recall-by-length", "recall-by-group"):
        drawn = f"return document.querySelectorAll('#{place} .table-1, #{place} .table-2').length"
        assert browser.js(drawn) >= 2, place
    bars = "return document.querySelector('#histogram-2 .bar.virus').getAttribute('d').split('M').length"
    assert browser.js(bars) > 10


def test_axe_finds_nothing_wrong_for_keyboards_and_screen_readers(browser, path):
    browser.open(path)
    browser.js("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.violations() == []
