"""Write docs/virnucpro.1, the manual page of all commands, from the command line itself: python -m tools.man_page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from virnucpro.cli import command_line
from virnucpro.knobs import settings_of
from virnucpro.settings import EmbeddingSettings, PredictionSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virnucpro.commands.grouped_help import GroupedCommand

PAGE = Path(__file__).resolve().parents[1] / "docs" / "virnucpro.1"
EXITS = PAGE.with_name("reliability.md")
"""Has a table of the exit codes."""


def page() -> str:
    """Return the page."""
    root: Any = typer.main.get_command(command_line())
    context = typer.Context(root, info_name="virnucpro", **root.context_settings)
    lines = [
        '.TH VIRNUCPRO 1 "" "virnucpro" "User commands"',
        ".SH NAME",
        r"virnucpro \- " + _text(root.help.lower().rstrip(".")),
    ]
    lines += [".SH SYNOPSIS", ".B virnucpro", r"COMMAND [ARGS]..."]
    lines += [".SH DESCRIPTION", "The commands are:"]
    lines += [line for name, command in root.commands.items() for line in _item(name, command.get_short_help_str(200))]
    for name, command in _commands(root):
        lines += _of_command(name, command, context)
    exits = re.findall(r"^\| (\d[\d, ]*) \| (.+?) \|", EXITS.read_text(), flags=re.MULTILINE)
    lines += [".SH EXIT STATUS", *(line for codes, what in exits for line in _item(codes, what))]
    lines += [".SH ENVIRONMENT"]
    for variable, what in _environment().items():
        lines += _item(variable, what)
    return "\n".join(lines) + "\n"


def _commands(group: Any, before: str = "virnucpro") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _of_command(name: str, command: GroupedCommand, parent: typer.Context) -> list[str]:
    context = typer.Context(command, info_name=name, parent=parent)
    lines = [f".SH {name.upper()}", f".B {name}", _text(" ".join(command.collect_usage_pieces(context)))]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += [".PP", _text(" ".join(paragraph.split()))]
    for title, parameters in command.grouped(context).items():
        lines += [f".SS {title}"]
        lines += [line for left, right in parameters for line in _item(left, right)]
    return lines


def _environment() -> dict[str, str]:
    """Return the variables that stand for options, and the options."""
    found = {}
    for kind in (PredictionSettings, EmbeddingSettings):
        for setting in settings_of(kind, face="command"):
            if setting.knob.env:
                found[setting.knob.env] = f"what {setting.option} is where it is not given"
    return found


def _item(left: str, right: str) -> list[str]:
    return [".TP", f".B {_text(left)}", _text(" ".join(right.split()))]


def _text(text: str) -> str:
    """Return text that roff takes as it stands."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    PAGE.write_text(page())
