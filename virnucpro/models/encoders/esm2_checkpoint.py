"""
An ESM-2 on disk, read without executing its content, and its tokens.

A checkpoint is fair-esm's ``.pt`` or safetensors. Gives the encoder's tensors by fair-esm's names
(``layers.0.fc1.weight``), without the language-model and contact heads, and the architecture that the checkpoint
states, checked against each other. Depth, width and heads come from the file, never from its name. So do the rotary
frequencies: published checkpoints hold them rounded to half precision, and recomputed ones move an embedding by up to
6e-4.

The tokens are those of fair-esm's ``BatchConverter``; a letter without a token is an error that names it, where
fair-esm stops with a bare ``KeyError``. Legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from virnucpro.errors import ResultError, SequenceError, WeightsError, is_of_memory, printable
from virnucpro.in_child import read_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig


ARCHITECTURE_KEY = "architecture"

_FAIR_ESM_PREFIX = re.compile(r"^encoder\.(sentence_encoder\.)?")
_NOT_THE_ENCODER = re.compile(r"^(lm_head|contact_head)\.")
_ROTARY_SUFFIX = ".rot_emb.inv_freq"
ROTARY_NAME = "rotary_frequencies"
"""The one tensor here that fair-esm keeps in every layer."""
_ABSENT = -1
_ASKED_FOR = re.compile(r"GLOBAL (\S+)")
_MOST_LETTERS = 100


@dataclass(frozen=True, kw_only=True)
class Architecture:
    num_layers: int
    hidden_dim: int
    """Width D of the stream and of an embedding."""
    attention_heads: int
    """Heads N; D is a multiple of 2N."""
    token_dropout: bool = True
    """Whether embeddings are scaled by the share of tokens that training left unmasked."""
    vocabulary: int = 33

    def __post_init__(self) -> None:
        check_numbers(self, self.hidden_dim, 2 * self.attention_heads)

    @property
    def head_dim(self) -> int:
        """Width H of a head."""
        return self.hidden_dim // self.attention_heads

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def open_checkpoint(path: Path, *, vocabulary: int) -> tuple[Architecture, dict[str, torch.Tensor]]:
    """Return architecture and the encoder's tensors as stored, by fair-esm's names; ``WeightsError`` where damaged."""
    with reading_checkpoint(path, "an ESM-2 checkpoint in fair-esm's layout"):
        architecture, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_fair_esm(path)
        tensors = {name: tensor for name, tensor in tensors.items() if not _NOT_THE_ENCODER.search(name)}
        tensors = _with_one_rotary(path, tensors)
        expected = _expected_shapes(replace(architecture, vocabulary=vocabulary), len(tensors))
        check_shapes(path, "ESM-2 encoder", architecture, tensors, expected)
    return architecture, tensors


@contextmanager
def reading_checkpoint(path: Path, kind: str) -> Iterator[None]:
    """Turn every error of a damaged or foreign file into a WeightsError: it cannot be read, or is not *kind*."""
    from safetensors import SafetensorError  # noqa: PLC0415  models without a file (gpu_check) do without

    try:
        yield
    except WeightsError:
        raise
    except (pickle.UnpicklingError, SafetensorError, ResultError, EOFError, OSError, RuntimeError) as error:
        reason = str(getattr(error, "what", error)).strip().partition("\n")[0] or "it is cut short"
        if isinstance(error, pickle.UnpicklingError):  # whose first lines say how to run what the file asks for
            asked = _ASKED_FOR.search(str(error))
            what = (
                "it is not a file of weights alone"
                if asked is None
                else f"it asks for {printable(asked[1][:_MOST_LETTERS])}"
            )
            reason = f"refused: {what}; nothing in it was run"
        raise WeightsError(path.stem, f"{path} cannot be read ({reason}): fetch it again") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise WeightsError(path.stem, f"{path} is not {kind} ({type(error).__name__}: {error})") from error


def load_pickled(path: Path) -> dict[str, Any]:
    """Load a ``.pt``, mapped if it can be, without executing it; ResultError where it crashes or takes too much."""
    load = partial(torch.load, path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))

    def try_to_load(_: Path) -> None:
        try:
            load()
        except Exception as error:  # raised again below
            if is_of_memory(error):
                raise

    read_in_child(path, try_to_load)
    contents: dict[str, Any] = load()
    return contents


def check_numbers(stated: Architecture | MosaicBertConfig, width: int, divisor: int) -> None:
    """Raise ValueError where a checkpoint states impossible numbers, or a *width* that is no multiple of *divisor*."""
    for field in fields(stated):
        value, most = getattr(stated, field.name), {"int": 1 << 31, "float": 1.0}.get(str(field.type))
        if most and (type(value).__name__ != field.type or not 0 < value < most):
            raise ValueError(f"{field.name} is not between 0 and {most}")
    if width % divisor:
        raise ValueError(f"its width, {width}, is no multiple of {divisor}")


def check_shapes(
    path: Path, kind: str, stated: object, tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]
) -> None:
    """Raise WeightsError where a checkpoint's tensors differ from the architecture that it states."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise WeightsError(path.stem, f"{path} does not hold the {kind} that it states ({stated}): see {differing[:3]}")
    if sum(tensor.nbytes for tensor in tensors.values()) > path.stat().st_size:
        raise WeightsError(path.stem, f"{path} states more numbers than it holds: fetch it again")


