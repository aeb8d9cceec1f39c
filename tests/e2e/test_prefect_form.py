"""
A deployment as people use it, in a real Chromium: its form, why it is refused, a run, its progress, its report.

The page is Prefect's new one, which a browser without a saved choice gets; the old one shows the same titles and help.
Screenshots of both widths are left in the test's folder.
"""

from __future__ import annotations

import json
import random
import sys
import time

import pytest

pytest.importorskip("prefect")

from prefect.client.schemas.actions import DeploymentUpdate
from prefect.utilities.callables import parameter_schema

from flows.embed import embed
from flows.predict import predict, predict_basic
from tests.conftest import REPOSITORY
from tests.faults.processes import RowsFound, compare_rows, make_proteins
from tests.hash_flows import VARIABLE, control_file
from tests.prefect_service import PASSWORD, POOL, START_LIMIT_S, started, wait_until
from virnucpro.run_layout import PredictionLayout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WIDTHS_PX = (1400, 400)
HUNG = "has hung"
"""Made by the process that embeds first, as it begins to hang."""
FIELD = "[...document.querySelectorAll('label')].find(one => one.innerText.trim() == arguments[0])?.closest('.group')"
PRESS = "one.dispatchEvent(new MouseEvent('mousedown', {bubbles: true, button: 0})); one.click(); return true"
NAMED = "const one = [...document.querySelectorAll(arguments[0])].find(one => one.innerText.trim() == arguments[1]);"
DIALOG = "[role=dialog] button, [role=alertdialog] button"


class Page:
    """Prefect's page in a browser that is logged in."""

    def __init__(self, browser, server):
        self.browser, self.url = browser, server.url

    def open(self, path, *, shows):
        """Go to a page, and wait until it has a text."""
        self.browser.driver.get(f"{self.url}{path}")
        found = self.browser.wait_until(
            "return document.querySelector('input[type=password]') || document.body.innerText.includes(arguments[0])",
            shows,
        )
        if found is not True:
            found.send_keys(PASSWORD)
            self.browser.js("document.querySelector('button[type=submit]').click()")
            self.browser.wait_until("return !document.querySelector('input[type=password]')")
            self.browser.driver.get(f"{self.url}{path}")
        self.wait_for(shows)

    def text(self):
        return self.browser.js("return document.body.innerText")

    def wait_for(self, text):
        self.browser.wait_until("return document.body.innerText.includes(arguments[0])", text)

    def reload_until(self, text):
        """Reload until the page has a text: its tab of artifacts does not look for new ones by itself."""

        def is_there():
            self.browser.driver.refresh()
            self.browser.wait_until("return document.body.innerText.includes('Artifacts')")
            time.sleep(1)
            return text in self.text()

        wait_until(is_there, limit_s=60)

    def press(self, text, kind="button"):
        """Press what shows this text, once it is there."""
        self.browser.wait_until(f"{NAMED} if (!one) return false; {PRESS}", kind, text)

    def follow(self, text, path):
        """Follow the link that shows a text, until the page's path has *path*."""
        find = "const one = [...document.querySelectorAll('a')].find(one => one.innerText.includes(arguments[0]));"
        self.browser.wait_until(f"{find} if (!one) return false; {PRESS}", text)
        self.browser.wait_until("return location.pathname.includes(arguments[0])", path)

    def menu(self, item):
        """Choose from the menu of a run."""
        from selenium.webdriver.common.keys import Keys

        find = "return [...document.querySelectorAll('button')].find(one => one.innerText.includes('Open menu'))"
        self.browser.wait_until(find).send_keys(Keys.ENTER)
        self.press(item, "[role=menuitem]")

    def shoot(self, folder, name):
        """Leave a screenshot in each width."""
        for width in WIDTHS_PX:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self.browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            self.browser.wait_until("return window.innerWidth == arguments[0]", width)
            self.browser.driver.save_screenshot(str(folder / f"{name}-{width}.png"))
        self.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


