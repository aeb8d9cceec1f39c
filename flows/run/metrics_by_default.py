"""Where runs of this machine's worker serve metrics by default: in the folders of the shipped ``prometheus.yml``."""

import os
from pathlib import Path

TARGETS = "VIRNUCPRO_METRICS_TARGETS"
MACHINE_FOLDER = Path("/var/lib/virnucpro/targets")
"""For all users of the machine: made by an administrator, writable for everybody."""
OWN_FOLDER = Path(__file__).resolve().parents[2] / "deployments" / "observability" / "targets"
"""For a machine without it: beside ``prometheus.yml``, for a Prometheus of the user's own."""
_WHERE_ELSE = ("VIRNUCPRO_METRICS_PORT", "VIRNUCPRO_PUSHGATEWAY")


def serve_by_default() -> str:
    """
    Let the runs that this process starts serve metrics and write target files; return what was chosen, as a sentence.

    Nothing changes if the environment sets the folder (empty: none), a port or a pushgateway.
    """
    if TARGETS in os.environ:
        return f"{TARGETS}={os.environ[TARGETS]}"
    if named := [name for name in _WHERE_ELSE if os.environ.get(name)]:
        return f"as {' and '.join(named)} set it"
    for folder in (MACHINE_FOLDER, OWN_FOLDER):
        if os.access(f"{folder}/.", os.W_OK | os.X_OK, effective_ids=True):
            os.environ[TARGETS] = str(folder)
            return f"{TARGETS}={folder} by default"
    return f"not served: neither {MACHINE_FOLDER} nor {OWN_FOLDER} can be written; {TARGETS} names another folder"
