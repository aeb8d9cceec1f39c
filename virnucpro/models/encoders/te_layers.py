"""
ESM-2's layers by NVIDIA's TransformerEngine (extra ``te``): the weights of the packed layers, in its kernels.

A layer there computes GELU by tanh, not by erf. Written by the source of TransformerEngine 2.20.2; no GPU has run it,
so its rows are compared with those of the packed layers before it is used. Legend: T packed tokens, D model width.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from torch import nn

    from virnucpro.models.encoders.esm2_checkpoint import Architecture

PACKAGE = "transformer_engine"
CAPABILITY = (9, 0)
"""Least compute capability for which it gives packed sequences to cuDNN, not to an attention that pads them all."""
LENGTH_STEP = 64
"""Positions are a multiple of it, as where TransformerEngine counts them itself: cuDNN plans for fewer lengths."""
LEAST_COSINE = 0.999

# queries, keys and values are one product in both, in this order, and a rotary pair is two neighbouring channels
_NAMES = {
    "self_attn_layer_norm": "self_attention.layernorm_qkv.layer_norm_",
    "qkv_proj": "self_attention.layernorm_qkv.",
    "out_proj": "self_attention.proj.",
    "final_layer_norm": "layernorm_mlp.layer_norm_",
    "fc1": "layernorm_mlp.fc1_",
    "fc2": "layernorm_mlp.fc2_",
}


@dataclass(frozen=True)
class Engine:
    """Layers that stand in for the packed ones, with name and version; without any, why not (empty: not installed)."""

    layers: tuple[EngineLayer, ...] = ()
    name: str = ""
    reason: str = ""


class EngineLayer:
    """A layer of TransformerEngine over the parameters of a packed one, called in the same way."""

    def __init__(self, packed: nn.Module, architecture: Architecture, package: ModuleType) -> None:
        parameters = dict(packed.named_parameters())
        self._layer: nn.Module = package.TransformerLayer(
            architecture.hidden_dim,
            4 * architecture.hidden_dim,
            architecture.attention_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="padding",
            params_dtype=parameters["fc1.weight"].dtype,
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            rotary_pos_interleaved=True,
            attn_input_format="thd",
            device="meta",
        ).eval()
        for name, parameter in parameters.items():
            module, kind = name.split(".")
            owner, _, own_name = f"{_NAMES[module]}{kind}".rpartition(".")
            setattr(self._layer.get_submodule(owner), own_name, parameter)

    def __call__(
        self, x_TD: torch.Tensor, angles: torch.Tensor, _kernel: object, cu_seqlens: torch.Tensor, _lengths: object
    ) -> torch.Tensor:
        bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        longest = {"max_seqlen_q": len(angles), "max_seqlen_kv": len(angles)}
        out_TD: torch.Tensor = self._layer(x_TD, rotary_pos_emb=angles, **bounds, **longest)
        return out_TD


def rotary_angles(frequencies: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the angle of each channel at each position, float32, shape (positions, 1, 1, head width)."""
    num_positions = -(-longest // LENGTH_STEP) * LENGTH_STEP
    positions = torch.arange(num_positions, device=frequencies.device, dtype=torch.float32)
    return torch.outer(positions, frequencies).repeat_interleave(2, dim=1)[:, None, None]


def choose_engine(
    packed: Sequence[nn.Module], architecture: Architecture, rows_by: Callable[[Engine], torch.Tensor]
) -> Engine:
    """Return TransformerEngine's layers where *rows_by* them are those by the packed layers, with the reason."""
    weight = packed[0].get_parameter("fc1.weight")
    try:
        name = f"transformer-engine {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return Engine()
    if weight.device.type != "cuda" or weight.dtype not in {torch.float16, torch.bfloat16}:
        return Engine(reason=f"{name} is for GPUs, in float16 and bfloat16")
    if torch.cuda.get_device_capability(weight.device) < CAPABILITY:
        return Engine(reason=f"{name} needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} for packed sequences")
    try:
        package = importlib.import_module(f"{PACKAGE}.pytorch")
        engine = Engine(tuple(EngineLayer(layer, architecture, package) for layer in packed), name, f"{name} computes")
        cosine = float(functional.cosine_similarity(rows_by(engine), rows_by(Engine())).min())
    except torch.OutOfMemoryError:  # the device is full, whether or not TransformerEngine works
        raise
    except Exception as error:  # noqa: BLE001  not built for this torch, no cuDNN, no C compiler: packed layers work
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Engine(reason=f"{name} does not run here ({cause[:200]})")
    if not cosine >= LEAST_COSINE:  # nor if it is NaN
        return Engine(reason=f"rows by {name} differ: cosine {cosine:.4f}")
    return engine
