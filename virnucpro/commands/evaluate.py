"""``virnucpro evaluate``: any tools' scores on contigs of known label, or the calls of several tools side by side."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.commands.options import AsJson, OutputDir, Quiet, takes_settings
from virnucpro.commands.output import ignoring_closed_output, print_line, print_renderable
from virnucpro.commands.running import configured, shown_run
from virnucpro.data.index.build import check_readable
from virnucpro.errors import printable
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.settings import configure_prediction
from virnucpro.report.evaluation.page import write_page
from virnucpro.report.evaluation.plots import MOST_TABLES
from virnucpro.report.formats import counted
from virnucpro.report.prediction.page import write_report
from virnucpro.run_layout import EvaluationLayout
from virnucpro.settings import PredictionSettings
from virnucpro.training.evaluation.agreement import compare_tables, write_agreement
from virnucpro.training.evaluation.document import evaluate_tables, write_evaluation
from virnucpro.training.evaluation.metrics import BOOTSTRAP_SAMPLES
from virnucpro.training.evaluation.strata import LENGTH_EDGES_NT
from virnucpro.training.evaluation.tables import read_scores, read_truth
from virnucpro.training.genomes.delimited_tables import whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.training.evaluation.tables import ScoreTable


DEFAULT_LENGTH_CLASSES = ",".join(map(str, LENGTH_EDGES_NT))


class Missing(StrEnum):
    LOWEST = "lowest"
    LEAVE_OUT = "leave-out"


_OF_A_PREDICTION = {"chunk", "devices", "workers", "precision", "on_bad_record", "rna", "weights_dir", "restart"}
"""Settings of the prediction that scores contigs."""


@takes_settings(PredictionSettings, only=_OF_A_PREDICTION)
def evaluate(
    output: OutputDir,
    settings: PredictionSettings,
    truth: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="TABLE",
            help="What contigs are: columns contig and label (virus or nonviral), and, if known, group, length and genome.",
            show_default="none: the tables are compared with each other",
        ),
    ] = None,
    contigs: Annotated[
        list[Path] | None,
        typer.Argument(
            readable=False,
            metavar="CONTIGS",
            help="Contigs that are scored as `predict` does, in OUT/prediction; or give --scores.",
            show_default=False,
        ),
    ] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option(
            readable=False,
            metavar="TABLE",
            help="Scores of any tool, instead of contigs; up to six. Known by their headers: a contigs.tsv of ours, tables of geNomad, VirSorter2, DeepMicroClass and CheckV.",
            show_default=False,
        ),
    ] = None,
    id_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Column of --scores with the ids; once, or once a table. Known tables need none.",
            show_default="contig",
        ),
    ] = None,
    score_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Column of --scores with the scores, the higher the more viral; once, or once a table.",
            show_default="score",
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help="The classifier that scores CONTIGS.", show_default="the bundled one"),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            help="Score from which a contig counts as called viral; without --truth, in tables of unknown tools.",
            show_default="the tool's; 0.5 for probabilities of an unknown tool",
        ),
    ] = None,
    prevalence: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Share of viral contigs that precision, average precision and F1 are measured for, such as 0.01.",
            show_default="as in the table",
        ),
    ] = None,
    missing: Annotated[
        Missing,
        typer.Option(
            help="Contigs without a score rank below all others and are not called, or are excluded from everything."
        ),
    ] = Missing.LOWEST,
    length_classes: Annotated[
        str, typer.Option(metavar="NT,...", help="Longest contigs of all length classes but the last.")
    ] = DEFAULT_LENGTH_CLASSES,
    samples: Annotated[
        int, typer.Option(min=20, max=100_000, help="Bootstrap samples of each interval.")
    ] = BOOTSTRAP_SAMPLES,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """
    Measure scores against a truth; or, without one, show where the tables of several tools agree and disagree.

    With --truth: AUROC, average precision, F1, recall at 1 % false positives and calibration, overall, by length class
    and by group, lowest AUROC first, with 95 % intervals of resampled genomes, in OUT/evaluation.json, evaluation.tsv,
    and evaluation.html to look at. Contigs are scored as `predict` does; starting again continues what is missing.
    Without: which tools call the same contigs viral, by length class and evidence, in OUT/agreement.json and
    agreement.tsv.
    """
    _check(contigs, scores, id_column=id_column, score_column=score_column, classifier=classifier, threshold=threshold)
    if truth is None and len(scores or []) < 2:
        raise typer.BadParameter("give it, or two or more tables with --scores to compare.", param_hint="--truth")
    if truth is None and (prevalence is not None or missing is not Missing.LOWEST):
        raise typer.BadParameter("they need --truth.", param_hint="--prevalence, --missing")
    if prevalence is not None and not 0 < prevalence < 1:
        raise typer.BadParameter(f"{prevalence:g} is not above 0 and below 1.", param_hint="--prevalence")
    edges_nt = _length_edges(length_classes)
    layout = EvaluationLayout(output)
    if truth is None:
        tables = _read_tables(scores or [], id_column or [None], score_column or [None], by_contig=True)
        agreement, rows = compare_tables(_named_apart(tables), threshold=threshold, length_edges_nt=edges_nt)
        write_agreement(agreement, rows, layout)
        with ignoring_closed_output():
            if as_json:
                print(json.dumps(agreement))
            elif not quiet:
                _print_agreement(agreement, layout)
        return
    known = read_truth(truth)  # before anything heavy begins
    if contigs:
        check_readable(contigs)  # before weights are looked for or fetched
        asked = settings.model_copy(update={"classifier": classifier or DEFAULT_CLASSIFIER, "threshold": threshold})
        claim, config = configured(configure_prediction, asked, is_quiet=as_json or quiet)
        run = partial(
            run_prediction,
            contigs,
            layout.prediction_dir,
            config,
            claim,
            write_report=write_report,
            workers=asked.hardware.workers or None,
            restart=asked.result.restart,
        )
        with shown_run(run, asked, is_quiet=as_json or quiet, notes=not quiet) as result:
            result.raise_unless(allow_partial=False)
        tables = [read_scores(result.contigs_path)]
    else:
        tables = _read_tables(scores or [], id_column or [None], score_column or [None], by_contig=False)
    document, without = evaluate_tables(
        _named_apart(tables),
        known,
        truth,
        threshold=threshold,
        prevalence=prevalence,
        leave_out_missing=missing is Missing.LEAVE_OUT,
        length_edges_nt=edges_nt,
        bootstrap_samples=samples,
        seed=seed,
    )
    write_evaluation(document, without, layout)
    write_page(document, layout.page, [layout.document, layout.table])
    with ignoring_closed_output():
        if as_json:
            print(json.dumps(document))
        elif not quiet:
            _print(document, without, layout)


def _check(
    contigs: Sequence[Path] | None,
    scores: Sequence[Path] | None,
    *,
    id_column: list[str] | None,
    score_column: list[str] | None,
    classifier: str | None,
    threshold: float | None,
) -> None:
    if bool(contigs) == bool(scores):
        raise typer.BadParameter("give either contigs to score, or --scores.")
    for option, names in (("--id-column", id_column), ("--score-column", score_column)):
        if contigs and names:
            raise typer.BadParameter("it needs --scores.", param_hint=option)
        if scores and names and len(names) not in {1, len(scores)}:
            what = f"given {len(names)} times for {len(scores)} tables: give it once, or once a table."
            raise typer.BadParameter(what, param_hint=option)
    if scores and classifier:
        raise typer.BadParameter("it needs CONTIGS: with --scores, nothing is classified.", param_hint="--classifier")
    if scores and len(scores) > MOST_TABLES:
        raise typer.BadParameter(f"{len(scores)} tables are more than {MOST_TABLES}.", param_hint="--scores")
    if threshold is not None and not (math.isfinite(threshold) and (scores or 0 < threshold < 1)):
        which = "a finite number" if scores else "above 0 and below 1"
        raise typer.BadParameter(f"{threshold:g} is not {which}.", param_hint="--threshold")


def _read_tables(
    paths: Sequence[Path], id_columns: Sequence[str | None], score_columns: Sequence[str | None], *, by_contig: bool
) -> list[ScoreTable]:
    """Read every table; a single column name is for all of them, None is the default."""
    ids, scores = (list(names) * len(paths) if len(names) == 1 else names for names in (id_columns, score_columns))
    columns = zip(paths, ids, scores, strict=True)
    return [read_scores(path, id_column=one, score_column=other, by_contig=by_contig) for path, one, other in columns]


def _length_edges(text: str) -> tuple[int, ...]:
    parts = text.replace(" ", "").split(",")
    edges_nt = tuple(number for part in parts if (number := whole_number(part)) is not None)
    if len(edges_nt) != len(parts) or list(edges_nt) != sorted(set(edges_nt) - {0}):
        what = f"{text!r} is not a list of rising numbers of nucleotides, such as {DEFAULT_LENGTH_CLASSES}."
        raise typer.BadParameter(what, param_hint="--length-classes")
    return edges_nt


def _named_apart(tables: Sequence[ScoreTable]) -> list[ScoreTable]:
    """Return the tables; those that share a name are named by their paths."""
    names = Counter(table.name for table in tables)
    return [replace(table, name=str(table.path)) if names[table.name] > 1 else table for table in tables]


def _print(document: Mapping[str, Any], without: Sequence[Sequence[str]], layout: EvaluationLayout) -> None:
    for number, table in enumerate(document["tables"], start=1):
        overall = table["overall"]
        print(f"{printable(table['name'])}: {overall['viral']:,} viral contigs, {overall['others']:,} others")
        titles = ("contigs", "AUROC", "recall\nat 1 % FP", "average\nprecision", "F1", "calibration\nerror")
        rows = []
        for name, stratum in [("overall", overall), *table["by_length"].items(), *table["by_group"].items()]:
            cells = [_interval(stratum[measure]) for measure in ("auroc", "recall_at_1_percent_false_positives")]
            plain = [stratum[measure] for measure in ("auprc", "f1", "calibration_error")]
            cells += [f"{one['value']:.3f}" if one else "" for one in plain]
            rows.append([name, f"{stratum['contigs']:,}", *cells])
        _print_table("", titles, rows)
        prevalence = table["prevalence"]
        where = "" if prevalence is None else f", where {100 * prevalence:.4g} % of all contigs are viral"
        if overall["precision"]:
            print(f"  precision at the threshold: {_interval(overall['precision'])}{where}")
        if where:
            print(f"  average precision and F1: the same{where}")
        if table["auroc_above_first"]:
            print(f"  AUROC above the first table's: {_interval(table['auroc_above_first'])}")
        for note in table["notes"]:
            print_line(f"  {note}")
        if without[number - 1]:
            print(f"  contigs without a score: {printable(str(layout.left_out(number)))}")
    print(f"table: {printable(str(layout.table))}")
    print(f"page:  {printable(str(layout.page))}")
    print("next:  open the page in a browser")


def _print_agreement(document: Mapping[str, Any], layout: EvaluationLayout) -> None:
    tables = document["tables"]
    for table in tables:
        absent = f", {table['absent']:,} absent" if table["absent"] else ""
        print(
            f"{printable(table['name'])}: {counted(table['viral'], 'viral contig')}{absent} ({printable(table['rule'])})"
        )
    by_length = {"contigs": document["patterns"], **document["by_length"]}
    for first, strata in (("\ncalled by", by_length), ("\nby evidence", document["by_evidence"])):
        rows = [[one, *(f"{of.get(one, 0):,}" for of in strata.values())] for one in document["patterns"]]
        titles = [title.replace(" to ", " to\n").replace(" and ", "\nand ") for title in strata]
        _print_table(first, titles, rows)
    rows = []
    for one in document["look_at"]:
        scores = ("" if score is None else f" {score:.3g}" for score in one["scores"])
        calls = (f"{call}{score}" for call, score in zip(one["calls"], scores, strict=True))
        rows.append([one["contig"], f"{one['length']:,}" if one["length"] else "", one["evidence"], *calls])
    _print_table("\nto look at", ["length", "evidence", *(printable(table["name"]) for table in tables)], rows)
    print(f"table:  {printable(str(layout.agreement_table))}")
    print(f"counts: {printable(str(layout.agreement))}")
    if rows:
        print("next:   look at the contigs above, the longest of those on which the tables disagree")


def _print_table(first: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table unless it has no rows or no columns but the first."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column(first)
    for title in titles:
        shown.add_column(Text(title), justify="right")
    for row in rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    if rows and titles:
        print_renderable(shown)


def _interval(one: Mapping[str, float] | None) -> str:
    return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})" if one else ""
