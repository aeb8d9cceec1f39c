"""
What a classifier was trained with, and the refusal to use it with anything else.

A classifier is a folder of ``model.safetensors`` and ``card.json``, with ``contig_model.safetensors.gz`` where it has a
contig model. The card's fields for readers only (data, training, measurements) are ignored here. Imports no torch, so
that a run is refused before any heavy work.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from virnucpro.allowed_roots import open_model
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.errors import (
    ClassifierFileError,
    ClassifierMismatchError,
    PathNotAllowedError,
    UnknownClassifierError,
    WeightsError,
)
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, ResolvedModel
from virnucpro.run_folders import only_regular

if TYPE_CHECKING:
    from virnucpro.arrays import FloatArray
    from virnucpro.config import ModelConfig


BUNDLED_CLASSIFIERS = (DEFAULT_CLASSIFIER,)
PUBLISHED_DNA_MODEL, PUBLISHED_PROTEIN_MODEL = "dnabert-s", "esm2_t36_3B_UR50D"
"""The models that the published classifiers were trained with."""

WEIGHTS_NAME, CONTIG_WEIGHTS_NAME, CARD_NAME = "model.safetensors", "contig_model.safetensors.gz", "card.json"
CARD_FORMAT = 1
CONTIG_MODEL_FORMAT = 4
"""Of ``contig_model.safetensors.gz``: its tensors, and how a score is made of them."""
NUM_CLASSES = 2
"""Others and virus, in this order."""
DEFAULT_THRESHOLD = 0.5
"""P(virus) from which a contig is called viral, where a card has no better value."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    name: str
    """Registered name, or the stem of the checkpoint's file."""
    sha256: str | None
    """Hex sha256 of its weights; None where it is unknown."""
    hidden_dim: int

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str) and bool(self.name), "an encoder has no name")
        _require(self.sha256 is None or isinstance(self.sha256, str), f"the sha256 of {self.name} is no text")
        _require(_is_count(self.hidden_dim), f"the width of {self.name} is no positive number")


@dataclass(frozen=True, kw_only=True)
class ContigModelCard:
    weights_sha256: str
    """Hex sha256 of ``contig_model.safetensors.gz``."""
    format: int = CONTIG_MODEL_FORMAT

    def __post_init__(self) -> None:
        _require(isinstance(self.weights_sha256, str), "the weights_sha256 of its contig model is no text")
        known = f"the format of its contig model is {self.format!r}, not {CONTIG_MODEL_FORMAT}"
        _require(self.format == CONTIG_MODEL_FORMAT, known)


@dataclass(frozen=True, kw_only=True)
class ClassifierCard:
    name: str
    chunk_nt: int
    """Nucleotides of the chunks of its training."""
    also_chunk_nt: tuple[int, ...] = ()
    """Nucleotides of other chunks that it was measured on and may be used with."""
    dna_model: Encoder
    """Its embeddings are the first columns of the features, the protein model's the others."""
    protein_model: Encoder
    hidden_dim: int
    batch_norm_eps: float = 1e-5
    threshold: float = DEFAULT_THRESHOLD
    """P(virus) from which a contig is called viral by default."""
    weights_sha256: str
    source_sha256: str | None = None
    """Hex sha256 of the file that it was converted from; None where it was trained here."""
    worth: str = ""
    """Its measured quality, in one sentence that accompanies its calls."""
    contig_model: ContigModelCard | None = None
    """The model that scores whole contigs; None where a contig's score is made of its frames' scores only."""

    def __post_init__(self) -> None:
        _require(isinstance(self.name, str) and self.name.isprintable() and bool(self.name), "no printable name")
        _require(_is_count(self.chunk_nt), "chunk_nt is no positive number of nucleotides")
        _require(all(_is_count(nt) for nt in self.also_chunk_nt), "also_chunk_nt is no list of positive numbers")
        _require(_is_count(self.hidden_dim), "hidden_dim is no positive number")
        _require(_is_share(self.threshold), f"threshold is {self.threshold!r}, not between 0 and 1")
        _require(_is_share(self.batch_norm_eps), f"batch_norm_eps is {self.batch_norm_eps!r}")
        _require(isinstance(self.weights_sha256, str), "weights_sha256 is no text")
        _require(self.source_sha256 is None or isinstance(self.source_sha256, str), "source_sha256 is no text")
        _require(isinstance(self.worth, str), "worth is no text")

    @property
    def chunk_choice(self) -> str:
        return " or ".join(str(nt) for nt in (self.chunk_nt, *self.also_chunk_nt)) + " nt"

    @property
    def input_dim(self) -> int:
        return self.dna_model.hidden_dim + self.protein_model.hidden_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        of_hidden = (self.hidden_dim,)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_layer.weight": (self.hidden_dim, self.input_dim),
            "output_layer.weight": (NUM_CLASSES, self.hidden_dim),
            "output_layer.bias": (NUM_CLASSES,),
        }
        names = ("hidden_layer.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")
        return shapes | dict.fromkeys(names, of_hidden)

    def check(
        self,
        *,
        chunk_nt: int | None = None,
        dna: ResolvedModel | ModelConfig | None = None,
        protein: ResolvedModel | ModelConfig | None = None,
    ) -> None:
        """Refuse chunks and encoders other than those of training, naming all; None is not checked."""
        differences: dict[str, tuple[str, str]] = {}
        if chunk_nt not in (None, self.chunk_nt, *self.also_chunk_nt):
            differences["chunks of"] = (self.chunk_choice, f"{chunk_nt} nt")
        for what, trained, given in (("DNA", self.dna_model, dna), ("protein", self.protein_model, protein)):
            if given is not None:
                name = given.name if isinstance(given, ResolvedModel) else given.model_name
                is_same = given.weights_sha256 == trained.sha256 if trained.sha256 else name == trained.name
                other_weights = " (other weights of that name)" * (name == trained.name)
                if not is_same:
                    differences[f"embeddings of {what} by"] = (trained.name, name + other_weights)
                elif given.hidden_dim not in (0, trained.hidden_dim):
                    differences[f"embeddings of {what} of width"] = (str(trained.hidden_dim), str(given.hidden_dim))
        if differences:
            raise ClassifierMismatchError(self.name, differences)

    def to_json(self, **for_readers: object) -> str:
        """Return the text of ``card.json``; *for_readers* is added to what programs need."""
        values = asdict(self)
        for name in ("also_chunk_nt", "contig_model"):
            if not values[name]:
                del values[name]
        return json.dumps({"format": CARD_FORMAT, "kind": "classifier", **values, **for_readers}, indent=2) + "\n"


