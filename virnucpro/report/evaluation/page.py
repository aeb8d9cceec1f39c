"""
``evaluation.html``: one page, made from ``evaluation.json`` alone.

Its tables have all measures, so the page is complete without its plots.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.errors import printable
from virnucpro.report.evaluation import plots
from virnucpro.report.formats import counted, cut, whole
from virnucpro.report.html_page import fill_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.report.figure import Figure

    _Place = tuple[str, str, str, Figure]
    """Id, title, caption and what is drawn."""
    _Table = tuple[list[str], list[list[str]]]
    """Header and rows."""

_RECALL = {"by_length": ("recall-by-length", "By length"), "by_group": ("recall-by-group", "By group")}
_MEASURES = {
    "auroc": "AUROC",
    "auprc": "average precision",
    "f1": "F1 at the threshold",
    "recall_at_1_percent_false_positives": "recall at 1\u00a0% false positives",
    "calibration_error": "calibration error",
}
_EXPLAINED = {
    "AUROC": "the probability that a viral contig scores above another one; 0.5 is chance",
    "average precision": "the area under precision against recall; chance is the share of viral contigs",
    "F1": "of calling viral from the threshold up; like precision it depends on how many contigs are viral",
    "prevalence": (
        "the share of viral contigs for which precision, its average and F1 are measured, by weighting the two kinds; "
        "where it is low, a single one of the others that is called weighs much"
    ),
    "recall at 1 % false positives": (
        "share of viral contigs above the lowest score that at most 1 % of the others reach; where there are fewer "
        "than 100 others, none of them may"
    ),
    "calibration error": (
        "mean distance between score and share of viral contigs, over ten bins of equal numbers of contigs; chance "
        "alone makes it greater than 0, and the samples of its interval greater still. Of a group: over five bins; one "
        "of a single label stands in for all contigs of its label, at the share of viral ones that all contigs have"
    ),
    "intervals": (
        "95 %: percentiles of bootstrap samples of genomes, each with all its contigs, or of contigs if the truth "
        "names no genomes; viral and others drawn apart. Those of few genomes are too narrow. Wilson\u2019s of bins"
    ),
    "a group of one label": "is measured against all contigs of the other label, a stratum of both by itself",
    "called": "share of the contigs of that kind that reach the threshold",
    "strict": "share that reaches the one score that at most 1 % of all contigs that are not viral reach",
}
_OF_STRATA = ("auroc", "recall_at_1_percent_false_positives", "calibration_error")
_SHOWN_NOTES = 30


def write_page(document: Mapping[str, Any], path: Path, beside: Sequence[Path]) -> None:
    """Write the page of an evaluation, which names the files *beside* it."""
    tables = document["tables"]
    names = ", ".join(cut(printable(table["name"]), 60) for table in tables)
    kinds = [kind for kind in _RECALL if tables[0][kind]]
    page = fill_page(
        "evaluation/evaluation.html",
        colours=plots.PAGE_COLOURS,
        title=f"VirNucPro evaluation: {_lead(tables)}",
        heading=_lead(tables),
        about=[names, f"truth {printable(PurePath(document['truth']).name)}", f"virnucpro {document['virnucpro']}"],
        beside=[(one.name, "") for one in beside],
        tables=tables,
        compared=_compared(tables),
        figures=_figures(tables[0]["overall"]),
        notes=_notes(tables)[:_SHOWN_NOTES],
        curves=_curves(tables),
        scores=_scores(tables),
        recall=[_recall(tables, kind) for kind in kinds if plots.recall_strata(tables[0], kind)],
        strata=[_strata(tables, kind) for kind in kinds],
        by_group_and_length=_by_group_and_length(tables),
        explained=_EXPLAINED,
    )
    durable.write_bytes(path, page)


def _lead(tables: Sequence[Mapping[str, Any]]) -> str:
    overall = tables[0]["overall"]
    measured = f"{whole(overall['viral'])} viral and {counted(overall['others'], 'other contig')}"
    if len(tables) > 1:
        return f"{len(tables)} tables of scores on {measured}"
    if overall["auroc"] is None:
        return f"{measured}: one kind only, so nothing to compare"
    return f"AUROC {overall['auroc']['value']:.3f} on {measured}"


def _figures(overall: Mapping[str, Any]) -> list[tuple[str, str]]:
    measured = ((overall[measure], title) for measure, title in _MEASURES.items())
    return [(f"{one['value']:.3f}", f"{title} ({_range(one)})") for one, title in measured if one]


def _compared(tables: Sequence[Mapping[str, Any]]) -> _Table | None:
    if len(tables) == 1:
        return None
    measures = ("AUROC", "Average precision", "F1", "Recall at 1\u00a0%", "Calibration error")
    rows = [
        [
            cut(printable(table["name"]), 60),
            *(_interval(table["overall"][measure]) for measure in _MEASURES),
            _interval(table["auroc_above_first"], sign="+"),
        ]
        for table in tables
    ]
    return ["Scores", *measures, "AUROC above the first"], rows


def _notes(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    shared = [note for note in tables[0]["notes"] if all(note in table["notes"] for table in tables)]
    notes = [
        f"{cut(printable(table['name']), 60)}: {note}" if len(tables) > 1 else note
        for table in tables
        for note in (*_thresholds(table), *table["notes"])
        if note not in shared
    ]
    return notes + shared


def _thresholds(table: Mapping[str, Any]) -> list[str]:
    """Return the shares called viral at the threshold and at the strict one, and precision, as sentences."""
    overall, shares = table["overall"], []
    strictly = "at {:.4g}, which at most 1 % of the others reach"
    ends = {"threshold": ("at the threshold {:.4g}", ""), "strict_threshold": (strictly, "_at_strict_threshold")}
    for of, (where, end) in ends.items():
        found = table[of], overall[f"recall{end}"], overall[f"false_positive_share{end}"]
        if None not in found:
            said = where + ", {:.1%} of the viral contigs and {:.1%} of the others are called viral"
            shares.append(said.format(*found))
    if overall["precision"]:
        shares.append(f"precision at the threshold: {_interval(overall['precision'])}{_prevalence(table)}")
    return shares


def _prevalence(table: Mapping[str, Any]) -> str:
    prevalence = table["prevalence"]
    return "" if prevalence is None else f", where {100 * prevalence:.4g}\u00a0% of all contigs are viral"


def _curves(tables: Sequence[Mapping[str, Any]]) -> list[_Place]:
    if not tables[0]["roc"]:
        return []
    both = f"Precision and recall{_prevalence(tables[0])}"
    chance = "Dotted: chance, the share of viral contigs."
    return [
        ("roc", "ROC curve", "Dotted: chance.", plots.roc(tables)),
        ("precision-recall", both, chance, plots.precision_recall(tables)),
    ]


def _scores(tables: Sequence[Mapping[str, Any]]) -> list[_Place]:
    places = []
    if any(table["calibration"] for table in tables):
        caption = "Ten bins of equal numbers of contigs, with 95 % intervals. Dotted: perfect calibration."
        places.append(("reliability", "Calibration", caption, plots.reliability(tables)))
    for number, table in enumerate(tables, start=1):
        at = table["threshold"]
        caption = f"Dotted: the threshold {at:g}." if at is not None else "No threshold is known."
        title = "Scores" if len(tables) == 1 else f"Scores of {cut(printable(table['name']), 40)}"
        places.append((f"histogram-{number}", title, caption, plots.score_histogram(table)))
    return places


def _recall(tables: Sequence[Mapping[str, Any]], kind: str) -> _Place:
    return *_RECALL[kind], "", plots.recall_of_strata(tables, kind)


def _strata(tables: Sequence[Mapping[str, Any]], kind: str) -> tuple[str, list[str], list[list[str]]]:
    has_genomes = tables[0]["overall"]["genomes"] is not None
    header = ["Length" if kind == "by_length" else "Group, lowest AUROC first", *_scores_header(tables)]
    header += ["Contigs", *(["Genomes"] if has_genomes else []), "AUROC", "Recall at 1\u00a0%", "Calibration error"]
    header += ["Viral called", "Others called", "Viral, strict", "Others, strict"]
    rows = [
        [
            *_names(name, table, tables),
            whole(stratum["contigs"]),
            *([whole(stratum["genomes"])] if has_genomes else []),
            *(_interval(stratum[measure]) for measure in _OF_STRATA),
            *_called(stratum),
        ]
        for name in tables[0][kind]
        for table in tables
        if (stratum := table[kind].get(name))
    ]
    return _RECALL[kind][1], header, rows


def _by_group_and_length(tables: Sequence[Mapping[str, Any]]) -> _Table | None:
    if not any(tables[0]["by_group_and_length"].values()):
        return None
    lengths = list(tables[0]["by_length"])
    rows = [
        [*_names(group, table, tables), *(_cell(by_length.get(length)) for length in lengths)]
        for group in tables[0]["by_group_and_length"]
        for table in tables
        if (by_length := table["by_group_and_length"].get(group))
    ]
    return ["Group, lowest AUROC first", *_scores_header(tables), *lengths], rows


def _cell(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    counts = " / ".join(whole(cell[of]) for of in ("contigs", "genomes") if cell[of] is not None)
    return f"{_interval(cell['auroc']) or 'not measured'}, {counts}"


def _scores_header(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["Scores"] if len(tables) > 1 else []


def _names(name: str, table: Mapping[str, Any], tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the first cells of a row: its stratum and, of several tables, the table."""
    of_table = [cut(printable(table["name"]), 40)] if len(tables) > 1 else []
    return [cut(printable(name), 40), *of_table]


def _called(stratum: Mapping[str, Any]) -> list[str]:
    """Return the shares called of a stratum's own contigs, not of those that it is compared with."""
    against = stratum["compared_with"]
    of_viral, of_others = against != "all viral contigs", against != "all contigs that are not viral"
    shares = [
        (stratum["recall"], of_viral),
        (stratum["false_positive_share"], of_others),
        (stratum["recall_at_strict_threshold"], of_viral),
        (stratum["false_positive_share_at_strict_threshold"], of_others),
    ]
    return ["" if share is None or not is_own else f"{share:.1%}" for share, is_own in shares]


def _interval(one: Mapping[str, float] | None, *, sign: str = "") -> str:
    """Return a value and its interval, short enough for a table."""
    if not one:
        return ""
    ends = _range(one, sign=sign) if sign else f"{one['low']:.3f}\u2013{one['high']:.3f}"
    return f"{one['value']:{sign}.3f} ({ends})"


def _range(one: Mapping[str, float], *, sign: str = "") -> str:
    return f"{one['low']:{sign}.3f} to {one['high']:{sign}.3f}"
