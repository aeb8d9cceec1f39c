"""
A DNABERT-S on disk, read without executing its content, and its tokens.

A checkpoint is the published ``pytorch_model.bin`` or safetensors. Gives the encoder's tensors by the published names
without the prefix ``bert.``, pooler and language-model head, and the configuration: from the safetensors metadata, else
``config.json`` beside the weights, else DNABERT-S's own. The two are checked against each other.

Tokens are made by the ``tokenizers`` library from the published ``tokenizer.json``, which is bundled: its 4,096 tokens
are the vocabulary of every DNA model here. Gives the ids of the published tokenizer, [CLS] and [SEP] included; an IUPAC
letter besides A, C, G and T is [UNK], as there, and a letter of no nucleotide is an error. Never truncates, pads or
upper-cases. Legend: T packed tokens, S sequences.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.errors import SequenceError, WeightsError
from virnucpro.models.encoders.esm2_checkpoint import check_numbers, check_shapes, load_pickled, reading_checkpoint
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR
from virnucpro.run_folders import read_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from numpy.typing import NDArray


CONFIG_KEY = "config"
CONFIG_NAME = "config.json"
BUNDLED_TOKENIZER = BUNDLED_WEIGHTS_DIR / DEFAULT_DNA_MODEL / "tokenizer.json"
"""DNABERT-S's published file, truncation and padding switched off."""
TOKENIZER_NAME = "tokenizer.json"
"""The same beside a published checkpoint."""

NUCLEOTIDE_LETTERS = "ACGTRYSWKMBDHVN"
_NO_NUCLEOTIDE = re.compile(f"[^{NUCLEOTIDE_LETTERS}]")

_NOT_THE_ENCODER = re.compile(r"^(cls|pooler|classifier)\.|^encoder\.alibi$|^embeddings\.(position|token_type)_ids$")


@dataclass(frozen=True, kw_only=True)
class MosaicBertConfig:
    """Shape of a MosaicBERT encoder, by the names of its ``config.json``; the defaults are DNABERT-S's."""

    vocab_size: int = 4096
    hidden_size: int = 768
    """Width D of the stream and of an embedding."""
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    """Heads N; D is a multiple of N."""
    intermediate_size: int = 3072
    """Width F of the gated feed-forward."""
    type_vocab_size: int = 2
    """Token types; only the first is used."""
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        check_numbers(self, self.hidden_size, self.num_attention_heads)

    @classmethod
    def from_json(cls, text: str) -> MosaicBertConfig:
        """Read a published ``config.json``; unknown fields are ignored, another model is a ValueError."""
        values: dict[str, Any] = json.loads(text)
        if values.get("model_type", "bert") != "bert" or "alibi_starting_size" not in values:
            raise ValueError("not a MosaicBERT: no alibi_starting_size")
        if values.get("hidden_act", "gelu") != "gelu":
            raise ValueError(f"hidden_act is {values['hidden_act']!r}, only gelu is known")
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_json(self) -> str:
        return json.dumps({"model_type": "bert", "hidden_act": "gelu", "alibi_starting_size": 512, **asdict(self)})


