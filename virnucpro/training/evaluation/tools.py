"""
Tables as other tools write them: known by the columns of their headers, with what each tool calls viral.

Columns and rules are those of geNomad 1.13, VirSorter2 2.2, DeepMicroClass 1.0 and CheckV 1.0.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from virnucpro.training.genomes.delimited_tables import DelimitedTable

_PART = re.compile(r"(?:\|\|full|\|\|lt2gene|\|\|\d+_partial|\|provirus_\d+_\d+)+$")
"""What VirSorter2 and geNomad append to the name of a contig or of a part of it."""


@dataclass(frozen=True)
class Tool:
    name: str = ""
    """Empty: an unknown tool, or ours."""
    id_column: str = "contig"
    columns: tuple[str, ...] = ("score",)
    """Of the numbers that are read."""
    known_by: tuple[str, ...] = ()
    """Further columns of its header."""
    threshold: float | None = None
    """Score from which the tool calls a contig viral by default."""
    lists_viruses: bool = False
    """The table has no contigs but those that the tool calls viral."""
    rule: str = ""
    """What is called viral, where neither threshold nor list tells."""
    is_viral: Callable[..., bool] = lambda *_: False
    """That rule, of the numbers; NaN for an empty cell."""
    score: Callable[..., float] = lambda first, *_: first
    length_column: str = "length"


def _virus_share(*classes: float) -> float:
    """Return the share of the two virus classes, which come first; NaN for a contig that was skipped."""
    return sum(classes[:2]) / sum(classes) if min(classes) >= 0 < sum(classes) else math.nan


_TOOLS = (
    Tool("geNomad", "seq_name", ("virus_score",), ("chromosome_score", "plasmid_score"), threshold=0.7),
    Tool("geNomad", "seq_name", ("virus_score",), ("topology", "fdr"), threshold=0.7, lists_viruses=True),
    Tool("VirSorter2", "seqname", ("max_score",), ("max_score_group",), threshold=0.5, lists_viruses=True),
    Tool(
        "DeepMicroClass",
        "Sequence Name",
        ("EukaryoteVirus", "ProkaryoteVirus", "Eukaryote", "Plasmid", "Prokaryote"),
        rule="the largest class is one of viruses",
        is_viral=lambda *classes: max(classes[:2]) > max(classes[2:]),
        score=_virus_share,
    ),
    Tool(
        "CheckV",
        "contig_id",
        ("viral_genes", "host_genes"),
        ("checkv_quality",),
        rule="CheckV makes no calls; here: more viral than host genes",
        is_viral=lambda viral, host: viral > host,
        score=lambda *_: math.nan,
        length_column="contig_length",
    ),
)


def tool_of(table: DelimitedTable, id_column: str | None, score_column: str | None) -> Tool:
    """Return the tool that a header tells, or a table of named columns, also if it has the named column of scores."""
    if table.is_ours:
        return Tool(rule="call is virus")
    named = Tool(id_column=id_column or Tool.id_column, columns=(score_column,) if score_column else Tool.columns)
    if score_column and table.find(score_column) is not None:
        return named
    has = set(table.columns)
    return next((one for one in _TOOLS if has >= {one.id_column, *one.columns, *one.known_by}), named)


def names_of(cell: str) -> tuple[str, str, bool]:
    """Return the name up to the first blank, the contig that it is of, and whether it is of a part of the contig."""
    name = re.split("[ \t]", cell, maxsplit=1)[0]
    contig = _PART.sub("", name) or name
    return name, contig, "_partial" in name[len(contig) :] or "|provirus_" in name[len(contig) :]
