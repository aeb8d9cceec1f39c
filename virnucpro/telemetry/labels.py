"""
What started a run: the labels that its metrics and the log lines of its processes share beside ``run_id``.

A flow sets them in the environment of its process, which processes that it starts inherit.
"""

from __future__ import annotations

import os

LABEL_VARIABLES = {"flow_run": "VIRNUCPRO_FLOW_RUN", "deployment": "VIRNUCPRO_DEPLOYMENT"}
"""Label -> environment variable: the flow run's id, and its deployment as FLOW/NAME."""


def started_by() -> dict[str, str]:
    """Return every label of ``LABEL_VARIABLES``; empty where nothing set it."""
    return {label: os.environ.get(variable, "") for label, variable in LABEL_VARIABLES.items()}


def known_labels() -> dict[str, str]:
    """Return the labels that are set, for a log line."""
    return {label: value for label, value in started_by().items() if value}
