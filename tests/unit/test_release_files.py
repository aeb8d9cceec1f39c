"""What a release is made and cited with follows its published schemas, and names one version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

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


def test_each_file_that_names_a_version_names_the_one_of_the_next_release():
    named = {
        "packaging/bioconda/meta.yaml": f'{{% set version = "{RELEASE}" %}}',
        "packaging/galaxy/virnucpro.xml": f'<token name="@TOOL_VERSION@">{RELEASE}</token>',
        "packaging/nf-core/virnucpro/predict/environment.yml": f"bioconda::virnucpro={RELEASE}",
        "packaging/snakemake/wrapper/environment.yaml": f"virnucpro ={RELEASE}",
        "Dockerfile.cpu": f"virnucpro:{RELEASE}-cpu",
    }
    assert {file for file, text in named.items() if text not in (REPOSITORY / file).read_text()} == set()


def test_the_conda_recipe_renders_and_requires_what_the_wheel_requires():
    text = (REPOSITORY / "packaging" / "bioconda" / "meta.yaml").read_text()
    recipe = yaml.safe_load(Template(text).render(PYTHON="python", pin_subpackage=lambda name, **_: name))
    assert recipe["package"] == {"name": "virnucpro", "version": RELEASE}
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    conda_names = {"torch": "pytorch", "prometheus-client": "prometheus_client"}

    def conda(requirement):
        found = Requirement(requirement)
        limits = sorted(str(limit).removeprefix("==") for limit in found.specifier)
        return conda_names.get(found.name, found.name), limits

    def listed(line):
        name, _, limits = line.partition(" ")
        return name, sorted(limits.split(","))

    run = [listed(line) for line in recipe["requirements"]["run"]]
    python = ("python", [pyproject["project"]["requires-python"]])
    assert sorted(run) == sorted([python, *map(conda, pyproject["project"]["dependencies"])])
    host = [listed(line) for line in recipe["requirements"]["host"] if line != "pip"]
    assert sorted(host) == sorted([python, *map(conda, pyproject["build-system"]["requires"])])
