"""
DNABERT-S over packed sequences: the MosaicBERT architecture, one stream of tokens, no padding.

MosaicBERT (Portes et al. 2023) is BERT (layer norm after each residual) with ALiBi instead of position embeddings and
a gated feed-forward; DNABERT-2 and DNABERT-S (Zhou et al. 2024) are models of it over BPE tokens of DNA. The modules
have the published names, so that a published checkpoint is their state. An embedding is the mean over all tokens,
[CLS] and [SEP] included, pooled in float32; no sequence is truncated. Legend: T packed tokens, S sequences, N heads, H
head width, D model width, F width of the feed-forward.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from virnucpro.choices import Precision
from virnucpro.models.attention import AttentionChoice, choose_attention
from virnucpro.models.encoders.attention_kernels import equal_length_attention
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer, open_dnabert_checkpoint
from virnucpro.models.encoders.fused_linear import FusedLinear, by_rows, fill_up, normalised, pack_layers
from virnucpro.models.encoders.loading import filled, own_tensors
from virnucpro.models.esm2_flash import DTYPES
from virnucpro.models.pooling import mean_over_tokens
from virnucpro.models.registry import locate_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.models.attention import AttentionKernel
    from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig


TRAINING_ATTENTION = AttentionChoice(
    "sdpa-equal-lengths", equal_length_attention, "it has a backward pass, and windows of one length are one call"
)
"""The kernel of a model that is not prepared for inference."""


def load_dnabert_s(
    model_name: str | Path, device: torch.device | str, *, precision: Precision | str = Precision.FP32
) -> tuple[PackedMosaicBert, DnaTokenizer]:
    """
    Open a DNABERT-S with weights on this machine, and its tokenizer; nothing of the checkpoint is executed.

    Args:
        model_name: Name in the registry, or path of a ``.bin``, ``.pt`` or ``.safetensors`` file.
        precision: Number format of the weights and the forward pass.

    Raises:
        UnknownModelError: Neither a registered name nor a path.
        WeightsError: The weights are absent, damaged, not those of a DNABERT-S, or made for another vocabulary.
    """
    weights_path = locate_weights(model_name)
    tokenizer = DnaTokenizer.of_checkpoint(weights_path)
    config, tensors = open_dnabert_checkpoint(weights_path, vocabulary=tokenizer.vocabulary)
    dtype = DTYPES[Precision(precision)]
    # taken out one by one, so that none is kept in two formats
    weights = ((name, tensors.pop(name).to(device, dtype)) for name in list(tensors))
    model = filled(lambda: PackedMosaicBert(config), weights)
    model.prepare_for_inference()
    own_tensors(model, weights_path)
    return model, tokenizer


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """
    Return ALiBi's slope of each head (Press et al. 2022, section 3 and its published code), float32, shape (N,).

    For a power of two n, head i of 1..n has ``2 ** (-8 i / n)``. Else the largest power of two below comes first, and
    every second slope of twice that power completes them.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power + 1, 2)]
    return torch.tensor(slopes + between[: num_heads - power])


