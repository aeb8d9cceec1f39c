"""
Prefect only: no science, no torch.

Prefect reads its settings when it is first imported, so the defaults that an in-process run needs are given here, and
only where the user has not set them: a two-core machine needs longer than Prefect's 20 s to start the ephemeral
server, nothing is sent anywhere, what the program itself logs goes to the API with the flow's lines, and lines of runs
on standard error have the id of their flow run, as the metrics have it.
"""

import os

os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "virnucpro")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
for _kind, _name in (("flow_run", "Flow run"), ("task_run", "Task run")):
    os.environ.setdefault(
        f"PREFECT_LOGGING_FORMATTERS_STANDARD_{_kind.upper()}_FMT",
        f"%(asctime)s.%(msecs)03d | %(levelname)-7s | {_name} %({_kind}_name)r flow_run=%(flow_run_id)s - %(message)s",
    )
