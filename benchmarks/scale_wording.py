"""Numbers of the model of scale in readable units: times, bytes, powers of ten."""

from __future__ import annotations

from math import floor, log10


def power(count: float) -> str:
    """Write a number as a power of ten, where it is one."""
    digits = floor(log10(count))
    return f"10^{digits}" if count == 10**digits else f"{count / 10**digits:.2g} x 10^{digits}"


def number(value: float) -> str:
    """Write a number, a large one as a power of ten."""
    return f"{value:,g}" if value < 1e6 else power(value)


def duration(seconds: float) -> str:
    """Write a time with a unit that suits it."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:,.0f} {unit}" if seconds >= 10 * length else f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(num_bytes: float) -> str:
    """Write a number of bytes with a unit that suits it."""
    for unit, length in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= length:
            units = num_bytes / length
            return f"{units:,.0f} {unit}" if units >= 10 else f"{units:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB"