class PackedMosaicBert(nn.Module):
    """The encoder, without pooler and heads, over packed tokens; its kernel has a backward pass until prepared."""

    alibi_slopes_N: torch.Tensor

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_dim = config.hidden_size
        self.embeddings = Embeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))})
        # float32 in every precision: kernels cast what they add to the scores, not the slopes
        self.register_buffer("alibi_slopes_N", alibi_slopes(config.num_attention_heads), persistent=False)
        self.attention = TRAINING_ATTENTION

    def prepare_for_inference(self) -> None:
        """Fix slopes, kernel and layout for the current device; the weights must not be moved or trained afterwards."""
        self.eval().requires_grad_(requires_grad=False)
        weight = self.embeddings.word_embeddings.weight
        self.alibi_slopes_N = alibi_slopes(self.config.num_attention_heads).to(weight.device)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        self.attention = choose_attention(weight.device, weight.dtype, head_dim=head_dim, alibi=True)
        self._attention_in_float32 = choose_attention(weight.device, torch.float32, head_dim=head_dim, alibi=True)
        pack_layers(self)

    @torch.inference_mode()
    def forward(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """
        Return ``embeddings_SD``, float32: the mean over all of each sequence's tokens of the last layer.

        Args:
            input_ids_T: Token ids, each sequence between [CLS] and [SEP], int64, shape (T,).
            cu_seqlens: First token of each sequence and, last, T; int32, shape (S+1,), on the model's device.
            lengths: Tokens of each sequence, on the host.
        """
        return mean_over_tokens(self.last_states(input_ids_T, cu_seqlens, lengths), cu_seqlens, lengths)

    @torch.inference_mode()
    def in_float32(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return what ``forward`` does, computed in float32 with the same weights: nothing of it overflows."""
        states = self._states(input_ids_T, cu_seqlens, lengths, self._attention_in_float32, torch.float32)
        (x_TD,) = deque(states, maxlen=1)
        return mean_over_tokens(x_TD, cu_seqlens, lengths)

    def last_states(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return the last layer's output, shape (T, D); with its graph, where gradients are on."""
        own = self.embeddings.word_embeddings.weight.dtype
        # not *_: that would keep every layer's states until the last is there
        (x_TD,) = deque(self._states(input_ids_T, cu_seqlens, lengths, self.attention, own), maxlen=1)
        return x_TD

    def _states(
        self,
        input_ids_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        attention: AttentionChoice,
        dtype: torch.dtype,
    ) -> Iterator[torch.Tensor]:
        num_tokens = input_ids_T.shape[0]
        input_ids_T, cu_seqlens, lengths = fill_up(input_ids_T, cu_seqlens, lengths)
        kernel = attention.for_forward_pass()
        x_TD = self.embeddings(input_ids_T, dtype)
        yield x_TD[:num_tokens]
        for layer in cast("nn.ModuleList", self.encoder["layer"]):
            x_TD = layer(x_TD, kernel, cu_seqlens, lengths, self.alibi_slopes_N)
            yield x_TD[:num_tokens]


class Embeddings(nn.Module):
    """Token and token-type embeddings, normalised; every token is of type 0, and positions have none."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, input_ids_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the states that the first layer takes, computed in *dtype*, shape (T, D)."""
        type_D = self.token_type_embeddings.weight[0].to(dtype)
        return normalised(self.LayerNorm, self.word_embeddings(input_ids_T).to(dtype) + type_D)


class Layer(nn.Module):
    """Attention, then the gated feed-forward, each with its residual and layer norm."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = GatedFeedForward(config)

    def forward(
        self,
        x_TD: torch.Tensor,
        kernel: AttentionKernel,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        alibi_slopes_N: torch.Tensor,
    ) -> torch.Tensor:
        return by_rows(self.mlp, self.attention(x_TD, kernel, cu_seqlens, lengths, alibi_slopes_N))


class Attention(nn.Module):
    """Self-attention with ALiBi; queries, keys and values in one product, as published."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = (config.num_attention_heads, width // config.num_attention_heads)
        self.self = nn.ModuleDict({"Wqkv": FusedLinear(width, 3 * width)})
        self.output = nn.ModuleDict(
            {"dense": FusedLinear(width, width), "LayerNorm": nn.LayerNorm(width, eps=config.layer_norm_eps)}
        )

    def forward(
        self,
        x_TD: torch.Tensor,
        kernel: AttentionKernel,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
        alibi_slopes_N: torch.Tensor,
    ) -> torch.Tensor:
        q_TNH, k_TNH, v_TNH = self.self["Wqkv"](x_TD).view(-1, 3, *self.heads).unbind(1)
        attended_TNH = kernel(q_TNH, k_TNH, v_TNH, cu_seqlens, lengths, alibi_slopes_N)
        dense = cast("FusedLinear", self.output["dense"])
        norm = cast("nn.LayerNorm", self.output["LayerNorm"])
        return normalised(norm, dense.add_to(x_TD, attended_TNH.flatten(1)))


class GatedFeedForward(nn.Module):
    """Gated linear unit: ``wo(gelu(first half) * second half)`` of one product, with exact (erf) GELU."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gated_layers = FusedLinear(width, 2 * inner, bias=False)
        self.wo = FusedLinear(inner, width)
        self.layernorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, value_TF = self.gated_layers(x_TD).chunk(2, dim=1)
        return normalised(self.layernorm, self.wo.add_to(x_TD, functional.gelu(gate_TF) * value_TF))
