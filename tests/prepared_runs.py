"""Runs that are ready to be computed by unit workers, with the hash model in place of weights."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests import fakes
from virnucpro import durable
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hardware.device_claim import DeviceClaim
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.run_layout import RunLayout
from virnucpro.store.locks.run_lock import RunLock

RUN_ID = "abcdef012345"
COUNT = 40
"""Sequences of a run, where nothing else is said."""


def write_proteins(path: Path, count: int) -> dict[str, str]:
    """Write random proteins, none twice; return the sequence of each id."""
    chooser = random.Random(5)
    sequences = {
        f"protein_{number}": "".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=chooser.randint(5, 40)))
        for number in range(count)
    }
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return sequences


def faulty_config(folder: Path, plan: dict, **changes):
    """As ``fakes.faulty_config``, with the checksum that every host compares."""
    config = fakes.faulty_config(folder / "faults.json", {"how": "none", **plan}, **changes)
    return replace(config, weights_sha256=durable.sha256_of(Path(config.weights_path)))


@contextmanager
def prepared_run(folder: Path, config, *, count=COUNT, devices=2, **prepared):
    """Yield a run on CPUs whose folder is held, and its sequences."""
    fasta, layout = folder / "proteins.fasta", RunLayout(folder / "out")
    sequences = write_proteins(fasta, count)
    with RunLock(layout.lock, run_id=RUN_ID):
        claim = DeviceClaim.of([CPU] * devices)
        yield prepare_run([fasta], layout.output_dir, config, claim, run_id=RUN_ID, **prepared), sequences
