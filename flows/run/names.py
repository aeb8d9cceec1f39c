"""
Names of runs and artifacts. A typed name of a run stays, a generated one becomes what the run does.

Prefect names every run without recording whether the name is generated. Generated names have a form of their own: two
words of the library coolname from the server and the command line ("vehement-crane"), and one of a few adjectives with
an animal from the form of Prefect's page ("Rustic-Gecko"). The old page's ("sigma4-aquilae") are like names of samples
and stay. Two words that a person typed ("wild-boar") came with a form, which sends a message, if empty.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from coolname.data import config
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

_PAGE = re.compile(
    r"(Awesome|Rustic|Small|Gorgeous|Fantastic|Sleek|Intelligent|Unbranded|Refined|Licensed|Generic|Practical|Ergonomic"
    r"|Handcrafted|Tasty|Handmade|Incredible)-[A-Z]\D{1,5}"
)
_WITHOUT_FORM = ("Run from the Prefect UI", "Flow run scheduled")
"""How messages of runs begin that a button without a form, or a schedule, has made: the server gave their names."""


def run_name(form: str) -> Callable[[], str]:
    """Return what names the runs of a flow: *form*, such as "into {output_dir}", in place of a generated name."""

    def name() -> str:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        present = context.flow_run.name
        is_kept = not is_generated(present) or (_PAGE.fullmatch(present) is None and _is_from_form(context.flow_run))
        return present if is_kept else form.format(**(context.parameters or {}))

    return name


def artifact_key(*parts: str) -> str:
    """Return *parts* as a key of an artifact, which has small letters, digits and hyphens only."""
    return re.sub("[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def is_generated(name: str) -> bool:
    adjective, _, noun = name.partition("-")
    return _PAGE.fullmatch(name) is not None or (adjective in _words("adj_any") and noun in _words("subj"))


def _is_from_form(run: FlowRun) -> bool:
    with get_client(sync_client=True) as client:
        first = min(client.read_flow_run_states(run.id), key=lambda state: state.timestamp)
    return first.message is not None and not first.message.startswith(_WITHOUT_FORM)


@cache
def _words(name: str) -> frozenset[str]:
    """Return the words of a list of coolname, which may be made of others."""
    found: Any = config[name]
    return frozenset(found.get("words", ())).union(*map(_words, found.get("lists", ())))
