"""Snakemake runs the workflow of ``packaging/``, MultiQC shows its runs, and the Galaxy tool's command line runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAMS = Path(os.environ.get("VIRNUCPRO_PIPELINES", REPOSITORY / ".venv-pipelines")) / "bin"
PACKAGING = REPOSITORY / "packaging"


def said(command, folder, *, programs=()):
    """Run *command* in *folder* with the tree's ``virnucpro`` and *programs* on the path; return what it printed."""
    shim = folder / "bin" / "virnucpro"
    if not shim.exists():
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nPYTHONPATH="{REPOSITORY}" exec "{sys.executable}" -m virnucpro "$@"\n')
        shim.chmod(0o755)
    path = os.pathsep.join([str(shim.parent), *map(str, programs), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A folder in which the workflow has run, with a blank in its name, and the command for it."""
    if not (PROGRAMS / "snakemake").exists():
        pytest.skip(f"no Snakemake in {PROGRAMS}: make e2e installs it")
    folder = tmp_path_factory.mktemp("of a workflow")
    records = (REPOSITORY / "examples" / "contigs.fasta").read_text().split(">")[1:]
    samples = {"gut": records[:8], "soil": records[8:16]}
    for name, part in samples.items():
        (folder / f"{name}.fasta").write_text("".join(f">{record}" for record in part))
    config = [f"samples={json.dumps({name: f'{name}.fasta' for name in samples})}", "virnucpro=--devices cpu"]
    snakefile = str(PACKAGING / "snakemake" / "Snakefile")
    programs = tmp_path_factory.mktemp("programs") / "venv"  # Snakemake does not quote the path of its own Python
    programs.symlink_to(PROGRAMS.parent)
    python = str(programs / "bin" / "python")
    command = [python, "-m", "snakemake", "--snakefile", snakefile, "--cores", "1", "--config", *config]
    said(command, folder, programs=[PROGRAMS])
    return folder, command


def test_snakemake_runs_the_workflow_once_and_again_only_what_is_missing(workflow):
    folder, command = workflow
    calls = folder / "results" / "virnucpro" / "gut" / "contigs.tsv"
    assert len(calls.read_text().splitlines()) == 9
    assert "Nothing to be done" in said(command, folder, programs=[PROGRAMS])
    before = calls.read_bytes()
    calls.unlink()
    output = said(command, folder, programs=[PROGRAMS])
    assert "soil" not in output.partition("Select jobs")[2].partition("rule multiqc")[0]
    assert calls.read_bytes() == before


def test_the_test_of_the_snakemake_wrapper_passes(workflow, tmp_path):
    """As ``test_wrappers.py`` of snakemake-wrappers calls it."""
    shutil.copytree(PACKAGING / "snakemake" / "wrapper", tmp_path / "master" / "bio" / "virnucpro" / "predict")
    folder = tmp_path / "master" / "bio" / "virnucpro" / "predict" / "test"
    target = "results/contigs/contigs.tsv"
    snakemake = [*workflow[1][:3], "--cores", "1", "--wrapper-prefix", f"file://{tmp_path}/"]
    said([*snakemake, target], folder, programs=[PROGRAMS])
    assert len((folder / target).read_text().splitlines()) == 3
    assert (folder / "results" / "contigs" / "genes.gff3").read_text().startswith("##gff-version 3\n")


def test_multiqc_has_a_bar_of_calls_for_each_sample(workflow, browser):
    folder, _ = workflow
    table = folder / "results" / "multiqc_report_data" / "multiqc_virnucpro_calls.txt"
    head, *lines = (line.split("\t") for line in table.read_text().splitlines())
    assert {"virus", "not_virus"} <= {*head[1:]} <= {"virus", "not_virus", "undecided"}, "calls of some contig alone"
    assert [line[0] for line in lines] == ["gut", "soil"]
    for sample, *counts in lines:
        made = [
            line.split("\t") for line in (folder / f"results/virnucpro/{sample}/contigs.tsv").read_text().splitlines()
        ]
        column = made[0].index("call")
        called = [line[column].replace(" ", "_") for line in made[1:]]
        assert [int(count or 0) for count in counts] == [called.count(name) for name in head[1:]]
    browser.open(folder / "results" / "multiqc_report.html")
    shown = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
    assert sorted(browser.wait_until(shown, ".ytick text")) == ["gut", "soil"]
    assert {*browser.js(shown, ".legendtext")} == {name.replace("_", " ").capitalize() for name in head[1:]}


def test_the_command_of_the_galaxy_tool_runs_and_makes_each_of_its_outputs(workflow, tmp_path):
    """Cheetah fills the template in as Galaxy does; Galaxy itself is not to be had here."""
    tool = ET.parse(PACKAGING / "galaxy" / "virnucpro.xml").getroot()
    script = """
import json, sys
from Cheetah.Template import Template
class Dataset(str): ext, element_identifier = "fasta", "gut & co"
files = [Dataset(path) for path in sys.argv[3:]]
print(Template(sys.argv[1], searchList=[{"sequences": files, **json.loads(sys.argv[2])}]))
"""
    datasets = [tmp_path / f"dataset_{number}.dat" for number in (1, 2)]
    for dataset, sample in zip(datasets, ("soil", "gut"), strict=True):
        dataset.symlink_to(workflow[0] / f"{sample}.fasta")
    values = json.dumps({"min_length": 1, "threshold": "0.9", "fdr": ""})
    fill_in = [PROGRAMS / "python", "-c", script, tool.find("command").text, values, *map(str, datasets)]
    command = said(fill_in, tmp_path)
    said(["bash", "-euc", command.replace("\n", " ")], tmp_path)  # one line, as Galaxy makes it
    for output in tool.findall("outputs/data"):
        assert (tmp_path / output.get("from_work_dir")).is_file(), output.get("name")
    ids = [line.split("\t")[0] for line in (tmp_path / "results" / "contigs.tsv").read_text().splitlines()[1:]]
    records = "".join(dataset.read_text() for dataset in datasets).split(">")[1:]
    assert ids == [record.split()[0] for record in records], "of both files, in their order"
    assert list(json.loads((tmp_path / "results" / "virnucpro_mqc.json").read_text())["data"]) == ["gut___co"]
