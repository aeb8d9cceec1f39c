"""Write docs/settings.md, the table of every setting, from virnucpro/settings.py: python -m tools.settings_page."""

from __future__ import annotations

from pathlib import Path

from virnucpro.knobs import Setting, settings_of
from virnucpro.settings import EmbeddingSettings, PredictionSettings, RunSettings
from virnucpro.training.training_knobs import TrainingSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
KINDS: dict[str, type[RunSettings]] = {
    "embed": EmbeddingSettings,
    "predict": PredictionSettings,
    "train": TrainingSettings,
}
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


if __name__ == "__main__":
    PAGE.write_text(page())
