"""
A page as one file that needs neither network nor other files: head, style, plots and scripts around its sections.

It embeds plotly.js from the installed package. Its content security policy runs only that script and ours, by their
hashes, and loads no address.
"""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from plotly.offline import get_plotlyjs

from virnucpro.report.html import Html, joined, script_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    import plotly.graph_objects as go

    from virnucpro.report.figures import Colour


def fill_page(
    *,
    title: str,
    heading: Html,
    sections: Html,
    footer: Html,
    figures: Mapping[str, go.Figure],
    colours: Mapping[str, Colour],
) -> str:
    """
    Return a page.

    *sections* has an element of the class ``plot`` for every figure, whose id is its key in *figures*. Figures have the
    colours of the light page; *colours* has all colours by role.
    """
    text = partial(_package_text, "virnucpro.report")
    plotly, script = _newlines(get_plotlyjs()), text("page.js")
    return Template(text("page.html")).substitute(
        policy=_policy(plotly, script),
        generator=f"virnucpro {version('virnucpro')}",
        title=joined(title),
        colours=_colour_rules(colours),
        style=text("page.css"),
        heading=heading,
        sections=sections,
        footer=footer,
        figures=script_json(
            {
                "figures": {name: figure.to_plotly_json() for name, figure in figures.items()},
                "dark": {colour.light: colour.dark for colour in colours.values()},
            }
        ),
        plotly=plotly,
        script=script,
    )


def _colour_rules(colours: Mapping[str, Colour]) -> str:
    light = "".join(f"--{role}:{colour.light};" for role, colour in colours.items())
    dark = "".join(f"--{role}:{colour.dark};" for role, colour in colours.items())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    )


def _policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _package_text(package: str, name: str) -> str:
    return _newlines((files(package) / name).read_text(encoding="utf-8"))


def _newlines(text: str) -> str:
    """Return *text* with the line ends that browsers hash."""
    return text.replace("\r\n", "\n").replace("\r", "\n")
