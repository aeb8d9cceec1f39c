"""
A run as ``virnucpro embed`` makes it, but with parts of few sequences: a short one makes rows durable many times.

``python -m tests.watched_run FASTA OUT TARGETS`` serves metrics on a free port and prints the result as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from tests.settings import embedding_config
from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.telemetry.metrics.options import MetricsOptions
from virnucpro.telemetry.run_telemetry import RunTelemetry

SEQUENCES_PER_PART = 16


def main(fasta: str, out: str, targets: str) -> None:
    config = embedding_config(model=DEFAULT_PROTEIN_MODEL)
    config = dataclasses.replace(config, sequences_per_part=SEQUENCES_PER_PART)
    with RunTelemetry(MetricsOptions(port=0, targets_dir=targets)) as telemetry:
        result = run_embedding([fasta], out, config, [CPU] * 2, telemetry=telemetry)
    print(json.dumps(result.to_json()))


if __name__ == "__main__":
    main(*sys.argv[1:])