class Form(Page):
    """The form by which a run of a deployment is asked for."""

    def __init__(self, browser, server, deployment, *, old=False):
        super().__init__(browser, server)
        browser.driver.set_window_size(1400, 1000)
        self.path = f"{'' if old else '/v2'}/deployments/deployment/{deployment}/run"
        self.open(self.path, shows="Output folder")

    def field(self, title, kind):
        return self.browser.wait_until(f"return {FIELD}?.querySelector(arguments[1])", title, kind)

    def way(self, title, name):
        """Choose how a field is filled in, where there are several ways."""
        self.browser.wait_until(
            f"const tabs = {FIELD}?.querySelectorAll('[role=tab]') || [];"
            f"const one = [...tabs].find(one => one.innerText == arguments[1]); if (!one) return false; {PRESS}",
            title,
            name,
        )

    def fill(self, title, value):
        from selenium.webdriver.common.keys import Keys

        field = self.field(title, "textarea, input")
        self.browser.js("arguments[0].scrollIntoView({block: 'center'})", field)
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, value)

    def name(self, name):
        """Type the name of the run; the old page's first field is the name."""
        from selenium.webdriver.common.keys import Keys

        field = self.browser.wait_until("return document.querySelector('input[name=name], form input')")
        field.send_keys(Keys.CONTROL, "a", Keys.NULL, name)

    def choose(self, title, value):
        """Choose from a field's list, and wait until it is gone: the next field's may have the same items."""
        self.field(title, "[aria-haspopup=listbox]").click()
        self.press(value, "[role=option]")
        shown = f"{FIELD}?.querySelector('[aria-haspopup=listbox]')?.innerText.trim() == arguments[1]"
        self.browser.wait_until(f"return {shown} && !document.querySelector('[role=option]')", title, value)

    def messages(self):
        """What is refused: title of the field -> message under it."""
        found = self.browser.js(
            "return [...document.querySelectorAll('.text-destructive')].map(one => [one.closest('.group')"
            "?.querySelector('label')?.innerText.trim(), one.innerText.trim()]).filter(([title, _]) => title)"
        )
        return {title.removesuffix(" (Optional)"): message for title, message in found}

    def submit(self):
        self.press("Submit")


@pytest.fixture(scope="module")
def form_of(browser, prefect_server):
    def form(flow, **kind):
        where = f"flows/{flow.name}.py:{flow.fn.__name__}"
        return Form(browser, prefect_server, prefect_server.deploy(where, f"{flow.fn.__name__}-form"), **kind)

    return form


def lines_of(flow):
    """Title and help of every line of the form."""
    schema = parameter_schema(flow).model_dump_for_openapi()
    for name, line in schema["properties"].items():
        box = schema["definitions"][line["$ref"].rpartition("/")[2]] if "$ref" in line else {}
        title = line.get("title", box.get("title"))
        yield title if name in schema["required"] else f"{title} (Optional)", line["description"]
        yield from ((f"{one['title']} (Optional)", one["description"]) for one in box.get("properties", {}).values())


@pytest.mark.parametrize(
    ("flow", "old", "number"), [(embed, False, 39), (predict, False, 48), (embed, True, 39), (predict_basic, False, 8)]
)
def test_every_line_of_the_form_has_its_title_and_its_help_in_order(form_of, flow, old, number, tmp_path):
    form = form_of(flow, old=old)
    text, end = " ".join(form.text().split()), 0
    lines = list(lines_of(flow))
    assert len(lines) == number
    for title, help_text in lines:
        end = text.find(f"{title} {' '.join(help_text.split())} ", end)
        assert end >= 0, f"{title} is not in its place, or without its help"
    form.shoot(tmp_path, "form")


@pytest.fixture(scope="module")
def worker(prefect_server, tmp_path_factory):
    """
    A worker whose runs may read and write in one folder, and a server of their reports; yields the folder.

    The first process that embeds hangs until it is stopped, however fast the machine is.
    """
    folder = tmp_path_factory.mktemp("site")
    contigs = (REPOSITORY / "examples" / "contigs.fasta").read_text().split(">")[1:]
    (folder / "contigs.fasta").write_text("".join(f">{one}" for one in contigs[:28]))
    log, served = folder / "worker.log", folder / "reports.log"
    hangs = f"gpu_worker_0/file.rename:1:hang:{folder / HUNG}"
    environ = {**prefect_server.environ, "VIRNUCPRO_DATA_ROOTS": str(folder), "VIRNUCPRO_FAILPOINT": hangs}
    serve = [sys.executable, "-u", "-m", "virnucpro", "serve-reports", "--port", "0"]
    command = [sys.executable, "-m", "flows.worker", "--pool", POOL]
    with started(serve, served, cwd=folder, environ=environ):
        wait_until(lambda: "http://" in served.read_text(), limit_s=START_LIMIT_S, log=served)
        environ["VIRNUCPRO_REPORTS_URL"] = served.read_text().split()[-1]
        with started(command, log, cwd=folder, environ=environ):
            wait_until(lambda: " started!" in log.read_text(), limit_s=START_LIMIT_S, log=log)
            yield folder


