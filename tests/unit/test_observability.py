"""Dashboard, rules and settings of ``deployments/observability`` hold together, and name only metrics that exist."""

from __future__ import annotations

import enum
import importlib.util
import itertools
import json
import re
import shutil
import subprocess
import types
import typing
from collections import Counter
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.runtime import Runtime
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard, DataTransformerConfig
from grafana_foundation_sdk.models.prometheus import Dataquery
from typer.main import get_command

from flows import exporter
from flows.exporter import SERVER_METRICS
from flows.run.metrics_by_default import MACHINE_FOLDER, OWN_FOLDER
from tests.conftest import REPOSITORY
from tests.dashboard import DASHBOARD, OBSERVABILITY, panels, substituted, variables
from tests.debian_programs import program
from tools import metrics_page
from virnucpro.allowed_roots import DATA_ROOTS
from virnucpro.cli import command_line
from virnucpro.knobs import settings_of
from virnucpro.settings import Monitoring
from virnucpro.telemetry.metrics.options import TEXTFILES
from virnucpro.telemetry.metrics.table import HOST_METRICS, METRICS
from virnucpro.telemetry.worker_logging import LABEL_VARIABLES
from virnucpro.this_host import HOST_NAME_VARIABLE

RULES = sorted((OBSERVABILITY / "rules").glob("*.yml"))
RULE_TESTS = sorted((OBSERVABILITY / "tests").glob("*.yml"))
COLLECT, ALERT_PAGE, *OTHERS = (
    REPOSITORY / "docs" / f"{name}.md" for name in ("collect_metrics", "alerts", "metrics", "monitoring")
)
PAGES = "\n".join(page.read_text() for page in (COLLECT, ALERT_PAGE, *OTHERS))
"""What the documentation has about metrics and alerts."""

PANEL_TYPES = {"row", "timeseries", "stat", "gauge", "bargauge", "state-timeline", "table", "heatmap"}
GRID_COLUMNS = 24
UNITS = {text for name, text in vars(units).items() if name.isidentifier() and isinstance(text, str)}
OWN_UNIT = re.compile(r"(si|suffix):\S+")
"""Grafana's own units, and those that one may make up."""

TARGET_LABELS = {"job", "instance", "run_id"}
"""Labels that a series gets from where it was read; on a cluster what a host serves has ``host`` as well."""
EXPORTED = {
    metric.name + suffix: {*metric.labels, *(["le"] if suffix == "_bucket" else []), *TARGET_LABELS}
    for metric in METRICS
    for suffix in (["_bucket", "_sum", "_count"] if metric.kind == "histogram" else [""])
} | {metric.name: {*metric.labels, "job", "instance"} for metric in (*HOST_METRICS, *SERVER_METRICS)}
"""Series that a run, or the exporter of a host, exports -> their labels."""
PROMETHEUS_OWN = {"up": {*TARGET_LABELS, "host"}, "ALERTS": {"alertname", "alertstate", "severity", "run_id"}}
PROMETHEUS_OWN |= {f"process_{what}": {"job", "instance"} for what in ("cpu_seconds_total", "resident_memory_bytes")}
"""Of Prometheus itself, and of the Prefect server's process."""
OPERATORS = {"and", "or", "unless", "bool", "offset"}


