"""
What a core facility and its CI do with a Prefect server: deploy, trigger, wait, let schedules fire.

The server, the workers and every command are real; where a run's own work is beside the point, the flow is ``embed``
with the hash model (``tests.hash_flows``).
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta

import jsonschema
import pytest
import yaml

from tests import hash_flows
from tests.conftest import RELEASE, REPOSITORY
from tests.debian_programs import postgresql
from tests.prefect_service import PASSWORD, POOL, prefect_service, wait_until

pytestmark = pytest.mark.slow

PREFECT_YAML = REPOSITORY / "prefect.yaml"
RUN_AND_WAIT = str(REPOSITORY / "deployments" / "ci" / "run_and_wait")
BOOTSTRAP = str(REPOSITORY / "deployments" / "bootstrap")
SERVER = str(REPOSITORY / "deployments" / "server")
DEPLOYMENTS = {
    "embed/embed",
    "embed/embed-smoke",
    "predict/predict",
    "predict/predict-basic",
    "predict/predict-smoke",
    "predict-inbox/predict-nightly",
    "retention/retention",
    "train/train",
}
MOVING = {"updated", "last_polled", "status", "active_slots"}
POISON = "MKVLAAGIT"


def deployment_settings():
    return yaml.safe_load(PREFECT_YAML.read_text())["deployments"]


def deployed(service):
    """Return every deployment of the server by name, without what changes by itself."""

    def still(value):
        if isinstance(value, dict):
            return {name: still(item) for name, item in value.items() if name not in MOVING}
        return [still(item) for item in value] if isinstance(value, list) else value

    with service.client() as client:
        found = {}
        for deployment in client.read_deployments():
            name = f"{client.read_flow(deployment.flow_id).name}/{deployment.name}"
            found[name] = still(deployment.model_dump(mode="json"))
    return found


def runs_of(service, deployment_id):
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    with service.client() as client:
        return client.read_flow_runs(deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id])))


def deploy_hash(service, folder, name, **plan):
    """Deploy ``embed/NAME`` with a hash model that does what *plan* says; return its id."""
    control = hash_flows.control_file(folder / f"{name}.json", **plan)
    return service.deploy("tests/hash_flows.py:embed", name, **{hash_flows.VARIABLE: str(control)})


def embed_parameters(fasta, output_dir, **others):
    given = {"fasta_files": [str(fasta)], "output_dir": str(output_dir), "hardware": {"devices": "cpu", "workers": 1}}
    return [item for name, value in {**given, **others}.items() for item in ("--param", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def workplace(prefect_server, tmp_path_factory):
    """Input, and deployments of the hash model: one that works, one that cannot do a sequence, one that is slow."""
    return make_workplace(prefect_server, tmp_path_factory.mktemp("work"))


def make_workplace(service, folder):
    (folder / "in.fasta").write_text(f">a\nMKTAYIAKQR\n>b\n{POISON}\n>c\nGAVLIMC\n")
    deploy_hash(service, folder, "hash-fine")
    deploy_hash(service, folder, "hash-poisoned", poison={POISON: "nan"})
    deploy_hash(service, folder, "hash-slow", slow_s=60.0)
    return folder


def test_prefect_yaml_is_what_prefects_schema_wants_and_has_no_word_that_prefect_would_ignore():
    from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel, WorkPoolConfig

    settings = yaml.safe_load(PREFECT_YAML.read_text())
    # Prefect's repository publishes schemas/prefect.yaml.schema.json: what this model says of itself
    schema = PrefectYamlModel.model_json_schema(by_alias=True)
    jsonschema.validate(settings, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**settings, "deployments": [{"name": 7}]}, schema)
    fields = {field.alias or name for name, field in PrefectYamlModel.model_fields.items()}
    assert set(settings) - {"definitions"} <= fields
    for deployment in settings["deployments"]:
        assert set(deployment) <= set(DeploymentConfig.model_fields)
        assert set(deployment["work_pool"]) <= set(WorkPoolConfig.model_fields)


def test_every_deployment_says_what_it_is_and_gives_its_flow_parameters_that_it_takes():
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema
    from prefect.utilities.schema_tools import validate

    for deployment in deployment_settings():
        flow = load_flow_from_entrypoint(str(REPOSITORY / deployment["entrypoint"]), use_placeholder_flow=False)
        schema = parameter_schema(flow).model_dump_for_openapi()
        parameters = deployment.get("parameters", {})
        assert set(parameters) <= set(schema["properties"]), deployment["name"]
        validate(parameters, schema, raise_on_error=True, ignore_required=True)
        if set(schema.get("required", [])) <= set(parameters):
            flow.validate_parameters(parameters)
        assert deployment["version"] == RELEASE
        assert deployment["work_pool"]["name"] == POOL
        assert deployment["work_pool"]["work_queue_name"] == deployment["name"].removesuffix("-basic")
        assert "concurrency_limit" not in deployment, "a restart of the server would end its runs"
        assert deployment["enforce_parameter_schema"] is True
        assert len(deployment["description"]) > 100
        assert "virnucpro" in deployment["tags"]
    by_name = {deployment["name"]: deployment for deployment in deployment_settings()}
    bundled = [
        *by_name["predict-smoke"]["parameters"]["input_files"],
        *by_name["embed-smoke"]["parameters"]["fasta_files"],
    ]
    assert all((REPOSITORY / name).is_file() for name in bundled)
    for name in ("predict-nightly", "retention"):
        (schedule,) = by_name[name]["schedules"]
        assert schedule["active"] is False
        assert schedule["slug"]
        assert schedule["timezone"]
    assert by_name["retention"]["parameters"]["dry_run"] is True


def test_deploying_everything_twice_changes_nothing_the_second_time(prefect_server):
    kept = []
    for _ in range(2):
        began_s = time.monotonic()
        done = prefect_server.prefect("--no-prompt", "deploy", "--all", PWD=str(REPOSITORY))
        print(f"deploy --all: {time.monotonic() - began_s:.1f} s")
        assert done.returncode == 0, done.stdout + done.stderr
        kept.append({name: what for name, what in deployed(prefect_server).items() if name in DEPLOYMENTS})
    assert set(kept[0]) == DEPLOYMENTS
    assert kept[0] == kept[1]
    nightly = kept[1]["predict-inbox/predict-nightly"]
    assert [schedule["active"] for schedule in nightly["schedules"]] == [False]
    assert all(what["enforce_parameter_schema"] for what in kept[1].values())
    assert all(what["global_concurrency_limit"] is None for what in kept[1].values())
    assert {str(REPOSITORY)} == {
        step["directory"] for what in kept[1].values() for pull in what["pull_steps"] for step in pull.values()
    }


def test_ci_gets_the_outcome_of_a_run_as_exit_code_with_its_lines_and_its_summary(prefect_server, workplace):
    fasta, missing = workplace / "in.fasta", workplace / "none.fasta"
    summary = workplace / "summary.md"
    limit = ["--timeout", "100"]

    def run_and_wait(deployment, *arguments, **environ):
        return lambda: prefect_server.run(sys.executable, RUN_AND_WAIT, deployment, *arguments, **environ)

    def watch(deployment, *arguments):
        return lambda: prefect_server.prefect("deployment", "run", deployment, "--watch", *arguments)

    partly = embed_parameters(fasta, workplace / "partly", result={"allow_partial": True})
    asked = {
        "complete": run_and_wait("embed/hash-fine", *embed_parameters(fasta, workplace / "a"), *limit),
        "partial": run_and_wait("embed/hash-poisoned", *partly, *limit, "--output-artifact", str(summary)),
        "failed": run_and_wait("embed/hash-fine", *embed_parameters(missing, workplace / "b"), *limit),
        "settings": run_and_wait("embed/hash-fine", *embed_parameters("/etc/hosts", workplace / "c"), *limit),
        "schema": run_and_wait("embed/hash-fine", *embed_parameters(fasta, workplace / "d", model=7)),
        "timed out": run_and_wait(
            "embed/hash-slow", *embed_parameters(fasta, workplace / "e"), "--timeout", "8", "--cancel-on-timeout"
        ),
        "watched": watch("embed/hash-fine", *embed_parameters(fasta, workplace / "f")),
        "watched failure": watch("embed/hash-fine", *embed_parameters(missing, workplace / "g")),
        "watched schema": watch("embed/hash-fine", *embed_parameters(fasta, workplace / "h", model=7)),
    }
    with (
        prefect_server.worker(VIRNUCPRO_DATA_ROOTS=str(workplace)),
        ThreadPoolExecutor(5) as pool,
    ):
        began_s = time.monotonic()
        done = dict(zip(asked, pool.map(lambda ask: ask(), asked.values()), strict=True))
        print(f"{len(asked)} commands: {time.monotonic() - began_s:.1f} s")
    said = "\n\n".join(f"{name}: {it.returncode}\n{it.stdout}\n{it.stderr}" for name, it in done.items())
    assert {name: it.returncode for name, it in done.items()} == {
        "complete": 0,
        "partial": 3,
        "failed": 70,
        "settings": 78,
        "schema": 78,
        "timed out": 124,
        "watched": 0,
        "watched failure": 1,
        "watched schema": 1,
    }, said

    lines = done["complete"].stdout.splitlines()
    states = [line.split(None, 2)[2] for line in lines if re.match(r"\d\d:\d\d:\d\dZ STATE ", line)]
    assert states[0].startswith("Scheduled")
    assert "Running" in states
    assert any(state.startswith("Completed: 3 sequences in ") for state in states)
    assert len([line for line in lines if "Beginning flow run" in line]) == 1
    assert len([line for line in lines if "rank 0: 3 sequences computed" in line]) == 1
    times = [line.split()[0] for line in lines if re.match(r"\d\d:\d\d:\d\dZ ", line)]
    assert times == sorted(times)
    assert "\x1b" not in done["complete"].stdout
    assert "----- embed-hash-summary -----" in lines
    assert "3 of 3 sequences have their row." in lines
    assert "2 of 3 sequences have their row." in done["partial"].stdout
    assert "----- embed-hash-missing -----" in done["partial"].stdout
    assert "2 of 3 sequences have their row." in summary.read_text()
    assert "no such file" in done["failed"].stdout.lower()
    assert not re.search("Traceback|NoneType: None", done["failed"].stdout), "an expected error is one sentence"
    assert "is not under a folder that the worker allows" in done["settings"].stdout
    assert "is not of type 'string'" in done["schema"].stderr
    assert "8 s have passed: it is cancelled" in done["timed out"].stdout
    # a refused run does not exist
    with prefect_server.client() as client:
        folders = [run.parameters.get("output_dir") for run in client.read_flow_runs()]
    assert str(workplace / "a") in folders
    assert not {str(workplace / "d"), str(workplace / "h")} & set(folders)


@pytest.mark.long
def test_ci_is_told_in_a_sentence_why_no_run_was_started(prefect_server, workplace):
    def refusal(deployment, *arguments, **environ):
        done = prefect_server.run(sys.executable, RUN_AND_WAIT, deployment, *arguments, **environ)
        assert done.returncode == 78, done.stdout + done.stderr
        assert not done.stdout
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    known = refusal("embed/hash-fin")
    assert "did you mean embed/hash-fine?" in known
    assert "embed/hash-slow" in known
    assert "did you mean output_dir?" in refusal("embed/hash-fine", "--param", "outptu_dir=x")
    assert "PREFECT_API_AUTH_STRING" in refusal("embed/hash-fine", PREFECT_API_AUTH_STRING="admin:wrong")
    assert "does not answer" in refusal("embed/hash-fine", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "end with /api?" in refusal("embed/hash-fine", PREFECT_API_URL=prefect_server.url)


def test_ctrl_c_cancels_the_run_and_says_so(prefect_server, workplace):
    command = [
        sys.executable,
        RUN_AND_WAIT,
        "embed/hash-slow",
        *embed_parameters(workplace / "in.fasta", workplace / "i"),
    ]
    log = workplace / "interrupted.log"
    with log.open("wb") as said:
        waiting = subprocess.Popen(command, env=prefect_server.environ, cwd=REPOSITORY, stdout=said, stderr=said)
    try:
        wait_until(lambda: "RUN " in log.read_text(), limit_s=60, log=log)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 128 + signal.SIGINT, log.read_text()
    finally:
        waiting.kill()
        waiting.wait()
    assert "stopped: the run is cancelled" in log.read_text()
    run_id = re.search(r"flow-run/(\S+)", log.read_text())[1]
    assert prefect_server.flow_run(run_id).state.name == "Cancelled"


@contextmanager
def scheduled(service, deployment_id, seconds):
    """Let the deployment run every so many seconds."""
    from prefect.client.schemas.schedules import IntervalSchedule

    with service.client() as client:
        soon = datetime.now(UTC) + timedelta(seconds=3)
        every = IntervalSchedule(interval=timedelta(seconds=seconds), anchor_date=soon)
        client.create_deployment_schedules(deployment_id, [(every, True)])
    try:
        yield
    finally:
        with service.client() as client:
            client.delete_deployment(deployment_id)


def test_a_schedule_fires_and_the_inbox_takes_each_content_once_over_a_restart_of_the_worker(prefect_server, tmp_path):
    from prefect.client.schemas.actions import DeploymentUpdate

    inbox, results = tmp_path / "inbox", tmp_path / "results"
    inbox.mkdir()
    target = deploy_hash(prefect_server, tmp_path, "hash-of-inbox")
    nightly = prefect_server.deploy("flows/inbox.py:predict_inbox", "every-few-seconds")
    parameters = {
        "inbox_dir": str(inbox),
        "output_root": str(results),
        "deployment": "embed/hash-of-inbox",
        "parameters": {"hardware": {"devices": "cpu", "workers": 1}},
        "settle_seconds": 1,
    }
    with prefect_server.client() as client:
        client.update_deployment(nightly, DeploymentUpdate(parameters=parameters))
    (inbox / "first one.fasta").write_text(">a\nMKTAYIAKQR\n")
    (inbox / "again.fa").write_text(">a\nMKTAYIAKQR\n")
    (inbox / "copying.fasta.part").write_text(">x\nMK")
    (inbox / "passwd.fasta").symlink_to("/etc/passwd")

    def completed():
        return [run for run in runs_of(prefect_server, target) if run.state.is_completed()]

    began_s = time.monotonic()
    with scheduled(prefect_server, nightly, seconds=20):
        with prefect_server.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)) as worker:
            wait_until(lambda: len(completed()) == 1, limit_s=150, log=worker.log, interval_s=0.5)
            print(f"the first file was done after {time.monotonic() - began_s:.1f} s")
        (inbox / "second.fasta").write_text(">b\nGAVLIMC\n")
        with prefect_server.worker(VIRNUCPRO_DATA_ROOTS=str(tmp_path)) as worker:
            wait_until(lambda: len(completed()) == 2, limit_s=150, log=worker.log, interval_s=0.5)
            print(f"the second one after {time.monotonic() - began_s:.1f} s")
        scans = [run.state.message for run in runs_of(prefect_server, nightly) if run.state.is_completed()]
    runs = runs_of(prefect_server, target)
    assert str(inbox / "second.fasta") in [path for run in runs for path in run.parameters["fasta_files"]]
    assert len(runs) == 2
    assert all("inbox" in run.tags for run in runs)
    assert len(list(results.glob("*/embeddings.h5"))) == 2
    assert len([path for path in (results / ".inbox").iterdir() if len(path.name) > 60]) == 2
    assert len(list(inbox.iterdir())) == 5
    assert "1 run of embed/hash-of-inbox started, 1 skipped, 1 taken before" in scans
    assert "1 run of embed/hash-of-inbox started, 1 skipped, 2 taken before" in scans


KILLED_SCANS = """
import json, os, sys
from pathlib import Path

