"""
Masked-residue prediction: proteins and fair-esm's module, for training an ESM-2.

Legend: B windows of a batch, L tokens of a window (BOS and EOS included), M residues to predict, D model width, N
heads, H head width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from esm.model.esm2 import ESM2
from torch.nn import functional

from tools.encoders.masked_tokens import (
    MASKED_SHARE,
    PREDICTED_SHARE,
    RANDOM_SHARE,
    MaskedBatch,
    MaskVocabulary,
    mask_tokens,
)
from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from esm.modules import TransformerLayer
    from numpy.typing import NDArray

    from tools.encoders.training import TrainingSettings

STANDARD_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"


def new_encoder(settings: TrainingSettings) -> ESM2:
    """
    Make fair-esm's ESM-2 with weights that a small model trains well from.

    fair-esm's own start (embeddings with variance 1, which are the output layer too) begins at a loss of about 10
    nats. Here matrices start normal with a deviation of 0.02, those that end a residual branch with 0.02/sqrt(2 x
    layers), as in GPT-2 (Radford et al. 2019), embeddings with 0.05, biases at 0.
    """
    torch.manual_seed(settings.seed)
    model = ESM2(settings.num_layers, settings.hidden_dim, settings.attention_heads)
    branch_ends = ("out_proj.weight", "fc2.weight")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif name.startswith("embed_tokens"):
            torch.nn.init.normal_(parameter, std=0.05)
        elif parameter.ndim == 2:
            shrink = math.sqrt(2 * settings.num_layers) if name.endswith(branch_ends) else 1.0
            torch.nn.init.normal_(parameter, std=0.02 / shrink)
    return model


class ResidueObjective:
    """Masked residues of proteins, predicted by fair-esm's ESM-2; the contact head has no part in the loss."""

    untrained = "contact_head."

    def __init__(self) -> None:
        self.tokenizer = ProteinTokenizer()

    def new_encoder(self, settings: TrainingSettings) -> ESM2:
        return new_encoder(settings)

    def epoch_ids(
        self, proteins: Sequence[NDArray[np.int64]], random: np.random.Generator
    ) -> Sequence[NDArray[np.int64]]:
        del random
        return proteins

    def mask(self, windows: Sequence[NDArray[np.int64]], random: np.random.Generator) -> MaskedBatch:
        return mask_residues(windows, self.tokenizer, random)

    def loss(self, model: ESM2, batch: MaskedBatch) -> torch.Tensor:
        return masked_loss(model, batch)


def residue_vocabulary(tokenizer: ProteinTokenizer) -> MaskVocabulary:
    """Return ESM-2's ids; the twenty standard residues are the ordinary ones."""
    alphabet = tokenizer.alphabet
    standard = np.array([alphabet.get_idx(letter) for letter in STANDARD_RESIDUES])
    return MaskVocabulary(alphabet.cls_idx, alphabet.eos_idx, alphabet.mask_idx, standard)


def mask_residues(
    windows: Sequence[NDArray[np.int64]],
    tokenizer: ProteinTokenizer,
    random: np.random.Generator,
    *,
    predicted_share: float = PREDICTED_SHARE,
    masked_share: float = MASKED_SHARE,
    random_share: float = RANDOM_SHARE,
) -> MaskedBatch:
    """Choose the residues to predict and hide them: ``mask_tokens`` with the vocabulary of *tokenizer*."""
    return mask_tokens(
        windows,
        residue_vocabulary(tokenizer),
        random,
        predicted_share=predicted_share,
        masked_share=masked_share,
        random_share=random_share,
    )


def masked_loss(model: ESM2, batch: MaskedBatch) -> torch.Tensor:
    """Return the mean cross-entropy of *batch* in nats per predicted residue, a scalar with its graph."""
    hidden_BLD = hidden_states(model, batch.tokens_BL)
    logits_MV = model.lm_head(hidden_BLD.flatten(0, 1)[batch.positions_M])
    return functional.cross_entropy(logits_MV.float(), batch.targets_M)


def hidden_states(model: ESM2, tokens_BL: torch.Tensor) -> torch.Tensor:
    """
    Return ESM-2's last representation of windows without padding, shape (B, L, D).

    The numbers of ``model(tokens_BL, repr_layers=[model.num_layers])``, with PyTorch's attention kernel: several times
    as fast.
    """
    is_mask_BL = tokens_BL == model.mask_idx
    seen_B11 = 1 - is_mask_BL.float().mean(dim=1)[:, None, None]
    x_BLD = (
        model.embed_tokens(tokens_BL) * (~is_mask_BL)[:, :, None] * ((1 - PREDICTED_SHARE * MASKED_SHARE) / seen_B11)
    )
    for layer in model.layers:
        x_BLD = x_BLD + _attention(layer, layer.self_attn_layer_norm(x_BLD))
        x_BLD = x_BLD + layer.fc2(functional.gelu(layer.fc1(layer.final_layer_norm(x_BLD))))
    normalised_BLD: torch.Tensor = model.emb_layer_norm_after(x_BLD)
    return normalised_BLD


def _attention(layer: TransformerLayer, x_BLD: torch.Tensor) -> torch.Tensor:
    """
    Return self-attention with rotary positions over all L tokens of each window, shape (B, L, D).

    Attention itself runs in float32 under autocast, too: on a CPU its backward pass was faster than in bf16
    (a prototype's whole step: 17,000 against 12,300 tokens a CPU second, AVX-512, torch 2.13).
    """
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
    qkv_BLD = functional.linear(x_BLD, weight, bias).float()
    heads = (*x_BLD.shape[:2], 3, attention.num_heads, attention.head_dim)
    qkv_3BNLH = qkv_BLD.view(heads).permute(2, 0, 3, 1, 4)
    with torch.autocast(x_BLD.device.type, enabled=False):
        q_BNLH, k_BNLH = _rotate(qkv_3BNLH[:2], attention.rot_emb.inv_freq).unbind(0)
        out_BNLH = functional.scaled_dot_product_attention(q_BNLH, k_BNLH, qkv_3BNLH[2])
    projected_BLD: torch.Tensor = attention.out_proj(out_BNLH.transpose(1, 2).flatten(2))
    return projected_BLD


def _rotate(x_LH: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Turn channel i of a head together with channel i + H/2 by the token's angle; shape (..., L, H) as given."""
    angles_LH = torch.outer(torch.arange(x_LH.shape[-2], device=inv_freq.device, dtype=torch.float32), inv_freq)
    cos_LH, sin_LH = angles_LH.cos(), angles_LH.sin()
    half = x_LH.shape[-1] // 2
    turned_LH = x_LH.roll(half, dims=-1) * torch.cat((-sin_LH, sin_LH), dim=-1)
    return x_LH * torch.cat((cos_LH, cos_LH), dim=-1) + turned_LH
