"""``virnucpro embed``: sequences into one validated result."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table

from virnucpro.commands.inputs import readable_inputs
from virnucpro.commands.options import AsJson, FastaFiles, Flow, OutputDir, Quiet, takes_settings
from virnucpro.commands.output import print_line, print_renderable
from virnucpro.commands.running import configured, report, run_as_flow, shown_run
from virnucpro.errors import printable
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.hardware.device_claim import devices_for
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.settings import EmbeddingSettings
from virnucpro.store.results.forms import require_form
from virnucpro.telemetry.show.progress import say

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.pipeline.run.run_result import RunResult


@takes_settings(EmbeddingSettings)
def embed(
    fasta: FastaFiles,
    output: OutputDir,
    settings: EmbeddingSettings,
    flow: Flow = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Embed every protein, or with a model of DNA every contig, of the FASTA files into OUT/embeddings.h5, in their order.

    A large result is a folder of shards, OUT/embeddings, instead.

    Starting the same command again continues what is missing.
    """
    require_form(settings.result.form)
    if "model" not in settings.model_fields_set and not quiet:
        say(
            f"No --model given: using the bundled demonstration encoder {settings.model} "
            "(for the published models see `virnucpro models list`)."
        )
    is_flow = flow or settings.hardware.runner != "threads"
    with readable_inputs(fasta, output, is_flow=is_flow) as files:  # before weights are searched for or fetched
        _embed(files, output, settings, is_flow=is_flow, as_json=as_json, quiet=quiet)


def _embed(
    fasta: list[Path], output: Path, settings: EmbeddingSettings, *, is_flow: bool, as_json: bool, quiet: bool
) -> None:
    show = partial(
        report,
        print_summary=_print_summary,
        as_json=as_json,
        quiet=quiet,
        allow_partial=settings.result.allow_partial,
        parts="sequences",
    )
    if is_flow:
        files = [str(path) for path in fasta]
        result = run_as_flow("embed", settings, is_quiet=quiet, fasta_files=files, output_dir=str(output))
        show(result)
        return
    claim, config = configured(configure_model, settings, is_quiet=as_json or quiet)
    claim = devices_for(claim, config, fasta, workers=settings.hardware.workers or None)
    run = partial(
        run_embedding,
        fasta,
        output,
        config,
        claim,
        keep_shards=settings.result.keep_shards,
        restart=settings.result.restart,
        result_form=settings.result.form,
    )
    with shown_run(run, settings, is_quiet=as_json or quiet, notes=not quiet) as result:
        show(result)


def _print_summary(result: RunResult) -> None:
    if not result.ranks:
        print(
            f"{printable(str(result.output_path))}: already complete, {result.num_rows:,} sequences; nothing was computed"
        )
        _print_notes(result)
        return
    is_spread = any(rank.host for rank in result.ranks)
    rows = [
        {
            "rank": str(rank.rank),
            **({"host": printable(rank.host or "")} if is_spread else {}),
            "device": rank.device,
            "computed": f"{rank.sequences:,}",
            "resumed": f"{rank.sequences_resumed:,}",
            "tokens": f"{rank.tokens:,}",
            "seconds": f"{rank.seconds:.1f}",
            "tokens/s": f"{rank.tokens_per_second:,.0f}",
            "attempts": str(rank.attempts),
            "state": rank.state,
        }
        for rank in result.ranks
    ]
    table = Table(*rows[0], box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row.values())
    print_renderable(table)
    where = "no result" if result.output_path is None else printable(str(result.output_path))
    print(f"{result.num_rows:,} of {result.num_records:,} sequences -> {where}")
    _print_notes(result)


def _print_notes(result: RunResult) -> None:
    for note in result.notes():
        print_line(f"  {note}")
    if result.state == "complete":
        print(f"next: read the rows in Python with virnucpro.read_embeddings({str(result.output_dir)!r})")
    else:
        print("next: start the same command again to compute what is missing")
