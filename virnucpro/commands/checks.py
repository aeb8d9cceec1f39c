"""``virnucpro index`` and ``virnucpro verify``: checks of input and of results."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from virnucpro.choices import SequenceKind
from virnucpro.commands.options import AsJson, FastaFiles, Quiet, RunDir, takes_settings
from virnucpro.config import InputRules
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ExitCode, printable
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.settings import EmbeddingSettings


@takes_settings(EmbeddingSettings, only={"gaps", "stop", "rna", "on_bad_record", "allow_empty"})
def index(
    fasta: FastaFiles,
    output: Annotated[
        Path, typer.Option("--output", "-o", readable=False, metavar="FILE", help="The index file.", show_default=False)
    ],
    settings: EmbeddingSettings,
    kind: Annotated[
        SequenceKind, typer.Option(case_sensitive=False, help="What the files hold, which decides their alphabet.")
    ] = SequenceKind.PROTEIN,
    quiet: Quiet = False,
) -> None:
    """Check FASTA files and write a sequence index, or report problems by file and line."""
    asked = settings.sequences
    rules = InputRules(
        sequence_kind=kind,
        gaps=asked.gaps,
        stops=asked.stop,
        on_bad_record=asked.on_bad_record,
        allow_empty=asked.allow_empty,
        rna=asked.rna,
    )
    built = SequenceIndex.build(fasta, output, unpack_dir=output.with_name(output.name + ".unpacked"), rules=rules)
    lengths = built.lengths
    unit = "residues" if kind is SequenceKind.PROTEIN else "nucleotides"
    span = f", {lengths[-1]:,} to {lengths[0]:,} {unit}" if len(built) else ""
    if not quiet:
        print(f"{printable(str(output))}: {len(built):,} sequences of {len(built.files)} file(s){span}")
    for bad in islice(built.skipped(), BadInputError.MAX_PROBLEMS):
        print(f"skipped: {bad.reason}{f' ({bad.sequence_id})' * bool(bad.sequence_id)}", file=sys.stderr)
    if built.num_skipped > BadInputError.MAX_PROBLEMS:
        print(f"... and more: {built.num_skipped:,} records were skipped in all", file=sys.stderr)


def verify(
    output: RunDir,
    as_json: AsJson = False,
    quiet: Quiet = False,
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
                    "notes": found.notes,
                }
            )
        )
    for problem in found.problems:
        print(printable(problem), file=sys.stderr)
    unfinished = found.state not in {"complete", "partial"}
    if found.problems:
        raise typer.Exit(int(ExitCode.PARTIAL if unfinished else ExitCode.BAD_INPUT))
    if not (as_json or quiet):
        missing = found.num_records - found.num_rows - found.num_skipped
        partial = f"intact, but {missing:,} sequences are missing" if missing else "intact, but partial"
        verdict = "complete and intact" if found.state == "complete" else partial
        skipped = f" ({found.num_skipped:,} bad records skipped)" * bool(found.num_skipped)
        print(f"{printable(str(output))}: {verdict}: {found.num_rows:,} of {found.num_records:,} {found.what}{skipped}")
        print("".join(f"{note}\n" for note in found.notes), end="")
    if found.state == "partial":
        raise typer.Exit(int(ExitCode.PARTIAL))
