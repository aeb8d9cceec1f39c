"""``virnucpro predict``: contigs or reads in, calls and a report out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from virnucpro.commands.inputs import readable_inputs
from virnucpro.commands.options import AsJson, Flow, OutputDir, Quiet, takes_settings
from virnucpro.commands.output import print_line
from virnucpro.commands.running import configured, report, run_as_flow, shown_run
from virnucpro.errors import printable
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.settings import configure_prediction
from virnucpro.report.prediction.page import write_report
from virnucpro.run_layout import PredictionLayout
from virnucpro.settings import PredictionSettings

if TYPE_CHECKING:
    from virnucpro.pipeline.prediction.result import PredictionResult


@takes_settings(PredictionSettings)
def predict(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            metavar="INPUT",
            help="Contigs or reads: FASTA, FASTQ or unaligned BAM, plain or gzip, bzip2, xz, Zstandard; - for standard input.",
            show_default=False,
        ),
    ],
    output: OutputDir,
    settings: PredictionSettings,
    flow: Flow = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Classify each contig as viral or not: OUT/contigs.tsv, OUT/viral.fasta, and OUT/report.html to look at.

    Starting the same command again continues what is missing. Another --threshold or --format makes only tables and
    report again; without them the folder keeps those that it has.
    """
    is_flow = flow or settings.hardware.runner != "threads"
    with readable_inputs(inputs, output, is_flow=is_flow) as files:  # before weights are searched for or fetched
        _predict(files, output, settings, is_flow=is_flow, as_json=as_json, quiet=quiet)


def _predict(
    inputs: list[Path], output: Path, settings: PredictionSettings, *, is_flow: bool, as_json: bool, quiet: bool
) -> None:
    show = partial(
        report,
        print_summary=print_summary,
        as_json=as_json,
        quiet=quiet,
        allow_partial=settings.result.allow_partial,
        parts="contigs or frames",
    )
    if is_flow:
        files = [str(path) for path in inputs]
        result = run_as_flow("predict", settings, is_quiet=quiet, input_files=files, output_dir=str(output))
        show(result)
        return
    claim, config = configured(configure_prediction, settings, is_quiet=as_json or quiet)
    run = partial(
        run_prediction,
        inputs,
        output,
        config,
        claim,
        write_report=write_report,
        workers=settings.hardware.workers or None,
        restart=settings.result.restart,
    )
    with shown_run(run, settings, is_quiet=as_json or quiet, notes=not quiet) as result:
        show(result)


def print_summary(result: PredictionResult) -> None:
    counts = result.counts
    if result.was_complete:
        print(f"{printable(str(result.output_dir))}: already complete; nothing was computed")
    calls = [
        f"{counts[name]:,} {what}"
        for name, what in (
            ("virus", "virus"),
            ("not_virus", "not virus"),
            ("undecided", "undecided"),
            ("too_short", "too short"),
            ("no_open_frame", "without an open frame"),
        )
        if counts.get(name) or name in {"virus", "not_virus"}
    ]
    sequences = result.sequences.removesuffix("s" if counts["contigs"] == 1 else "")
    print(f"{counts['contigs']:,} {printable(sequences)}: {', '.join(calls)}")
    if counts["embedded"]:
        print(
            f"  {counts['open_chunks']:,} chunks with an open frame; "
            f"{counts['scored_frames']:,} of {counts['frames']:,} open frames scored"
        )
    for note in result.notes:
        print_line(f"  {note}")
    before = [name for name in result.stages_s if name not in result.computed]
    for title, names in (("", result.computed), ("done before: ", before)):
        if names:
            print(f"  {title}{', '.join(f'{name} {result.stages_s[name]:.1f} s' for name in names)}")
    print(f"calls:  {printable(str(result.contigs_path))}")
    if result.report_path is not None:
        print(f"report: {printable(str(result.report_path))}")
    print(f"next:   {_next_step(result)}")


def _next_step(result: PredictionResult) -> str:
    if result.state == "partial":
        return "start the same command again to compute what is missing"
    if result.report_path is not None:
        return "open the report in a browser"
    return f"continue with the viral contigs, {printable(str(PredictionLayout(result.output_dir).viral_fasta))}"
