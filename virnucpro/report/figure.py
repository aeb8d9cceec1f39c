"""
Figures, drawn as SVG when a page is written: they need no script, take the page's colours, and print.

The SVG is a square that is stretched to its place. Strokes keep their width, and all text is HTML around it, so a
figure can be read on a phone. A mark's class is the role of its colour. ``tips`` are the values that the page's script
shows to a pointer, and one by one to the keys.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Place = tuple[float, float]

SIZE = 2000
"""Width and height of the square."""
HEIGHT_PX = 280
_RING, _SQUARE, _ROUND = "ring", "square", "round"
SHAPES = (_ROUND, _SQUARE, _RING)
_MOST_STEPS = 6


class Axis(NamedTuple):
    """An axis from *low* to *high*, with labels at some values."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is: 0 at *low*, 1 at *high*."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = (math.log10(max(one, self.low)) for one in (low, high, value))
        return (value - low) / (high - low)


class Tip(NamedTuple):
    """What is said of a place of the square."""

    x: int
    y: int
    text: str


class Figure:
    """Marks between two axes; *left_em* is the room for the labels of y."""

    def __init__(self, x: Axis, y: Axis, height_px: int = HEIGHT_PX, left_em: float = 3.2) -> None:
        self.x, self.y, self.height_px, self.left_em = x, y, height_px, left_em
        self.tips: list[Tip] = []
        self.key: list[tuple[str, str]] = []
        """The legend: classes of marks, and their name."""
        self._marks: list[tuple[str, str]] = []

    def at(self, x: float, y: float) -> tuple[int, int]:
        """Return the place of a value in the square, whose y goes down."""
        return round(SIZE * self.x.place(x)), round(SIZE * (1 - self.y.place(y)))

    def tip(self, x: float, y: float, text: str) -> None:
        self.tips.append(Tip(*self.at(x, y), text))

    def legend(self, kind: str, name: str) -> None:
        """Name the marks of the classes *kind*."""
        self.key.append((kind, name))

    def boxes(self, role: str, boxes: Iterable[tuple[Place, Place]]) -> None:
        """Fill rectangles, each from one corner to the opposite one."""
        self.shapes(f"bar {role}", (((x0, y0), (x1, y0), (x1, y1), (x0, y1)) for (x0, y0), (x1, y1) in boxes))

    def shapes(self, kind: str, shapes: Iterable[Sequence[Place]]) -> None:
        """Fill closed shapes."""
        self._draw(kind, (f"{self._way(corners)}z" for corners in shapes))

    def lines(self, kind: str, lines: Iterable[Sequence[Place]]) -> None:
        self._draw(kind, (self._way(line) for line in lines))

    def dots(self, role: str, places: Iterable[Place], shape: str = _ROUND) -> None:
        path = "".join("M{} {}h0".format(*self.at(*place)) for place in places)
        self._draw(f"dots {shape} {role}", [path])
        if shape == _RING:
            self._draw("hole", [path])

    def dotted(self, start: Place, end: Place) -> None:
        self.lines("curve dotted", [[start, end]])

    def dotted_at_x(self, x: float) -> None:
        self.dotted((x, self.y.low), (x, self.y.high))

    def dotted_at_y(self, y: float) -> None:
        self.dotted((self.x.low, y), (self.x.high, y))

    def drawn(self) -> list[tuple[str, str]]:
        """Return the classes and the path of everything in the square."""
        grid = [self._way([(self.x.low, value), (self.x.high, value)]) for value, _ in self.y.ticks]
        ground = max(self.y.low, 0) if self.y.high > 0 else self.y.high
        base = self._way([(self.x.low, ground), (self.x.high, ground)])
        return [("curve grid", "".join(grid)), *self._marks, ("curve base", base)]

    def _way(self, places: Sequence[Place]) -> str:
        """Return the path along *places*; level and upright parts are written short."""
        at = [self.at(*place) for place in places]
        parts = ["M{} {}".format(*at[0])]
        for (x0, y0), (x, y) in pairwise(at):
            parts.append(f"H{x}" if y == y0 else f"V{y}" if x == x0 else f"L{x} {y}")
        return "".join(parts)

    def _draw(self, kind: str, paths: Iterable[str]) -> None:
        if path := "".join(paths):
            self._marks.append((kind, path))


def share_axis(title: str, low: float = 0.0, high: float = 1.0, *, step: float = 0.2) -> Axis:
    """Return an axis for values from 0 to 1, with a margin where *low* and *high* go beyond."""
    return Axis(title, low, high, [(step * n, f"{step * n:g}") for n in range(round(1 / step) + 1)])


def count_axis(title: str, highest: int, *, is_log: bool = False) -> Axis:
    """Return an axis for counts from 0; a logarithmic one begins below 1, so that 1 has a height."""
    if is_log:
        decades = range(math.ceil(math.log10(max(highest, 2))) + 1)
        return Axis(title, 0.5, 1.1 * max(highest, 2), [(10**n, short_number(10**n)) for n in decades[:-1]], is_log)
    step = max(1, round_up(max(highest, 1) / _MOST_STEPS))
    return Axis(title, 0, 1.05 * max(highest, 1), [(n, short_number(n)) for n in range(0, highest + 1, int(step))])


def length_axis(title: str, shortest_nt: int, longest_nt: int) -> Axis:
    """Return a logarithmic axis for nucleotides: decades, of a small range 1, 2 and 5 of each."""
    low, high = shortest_nt / 1.25, longest_nt * 1.25
    factors = (1,) if high / low > 40 else (1, 2, 5)
    steps = [factor * 10**n for n in range(int(math.log10(low)), int(math.log10(high)) + 1) for factor in factors]
    shown = [step for step in steps if low <= step <= high]
    if len(shown) < 2:
        shown = sorted({shortest_nt, longest_nt})
    return Axis(title, low, high, [(step, short_number(step)) for step in shown], is_log=True)


def position_axis(title: str, length_nt: int) -> Axis:
    """Return the axis of positions in a contig, in kb or Mb, which follows the title."""
    unit, unit_nt = ("Mb", 1_000_000) if length_nt >= 1_000_000 else ("kb", 1_000)
    step = round_up(length_nt / _MOST_STEPS)
    steps = [step * n for n in range(int(length_nt / step) + 1)]
    return Axis(f"{title} ({unit})", 0, length_nt, [(at, f"{at / unit_nt:g}") for at in steps])


def round_up(number: float) -> float:
    """Return the next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= number * (1 - 1e-9))


def short_number(number: float) -> str:
    """Return 950, 2k, 2.5k or 3M."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:g}{unit}"
    return f"{number:g}"
