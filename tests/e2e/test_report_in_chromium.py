"""The report in a real Chromium: from disk, without network, in light and dark, on a phone, on a desk and on paper."""

from __future__ import annotations

import base64
import csv
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
        assert browser.js("return document.querySelectorAll('.plot path').length") > 20
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
    assert browser.js("return document.querySelectorAll('.plot path').length") > 20
    assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX[width]
    Select(browser.js("return document.getElementById('filter-call')")).select_by_value("virus")
    assert str(made.count("virus")) in browser.js("return document.getElementById('count').textContent")
    assert browser.requests() == [url]
    assert browser.js("return document.querySelectorAll('[data-file]').length") == 0
    saved = {"behavior": "allow", "downloadPath": str(tmp_path / "saved")}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
    browser.js("document.querySelector('footer a[href=\"contigs.tsv\"]').click()")
    table = tmp_path / "saved" / "contigs.tsv"
    wait_until(table.exists, limit_s=30)
    assert table.read_bytes() == made.layout.contigs.read_bytes()
    browser.js("document.getElementById('export').click()")
    wait_until((tmp_path / "saved" / "contigs_selected.tsv").exists, limit_s=30)
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
    bar = "getComputedStyle(document.querySelector('#score-histogram .not-virus')).fill"
    text = "getComputedStyle(document.querySelector('#score-histogram .at-x')).color"
    found = browser.js(f"return [getComputedStyle(document.body).backgroundColor, {bar}, {text}]")
    return ["#{:02x}{:02x}{:02x}".format(*map(int, re.findall(r"\d+", colour)[:3])) for colour in found]