def open_dnabert_checkpoint(path: Path, *, vocabulary: int) -> tuple[MosaicBertConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the encoder's tensors as stored; ``WeightsError`` where damaged or foreign."""
    with reading_checkpoint(path, "a DNABERT-S checkpoint"):
        if path.suffix == ".safetensors":
            config, tensors = _read_safetensors(path)
        else:
            config, tensors = _config_beside(path), load_pickled(path)
        named = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        named = {name: tensor for name, tensor in named.items() if not _NOT_THE_ENCODER.search(name)}
        stated: object = config
        if config == MosaicBertConfig() and not (path.parent / CONFIG_NAME).exists():
            stated = f"{config}, taken for it as no {CONFIG_NAME} is beside it"
        check_shapes(path, "DNABERT-S encoder", stated, named, _expected_shapes(config, len(named)))
    if config.vocab_size != vocabulary:
        raise WeightsError(path.stem, f"{path} has {config.vocab_size} tokens, the tokenizer has {vocabulary}")
    return config, named


def _read_safetensors(path: Path) -> tuple[MosaicBertConfig, dict[str, torch.Tensor]]:
    from safetensors import safe_open  # noqa: PLC0415  models without a file (gpu_check) do without

    with safe_open(path, framework="pt", device="cpu") as file:
        inside = (file.metadata() or {}).get(CONFIG_KEY)
        config = _config_beside(path) if inside is None else MosaicBertConfig.from_json(inside)
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def _config_beside(path: Path) -> MosaicBertConfig:
    beside = path.parent / CONFIG_NAME
    config = MosaicBertConfig()
    if beside.exists():
        with reading_checkpoint(beside, "the configuration of a DNABERT-S"):
            config = MosaicBertConfig.from_json(read_bytes(beside).decode())
    return config


def _expected_shapes(config: MosaicBertConfig, most_layers: int) -> dict[str, tuple[int, ...]]:
    width, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, width),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, width),
    }
    of_layer: dict[str, tuple[int, ...]] = {
        "attention.self.Wqkv": (3 * width, width),
        "attention.output.dense": (width, width),
        "attention.output.LayerNorm": (width,),
        "mlp.wo": (width, inner),
        "mlp.layernorm": (width,),
    }
    modules: dict[str, tuple[int, ...]] = {"embeddings.LayerNorm": (width,)}
    for number in range(min(config.num_hidden_layers, most_layers)):  # the file may state any number
        modules |= {f"encoder.layer.{number}.{name}": shape for name, shape in of_layer.items()}
        shapes[f"encoder.layer.{number}.mlp.gated_layers.weight"] = (2 * inner, width)
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes


class DnaTokenizer:
    """Turns nucleotides into packed token ids; those below ``num_special`` are special tokens."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415  models without a file (gpu_check) do without

        self._bpe = Tokenizer.from_file(str(BUNDLED_TOKENIZER))
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.vocabulary: int = self._bpe.get_vocab_size()
        ids = self._bpe.get_vocab()
        self.cls_id, self.sep_id, self.mask_id = (ids[name] for name in ("[CLS]", "[SEP]", "[MASK]"))
        self.num_special = 1 + max(number for name, number in ids.items() if name.startswith("["))

    @classmethod
    def of_checkpoint(cls, weights_path: Path) -> DnaTokenizer:
        """Return the tokenizer for *weights_path*: the bundled one, which a file beside the weights must equal."""
        beside = weights_path.parent / TOKENIZER_NAME
        if beside.exists() and _model_of(beside) != _model_of(BUNDLED_TOKENIZER):
            what = f"{beside} differs from the tokens of DNABERT-2 and DNABERT-S, the only supported vocabulary"
            raise WeightsError(weights_path.stem, what)
        return cls()

    def encode(self, sequences: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """
        Pack *sequences* of upper-case IUPAC letters as tokens, each between [CLS] and [SEP].

        Returns:
            ``input_ids_T`` int64, shape (T,), and the tokens of each sequence, [CLS] and [SEP] included, int32, (S,).

        Raises:
            SequenceError: A letter of no nucleotide; names the sequence by its number in the batch, from 1.
        """
        for number, letters in enumerate(sequences, start=1):
            if wrong := _NO_NUCLEOTIDE.search(letters):
                raise SequenceError(f"sequence {number} of the batch", _not_dna(wrong))
        # one call a sequence: a batch call of the library would start threads of its own
        ids_of = [self._bpe.encode(letters).ids for letters in sequences]
        lengths_S = np.array([len(ids) for ids in ids_of], dtype=np.int32)
        return np.concatenate([np.array(ids, dtype=np.int64) for ids in ids_of]), lengths_S


def _not_dna(wrong: re.Match[str]) -> str:
    letter = wrong.group()
    advice = "write T for U" if letter == "U" else "is this a protein? This model takes DNA"
    return f"letter {wrong.start() + 1} is {letter!a}, which stands for no nucleotide of DNA: {advice}"


def _model_of(path: Path) -> object:
    """Return what decides the ids; merges are written as one text or as two, depending on the library's version."""
    try:
        model = json.loads(read_bytes(path))["model"]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        return model["type"], model["vocab"], merges, model["unk_token"], model.get("fuse_unk", False)
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise WeightsError(path.parent.name, f"{path} cannot be read ({type(error).__name__}: {error})") from error