def promtool(*arguments, expects_success=True):
    """Run Prometheus' own checker, and return all it said."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == expects_success, said
    return said


def rules_of(kind):
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return {rule[kind]: rule for file in files for group in file["groups"] for rule in group["rules"] if kind in rule}


ALERTS, RECORDED = rules_of("alert"), rules_of("record")


def dashboard_expressions():
    """Every question that the dashboard asks Prometheus: of its panels and of its variables."""
    found = [target["expr"] for panel in panels() for target in panel.get("targets", [])]
    for variable in variables():
        if variable["type"] == "query":
            function, argument = re.fullmatch(r"(\w+)\((.*)\)", variable["query"]).groups()
            assert function in {"query_result", "label_values"}
            found.append(argument if function == "query_result" else f"count by ({argument.split(', ')[-1]}) "
                         f"({argument.rpartition(', ')[0]})")  # fmt: skip
    return [substituted(expr) for expr in found]


def page_expressions():
    """The questions that the page proposes."""
    block = COLLECT.read_text().partition("Questions to Prometheus")[2].partition("\n\n")[2]
    questions = re.split(r"^ {4}(?! )", block, flags=re.MULTILINE)
    return [" ".join(question.split()) for question in questions if question.strip() and not question.startswith("#")]


def unknown_names(expr):
    """Return the metrics and labels of *expr* that nothing exports: names are read here, the grammar by promtool."""
    exported = EXPORTED | PROMETHEUS_OWN | {name: labels_of_level(name) for name in RECORDED}
    unknown, seen = set(), set()
    without_texts = re.sub(r'"[^"]*"', '""', expr)
    for name, matchers in re.findall(r"([A-Za-z_:][\w:]*)\s*\{([^}]*)\}", without_texts):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        unknown |= {f"{name}{{{label}}}" for label in labels - exported.get(name, set())}
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b[\d.]+(?:e\d+)?\b", " ", without_texts)
    grouped = re.findall(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", bare)
    bare = re.sub(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    for name in re.findall(r"([A-Za-z_:][\w:]*)(?!\s*\(|[\w:])", bare):
        if name not in OPERATORS:
            seen.add(name)
            unknown |= set() if name in exported else {name}
    known_labels = set().union(*(exported.get(name, set()) for name in seen))
    unknown |= {label for labels in grouped for label in re.findall(r"\w+", labels) if label not in known_labels}
    return unknown


def labels_of_level(name):
    """Return the labels that a recorded series has, by its name: ``run_id_model:…`` has run_id and model."""
    level = name.partition(":")[0]
    return {label for label in ("run_id", "model", "host", "device") if label in level}


def as_rules(expressions):
    """Return a file of rules that asks *expressions*."""
    rules = [{"record": f"asked:{number}", "expr": expr} for number, expr in enumerate(expressions)]
    return yaml.safe_dump({"groups": [{"name": "asked", "rules": rules}]})


def fits(value, hint):
    """Whether *value* is of the kind that *hint*, no union, declares; what is within it is not looked at."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Any, object):
        return True
    if kind is typing.Literal:
        return value in typing.get_args(hint)
    if issubclass(kind, enum.Enum):
        return value in set(kind)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def mistakes(value, hint, path="dashboard"):
    """Yield what in *value*, as the types' own decoder left it, is not what the types declare."""
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    declared = next((each for each in alternatives if fits(value, each)), None)
    if declared is None:
        yield f"{path} is {value!r}"
        return
    inner = typing.get_args(declared)
    if isinstance(value, list) and inner:
        for number, each in enumerate(value):
            yield from mistakes(each, inner[0], f"{path}[{number}]")
    elif isinstance(value, dict) and inner:
        for name, each in value.items():
            yield from mistakes(each, inner[1], f"{path}[{name!r}]")
    elif hasattr(value, "to_json"):
        for name, field in typing.get_type_hints(type(value)).items():
            yield from mistakes(getattr(value, name), field, f"{path}.{name}")


def refusals(data):
    """Return why Grafana's types (grafana-foundation-sdk) do not take *data* as a dashboard; empty: they do."""
    plugins.register_default_plugins()
    loaded = Dashboard.from_json(data)
    for panel in loaded.panels:
        if transformations := getattr(panel, "transformations", None):  # the one part that is not decoded by itself
            panel.transformations = [DataTransformerConfig.from_json(each) for each in transformations]
    found = list(mistakes(loaded, Dashboard))
    for panel in loaded.panels:
        if panel.type_val != "row" and not Runtime().panelcfg_config(panel.type_val):
            found.append(f"no such panel: {panel.type_val}")
        found += [
            f"{panel.title}: not Prometheus'"
            for query in getattr(panel, "targets", None) or []
            if type(query) is not Dataquery
        ]
    # What the types do not know is lost when it is read, what they ask for is added when it is written.
    written = json.loads(json.dumps(loaded, cls=JSONEncoder))
    return found + ([] if written == data else ["written again, it is not the same"])


