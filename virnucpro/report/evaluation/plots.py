"""
The plots of an evaluation, in the colours of the light page: curves, calibration, scores, recall.

They are made from ``evaluation.json`` alone. Tables of scores differ in colour and dash; text from input reaches plotly
escaped.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from virnucpro.report.figure import axis, diagonal, laid_out, line_at_x, line_at_y
from virnucpro.report.html import hover_text
from virnucpro.report.html_page import COLOURS, Colour, colour

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.report.figure import Figure

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
PAGE_COLOURS = COLOURS | _OF_TABLES
MOST_TABLES = len(TABLE_COLOURS)

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x")
_HEIGHT_PX = 340
_LABEL_CHARACTERS = 28


def roc(tables: Sequence[Table]) -> Figure:
    return laid_out(
        _curves(tables, "roc", "false positives %{x:.3f}<br>recall %{y:.3f}"),
        height_px=_HEIGHT_PX,
        xaxis=axis("share of others called (false positives)", range=[-0.01, 1], dtick=0.2),
        yaxis=axis("share of viral contigs called (recall)", range=[0, 1.02], dtick=0.2),
        shapes=[diagonal()],
        showlegend=len(tables) > 1,
    )


def precision_recall(tables: Sequence[Table]) -> Figure:
    """Return precision against recall; the dotted line is chance, the share of viral contigs or the prevalence."""
    overall, prevalence = tables[0]["overall"], tables[0]["prevalence"]
    chance = overall["viral"] / (overall["viral"] + overall["others"]) if prevalence is None else prevalence
    return laid_out(
        _curves(tables, "precision_recall", "recall %{x:.3f}<br>precision %{y:.3f}"),
        height_px=_HEIGHT_PX,
        xaxis=axis("recall", range=[-0.01, 1.01], dtick=0.2),
        yaxis=axis("precision", range=[0, 1.02], dtick=0.2),
        shapes=[line_at_y(chance)],
        showlegend=len(tables) > 1,
    )


def reliability(tables: Sequence[Table]) -> Figure:
    """Return the share of viral contigs against the mean score, by bin, for tables of probabilities."""
    curves = [
        {
            "type": "scatter",
            "x": [one["mean_score"] for one in bins],
            "y": [one["viral_share"] for one in bins],
            "error_y": _error_bars([(one["viral_share"], one["low"], one["high"]) for one in bins], number),
            "mode": "lines+markers",
            "customdata": [one["contigs"] for one in bins],
            "hovertemplate": "mean score %{x:.3f}<br>viral %{y:.1%} of %{customdata:,} contigs<extra></extra>",
            **_look(number, table["name"]),
        }
        for number, table in enumerate(tables)
        if (bins := table["calibration"])
    ]
    return laid_out(
        curves,
        height_px=_HEIGHT_PX,
        xaxis=axis("mean score of the bin", range=[-0.02, 1.02], dtick=0.2),
        yaxis=axis("share that is viral", range=[-0.02, 1.04], dtick=0.2),
        shapes=[diagonal()],
        showlegend=len(tables) > 1,
    )


def score_histogram(table: Table) -> Figure:
    histogram, threshold = table["histogram"], table["threshold"]
    edges = histogram["edges"]
    bars = [
        {
            "type": "bar",
            "x": [(low + high) / 2 for low, high in pairwise(edges)],
            "y": histogram[which],
            "width": (edges[1] - edges[0]) * 0.92,
            "name": name,
            "marker": {"color": colour("virus" if which == "viral" else "not-virus"), "line": {"width": 0}},
            "customdata": [f"{low:.3g}\u2013{high:.3g}" for low, high in pairwise(edges)],
            "hovertemplate": f"score %{{customdata}}<br>{name}: %{{y:,}}<extra></extra>",
        }
        for which, name in (("others", "not viral"), ("viral", "viral"))
    ]
    highest = max(a + b for a, b in zip(histogram["viral"], histogram["others"], strict=True))
    steps = {"dtick": 1} if highest < 10 else {"tickformat": "~s"}  # no parts of contigs
    return laid_out(
        bars,
        height_px=_HEIGHT_PX,
        xaxis=axis("score", range=[edges[0], edges[-1]]),
        yaxis=axis("contigs", rangemode="tozero", **steps),
        shapes=[] if threshold is None else [line_at_x(threshold)],
        barmode="stack",
        bargap=0,
    )


def recall_of_strata(tables: Sequence[Table], kind: str) -> Figure:
    """Return the recall at 1 % false positives of each stratum of *kind* (``by_length``, ``by_group``)."""
    names = recall_strata(tables[0], kind)
    points = []
    for number, table in enumerate(tables):
        found = [table[kind].get(name, {}).get("recall_at_1_percent_false_positives") for name in names]
        shown = [(name, one) for name, one in zip(names, found, strict=True) if one]
        offset = (number - (len(tables) - 1) / 2) * min(0.16, 0.7 / len(tables))
        trace = {
            "type": "scatter",
            "x": [one["value"] for _, one in shown],
            "y": [names.index(name) + offset for name, _ in shown],
            "error_x": _error_bars([(one["value"], one["low"], one["high"]) for _, one in shown], number),
            "mode": "markers",
            "customdata": [f"{one['low']:.3f}\u2013{one['high']:.3f}" for _, one in shown],
            "text": [hover_text(name) for name, _ in shown],
            "hovertemplate": "%{text}<br>recall %{x:.3f} (%{customdata})<extra></extra>",
            **_look(number, table["name"]),
        }
        points.append(trace)
    labels = [hover_text(name, _LABEL_CHARACTERS) for name in names]
    rows = {"tickvals": list(range(len(names))), "ticktext": labels, "range": [len(names) - 0.5, -0.5]}
    return laid_out(
        points,
        height_px=max(220, 110 + 44 * len(names)),
        xaxis=axis("recall at 1 % false positives", range=[-0.02, 1.02], dtick=0.2),
        yaxis=axis(None, automargin=True, **rows),
        showlegend=len(tables) > 1,
    )


def recall_strata(table: Table, kind: str) -> list[str]:
    """Return the strata with viral contigs of their own."""
    return [
        name
        for name, stratum in table[kind].items()
        if stratum["recall_at_1_percent_false_positives"] and stratum["compared_with"] != "all viral contigs"
    ]


def _curves(tables: Sequence[Table], which: str, hover: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "scatter",
            "x": [x for x, _ in table[which]],
            "y": [y for _, y in table[which]],
            "mode": "lines",
            "hovertemplate": f"{hover}<extra></extra>",
            **_look(number, table["name"]),
        }
        for number, table in enumerate(tables)
    ]


def _look(number: int, name: str) -> dict[str, Any]:
    shown = _colour(number)
    return {
        "name": hover_text(name, _LABEL_CHARACTERS),
        "line": {"color": shown, "width": 2, "dash": _DASHES[number]},
        "marker": {"color": shown, "size": 8, "symbol": _SYMBOLS[number]},
    }


def _colour(number: int) -> str:
    return TABLE_COLOURS[f"table-{number + 1}"].light


def _error_bars(intervals: Sequence[tuple[float, float, float]], number: int) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [max(0.0, high - value) for value, _, high in intervals],
        "arrayminus": [max(0.0, value - low) for value, low, _ in intervals],
        "color": _colour(number),
        "thickness": 1.2,
        "width": 4,
    }
