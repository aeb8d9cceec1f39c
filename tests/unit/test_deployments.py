"""What ``deployments/`` and the Dockerfile hold is taken by its own programs and schemas, and is closed by default."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.conftest import RELEASE, REPOSITORY
from tests.debian_programs import program

DEPLOYMENTS = REPOSITORY / "deployments"
COMPOSE = DEPLOYMENTS / "compose" / "compose.yaml"
MANIFESTS = DEPLOYMENTS / "kubernetes" / "worker.yaml"
TEMPLATE = DEPLOYMENTS / "kubernetes" / "base-job-template.json"
UNITS = sorted((DEPLOYMENTS / "systemd").glob("*.service"))
WITH_PASSWORD = DEPLOYMENTS / "with-password"
SHELL_SCRIPTS = [WITH_PASSWORD, *sorted((DEPLOYMENTS / "slurm").glob("*.sbatch")), REPOSITORY / ".ci" / "wheel-check"]

PLACEHOLDER = re.compile(r"\{\{ (\w+) \}\}")
FILLED_IN_BY_PREFECT = {"name", "labels", "command"}
"""Variables without a value of ours that the worker itself gives to every run."""


def run(*command, **environ):
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def said(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def compose():
    return yaml.safe_load(COMPOSE.read_text())["services"]


def env_example():
    """Variable -> its value in the file that people fill in."""
    lines = (DEPLOYMENTS / "compose" / "env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def pod_specs():
    """Every pod that we describe: the worker's, and that of a run as the work pool makes it by default."""
    (worker,) = [one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one["kind"] == "Deployment"]
    return [worker["spec"]["template"]["spec"], job()["spec"]["template"]["spec"]]