def read_card(folder: Path) -> ClassifierCard:
    path = folder / CARD_NAME
    try:
        values: dict[str, Any] = json.loads(_content(path))
        _require(values.get("kind") == "classifier", "it is of something else than a classifier")
        _require(values.get("format") == CARD_FORMAT, f"its format is {values.get('format')!r}, not {CARD_FORMAT}")
        known = {name: values[name] for name in ClassifierCard.__dataclass_fields__ if name in values}
        for name in ("dna_model", "protein_model"):
            known[name] = Encoder(**known[name])
        known["also_chunk_nt"] = tuple(known.get("also_chunk_nt", ()))
        if known.get("contig_model") is not None:
            of_model = known["contig_model"]
            known["contig_model"] = ContigModelCard(**{name: of_model[name] for name in ("weights_sha256", "format")})
        return ClassifierCard(**known)
    except PathNotAllowedError:
        raise
    except OSError as error:
        raise WeightsError(folder.name, f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightsError(folder.name, f"{path} is not a classifier's card ({error})") from error


def read_weights(folder: Path, card: ClassifierCard) -> dict[str, FloatArray]:
    """Return a classifier's tensors by name, finite and of the shapes of its card; WeightsError where they are not."""
    path = folder / WEIGHTS_NAME
    try:
        tensors = load(_checked(path, card.weights_sha256, card))
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(card.name, f"{path} is not a safetensors file of float32 ({error})") from error
    expected, found = card.tensor_shapes(), {name: tensor.shape for name, tensor in tensors.items()}
    differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if differing:
        raise WeightsError(card.name, f"{path} does not hold the classifier that its card states: see {differing[:3]}")
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            raise WeightsError(card.name, f"{path}: {name} is not of finite float32 numbers")
    if not (tensors["bn1.running_var"] > 0).all():
        raise WeightsError(card.name, f"{path}: bn1.running_var has a variance that is not above zero")
    return tensors


def check_contig_weights(folder: Path, card: ClassifierCard) -> bytes:
    assert card.contig_model is not None
    return _checked(folder / CONTIG_WEIGHTS_NAME, card.contig_model.weights_sha256, card)


def _content(path: Path) -> bytes:
    """Return the content of a classifier's file; a given path must be where models may be."""
    is_bundled = path.parent.parent == BUNDLED_WEIGHTS_DIR
    with open(path, "rb", opener=only_regular if is_bundled else open_model) as file:
        return file.read()


def _checked(path: Path, expected: str, card: ClassifierCard) -> bytes:
    try:
        data = _content(path)
    except OSError as error:
        raise WeightsError(card.name, f"{path} cannot be read ({error.strerror})") from error
    found = sha256(data).hexdigest()
    if found != expected:
        what = f"{path} has sha256 {found}, its card says {expected}: convert or install the classifier again"
        raise WeightsError(card.name, what)
    return data


def locate_classifier(name_or_path: str | Path) -> Path:
    """Return the folder of a bundled classifier by its name, or the given folder of a converted or trained one."""
    if str(name_or_path) in BUNDLED_CLASSIFIERS:
        return BUNDLED_WEIGHTS_DIR / str(name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if path.is_file():
        what = "a classifier is a folder; make one with `virnucpro models convert-classifier"
        raise ClassifierFileError(path, f"{what} {path.name} -o DIR` and give that")
    raise UnknownClassifierError(str(name_or_path), BUNDLED_CLASSIFIERS)


def classifiers_table() -> list[ClassifierCard]:
    return [read_card(BUNDLED_WEIGHTS_DIR / name) for name in BUNDLED_CLASSIFIERS]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_share(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)
