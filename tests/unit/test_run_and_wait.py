"""``deployments/ci/run_and_wait`` before it asks a server for anything, and what it makes of what others wrote."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import SimpleNamespace

import pytest
import yaml
from prefect.states import Completed, Crashed, Running

from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "deployments" / "ci" / "run_and_wait"
BOOTSTRAP = REPOSITORY / "deployments" / "bootstrap"


def load(path):
    loader = SourceFileLoader(path.name, str(path))
    spec = spec_from_loader(path.name, loader)
    module = module_from_spec(spec)
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # no __pycache__ beside a script
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


script = load(SCRIPT)


def said_for(*arguments, stdin="", path=SCRIPT):
    done = subprocess.run(
        [sys.executable, path, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def refusal_of(capsys, monkeypatch, *arguments):
    """Return what a command line is refused with; it ends with 2."""
    monkeypatch.setattr(sys, "argv", ["run_and_wait", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.arguments()
    assert ended.value.code == script.USAGE
    return capsys.readouterr().err.rpartition("error: ")[2].strip()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["predict"], "a deployment is named FLOW/DEPLOYMENT, such as predict/predict-smoke, not 'predict'"),
        (["a/b", "--parm", "x=1"], "unknown: --parm x=1; did you mean --param?"),
        (["a/b", "--param", "x"], "--param takes NAME=VALUE, not 'x'"),
        (["a/b", "--param", "x=/\udcff"], r"""not UTF-8, which names and parameters must be: ' {"x": "/\udcff'"""),
        (["a/\udcff"], r"""not UTF-8, which names and parameters must be: '["a/\udcff'"""),
        (["a/b", "--param", "x=NaN"], "NaN and Infinity are not JSON, and no parameter takes them"),
        (["a/b", "--param", "x=[1"], "--param x: not JSON: Expecting ',' delimiter: line 1 column 3 (char 2): [1"),
        (["a/b", "--param", "x={}}"], "--param x: not JSON: Extra data: line 1 column 3 (char 2): {}}"),
        (
            ["a/b", "--timeout", "soon"],
            "argument --timeout: a time is a number of seconds, or such as 15m or 2h, not 'soon'",
        ),
        (["a/b", "--timeout", "-5"], None),
        (
            ["a/b", "--timeout", "nan"],
            "argument --timeout: a time is a number of seconds, or such as 15m or 2h, not 'nan'",
        ),
        (["a/b", "--cancel-on-timeout"], "--cancel-on-timeout needs --timeout"),
        (["a/b", "--params", "/no/such.json"], "--params /no/such.json: No such file or directory"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused_with_what_to_write_instead(capsys, monkeypatch, arguments, why):
    said = refusal_of(capsys, monkeypatch, *arguments)
    assert why is None or said == why


def test_a_file_where_a_value_belongs_is_found(capsys, monkeypatch, tmp_path):
    file = tmp_path / "hardware.json"
    file.write_text("[1]")
    said = refusal_of(capsys, monkeypatch, "a/b", "--param", str(file))
    assert said.endswith("; a file of parameters is given with --params")
    said = refusal_of(capsys, monkeypatch, "a/b", "--param", f"hardware={file}")
    assert (
        said == f"--param hardware takes the value itself, not the file {file}; --params takes a file of all parameters"
    )
    said = refusal_of(capsys, monkeypatch, "a/b", "--params", str(file))
    assert said == f"--params {file}: an object {{NAME: VALUE, ...}} is needed, not list"


def test_parameters_are_json_or_text_and_single_ones_win(monkeypatch, tmp_path):
    file = tmp_path / "all.json"
    file.write_text('{"model": "a", "workers": 1, "path": "x=y"}')
    given = ["--params", str(file), "--param", "workers=2", "--param", "model=b c", "--param", "output_dir=a=b"]
    monkeypatch.setattr(sys, "argv", ["run_and_wait", "a/b", *given, "--timeout", "2h"])
    parsed = script.arguments()
    assert parsed.parameters == {"model": "b c", "workers": 2, "path": "x=y", "output_dir": "a=b"}
    assert parsed.timeout == 7200


def test_lines_of_others_can_do_nothing_to_a_terminal_or_a_ci():
    text = "a\x1b[31mred\rx\n  ::set-env name=A::b\nok ##[error]no\ta\xa0b\n"
    assert script.plain(text) == ["a\\x1b[31mred", "x", "|   ::set-env name=A::b", "ok # #[error]no  a b"]
    assert script.plain("") == [""]


def test_lines_come_out_in_the_order_of_their_times_each_once(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(script.time, "monotonic", lambda: clock.now)
    begin = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    printer = script.Printer()
    printer.take(begin + timedelta(seconds=1), "INFO", "second\nwith a line more")
    clock.now = 1.0
    printer.take(begin, "INFO", "first, that came later")
    printer.take(begin + timedelta(seconds=9), "ERROR", "last")
    printer.release()
    assert capsys.readouterr().out == ""
    clock.now = script.HOLD_S
    printer.release()
    assert capsys.readouterr().out.splitlines() == [
        "03:04:05Z INFO     first, that came later",
        "03:04:06Z INFO     second",
        "                   | with a line more",
    ]
    printer.release(everything=True)
    printer.release(everything=True)
    assert capsys.readouterr().out == "03:04:14Z ERROR    last\n"


@pytest.mark.parametrize(("hand_back_s", "last"), [(60.0, "Completed"), (0.0, "Crashed")])
def test_a_run_whose_worker_was_told_to_go_may_be_handed_back(monkeypatch, hand_back_s, last):
    names = iter(["Running", "Crashed", "Crashed", "AwaitingRetry", "Running", "Completed", "Completed"])

    class Watch(script.Watch):
        def look(self, *, whole=False):
            name = next(names)
            state = Crashed(message="Execution was aborted by a termination signal.") if name == "Crashed" else None
            self.run.state = state or {"Completed": Completed}.get(name, Running)()

    for setting, value in {"HOLD_S": 0.0, "POLL_S": 0.0, "HAND_BACK_S": hand_back_s}.items():
        monkeypatch.setattr(script, setting, value)
    watch = Watch(None, SimpleNamespace(id=1), script.Printer())
    assert watch.until_the_end(float("inf"))
    assert watch.run.state.name == last


def test_tables_are_markdown_and_not_endless():
    rows = [{"id": f"r{number}", "why": "a\nb"} for number in range(script.MAX_ROWS + 7)]
    lines = script.table(rows).splitlines()
    assert lines[:3] == ["| id  | why |", "|-----|-----|", "| r0  | a b |"]
    assert lines[-1] == "... and 7 rows more"
    assert script.table('{"id": [1, 2], "why": ["a", "b"]}').splitlines()[-1] == "| 2  | b   |"
    assert script.table([]) == "(an empty table)"


@pytest.mark.parametrize(
    ("kind", "name", "label", "code"),
    [
        ("completed", "Completed", 0, 0),
        ("completed", "Partial", 3, 3),
        ("completed", "Completed", None, 0),
        ("failed", "Failed", 3, 3),
        ("failed", "Failed", 65, 70),
        ("failed", "Failed", 78, 78),
        ("failed", "TimedOut", None, 70),
        ("crashed", "Crashed", 78, 70),
        ("cancelled", "Cancelled", None, 70),
    ],
)
def test_the_exit_code_is_the_outcome(kind, name, label, code):
    state = SimpleNamespace(name=name, is_completed=lambda: kind == "completed", is_failed=lambda: kind == "failed")
    labels = {} if label is None else {script.EXIT_CODE_LABEL: label}
    assert script.outcome(SimpleNamespace(state=state, labels=labels)) == code


def test_the_label_is_that_of_the_flows():
    assert (
        f'LABEL = "{script.EXIT_CODE_LABEL}"' in (REPOSITORY / "flows" / "run" / "outcome.py").read_text().splitlines()
    )


@pytest.mark.parametrize("path", [SCRIPT, BOOTSTRAP])
def test_help_needs_no_prefect_and_tells_the_exit_codes(path):
    code, said = said_for("--help", path=path)
    assert code == 0
    assert "exit codes:" in said
    assert "PREFECT_API_AUTH_STRING" in said
    assert path.stat().st_mode & 0o111 == 0o111
    beside = path.parent / "commands"
    code = "\n".join(one.read_text() for one in [path, *beside.glob("*.py")])
    imports = re.findall(r"^(?:import|from) (\w+)", code, flags=re.MULTILINE)
    assert set(imports) <= sys.stdlib_module_names | ({beside.name} if beside.exists() else set())


def test_the_page_and_the_workflow_name_only_options_codes_and_deployments_that_exist():
    page = (SCRIPT.parent / "README.md").read_text()
    workflow = (SCRIPT.parent / "github-workflow.yml").read_text()
    _, said = said_for("--help")
    options = set(re.findall(r"--[a-z][a-z-]+", said))
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", page)) - {"--watch"} <= options
    steps = yaml.safe_load(workflow)["jobs"]["deploy"]["steps"]
    assert set(re.findall(r"--[a-z][a-z-]+", steps[-1]["run"])) <= options
    codes = {
        int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", page, flags=re.MULTILINE) for code in cell.split(",")
    }
    assert codes == {script.COMPLETE, script.USAGE, script.PARTIAL, script.FAILED, script.CONFIGURATION, 124, 130, 143}
    settings = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())
    known = {item["name"] for item in settings["deployments"]}
    assert set(re.findall(r"\bpredict(?:-inbox)?/(predict[a-z-]*)", page + workflow + said)) <= known
    assert "deployments/bootstrap" in steps[1]["run"]