def test_promtool_takes_the_settings_and_every_rule():
    assert "is valid prometheus config" in promtool("check", "config", OBSERVABILITY / "prometheus.yml")
    said = promtool("check", "rules", "--lint-fatal", *RULES)
    assert sum(map(int, re.findall(r"(\d+) rules found", said))) == len(ALERTS) + len(RECORDED) > 0


def test_the_commented_examples_of_the_settings_are_valid_too(tmp_path):
    text = (OBSERVABILITY / "prometheus.yml").read_text()
    with_examples = re.sub(r"^( *)# (?=- |  |alerting:)", r"\1", text, flags=re.MULTILINE)
    shutil.copytree(OBSERVABILITY / "rules", tmp_path / "rules")
    (tmp_path / "prometheus.yml").write_text(with_examples)
    jobs = [job["job_name"] for job in yaml.safe_load(with_examples)["scrape_configs"]]
    ours = ["virnucpro", "virnucpro-prefect", "prefect"]
    assert jobs == [*ours, "virnucpro-gpus", "virnucpro-fixed-port", "virnucpro-pushgateway", "node"]
    promtool("check", "config", tmp_path / "prometheus.yml")


def test_every_rule_does_what_its_promtool_tests_say():
    assert promtool("test", "rules", *RULE_TESTS).count("SUCCESS") == len(RULE_TESTS) > 0


def test_every_rule_is_tested_and_every_alert_for_its_silence_too():
    cases = [case for path in RULE_TESTS for case in yaml.safe_load(path.read_text())["tests"]]
    fires, silent = Counter(), Counter()
    for alert in itertools.chain.from_iterable(case.get("alert_rule_test", []) for case in cases):
        (fires if alert.get("exp_alerts") else silent)[alert["alertname"]] += 1
    assert set(fires) == set(silent) == set(ALERTS)
    asked = {question["expr"] for case in cases for question in case.get("promql_expr_test", [])}
    assert asked == set(RECORDED)


def test_a_rule_that_no_longer_does_what_its_tests_say_is_found(tmp_path):
    shutil.copytree(OBSERVABILITY, tmp_path, dirs_exist_ok=True)
    alerts = tmp_path / "rules" / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("(virnucpro_worker_up) == 0", "(virnucpro_worker_up) == 1"))
    promtool("test", "rules", tmp_path / "tests" / "alerts_test.yml", expects_success=False)


def test_every_alert_says_how_grave_it_is_what_to_do_and_where_more_is_written():
    headings = re.findall(r"^#+ (.+)$", ALERT_PAGE.read_text(), flags=re.MULTILINE)
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["for"]
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert name in headings


def test_every_expression_of_the_dashboard_and_of_the_page_is_parsed_by_promtool(tmp_path):
    asked = tmp_path / "asked.yml"
    expressions = [*dashboard_expressions(), *page_expressions()]
    assert len(dashboard_expressions()) > 40
    assert len(page_expressions()) == 4
    asked.write_text(as_rules(expressions))
    assert f"{len(expressions)} rules found" in promtool("check", "rules", asked)
    asked.write_text(as_rules([*expressions, 'sum by (model) (up{job="a"']))
    promtool("check", "rules", asked, expects_success=False)


@pytest.mark.parametrize(
    "expr", [*dashboard_expressions(), *page_expressions(), *(rule["expr"] for rule in (ALERTS | RECORDED).values())]
)
def test_expressions_name_only_metrics_and_labels_that_exist(expr):
    assert unknown_names(expr) == set()


