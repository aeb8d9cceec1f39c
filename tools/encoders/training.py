"""
The loop that trains a small encoder by masked-token prediction, on a GPU when there is one.

What is trained is an ``Objective``: proteins' is in ``masked_residues``, DNA's in ``masked_dna``.

For one seed, number of steps, thread count and machine type the loop on a CPU gives the same weights every time: data
order and masks come from numpy generators seeded by (seed, epoch) and (seed, step). A checkpoint holds all there is,
so an interrupted run resumes where it was. A time limit makes the learning rate decay faster; such a run repeats only
where the limit was not reached.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tools.encoders.masked_tokens import epoch_windows
from virnucpro.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn

    from tools.encoders.masked_tokens import MaskedBatch

_log = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 50
_CHECKPOINT_EVERY_S = 120.0
_IN_A_LAYER = re.compile(r"\blayers?\.\d+\.")  # fair-esm's and the published BERTs' names
_DATA_STREAM, _MASK_STREAM = 1, 2  # keep the two kinds of generator apart


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Settings that decide the weights, together with the sequences."""

    num_layers: int = 5
    """Transformer layers."""
    hidden_dim: int = 128
    """Width of the embedding."""
    attention_heads: int = 4
    """Heads; each has ``hidden_dim / attention_heads`` channels, an even number."""
    steps: int = 12000
    """Optimiser steps."""
    batch_tokens: int = 4096
    """At most so many tokens in a step, special ones included."""
    window_tokens: int = 254
    """At most so many tokens in a training window, without special ones; for proteins, residues."""
    matrix_learning_rate: float = 8e-3
    """Peak learning rate of the layers' matrices (Muon); linear warm-up, then linear decay to 0."""
    learning_rate: float = 3e-3
    """Peak learning rate of everything else (AdamW), with the same schedule."""
    warm_up_share: float = 0.03
    """Share of the run with a rising learning rate."""
    weight_decay: float = 0.01
    """On the layers' matrices only."""
    seed: int = 1
    """Seed of split, weights, order and masks."""
    precision: str = "bf16"
    """``bf16`` (autocast) or ``fp32``; the weights are float32 either way."""
    threads: int = 2
    """Threads on a CPU; another number gives other last bits."""
    limit_minutes: float | None = None
    """Minutes of wall time after which the learning rate is 0; None: no limit."""


@dataclass
class TrainingState:
    """How far a run is."""

    step: int = 0
    """Optimiser steps done."""
    tokens_seen: int = 0
    """Tokens of these steps, special ones included."""
    elapsed_s: float = 0.0
    """Seconds of wall time in the loop, over all its processes."""


class Objective(Protocol):
    """A model and its training examples; the loop knows nothing else of proteins or DNA."""

    untrained: str
    """Prefix of the names of parameters that the loss does not reach."""

    def new_encoder(self, settings: TrainingSettings) -> nn.Module:
        """Make the module to train, the same one for the same settings; its blocks' matrices are in ``layer``s."""
        ...

    def epoch_ids(self, sequences: Any, random: np.random.Generator) -> Sequence[NDArray[np.int64]]:
        """Return the token ids of each training sequence for one epoch."""
        ...

    def mask(self, windows: Sequence[NDArray[np.int64]], random: np.random.Generator) -> MaskedBatch:
        """Hide tokens of windows of one length."""
        ...

    def loss(self, model: Any, batch: MaskedBatch) -> torch.Tensor:
        """Return the mean loss of the hidden tokens in nats, a scalar with its graph."""
        ...


