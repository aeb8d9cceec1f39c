"""
HTML that is escaped by construction, and the formats of numbers on the page.

Anything that is not ``Html`` is text: ``element`` escapes it, in content and attributes.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_VOID = frozenset({"br", "col", "input", "meta"})


class Html(str):
    """Markup, already escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | float | None) -> Html:
    """
    Return an element; children that are not ``Html`` are text.

    In names of attributes, a trailing underscore is dropped and others become hyphens (``class_``, ``data_v``); None
    omits the attribute.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{given}>" if tag in _VOID else f"<{tag}{given}>{joined(*children)}</{tag}>")


def joined(*children: str) -> Html:
    """Return *children* in a row; what is not ``Html`` is text."""
    return Html("".join(child if isinstance(child, Html) else html.escape(child) for child in children))


def plot_place(label: str, caption: str, *drawn: Html) -> Html:
    """Return a drawn figure with title and caption."""
    return element("figure", element("h3", label), *drawn, element("figcaption", caption))


def rows_of(header: Sequence[str], rows: Iterable[Sequence[Any]], *, label: str, numbers: Sequence[int] = ()) -> Html:
    """Return a plain table, which scrolls where it is too wide; the columns *numbers* are right-aligned."""
    kinds = ["number" if column in numbers else None for column in range(len(header))]
    return element(
        "div",
        element(
            "table",
            element(
                "thead",
                element("tr", *(element("th", h, scope="col", class_=k) for h, k in zip(header, kinds, strict=True))),
            ),
            element(
                "tbody",
                *(
                    element("tr", *(element("td", cell, class_=k) for cell, k in zip(row, kinds, strict=True)))
                    for row in rows
                ),
            ),
        ),
        class_="wide",
        tabindex="0",
        role="region",
        aria_label=label,
    )


def terms(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of terms, each with its description."""
    return element("dl", *(joined(element("dt", name), element("dd", text)) for name, text in pairs))


def files_beside(files: Iterable[tuple[str, str]]) -> Html:
    """
    Return the line that names files and says what they hold.

    They are links only where the page comes from a server, by the page's script: a page that was mailed has no files
    beside it.
    """
    named = [joined(element("code", name, data_file=name), f" ({what})" if what else "") for name, what in files]
    return element("p", "Written beside this page: ", Html(", ".join(named)), ".")


def data_block(value: Any, **attributes: str) -> Html:
    """Return a script element that holds data."""
    return element("script", script_json(value), type="application/json", **attributes)


def script_json(value: Any) -> Html:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def cut(text: str, most: int = 120) -> str:
    """Return *text*, cut to *most* characters, the last one being an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def whole(number: int) -> str:
    """Return 1,234."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """Return ``1 contig`` or ``1,234 contigs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(part: int, total: int) -> str:
    """Return 32%, 4.2%, 0.31% or <0.01% (two significant digits)."""
    share = 100 * part / total if total else 0.0
    if 0 < share < 0.01:
        return "<0.01%"
    if 99.5 <= share < 100:
        return f"{int(share * 100) / 100:g}%"
    return f"{share:.0f}%" if share >= 10 or share == 0 else f"{share:.2g}%"


def nucleotides(number: int) -> str:
    """Return 812 nt, 48.5 kb, 1.20 Mb or 3.45 Gb."""
    for unit, size in (("Gb", 10**9), ("Mb", 10**6), ("kb", 10**3)):
        if number >= size:
            value = number / size
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f}\u00a0{unit}"
    return f"{number}\u00a0nt"


def probability(p: float) -> str:
    """Return three decimals, or <0.001 or >0.999 where rounding would give 0 or 1."""
    if 0 < p < 0.001:
        return "<0.001"
    if 0.999 < p < 1:
        return ">0.999"
    return f"{p:.3f}"


def duration(seconds: float) -> str:
    """Return 0.4 s, 42 s, 3 min 20 s or 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    minutes, left_s = divmod(whole_s, 60)
    if minutes == 0:
        return f"{left_s} s"
    hours, left_min = divmod(minutes, 60)
    return f"{hours} h {left_min} min" if hours else f"{minutes} min {left_s} s"
