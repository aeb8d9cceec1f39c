"""The report in a real Chromium: from disk, without network, in light and dark, on a phone, on a desk and on paper."""

from __future__ import annotations

import base64
import re
import threading

import pytest

from tests.chromium import WIDTHS_PX
from tests.made_prediction import Contig, make_prediction, some_contigs
from tests.prefect_service import wait_until
from virnucpro.report import server
from virnucpro.report.html_page import COLOURS
from virnucpro.report.prediction.page import write_report
from virnucpro.report.served_files import ServedFiles, address_of
from virnucpro.report.server import ReportServer

pytestmark = pytest.mark.slow

NAMES = [
    "<img/src=x/onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a\u2028b<!--<script>",
    "<a/href='javascript:alert(3)'>x</a><b>bold</b>&amp;",
    "x" * 1000,
]


def written(folder, contigs=None, **settings):
    made = make_prediction(folder, contigs, **settings)
    return write_report(made.layout), made


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), missing_frames=3)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    contigs = [Contig(name, 12_000, 0, 1) for name in NAMES]
    return written(tmp_path_factory.mktemp("hostile"), contigs, classifier="<script>alert(4)</script>")


@pytest.mark.parametrize("width", ["phone", "desk"])
def test_it_opens_from_disk_without_complaint_request_or_sideways_scroll(browser, page, width):
    path, _ = page
    browser.open(path, width=width, theme="dark")
    for theme in ("dark", "light"):
        browser.turn(theme)
        assert browser.js("return document.querySelectorAll('.plot .main-svg').length") > 0
        empty = "return [...document.querySelectorAll('.plot')].filter(p => !p.querySelector('path')).length"
        assert browser.js(empty) == 0
        assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX[width]
        too_wide = (
            "return [...document.querySelectorAll('.plot')].filter(p => p.scrollWidth > p.clientWidth + 1).length"
        )
        assert browser.js(too_wide) == 0
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]


