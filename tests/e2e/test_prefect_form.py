"""The form that Prefect's page makes of a deployment, in a real Chromium: what it says, refuses, and asks for."""

from __future__ import annotations

import pytest

pytest.importorskip("prefect")

from flows.embed import embed
from flows.predict import predict
from tests.prefect_service import PASSWORD, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

BOX = "return [...document.querySelectorAll('.schema-form-property')].filter(one => [...one.querySelectorAll("
BOX += "'.schema-form-property__label')].some((label, n) => n == 0 && label.innerText.trim() == arguments[0]))[0]"


class Form:
    """The page on which a run of a deployment is asked for."""

    def __init__(self, browser, server, deployment):
        self.browser = browser
        self.address = f"{server.url}/deployments/deployment/{deployment}/run"
        browser.driver.set_window_size(1280, 1000)
        browser.driver.get(self.address)
        found = browser.wait_until(
            "return document.querySelector('input[type=password]') || document.querySelector('button[type=submit]')"
        )
        if found.get_attribute("type") == "password":
            found.send_keys(PASSWORD)
            browser.js("document.querySelector('button[type=submit]').click()")
        browser.wait_until("return document.querySelectorAll('.schema-form-property').length > 20")

    def text(self):
        return self.browser.js("return document.body.innerText")

    def click(self, text):
        self.browser.js(
            "[...document.querySelectorAll('button')].find(one => one.innerText.trim() == arguments[0])?.click()", text
        )

    def field(self, title, kind):
        return self.browser.wait_until(f"{BOX}?.querySelector('{kind}')", title)

    def fill(self, title, value, kind="textarea"):
        from selenium.webdriver.common.keys import Keys

        self.field(title, kind).send_keys(Keys.CONTROL, "a", Keys.NULL, value)


@pytest.fixture(scope="module")
def form_of(browser, prefect_server):
    def form(flow):
        where = f"flows/{flow.name}.py:{flow.name}"
        return Form(browser, prefect_server, prefect_server.deploy(where, "form"))

    return form


def lines_of(flow):
    """Title and help of every line of the form."""
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(flow).model_dump_for_openapi()
    for name, line in schema["properties"].items():
        yield name if name in schema["required"] else f"{name} (Optional)", line["description"]
        if "$ref" in line:
            box = schema["definitions"][line["$ref"].rpartition("/")[2]]
            yield from ((f"{item['title']} (Optional)", item["description"]) for item in box["properties"].values())


@pytest.mark.parametrize("flow", [embed, predict], ids=lambda flow: flow.name)
def test_every_line_of_the_form_has_its_title_and_its_help_in_order(form_of, flow, tmp_path):
    form = form_of(flow)
    text, end = form.text(), 0
    lines = list(lines_of(flow))
    assert len(lines) > 25
    for title, said in lines:
        end = text.find(f"{title}\n{said}\n", end)
        assert end >= 0, f"{title} is not in its place, or without its help"
    form.browser.driver.save_screenshot(str(tmp_path / "form.png"))


def test_a_rule_across_fields_is_told_in_the_form_and_no_run_exists_until_it_holds(form_of, prefect_server):
    form = form_of(embed)
    form.click("Add item")
    form.fill("fasta_files", "examples/proteins.fasta")
    form.fill("output_dir", "runs/form")
    form.fill("Devices (Optional)", "cpu")
    form.fill("Workers per GPU (Optional)", "2", kind="input")

    def is_refused():
        form.click("Submit")  # which is deaf for a moment after an entry, and after a refusal
        return "2 is greater than the maximum of 1" in form.text()

    wait_until(is_refused, limit_s=60, interval_s=3)
    assert form.browser.driver.current_url == form.address
    form.fill("Workers per GPU (Optional)", "1", kind="input")
    with prefect_server.client() as client:

        def runs():
            return [run for run in client.read_flow_runs() if run.parameters.get("output_dir") == "runs/form"]

        assert runs() == []

        def is_submitted():
            form.click("Submit")
            return form.browser.driver.current_url != form.address or runs()

        try:
            wait_until(is_submitted, limit_s=60, interval_s=3)
            parameters = runs()[0].parameters
            assert parameters["fasta_files"] == ["examples/proteins.fasta"]
            assert parameters["hardware"]["devices"] == "cpu"
            embed.validate_parameters(parameters)
        finally:
            for run in runs():
                client.delete_flow_run(run.id)
