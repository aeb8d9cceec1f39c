"""What a release is made and cited with follows its published schemas, and names one version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml
from jinja2 import Template
from packaging.requirements import Requirement

from tests.conftest import RELEASE, REPOSITORY

SCHEMAS = {
    "CITATION.cff": "citation-file-format",
    ".github/workflows/ci.yml": "github-workflows",
    ".github/workflows/release.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/idea.yml": "github-issue-forms",
}


def test_every_address_of_the_repository_is_the_one_placeholder_that_a_release_fills_in():
    (placeholder,) = re.findall(r'^PLACEHOLDER = "(.+)"$', (REPOSITORY / "hatch_build.py").read_text(), re.MULTILINE)
    pages = [REPOSITORY / "README.md", *(path for path in (REPOSITORY / "packaging").rglob("*") if path.is_file())]
    texts = {path: path.read_text() for path in pages}
    for path, text in texts.items():
        found = re.findall(r"https://github\.com/[\w-]+/virnucpro\b", text)
        assert set(found) <= {placeholder}, path
    assert f"git clone {placeholder}.git" in texts[REPOSITORY / "README.md"]


@pytest.mark.parametrize("file", SCHEMAS)
def test_files_for_github_and_citations_follow_their_schemas(file):
    schema = f"vendor.{SCHEMAS[file]}"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, REPOSITORY / file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _steps(file):
    workflow = yaml.safe_load((REPOSITORY / file).read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        yield from job.get("steps", [job])


def test_github_runs_what_ci_runs_and_nothing_else():
    steps = [*_steps(".github/workflows/ci.yml")]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]
    assert [step["uses"].partition("@")[0] for step in steps if "uses" in step] == ["actions/checkout"]


@pytest.mark.parametrize("file", [file for file in SCHEMAS if "workflows" in file])
def test_what_a_workflow_runs_of_others_is_pinned_and_keeps_no_credentials(file):
    for step in _steps(file):
        if uses := step.get("uses"):
            assert uses.startswith("./") or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", uses), uses
            assert not uses.startswith("actions/checkout") or step["with"]["persist-credentials"] is False
        assert "pip install" not in step.get("run", "") or "--require-hashes" in step["run"]


def test_every_file_that_names_a_version_of_ours_names_the_next_release():
    folders = (".", ".github/ISSUE_TEMPLATE", "deployments/**", "packaging/**")
    files = {file for folder in folders for file in REPOSITORY.glob(f"{folder}/*") if file.is_file()}
    form = re.compile(r'(?:virnucpro(?:-light)?\W{1,2}|\bversion(?: =|:) "|@">)(\d+\.\d+\.\d+)')
    named = {str(file.relative_to(REPOSITORY)): {*form.findall(file.read_text(errors="replace"))} for file in files}
    assert {file for file, versions in named.items() if versions - {RELEASE}} == set()
    assert {file for file, versions in named.items() if versions} >= {
        "CITATION.cff",
        "Dockerfile.cpu",
        "deployments/compose/compose.yaml",
        "deployments/kubernetes/worker.yaml",
        "packaging/bioconda/meta.yaml",
        "packaging/galaxy/virnucpro.xml",
        "packaging/nf-core/virnucpro/predict/environment.yml",
        "packaging/nf-core/virnucpro/predict/main.nf",
        "packaging/snakemake/wrapper/environment.yaml",
        "prefect.yaml",
    }


@pytest.fixture(scope="module")
def recipe():
    def pinned(name, *, exact=False, **_):
        return f"{name} exact" if exact else name

    text = (REPOSITORY / "packaging" / "bioconda" / "meta.yaml").read_text()
    return yaml.safe_load(Template(text).render(PYTHON="python", pin_subpackage=pinned))


def test_the_two_packages_of_the_conda_recipe_require_what_the_wheel_requires(recipe):
    light, whole = recipe["outputs"]
    assert recipe["package"]["version"] == RELEASE
    assert [recipe["package"]["name"], light["name"], whole["name"]] == [
        "virnucpro-meta",
        "virnucpro-light",
        "virnucpro",
    ]
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    lines = (REPOSITORY / "packaging" / "light-requirements.txt").read_text().splitlines()
    of_light = {Requirement(line).name for line in lines if line and line[0] not in "#-"}
    conda_names = {"torch": "pytorch", "prometheus-client": "prometheus_client"}

    def conda(requirements):
        for found in map(Requirement, requirements):
            limits = sorted(str(limit).removeprefix("==") for limit in found.specifier)
            yield conda_names.get(found.name, found.name), limits

    def listed(lines):
        parts = [line.partition(" ") for line in lines if line != "pip"]
        return sorted((name, sorted(limits.split(","))) for name, _, limits in parts)

    wheel = pyproject["project"]["dependencies"]
    python = ("python", [pyproject["project"]["requires-python"]])
    assert listed(light["requirements"]["run"]) == sorted(
        [python, *conda(line for line in wheel if Requirement(line).name in of_light)]
    )
    assert listed(whole["requirements"]["run"]) == sorted(
        [("virnucpro-light", ["exact"]), *conda(line for line in wheel if Requirement(line).name not in of_light)]
    )
    assert listed(light["requirements"]["host"]) == sorted([python, *conda(pyproject["build-system"]["requires"])])


def test_the_commands_that_test_the_light_conda_package_work(recipe, tmp_path):
    script = "\n".join(recipe["outputs"][0]["test"]["commands"])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = ["bash", "-exc", script]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tests_of_the_galaxy_tool_count_its_outputs_and_the_sequences_of_their_files():
    folder = REPOSITORY / "packaging" / "galaxy"
    tool = ET.parse(folder / "virnucpro.xml").getroot()
    for test in tool.iter("test"):
        assert int(test.get("expect_num_outputs")) == len(tool.findall("outputs/data"))
        files = test.find("param[@name='sequences']").get("value").split(",")
        records = sum((folder / "test-data" / file).read_text().count(">") for file in files)
        assert int(test.find(".//has_n_lines").get("n")) == 1 + records
