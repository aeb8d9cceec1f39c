"""
Prefect only: no science, no torch.

Prefect reads its settings when it is first imported, so the defaults that an in-process run needs are given here, and
only where the user has not set them: a two-core machine needs longer than Prefect's 20 s to start the ephemeral
server, nothing is sent anywhere, and what the program itself logs goes to the API with the flow's lines.
"""

import os

os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "virnucpro")
os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
