"""Help, forms, signatures and manifests are what users and scripts know: each difference shows here."""

from __future__ import annotations

import difflib

import pytest

from tests.faces import FACES, FOLDER


@pytest.mark.parametrize("name", list(FACES))
def test_a_face_is_as_it_was(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    if name.startswith("form_"):
        pytest.importorskip("prefect")
    before, now = (FOLDER / name).read_text(), FACES[name]()
    difference = difflib.unified_diff(before.splitlines(), now.splitlines(), "as it was", "now", lineterm="", n=2)
    assert before == now, "\n".join(["`python -m tests.faces` writes what is meant to change:", *difference])