def test_a_name_that_does_not_exist_is_found():
    assert unknown_names("rate(virnucpro_sequence_total[5m]) > 0") == {"virnucpro_sequence_total"}
    assert unknown_names('virnucpro_tokens_left{rank="0"} and up') == {"virnucpro_tokens_left{rank}"}
    assert unknown_names("sum by (gpu) (virnucpro_gpu_power_watts)") == {"gpu"}
    assert unknown_names("max by (model, rank) (virnucpro_progress_ratio)") == {"rank"}
    assert unknown_names("virnucpro_batch_duration_seconds > 1") == {"virnucpro_batch_duration_seconds"}
    assert unknown_names("run_id_model:virnucpro_tokens:rate1h") == {"run_id_model:virnucpro_tokens:rate1h"}


def test_every_metric_is_on_the_dashboard_or_behind_an_alert():
    asked = " ".join([*dashboard_expressions(), *(rule["expr"] for rule in (ALERTS | RECORDED).values())])
    exported = {metric.name for metric in (*METRICS, *HOST_METRICS, *SERVER_METRICS)}
    named = {name for name in exported if re.search(rf"\b{name}(_bucket)?\b", asked)}
    assert exported - named == set()


def test_the_page_of_metrics_is_made_from_what_is_exported():
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "python -m tools.metrics_page"
    rows = re.findall(r"^\| `(virnucpro_\w+)` \|", metrics_page.page(), re.MULTILINE)
    assert sorted(rows) == sorted(metric.name for metric in (*METRICS, *HOST_METRICS, *SERVER_METRICS))
    for metric in (*METRICS, *HOST_METRICS):
        for word in {"seconds", "bytes", "watts", "hertz", "celsius"} & set(metric.name.split("_")):
            assert word in metric.unit.lower() or metric.unit == "Unix time", metric.name


def test_the_pages_name_only_metrics_and_alerts_that_exist():
    names = set(re.findall(r"\bvirnucpro_[a-z_]+\b", PAGES))
    assert names <= set(EXPORTED) | {metric.name for metric in METRICS}
    assert set(LABEL_VARIABLES) < set(re.findall(r"`(\w+)`", PAGES))
    assert set(re.findall(r"\bVirnucpro\w+", PAGES)) == set(ALERTS)


def test_the_pages_name_only_options_and_variables_that_exist():
    parameters = [each for command in get_command(command_line()).commands.values() for each in command.params]
    commands = re.findall(r"^virnucpro .*$", (OBSERVABILITY / "README.md").read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join([PAGES, *commands])))
    of_exporter = set(re.findall(r'"(--[a-z]+)"', Path(exporter.__file__).read_text()))
    of_commands = {option for each in parameters for option in each.opts}
    assert {"--metrics-port", "--profile", "--only"} < named <= of_commands | of_exporter
    variables_named = set(re.findall(r"\bVIRNUCPRO_[A-Z_]+", PAGES))
    assert "VIRNUCPRO_METRICS_TARGETS" in variables_named
    assert variables_named <= {
        *(one.knob.env for one in settings_of(Monitoring) if one.knob.env),
        *(HOST_NAME_VARIABLE, DATA_ROOTS, TEXTFILES),
    }


def test_the_dashboard_is_what_its_script_makes():
    spec = importlib.util.spec_from_file_location("make_dashboard", OBSERVABILITY / "grafana" / "make_dashboard.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.FILE == DASHBOARD
    assert script.as_json(script.make_dashboard()) == DASHBOARD.read_text(), f"run {spec.origin}"


def test_grafanas_own_types_take_the_dashboard():
    assert refusals(json.loads(DASHBOARD.read_text())) == []


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda board: board["panels"][1].update(type="graph"), "no such panel: graph"),
        (lambda board: board["panels"][1].update(colour="red"), "not the same"),
        (lambda board: board["panels"][1].update(title=7), "panels[1].title is 7"),
        (lambda board: board["panels"][1]["options"].pop("graphMode"), "not the same"),
        (lambda board: board["panels"][1]["options"].update(graphMode="pie"), "panels[1].options.graph_mode is 'pie'"),
        (lambda board: board["panels"][1]["targets"][0].pop("expr"), "not the same"),
        (lambda board: board["panels"][1]["targets"][0].update(instant="yes"), "targets[0].instant is 'yes'"),
        (lambda board: board["panels"][1]["fieldConfig"]["defaults"].update(min="0"), "defaults.min_val is '0'"),
        (lambda board: board["templating"]["list"][0].update(type="folder"), "list_val[0].type_val is 'folder'"),
        (lambda board: board.pop("schemaVersion") and board.update(schema="41"), "not the same"),
    ],
)
def test_grafanas_own_types_refuse_a_spoilt_dashboard(spoil, why):
    board = json.loads(DASHBOARD.read_text())
    spoil(board)
    assert any(why in refusal for refusal in refusals(board)), refusals(board)


