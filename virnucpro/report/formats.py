"""Numbers and texts as pages show them."""

from __future__ import annotations


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
