"""
How well an encoder does on held-out proteins: loss against a unigram model, retrieval against composition.

Every chosen residue is masked. Training leaves a tenth of them in place, and copying the visible token is worth about
0.15 nats of the training loss; here it gains nothing. Legend: M residues to predict, R records, D
model width, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from tools.encoders.masked_residues import STANDARD_RESIDUES, hidden_states, mask_residues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from esm.model.esm2 import ESM2
    from numpy.typing import NDArray

    from tools.encoders.masked_tokens import MaskedBatch
    from virnucpro.models.encoders.esm2_checkpoint import ProteinTokenizer

MASK_SEED = 20_000
"""Seed of the fixed mask."""
MAX_RESIDUES = 1022
_BATCH_TOKENS = 16_384
_SAY_NOTHING = ("uncharacterized", "putative uncharacterized", "predicted protein", "hypothetical", "unknown")


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Cross-entropy in nats per masked token of the held-out part, the same tokens for both."""

    encoder: float
    unigram: float
    num_masked: int

    @property
    def gain(self) -> float:
        """Nats per masked token by which the encoder is better."""
        return self.unigram - self.encoder

    def as_card(self, counted: str) -> dict[str, float]:
        """Return the card's section, with the number of masked tokens under the name *counted*."""
        return {"encoder": self.encoder, "unigram": self.unigram, counted: self.num_masked, "gain": self.gain}


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How often a protein's nearest neighbour among the held-out ones has the same protein name."""

    num_queries: int
    """Proteins that share their name with another one."""
    embedding: float
    """Share found by cosine of mean embeddings."""
    composition: float
    """Share found by cosine of residue frequencies."""


def held_out_loss(
    model: ESM2,
    tokenizer: ProteinTokenizer,
    *,
    held_out: Sequence[NDArray[np.int64]],
    training: Sequence[NDArray[np.int64]],
) -> HeldOutLoss:
    """Compare the encoder with the residue frequencies of the training part, on the first 1022 residues."""
    device = model.embed_tokens.weight.device
    standard = np.array([tokenizer.alphabet.get_idx(letter) for letter in STANDARD_RESIDUES])
    counts_V = np.bincount(np.concatenate(training), minlength=len(tokenizer.alphabet))
    nats_V = np.full(len(counts_V), np.inf)
    nats_V[standard] = -np.log(counts_V[standard] / counts_V[standard].sum())
    random = np.random.default_rng(MASK_SEED)
    batches = (
        mask_residues(
            [held_out[number][:MAX_RESIDUES] for number in numbers],
            tokenizer,
            random,
            masked_share=1.0,
            random_share=0.0,
        ).to(device)
        for numbers in _equal_length_batches(held_out)
    )
    return loss_against_unigram(batches, lambda batch: _logits(model, batch), nats_V)


def loss_against_unigram(
    batches: Iterable[MaskedBatch],
    logits_of: Callable[[MaskedBatch], torch.Tensor],
    unigram_nats_V: NDArray[np.float64],
) -> HeldOutLoss:
    """
    Compare an encoder's predictions with one distribution for all positions.

    *logits_of* returns shape (M, V); *unigram_nats_V* is the negative log of each token's share of the training part.
    """
    encoder_sum, unigram_sum, num_masked = 0.0, 0.0, 0
    for batch in batches:
        with torch.inference_mode():
            encoder_sum += float(functional.cross_entropy(logits_of(batch), batch.targets_M, reduction="sum"))
        unigram_sum += float(unigram_nats_V[batch.targets_M.numpy(force=True)].sum())
        num_masked += len(batch.targets_M)
    return HeldOutLoss(encoder=encoder_sum / num_masked, unigram=unigram_sum / num_masked, num_masked=num_masked)


def mean_embeddings(
    model: ESM2, tokenizer: ProteinTokenizer, proteins: Sequence[NDArray[np.int64]]
) -> NDArray[np.float32]:
    """Return each protein's last states averaged over its first 1022 residues, shape (R, D)."""
    device = model.embed_tokens.weight.device
    embeddings_RD = np.empty((len(proteins), model.embed_dim), dtype=np.float32)
    nothing = np.random.default_rng(0)
    for numbers in _equal_length_batches(proteins):
        windows = [proteins[number][:MAX_RESIDUES] for number in numbers]
        batch = mask_residues(windows, tokenizer, nothing, predicted_share=0.0).to(device)
        with torch.inference_mode():
            states_BLD = hidden_states(model, batch.tokens_BL)
        embeddings_RD[numbers] = states_BLD[:, 1:-1].mean(dim=1).cpu().numpy()
    return embeddings_RD


def compositions(proteins: Sequence[str]) -> NDArray[np.float32]:
    """Return the share of each standard residue, shape (R, 20)."""
    counts = [[residues.count(letter) for letter in STANDARD_RESIDUES] for residues in proteins]
    counts_R20 = np.array(counts, dtype=np.float32)
    shares: NDArray[np.float32] = counts_R20 / np.maximum(counts_R20.sum(axis=1, keepdims=True), 1)
    return shares


def protein_names(descriptions: Sequence[str]) -> list[str | None]:
    """Return the lower-case name in each UniProt description; None where it is uninformative or occurs once."""
    names = [text.partition(" OS=")[0].replace("(Fragment)", "").strip().lower() for text in descriptions]
    how_many = Counter(names)
    return [None if how_many[name] == 1 or not name or name.startswith(_SAY_NOTHING) else name for name in names]


def retrieval(
    names: Sequence[str | None],
    groups: NDArray[np.int64],
    embeddings_RD: NDArray[np.float32],
    compositions_R20: NDArray[np.float32],
    *,
    across_groups: bool,
) -> Retrieval:
    """
    Return how often a named protein's nearest neighbour has the same name, for both kinds of vector (centred).

    *across_groups* skips the protein's own group of linked proteins, so that near copies are not what is found.
    """
    same_name = np.array([[a is not None and a == b for b in names] for a in names])
    barred = groups[:, None] == groups[None, :] if across_groups else np.eye(len(names), dtype=bool)
    queries = np.flatnonzero((same_name & ~barred).any(axis=1))
    found = []
    for vectors in (embeddings_RD, compositions_R20):
        centred = vectors - vectors.mean(axis=0)
        unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
        cosines = np.where(barred, -np.inf, unit @ unit.T)
        nearest = cosines[queries].argmax(axis=1)
        found.append(float(same_name[queries, nearest].mean()))
    return Retrieval(num_queries=len(queries), embedding=found[0], composition=found[1])


def _logits(model: ESM2, batch: MaskedBatch) -> torch.Tensor:
    states_BLD = hidden_states(model, batch.tokens_BL)
    logits_MV: torch.Tensor = model.lm_head(states_BLD.flatten(0, 1)[batch.positions_M])
    return logits_MV


def _equal_length_batches(proteins: Sequence[NDArray[np.int64]]) -> Iterator[list[int]]:
    """Yield the numbers of proteins in batches of exactly one length each, shortest first."""
    used_residues = [min(len(residues), MAX_RESIDUES) for residues in proteins]
    order = sorted(range(len(proteins)), key=used_residues.__getitem__)
    batch: list[int] = []
    for number in order:
        full = bool(batch) and (len(batch) + 1) * (used_residues[number] + 2) > _BATCH_TOKENS
        if full or (batch and used_residues[number] != used_residues[batch[0]]):
            yield batch
            batch = []
        batch.append(number)
    yield batch
