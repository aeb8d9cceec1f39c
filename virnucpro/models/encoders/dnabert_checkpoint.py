"""
DNABERT-S checkpoints on disk: the published ``pytorch_model.bin`` or safetensors, read without executing their content.

Gives the encoder's tensors by the published names without the prefix ``bert.``, pooler and language-model head, and the
configuration: from the safetensors metadata, else ``config.json`` beside the weights, else DNABERT-S's own. The two are
checked against each other.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from virnucpro.errors import WeightsError
from virnucpro.models.encoders.esm2_checkpoint import check_shapes, reading_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_KEY = "config"
CONFIG_NAME = "config.json"

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
    """
    Return the configuration and the encoder's tensors on the CPU as stored.

    Raises:
        WeightsError: The file is damaged, or not a MosaicBERT encoder of that vocabulary.
    """
    with reading_checkpoint(path, "a DNABERT-S checkpoint"):
        config, tensors = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    named = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if not _NOT_THE_ENCODER.search(name)}
    check_shapes(path, "DNABERT-S encoder", config, named, _expected_shapes(config))
    if config.vocab_size != vocabulary:
        raise WeightsError(path.stem, f"{path} has {config.vocab_size} tokens, the tokenizer has {vocabulary}")
    return config, named


def _read_pickle(path: Path) -> tuple[MosaicBertConfig, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return _config_beside(path), dict(tensors.items())


def _read_safetensors(path: Path) -> tuple[MosaicBertConfig, dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        inside = (file.metadata() or {}).get(CONFIG_KEY)
        config = _config_beside(path) if inside is None else MosaicBertConfig.from_json(inside)
        return config, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def _config_beside(path: Path) -> MosaicBertConfig:
    beside = path.parent / CONFIG_NAME
    return MosaicBertConfig.from_json(beside.read_text("utf-8")) if beside.is_file() else MosaicBertConfig()


def _expected_shapes(config: MosaicBertConfig) -> dict[str, tuple[int, ...]]:
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
    for number in range(config.num_hidden_layers):
        modules |= {f"encoder.layer.{number}.{name}": shape for name, shape in of_layer.items()}
        shapes[f"encoder.layer.{number}.mlp.gated_layers.weight"] = (2 * inner, width)
    for name, shape in modules.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    return shapes
