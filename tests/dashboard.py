"""What the committed dashboard asks Prometheus."""

from __future__ import annotations

import json

from tests.conftest import REPOSITORY

OBSERVABILITY = REPOSITORY / "deployments" / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "dashboards" / "virnucpro.json"
VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "3h",
    "$run_id": "0123456789ab",
    "$model": "(composition|virnucpro-tiny-protein)",
    "$host": "(node-1|node-2)",
    "$device": "(cpu|cuda:0|cuda:1)",
}
"""What a user may have chosen."""


def panels() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["panels"]


def variables() -> list[dict]:
    return json.loads(DASHBOARD.read_text())["templating"]["list"]


def substituted(expr: str, **chosen: str) -> str:
    """Return *expr* as Grafana sends it; *chosen* names other values of variables."""
    values = VARIABLES | {f"${name}": value for name, value in chosen.items()}
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(name, values[name])
    assert "$" not in expr, f"a variable that nobody fills in: {expr}"
    return expr
