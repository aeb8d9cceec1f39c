"""
A page as one file that needs neither network nor other files: a template of this package, inside ``page.html``.

Every value is escaped, unless the template made it. The content security policy runs only the page's script, by its
hash, and loads no address. Every colour is a variable of the page, which has another value on a dark screen.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import metadata, version
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.errors import printable
from virnucpro.report.formats import counted, cut, nucleotides, percent, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Environment


class Colour(NamedTuple):
    """The colour of one role, on the light and the dark page."""

    light: str
    dark: str


COLOURS = {
    "virus": Colour("#c84e00", "#ff9a4d"),
    "not-virus": Colour("#1f6fa8", "#62b0e8"),
    "undecided": Colour("#555e6c", "#c3cad5"),
    "no-score": Colour("#8b94a1", "#6a7585"),
    "ink": Colour("#1b2330", "#e8ebf0"),
    "muted": Colour("#596473", "#a2adbb"),
    "line": Colour("#dfe4ea", "#303843"),
    "surface": Colour("#ffffff", "#181d24"),
    "page": Colour("#f5f6f8", "#0f1318"),
    "region": Colour("#fbe3d2", "#4a2c17"),
}
"""Vermilion and blue differ for every kind of colour vision; grey is no verdict."""


def fill_page(template: str, *, colours: Mapping[str, Colour], **values: Any) -> bytes:
    """Return a page; *colours* has all colours by role, and what has the class of a role is drawn in its colour."""
    script = _text("page.js")
    addresses = metadata("virnucpro").get_all("Project-URL", [])
    return fill(
        template,
        **values,
        policy=_policy(script.encode()),
        generator=f"virnucpro {version('virnucpro')}",
        documentation=next((one.partition(", ")[2] for one in addresses if one.startswith("Documentation, ")), ""),
        style=f"{_colour_rules(colours)}\n{_text('page.css')}",
        script=script,
    )


def fill(template: str, **values: Any) -> bytes:
    return templates().get_template(template).render(values).encode("utf-8", "backslashreplace")


@cache
def templates() -> Environment:
    """Return what fills templates: every value is escaped, and one that is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415  loaded only to write a page

    pages = Environment(
        loader=PackageLoader("virnucpro.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals |= {use.__name__: use for use in (counted, cut, nucleotides, percent, printable, whole)}
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return pages


def _colour_rules(colours: Mapping[str, Colour]) -> str:
    light = "".join(f"--{role}:{colour.light};" for role, colour in colours.items())
    dark = "".join(f"--{role}:{colour.dark};" for role, colour in colours.items())
    roles = "".join(f".{role}{{--mark:var(--{role})}}" for role in colours)
    return (
        f":root{{color-scheme:light;{light}}}\n{roles}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    )


def _policy(script: bytes) -> str:
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _text(name: str) -> str:
    """Return the text of a file of this package with the line ends that browsers hash."""
    text = (files("virnucpro.report") / name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