def runs_named(server, name):
    with server.client() as client:
        return [run for run in client.read_flow_runs() if run.name == name]


def test_from_a_form_that_is_refused_to_the_report(form_of, prefect_server, worker, tmp_path):
    form, out = form_of(predict), worker / "out"
    fill_in_wrongly(form)
    form.submit()
    form.wait_for("'output_dir' is a required property")
    assert form.messages() == {
        "Contigs or reads": "'input_files' is a required property",
        "Output folder": "'output_dir' is a required property",
        "Threshold": "1.5 is greater than or equal to the maximum of 1",
        "Prior": "'auto, off, or a share of viruses such as 0.05' was expected",
        "Workers per GPU": "'1, because only GPUs are shared by several workers' was expected",
    }
    form.shoot(tmp_path, "refused")
    form.fill("CPU workers (Optional)", "2000")
    form.submit()  # which the browser itself refuses
    assert form.browser.js("return document.activeElement.validationMessage").endswith("1024.")
    assert runs_named(prefect_server, "Kiel harbour") == []

    fill_in(form, worker / "contigs.fasta", out)
    run = submitted(form, prefect_server, "Kiel harbour")
    page = Page(form.browser, prefect_server)
    page.open(f"/v2/runs/flow-run/{run.id}", shows="Kiel harbour")
    page.wait_for("Running")
    page.press("Artifacts", "[role=tab]")
    page.reload_until("cpu-0-composition-progress")
    wait_until((worker / HUNG).exists, limit_s=60)
    page.shoot(tmp_path, "running")
    page.menu("Cancel")
    page.press("Cancel Flow Run", DIALOG)
    page.wait_for("Cancelled")
    page.shoot(tmp_path, "cancelled")

    page.menu("Retry")
    page.press("Retry", DIALOG)
    page.wait_for("Completed")
    again = prefect_server.flow_run(run.id)
    assert (again.name, again.run_count) == ("Kiel harbour", 2)
    assert again.state.message.endswith(str(PredictionLayout(out).report))
    page.shoot(tmp_path, "completed")
    open_the_report(page, PredictionLayout(out), tmp_path)


def fill_in_wrongly(form):
    form.way("Threshold (Optional)", "Number")
    form.fill("Threshold (Optional)", "1.5")
    form.fill("Prior (Optional)", "2")
    form.choose("Devices (Optional)", "cpu")
    form.fill("Workers per GPU (Optional)", "2")


def fill_in(form, contigs, out):
    form.press("Add item")
    form.fill("Contigs or reads", str(contigs))
    form.fill("Output folder", str(out))
    form.way("Threshold (Optional)", "None")
    form.way("Prior (Optional)", "List")
    form.choose("Prior (Optional)", "off")
    form.choose("Cascade (Optional)", "off")
    form.fill("CPU workers (Optional)", "1")
    form.fill("Workers per GPU (Optional)", "1")
    form.name("Kiel harbour")


def submitted(form, server, name):
    """Press Submit until the run is there: after a refusal Prefect's page only checks the form at the next press."""

    def is_there():
        if form.browser.driver.current_url.endswith(form.path) and not runs_named(server, name):
            form.submit()
        return runs_named(server, name)

    wait_until(is_there, limit_s=60, interval_s=2)
    (run,) = runs_named(server, name)
    assert run.parameters["cascade"] == run.parameters["prior"] == "off"
    assert run.parameters["hardware"]["devices"] == "cpu"
    assert run.parameters["classifier"] == "virnucpro-tiny"
    predict.validate_parameters(run.parameters)
    return run


