"""
Every block of commands in README and site runs and prints what the page shows, or the page says why it is not run.

A line before a block has its mark: ``<!-- not run: REASON -->``, or ``<!-- slow: DEBIAN PACKAGES -->`` for what ``make
e2e`` runs. ``<!-- no block is run: REASON -->`` is for a whole page. The blocks of a page run in order, in one folder.
In a block with prompts, the lines without one are output: ``...`` stands for any lines, or for any part of a line.
After ``<!-- numbers differ -->`` a number stands for any number, and a blank for any number of them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from tests.conftest import REPOSITORY
from tests.unit.test_pages import PAGES
from virnucpro.cli import command_line

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_WHOLE_PAGE = re.compile(r"^<!-- no block is run: (.+) -->$", re.MULTILINE)
RUN_LIMIT_S = 120.0
DIFFER = "numbers differ"


class Block(NamedTuple):
    line: int
    kind: str
    text: str
    mark: str

    def steps(self):
        """Yield each command and what it prints; without prompts the block is one command, and prints anything."""
        if not re.search(r"^\$ ", self.text, re.MULTILINE):
            yield self.text, "...\n"
            return
        for step in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n", step)[0]
            yield command, step[len(command) :]


def blocks(page):
    text = page.read_text()
    whole = _WHOLE_PAGE.search(text)
    for found in _BLOCK.finditer(text):
        body = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        mark = f"not run: {whole[1]}" if whole else found["mark"] or ""
        yield Block(text[: found.start("kind")].count("\n") + 1, found["kind"], body, mark)


def to_run(page):
    commands = [block for block in blocks(page) if block.kind in {"console", "python"}]
    return [block for block in commands if not block.mark.startswith("not run:")]


def name_of(page):
    return str(page.relative_to(REPOSITORY))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
pages_that_run = [page for page in PAGES if to_run(page)]
PAGES_WITH_SLOW_BLOCKS = [one for one in pages_that_run if any(b.mark.startswith("slow:") for b in to_run(one))]


@each_page
def test_every_block_says_what_it_is_and_one_that_is_not_run_says_why(page):
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        assert block.kind in {"console", "python", "text", "yaml", "json", "mermaid"} or block.mark, f"{where}: kind?"
        if block.kind in {"console", "python"} and block.mark:
            assert re.fullmatch(rf"not run: .{{8,}}|slow: [a-z0-9 -]+|{DIFFER}", block.mark), f"{where}: {block.mark}"


@each_page
def test_every_command_of_virnucpro_on_a_page_is_one_that_its_command_line_takes(page):
    for block in blocks(page):
        for line in block.text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ )?virnucpro (.*)", line):
                words = shlex.split(re.split(r" (?:\|\||[|>&])", match[1])[0], comments=True)
                command = get_command(command_line()).commands[words.pop(0)]
                while getattr(command, "commands", None):
                    command = command.commands[words.pop(0)]
                command.make_context(command.name, words)


def run(command, folder):
    """Return what a command prints: on standard output, and on both."""
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}{done.stderr}"
    return done.stdout, done.stderr + done.stdout


def run_page(page, folder, blocks_of_page):
    (folder / "bin").mkdir()
    program = folder / "bin" / "virnucpro"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(REPOSITORY))} exec {shlex.quote(sys.executable)} -m virnucpro "$@"\n'
    )
    program.chmod(0o755)
    shutil.copytree(REPOSITORY / "examples", folder / "work" / "examples")
    for block in blocks_of_page:
        if block.kind == "python":
            script = folder / "work" / "block.py"  # a file, as what starts worker functions of its own needs
            script.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{block.text}")
            run([sys.executable, script], folder)
            continue
        for command, shown in block.steps():
            pattern = re.sub(r"^\\\.\\\.\\\.\\\n", "(?:[^\n]*\n)*?", re.escape(shown), flags=re.MULTILINE)
            pattern = pattern.replace(r"\.\.\.", "[^\n]*")
            if block.mark == DIFFER:
                pattern = re.sub(r"(?:\\ )+", " +", re.sub(r"\d[\d,]*(?:\\\.\d+)?", r"[\\d,.]+", pattern))
            printed = run(["bash", "-euc", command], folder)
            where = f"{name_of(page)}:{block.line}: {command}\nprints:\n{printed[1]}\nnot:\n{shown}"
            assert any(re.fullmatch(pattern, text) for text in printed), where


@pytest.mark.parametrize("page", pages_that_run, ids=name_of)
def test_the_commands_of_a_page_run_and_print_what_it_shows(page, tmp_path):
    run_page(page, tmp_path, [block for block in to_run(page) if not block.mark.startswith("slow:")])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_SLOW_BLOCKS, ids=name_of)
def test_a_page_runs_with_its_slow_blocks_too(page, tmp_path):
    slow = [block.mark for block in to_run(page) if block.mark.startswith("slow:")]
    needed = {name for mark in slow for name in mark.removeprefix("slow:").split()}
    if absent := [name for name in sorted(needed) if not Path("/usr/share/doc", name).exists()]:
        pytest.skip(f"not installed: {' '.join(absent)}")
    run_page(page, tmp_path, to_run(page))


def test_the_pages_have_commands_that_run():
    assert {"README.md", "docs/tutorial.md", "docs/evaluation.md"} <= {name_of(page) for page in pages_that_run}
