"""
The real command line, with the hash model in place of weights: ``python -m tests.faults.hash_command CONTROL ...``.

Only where the model comes from is exchanged; everything else, the workers' processes included, is the program. With
``FAKE_GPUS`` set it sees that many GPUs, which are none (``tests.fake_gpus``).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import virnucpro.cli
from tests import fake_gpus, fakes
from virnucpro.commands import embed
from virnucpro.config import RunLimits
from virnucpro.models import configuration

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig


def hash_config_of(control: str) -> ModelConfig:
    """Return what the command computes: the JSON file *control* may hold settings of its own under ``config``."""
    changes = json.loads(Path(control).read_text()).get("config", {})
    return fakes.hash_config(weights_path=control, loader="tests.fakes:load_faulty_model", **changes)


def main() -> None:
    control = sys.argv.pop(1)
    config = hash_config_of(control)
    if "--runner" in sys.argv:  # the hosts of a cluster look whether they have the same weights
        config = replace(config, weights_sha256=hashlib.sha256(Path(control).read_bytes()).hexdigest())
    if limits := json.loads(Path(control).read_text()).get("limits"):
        RunLimits.of = classmethod(lambda *_: RunLimits(**limits))
    embed.configure_model = lambda *_, **__: config
    configuration.configure_model = embed.configure_model  # the flow, imported later, takes it from here
    if fake_gpus.VARIABLE in os.environ:
        fake_gpus.pretend(int(os.environ[fake_gpus.VARIABLE]))
    virnucpro.cli.main()


if __name__ == "__main__":
    main()