@pytest.fixture
def address(tmp_path):
    """Return the address of a report by a server of its own, as ``virnucpro serve-reports`` serves it."""
    with ReportServer(ServedFiles([tmp_path]), "127.0.0.1", 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield lambda report: f"http://127.0.0.1:{serving.server_port}{address_of(report)}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("width", ["phone", "desk"])
def test_it_works_by_http_under_the_policy_of_the_server_and_its_files_are_saved(browser, address, tmp_path, width):
    from selenium.webdriver.support.ui import Select

    report, made = written(tmp_path / "runs" / "a #1 100%25 \u00fc (b)?")
    url = address(report)
    browser.open(url, width=width)
    assert browser.js("return [self.origin, document.title.startsWith('VirNucPro: ')]") == ["null", True]
    assert browser.js("return document.querySelectorAll('.plot .main-svg').length") > 0
    assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX[width]
    Select(browser.js("return document.getElementById('filter-call')")).select_by_value("virus")
    assert str(made.count("virus")) in browser.js("return document.getElementById('count').textContent")
    assert browser.requests() == [url]
    saved = {"behavior": "allow", "downloadPath": str(tmp_path / "saved")}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
    browser.js("document.querySelector('footer a[href=\"contigs.tsv\"]').click()")
    table = tmp_path / "saved" / "contigs.tsv"
    wait_until(table.exists, limit_s=30)
    assert table.read_bytes() == made.layout.contigs.read_bytes()
    assert browser.complaints() == []


TRIES = {
    "fetch": "await fetch('/health')",
    "cookie": "document.cookie",
    "storage": "localStorage.length",
    "frame": "const f = document.createElement('iframe'); f.src = '/health'; document.body.append(f); "
    "await new Promise(done => { f.onload = done; }); f.contentDocument.body.textContent",
    "window": "open('/health').close()",
}
"""What a script could do for its reader's sake, or with the password that the browser has."""


@pytest.mark.parametrize(("policy", "got"), [(None, ""), ("", ",".join(TRIES))], ids=["as it is", "without a policy"])
def test_the_script_of_a_forged_report_has_no_origin_and_reaches_nothing(
    browser, address, tmp_path, monkeypatch, policy, got
):
    if policy is not None:
        monkeypatch.setitem(server._HEADERS, "Content-Security-Policy", policy)
    report, _ = written(tmp_path / "forged")
    attempts = "".join(f"try {{ {code}; out.push('{name}') }} catch (e) {{}}\n" for name, code in TRIES.items())
    script = f"(async () => {{ const out = []; {attempts} document.title = `got: ${{out.join()}}.` }})()"
    report.write_text(f"<!doctype html><title>before</title><body><script>{script}</script>")
    browser.open(address(report))
    browser.wait_until("return document.title !== 'before'")
    assert browser.js("return document.title") == f"got: {got}."
    assert (browser.requests() == [address(report)]) == (policy is None)


def colours_of_page_and_plots(browser):
    bar = "getComputedStyle(document.querySelector('#score-histogram .trace path')).fill"
    text = "getComputedStyle(document.querySelector('#score-histogram .xtick text')).fill"
    found = browser.js(f"return [getComputedStyle(document.body).backgroundColor, {bar}, {text}]")
    return ["#{:02x}{:02x}{:02x}".format(*map(int, re.findall(r"\d+", colour)[:3])) for colour in found]


def test_page_and_plots_turn_dark_and_light_with_the_system(browser, page):
    browser.open(page[0], theme="light")
    roles = ("page", "not-virus", "muted")
    assert colours_of_page_and_plots(browser) == [COLOURS[role].light for role in roles]
    browser.turn("dark")
    assert colours_of_page_and_plots(browser) == [COLOURS[role].dark for role in roles]


def press(browser, column, key):
    script = "return [...document.querySelectorAll('.contigs th')].map(th => th.textContent)"
    number = browser.js(script).index(column)
    button = browser.js("return document.querySelectorAll('.contigs th button')[arguments[0]]", number)
    button.send_keys(key)
    sorts = browser.js("return [...document.querySelectorAll('.contigs th')].map(th => th.ariaSort)")
    assert [n for n, sort in enumerate(sorts) if sort] == [number]
    return number, sorts[number]


def test_the_table_sorts_by_keyboard(browser, page):
    from selenium.webdriver.common.keys import Keys

    path, made = page
    browser.open(path)
    assert len(browser.rows()) == 50
    by_length = sorted((row for row in made.rows if row["length"]), key=lambda row: -int(row["length"]))
    number, order = press(browser, "Length", Keys.ENTER)
    assert order == "descending"
    assert [row[0] for row in browser.rows()[:10]] == [row["contig"] for row in by_length[:10]]
    _, order = press(browser, "Length", Keys.SPACE)
    assert order == "ascending"
    assert browser.rows()[0][number].replace("\u00a0", " ") == f"{by_length[-1]['length']} nt"
    _, order = press(browser, "Contig", Keys.ENTER)
    assert order == "ascending"
    assert [row[0] for row in browser.rows()[:3]] == ["k141_1000", "k141_1007", "k141_1014"]
    number, order = press(browser, "Highest", Keys.ENTER)
    _, order = press(browser, "Highest", Keys.ENTER)
    assert order == "ascending"
    assert "" not in {row[number] for row in browser.rows()}  # what is empty comes last either way


def test_the_table_is_filtered_by_text_and_call_and_says_how_many_rows_it_shows(browser, page):
    from selenium.webdriver.support.ui import Select

    path, made = page
    browser.open(path)
    text, call, count, more = (
        browser.js(f"return document.getElementById('{name}')")
        for name in ("filter-text", "filter-call", "count", "more")
    )
    assert count.text == "The first 50 of 400 contigs"
    text.send_keys("K141_12")
    names = {row["contig"] for row in made.rows if "k141_12" in row["contig"]}
    assert {row[0] for row in browser.rows()} == names
    assert count.text == f"{len(names)} contigs that match, of 400 in the table"
    text.clear()
    text.send_keys("no such contig")
    assert browser.rows() == []
    assert count.text == "0 contigs that match, of 400 in the table"
    text.clear()
    Select(call).select_by_value("virus")
    viral = made.count("virus")
    assert count.text == f"The first 50 of {viral} contigs that match, of 400 in the table"
    more.click()
    assert {row[0] for row in browser.rows()} == {row["contig"] for row in made.rows if row["call"] == "virus"}
    assert not more.is_displayed()
    Select(call).select_by_value("")
    assert len(browser.rows()) == 400
    assert browser.complaints() == []


def test_counts_can_be_seen_on_a_log_scale(browser, page):
    browser.open(page[0])
    button = browser.js("return document.querySelector('button[data-plot]')")
    for state, scale in (("true", "log"), ("false", "linear")):
        button.click()
        assert button.get_attribute("aria-pressed") == state
        assert browser.js("return document.getElementById('score-histogram')._fullLayout.yaxis.type") == scale


def test_names_that_are_scripts_do_nothing(browser, hostile):
    path, _ = hostile
    browser.open(path, width="phone")
    assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX["phone"]
    assert {row[0] for row in browser.rows()} == set(NAMES)
    for number, name in enumerate(NAMES):
        browser.js("Plotly.Fx.hover('length-against-score', [{curveNumber: 0, pointNumber: arguments[0]}])", number)
        hover = "document.querySelector('#length-against-score .hoverlayer')"
        browser.wait_until(f"return {hover}.textContent.startsWith(arguments[0])", name[:79])
        assert browser.js(f"return {hover}.querySelectorAll('a, [style*=bold]').length") == 0
    assert browser.js("return document.querySelectorAll('img, .plot a').length") == 0
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]


