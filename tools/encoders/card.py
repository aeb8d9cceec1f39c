"""
What is published with a trained encoder: safetensors in fair-esm's names, ``card.json``, ``MODEL_CARD.md``.

The Markdown card is made from the JSON card, so both say the same.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from virnucpro.durable import sha256_of
from virnucpro.models.encoders.esm2_checkpoint import ARCHITECTURE_KEY, Architecture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from esm.model.esm2 import ESM2
    from torch import nn

WEIGHTS_NAME, CARD_NAME, TEXT_NAME = "model.safetensors", "card.json", "MODEL_CARD.md"


@dataclass(frozen=True)
class ModelFiles:
    """The three files of a published encoder."""

    folder: Path

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_NAME

    @property
    def card(self) -> Path:
        return self.folder / CARD_NAME

    @property
    def text(self) -> Path:
        return self.folder / TEXT_NAME


def publish(model: ESM2, card: dict[str, Any], folder: Path) -> ModelFiles:
    """Write an encoder and its card; architecture, digest, date and versions are added to *card*."""
    files = ModelFiles(folder)
    card = {**card, "architecture": asdict(save_weights(model, files.weights))}
    return write_cards(model, card, files, card_text, packages=("torch", "fair-esm", "numpy", "scipy", "safetensors"))


def write_cards(
    model: nn.Module,
    card: dict[str, Any],
    files: ModelFiles,
    text_of: Callable[[dict[str, Any]], str],
    *,
    packages: Sequence[str],
) -> ModelFiles:
    """Add parameters, digest, date and *packages*' versions to the card of written weights; write both forms."""
    complete = {
        **card,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_sha256": sha256_of(files.weights),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }
    files.card.write_text(json.dumps(complete, indent=2) + "\n", "utf-8")
    files.text.write_text(text_of(complete), "utf-8")
    return files


def save_weights(model: ESM2, path: Path) -> Architecture:
    """Write every tensor under fair-esm's names, so that fair-esm loads the file strictly; return the architecture."""
    architecture = Architecture(
        num_layers=model.num_layers,
        hidden_dim=model.embed_dim,
        attention_heads=model.attention_heads,
        token_dropout=model.token_dropout,
        vocabulary=model.alphabet_size,
    )
    # the output layer shares the embedding's memory, which safetensors does not allow
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt", ARCHITECTURE_KEY: architecture.to_json()})
    path.chmod(0o644)  # safetensors lets only the owner read
    return architecture


def settings_and_command(training: dict[str, Any]) -> str:
    """Return the part of a card that both encoders share."""
    settings = ", ".join(f"`{name}` {value}" for name, value in training["settings"].items())
    return f"Settings: {settings}.\n\nCommand: `{training['command']}`"


def card_text(card: dict[str, Any]) -> str:
    """Return the model card as Markdown."""
    shape, data, split, training = card["architecture"], card["data"], card["split"], card["training"]
    loss, near, far = card["held_out_loss"], card["retrieval"]["all"], card["retrieval"]["across_groups"]
    return f"""# {card["name"]}

**A demonstration encoder.** It is small enough to come with the package, so that everything works without a download.
It is no substitute for a published ESM-2: use one of those (`virnucpro models list`) for results that matter.

| | |
| --- | --- |
| architecture | ESM-2 (fair-esm's `ESM2`): {shape["num_layers"]} layers, width {shape["hidden_dim"]}, \
{shape["attention_heads"]} heads, {card["num_parameters"]:,} parameters |
| weights | `{WEIGHTS_NAME}`, float32, fair-esm's tensor names; sha256 `{card["weights_sha256"]}` |
| licence of the weights | {card["licence"]} |
| date | {card["date"]} |
| hardware | {training["hardware"]} |
| versions | {", ".join(f"{name} {number}" for name, number in card["versions"].items())} |

## Data

{data["description"]}. Licence: {data["licence"]}. File `{data["file"]}`, sha256 `{data["sha256"]}`: \
{data["num_proteins"]:,} proteins, {data["num_residues"]:,} residues.

## Split

{split["rule"]} Seed {split["seed"]}. {split["num_training"]:,} proteins train, {split["num_held_out"]:,} are held out \
({split["num_groups"]:,} groups in all). Measured on the finished split, the largest share of a held-out protein's \
distinct 5-mers found in one training protein is {split["largest_overlap"]:.4f}; the mean of these largest shares is \
{split["mean_overlap"]:.4f}.

## Training

Masked-residue prediction: 15 % of the residues, of these 80 % masked, 10 % replaced, 10 % left. \
{training["steps"]:,} steps, {training["tokens_seen"]:,} tokens, {training["elapsed_minutes"]:.0f} minutes, \
precision {training["settings"]["precision"]}. {training["repeatable"]}

{settings_and_command(training)}

## What it is worth

Held-out loss, every chosen residue masked ({loss["num_residues"]:,} residues, fixed mask), nats per masked residue:

| unigram model of the training part | this encoder | gain |
| --- | --- | --- |
| {loss["unigram"]:.4f} | {loss["encoder"]:.4f} | {loss["gain"]:.4f} |

Nearest neighbour with the same protein name, among the held-out proteins, by cosine (both kinds of vector centred):

| neighbours allowed | queries | mean embedding | residue composition |
| --- | --- | --- | --- |
| all | {near["num_queries"]:,} | {near["embedding"]:.3f} | {near["composition"]:.3f} |
| none that shares half of its 5-mers, or is linked by such | {far["num_queries"]:,} | {far["embedding"]:.3f} | \
{far["composition"]:.3f} |

{card["retrieval"]["verdict"]}

The contact head is untrained. Nothing here measures how well viral sequences are told from others.
"""
