"""Debian's Chromium, headless and driven by the tests."""

from __future__ import annotations

import json
from importlib import resources

WIDTHS_PX = {"phone": 390, "desk": 1280}


class Browser:
    """A headless Chromium that no name resolves in, and what it said and asked for since it opened a page."""

    def __init__(self, chromium, chromedriver, profile):
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        switches = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
        more = "disable-component-update disable-sync disable-dev-shm-usage hide-scrollbars"
        for switch in f"{switches} {more}".split():
            options.add_argument(f"--{switch}")
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
        self.driver.get("about:blank")  # and no longer Chromium's own first page

    def open(self, path, *, width="desk", theme="light"):
        """Open a report: a file, or the address of one."""
        url = path if isinstance(path, str) else path.as_uri()
        metrics = {"width": WIDTHS_PX[width], "height": 900, "deviceScaleFactor": 1, "mobile": width == "phone"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.theme(theme)
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(url)
        self.wait_until("return document.URL === arguments[0] && document.readyState === 'complete'", url)

    def theme(self, theme, media=""):
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [feature]})

    def turn(self, theme):
        """Let the system turn dark or light while a page is open, which hears of it with the next frame."""
        self.theme(theme)
        self.js("return new Promise(requestAnimationFrame)")

    def js(self, script, *args):
        return self.driver.execute_script(script, *args)

    def wait_until(self, script, *args):
        """Return what *script* returns, once that is something."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, 60).until(lambda _: self.js(script, *args))

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "chrome:"))]

    def violations(self):
        """What axe-core finds wrong for keyboards and screen readers on the open page: rule, help and elements."""
        self.js((resources.files("axe_core_python") / "axe.min.js").read_text())
        rules = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
        run = "axe.run({ runOnly: arguments[0] }).then(arguments[1])"
        found = self.driver.execute_async_script(run, rules)
        assert len(found["passes"]) > 20
        return [(one["id"], one["help"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]]

    def rows(self):
        """The cells of the rows that are shown."""
        script = (
            "return [...document.querySelectorAll('table.contigs tbody tr')].filter(row => row.checkVisibility())"
            ".map(row => [...row.cells].map(cell => cell.textContent))"
        )
        return self.js(script)
