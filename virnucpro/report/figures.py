"""
The look of all figures: colours by role, fonts, axes.

Every colour is one of ``COLOURS``; the page's script swaps them for the dark ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Colour(NamedTuple):
    """The colour of one role, on the light and the dark page."""

    light: str
    dark: str


COLOURS = {
    "virus": Colour("#c84e00", "#ff9a4d"),
    "not-virus": Colour("#1f6fa8", "#62b0e8"),
    "undecided": Colour("#555e6c", "#c3cad5"),
    "no-score": Colour("#8b94a1", "#6a7585"),
    "ink": Colour("#1b2330", "#e8ebf0"),
    "muted": Colour("#596473", "#a2adbb"),
    "line": Colour("#dfe4ea", "#303843"),
    "surface": Colour("#ffffff", "#181d24"),
    "page": Colour("#f5f6f8", "#0f1318"),
    "region": Colour("#fbe3d2", "#4a2c17"),
}
"""Vermilion and blue differ for every kind of colour vision; grey is no verdict."""

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def colour(role: str) -> str:
    return COLOURS[role].light


def dotted_line() -> dict[str, Any]:
    return {"color": colour("muted"), "width": 1, "dash": "dot"}


def lay_out(figure: go.Figure, height_px: int) -> None:
    """Give a figure the look of the page."""
    figure.update_layout(
        template="none",
        height=height_px,
        margin={"l": 56, "r": 14, "t": 34 if height_px > 200 else 8, "b": 46},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": _FONT, "size": 12, "color": colour("muted")},
        legend={
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"color": colour("ink")},
        },
        hoverlabel={
            "align": "left",
            "bgcolor": colour("surface"),
            "bordercolor": colour("muted"),
            "font": {"family": _FONT, "color": colour("ink")},
        },
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": colour("muted"), "activecolor": colour("ink")},
    )
    axis = {
        "gridcolor": colour("line"),
        "linecolor": colour("muted"),
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": colour("muted"),
        "title_standoff": 8,
    }
    figure.update_xaxes(showline=True, **axis)
    figure.update_yaxes(showline=False, **axis)
