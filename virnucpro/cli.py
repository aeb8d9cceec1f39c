"""
The command line. It turns options into the pipeline's settings, shows progress, and ends with the right exit code.

It does not import Prefect: ``embed --flow`` hands the same job over to ``flows.embed`` by name, at that moment only.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer
from rich.console import Console
from rich.table import Table

import virnucpro
from virnucpro.config import (
    AUTO_TOKEN_BUDGET,
    DEFAULT_CACHE_GIB,
    DEFAULT_MAX_RESIDUES,
    UNLIMITED_LETTERS,
    BadRecordPolicy,
    GapPolicy,
    InputRules,
    LongPolicy,
    SequenceKind,
    StopPolicy,
)
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ExitCode, StoppedError, VirNucProError, printable
from virnucpro.interrupts import stop_on_signals
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, models_table
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.devices import select_devices
from virnucpro.pipeline.multi_gpu_inference import configure_model, run_embedding
from virnucpro.pipeline.verification import verify_run
from virnucpro.telemetry.progress import DownloadProgress, RunProgress, say

if TYPE_CHECKING:
    from virnucpro.pipeline.run_result import RunResult

app = typer.Typer(
    name="virnucpro",
    help="Tell which contigs or reads of a metagenome are viral.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(
    help="The models that sequences can be embedded with.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(models_app, name="models")

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MOST_TOKENS = 10**9
"""Largest token budget that is taken."""

FastaFiles = Annotated[
    list[Path],
    typer.Argument(
        readable=False,
        metavar="FASTA",
        help="FASTA files of proteins, or of DNA with a model of DNA; plain or gzip.",
        show_default=False,
    ),
]

WeightsDir = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="DIR",
        help="Folder that is looked into for weights first.",
        envvar="VIRNUCPRO_WEIGHTS",
        show_default=False,
    ),
]

Gaps = Annotated[GapPolicy, typer.Option(help="What happens to - and . in a sequence.")]

Stop = Annotated[
    StopPolicy,
    typer.Option(help="What happens to * inside a protein; x reads it as X. One at the end is always taken off."),
]

OnBadRecord = Annotated[
    BadRecordPolicy,
    typer.Option(
        help="What happens to a record that breaks a rule: nothing is computed, or it is left out and listed (by embed in failed_sequences.tsv)."
    ),
]

AllowEmpty = Annotated[
    bool, typer.Option("--allow-empty", help="An input without records gives an empty result instead of an error.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")]


def _token_budget(text: str | int) -> int:
    """Return the tokens that were asked for; 0, the default, is auto."""
    if text in ("auto", AUTO_TOKEN_BUDGET):
        return AUTO_TOKEN_BUDGET
    if not (str(text).isdecimal() and 1 <= int(text) <= MOST_TOKENS):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of tokens from 1 to {MOST_TOKENS}")
    return int(text)


def main() -> None:
    """Run the command line; the one boundary where an error becomes a sentence and an exit code."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger("WARNING"),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    try:
        app()
    except SystemExit as stop:
        if stop.code in {ExitCode.INTERRUPTED, ExitCode.TERMINATED}:
            _leave(ExitCode(stop.code))  # Prefect would wait minutes at exit for a server that went first
        raise
    except VirNucProError as error:
        text = str(error) if isinstance(error, BadInputError) else f"virnucpro: {error}"
        print("\n".join(printable(line) for line in text.split("\n")), file=sys.stderr)  # a path may hold anything
        _leave(error.exit_code)
    except Exception:  # noqa: BLE001  a defect of ours: the traceback is for its report
        traceback.print_exc()
        print("virnucpro: this is a defect; finished work is kept. Please report the lines above", file=sys.stderr)
        _leave(ExitCode.INTERNAL)