def train_encoder(
    sequences: Sequence[Any],
    settings: TrainingSettings,
    objective: Objective,
    *,
    device: torch.device,
    checkpoint: Path | None = None,
) -> tuple[Any, TrainingState]:
    """
    Train an encoder, or resume the one in *checkpoint*.

    *checkpoint* is written every two minutes and at the end, and read first if it exists.
    """
    torch.set_num_threads(settings.threads)
    model = objective.new_encoder(settings).to(device)
    optimisers = _optimisers(model, settings, objective.untrained)
    state = TrainingState()
    if checkpoint is not None and checkpoint.exists():
        state = _restore(checkpoint, model, optimisers, settings)
        _log.info("resuming from step %d of %s", state.step, checkpoint)
    started = time.monotonic() - state.elapsed_s
    last_saved, recent_losses = time.monotonic(), []
    for windows in _batches(sequences, settings, objective, first_step=state.step):
        state.elapsed_s = time.monotonic() - started
        rate_share = learning_rate_share(progress(state, settings), settings.warm_up_share)
        if rate_share == 0:
            break
        for optimiser, peak in zip(optimisers, (settings.matrix_learning_rate, settings.learning_rate), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate_share
        batch = objective.mask(windows, np.random.default_rng((settings.seed, _MASK_STREAM, state.step)))
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = objective.loss(model, batch.to(device))
        model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        state.step += 1
        state.tokens_seen += batch.tokens_BL.numel()
        recent_losses.append(loss.detach())
        if state.step % _LOG_EVERY_STEPS == 0:
            _log.info(
                "step %d of %d: loss %.4f nats, learning rate %.2e, %.1f M tokens, %.0f tokens/s",
                *(state.step, settings.steps, float(torch.stack(recent_losses).mean())),
                *(settings.learning_rate * rate_share, state.tokens_seen / 1e6, state.tokens_seen / state.elapsed_s),
            )
            recent_losses = []
        if checkpoint is not None and time.monotonic() - last_saved > _CHECKPOINT_EVERY_S:
            _save(checkpoint, model, optimisers, settings, state)
            last_saved = time.monotonic()
    if checkpoint is not None:
        _save(checkpoint, model, optimisers, settings, state)
    return model, state


def progress(state: TrainingState, settings: TrainingSettings) -> float:
    """Return the share of the run that is over, 0 to 1, by steps or by the time limit, whichever is further."""
    by_steps = state.step / settings.steps
    if settings.limit_minutes is None:
        return min(by_steps, 1.0)
    return min(max(by_steps, state.elapsed_s / (60 * settings.limit_minutes)), 1.0)


def learning_rate_share(run_share: float, warm_up_share: float) -> float:
    """Return the learning rate as a share of its peak: up from a hundredth to 1, then down to 0 at the end."""
    if run_share < warm_up_share:
        return max(run_share / warm_up_share, 0.01)
    return (1 - run_share) / (1 - warm_up_share)


def _optimisers(
    model: nn.Module, settings: TrainingSettings, untrained: str
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """
    Return Muon for the layers' matrices and AdamW for the rest.

    Muon (Jordan et al. 2024, with the step sizes of Liu et al. 2025) was ahead of AdamW alone in short trials: held-out
    loss 2.8697 nats after 2.5 million tokens against 2.8731 after 4.7 million, undecayed, at the learning rates and
    batch sizes that were tried (ESM-2 on proteins).
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith(untrained)]
    is_matrix = {name: bool(_IN_A_LAYER.search(name)) and parameter.ndim == 2 for name, parameter in trained}
    return (
        torch.optim.Muon(
            [parameter for name, parameter in trained if is_matrix[name]],
            lr=settings.matrix_learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [parameter for name, parameter in trained if not is_matrix[name]],
            lr=settings.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        ),
    )


def _batches(
    sequences: Sequence[Any], settings: TrainingSettings, objective: Objective, *, first_step: int
) -> Iterator[list[NDArray[np.int64]]]:
    """Yield batches without end, epoch after epoch, from *first_step* on."""
    step, epoch = 0, 0
    while True:
        random = np.random.default_rng((settings.seed, _DATA_STREAM, epoch))
        for windows in epoch_windows(
            objective.epoch_ids(sequences, random),
            window_tokens=settings.window_tokens,
            batch_tokens=settings.batch_tokens,
            random=random,
        ):
            if step >= first_step:
                yield windows
            step += 1
        epoch += 1


def _save(
    path: Path,
    model: nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
    settings: TrainingSettings,
    state: TrainingState,
) -> None:
    contents = {
        "model": model.state_dict(),
        "optimisers": [optimiser.state_dict() for optimiser in optimisers],
        "settings": asdict(settings),
        "state": asdict(state),
    }
    unfinished = path.with_suffix(".unfinished")
    torch.save(contents, unfinished)
    unfinished.replace(path)


def _restore(
    path: Path, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer], settings: TrainingSettings
) -> TrainingState:
    """Load a checkpoint that was made with the same settings; only the time limit may differ."""
    contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if {**contents["settings"], "limit_minutes": settings.limit_minutes} != asdict(settings):
        raise ConfigurationError(f"{path} was made with other settings: {contents['settings']}")
    model.load_state_dict(contents["model"])
    for optimiser, saved in zip(optimisers, contents["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    return TrainingState(**contents["state"])
