"""
Figures as plotly.js takes them, in the look of the page and the colours of the light one.

They are plain values, named as in https://plotly.com/javascript/reference/; without a template, plotly.js adds no look
of its own.
"""

from __future__ import annotations

from typing import Any, TypedDict

from virnucpro.report.html_page import colour

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CLEAR = "rgba(0,0,0,0)"


class Figure(TypedDict):
    """Its traces, and all that is around them."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


def laid_out(
    traces: list[dict[str, Any]], *, height_px: int, xaxis: dict[str, Any], yaxis: dict[str, Any], **more: Any
) -> Figure:
    """Return the figure of *traces*; *more* are other properties of its layout."""
    layout = {
        "height": height_px,
        "margin": {"l": 56, "r": 14, "t": 34 if height_px > 200 else 8, "b": 46},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": _FONT, "size": 12, "color": colour("muted")},
        "legend": {
            "orientation": "h",
            "traceorder": "normal",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"color": colour("ink")},
        },
        "hoverlabel": {
            "align": "left",
            "bgcolor": colour("surface"),
            "bordercolor": colour("muted"),
            "font": {"family": _FONT, "color": colour("ink")},
        },
        "hovermode": "closest",
        "modebar": {"bgcolor": _CLEAR, "color": colour("muted"), "activecolor": colour("ink")},
        "xaxis": {"showline": True, **xaxis},
        "yaxis": {"showline": False, **yaxis},
    }
    return {"data": traces, "layout": layout | more}


def axis(title: str | None, **more: Any) -> dict[str, Any]:
    """Return an axis; *more* are its other properties."""
    return {
        "title": {"standoff": 8} if title is None else {"standoff": 8, "text": title},
        "gridcolor": colour("line"),
        "linecolor": colour("muted"),
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": colour("muted"),
        **more,
    }


def line_at_x(x: float) -> dict[str, Any]:
    """Return a dotted line from the bottom to the top of the plot, for the layout's ``shapes``."""
    return _dotted_line(x0=x, x1=x, y0=0, y1=1, yref="y domain")


def line_at_y(y: float) -> dict[str, Any]:
    """Return a dotted line from the left to the right of the plot, for the layout's ``shapes``."""
    return _dotted_line(x0=0, x1=1, xref="x domain", y0=y, y1=y)


def diagonal() -> dict[str, Any]:
    """Return a dotted line from (0, 0) to (1, 1), for the layout's ``shapes``."""
    return _dotted_line(x0=0, x1=1, y0=0, y1=1)


def _dotted_line(*, xref: str = "x", yref: str = "y", **ends: float) -> dict[str, Any]:
    line = {"color": colour("muted"), "width": 1, "dash": "dot"}
    return {"type": "line", "xref": xref, "yref": yref, **ends, "line": line}
