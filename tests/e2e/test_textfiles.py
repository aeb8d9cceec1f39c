"""Last figures of several runs in one folder, as Debian's node_exporter gives them to Prometheus."""

from __future__ import annotations

import json
import os
import re

import pytest

from tests.command_line import run
from tests.debian_programs import get, started
from tests.strategies import write_fasta
from virnucpro.telemetry.metrics.options import TEXTFILES

pytestmark = pytest.mark.slow


def test_node_exporter_gives_the_figures_of_runs_side_by_side_without_an_error(tmp_path, examples_dir, monkeypatch):
    folder = tmp_path / "textfiles"
    folder.mkdir()
    monkeypatch.setenv(TEXTFILES, str(folder))
    proteins = write_fasta(tmp_path / "in.fasta", [("a", "MKTAYIAKQR")])
    commands = [
        ("embed", proteins, "-o", tmp_path / "proteins", "--devices", "cpu"),
        ("embed", proteins, "-o", tmp_path / "again", "--devices", "cpu"),
        ("predict", examples_dir / "contigs.fasta", "-o", tmp_path / "contigs", "--devices", "cpu"),
    ]
    for command in commands:
        assert run(*command).code == 0
    ids = {json.loads((tmp_path / str(one[3]) / "run.json").read_text())["run_id"] for one in commands}
    assert len(ids) == 3
    first = json.loads((tmp_path / "proteins" / "run.json").read_text())["run_id"]
    assert run(*commands[0], "--restart").code == 0
    ids.add(json.loads((tmp_path / "proteins" / "run.json").read_text())["run_id"])
    ids.remove(first)
    assert len(list(folder.glob("virnucpro-*.prom"))) == len(list(folder.iterdir())) == 3
    assert {path.stat().st_mode & 0o444 for path in folder.iterdir()} == {0o444 & ~current_umask()}
    options = ("--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={folder}")
    with started("prometheus-node-exporter", *options, folder=tmp_path / "node_exporter") as url:
        shown = get(f"{url}/metrics").decode()
    assert re.search(r"^node_textfile_scrape_error 0$", shown, re.MULTILINE)
    found = re.findall(r'^virnucpro_(sequences|contigs)_total\{.*run_id="(\w+)".*\} ([\d.e+]+)$', shown, re.MULTILINE)
    assert {run_id for _, run_id, _ in found} == ids
    assert sorted((what, float(value)) for what, _, value in found if what == "sequences") == [("sequences", 1.0)] * 2


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
