"""Draw the rooms of the code and who imports whom into CONTRIBUTING.md: python -m tools.house_picture."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "CONTRIBUTING.md"
BEGIN, END = "<!-- picture of the house: python -m tools.house_picture -->\n", "<!-- end of the picture -->\n"
FOUNDATION = "settings, errors, layout"
"""The modules of ``virnucpro`` that are in no room."""


def room_of(module: str) -> str:
    """Return the room of a module: a folder below ``virnucpro``, ``flows``, or the foundation."""
    parts = module.split(".")
    if parts[0] != "virnucpro":
        return parts[0]
    if parts[1:] and (REPOSITORY / "virnucpro" / parts[1]).is_dir():
        return parts[1]
    return parts[1] if parts[1:] and parts[1] in {"api", "cli"} else FOUNDATION


def imports() -> dict[str, set[str]]:
    """Return for each room those that it imports, without what another of them imports anyway."""
    graph = grimp.build_graph("virnucpro", "flows")
    modules = [name for name in graph.modules if name not in {"virnucpro", "virnucpro.__main__", "flows"}]
    found: dict[str, set[str]] = {room_of(name): set() for name in modules}
    for name in modules:
        for imported in graph.find_modules_directly_imported_by(name) & set(modules):
            if room_of(imported) != room_of(name):
                found[room_of(name)].add(room_of(imported))
    reached = {room: _reached(room, found) for room in found}
    return {room: {one for one in to if not any(one in reached[other] for other in to)} for room, to in found.items()}


def _reached(room: str, found: dict[str, set[str]]) -> set[str]:
    """Return the rooms below *room*, itself not among them."""
    below: set[str] = set()
    left = list(found[room])
    while left:
        one = left.pop()
        if one not in below:
            below.add(one)
            left += found[one]
    return below


def label_of(room: str) -> str:
    """Return the name of a room, with its number of files and the rooms within it."""
    folder = REPOSITORY / ("flows" if room == "flows" else f"virnucpro/{room}")
    if not folder.is_dir():
        return room
    within = sorted(one.name for one in folder.iterdir() if (one / "__init__.py").exists())
    count = sum(path.name != "__init__.py" for path in folder.rglob("*.py"))
    return f"<b>{room}</b>, {count} files" + (f"<br/>{', '.join(within)}" if within else "")


def picture() -> str:
    """Return the picture as a Mermaid flowchart."""
    found = imports()
    names = {room: re.sub(r"\W", "", room) for room in found}
    lines = [f'    {names[room]}["{label_of(room)}"]' for room in sorted(found)]
    lines += [f"    {names[room]} --> {names[one]}" for room in sorted(found) for one in sorted(found[room])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"]) + "\n"


def page() -> str:
    """Return CONTRIBUTING.md with the picture of now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{picture()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
