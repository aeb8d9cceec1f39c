"""
Turns a published classifier's file into safetensors and a card; nothing in the file is executed.

The file is of ``torch.save``, a whole module or its ``state_dict``. torch reads it as weights alone, with one class in
the place of the module's that only keeps their state. Guarantees the published parts by name, float32, finite, and of
consistent shapes; anything else is refused with a sentence.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from virnucpro import durable
from virnucpro.allowed_roots import open_model
from virnucpro.choices import SequenceKind
from virnucpro.errors import ClassifierFileError, ConfigurationError, ResultError, WeightsError, printable
from virnucpro.in_child import read_in_child
from virnucpro.models.classifier_files.card import (
    CARD_NAME,
    NUM_CLASSES,
    PUBLISHED_DNA_MODEL,
    PUBLISHED_PROTEIN_MODEL,
    WEIGHTS_NAME,
    ClassifierCard,
    Encoder,
    read_card,
)
from virnucpro.models.encoders.esm2_checkpoint import check_shapes, load_pickled, reading_checkpoint
from virnucpro.models.registry import MODELS, locate_weights

_CHUNK_IN_NAME = re.compile(r"(300|500)_")
_CLASSES = (
    "__main__.MLPClassifier",  # of the published script, run as a script or imported
    "train.MLPClassifier",
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.batchnorm.BatchNorm1d",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.activation.ReLU",
    "torch.nn.modules.activation.Softmax",
)
_KIND = "published classifier (linear, batch norm, linear)"
_DEFAULT_EPS = 1e-5
"""PyTorch's, where the file states none."""
_UNUSED = "bn1.num_batches_tracked"


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
        chunk_nt: Nucleotides of the chunks of its training; by default the number that the file's name begins with.
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
        with open(path, "rb", opener=open_model) as file:
            source_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        tensors, batch_norm_eps = _read_published(path)
        _check_width(path, tensors, dna, protein)
    except OSError as error:
        raise ClassifierFileError(path, f"cannot be read ({error.strerror or error})") from error
    except WeightsError as error:
        raise ClassifierFileError(path, error.what.removeprefix(f"{path} ")) from error
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


def _check_width(path: Path, tensors: dict[str, torch.Tensor], dna: Encoder, protein: Encoder) -> None:
    takes, given = tensors["hidden_layer.weight"].shape[1], dna.hidden_dim + protein.hidden_dim
    if takes != given:
        message = (
            f"it takes {takes:,} features, {dna.name} ({dna.hidden_dim:,}) and {protein.name} ({protein.hidden_dim:,}) "
            f"give {given:,}: name the models that it was trained with"
        )
        raise WeightsError(path.stem, message)


class _Part:
    """Stands for every class of a saved module: keeps its state, and runs nothing."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


def _read_published(path: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Return a classifier's tensors by name, and the epsilon of its batch norm; WeightsError where it is none."""
    with reading_checkpoint(path, f"a {_KIND}"):
        read_in_child(path, _check_sums)
        with torch.serialization.safe_globals([(_Part, name) for name in _CLASSES]):
            contents: Any = load_pickled(path)
        found, eps = _parts_of_module(contents) if isinstance(contents, _Part) else (contents, _DEFAULT_EPS)
        if not (isinstance(eps, float) and 0 < eps < 1):
            shown = eps if isinstance(eps, float) else f"a {type(eps).__name__}"  # never its text: the file decides it
            raise WeightsError(path.stem, f"its batch norm adds {shown} to the variance")
        tensors = {name: tensor.detach() for name, tensor in found.items() if name != _UNUSED}
        width, num_features = tensors["hidden_layer.weight"].shape
        expected: dict[str, tuple[int, ...]] = {
            "hidden_layer.weight": (width, num_features),
            "hidden_layer.bias": (width,),
        }
        expected |= {f"bn1.{name}": (width,) for name in ("weight", "bias", "running_mean", "running_var")}
        expected |= {"output_layer.weight": (NUM_CLASSES, width), "output_layer.bias": (NUM_CLASSES,)}
        check_shapes(path, _KIND, f"{num_features} -> {width} -> {NUM_CLASSES}", tensors, expected)
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32 or not tensor.numel() or not tensor.isfinite().all():
                raise WeightsError(path.stem, f"{name} is not of finite numbers in float32")
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, eps


def _check_sums(path: Path) -> None:
    """Raise ResultError where a record differs from its checksum, which torch does not look at."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ResultError(path, f"no archive of torch.save, or cut short: {error}") from error
    if damaged is not None:
        raise ResultError(path, f"{damaged[:100]!r} in it is damaged")


def _parts_of_module(module: _Part) -> tuple[dict[str, Any], object]:
    """Return the tensors of a whole module by name, and the epsilon of its batch norm."""
    layers = module.state["_modules"]
    found: dict[str, Any] = {}
    for layer, part in layers.items():
        for group in ("_parameters", "_buffers", "_modules"):
            found |= {f"{layer}.{name}": value for name, value in part.state[group].items() if value is not None}
    return found, layers["bn1"].state.get("eps", _DEFAULT_EPS)
