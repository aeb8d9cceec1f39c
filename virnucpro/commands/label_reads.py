"""``virnucpro label-reads``: calls of reads, by the contigs that they map to."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from virnucpro.calls.read_labels import label_reads as labels_of
from virnucpro.commands.options import AsJson, Quiet, output_folder
from virnucpro.commands.output import ignoring_closed_output
from virnucpro.errors import printable

if TYPE_CHECKING:
    from virnucpro.calls.read_labels import ReadLabels


def label_reads(
    prediction: Annotated[
        Path,
        typer.Argument(readable=False, metavar="OUT", help="Output folder of a prediction.", show_default=False),
    ],
    paf: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Alignments of reads to the contigs, as minimap2 writes them: PAF, plain or compressed; - is standard input.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=output_folder,
            metavar="DIR",
            help="Folder of the two tables, reads.tsv and reads_per_contig.tsv.",
            show_default="OUT/reads",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Give each read the call of the contig that it maps to best.

    Best is the highest alignment score (AS:i, with minimap2's -c), else the most matching bases. A read that maps
    equally well to several contigs is virus if one of them is and none is not virus, not virus likewise, ambiguous if
    some are virus and some not virus, else undecided. Mates are labelled one by one; their names must end in /1 and
    /2, as predict names them.

    First: minimap2 -x sr -c --secondary=yes --paf-no-hit CONTIGS READS > FILE
    """
    found = labels_of(paf, prediction, prediction / "reads" if output is None else output)
    with ignoring_closed_output():
        if as_json:
            print(json.dumps(found.to_json()))
        elif not quiet:
            _print_summary(found)


def _print_summary(found: ReadLabels) -> None:
    total, bases = sum(found.reads.values()), sum(found.bases.values())
    print(f"{total:,} read{'s' * (total != 1)}, {bases:,} bases")
    for call, reads in found.reads.items():
        if reads:
            print(f"  {call:<10}{reads:>14,} reads{reads / total:>8.1%}{found.bases[call]:>18,} bases")
    if found.shared:
        print(f"  {found.shared:,} of them map equally well to several contigs")
    if not found.lists_unmapped:
        print("  reads that map to no contig are not in this PAF, and not counted (minimap2 --paf-no-hit lists them)")
    print(f"reads:   {printable(str(found.reads_path))}")
    print(f"contigs: {printable(str(found.contigs_path))}")
    names = f"awk -F'\\t' '$3 == \"virus\" {{print $1}}' {printable(shlex.quote(str(found.reads_path)))}"
    print(f"next:    {names} > viral_reads.txt && seqtk subseq READS viral_reads.txt")