def _leave(code: ExitCode) -> None:
    """End the process without HDF5's own teardown, which can crash after a full disk."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe has nothing more to say
            stream.flush()
    os._exit(int(code))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"virnucpro {virnucpro.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(short_help="Embed proteins or DNA into one validated file.")
def embed(
    fasta: FastaFiles,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            readable=False,
            metavar="OUT",
            help="Folder of the run: result, manifest, logs.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A name from `virnucpro models list`, or the path of a fair-esm .pt file or of DNABERT-S weights. Without it, the bundled demonstration encoder.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str, typer.Option(metavar="LIST", help="auto (every visible GPU, else the CPU), cpu, or a list such as 0,1.")
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="CPU workers.", show_default="one a core, as memory and input allow"),
    ] = None,
    workers_per_device: Annotated[
        int, typer.Option(min=1, max=64, help="Workers that share each GPU: more can pay for small models.")
    ] = 1,
    precision: Annotated[
        str,
        typer.Option(
            metavar="auto|fp32|bf16|fp16", help="auto is fp32 on a CPU; on a GPU fp16 for ESM-2, bf16 for DNABERT-S."
        ),
    ] = "auto",
    token_budget: Annotated[
        int,
        typer.Option(
            parser=_token_budget,
            metavar="auto|TOKENS",
            help="Tokens in one block at the most, never less than the longest sequence; auto tries GPUs out first.",
            show_default="auto",
        ),
    ] = AUTO_TOKEN_BUDGET,
    threads: Annotated[
        int, typer.Option(min=1, max=1024, help="Threads of each CPU worker. Other numbers give other last bits.")
    ] = 1,
    max_residues: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=UNLIMITED_LETTERS,
            metavar="RESIDUES",
            help="Residues (of DNA: nucleotides) of a sequence that are embedded.",
            show_default=f"{DEFAULT_MAX_RESIDUES}; DNA models: no limit",
        ),
    ] = None,
    long: Annotated[
        LongPolicy,
        typer.Option(
            help="What happens to longer sequences; window: they are the mean of half-overlapping windows of that length."
        ),
    ] = LongPolicy.TRUNCATE,
    gaps: Gaps = GapPolicy.ERROR,
    stop: Stop = StopPolicy.ERROR,
    on_bad_record: OnBadRecord = BadRecordPolicy.ERROR,
    allow_empty: AllowEmpty = False,
    weights_dir: WeightsDir = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="DIR",
            help="Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones. A run served from it gives the same numbers within the tolerance, not the same bytes.",
            show_default=False,
        ),
    ] = None,
    cache_size: Annotated[
        float, typer.Option(min=0.001, metavar="GIB", help="GiB that the cache takes at the most.")
    ] = DEFAULT_CACHE_GIB,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="End with 0 when some rows are missing, as long as there are any.")
    ] = False,
    keep_shards: Annotated[
        bool, typer.Option("--keep-shards", help="Keep each worker's shard beside the result.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Remove what OUT holds of earlier runs, and nothing else in it, and start afresh."
        ),
    ] = False,
    flow: Annotated[
        bool, typer.Option("--flow", help="Run the same job as the Prefect flow, in this process.")
    ] = False,
    log_level: Annotated[str, typer.Option(metavar="|".join(LOG_LEVELS), help="Of the workers' log files.")] = "INFO",
    as_json: AsJson = False,
) -> None:
    """
    Embed every protein, or with a model of DNA every contig, of the FASTA files into OUT/embeddings.h5, in their order.

    Starting the same command again continues what is missing.
    """
    _check_choice("--log-level", log_level, LOG_LEVELS)
    _check_choice("--precision", precision, ("auto", "fp32", "bf16", "fp16"))
    if model is None:
        say(
            f"No --model given: using the bundled demonstration encoder {DEFAULT_PROTEIN_MODEL} "
            "(for the published models see `virnucpro models list`)."
        )
    if flow:
        result = importlib.import_module("flows.embed").run_from_command_line(
            fasta_files=[str(path) for path in fasta],
            output_dir=str(output),
            model=model or DEFAULT_PROTEIN_MODEL,
            devices=devices,
            workers=workers,
            workers_per_device=workers_per_device,
            precision=precision,
            token_budget=token_budget or None,
            threads=threads,
            max_residues=max_residues,
            long=long.value,
            gaps=gaps.value,
            stop=stop.value,
            on_bad_record=on_bad_record.value,
            allow_empty=allow_empty,
            weights_dir=None if weights_dir is None else str(weights_dir),
            cache_dir=None if cache_dir is None else str(cache_dir.absolute()),
            cache_gib=cache_size,
            allow_partial=allow_partial,
            keep_shards=keep_shards,
            restart=restart,
            log_level=log_level,
        )
    else:
        chosen = select_devices(devices, workers=workers, workers_per_device=workers_per_device)
        with DownloadProgress(is_quiet=as_json) as download:
            config = configure_model(
                model or DEFAULT_PROTEIN_MODEL,
                device_type=chosen[0].type,
                precision=precision,
                weights_dir=weights_dir,
                token_budget=token_budget,
                threads_per_worker=threads,
                workers_per_device=workers_per_device,
                max_residues=max_residues,
                long_policy=long,
                gaps=gaps,
                stops=stop,
                on_bad_record=on_bad_record,
                allow_empty=allow_empty,
                cache_dir=cache_dir,
                cache_gib=cache_size,
                log_level=log_level,
                on_download=download.advance,
            )
        chosen = devices_for(chosen, config, fasta, workers=workers)
        with stop_on_signals() as stopping, RunProgress([item.label for item in chosen], is_quiet=as_json) as progress:
            try:
                result = run_embedding(
                    fasta,
                    output,
                    config,
                    chosen,
                    on_message=stopping.hearing(progress.on_message),
                    stop=stopping.event,
                    keep_shards=keep_shards,
                    restart=restart,
                )
            except StoppedError:  # before there were workers
                raise StoppedError(stopping.signal_number) from None
        if result.state == "stopped":
            raise StoppedError(stopping.signal_number)
    _report(result, as_json=as_json, allow_partial=allow_partial)


@app.command(short_help="Check FASTA files and write a sequence index.")
def index(
    fasta: FastaFiles,
    output: Annotated[
        Path, typer.Option("--output", "-o", readable=False, metavar="FILE", help="The index file.", show_default=False)
    ],
    kind: Annotated[
        SequenceKind, typer.Option(case_sensitive=False, help="What the files hold, which decides the letters.")
    ] = SequenceKind.PROTEIN,
    gaps: Gaps = GapPolicy.ERROR,
    stop: Stop = StopPolicy.ERROR,
    on_bad_record: OnBadRecord = BadRecordPolicy.ERROR,
    allow_empty: AllowEmpty = False,
) -> None:
    """Check FASTA files and write a sequence index, or say what is wrong by file and line."""
    rules = InputRules(sequence_kind=kind, gaps=gaps, stops=stop, on_bad_record=on_bad_record, allow_empty=allow_empty)
    built = SequenceIndex.build(fasta, output, unpack_dir=output.with_name(output.name + ".unpacked"), rules=rules)
    lengths = built.lengths
    unit = "residues" if kind is SequenceKind.PROTEIN else "nucleotides"
    span = f", {lengths[-1]:,} to {lengths[0]:,} {unit}" if len(built) else ""
    print(f"{output}: {len(built):,} sequences of {len(built.files)} file(s){span}")
    for bad in islice(built.skipped(), BadInputError.MAX_PROBLEMS):
        print(f"left out: {bad.reason}{f' ({bad.sequence_id})' * bool(bad.sequence_id)}", file=sys.stderr)
    if built.num_skipped > BadInputError.MAX_PROBLEMS:
        print(f"... and more: {built.num_skipped:,} records were left out in all", file=sys.stderr)


@app.command(short_help="Check a finished run again.")
def verify(
    output: Annotated[
        Path, typer.Argument(readable=False, metavar="OUT", help="Output folder of a run.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Check a finished run again: files by sha256, rows, ids and their order, finiteness, counts."""
    found = verify_run(output)
    if as_json:
        print(
            json.dumps(
                {
                    "state": found.state,
                    "records": found.num_records,
                    "rows": found.num_rows,
                    "skipped": found.num_skipped,
                    "problems": found.problems,
                }
            )
        )
    for problem in found.problems:
        print(problem, file=sys.stderr)
    unfinished = found.state not in {"complete", "partial"}
    if found.problems:
        raise typer.Exit(int(ExitCode.PARTIAL if unfinished else ExitCode.BAD_INPUT))
    if not as_json:
        missing = found.num_records - found.num_rows - found.num_skipped
        verdict = "complete and intact" if not missing else f"intact, but {missing:,} sequences are missing"
        left_out = f" ({found.num_skipped:,} bad records left out)" * bool(found.num_skipped)
        print(f"{output}: {verdict}: {found.num_rows:,} of {found.num_records:,} sequences{left_out}")
    if found.state == "partial":
        raise typer.Exit(int(ExitCode.PARTIAL))


