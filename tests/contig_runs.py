"""Work on contigs, computed as a prediction has it, and what ends the processes that compute it."""

from __future__ import annotations

import threading

from virnucpro.config import RunLimits
from virnucpro.pipeline.executor import LocalRanks
from virnucpro.pipeline.prediction.contig_run import CONTIG_WORKER, compute_contigs
from virnucpro.pipeline.run.stages import Stages, call_stage
from virnucpro.telemetry.run_telemetry import RunTelemetry


def compute(works, *, workers=None, limits=None, stop=None, worker_fn=CONTIG_WORKER, telemetry=None, executor=None):
    """Compute *works*, one after the other, and return how that went."""
    return compute_contigs(
        works,
        task="score_contigs",
        join="aggregate_scores",
        run_id="r1",
        executor=executor or LocalRanks(worker_fn),
        workers=workers,
        log_level="INFO",
        limits=limits or RunLimits(),
        stages=Stages(telemetry or RunTelemetry(), call_stage),
        stop=stop or threading.Event(),
    )