def job(**variables):
    """The job of a run, with the template's defaults and *variables*, as Prefect's worker fills them in."""
    template = json.loads(TEMPLATE.read_text())
    values = {
        name: schema["default"] for name, schema in template["variables"]["properties"].items() if "default" in schema
    } | {"name": "a-run", "labels": {"app": "x"}, "command": ["prefect", "flow-run", "execute"], **variables}
    values["env"] = [{"name": name, "value": value} for name, value in values["env"].items()]

    def filled(node):
        if isinstance(node, dict):
            pairs = {key: filled(value) for key, value in node.items()}
            return {key: value for key, value in pairs.items() if value is not None}
        if isinstance(node, list):
            return [filled(item) for item in node]
        whole = PLACEHOLDER.fullmatch(node) if isinstance(node, str) else None
        if whole:
            return values.get(whole[1])
        return PLACEHOLDER.sub(lambda found: values[found[1]], node) if isinstance(node, str) else node

    return filled(template["job_configuration"]["job_manifest"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_each_unit(unit, tmp_path):
    assert said(verified(unit, tmp_path)) == ""


@pytest.mark.parametrize(("spoilt", "is_good"), [("", True), ("/no", False)])
def test_systemd_takes_the_exporters_unit_with_what_a_machine_without_a_server_changes(tmp_path, spoilt, is_good):
    changes = (DEPLOYMENTS / "systemd" / "exporter-gpus.conf").read_text()
    unit = DEPLOYMENTS / "systemd" / "virnucpro-exporter.service"
    done = verified(unit, tmp_path, changes.replace("ExecStart=/", f"ExecStart={spoilt}/"))
    assert (done.returncode, done.stderr) == (0, "") if is_good else "is not executable" in done.stderr
    assert "AUTH_STRING" not in changes


def verified(unit, folder, changes=""):
    """Ask systemd about a unit as it is, with links for the installation's folders, whose names may have blanks."""
    repository, programs = folder / "virnucpro", folder / "bin"
    repository.symlink_to(REPOSITORY)
    programs.symlink_to(Path(sys.executable).parent)
    (folder / f"{unit.name}.d").mkdir()
    for path, text in {folder / unit.name: unit.read_text(), folder / f"{unit.name}.d" / "x.conf": changes}.items():
        here = text.replace("/opt/virnucpro/.venv/bin", str(programs))
        path.write_text(here.replace("/opt/virnucpro", str(repository)))
    return run(program("systemd-analyze"), "verify", "--man=no", folder / unit.name)


def test_the_programs_that_the_units_start_are_there_and_can_be_run():
    named = {path for unit in UNITS for path in re.findall(r"/opt/virnucpro/(deployments/\S+)", unit.read_text())}
    assert named == {"deployments/with-password"}
    for path in [*named, "deployments/healthy"]:
        assert os.access(REPOSITORY / path, os.X_OK), path


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    assert said(run(program("shellcheck"), script)) == ""


def test_bootstrap_without_a_server_says_how_to_start_one(tmp_path):
    done = run(sys.executable, DEPLOYMENTS / "bootstrap", PREFECT_API_URL="", PREFECT_HOME=tmp_path)
    assert done.returncode == 78
    assert "prefect server start --host 127.0.0.1\n    export PREFECT_API_URL=http://127.0.0.1:4200/api" in done.stderr


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cpu"])
def test_hadolint_finds_nothing_in_the_dockerfiles(file):
    assert said(run(Path(sys.executable).parent / "hadolint", REPOSITORY / file)) == ""


def test_the_image_is_built_of_what_the_dockerignore_lets_through():
    dockerfile, ignore = (REPOSITORY / name for name in ("Dockerfile", ".dockerignore"))
    let_through = {line[1:] for line in ignore.read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
        for name in line.split()
    }
    for name in copied - {"."}:
        assert (REPOSITORY / name).exists()
        assert name.split("/")[0] in let_through
    assert all((REPOSITORY / name).exists() for name in let_through)
    assert {"virnucpro", "flows", "prefect.yaml", "pyproject.toml", "hatch_build.py", "constraints.txt"} <= let_through
    assert "USER 10001:10001" in dockerfile.read_text()


def test_the_images_pins_contradict_none_of_ours():
    ours, images = (
        dict(line.lower().split("==") for line in path.read_text().splitlines() if line and not line.startswith("#"))
        for path in (REPOSITORY / "constraints.txt", DEPLOYMENTS / "image-constraints.txt")
    )
    assert not ours.keys() & images.keys()
    torch = ours["torch"]
    assert f"torch {torch}: " in (REPOSITORY / "Dockerfile").read_text(), "does CUDA there still suit this torch?"


def test_the_compose_file_follows_its_specification():
    done = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert "ok" in said(done)


def test_nothing_but_the_proxy_is_bound_beyond_this_machine():
    published = {name: service.get("ports", []) for name, service in compose().items()}
    assert published.pop("proxy") == ["${HTTPS_PORT:-443}:8443"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    reports = compose()["reports"]
    assert (reports["networks"], reports["volumes"]) == (["reports"], ["${DATA_FOLDER}:${DATA_FOLDER}:ro"])
    assert {name for name, service in compose().items() if "reports" in service.get("networks", [])} == {
        "reports",
        "proxy",
    }
    for name in ("prometheus", "grafana", "worker"):  # these listen on the host's own addresses
        assert compose()[name]["network_mode"] == "host"
    assert "--web.listen-address=127.0.0.1:9090" in compose()["prometheus"]["command"]
    assert compose()["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1" in (REPOSITORY / "Dockerfile").read_text()


def test_every_container_is_closed_in_watched_and_restarted():
    for name, service in compose().items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == "unless-stopped", name
        # the worker's and the server's image has a check of its own; see the Dockerfile
        assert "healthcheck" in service or (
            name == "worker" and "HEALTHCHECK" in (REPOSITORY / "Dockerfile").read_text()
        )
        tag = service["image"].rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{name}: no exact version"


def test_what_must_be_filled_in_has_no_default_and_what_is_used_can_be_filled_in():
    text, example = COMPOSE.read_text(), env_example()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used == example.keys()
    empty = {name for name, value in example.items() if not value}
    assert empty == {*re.findall(r"\$\{(\w+):\?", text)}
    assert {"PREFECT_AUTH_STRING", "POSTGRES_PASSWORD", "GRAFANA_PASSWORD", "RUN_AS"} <= empty


def test_every_file_of_ours_that_a_container_mounts_is_there():
    mounted = [
        volume for service in compose().values() for volume in service.get("volumes", []) if isinstance(volume, str)
    ]
    ours = [volume.split(":")[0] for volume in mounted if volume.startswith("../")]
    assert len(ours) == 5
    assert all((COMPOSE.parent / path).exists() for path in ours)


def test_runs_are_limited_by_queues_that_bootstrap_makes_and_leases_of_other_limits_outlive_a_restart_of_the_server():
    deployed = yaml.safe_load((REPOSITORY / "prefect.yaml").read_text())["deployments"]
    (queues,) = re.findall(r"^QUEUES = (.*)$", (DEPLOYMENTS / "bootstrap").read_text(), re.MULTILINE)
    assert sorted({deployment["work_pool"]["work_queue_name"] for deployment in deployed}) == list(literal_eval(queues))
    name, storage = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", "prefect.server.concurrency.lease_storage.filesystem"
    unit = (DEPLOYMENTS / "systemd" / "virnucpro-server.service").read_text()
    assert f"Environment={name}={storage}\n" in unit
    assert "Environment=PREFECT_HOME=/var/lib/virnucpro-server\n" in unit
    server = compose()["server"]
    assert server["environment"][name] == storage
    (volume,) = server["volumes"]
    assert server["environment"]["PREFECT_HOME"].startswith(volume.partition(":")[2])


def test_files_for_the_environment_hold_no_password():
    for name in ("server.env", "worker.env"):
        (line,) = re.findall(r"^PREFECT_\w*AUTH_STRING=.*$", (DEPLOYMENTS / "systemd" / name).read_text(), re.MULTILINE)
        assert line.endswith("=")


@pytest.mark.parametrize("value", ["", "x", "virnucpro:", "virnucpro:short", ":0123456789abcdef", "0123456789abcdefgh"])
def test_nothing_starts_without_a_password_that_somebody_chose(value):
    done = run(WITH_PASSWORD, "PREFECT_API_AUTH_STRING", "echo", "started", PREFECT_API_AUTH_STRING=value)
    assert (done.returncode, done.stdout) == (78, "")
    assert "PREFECT_API_AUTH_STRING must be NAME:PASSWORD" in done.stderr
    if len(value) > 1:
        assert value not in done.stderr


def test_with_a_password_the_program_starts_with_its_arguments():
    value = "virnucpro:0123456789abc:def $x"
    done = run(
        WITH_PASSWORD, "PREFECT_API_AUTH_STRING", "printenv", "PREFECT_API_AUTH_STRING", PREFECT_API_AUTH_STRING=value
    )
    assert done.stdout == value + "\n"
    assert run(WITH_PASSWORD, "PATH", "true").returncode == 78


@pytest.mark.parametrize("document", list(yaml.safe_load_all(MANIFESTS.read_text())), ids=lambda one: one["kind"])
def test_kubernetes_takes_each_manifest(document):
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("variables", [{}, {"gpus": 4, "runtime_class": "nvidia", "node_selector": {"a": "b"}}])
def test_kubernetes_takes_the_job_of_a_run(variables):
    manifest = job(**variables)
    manifest["metadata"]["name"] = "a-run-1"  # the cluster makes one of generateName
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == variables.get("gpus", 1)
    assert manifest["spec"]["backoffLimit"] == 0  # retries are Prefect's


def test_the_work_pool_has_all_that_prefects_own_has():
    """Of every variable and every part of the job: what Prefect's worker knows how to fill in stays where it was."""
    views = Path(importlib.util.find_spec("prefect").submodule_search_locations[0], "server/api/collections_data/views")
    known = json.loads((views / "aggregate-worker-metadata.json").read_text())
    default = known["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    ours = json.loads(TEMPLATE.read_text())
    for name, schema in default["variables"]["properties"].items():
        assert {**ours["variables"]["properties"][name], "default": None} == {**schema, "default": None}

    def holds(node, part, path):
        if isinstance(part, dict):
            for key in part:
                holds(node[key], part[key], f"{path}.{key}")
        elif isinstance(part, list):
            for number, item in enumerate(part):
                holds(node[number], item, f"{path}[{number}]")
        else:
            assert node == part, path

    pod = default["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    for misplaced in ("parallelism", "completions"):  # Prefect has them in the pod, where Kubernetes does not know them
        assert ours["job_configuration"]["job_manifest"]["spec"][misplaced] == pod.pop(misplaced)
    holds(ours["job_configuration"], default["job_configuration"], "job_configuration")
    placeholders = set(PLACEHOLDER.findall(json.dumps(ours["job_configuration"])))
    assert placeholders == ours["variables"]["properties"].keys()
    described = ours["variables"]["properties"].values()
    assert all(schema["title"] and schema["description"] for schema in described)


def test_no_pod_has_rights_that_it_does_not_need():
    for pod in pod_specs():
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
    worker, of_a_run = pod_specs()
    assert not of_a_run["automountServiceAccountToken"]
    assert {"livenessProbe", "readinessProbe", "startupProbe"} <= worker["containers"][0].keys()
    (role,) = [one for one in yaml.safe_load_all(MANIFESTS.read_text()) if one["kind"] == "Role"]
    rights = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for _, verb in rights} <= {"create", "delete", "get", "list", "watch"}
    assert {resource for resource, verb in rights if verb in {"create", "delete"}} == {"jobs"}


def test_one_image_is_named_everywhere():
    images = {service["image"] for service in compose().values() if "build" in service}
    images |= {container["image"].partition("/")[2] for pod in pod_specs() for container in pod["containers"]}
    assert images == {f"virnucpro:{RELEASE}"}
