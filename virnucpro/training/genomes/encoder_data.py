"""
The genomes that an encoder was trained on, as the card beside its weights lists them.

A classifier measured on records that its encoder has seen looks better than on new genomes. Accessions (without range
and version) and organisms are compared; whatever a card does not list counts as not seen.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from virnucpro.models.classifier_files.card import CARD_NAME

if TYPE_CHECKING:
    from virnucpro.config import ModelConfig
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome

ACCESSIONS, ORGANISMS = "training_accessions", "training_organisms"
"""Keys of an encoder's card, in its ``split``."""
_VERSION_AND_RANGE = re.compile(r"(\.\d+)?(:.*|#\d+)?$")


@dataclass(frozen=True)
class EncoderData:
    """The genomes that an encoder was trained on."""

    accessions: frozenset[str]
    """Without version and range."""
    organisms: frozenset[str]
    """In lower case."""

    def has(self, genome: LabelledGenome) -> bool:
        """Whether the encoder has seen this record, or another one of its organism."""
        return bare_accession(genome.accession) in self.accessions or genome.organism.casefold() in self.organisms


def training_data_of(model: ModelConfig) -> EncoderData | None:
    """Return the training data listed in the card beside an encoder's weights; None if it lists none."""
    try:
        card = json.loads((Path(model.weights_path).parent / CARD_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    split = card.get("split", {})
    if card.get("weights_sha256") != model.weights_sha256 or ACCESSIONS not in split:
        return None
    return EncoderData(frozenset(split[ACCESSIONS]), frozenset(name.casefold() for name in split[ORGANISMS]))


def bare_accession(name: str) -> str:
    """Return a record's accession without version and range."""
    return _VERSION_AND_RANGE.sub("", name)