def _read_fair_esm(path: Path) -> tuple[Architecture, dict[str, torch.Tensor]]:
    """Read a ``.pt`` with a ``cfg`` that is a namespace, the one class it may hold besides tensors."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        contents = load_pickled(path)
    settings = contents["cfg"]["model"]
    tensors = {_FAIR_ESM_PREFIX.sub("", name): tensor for name, tensor in contents["model"].items()}
    architecture = Architecture(
        num_layers=settings.encoder_layers,
        hidden_dim=settings.encoder_embed_dim,
        attention_heads=settings.encoder_attention_heads,
        token_dropout=settings.token_dropout,
        vocabulary=len(tensors["embed_tokens.weight"]),
    )
    return architecture, tensors


def _read_safetensors(path: Path) -> tuple[Architecture, dict[str, torch.Tensor]]:
    from safetensors import safe_open  # noqa: PLC0415  models without a file (gpu_check) do without

    with safe_open(path, framework="pt", device="cpu") as file:
        architecture = Architecture(**json.loads(file.metadata()[ARCHITECTURE_KEY]))
        return architecture, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def _with_one_rotary(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace the rotary frequencies of every layer, which are the same, by one tensor."""
    frequencies = [tensor for name, tensor in tensors.items() if name.endswith(_ROTARY_SUFFIX)]
    if not frequencies or not all(torch.equal(frequencies[0], other) for other in frequencies):
        raise WeightsError(path.stem, f"{path} has no rotary frequencies that all layers share: it is not an ESM-2")
    others = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ROTARY_SUFFIX)}
    return {**others, ROTARY_NAME: frequencies[0].clone()}  # a view of a mapped file would keep all of it in memory


def _expected_shapes(architecture: Architecture, most_layers: int) -> dict[str, tuple[int, ...]]:
    width, ffn_width = architecture.hidden_dim, 4 * architecture.hidden_dim
    of_layer: dict[str, tuple[int, ...]] = {
        f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
    }
    of_layer |= {"fc1": (ffn_width, width), "fc2": (width, ffn_width)}
    of_layer |= {"self_attn_layer_norm": (width,), "final_layer_norm": (width,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (architecture.vocabulary, width)}
    shapes[ROTARY_NAME] = (architecture.head_dim // 2,)
    layers = range(min(architecture.num_layers, most_layers))  # the file may state any number
    modules = {f"layers.{i}.{name}": shape for i in layers for name, shape in of_layer.items()}
    for name, shape in {**modules, "emb_layer_norm_after": (width,)}.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


class ProteinTokenizer:
    """Turns residues into packed token ids; *letters* are all letters that have a token."""

    def __init__(self) -> None:
        # imported here: packed tokens without a tokenizer (benchmarks/gpu_check.py) need no fair-esm
        from esm.data import Alphabet  # noqa: PLC0415

        self.alphabet = Alphabet.from_architecture("ESM-1b")
        self.letters = frozenset(token for token in self.alphabet.all_toks if len(token) == 1)
        self._id_of_byte = np.full(256, _ABSENT, dtype=np.int64)
        for letter in self.letters:
            self._id_of_byte[ord(letter)] = self.alphabet.get_idx(letter)

    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """
        Pack *sequences* of upper-case one-letter codes as tokens, each between BOS and EOS.

        Returns:
            ``input_ids_T`` int64, shape (T,), and the tokens of each sequence, BOS and EOS included, int32, (S,).

        Raises:
            SequenceError: A letter has no token; names the sequence by its number in the batch, from 1.
        """
        lengths_S = np.array([len(residues) + 2 for residues in sequences], dtype=np.int32)
        # latin-1 keeps one byte a letter; what it cannot hold ("?") has no token either
        raw = "\0".join(["", *(residues + "\0" for residues in sequences)]).encode("latin-1", "replace")
        letters_T = np.frombuffer(raw, dtype=np.uint8)
        input_ids_T = self._id_of_byte[letters_T]
        ends_S = np.cumsum(lengths_S)
        input_ids_T[ends_S - lengths_S] = self.alphabet.cls_idx
        input_ids_T[ends_S - 1] = self.alphabet.eos_idx
        absent = np.flatnonzero(input_ids_T == _ABSENT)
        if len(absent):
            number = int(np.searchsorted(ends_S, absent[0], side="right"))
            position = int(absent[0] - (ends_S[number] - lengths_S[number]))
            letter = sequences[number][position - 1]
            raise SequenceError(
                f"sequence {number + 1} of the batch",
                f"residue {position} is {letter!a}, which has no token in ESM-2's alphabet",
            )
        return input_ids_T, lengths_S
