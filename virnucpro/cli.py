"""
The command line: its commands, and the one boundary where an error becomes a sentence and an exit code.

It does not import Prefect: ``--flow`` hands the same job over to ``flows`` by name, at that moment only. Only the
command that is asked for is loaded, since most need much that the others do not; the list of commands needs none.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, cast

import typer

import virnucpro
from virnucpro.commands.grouped_help import GroupedCommand
from virnucpro.commands.output import guard_standard_output, ignoring_closed_output
from virnucpro.errors import BadInputError, ExitCode, VirNucProError, WorkersFailedError, of_surroundings, printable
from virnucpro.telemetry.show.standard_error import StandardError, wrapped
from virnucpro.this_host import open_standard_streams

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_COMMANDS = {
    "predict": "Classify each contig or read as viral or not.",
    "train": "Train a classifier on labelled genomes.",
    "evaluate": "Measure scores against known contigs, or compare the calls of several tools.",
    "embed": "Embed proteins or DNA on every GPU, into one validated file.",
    "label-reads": "Call reads by the contigs that they map to.",
    "index": "Check FASTA files and write a sequence index.",
    "verify": "Check the files of a finished run.",
    "status": "Show the state of a run, from any host that sees its folder.",
    "serve-reports": "Serve reports of runs to browsers.",
    "models": "List the models, and convert classifiers.",
}
COMPLETE = "_VIRNUCPRO_COMPLETE"
"""Variable with which the completion of a shell calls the program; the line is in another."""
_HOMES = {"index": "checks", "verify": "checks"}
"""Modules of commands that have no module of their own name."""
_LOGS_NOTHING = {"", "-h", "--help", "--version", "status", "serve-reports", "label-reads"}
"""First words of command lines that do without structlog, which takes longer to load than they take."""


def command_line(asked: str | None = None) -> typer.Typer:
    """Return the command line; given the first word *asked*, only the command of that name can run, if there is one."""
    app = typer.Typer(
        name="virnucpro",
        help="Classify contigs and reads as viral or not; embed proteins and DNA.",
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, about in _COMMANDS.items():
        home = None
        if asked in {name, None}:
            home = importlib.import_module(f"virnucpro.commands.{_HOMES.get(name, name.replace('-', '_'))}")
        if name != "models":
            command = _not_loaded if home is None else getattr(home, name.replace("-", "_"))
            app.command(name, short_help=about, cls=GroupedCommand)(command)
        elif home is None:
            app.command(name, help=about)(_not_loaded)  # a group's help is shortened in the list
        else:
            app.add_typer(home.app, name=name, help=about)
    return app


def _not_loaded() -> None:
    raise AssertionError("this command was not asked for")


def main() -> None:
    """Run the command line; the one boundary where an error becomes a sentence and an exit code."""
    open_standard_streams()
    gc.set_threshold(50_000, 20, 20)  # objects mostly stay: to look as often as by default takes a tenth more time
    asked = _asked()
    if asked not in _LOGS_NOTHING and COMPLETE not in os.environ:
        _log_to_standard_error()
    guard_standard_output()
    try:
        try:
            command_line(asked)(sys.argv[1:] or ["--help"])
        finally:
            with ignoring_closed_output():
                pass
    except SystemExit as stop:
        if stop.code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}:
            _leave(ExitCode(stop.code))  # Prefect would wait minutes at exit for a server that went first
        gc.freeze()  # the interpreter's end would look through all objects for garbage: 0.1 s
        raise
    except Exception as failure:  # noqa: BLE001  what is no defect of ours ends in a sentence
        error = failure if isinstance(failure, VirNucProError) else of_surroundings(failure)
        if error is None:
            traceback.print_exc()
            print(
                f"virnucpro {virnucpro.__version__}: this is a defect; finished work is kept. Report the lines above, "
                "the command and the folder logs of OUT in the issue tracker of the repository that you installed from",
                file=sys.stderr,
            )
            _leave(ExitCode.INTERNAL)
        text = str(error) if isinstance(error, BadInputError) else f"virnucpro: {error}"
        lines = text.split("\n") if isinstance(error, BadInputError | WorkersFailedError) else [text]
        print(wrapped("\n".join(map(printable, lines)), sys.stderr), file=sys.stderr)  # a path may hold anything
        _leave(error.exit_code)


def _asked() -> str:
    """Return the first word of the command line; of one that a shell completes, that of the line in the shell."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    words = line.split()[1:] if COMPLETE in os.environ else sys.argv[1:]
    return next((word for word in words if word != "--"), "")


def _log_to_standard_error() -> None:
    """Show warnings on standard error; what is in them reaches the terminal as plain text only."""
    import structlog  # noqa: PLC0415  as _LOGS_NOTHING says

    def as_text(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}

    structlog.reset_defaults()
    *processors, renderer = structlog.get_config()["processors"]
    structlog.configure(
        processors=[*processors, as_text, renderer],
        wrapper_class=structlog.make_filtering_bound_logger("WARNING"),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", StandardError())),
    )


def _leave(code: ExitCode) -> NoReturn:
    """End the process without HDF5's own teardown, which can crash after a full disk."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe has nothing more to say
            stream.flush()
    os._exit(int(code))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"virnucpro {virnucpro.__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
