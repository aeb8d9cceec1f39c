"""The work on contigs of a run on a cluster: each unit is an item that any host computes."""

import threading
from functools import partial

from flows.clusters.engine import Engine
from virnucpro.config import RunLimits
from virnucpro.pipeline.executor import Executor
from virnucpro.pipeline.prediction.contig_run import ContigRun, compute_on_this_host
from virnucpro.pipeline.run.run_completion import Reasons
from virnucpro.telemetry.ranks import Rank
from virnucpro.telemetry.work_telemetry import WorkTelemetry


class ContigsOnCluster(Executor):
    """An item a unit, on whatever slots the cluster has at the time."""

    is_here = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def compute(self, work: ContigRun, limits: RunLimits, telemetry: WorkTelemetry, stop: threading.Event) -> None:
        """Have the units of each kind computed; the engine tries them again where a host is lost."""
        del limits, telemetry, stop  # in a flow, a run is interrupted by an error
        for kind, units in work.missing_units():
            self._engine.map(partial(compute_on_this_host, kind), units)

    def outcomes(self) -> list[Rank]:
        """See ``Executor.outcomes``: the engine knows its workers."""
        return []

    def reasons(self) -> Reasons:
        """Not asked for: what is missing is an error."""
        raise NotImplementedError
