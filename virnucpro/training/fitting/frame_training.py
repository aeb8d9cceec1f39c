"""
Train the frame classifier on embedded frames; validation's genomes decide when to stop.

Both classes have the same weight in the loss, however many frames each has. Seeded, on one thread: the same frames give
the same weights on the same kind of CPU. Legend: F frames, D columns of features.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from virnucpro.errors import StoppedError
from virnucpro.models.classifier import MLPClassifier
from virnucpro.models.classifier_files.card import NUM_CLASSES

if TYPE_CHECKING:
    import threading

    from virnucpro.arrays import FloatArray
    from virnucpro.training.evaluation.metrics import BoolArray
    from virnucpro.training.training_settings import ClassifierSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LabelledFrames:
    """Frames and their labels."""

    features_FD: FloatArray
    is_virus_F: BoolArray


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """How the training went."""

    epochs: int
    best_epoch: int
    """Epoch of the weights, from 1."""
    validation_loss: float
    """Nats a frame on validation, both classes with the same weight; 0.693 is chance."""


def train_classifier(
    training: LabelledFrames,
    validation: LabelledFrames,
    settings: ClassifierSettings,
    *,
    stop: threading.Event | None = None,
) -> tuple[MLPClassifier, TrainingOutcome]:
    """
    Train until the loss on *validation* (other genomes) no longer falls; return the weights of the best epoch.

    Raises:
        StoppedError: *stop* was set.
    """
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    model = MLPClassifier(training.features_FD.shape[1], settings.hidden_dim, dropout=settings.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    loss = nn.CrossEntropyLoss(weight=_class_weights(training.is_virus_F))
    x_FD, y_F = torch.from_numpy(training.features_FD), torch.from_numpy(training.is_virus_F.astype(np.int64))
    order = torch.Generator().manual_seed(settings.seed)
    best, best_weights = TrainingOutcome(epochs=0, best_epoch=0, validation_loss=float("inf")), model.state_dict()
    epoch = 0
    while epoch < settings.most_epochs and epoch < best.best_epoch + settings.patience_epochs:
        if stop is not None and stop.is_set():
            raise StoppedError
        epoch += 1
        model.train()
        for batch in torch.split(torch.randperm(len(y_F), generator=order), settings.batch_frames):
            if len(batch) == 1:  # one frame has no variance
                continue
            optimizer.zero_grad()
            loss(model(x_FD[batch]), y_F[batch]).backward()
            optimizer.step()
        held_out_loss = validation_loss(model, validation)
        _log.info("epoch %d: validation loss %.4f", epoch, held_out_loss)
        if held_out_loss < best.validation_loss:
            best = TrainingOutcome(epochs=epoch, best_epoch=epoch, validation_loss=held_out_loss)
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    outcome = TrainingOutcome(epochs=epoch, best_epoch=best.best_epoch, validation_loss=best.validation_loss)
    return model.eval(), outcome


def validation_loss(model: MLPClassifier, frames: LabelledFrames) -> float:
    """Return the loss in evaluation mode, nats a frame, both classes with the same weight."""
    loss = nn.CrossEntropyLoss(weight=_class_weights(frames.is_virus_F))
    model.eval()
    with torch.inference_mode():
        logits_F2 = model(torch.from_numpy(frames.features_FD))
        return float(loss(logits_F2, torch.from_numpy(frames.is_virus_F.astype(np.int64))))


def _class_weights(is_virus_F: BoolArray) -> torch.Tensor:
    counts = np.bincount(is_virus_F, minlength=NUM_CLASSES)
    return torch.from_numpy((len(is_virus_F) / (NUM_CLASSES * counts)).astype(np.float32))
