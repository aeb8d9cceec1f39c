"""
The classifier: rows of joined embeddings in, P(other) and P(virus) out.

Linear, batch norm, ReLU, dropout, linear, softmax, as the published classifiers; used in evaluation mode, in float32,
on the CPU only. Legend: B rows, D columns of features (DNA, then protein), H hidden width.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from virnucpro.models.classifier_files.card import (
    NUM_CLASSES,
    ClassifierCard,
    locate_classifier,
    read_card,
    read_weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from virnucpro.arrays import BoolArray, FloatArray


OTHERS, VIRUS = "others", "virus"
"""The labels, as the original program writes them."""

BLOCK_ROWS = 2048
"""Rows computed at once: the hidden layer of a block stays in a core's cache."""


class MLPClassifier(nn.Module):
    def __init__(self, input_dim: int, hidden_dim: int, *, batch_norm_eps: float = 1e-5, dropout: float = 0.5) -> None:
        super().__init__()
        self.hidden_layer = nn.Linear(input_dim, hidden_dim)
        self.bn1 = nn.BatchNorm1d(hidden_dim, eps=batch_norm_eps)
        self.dropout = nn.Dropout(dropout)
        self.output_layer = nn.Linear(hidden_dim, NUM_CLASSES)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        x_BH = torch.relu_(self.bn1(self.hidden_layer(x_BD)))
        logits: torch.Tensor = self.output_layer(self.dropout(x_BH))
        return logits


class Classifier:
    """A trained classifier and its card; *model* is put into evaluation mode."""

    def __init__(self, card: ClassifierCard, model: MLPClassifier) -> None:
        self.card = card
        self._model = model.eval().requires_grad_(requires_grad=False)

    def probabilities(self, features_BD: FloatArray, *, threads: int = 1) -> FloatArray:
        """
        Return P(other) and P(virus) of each row, float32 (B, 2).

        *features_BD*: float32 (B, D), DNA embedding then protein embedding. Rows are computed in blocks of
        ``BLOCK_ROWS``; a row's last bits may depend on the number of rows of its block, and on *threads*.
        """
        if features_BD.dtype != np.float32 or features_BD.shape[1:] != (self.card.input_dim,):
            message = f"features are {features_BD.dtype} {features_BD.shape}, not float32 (rows, {self.card.input_dim})"
            raise ValueError(message)
        result_B2 = np.empty((len(features_BD), NUM_CLASSES), dtype=np.float32)
        with _threads(threads), torch.inference_mode():
            for start in range(0, len(features_BD), BLOCK_ROWS):
                block = slice(start, start + BLOCK_ROWS)
                rows_BD = np.require(features_BD[block], requirements=("C", "W"))  # torch wants both
                torch.softmax(self._model(torch.from_numpy(rows_BD)), dim=1, out=torch.from_numpy(result_B2[block]))
        return result_B2


def is_virus(probabilities_B2: FloatArray) -> BoolArray:
    """Whether each row's label is viral: the likelier class; a tie is ``others``."""
    viral: BoolArray = probabilities_B2[:, 1] > probabilities_B2[:, 0]
    return viral


def load_classifier(name_or_path: str | Path) -> Classifier:
    """
    Load a bundled classifier by its name, or a converted or trained one by its folder.

    ``UnknownClassifierError`` where it is neither, ``ClassifierFileError`` for a published file that has to be
    converted, ``WeightsError`` where the folder does not hold what its card states.
    """
    folder = locate_classifier(name_or_path)
    card = read_card(folder)
    tensors = {name: torch.from_numpy(x.copy()) for name, x in read_weights(folder, card).items()}
    model = MLPClassifier(card.input_dim, card.hidden_dim, batch_norm_eps=card.batch_norm_eps)
    model.load_state_dict({**tensors, "bn1.num_batches_tracked": torch.tensor(0)})
    return Classifier(card, model)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
