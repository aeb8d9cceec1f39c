"""
A page as one file that needs neither network nor other files: head, style, plots and scripts around its sections.

It holds plotly.js, the bundle with bars and scatter plots, compressed as it lies in ``plotly_js/``; the page's script
unpacks it. Its content security policy runs only these two scripts, by their hashes, and loads no address. Every colour
of a figure is one of the page's; the page's script swaps them for the dark ones.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from virnucpro.report.html import Html, joined, script_json

if TYPE_CHECKING:
    from collections.abc import Mapping


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

PLOTLY = "plotly_js/plotly-basic.min.js.gz"
"""`npm pack plotly.js-basic-dist-min`, compressed with `gzip -9n`: of the version that the tests check figures with."""


def colour(role: str) -> str:
    return COLOURS[role].light


def fill_page(
    *,
    title: str,
    heading: Html,
    sections: Html,
    footer: Html,
    figures: Mapping[str, Mapping[str, object]],
    colours: Mapping[str, Colour],
) -> str:
    """
    Return a page.

    *sections* has an element of the class ``plot`` for every figure, whose id is its key in *figures*. Figures are as
    plotly.js takes them, in the colours of the light page; *colours* has all colours by role.
    """
    packed, script = (files("virnucpro.report") / PLOTLY).read_bytes(), _text("page.js")
    return Template(_text("page.html")).substitute(
        policy=_policy(gzip.decompress(packed), script.encode()),
        generator=f"virnucpro {version('virnucpro')}",
        title=joined(title),
        colours=_colour_rules(colours),
        style=_text("page.css"),
        heading=heading,
        sections=sections,
        footer=footer,
        figures=script_json(
            {
                "figures": figures,
                "dark": {colour.light: colour.dark for colour in colours.values()},
            }
        ),
        plotly=base64.b64encode(packed).decode(),
        plotly_licence=_text("plotly_js/LICENSE"),
        script=script,
    )


def _colour_rules(colours: Mapping[str, Colour]) -> str:
    light = "".join(f"--{role}:{colour.light};" for role, colour in colours.items())
    dark = "".join(f"--{role}:{colour.dark};" for role, colour in colours.items())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    )


def _policy(*scripts: bytes) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _text(name: str) -> str:
    """Return the text of a file of this room with the line ends that browsers hash."""
    text = (files("virnucpro.report") / name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
