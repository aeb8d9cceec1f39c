"""
Fit the networks of the contig model.

They predict a contig's group (cross-entropy), since groups differ more than the two labels do; validation stops them.
Seeded, on one thread: the same contigs give the same weights on the same kind of CPU. Legend: C contigs, I inputs,
G groups, M networks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from virnucpro.errors import StoppedError
from virnucpro.models.contigs.contig_model import Layer, normalised, viral_log_odds

if TYPE_CHECKING:
    import threading

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray, IntArray
    from virnucpro.training.training_settings import ContigSettings

_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Inputs and groups of contigs."""

    x_CI: FloatArray
    group_C: IntArray


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Trained networks and the normalisation of their inputs."""

    mean_I: FloatArray
    deviation_I: FloatArray
    members: tuple[tuple[Layer, ...], ...]
    best_epochs: tuple[int, ...]
    """Epoch of each network's weights, from 1."""
    validation_loss: float
    """Nats a contig, virus or not, before calibration; 0.693 is chance."""
    validation_log_odds_C: DoubleArray
    """float64 (C,)."""


def fit_networks(
    training: Examples,
    validation: Examples,
    is_viral_G: BoolArray,
    settings: ContigSettings,
    *,
    weight_C: FloatArray | None = None,
    stop: threading.Event | None = None,
) -> Networks:
    """
    Train networks that differ in seed; each keeps the weights of its best epoch on *validation*.

    Contigs of *training* count by *weight_C*, float32 (C,), or all the same.

    Raises:
        StoppedError: *stop* was set.
    """
    mean_I = training.x_CI.mean(axis=0)
    deviation_I = np.maximum(training.x_CI.std(axis=0), np.float32(_LEAST_DEVIATION))
    normal, held_out = (replace(e, x_CI=normalised(e.x_CI, mean_I, deviation_I)) for e in (training, validation))
    weight_C = np.ones(len(training.group_C), dtype=np.float32) if weight_C is None else weight_C
    is_virus_C = is_viral_G[validation.group_C]
    members, best_epochs, log_odds = [], [], []
    for member in range(settings.members):
        network, best_epoch, log_odds_C = _fit_one(
            normal, weight_C, held_out, is_viral_G, settings, settings.seed + member, stop
        )
        members.append(_layers(network))
        best_epochs.append(best_epoch)
        log_odds.append(log_odds_C)
    mean_log_odds_C = np.mean(log_odds, axis=0)
    return Networks(
        mean_I=mean_I,
        deviation_I=deviation_I,
        members=tuple(members),
        best_epochs=tuple(best_epochs),
        validation_loss=binary_loss(mean_log_odds_C, is_virus_C),
        validation_log_odds_C=mean_log_odds_C,
    )


def binary_loss(log_odds_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the mean cross-entropy of virus or not, nats, both labels with the same weight."""
    losses_C = np.logaddexp(0, np.where(is_virus_C, -log_odds_C, log_odds_C))
    return float(np.mean([losses_C[is_virus_C].mean(), losses_C[~is_virus_C].mean()]))


def _fit_one(
    training: Examples,
    training_weight_C: FloatArray,
    validation: Examples,
    is_viral_G: BoolArray,
    settings: ContigSettings,
    seed: int,
    stop: threading.Event | None,
) -> tuple[nn.Sequential, int, DoubleArray]:
    """Return a network with the weights of its best epoch, that epoch, and validation's log-odds."""
    x_CI, group_C, weight_C = map(torch.from_numpy, (training.x_CI, training.group_C, training_weight_C))
    held_out_CI, is_virus_C = torch.from_numpy(validation.x_CI), is_viral_G[validation.group_C]
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network = _network(x_CI.shape[1], len(is_viral_G), settings)
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    batches = -(-len(group_C) // settings.batch_contigs)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=settings.most_epochs * batches
    )
    loss = nn.CrossEntropyLoss(reduction="none")
    order = torch.Generator().manual_seed(seed)
    best_loss, best_epoch, best_weights = float("inf"), 0, network.state_dict()
    best_log_odds_C = np.zeros(len(is_virus_C))
    epoch = 0
    while epoch < settings.most_epochs and epoch < best_epoch + settings.patience_epochs:
        epoch += 1
        network.train()
        for batch in torch.split(torch.randperm(len(group_C), generator=order), settings.batch_contigs):
            if stop is not None and stop.is_set():
                raise StoppedError
            if len(batch) > 1:  # one contig has no variance
                optimizer.zero_grad()
                (weight_C[batch] * loss(network(x_CI[batch]), group_C[batch])).mean().backward()
                optimizer.step()
            schedule.step()
        network.eval()
        with torch.inference_mode():
            log_odds_C = viral_log_odds(network(held_out_CI).double().numpy(), is_viral_G)
        held_out_loss = binary_loss(log_odds_C, is_virus_C)
        if held_out_loss < best_loss:
            best_loss, best_epoch, best_log_odds_C = held_out_loss, epoch, log_odds_C
            best_weights = copy.deepcopy(network.state_dict())
    network.load_state_dict(best_weights)
    return network.eval(), best_epoch, best_log_odds_C


def _network(num_inputs: int, num_groups: int, settings: ContigSettings) -> nn.Sequential:
    first, second = settings.hidden_dims
    return nn.Sequential(
        nn.Dropout(settings.input_dropout),
        nn.Linear(num_inputs, first),
        nn.BatchNorm1d(first),
        nn.ReLU(),
        nn.Dropout(settings.dropout),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Dropout(settings.dropout / 2),
        nn.Linear(second, num_groups),
    )


def _layers(network: nn.Sequential) -> tuple[Layer, ...]:
    """Return the layers of a network in evaluation mode, the batch norm folded into the first one."""
    linear: list[nn.Linear] = [part for part in network if isinstance(part, nn.Linear)]
    norm: Any = next(part for part in network if isinstance(part, nn.BatchNorm1d))
    scale = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach()
    layers = [(part.weight.detach(), part.bias.detach()) for part in linear]
    weight, bias = layers[0]
    layers[0] = weight * scale[:, None], (bias - norm.running_mean) * scale + norm.bias.detach()
    return tuple(Layer(weight.half().float().numpy(), bias.numpy().copy()) for weight, bias in layers)