def open_the_report(page, layout, folder):
    """Open the artifact of the report, and by its link the report, which is served over http."""
    page.reload_until("predict-report")
    page.follow("predict-report", "/artifacts/")  # of this run (3.9), or of every run that made one (3.8)
    page.wait_for(f"report.html of {layout.output_dir}")
    page.shoot(folder, "report-artifact")
    links = page.browser.js("return [...document.querySelectorAll('a')].map(one => one.href)")
    (link,) = {one for one in links if one.endswith(str(layout.report))}
    page.browser.open(link)
    assert page.browser.js("return document.querySelectorAll('table.contigs tbody tr').length") > 20
    page.shoot(folder, "report")


@pytest.mark.long
def test_a_run_does_what_its_buttons_say_on_postgresql(browser, prefect_server, worker, tmp_path):
    assert prefect_server.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"].startswith("postgresql")
    sequences = make_proteins(worker / "in.fasta", random.Random(4), 60)
    control = control_file(tmp_path / "control.json", slow_s=1.0)
    (worker / HUNG).touch()
    deployment = prefect_server.deploy("tests/hash_flows.py:embed", "buttons", **{VARIABLE: str(control)})
    given = {"fasta_files": [str(worker / "in.fasta")], "output_dir": str(worker / "buttons")}
    run = prefect_server.start(deployment, **given, hardware={"devices": "cpu", "workers": 1})
    page = Page(browser, prefect_server)
    page.open(f"/v2/runs/flow-run/{run}", shows="embed into")

    def press(item, button, state):
        page.menu(item)
        page.press(button, DIALOG)
        prefect_server.wait_for_state(run, state, limit_s=180)
        page.wait_for(state)
        page.shoot(tmp_path, state.lower())

    def stop(item, button, state):
        parts = list((worker / "buttons").glob("work/parts/*"))
        wait_until(lambda: len(list((worker / "buttons").glob("work/parts/*"))) > len(parts), limit_s=120)
        process = prefect_server.flow_process(run)
        press(item, button, state)
        print(f"{state}, and gone {wait_until(lambda: not process.is_running(), limit_s=60):.1f} s later")

    stop("Pause", "Pause", "Suspended")
    press("Resume", "Resume", "Running")
    stop("Cancel", "Cancel Flow Run", "Cancelled")
    control_file(control)
    press("Retry", "Retry", "Completed")
    with prefect_server.client() as client:
        assert len([state for state in client.read_flow_run_states(run) if state.is_running()]) == 3
    assert compare_rows(worker / "buttons", sequences) == RowsFound()


def test_names_of_runs_and_why_a_run_is_refused_at_once(browser, prefect_server, worker):
    deployment = prefect_server.deploy("flows/predict.py:predict", "predict-form")
    refused = {"input_files": [str(worker / "contigs.fasta")], "fdr": 0.05, "threshold": 0.5}
    generated = prefect_server.start(deployment, **refused, output_dir=str(worker / "refused"))
    given = {**refused, "output_dir": str(worker / "typed")}
    asked = prefect_server.prefect(
        *("deployment", "run", "predict/predict-form", "--flow-run-name", "gut-virome"),
        *(part for name, value in given.items() for part in ("--param", f"{name}={json.dumps(value)}")),
    )
    assert asked.returncode == 0, asked.stderr
    (typed,) = runs_named(prefect_server, "gut-virome")
    with prefect_server.client() as client:
        given = {**refused, "output_dir": str(worker / "old page")}
        client.update_deployment(deployment, DeploymentUpdate(parameters=given))
    form = Form(browser, prefect_server, deployment, old=True)
    form.name("wild-boar")  # two words as the server joins them
    form.submit()
    wait_until(lambda: runs_named(prefect_server, "wild-boar"), limit_s=30)
    (old,) = runs_named(prefect_server, "wild-boar")
    names = {generated: f"predict into {worker / 'refused'}", typed.id: "gut-virome", old.id: "wild-boar"}
    for run, name in names.items():
        ended = prefect_server.wait_for_state(run, "Failed", limit_s=60)
        assert ended.name == name
        assert ended.state.message == "a threshold and a false discovery rate exclude each other: give one of them"
        assert ended.labels["virnucpro.exit_code"] == 78
