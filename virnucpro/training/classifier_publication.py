"""What is published with a classifier that was trained here: safetensors, ``card.json``, ``MODEL_CARD.md``."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from virnucpro import durable
from virnucpro.models.classifier_card import CARD_NAME, WEIGHTS_NAME, ClassifierCard, Encoder
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL, MODELS
from virnucpro.training.classifier_model_card import card_text
from virnucpro.training.encoder_card import TEXT_NAME, hardware
from virnucpro.training.frame_data import MOST_COVERAGE, SHORT_SHARE, SHORTEST_NT
from virnucpro.training.genomes import KMER_LIMIT
from virnucpro.training.metrics import auroc
from virnucpro.training.records import file_sha256

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.models.classifier import MLPClassifier
    from virnucpro.training.frame_data import FloatArray
    from virnucpro.training.frame_training import LabelledFrames, TrainingOutcome
    from virnucpro.training.genomes import Genome, GenomeSplit
    from virnucpro.training.training_settings import ClassifierSettings

BIAS = (
    "eukaryotes are one fungus (split by scaffold); archaea are absent but for a few filed under bacteria; prophages "
    "inside bacterial windows were not filtered, so that some frames of viruses are labelled as others; the genomes "
    "are public, so published tools may have been trained on them. Every open frame of a virus counts as viral, the "
    "coding one or not. Nothing is known of plasmids, of animals and plants, and of most lineages of viruses."
)
LINK_RULE = (
    f"are of the same genome (assembly, or accession without its range), or of which one has {KMER_LIMIT:.0%} or more "
    "of the other's 21-mers of either strand (one in twenty looked at, by hash)"
)


@dataclass(frozen=True, kw_only=True)
class TrainedClassifier:
    """A trained module, and all that its card tells."""

    name: str
    """What it is called."""
    chunk_nt: int
    """Nucleotides of a chunk."""
    model: MLPClassifier
    """In evaluation mode."""
    settings: ClassifierSettings
    """How it was trained."""
    outcome: TrainingOutcome
    """How that went."""
    validation: LabelledFrames
    """Frames of the held-out genomes."""
    split: GenomeSplit
    """Genomes on either side."""
    related: Sequence[Genome]
    """Genomes that were left out."""
    evaluation: dict[str, Any]
    """What ``rule_evaluation`` measured."""
    files: Sequence[Path]
    """Files of genomes."""
    num_records: Counter[str]
    """Records of each file, by its name."""
    num_pieces: Counter[str]
    """Pieces cut of each file's records."""
    num_frames: Counter[str]
    """Open frames of these pieces."""
    command: str
    """Makes the same classifier."""


def score_frames(model: MLPClassifier, features_FD: FloatArray) -> FloatArray:
    """Return P(virus) of each row, float32 (F,)."""
    with torch.inference_mode():
        scores: FloatArray = torch.softmax(model.eval()(torch.from_numpy(features_FD)), dim=1)[:, 1].numpy()
    return scores


def publish_classifier(trained: TrainedClassifier, folder: Path) -> ClassifierCard:
    """
    Write weights and cards.

    Args:
        trained: The classifier.
        folder: Where to.

    Returns:
        The card.

    Raises:
        OutputError: The folder cannot be written.
    """
    weights = save({name: x.contiguous() for name, x in trained.model.state_dict().items() if x.is_floating_point()})
    card = ClassifierCard(
        name=trained.name,
        chunk_nt=trained.chunk_nt,
        dna_model=_encoder(DNA_MODEL),
        protein_model=_encoder(DEFAULT_PROTEIN_MODEL),
        hidden_dim=trained.settings.hidden_dim,
        threshold=trained.evaluation["threshold"],
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        worth=worth(trained.name, trained.evaluation),
    )
    for_readers = {
        "purpose": "a demonstration classifier on the bundled encoders",
        "licence": "MIT",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("virnucpro", "torch", "numpy", "scipy", "safetensors")},
        },
        "data": _data(trained),
        "training": _training(trained),
        "evaluation": trained.evaluation,
    }
    durable.write_bytes(folder / WEIGHTS_NAME, weights)
    durable.write_bytes(folder / TEXT_NAME, card_text({**asdict(card), **for_readers}).encode())
    durable.write_bytes(folder / CARD_NAME, card.to_json(**for_readers).encode())
    return card


def worth(name: str, evaluation: dict[str, Any]) -> str:
    """Return the sentence that stands beside a classifier's calls."""
    measured = evaluation["rules"][evaluation["rule"]]
    by_length = ", ".join(f"{auroc[0]:.2f} at {what}" for what, auroc in measured["auroc_by_length"].items())
    return (
        f"{name} is a demonstration: on {evaluation['contigs']} contigs of genomes that it was not trained on its "
        f"AUROC is {measured['auroc'][0]:.2f} ({by_length}), where {evaluation['without_an_open_frame']} without an "
        "open frame count as the least viral; its contig rule and threshold were chosen on the same contigs"
    )


def _encoder(name: str) -> Encoder:
    return Encoder(name=name, sha256=MODELS[name].sha256, hidden_dim=MODELS[name].hidden_dim)


def _data(trained: TrainedClassifier) -> dict[str, Any]:
    related, held_out = Counter(x.file for x in trained.related), Counter(x.file for x in trained.split.held_out)
    return {
        "left_out_rule": (
            "Records that are linked with a contig of the development set, with lambda or with crAssphage, directly or "
            f"through others, are left out. Linked are records that {LINK_RULE}."
        ),
        "pieces_rule": (
            f"Pieces were cut at random places, as many from each genome of a file as from any other, until "
            f"they add up to {MOST_COVERAGE:g} times its length; {SHORT_SHARE:.0%} of them have {SHORTEST_NT} to "
            f"{trained.chunk_nt - 1} nt, the others {trained.chunk_nt}; pieces with other letters than A, C, G and T "
            "were dropped."
        ),
        "split_rule": (
            "Whole groups of linked records are held out, in a random order, up to a tenth of each file's nucleotides; "
            "their pieces stop the training."
        ),
        "bias": BIAS,
        "largest_share": trained.split.largest_share,
        "files": [
            {
                "file": path.name,
                "sha256": file_sha256(path),
                "num_records": trained.num_records[path.name],
                "num_related": related[path.name],
                "num_held_out": held_out[path.name],
                "num_pieces": trained.num_pieces[path.name],
                "num_frames": trained.num_frames[path.name],
            }
            for path in trained.files
        ],
        "left_out": [genome.accession for genome in trained.related],
        "held_out": [genome.accession for genome in trained.split.held_out],
    }


def _training(trained: TrainedClassifier) -> dict[str, Any]:
    scores_F = score_frames(trained.model, trained.validation.features_FD).astype(float)
    return {
        "text": "AdamW on the cross-entropy, both classes weighing the same however many frames each has.",
        "settings": asdict(trained.settings),
        **asdict(trained.outcome),
        "validation_auroc": auroc(scores_F, trained.validation.is_virus_F),
        "hardware": hardware(torch.device("cpu"), 1),
        "command": trained.command,
        "repeatable": "The same command gives the same weights on the same kind of CPU.",
    }
