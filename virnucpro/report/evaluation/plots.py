"""
The plots of an evaluation, in the colours of the light page: curves, calibration, scores, recall.

They are made from ``evaluation.json`` alone. Tables of scores differ in colour, dash and shape.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from virnucpro.errors import printable
from virnucpro.report.figure import SHAPES, Axis, Figure, count_axis, round_up, share_axis
from virnucpro.report.formats import cut
from virnucpro.report.html_page import COLOURS, Colour

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Table = Mapping[str, Any]
    """One of the document's ``tables``."""

_OF_TABLES = {
    "table-2": Colour("#7b3fa0", "#c79be6"),
    "table-3": Colour("#1a7f5a", "#5cc79b"),
    "table-4": Colour("#8f6400", "#e0b13c"),
    "table-5": Colour("#b0287a", "#f08bc0"),
    "table-6": Colour("#007c89", "#4fc3d0"),
}
TABLE_COLOURS = {"table-1": COLOURS["ink"], **_OF_TABLES}
"""Of the tables of scores, in the order given."""
PAGE_COLOURS = COLOURS | TABLE_COLOURS
MOST_TABLES = len(TABLE_COLOURS)

_LABEL_CHARACTERS = 28
_EM_OF_CHARACTER = 0.56
_ROW_PX = 44


def roc(tables: Sequence[Table]) -> Figure:
    figure = Figure(
        share_axis("share of others called (false positives)"), share_axis("share of viral contigs called (recall)")
    )
    figure.dotted((0, 0), (1, 1))
    return _curves(figure, tables, "roc", "false positives {:.3f}, recall {:.3f}")


def precision_recall(tables: Sequence[Table]) -> Figure:
    """Return precision against recall; the dotted line is chance, the share of viral contigs or the prevalence."""
    overall, prevalence = tables[0]["overall"], tables[0]["prevalence"]
    chance = overall["viral"] / (overall["viral"] + overall["others"]) if prevalence is None else prevalence
    figure = Figure(share_axis("recall"), share_axis("precision"))
    figure.dotted_at_y(chance)
    return _curves(figure, tables, "precision_recall", "recall {:.3f}, precision {:.3f}")


def reliability(tables: Sequence[Table]) -> Figure:
    """Return the share of viral contigs against the mean score, by bin, for tables of probabilities."""
    figure = Figure(share_axis("mean score of the bin", -0.02, 1.02), share_axis("share that is viral", -0.02, 1.04))
    figure.dotted((0, 0), (1, 1))
    for number, table in enumerate(tables):
        if bins := table["calibration"]:
            places = [(one["mean_score"], one["viral_share"]) for one in bins]
            figure.lines(_curve(number), [places])
            whiskers = [[(one["mean_score"], one["low"]), (one["mean_score"], one["high"])] for one in bins]
            figure.lines(f"curve thin {_role(number)}", whiskers)
            figure.dots(_role(number), places, _shape(number))
            _name(figure, tables, number, _curve(number))
            for one in bins:
                of = f"{one['contigs']:,} contigs of mean score {one['mean_score']:.3f}"
                said = f"{one['viral_share']:.1%} viral of {of}"
                figure.tip(one["mean_score"], one["viral_share"], _said(tables, number, said))
    return figure


def score_histogram(table: Table) -> Figure:
    histogram, threshold = table["histogram"], table["threshold"]
    edges, others, viral = histogram["edges"], histogram["others"], histogram["viral"]
    both = [a + b for a, b in zip(others, viral, strict=True)]
    figure = Figure(_score_axis(edges[0], edges[-1]), count_axis("contigs", max(both)))
    gap = 0.04 * (edges[1] - edges[0])
    bins = list(enumerate(pairwise(edges)))
    figure.boxes("not-virus", (((low + gap, 0), (high - gap, others[n])) for n, (low, high) in bins if others[n]))
    figure.boxes("virus", (((low + gap, others[n]), (high - gap, both[n])) for n, (low, high) in bins if viral[n]))
    for role, name in (("not-virus", "not viral"), ("virus", "viral")):
        figure.legend(f"bar {role}", name)
    for n, (low, high) in bins:
        if both[n]:
            said = f"score {low:.3g}\u2013{high:.3g}: {viral[n]:,} viral, {others[n]:,} not viral"
            figure.tip((low + high) / 2, both[n], said)
    if threshold is not None:
        figure.dotted_at_x(threshold)
    return figure


def _score_axis(low: float, high: float) -> Axis:
    step = round_up((high - low) / 6)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis("score", low, high, [(n * step, f"{n * step:g}") for n in range(first, last + 1)])


def recall_of_strata(tables: Sequence[Table], kind: str) -> Figure:
    """Return the recall at 1 % false positives of each stratum of *kind* (``by_length``, ``by_group``)."""
    names = recall_strata(tables[0], kind)
    labels = [cut(printable(name), _LABEL_CHARACTERS) for name in names]
    rows = Axis("", len(names) - 0.5, -0.5, list(enumerate(labels)))
    left_em = max(3.2, _EM_OF_CHARACTER * max(map(len, labels)) + 1)
    x = share_axis("recall at 1 % false positives", -0.02, 1.02)
    figure = Figure(x, rows, height_px=_ROW_PX * len(names), left_em=left_em)
    for number, table in enumerate(tables):
        found = [table[kind].get(name, {}).get("recall_at_1_percent_false_positives") for name in names]
        offset = (number - (len(tables) - 1) / 2) * min(0.16, 0.7 / len(tables))
        shown = [
            (label, place + offset, one) for place, (label, one) in enumerate(zip(labels, found, strict=True)) if one
        ]
        figure.lines(f"curve thin {_role(number)}", [[(one["low"], y), (one["high"], y)] for _, y, one in shown])
        figure.dots(_role(number), [(one["value"], y) for _, y, one in shown], _shape(number))
        _name(figure, tables, number, f"dots {_shape(number)} {_role(number)}")
        for label, y, one in shown:
            said = f"{label}: recall {one['value']:.3f} ({one['low']:.3f}\u2013{one['high']:.3f})"
            figure.tip(one["value"], y, _said(tables, number, said))
    return figure


def recall_strata(table: Table, kind: str) -> list[str]:
    """Return the strata with viral contigs of their own."""
    return [
        name
        for name, stratum in table[kind].items()
        if stratum["recall_at_1_percent_false_positives"] and stratum["compared_with"] != "all viral contigs"
    ]


def _curves(figure: Figure, tables: Sequence[Table], which: str, said: str) -> Figure:
    for number, table in enumerate(tables):
        figure.lines(_curve(number), [table[which]])
        _name(figure, tables, number, _curve(number))
        for x, y in table[which]:
            figure.tip(x, y, _said(tables, number, said.format(x, y)))
    return figure


def _name(figure: Figure, tables: Sequence[Table], number: int, kind: str) -> None:
    """Put a table into the legend, if it is not the only one."""
    if len(tables) > 1:
        figure.legend(kind, cut(printable(tables[number]["name"]), _LABEL_CHARACTERS))


def _said(tables: Sequence[Table], number: int, said: str) -> str:
    return f"{cut(printable(tables[number]['name']), _LABEL_CHARACTERS)}: {said}" if len(tables) > 1 else said


def _role(number: int) -> str:
    return f"table-{number + 1}"


def _curve(number: int) -> str:
    return f"curve dash-{number} {_role(number)}"


def _shape(number: int) -> str:
    return SHAPES[number % len(SHAPES)]
