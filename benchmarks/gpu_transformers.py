"""
The baseline: transformers' ESM-2 with the weights of ours, SDPA, in padded batches sorted by length, mean pooling.

Its rows are what ours are compared with, its tokens a second what ours are set beside.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import gpu_models
from benchmarks.gpu_measure import median_and_ends, rounds, timed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.gpu_measure import Check
    from virnucpro.data.collators import PackedBatch
    from virnucpro.models.encoders.esm2_checkpoint import Architecture

PAD = 1
NAMES = (
    (r"^layers\.", "encoder.layer."),
    (r"\.self_attn\.([qkv])_proj\.", lambda found: f".attention.self.{WORDS[found[1]]}."),
    (r"\.self_attn\.out_proj\.", ".attention.output.dense."),
    (r"\.self_attn_layer_norm\.", ".attention.LayerNorm."),
    (r"\.fc1\.", ".intermediate.dense."),
    (r"\.fc2\.", ".output.dense."),
    (r"\.final_layer_norm\.", ".LayerNorm."),
    (r"^embed_tokens\.", "embeddings.word_embeddings."),
    (r"^emb_layer_norm_after\.", "encoder.emb_layer_norm_after."),
)
"""From fair-esm's names of weights to those of transformers."""
WORDS = {"q": "query", "k": "key", "v": "value"}


def esm_model(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Make transformers' model with the weights of ``gpu_models.fair_esm_tensors``."""
    from transformers import EsmConfig, EsmModel  # noqa: PLC0415  may be absent

    config = EsmConfig(
        vocab_size=33,
        mask_token_id=gpu_models.MASK,
        pad_token_id=PAD,
        hidden_size=architecture.hidden_dim,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.attention_heads,
        intermediate_size=4 * architecture.hidden_dim,
        position_embedding_type="rotary",
        token_dropout=True,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        model = EsmModel(config, add_pooling_layer=False).to(dtype)
    own = {transformers_name(name): x for name, x in gpu_models.fair_esm_tensors(architecture, device, dtype).items()}
    absent, unknown = model.load_state_dict(own, strict=False)
    # what it makes itself, rotary frequencies and positions, and what embeddings do without
    if unexpected := [name for name in [*absent, *unknown] if not re.search("inv_freq|position|contact_head", name)]:
        raise RuntimeError(f"transformers names its weights otherwise: see {unexpected[:3]}")
    return model.eval()


def transformers_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def transformers_speed(
    check: Check, architecture: Architecture, tokens: Sequence[int], token_budget: int
) -> dict[str, Any]:
    """Measure it in fp16 with batches of *token_budget* tokens, padding included."""
    model = esm_model(architecture, check.device, torch.float16)
    (batch,) = gpu_models.blocks_of(sorted(tokens, reverse=True), token_budget=sum(tokens))
    padded = list(padded_batches(check, batch, token_budget))
    slots = sum(ids_SL.numel() for ids_SL, _ in padded)
    padded_rows(check, model, padded[:2])
    seconds = rounds(check, lambda: timed(check, lambda: padded_rows(check, model, padded)))
    speed = median_and_ends([sum(tokens) / each for each in seconds])
    return {
        "tokens_per_second": speed[0],
        "lowest_highest": speed[1:],
        "padding": 1 - sum(tokens) / slots,
    }


@torch.inference_mode()
def padded_rows(
    check: Check, model: torch.nn.Module, padded: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> np.ndarray:
    """Embed padded batches, the mean over the residues: tokens between BOS and EOS; shape (S, D)."""
    rows = []
    for ids_SL, mask_SL in padded:
        ids, mask = ids_SL.to(check.device, non_blocking=True), mask_SL.to(check.device, non_blocking=True)
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 1:-1].float()
        weights = mask[:, 2:, None].float()
        rows.append(((states * weights).sum(1) / weights.sum(1)).cpu().numpy())
    return np.concatenate(rows)


def padded_batches(check: Check, batch: PackedBatch, token_budget: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids and mask, shape (S, L) each, of a length-sorted *batch*, at most *token_budget* slots a batch."""
    sequences, start = batch.input_ids_T.split(list(batch.lengths)), 0
    while start < len(sequences):
        part = sequences[start : start + max(1, token_budget // len(sequences[start]))]
        start += len(part)
        ids = torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True, padding_value=PAD)
        mask = (torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in part])[:, None]).long()
        yield (ids.pin_memory(), mask.pin_memory()) if check.is_on_gpu else (ids, mask)
