"""
Names of runs: a typed name stays, a generated one becomes what the run does.

Prefect names every run without recording whether the name is generated. Generated names have a form of their own: two
words of the library coolname from the server and the command line ("vehement-crane"), and one of a few adjectives with
an animal from the form of Prefect's page ("Rustic-Gecko"). The old page's ("sigma4-aquilae") are like names of samples
and stay.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from coolname.data import config
from prefect.context import FlowRunContext

_PAGE = re.compile(
    r"(Awesome|Rustic|Small|Gorgeous|Fantastic|Sleek|Intelligent|Unbranded|Refined|Licensed|Generic|Practical|Ergonomic"
    r"|Handcrafted|Tasty|Handmade|Incredible)-[A-Z]\D{1,5}"
)


def run_name(form: str) -> Callable[[], str]:
    """Return what names the runs of a flow: *form*, such as "into {output_dir}", in place of a generated name."""

    def name() -> str:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        present = context.flow_run.name
        return form.format(**(context.parameters or {})) if is_generated(present) else present

    return name


def is_generated(name: str) -> bool:
    adjective, _, noun = name.partition("-")
    return _PAGE.fullmatch(name) is not None or (adjective in _words("adj_any") and noun in _words("subj"))


@cache
def _words(name: str) -> frozenset[str]:
    """Return the words of a list of coolname, which may be made of others."""
    found: Any = config[name]
    return frozenset(found.get("words", ())).union(*map(_words, found.get("lists", ())))
