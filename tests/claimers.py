"""Processes that claim units of a folder, for tests to kill and to stop; each is started as a program of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from virnucpro.pipeline.work.unit_claims import UnitClaims, UnitSource, new_owner
from virnucpro.run_layout import UnitsLayout
from virnucpro.store.locks.lease import Lease


def claim_and_note(folder: Path, notes: Path, seconds_a_unit: float) -> None:
    """Take units until all are done; append each to a file of our own when it is taken and when it is done."""
    owner = new_owner()
    claims = UnitClaims(UnitSource(folder, owner))
    with (
        Lease(UnitsLayout(folder).owner(owner), {}, lease_s=claims.plan.lease_s),
        (notes / f"{os.getpid()}").open("a", buffering=1) as file,
    ):
        while (unit := claims.take() or claims.wait(threading.Event())) is not None:
            file.write(f"took {unit.number}\n")
            time.sleep(seconds_a_unit)
            claims.mark_durable(unit.blocks)
            file.write(f"did {unit.number}\n")


if __name__ == "__main__":
    claim_and_note(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