def test_every_panel_has_a_place_a_unit_a_source_and_an_id_of_its_own():
    board = json.loads(DASHBOARD.read_text())
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert board["uid"] == "virnucpro-run"
    assert {panel["type"] for panel in board["panels"]} == PANEL_TYPES
    taken = Counter()
    for panel in board["panels"]:
        place = panel["gridPos"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        assert columns.stop <= GRID_COLUMNS
        taken.update(itertools.product(columns, lines))
        if panel["type"] != "row":
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert unit in UNITS or OWN_UNIT.fullmatch(unit)
            assert panel["datasource"] == source
            assert panel["targets"]
            assert all(target["datasource"] == source for target in panel["targets"])
    assert set(taken.values()) == {1}, "panels lie on each other"
    ids = Counter(panel["id"] for panel in board["panels"])
    assert set(ids.values()) == {1}


def test_the_steps_of_the_readme_fit_the_files_beside_it():
    steps = (OBSERVABILITY / "README.md").read_text()
    copied = re.findall(r"^sudo cp (?:-r )?((?!/)\S+) (/\S+)$", steps, flags=re.MULTILINE)
    assert {source for source, _ in copied} == {
        "prometheus.yml",
        "rules",
        "grafana/dashboards/virnucpro.json",
        "grafana/provisioning/datasources/virnucpro.yml",
        "grafana/provisioning/dashboards/virnucpro.yml",
    }
    assert all((OBSERVABILITY / source).exists() for source, _ in copied)
    places = dict(copied)
    settings = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    patterns = settings["scrape_configs"][0]["file_sd_configs"][0]["files"]
    targets = re.search(r"--metrics-targets (\S+)", steps)[1]
    assert patterns == [f"{targets}/virnucpro-*.json", f"{OWN_FOLDER.name}/virnucpro-*.json"]
    assert (targets, OBSERVABILITY) == (str(MACHINE_FOLDER), OWN_FOLDER.parent)
    assert f"install -d -m 1777 {targets}\n" in steps
    provided = yaml.safe_load((OBSERVABILITY / "grafana/provisioning/dashboards/virnucpro.yml").read_text())
    assert provided["providers"][0]["options"]["path"] + "/" == places["grafana/dashboards/virnucpro.json"]
    source = yaml.safe_load((OBSERVABILITY / "grafana/provisioning/datasources/virnucpro.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"
    assert source["datasources"][0]["jsonData"]["timeInterval"] == settings["global"]["scrape_interval"]
    address = re.search(r"--web.listen-address=(\S+?)\"", steps)[1]
    assert source["datasources"][0]["url"] == f"http://{address}"
    assert f"/d/{json.loads(DASHBOARD.read_text())['uid']}>" in steps


def test_every_question_of_a_panel_is_about_the_chosen_run_or_in_a_row_of_the_server_or_of_all_hosts():
    row = ""
    for panel in panels():
        row = panel["title"] if panel["type"] == "row" else row
        for target in panel.get("targets", []):
            assert not re.search(r"rate\(.*\[(?!\$__rate_interval)", target["expr"])
            selectors = re.findall(r"\b(?:virnucpro_\w+|process_\w+|ALERTS)(\{[^}]*\})?", target["expr"])
            assert selectors
            if row not in {"Prefect: all runs of the server", "GPUs of all hosts, with or without a run"}:
                assert all(re.search(r'run_id=~?"\$run_id\|?"', selector) for selector in selectors), target["expr"]
            else:
                assert "run_id" not in target["expr"]
