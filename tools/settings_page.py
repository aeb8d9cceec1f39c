"""
Write what is made from virnucpro/settings.py: python -m tools.settings_page.

docs/settings.md is the table of every setting; virnucpro/keywords.py is their types, for mypy and for editors.
"""

from __future__ import annotations

import typing
from pathlib import Path

from virnucpro.choices import Choice
from virnucpro.knobs import Setting, settings_of
from virnucpro.settings import EmbeddingSettings, PredictionSettings, RunSettings
from virnucpro.training.training_knobs import TrainingSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
KINDS: dict[str, type[RunSettings]] = {
    "embed": EmbeddingSettings,
    "predict": PredictionSettings,
    "train": TrainingSettings,
}
KEYWORDS = PAGE.parents[1] / "virnucpro" / "keywords.py"
KEYWORDS_HEAD = '''"""Types of the settings as keywords, for mypy and editors; made by python -m tools.settings_page."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

from virnucpro.choices import (
CHOICES)

'''
HEAD = """# Settings

Every setting of a run: as an option of the command, as an argument of `embed_fasta` and `predict_fasta`, and as a field
of a deployment's form, in its box. "Bytes" says whether it decides the bytes of a result: a run that resumes needs the
same. This page is made from `virnucpro/settings.py` by `python -m tools.settings_page`.
"""


def row(setting: Setting, fields: list[str], commands: list[str]) -> str:
    """Return a setting as a row of the table."""
    info, knob = setting.info, setting.knob
    bounds = {
        name: getattr(one, name) for one in info.metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)
    }
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = ", ".join(f"{signs[name]} {bound:g}" if bound < 10**7 else "" for name, bound in bounds.items()).strip(
        ", "
    )
    default = (
        knob.automatic if knob.auto else str(info.default).lower() if isinstance(info.default, bool) else info.default
    )
    option = f"`{setting.option}`" if "command" in knob.faces else ""
    argument = f"`{setting.argument}`" if "library" in knob.faces and commands != ["train"] else ""
    help_text = knob.help.replace("|", "\\|")
    cells = [option, argument, ", ".join(dict.fromkeys(fields)), help_text, f"{default}", limits, knob.unit]
    return "| " + " | ".join([*cells, "yes" if knob.decides else "", ", ".join(commands)]) + " |"


def page() -> str:
    """Return the page."""
    found: dict[tuple[str, str], tuple[Setting, list[str], list[str]]] = {}
    for command, kind in KINDS.items():
        for setting in settings_of(kind):
            _, fields, commands = found.setdefault((setting.argument, setting.knob.help), (setting, [], []))
            fields.append(f"`{'.'.join(setting.path)}`")
            commands.append(command)
    lines = ["| option | argument | field | what it does | default | bounds | unit | bytes | commands |"]
    lines.append("| --- " * 9 + "|")
    lines += [row(*one) for one in found.values()]
    return f"{HEAD}\n" + "\n".join(lines) + "\n"


def type_of(setting: Setting) -> str:
    """Return the type that a keyword takes, as text."""
    annotation, auto = setting.info.annotation, setting.knob.auto
    is_list = typing.get_origin(annotation) is list
    kind = typing.get_args(annotation)[0] if is_list else annotation
    if isinstance(kind, type) and issubclass(kind, Choice):
        words = ", ".join(f'"{word}"' for word in kind)
        text = f"{kind.__name__} | Literal[{words}]"
    elif kind is str:
        text = "str | PathLike[str]" if {"PATH", "DIR"} & set((setting.knob.metavar or "").split("|")) else "str"
    elif kind in {int, float, bool}:
        text = kind.__name__
    else:
        text = str(kind).replace("typing.", "")
    text = f"Sequence[{text}]" if is_list else text
    return f"{text} | None" if auto and "None" not in text else text


def keywords() -> str:
    """Return the module of types."""
    choices = sorted(
        {name for kind in (EmbeddingSettings, PredictionSettings) for name in choice_names(kind)}, key=str.lower
    )
    head = KEYWORDS_HEAD.replace("CHOICES", "".join(f"    {name},\n" for name in choices))
    common = {setting.argument: type_of(setting) for setting in settings_of(RunSettings, face="library")}
    lines = [head, *keyword_class("RunKeywords(TypedDict, total=False)", "of every run", common)]
    for name, kind in (("EmbeddingKeywords", EmbeddingSettings), ("PredictionKeywords", PredictionSettings)):
        found = {setting.argument: type_of(setting) for setting in settings_of(kind, face="library")}
        own = {argument: text for argument, text in found.items() if argument not in common}
        what = "`embed_fasta`" if kind is EmbeddingSettings else "`predict_fasta`"
        lines += ["", "", *keyword_class(f"{name}(RunKeywords, total=False)", f"of {what}", own)]
    return "\n".join(lines) + "\n"


def choice_names(kind: type[RunSettings]) -> set[str]:
    """Return the names of the enumerations among the settings."""
    found = {type_of(setting) for setting in settings_of(kind, face="library")}
    return {text.partition(" | Literal[")[0].rpartition("[")[2] for text in found if " | Literal[" in text}


def keyword_class(head: str, what: str, types: dict[str, str]) -> list[str]:
    """Return a class of types as lines."""
    docstring = f'    """Settings {what}."""'.replace("`", "``")
    return [f"class {head}:", docstring, "", *(f"    {argument}: {text}" for argument, text in types.items())]


if __name__ == "__main__":
    PAGE.write_text(page())
    KEYWORDS.write_text(keywords())
