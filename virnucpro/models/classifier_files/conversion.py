"""
Turns a published classifier's file into safetensors and a card, without torch; nothing in the file is executed.

The file is of ``torch.save``, a whole module or its ``state_dict``: a zip archive of a pickle and of plain numbers.
The pickle is read as data (``pickled``). Guarantees the published parts by name, float32, finite, contiguous, and of
consistent shapes; anything else is refused with a sentence.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from virnucpro import durable
from virnucpro.allowed_roots import open_model
from virnucpro.choices import SequenceKind
from virnucpro.errors import ClassifierFileError, ConfigurationError, WeightsError, printable
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
from virnucpro.models.classifier_files.pickled import (
    MAX_BYTES,
    MAX_SHOWN,
    MODULE_CLASSES,
    ORDERED_DICT,
    PARAMETER,
    TENSOR,
    Global,
    Made,
    Persistent,
    RefusedPickleError,
    read_pickle,
)
from virnucpro.models.registry import MODELS, locate_weights

if TYPE_CHECKING:
    from typing import BinaryIO

    from virnucpro.arrays import FloatArray


_CHUNK_IN_NAME = re.compile(r"(300|500)_")
_MAX_FILE_BYTES = 1 << 30
_MAX_LIST_BYTES = 1 << 16
_END_BYTES = 22
"""Of the record at the end of a zip archive (APPNOTE.TXT 4.3.16), whose comment has at most 65,535 bytes."""
_END64_BYTES = 56 + 20
"""Of the same in zip64 and what leads to it (4.3.14, 4.3.15)."""
_MAX_AXES = 2
_DEFAULT_EPS = 1e-5
"""PyTorch's, where the file states none."""
_LAYERS = {
    "hidden_layer": ("weight", "bias"),
    "bn1": ("weight", "bias", "running_mean", "running_var"),
    "output_layer": ("weight", "bias"),
}
_NAMES = [f"{layer}.{part}" for layer, parts in _LAYERS.items() for part in parts]
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


def read_published(file: BinaryIO) -> tuple[dict[str, FloatArray], float]:
    """Return a classifier's tensors by name, and the epsilon of its batch norm; RefusedPickleError where it is none."""
    size_bytes = os.fstat(file.fileno()).st_size
    if size_bytes > _MAX_FILE_BYTES:
        raise RefusedPickleError(f"it has {size_bytes:,} bytes, which no such classifier has")
    if (listed_bytes := _bytes_of_list(file, size_bytes)) > _MAX_LIST_BYTES:
        raise RefusedPickleError(f"its list of entries has {listed_bytes:,} bytes, a classifier's has a few hundred")
    file.seek(0)
    head = file.read(512)
    if not head.startswith(b"PK\x03\x04"):
        raise RefusedPickleError(_not_a_zip(head))
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _Entries(archive)
            described, eps = _describe(read_pickle(entries.read("data.pkl", MAX_BYTES)))
            tensors = {name: entries.tensor(name, described[name]) for name in _NAMES}
    except RefusedPickleError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise RefusedPickleError(f"the archive is damaged or truncated ({error}): get the file again") from error
    _check_shapes(tensors)
    return tensors, eps


def _bytes_of_list(file: BinaryIO, size_bytes: int) -> int:
    """Return the size of a zip archive's list of entries, the largest that it states; 0 where it is no archive."""
    start = file.seek(max(0, size_bytes - _END_BYTES - (1 << 16)))
    end = file.read()
    place = end.rfind(b"PK\x05\x06")
    if not 0 <= place <= len(end) - _END_BYTES:
        return 0
    stated: tuple[int, ...] = struct.unpack_from("<I", end, place + 12)
    if end[max(0, place - 20) : place].startswith(b"PK\x06\x07"):  # zip64: a second end, just before
        if place < _END64_BYTES or struct.unpack_from("<Q", end, place - 12)[0] != start + place - _END64_BYTES:
            raise RefusedPickleError("its list of entries is not where torch.save puts it")
        stated += struct.unpack_from("<Q", end, place - _END64_BYTES + 40)
    return max(stated)


def _check_shapes(tensors: dict[str, FloatArray]) -> None:
    weight_HD = tensors["hidden_layer.weight"]
    if weight_HD.ndim != 2 or 0 in weight_HD.shape:
        raise RefusedPickleError(f"hidden_layer.weight has the shape {weight_HD.shape}, which is no layer's")
    width = len(weight_HD)
    expected = {"hidden_layer.weight": weight_HD.shape, "output_layer.weight": (NUM_CLASSES, width)}
    expected["output_layer.bias"] = (NUM_CLASSES,)
    for name, tensor in tensors.items():
        if tensor.shape != expected.get(name, (width,)):
            raise RefusedPickleError(f"{name} has the shape {tensor.shape} instead of {expected.get(name, (width,))}")


def _not_a_zip(head: bytes) -> str:
    if head[257:262] == b"ustar":
        return "it is in PyTorch's old tar format, which is not read: get the file as PyTorch 1.6 or later saves it"
    if head[:1] == b"\x80":
        return "it is a bare pickle, PyTorch's format before 1.6, which is not read: get the file as later ones save it"
    return "it is not a file of PyTorch (no zip archive)" if head else "it is empty"


