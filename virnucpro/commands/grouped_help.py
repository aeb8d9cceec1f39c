"""The help of a command: its options under the headings of their groups, in plain text, and without loading rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer import Context


class GroupedCommand(TyperCommand):
    """A command whose options stand under their ``rich_help_panel``; those without one come first."""

    def format_options(self, ctx: Context, formatter: Any) -> None:  # type: ignore[override]
        for title, parameters in self.grouped(ctx).items():
            with formatter.section(title):
                formatter.write_dl(parameters)

    def grouped(self, ctx: Context) -> dict[str, list[tuple[str, str]]]:
        """Return heading -> parameters and their help."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                name = record[0].partition(" <")[0] if usual == "Arguments" else record[0]  # without its Python type
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append((name, record[1]))
        return {title: records for title, records in groups.items() if records}
