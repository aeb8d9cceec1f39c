"""Options of the commands: those of a run's settings are made from ``virnucpro.settings``, the others are here."""

from __future__ import annotations

import inspect
import math
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from virnucpro.choices import Choice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from virnucpro.knobs import Setting
    from virnucpro.settings import RunSettings


def output_folder(text: str) -> Path:
    """Return the folder that was named; an empty name, as of an unset variable, is none."""
    if not text:
        raise typer.BadParameter("the name of the folder is empty")
    return Path(text)


FastaFiles = Annotated[
    list[Path],
    typer.Argument(
        readable=False,
        metavar="FASTA",
        help="Files of proteins (FASTA), or of DNA with a model of DNA (FASTA, FASTQ, unaligned BAM); plain or gzip, bzip2, xz, Zstandard; - for standard input.",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")]

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print errors and warnings only; with --json, the outcome too.")
]

OutputDir = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        parser=output_folder,
        metavar="OUT",
        help="Folder of the run: result, manifest, logs.",
        show_default=False,
    ),
]

RunDir = Annotated[
    Path, typer.Argument(readable=False, metavar="OUT", help="Output folder of a run.", show_default=False)
]

Flow = Annotated[bool, typer.Option("--flow", help="Run the same job as the Prefect flow, in this process.")]


def takes_settings(
    kind: type[RunSettings], *, only: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """
    Give a command an option for each setting of *kind*, and its function all of them as the argument ``settings``.

    With *only*, the options are those of the settings with these names.

    Raises:
        typer.BadParameter: Settings exclude each other as options do.
        ConfigurationError: A setting cannot work.
    """
    from virnucpro.knobs import UsageError, from_flat, settings_of  # noqa: PLC0415  not every command has settings

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        settings = [one for one in settings_of(kind, face="command") if not only or one.argument in only]
        own = inspect.signature(command, eval_str=True).parameters
        taken = [one.replace(kind=one.KEYWORD_ONLY) for name, one in own.items() if name != "settings"]
        needed = [parameter for parameter in taken if parameter.default is inspect.Parameter.empty]
        others = [parameter for parameter in taken if parameter not in needed]

        @wraps(command)
        def run(**given: Any) -> None:
            values = {setting.argument: given.pop(setting.argument) for setting in settings}
            try:
                found = from_flat(kind, {name: _mapping(value) for name, value in values.items()})
            except UsageError as error:
                raise typer.BadParameter(str(error)) from None
            command(**given, settings=found)

        parameters = [*needed, *map(as_parameter, settings), *others]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        del run.__wrapped__  # typer would take its signature
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def as_parameter(setting: Setting) -> inspect.Parameter:
    info, knob = setting.info, setting.knob
    kind, is_list, is_mapping = _kind_of(info.annotation)
    bounds = {
        name: getattr(one, name) for one in info.metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)
    }
    least, most = bounds.get("ge"), bounds.get("le")
    is_automatic = bool(knob.auto) or is_list or is_mapping
    more: dict[str, Any] = {
        "metavar": knob.metavar,
        "help": f"{knob.help} Default: {knob.automatic}." if knob.automatic not in {"", "none"} else knob.help,
        "show_default": not knob.auto,
        "rich_help_panel": setting.panel,
    }
    if is_mapping:
        more["parser"] = named_number
    elif knob.word:
        more["parser"] = _number_or(knob.word, info.default, bounds["ge"], bounds["le"])
        more |= {"help": f"{knob.help} Default: {knob.word}.", "show_default": False}
    elif "gt" in bounds:
        more["parser"] = _above(bounds["gt"], bounds)
    elif kind in {int, float}:
        more |= {"min": least, "max": most}
    elif isinstance(kind, type) and issubclass(kind, Choice):
        more["metavar"] = "|".join(kind)
    if is_list or is_mapping:
        annotation: Any = list[Any] if is_mapping else list[kind]  # type: ignore[valid-type]
    else:
        annotation = kind
    return inspect.Parameter(
        setting.argument,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if is_automatic else info.default,
        annotation=Annotated[annotation | None if is_automatic else annotation, typer.Option(setting.option, **more)],
    )


def _kind_of(annotation: Any) -> tuple[Any, bool, bool]:
    """Return the type of one value of a setting, whether it is a list of them, and whether it maps names to them."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is dict:
        return str, False, True
    if get_origin(annotation) is list:
        return _kind_of(get_args(annotation)[0])[0], True, False
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if not parts:
        return annotation, False, False
    return (parts[0] if isinstance(parts[0], type) else type(parts[0])), False, False


def _above(least: float, bounds: Mapping[str, float]) -> Callable[[Any], float]:
    """Return a parser of numbers between bounds that do not count themselves, which typer has no words for."""

    def parse(text: str | float) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        is_low_enough = number < bounds["lt"] if "lt" in bounds else number <= bounds["le"]
        if not (number > least and is_low_enough):
            most = f"below {bounds['lt']:g}" if "lt" in bounds else f"at most {bounds['le']:g}"
            raise typer.BadParameter(f"{text!r} is not above {least:g} and {most}")
        return number

    return parse


def _number_or(word: str, default: object, least: int, most: int) -> Callable[[Any], Any]:
    def parse(text: str | int) -> Any:
        if text in (word, default):
            return default
        if not (str(text).isdecimal() and least <= int(text) <= most):
            raise typer.BadParameter(f"{text!r} is neither {word} nor a number from {least + 1} to {most}")
        return int(text)

    return parse


def named_number(text: str | tuple[str, str]) -> tuple[str, str]:
    if isinstance(text, tuple):
        return text
    name, is_there, number = text.rpartition("=")
    try:
        is_good = bool(is_there and name) and 0 <= float(number) < float("inf")
    except ValueError:
        is_good = False
    if not is_good:
        raise typer.BadParameter(f"{text!r} is no NAME=NUMBER, such as microvirus=2 or 300=2")
    return name, number


def _mapping(value: Any) -> Any:
    """Return pairs as a mapping, an empty list as not set, anything else as it is."""
    if isinstance(value, list):
        return (dict(value) if isinstance(value[0], tuple) else value) if value else None
    return value