@models_app.command("list")
def models_list(
    weights_dir: WeightsDir = None,
) -> None:
    """List the models: name, what they take, parameters, width, where the weights come from, whether they are here."""
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    for column in ("takes", "parameters", "width", "source", "weights"):
        table.add_column(column, overflow="fold")
    for row in models_table(weights_dir=weights_dir):
        table.add_row(
            row.name,
            row.sequence_kind,
            f"{row.num_parameters / 1e6:,.1f} M",
            f"{row.hidden_dim:,}",
            row.source,
            row.where,
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}.", param_hint=option)


def _report(result: RunResult, *, as_json: bool, allow_partial: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        _print_summary(result)
    result.raise_unless(allow_partial=allow_partial)
    if result.state == "partial":
        print(
            f"partial: the missing sequences are listed in {result.output_dir / 'failed_sequences.tsv'}",
            file=sys.stderr,
        )


def _print_summary(result: RunResult) -> None:
    if not result.ranks:
        print(f"{result.output_path}: already complete, {result.num_rows:,} sequences; nothing was computed")
        _print_notes(result)
        return
    table = Table(
        "rank",
        "device",
        "sequences",
        "resumed",
        "tokens",
        "seconds",
        "tokens/s",
        "attempts",
        "state",
        box=None,
        pad_edge=False,
    )
    for rank in result.ranks:
        table.add_row(
            str(rank.rank),
            rank.device,
            f"{rank.sequences:,}",
            f"{rank.sequences_resumed:,}",
            f"{rank.tokens:,}",
            f"{rank.seconds:.1f}",
            f"{rank.tokens_per_second:,.0f}",
            str(rank.attempts),
            rank.state,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    where = result.output_path or "no result"
    print(f"{result.num_rows:,} of {result.num_records:,} sequences -> {where}")
    _print_notes(result)


def _print_notes(result: RunResult) -> None:
    for note in result.notes():
        print(f"  {note}")


if __name__ == "__main__":
    main()