def test_it_prints_in_light_colours_at_the_width_of_the_page(browser, page):
    path, _ = page
    browser.open(path, theme="dark")
    browser.js(
        "addEventListener('beforeprint', () => { window.printed = ["
        "document.querySelector('#score-histogram .main-svg').getBoundingClientRect().width,"
        "getComputedStyle(document.querySelector('#score-histogram .xtick text')).fill]; });"
    )
    before = colours_of_page_and_plots(browser)
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert pdf.startswith(b"%PDF-")
    assert 5 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12
    width_px, fill = browser.js("return window.printed")
    assert width_px == 680
    assert fill == "rgb({}, {}, {})".format(*bytes.fromhex(COLOURS["muted"].light[1:]))
    width_before = browser.js("return document.querySelector('#score-histogram').clientWidth")
    script = (
        "return document.querySelector('#score-histogram .main-svg').getBoundingClientRect().width === arguments[0]"
    )
    browser.wait_until(script, width_before)
    assert colours_of_page_and_plots(browser) == before
    browser.theme("dark", media="print")
    sheet = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.getPropertyValue('--ink')]"
    assert browser.js(sheet) == ["rgba(0, 0, 0, 0)", COLOURS["ink"].light]
    cut_off = (
        "return [...document.querySelectorAll('.wide')].filter(w => getComputedStyle(w).overflowX !== 'visible').length"
    )
    assert browser.js(cut_off) == 0
    browser.theme("light")


def test_a_browser_that_cannot_unpack_the_plots_says_so_and_shows_the_rest(browser, page):
    from selenium.webdriver.support.ui import Select

    path, made = page
    old = {"source": "delete window.DecompressionStream"}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", old)
    try:
        browser.open(path)
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    note = browser.js("return document.getElementById('without-plots')")
    assert note.text == "The plots need a browser of 2023 or later; everything else is here."
    shown = "return [...document.querySelectorAll('.plot, button[data-plot]')].filter(p => p.checkVisibility()).length"
    assert browser.js(shown) == 0
    assert len(browser.rows()) == 50
    Select(browser.js("return document.getElementById('filter-call')")).select_by_value("virus")
    assert browser.js("return document.getElementById('count').textContent").startswith(
        f"The first 50 of {made.count('virus')} contigs"
    )
    assert browser.complaints() == []
    browser.open(path)
    assert not browser.js("return document.getElementById('without-plots')").is_displayed()


@pytest.mark.parametrize(
    "contigs",
    [
        [],
        [Contig(f"c{n}", 900, open_share=0) for n in range(9)],
        [Contig(f"c{n}", 2000) for n in range(9)],
        [contig for contig in some_contigs() if contig.length_nt < 10_000],
    ],
    ids=["nothing", "no open frame", "no virus", "nothing long"],
)
def test_a_page_about_little_opens_without_complaint(browser, tmp_path, contigs):
    path, made = written(tmp_path, contigs)
    browser.open(path, width="phone", theme="dark")
    assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX["phone"]
    assert len(browser.rows()) == min(50, len(made.rows))
    assert browser.complaints() == []
