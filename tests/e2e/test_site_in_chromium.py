"""The site of the documentation in a real Chromium: all can read every page, which asks this host only; the search."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.chromium import WIDTHS_PX
from tests.conftest import REPOSITORY

pytest.importorskip("mkdocs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    return site


@pytest.fixture(scope="module")
def address(site):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("width", ["phone", pytest.param("desk", marks=pytest.mark.long)])
def test_a_page_asks_this_host_only_does_not_scroll_sideways_and_axe_finds_nothing_wrong(browser, site, address, width):
    wrong = {}
    for path in sorted(site.glob("**/*.html")):
        page = path.relative_to(site).as_posix()
        browser.open(f"{address}{page}", width=width)
        assert browser.complaints() == [], page
        assert {url for url in browser.requests() if not url.startswith((address, "blob:"))} == set(), page
        assert browser.js("return document.documentElement.scrollWidth") <= WIDTHS_PX[width], page
        for theme in ("light", "dark"):
            browser.turn(theme)
            wrong |= {(page, theme, rule): where for rule, _, where in browser.violations()}
    assert wrong == {}


@pytest.mark.parametrize("how", ["by http", "from a folder"])
def test_the_search_finds_a_column_on_the_page_of_files(browser, site, address, how):
    browser.open(f"{address}index.html" if how == "by http" else site / "index.html")
    browser.js("document.querySelector('label[for=__search]').click()")
    browser.wait_until("return document.querySelector('[data-md-component=search-query]')").send_keys("frame_support")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href).join(' ')"
    assert "files.html" in browser.wait_until(found)
    assert browser.complaints() == []
    assert {url for url in browser.requests() if url.startswith("http") and not url.startswith(address)} == set()