class _Entries:
    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        names = archive.namelist()
        pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise RefusedPickleError("the archive is not one that torch.save writes: it needs one data.pkl")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}constants.pkl" in names:
            raise RefusedPickleError("it is a TorchScript archive, not a saved module")
        has_order = f"{self._folder}byteorder" in names
        if has_order and self.read("byteorder", 16) != b"little":
            raise RefusedPickleError("its numbers are not little-endian")

    def read(self, name: str, max_bytes: int) -> bytes:
        try:
            info = self._archive.getinfo(self._folder + name)
        except KeyError as error:
            raise RefusedPickleError(f"the archive has no {name}") from error
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise RefusedPickleError(f"{name} is compressed or encrypted, which torch.save does not do")
        if info.file_size > max_bytes:
            raise RefusedPickleError(f"{name} has {info.file_size:,} bytes where at most {max_bytes:,} belong")
        return self._archive.read(info)

    def tensor(self, name: str, described: _Described) -> FloatArray:
        if described.storage_class != "torch.FloatStorage":
            raise RefusedPickleError(f"{name} is a {described.storage_class} instead of float32")
        num_bytes = described.storage_numel * np.dtype("<f4").itemsize
        data = self.read(f"data/{described.key}", num_bytes)
        if len(data) != num_bytes:
            raise RefusedPickleError(f"data/{described.key} has {len(data):,} bytes, the pickle says {num_bytes:,}")
        start, count = described.offset, math.prod(described.shape)
        if start + count > described.storage_numel:
            raise RefusedPickleError(f"{name} of shape {described.shape} is larger than what the file holds for it")
        numbers: FloatArray = np.frombuffer(data, dtype="<f4")[start : start + count].reshape(described.shape)
        if not np.isfinite(numbers).all():
            raise RefusedPickleError(f"{name} has a number that is not finite")
        return numbers


@dataclass(frozen=True)
class _Described:
    storage_class: str
    key: str
    storage_numel: int
    offset: int
    shape: tuple[int, ...]


def _describe(contents: object) -> tuple[dict[str, _Described], float]:
    """Return the tensors and the epsilon of a whole module, or of a dictionary of tensors."""
    if isinstance(contents, Made) and contents.by.name in MODULE_CLASSES:
        found, eps = _parts_of_module(contents)
    else:
        found = _items(contents, "the published classifier, a module or a dictionary of its tensors,")
        eps = _DEFAULT_EPS
    missing, besides = [name for name in _NAMES if name not in found], sorted(found.keys() - {*_NAMES, _UNUSED})
    if missing or besides:
        what = f"has no {missing[0]}" if missing else f"has {besides[0][:MAX_SHOWN]} besides"
        raise RefusedPickleError(f"it is not the published classifier (linear, batch norm, linear): it {what}")
    return {name: _tensor(name, found[name]) for name in _NAMES}, eps


def _parts_of_module(module: Made) -> tuple[dict[str, Any], float]:
    layers = _items(module.state.get("_modules"), "the module's parts")
    found: dict[str, Any] = {}
    for layer, described in layers.items():
        state = described.state if isinstance(described, Made) else {}
        for group in ("_parameters", "_buffers", "_modules"):
            items = _items(state.get(group), f"{group} of {layer[:MAX_SHOWN]}")
            found |= {f"{layer}.{name}": value for name, value in items.items() if value is not None}
    eps = layers["bn1"].state.get("eps", _DEFAULT_EPS) if "bn1" in layers else _DEFAULT_EPS
    if not (isinstance(eps, float) and 0 < eps < 1):
        shown = eps if isinstance(eps, float) else f"a {type(eps).__name__}"  # never its text, which the file decides
        raise RefusedPickleError(f"its batch norm adds {shown} to the variance")
    return found, eps


def _items(described: object, what: str) -> dict[str, Any]:
    if isinstance(described, Made) and described.by.name == ORDERED_DICT:
        return described.items
    if isinstance(described, dict):
        return described
    raise RefusedPickleError(f"{what} is not in it")


def _tensor(name: str, value: object) -> _Described:
    if isinstance(value, Made) and value.by.name == PARAMETER and value.arguments:
        value = value.arguments[0]
    match value:
        case Made(
            by=Global(name=made_by),
            arguments=(
                Persistent(("storage", Global(storage), str(key), str(), int(numel))),
                int(start),
                tuple(shape),
                tuple(strides),
                *_,
            ),
        ) if made_by == TENSOR:
            pass
        case _:
            raise RefusedPickleError(f"{name} is no tensor of the form that torch.save writes")
    if (
        len(shape) > _MAX_AXES
        or not (key.isascii() and key.isdecimal())
        or any(type(x) is not int or x < 0 for x in (numel, start, *shape))
    ):
        raise RefusedPickleError(f"{name} has an impossible place or shape")
    if list(strides) != [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]:
        raise RefusedPickleError(f"{name} is not stored row by row")
    return _Described(storage, key, numel, start, shape)
