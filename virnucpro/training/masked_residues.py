"""
Masked-residue prediction: windows cut from proteins, their masking, and the loss of an ESM-2 on them.

The recipe is ESM-2's (Lin et al. 2023): 15 % of the residues are to be predicted, of these 80 % are masked, 10 %
replaced by a random residue, 10 % left. A batch holds windows of one length, so nothing is padded. All randomness
comes from the numpy generator given. Legend: B windows of a batch, L tokens of a window (BOS and EOS included), M
residues to predict, D model width, N heads, H head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from esm.model.esm2 import ESM2
    from esm.modules import TransformerLayer
    from numpy.typing import NDArray

    from virnucpro.models.tokenizer import ProteinTokenizer

STANDARD_RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
PREDICTED_SHARE = 0.15
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1
SHORTEST_WINDOW_RESIDUES = 24
"""Residues: a shorter remainder of a protein joins no batch."""


@dataclass(frozen=True)
class MaskedBatch:
    """Windows with some residues hidden."""

    tokens_BL: torch.Tensor
    """Input ids, int64, shape (B, L)."""
    positions_M: torch.Tensor
    """Where to predict: positions in the flattened (B*L,) tokens, int64."""
    targets_M: torch.Tensor
    """The true ids there, int64."""

    def to(self, device: torch.device) -> MaskedBatch:
        """Return the batch on *device*."""
        return MaskedBatch(self.tokens_BL.to(device), self.positions_M.to(device), self.targets_M.to(device))


def epoch_windows(
    proteins: Sequence[NDArray[np.int64]], *, window_residues: int, batch_tokens: int, random: np.random.Generator
) -> Iterator[list[NDArray[np.int64]]]:
    """
    Cut every protein once into windows and batch windows of about equal length, in a random order.

    Args:
        proteins: Token ids of each protein's residues, without BOS and EOS.
        window_residues: Most residues of a window; a longer protein is cut from a random offset on.
        batch_tokens: Most tokens of a batch.
        random: Source of the offsets and the order.

    Yields:
        Lists of windows of one length: each batch is cut to its shortest window.
    """
    windows: list[NDArray[np.int64]] = []
    for residues in proteins:
        # at least half a window before the first cut, so that no protein loses more than a short end
        offset = int(random.integers(window_residues // 2, window_residues + 1))
        cuts = [0, *range(offset, len(residues), window_residues), len(residues)]
        if len(residues) <= window_residues:
            cuts = [0, len(residues)]
        pieces = [residues[start:stop] for start, stop in pairwise(cuts)]
        windows.extend(piece for piece in pieces if len(piece) >= SHORTEST_WINDOW_RESIDUES)
    order = random.permutation(len(windows))
    by_length = sorted(order, key=lambda number: len(windows[number]))
    batches, start = [], 0
    while start < len(by_length):
        shortest = len(windows[by_length[start]])
        stop = start + max(batch_tokens // (shortest + 2), 1)
        batches.append([windows[number][:shortest] for number in by_length[start:stop]])
        start = stop
    for number in random.permutation(len(batches)):
        yield batches[number]


def mask_residues(
    windows: Sequence[NDArray[np.int64]],
    tokenizer: ProteinTokenizer,
    random: np.random.Generator,
    *,
    predicted_share: float = PREDICTED_SHARE,
    masked_share: float = MASKED_SHARE,
    random_share: float = RANDOM_SHARE,
) -> MaskedBatch:
    """
    Choose the residues to predict and hide them.

    Args:
        windows: Token ids of the residues of windows of one length.
        tokenizer: Whose alphabet the ids are of.
        random: Source of the choice.
        predicted_share: Share of the residues that are to be predicted.
        masked_share: Share of these that are masked.
        random_share: Share of these that are replaced by any residue; the rest stays.

    Returns:
        The batch; each window is between BOS and EOS, which are never chosen.
    """
    alphabet = tokenizer.alphabet
    standard = np.array([alphabet.get_idx(letter) for letter in STANDARD_RESIDUES])
    residues_BR = np.stack(windows)
    chosen_BR = (random.random(residues_BR.shape) < predicted_share) & np.isin(residues_BR, standard)
    fate_BR = random.random(residues_BR.shape)
    hidden_BR = residues_BR.copy()
    hidden_BR[chosen_BR & (fate_BR < masked_share)] = alphabet.mask_idx
    replaced_BR = chosen_BR & (fate_BR >= 1 - random_share)
    hidden_BR[replaced_BR] = random.choice(standard, size=int(replaced_BR.sum()))
    edges = ((0, 0), (1, 1))
    tokens_BL = np.pad(hidden_BR, edges, constant_values=alphabet.cls_idx)
    tokens_BL[:, -1] = alphabet.eos_idx
    return MaskedBatch(
        torch.from_numpy(tokens_BL),
        torch.from_numpy(np.flatnonzero(np.pad(chosen_BR, edges))),
        torch.from_numpy(residues_BR[chosen_BR]),
    )


def masked_loss(model: ESM2, batch: MaskedBatch) -> torch.Tensor:
    """Return the mean cross-entropy of *batch* in nats per predicted residue, a scalar with its graph."""
    hidden_BLD = hidden_states(model, batch.tokens_BL)
    logits_MV = model.lm_head(hidden_BLD.flatten(0, 1)[batch.positions_M])
    return functional.cross_entropy(logits_MV.float(), batch.targets_M)


def hidden_states(model: ESM2, tokens_BL: torch.Tensor) -> torch.Tensor:
    """
    Run fair-esm's ESM-2 on windows without padding, with PyTorch's own attention kernel, several times as fast.

    Args:
        model: The module whose weights are trained.
        tokens_BL: Input ids, int64, shape (B, L).

    Returns:
        What ``model(tokens_BL, repr_layers=[model.num_layers])`` has as its last representation, shape (B, L, D).
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

    Attention proper runs in float32 under autocast too: on a CPU its backward pass was faster than in bf16
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
