"""
Converts the published ``500_model.pth`` to safetensors and a card.

The published file is a whole module, saved by ``torch.save(model)``: a zip archive of a pickle and of numbers.
``torch.load`` would execute whatever such a pickle calls; here it is read as data (``pickled``), without
torch. A file of ``torch.save(model.state_dict())`` is accepted as well.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.numpy import save

from virnucpro import durable
from virnucpro.choices import SequenceKind
from virnucpro.errors import ClassifierFileError, ConfigurationError, WeightsError, printable
from virnucpro.models.classifier_files.archive import read_published
from virnucpro.models.classifier_files.card import CARD_NAME, WEIGHTS_NAME, ClassifierCard, Encoder, read_card
from virnucpro.models.classifier_files.pickled import RefusedPickleError
from virnucpro.models.registry import MODELS, locate_weights

if TYPE_CHECKING:
    from virnucpro.arrays import FloatArray

PUBLISHED_DNA_MODEL, PUBLISHED_PROTEIN_MODEL = "dnabert-s", "esm2_t36_3B_UR50D"
"""The models that the published classifiers were trained with."""

_CHUNK_IN_NAME = re.compile(r"(300|500)_")


def convert_classifier(
    pth_path: str | Path,
    output_dir: str | Path,
    *,
    chunk_nt: int | None = None,
    dna_model: str = PUBLISHED_DNA_MODEL,
    protein_model: str = PUBLISHED_PROTEIN_MODEL,
    weights_dir: Path | None = None,
) -> ClassifierCard:
    """
    Convert a published classifier to a folder for ``load_classifier``; the same file gives the same bytes.

    The published file does not name the weights of the models it was trained with. Where these models are on this
    machine the card pins their sha256; else it has their names only. Nothing is downloaded.

    Args:
        chunk_nt: Nucleotides of the chunks of its training; by default what the file's name begins with.
        dna_model: Registered name of the DNA model of its training.
        protein_model: Registered name of the protein model of its training.
        weights_dir: Folder that is searched first for the models' weights.

    Raises:
        ClassifierFileError: The file is refused; nothing in it was executed and nothing was written.
        ConfigurationError: The chunk length is unknown, a model is not registered or of the wrong kind, or the folder
            holds another classifier.
        OutputError: The folder cannot be written.
    """
    path, folder = Path(pth_path), Path(output_dir)
    if not path.exists():
        raise ClassifierFileError(path, "cannot be read (No such file or directory)")
    dna = _encoder(dna_model, SequenceKind.DNA, weights_dir)
    protein = _encoder(protein_model, SequenceKind.PROTEIN, weights_dir)
    chunk_nt = _chunk_nt(path) if chunk_nt is None else chunk_nt
    if chunk_nt < 1:
        raise ConfigurationError(f"a chunk of {chunk_nt} nucleotides: it must have at least 1")
    try:
        with path.open("rb") as file:
            source_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            tensors, batch_norm_eps = read_published(file)
        _check_width(tensors, dna, protein)
    except OSError as error:
        raise ClassifierFileError(path, f"cannot be read ({error.strerror or error})") from error
    except RefusedPickleError as error:
        raise ClassifierFileError(path, str(error)) from error
    if (folder / CARD_NAME).exists() and read_card(folder).source_sha256 != source_sha256:
        raise ConfigurationError(f"{folder} holds another classifier: use another folder")
    weights = save(tensors)
    card = ClassifierCard(
        name=printable(path.stem),
        chunk_nt=chunk_nt,
        hidden_dim=len(tensors["hidden_layer.bias"]),
        batch_norm_eps=batch_norm_eps,
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        source_sha256=source_sha256,
        dna_model=dna,
        protein_model=protein,
    )
    durable.write_bytes(folder / WEIGHTS_NAME, weights)
    durable.write_bytes(folder / CARD_NAME, card.to_json(source_file=printable(path.name)).encode())
    return card


def _encoder(name: str, kind: SequenceKind, weights_dir: Path | None) -> Encoder:
    if name not in MODELS:
        known = [spec.name for spec in MODELS.values() if spec.family.sequence_kind is kind]
        raise ConfigurationError(f"{name!r} is no registered model: name one of {', '.join(known)}")
    spec = MODELS[name]
    if spec.family.sequence_kind is not kind:
        raise ConfigurationError(f"{name} embeds {spec.family.sequence_kind}: name a model of {kind}")
    sha256 = spec.sha256
    if sha256 is None:
        with suppress(WeightsError):  # not on this machine
            sha256 = durable.sha256_of(locate_weights(name, weights_dir=weights_dir))
    return Encoder(name=name, sha256=sha256, hidden_dim=spec.hidden_dim)


def _chunk_nt(path: Path) -> int:
    found = _CHUNK_IN_NAME.match(path.name)
    if found is None:
        what = "its name does not begin with 300_ or 500_: give the length of its chunks with --chunk"
        raise ConfigurationError(f"{path}: {what}")
    return int(found[1])


def _check_width(tensors: dict[str, FloatArray], dna: Encoder, protein: Encoder) -> None:
    takes, given = tensors["hidden_layer.weight"].shape[1], dna.hidden_dim + protein.hidden_dim
    if takes != given:
        message = (
            f"it takes {takes:,} features, {dna.name} ({dna.hidden_dim:,}) and {protein.name} ({protein.hidden_dim:,}) "
            f"give {given:,}: name the models that it was trained with"
        )
        raise RefusedPickleError(message)
