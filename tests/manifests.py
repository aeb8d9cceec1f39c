"""Is a changed value of a ``run.json`` noticed? Each one in turn, by ``verify`` and by ``status``."""

from __future__ import annotations

import json

from virnucpro.errors import ResultError
from virnucpro.pipeline.run.run_status import status_of


def is_noticed(verify, out) -> bool:
    try:
        return list(verify(out).problems) != []
    except ResultError:
        return True


def places_of(values, so_far=()):
    """Yield where each single value of a JSON document is."""
    if isinstance(values, (dict, list)):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from places_of(value, (*so_far, key))
    else:
        yield so_far


def changed(value):
    if isinstance(value, str):
        return f"{value[:-1]}{'x' if value[-1:] != 'x' else 'y'}"
    return 1 if value is None else not value if isinstance(value, bool) else value + 900


def values_unseen(out, verify) -> tuple[int, list]:
    """Change each value of ``run.json``, one at a time; return how many there are, and those that ``verify`` takes."""
    path = out / "run.json"
    before = path.read_bytes()
    places, unseen = list(places_of(json.loads(before))), []
    for place in places:
        values = json.loads(before)
        *above, last = place
        inner = values
        for key in above:
            inner = inner[key]
        inner[last] = changed(inner[last])
        path.write_text(json.dumps(values, indent=2) + "\n")
        if not (is_noticed(verify, out) and is_noticed(status_of, out)):
            unseen.append(place)
    path.write_bytes(before)
    return len(places), unseen