def test_page_and_plots_turn_dark_and_light_with_the_system(browser, page):
    browser.open(page[0], theme="light")
    roles = ("page", "not-virus", "muted")
    assert colours_of_page_and_plots(browser) == [COLOURS[role].light for role in roles]
    browser.turn("dark")
    assert colours_of_page_and_plots(browser) == [COLOURS[role].dark for role in roles]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_wrong_for_keyboards_and_screen_readers(browser, page, theme):
    browser.open(page[0], theme=theme)
    browser.js("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.violations() == []


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
    assert count.text == f"{len(names)} contigs that match, of 400 in this page"
    text.clear()
    text.send_keys("no such contig")
    assert browser.rows() == []
    assert count.text == "0 contigs that match, of 400 in this page"
    text.clear()
    Select(call).select_by_value("virus")
    viral = made.count("virus")
    assert count.text == f"The first 50 of {viral} contigs that match, of 400 in this page"
    more.click()
    assert {row[0] for row in browser.rows()} == {row["contig"] for row in made.rows if row["call"] == "virus"}
    assert not more.is_displayed()
    Select(call).select_by_value("")
    more.click()
    assert len(browser.rows()) == 400
    assert browser.complaints() == []


def type_into(browser, **limits):
    for name, value in limits.items():
        field = browser.js("return document.getElementById(arguments[0])", f"filter-{name.replace('_', '-')}")
        field.clear()
        field.send_keys(value)


def test_what_is_left_by_the_filters_is_saved_as_lines_of_contigs_tsv(browser, page, tmp_path):
    from selenium.webdriver.support.ui import Select

    path, made = page
    browser.open(path)
    type_into(browser, length_from="1000", length_to="20000", score_from="0.5", score_to="0.95", text="k141")
    Select(browser.js("return document.getElementById('filter-call')")).select_by_value("virus")
    left = [
        row
        for row in made.rows
        if row["call"] == "virus" and 1000 <= int(row["length"]) <= 20_000 and 0.5 <= float(row["score"]) <= 0.95
    ]
    assert 50 < len(left) < made.count("virus")  # more than the rows that are shown
    save = browser.js("return document.getElementById('export')")
    assert save.text == f"Save {len(left)} contigs as TSV"
    saved = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", saved)
    save.click()
    table = tmp_path / "contigs_selected.tsv"
    wait_until(table.exists, limit_s=30)
    header, *lines = table.read_text().splitlines()
    all_lines = made.layout.contigs.read_text().splitlines()
    assert header == all_lines[0]
    assert set(lines) == {line for line in all_lines if line.split("\t")[0] in {row["contig"] for row in left}}
    scores = [float(line.split("\t")[header.split("\t").index("score")]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert browser.complaints() == []


def test_rows_made_by_the_script_are_those_that_stand_in_the_page_without_it(browser, page):
    from tests.unit.test_report_page import Page

    path, _ = page
    off = {"value": True}
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", off)
    browser.driver.get(path.as_uri())
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    texts = "return [...document.querySelectorAll('table.contigs tbody tr')].map(r => [r.className, "
    texts += "...[...r.querySelectorAll('td:not(.sequence)')].map(c => c.className + c.innerHTML)])"
    before = browser.js(texts)
    assert browser.js("return document.querySelectorAll('.sequence').length") == 0
    browser.open(path)
    assert len(before) == 50
    assert browser.js(texts) == before
    assert browser.js("return document.querySelectorAll('td.sequence').length") == 50
    assert Page(path).data["total"] == 400


def test_the_sequence_of_a_viral_contig_is_copied_as_its_record(browser, page):
    path, made = page
    browser.open(path)
    name, button = browser.js(
        "DataTransfer.prototype.setData = (kind, text) => { window.put = text; };"
        "const button = document.querySelector('td.sequence button');"
        "return [button.closest('tr').querySelector('bdi').textContent, button]"
    )
    button.click()
    text = browser.js("return window.put")
    assert text.startswith(f">{name} score=")
    assert text in made.layout.viral_fasta.read_text()
    assert browser.js("return document.querySelector('td.sequence button').textContent") == "Copied"
    assert browser.js("return document.getElementById('said').textContent") == "The sequence is copied."


def test_a_row_leads_to_the_map_of_its_contig(browser, page):
    browser.open(page[0])
    name, link = browser.js(
        "const link = [...document.querySelectorAll('td.sequence a')].find("
        "a => document.querySelector(a.getAttribute('href')).closest('details'));"
        "return [link.closest('tr').querySelector('bdi').textContent, link]"
    )
    link.click()
    target = f"document.getElementById('{link.get_attribute('href').rpartition('#')[2]}')"
    browser.wait_until(f"return {target}.checkVisibility() && {target}.getBoundingClientRect().top < innerHeight")
    assert browser.js(f"return {target}.closest('.track').querySelector('bdi').textContent") == name


def test_values_of_a_plot_are_read_by_pointer_and_by_keys(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    path, _ = page
    browser.open(path)
    plot = browser.js("return document.getElementById('score-histogram')")
    said = "return document.getElementById('said').textContent"
    plot.send_keys(Keys.ARROW_RIGHT)
    first = browser.js(said)
    assert first.startswith("score 0\u20130.025: ")
    plot.send_keys(Keys.END)
    assert browser.js(said).startswith("score 0.975\u20131: ")
    tip = browser.js("return document.querySelector('#score-histogram .tip')")
    assert tip.text == browser.js(said)
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    middle = browser.js("return document.querySelector('#length-against-score .area')")
    ActionChains(browser.driver).move_to_element_with_offset(middle, 0, -middle.size["height"] // 2 + 20).perform()
    tip = browser.js("return document.querySelector('#length-against-score .tip')")
    assert re.search(r": [\d.]+\s(nt|kb), score >?0\.9\d\d, virus$", tip.text)


def test_counts_can_be_seen_on_a_log_scale(browser, page):
    browser.open(page[0])
    button = browser.js("return document.querySelector('button[data-plot]')")
    for state, shown in (("true", "score-histogram-log"), ("false", "score-histogram")):
        button.click()
        assert button.get_attribute("aria-pressed") == state
        visible = "return [...document.querySelectorAll('[id^=score-histogram]')].filter(p => p.checkVisibility())"
        assert browser.js(f"{visible}.map(p => p.id)") == [shown]


def test_names_that_are_scripts_do_nothing(browser, hostile):
    from selenium.webdriver.common.keys import Keys

    path, _ = hostile
    browser.open(path, width="phone")
    assert browser.js("return document.documentElement.scrollWidth") == WIDTHS_PX["phone"]
    assert {row[0] for row in browser.rows()} == set(NAMES)
    plot = browser.js("return document.getElementById('length-against-score')")
    said = set()
    for _ in NAMES:
        plot.send_keys(Keys.ARROW_RIGHT)
        said.add(browser.js("return document.querySelector('#length-against-score .tip').textContent"))
    assert {text[:12] for text in said} == {name[:12] for name in NAMES}
    assert browser.js("return document.querySelectorAll('img, .plot a, .plot b').length") == 0
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]


def test_it_prints_in_light_colours_at_the_width_of_the_page(browser, page):
    path, _ = page
    browser.open(path, theme="dark")
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert pdf.startswith(b"%PDF-")
    assert 5 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 12
    browser.theme("dark", media="print")
    sheet = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.getPropertyValue('--ink')]"
    assert browser.js(sheet) == ["rgba(0, 0, 0, 0)", COLOURS["ink"].light]
    assert colours_of_page_and_plots(browser)[1:] == [COLOURS[role].light for role in ("not-virus", "muted")]
    cut_off = (
        "return [...document.querySelectorAll('.wide')].filter(w => getComputedStyle(w).overflowX !== 'visible').length"
    )
    assert browser.js(cut_off) == 0
    browser.theme("light")


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    """A report of 50,000 contigs."""
    from tests.e2e.test_report_of_a_million_contigs import lay_down

    layout = lay_down(tmp_path_factory.mktemp("assembly"), 50_000)
    return write_report(layout), layout


def test_a_report_of_50_000_contigs_opens_in_two_seconds_and_finds_the_last_one(browser, assembly):
    path, layout = assembly
    browser.open("about:blank")
    browser.open(path)
    opened_s = browser.js("return performance.timing.loadEventEnd - performance.timing.navigationStart") / 1000
    with layout.contigs.open() as table:
        rows = [row for row in csv.DictReader(table, delimiter="\t") if row["score"]]
    last = min(rows, key=lambda row: (float(row["score"]), int(row["length"])))["contig"]
    script = "const began = performance.now(); const field = document.getElementById('filter-text');"
    script += "field.value = arguments[0]; field.dispatchEvent(new Event('input')); return performance.now() - began"
    found_ms = browser.js(script, last)
    print(f"{path.stat().st_size:,} bytes, opened in {opened_s:.2f} s, found in {found_ms:.0f} ms")
    assert opened_s < 2
    assert [row[0] for row in browser.rows()] == [last]
    browser.js(script, "")
    first = browser.rows()[0][0]
    number, order = press(browser, "Contig", "\n")
    assert (number, order) == (0, "ascending")
    assert browser.rows()[0][0] == "contig_0000000" != first
    assert browser.complaints() == []


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
