"""Options, exit codes and the card's account of a training, shared by both encoders' commands."""

from __future__ import annotations

import argparse
import logging
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from virnucpro.errors import VirNucProError
from virnucpro.training.fitting.classifier_cards import hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.encoders.training import TrainingSettings, TrainingState

_log = logging.getLogger(__name__)


def training_parser(module: str, description: str, defaults: TrainingSettings) -> argparse.ArgumentParser:
    """Return a parser with all options except the input."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder of the result")
    parser.add_argument("--steps", type=int, default=defaults.steps, help="optimiser steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="at most this many minutes; the learning rate then decays faster")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="seed of everything (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto (a GPU when there is one), cpu or cuda:N")
    parser.add_argument("--threads", type=int, default=defaults.threads, help="CPU threads (default %(default)s)")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default=defaults.precision, help="default %(default)s")
    return parser


def run_training(
    options: argparse.Namespace,
    defaults: TrainingSettings,
    train: Callable[[TrainingSettings, torch.device], None],
) -> None:
    """Train as the options say; on an error, log one sentence and exit with its code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    settings = replace(
        defaults,
        steps=options.steps,
        limit_minutes=options.minutes,
        seed=options.seed,
        threads=options.threads,
        precision=options.precision,
    )
    try:
        train(settings, _device(options.device))
    except VirNucProError as error:
        _log.error("%s", error)
        raise SystemExit(error.exit_code) from error


def training_card(
    module: str, inputs: Sequence[Path], settings: TrainingSettings, state: TrainingState, device: torch.device
) -> dict[str, Any]:
    """Return the card's section about how the weights were made."""
    command = ["python", "-m", module, *(path.name for path in inputs), "-o", "DIR", "--steps", str(settings.steps)]
    command += [] if settings.limit_minutes is None else ["--minutes", f"{settings.limit_minutes:g}"]
    command += ["--seed", str(settings.seed), "--threads", str(settings.threads), "--precision", settings.precision]
    return {
        "steps": state.step,
        "tokens_seen": state.tokens_seen,
        "elapsed_minutes": state.elapsed_s / 60,
        "settings": asdict(settings),
        "hardware": hardware(device, settings.threads),
        "command": shlex.join(command),
        "repeatable": (
            "The same command gives the same weights on the same kind of CPU."
            if settings.limit_minutes is None
            else "The time limit had a part in the learning rate: the same command gives similar weights, not the same."
        ),
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