import flows.inbox
from virnucpro import failpoints

parameters = json.loads(sys.argv[1])


def scan(fault):
    child = os.fork()
    if child == 0:
        failpoints.arm(fault)
        state = flows.inbox.predict_inbox(**parameters, return_state=True)
        os._exit(0 if state.is_completed() else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


step = 0
ended = -9
while ended == -9:
    step += 1
    Path(parameters["inbox_dir"], f"{step}.fasta").write_text(f">s{step}\\n{'A' * step}\\n")
    ended = scan(f"MainProcess/*:{step}:kill")
    print("step", step, "ended", ended, flush=True)
    assert scan(None) == 0
assert ended == 0, ended
print("steps", step - 1)
"""


@pytest.mark.long
def test_a_scan_that_is_killed_at_any_step_neither_loses_a_file_nor_takes_it_twice(prefect_server, tmp_path):
    inbox, results = tmp_path / "inbox", tmp_path / "results"
    inbox.mkdir()
    target = deploy_hash(prefect_server, tmp_path, "hash-of-killed-scans")
    parameters = {"inbox_dir": str(inbox), "output_root": str(results), "deployment": "embed/hash-of-killed-scans"}
    parameters |= {"settle_seconds": 0}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SCANS, json.dumps(parameters)],
        cwd=REPOSITORY,
        env=prefect_server.environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    steps = int(re.search(r"^steps (\d+)$", done.stdout, flags=re.MULTILINE)[1])
    print(f"killed at each of {steps} steps")
    assert steps >= 10
    runs = runs_of(prefect_server, target)
    taken = [path for run in runs for path in run.parameters["fasta_files"]]
    assert sorted(taken) == sorted(str(path) for path in inbox.iterdir())
    assert len(set(taken)) == len(taken) == steps + 1
    claims = [json.loads(path.read_text()) for path in (results / ".inbox").glob("?" * 64 + ".json")]
    assert {claim["flow_run_id"] for claim in claims} == {str(run.id) for run in runs}
    with prefect_server.client() as client:
        client.delete_deployment(target)


def test_a_file_whose_run_failed_is_named_at_each_scan_with_the_claim_to_remove(prefect_server, tmp_path):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
    from prefect.states import Failed

    from flows.inbox import predict_inbox

    inbox, results = tmp_path / "inbox", tmp_path / "results"
    inbox.mkdir()
    (inbox / "a.fasta").write_text(">a\nMKT\n")
    target = deploy_hash(prefect_server, tmp_path, "hash-of-failed-files")
    given = {"deployment": "embed/hash-of-failed-files", "settle_seconds": 0}
    settings = {PREFECT_API_URL: f"{prefect_server.url}/api", PREFECT_API_AUTH_STRING: PASSWORD}

    def scan():
        """What a scan says, and the note on the file in its table."""
        with temporary_settings(settings):
            state = predict_inbox(str(inbox), str(results), **given, return_state=True)
        of_scan = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id]))
        with prefect_server.client() as client:
            (artifact,) = client.read_artifacts(artifact_filter=of_scan)
        return state.message.partition(" started")[2], json.loads(artifact.data)[0]["note"]

    assert scan()[0] == ""
    assert scan()[0] == ", 1 taken before"
    (run,) = runs_of(prefect_server, target)
    with prefect_server.client() as client:
        client.set_flow_run_state(run.id, Failed(message="its input is bad"), force=True)
    said, note = scan()
    assert (said, note) == scan()
    assert said == ", 1 failed before"
    assert f"run {run.id} ended as Failed: its input is bad; press Retry there, or" in note
    subprocess.run(shlex.split(note.rpartition(": ")[2]), check=True)
    assert scan()[0] == ""
    first, again = runs_of(prefect_server, target)
    assert first.id != again.id
    assert first.parameters["output_dir"] == again.parameters["output_dir"]
    with prefect_server.client() as client:
        client.delete_deployment(target)


def bootstrap_says(service, *arguments, **environ):
    began_s = time.monotonic()
    done = service.run(sys.executable, BOOTSTRAP, *arguments, **environ)
    print(f"bootstrap: {time.monotonic() - began_s:.1f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    ready, _, _ = done.stdout.partition("\n\n")
    return {line[:46].strip(): line[46:].strip() for line in ready.splitlines()}


@pytest.mark.long
def test_bootstrap_makes_a_server_ready_and_changes_nothing_the_second_time(prefect_server):
    first = bootstrap_says(prefect_server)
    second = bootstrap_says(prefect_server)
    assert set(first) == set(second)
    assert {f"deployment {name}" for name in DEPLOYMENTS} <= set(second)
    assert len([name for name in second if name.startswith("virnucpro: ")]) == 3
    assert {what.partition(":")[0] for what in second.values()} == {"as it was"}
    queues = {name.partition("/")[2].removesuffix("-basic") for name in DEPLOYMENTS}
    assert {f"work queue {name}" for name in queues} <= set(second)
    # what an operator sets stays, unless an option says otherwise
    with prefect_server.client() as client:
        (failed,) = client.read_automations_by_name("virnucpro: a run failed")
        client.pause_automation(failed.id)
        (queue,) = [queue for queue in client.read_work_queues(work_pool_name=POOL) if queue.name == "embed"]
        client.update_work_queue(queue.id, concurrency_limit=3)
    assert bootstrap_says(prefect_server, "--limit", "2")[f"work pool {POOL}"].startswith("changed: process, 2 runs")
    third = bootstrap_says(prefect_server)
    assert third[f"work pool {POOL}"] == "as it was: process, 2 runs at a time"
    assert third["work queue embed"] == "as it was: at most 3 at a time"
    with prefect_server.client() as client:
        assert client.read_work_pool(POOL).concurrency_limit == 2
        (failed,) = client.read_automations_by_name("virnucpro: a run failed")
        assert not failed.enabled
        client.resume_automation(failed.id)


@pytest.mark.long
def test_bootstrap_says_in_a_sentence_why_the_server_cannot_be_used(prefect_server):
    for environ, why in (
        ({"PREFECT_API_URL": "http://127.0.0.1:9/api"}, "does not answer"),
        ({"PREFECT_API_AUTH_STRING": "admin:wrong"}, "PREFECT_API_AUTH_STRING"),
    ):
        done = prefect_server.run(sys.executable, BOOTSTRAP, **environ)
        assert done.returncode == 78
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = prefect_server.run(sys.executable, BOOTSTRAP, "--notify", "slack-webhook/none")
    assert done.returncode == 78
    assert "no such block" in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_host_is_gone_crashes_and_another_worker_resumes_it(prefect_server, workplace):
    """The worker and the flow's process are killed at once, so that no process is left to report the run's end."""
    bootstrap_says(prefect_server, "--with", "resume-crashed")
    with prefect_server.client() as client:
        *_, silent = automations_of_bootstrap(client)
        (automation,) = client.read_automations_by_name(silent.name)
        assert automation.trigger.within == silent.trigger.within == timedelta(minutes=15)
        silent.trigger.within = timedelta(seconds=90)  # for this test alone; the next bootstrap sets it back
        client.update_automation(automation.id, silent)
    control = hash_flows.control_file(workplace / "zombie.json", slow_s=600.0)
    variables = {hash_flows.VARIABLE: str(control), "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    deployment = prefect_server.deploy("tests/hash_flows.py:embed", "zombie", **variables)
    given = {"fasta_files": [str(workplace / "in.fasta")], "output_dir": str(workplace / "zombie")}
    with prefect_server.worker("--name", "dies", VIRNUCPRO_DATA_ROOTS=str(workplace)) as worker:
        with prefect_server.client() as client:
            run = client.create_flow_run_from_deployment(
                deployment, parameters={**given, "hardware": {"devices": "cpu", "workers": 1}}, tags=["virnucpro"]
            )
        prefect_server.wait_for_state(run.id, "Running", limit_s=60)
        time.sleep(3)  # its first heartbeat has reached the server
        flow_process = prefect_server.flow_process(run.id)
        worker.kill()
        flow_process.kill()
        prefect_server.wait_for_state(run.id, "AwaitingRetry", "Late", limit_s=180)
    hash_flows.control_file(control)
    with prefect_server.worker("--name", "lives", VIRNUCPRO_DATA_ROOTS=str(workplace)):
        ended = prefect_server.wait_for_state(run.id, "Completed", limit_s=120)
    assert ended.run_count == 2
    with prefect_server.client() as client:
        states = client.read_flow_run_states(run.id)
        (resume,) = client.read_automations_by_name("virnucpro: resume-crashed")
        client.delete_automation(resume.id)
    (crashed,) = [state for state in states if state.name == "Crashed"]
    assert crashed.message == "no heartbeat for 15 minutes: run it again, and it continues"


def automations_of_bootstrap(client):
    """The automations that every server has, as bootstrap would make them."""
    sys.path.insert(0, str(REPOSITORY / "deployments"))
    try:
        from commands.automations import automations
    finally:
        sys.path.pop(0)
    return automations(client, None)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("database", ["PostgreSQL", "SQLite"])
def test_all_of_it_with_a_backup(database, tmp_path):
    with ExitStack() as stack:
        url = stack.enter_context(postgresql()) if database == "PostgreSQL" else None
        environ = {} if url is None else {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
        service = stack.enter_context(prefect_service(tmp_path / "server", **environ))
        for number, test in enumerate(
            [
                test_deploying_everything_twice_changes_nothing_the_second_time,
                test_bootstrap_makes_a_server_ready_and_changes_nothing_the_second_time,
            ]
        ):
            print(f"{number}: {test.__name__}")
            test(service)
        folder = tmp_path / "work"
        folder.mkdir()
        make_workplace(service, folder)
        test_ci_gets_the_outcome_of_a_run_as_exit_code_with_its_lines_and_its_summary(service, folder)
        (tmp_path / "inbox test").mkdir()
        test_a_schedule_fires_and_the_inbox_takes_each_content_once_over_a_restart_of_the_worker(
            service, tmp_path / "inbox test"
        )
        backup = str(tmp_path / "backup")
        with service.client() as client:
            num_runs = len(client.read_flow_runs())
            assert service.run(sys.executable, SERVER, "backup", backup).returncode == 0
            client.delete_flow_run(client.read_flow_runs()[0].id)
        service.server.close()
        restored = service.run(sys.executable, SERVER, "restore", backup)
        assert restored.returncode == 0, restored.stderr
        service.serve()
        with service.client() as client:
            assert len(client.read_flow_runs()) == num_runs
    assert bool(list((tmp_path / "server").rglob("*.db"))) == (database == "SQLite")
