"""
``evaluation.json`` and ``evaluation.tsv``: several tables of scores against one truth, in one document.

The others are compared with the first table. The page is made from the document alone, so all three agree.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable
from virnucpro.store.contig_table import Call
from virnucpro.training.evaluation.metrics import RankedContigs, bootstrap
from virnucpro.training.evaluation.strata import evaluate
from virnucpro.training.evaluation.tables import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, DoubleArray
    from virnucpro.run_layout import EvaluationLayout
    from virnucpro.training.evaluation.tables import JoinedScores, KnownContigs, ScoreTable

FORMAT = 1
KIND = "evaluation"
DEFAULT_THRESHOLD = 0.5
"""For probabilities of a tool without a threshold of its own."""
_LISTED_IDS = 5
_INTERVALS = ("auroc", "auprc", "f1", "precision", "recall_at_1_percent_false_positives", "calibration_error")
_NUMBERS = ("recall", "false_positive_share", "recall_at_strict_threshold", "false_positive_share_at_strict_threshold")
_COUNTS = ("contigs", "viral", "others", "without_score", "genomes")


def evaluate_tables(
    tables: Sequence[ScoreTable],
    known: KnownContigs,
    truth: Path,
    *,
    threshold: float | None,
    prevalence: float | None,
    leave_out_missing: bool,
    length_edges_nt: Sequence[int],
    bootstrap_samples: int,
    seed: int,
) -> tuple[dict[str, Any], list[list[str]]]:
    """
    Return the document, and for each table the ids of the contigs without a score.

    Arguments as of ``strata.evaluate``; without *threshold*, each tool's own counts, else 0.5 for probabilities.
    """
    all_joined = [join(table, known, truth) for table in tables]
    found: list[dict[str, Any]] = []
    for table, joined in zip(tables, all_joined, strict=True):
        is_missing_C = np.isnan(joined.scores_C)
        measured, scores_C = joined.known, joined.scores_C
        if leave_out_missing:
            chosen = np.flatnonzero(~is_missing_C)
            measured, scores_C = measured.take(chosen), scores_C[chosen]
        at = threshold if threshold is not None else own_threshold(table, scores_C)
        measures = evaluate(
            scores_C,
            measured,
            threshold=at,
            prevalence=prevalence,
            length_edges_nt=length_edges_nt,
            bootstrap_samples=bootstrap_samples,
            seed=seed,
        ).to_json()
        measures["notes"] = [*_notes_on_join(joined, is_missing_C, leave_out=leave_out_missing), *measures["notes"]]
        undecided = [one for one in measured.contigs if table.ours.get(one, ("",))[0] == Call.UNDECIDED]
        if called := sum(table.scores[one] >= at for one in undecided) if at is not None else 0:
            what = "contigs that `predict` left undecided, but that reach the threshold, count as called viral"
            measures["notes"].append(f"{what}: {called:,}")
        is_compared = found and not leave_out_missing
        above = _auroc_above(joined, all_joined[0], seed=seed, samples=bootstrap_samples) if is_compared else None
        found.append({"name": table.name, "scores": str(table.path), "auroc_above_first": above, **measures})
    without = [
        [known.contigs[number] for number in np.flatnonzero(np.isnan(joined.scores_C)).tolist()]
        for joined in all_joined
    ]
    document = {
        "format": FORMAT,
        "kind": KIND,
        "virnucpro": version("virnucpro"),
        "truth": str(truth),
        "missing_scores": "left out" if leave_out_missing else "lowest",
        "tables": found,
    }
    return document, without


def write_evaluation(document: dict[str, Any], without: Sequence[Sequence[str]], layout: EvaluationLayout) -> None:
    """Write document, table, and lists of contigs without a score."""
    durable.write_bytes(layout.document, (json.dumps(document, indent=1) + "\n").encode())
    durable.write_bytes(layout.table, "".join(_lines(document)).encode())
    for number, ids in enumerate(without, start=1):
        if ids:
            durable.write_bytes(layout.left_out(number), "".join(f"{one}\n" for one in ids).encode())
        else:
            durable.remove(layout.left_out(number))


def own_threshold(table: ScoreTable, scores_C: DoubleArray) -> float | None:
    """Return the tool's own threshold, 0.5 for other probabilities, None for other scores."""
    if table.threshold is None and not ((scores_C < 0) | (scores_C > 1)).any():
        return DEFAULT_THRESHOLD
    return table.threshold


def _auroc_above(joined: JoinedScores, first: JoinedScores, *, seed: int, samples: int) -> dict[str, float] | None:
    """Return the difference of two AUROCs on the same samples of genomes or contigs; None without one."""
    is_virus_C = joined.known.is_virus_C
    ours, theirs = (RankedContigs(one.scores_C, is_virus_C) for one in (joined, first))
    above = bootstrap(
        lambda drawn: {"above": ours.counts(drawn).auroc() - theirs.counts(drawn).auroc()},
        is_virus_C,
        genomes_C=joined.known.genome_numbers(),
        seed=seed,
        samples=samples,
    )["above"]
    return {name: round(number, 6) for name, number in vars(above).items()} if np.isfinite(above.value) else None


def _notes_on_join(joined: JoinedScores, is_missing_C: BoolArray, *, leave_out: bool) -> list[str]:
    notes = []
    if joined.not_in_table:
        named = ", ".join(joined.not_in_table[:_LISTED_IDS]) + " ..." * (len(joined.not_in_table) > _LISTED_IDS)
        notes.append(f"{_contigs(len(joined.not_in_table))} of the truth not in the scores ({named})")
    if joined.not_in_truth:
        notes.append(f"{_contigs(joined.not_in_truth)} of the scores not in the truth, and not looked at")
    if leave_out and is_missing_C.any():
        notes.append(f"{_contigs(int(is_missing_C.sum()))} without a score, left out of everything")
    return notes


def _contigs(number: int) -> str:
    return f"{number:,} contig{'s' * (number != 1)}"


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the header and a line a stratum of every table."""
    ends = [f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")]
    yield "\t".join(["name", "stratum", "value", *_COUNTS, "compared_with", *ends, *_NUMBERS]) + "\n"
    for table in document["tables"]:
        strata = [("overall", "", table["overall"])]
        strata += [(kind, name, one) for kind in ("length", "group") for name, one in table[f"by_{kind}"].items()]
        for group, by_length in table["by_group_and_length"].items():
            strata += [("group and length", f"{group}, {length}", cell) for length, cell in by_length.items()]
        for kind, name, stratum in strata:
            cells = [table["name"], kind, name, *map(stratum.get, (*_COUNTS, "compared_with"))]
            for measure in _INTERVALS:
                one = stratum.get(measure) or {}
                cells += [one.get(end) for end in ("value", "low", "high")]
            cells += [stratum.get(number) for number in _NUMBERS]
            yield "\t".join("" if cell is None else " ".join(str(cell).split("\t")) for cell in cells) + "\n"
