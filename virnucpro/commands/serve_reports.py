"""``virnucpro serve-reports``: reports of runs over HTTP, read only."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.allowed_roots import DATA_ROOTS
from virnucpro.commands.options import output_folder
from virnucpro.errors import ConfigurationError, ExitCode, printable
from virnucpro.this_host import terminating_signals

PORT = 4201
"""Beside Prefect's 4200."""


def serve_reports(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=output_folder,
            metavar="FOLDER",
            help="Folders with output folders of runs, at any depth.",
            show_default=f"those of {DATA_ROOTS}, separated by a colon",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. There is no password: put a proxy in front.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = PORT,
) -> None:
    """Serve reports of runs, and the files that they link to, to browsers; nothing else, and read only."""
    from virnucpro.report.served_files import ServedFiles  # noqa: PLC0415  help is printed without it
    from virnucpro.report.server import ReportServer  # noqa: PLC0415

    roots = roots or [Path(root) for root in os.environ.get(DATA_ROOTS, "").split(os.pathsep) if root]
    if not roots:
        raise typer.BadParameter(f"name at least one, or set {DATA_ROOTS}.", param_hint="FOLDER")
    for root in roots:
        if not root.is_dir():
            raise ConfigurationError(f"{root} is not a folder: give the folders that hold the output of runs")
    try:
        server = ReportServer(ServedFiles(roots), host, port)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(int(ExitCode.TERMINATED))

    for number in terminating_signals():
        signal.signal(number, end)
    shown = f"[{server.server_name}]" if ":" in server.server_name else server.server_name
    under = ", ".join(printable(root) for root in server.files.roots)
    print(f"reports under {under}: http://{shown}:{server.server_port}/", flush=True)
    if not server.is_local:
        print("without a password: everyone who reaches this address can read the reports", file=sys.stderr)
    try:
        with server:
            server.serve_forever()
    except KeyboardInterrupt:
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
