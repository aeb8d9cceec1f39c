"""The notebook of the examples runs, and its outputs are those that it gives."""

from __future__ import annotations

import json

import pytest

from tests.tour import NOTEBOOK, cells_of, outputs_of


def test_the_notebook_runs_and_shows_what_it_gives():
    pytest.importorskip("pandas")
    notebook = json.loads(NOTEBOOK.read_text())
    shown = [cell["outputs"] for cell in cells_of(notebook)]
    assert shown == outputs_of(notebook), "`python -m tests.tour` writes them"
    assert sum(map(bool, shown)) >= 5


def test_the_notebook_is_one_that_any_reader_of_notebooks_opens():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"code", "markdown"}
