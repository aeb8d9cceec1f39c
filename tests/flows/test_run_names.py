"""Names of runs: which Prefect made up. ``test_predict_flow`` has which of them are replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("prefect")

import prefect
from prefect.utilities.names import generate_slug

from flows.run.names import is_generated

TYPED = [
    *("sample-7", "gut-virome", "delta-variant", "soil_2026", "SRR1234567", "Kiel-harbour", "SARS-CoV-2", "predict"),
    *("2026-11-24", "gut", "mock-community-a", "Small-cell", "vehement-crane-2", "Rustic-Gecko-2", "predict into out"),
]


def test_names_of_the_server_and_of_the_command_line_are_generated():
    made = {generate_slug(2) for _ in range(500)}
    assert [name for name in made if not is_generated(name)] == []


def test_names_of_the_form_of_the_installed_page_are_generated():
    """Its words are in the page's own code; a Prefect with other words fails here."""
    assets = Path(prefect.__file__).parent / "server" / "ui-v2" / "assets"
    (page,) = [code for path in assets.glob("deployment_._id.run-*.js") if "maxCharCount" in (code := path.read_text())]
    most = int(re.search(r"`\$\{\w+\(\)\}-\$\{\w+\(\{maxCharCount:(\d+)\}\)\}`", page).group(1))
    adjectives = re.search(r"\[((?:`[A-Z][a-z]+`,?)+)\];function \w+\(e\)\{return \w+\(\w+,e\)\}var \w+=\(\)=>`", page)
    animals = [one for one in re.search(r"=`(Aardvark\.[^`]+)`", page).group(1).split(".") if len(one) <= most]
    assert len(animals) > 100
    names = [f"{word}-{animal}" for word in re.findall(r"`(\w+)`", adjectives.group(1)) for animal in animals]
    assert len(names) > 1000
    assert [name for name in names if not is_generated(name)] == []


@pytest.mark.parametrize("name", TYPED)
def test_a_typed_name_is_none_of_them(name):
    assert not is_generated(name)
