"""
Masked-token prediction on DNA: genomes, BPE tokens and the published head, for training a MosaicBERT.

The module trained is the one that embeds (``PackedMosaicBert``), with BERT's head for masked tokens on top, whose last
matrix is the token embeddings; its parameters have the published names. Legend: B windows of a batch, L tokens of a
window, M tokens to predict, T packed tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.encoders.evaluation import MASK_SEED, HeldOutLoss, loss_against_unigram
from tools.encoders.masked_tokens import MaskedBatch, MaskVocabulary, mask_tokens
from virnucpro.models.dnabert_s import PackedMosaicBert
from virnucpro.models.encoders.dnabert_checkpoint import CONFIG_KEY, DnaTokenizer, MosaicBertConfig
from virnucpro.training.genomes.related import reverse_complement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tools.encoders.training import TrainingSettings

EVALUATION_WINDOW_TOKENS = 126
EVALUATION_WINDOWS_A_RECORD = 8
"""Windows taken of each held-out record, evenly spaced: a long genome does not outweigh the others."""
_BATCH_WINDOWS = 64


class MaskedMosaicBert(nn.Module):
    """A MosaicBERT encoder with the head that predicts masked tokens, by the published names."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        self.bert = PackedMosaicBert(config)
        self.cls = nn.ModuleDict({"predictions": PredictionHead(config)})

    def forward(self, batch: MaskedBatch) -> torch.Tensor:
        """Return the logits of the chosen tokens of windows of one length, shape (M, V)."""
        num_windows, num_tokens = batch.tokens_BL.shape
        starts = torch.arange(num_windows + 1, dtype=torch.int32, device=batch.tokens_BL.device) * num_tokens
        x_TD = self.bert.last_states(batch.tokens_BL.flatten(), starts, [num_tokens] * num_windows)
        embeddings = self.bert.embeddings.word_embeddings.weight
        logits_MV: torch.Tensor = self.cls["predictions"](x_TD[batch.positions_M], embeddings)
        return logits_MV


class PredictionHead(nn.Module):
    """Dense, GELU, layer norm, then the token embeddings as the decoder, whose bias alone is the head's own."""

    def __init__(self, config: MosaicBertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.transform = nn.ModuleDict({"dense": nn.Linear(width, width), "LayerNorm": norm})
        self.decoder = nn.ParameterDict({"bias": torch.zeros(config.vocab_size)})

    def forward(self, x_MD: torch.Tensor, embeddings_VD: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (M, V)."""
        x_MD = self.transform["LayerNorm"](functional.gelu(self.transform["dense"](x_MD)))
        return functional.linear(x_MD, embeddings_VD, self.decoder["bias"])


class DnaObjective:
    """Masked tokens of genomes, predicted by a MosaicBERT; the second token type has no part in the loss."""

    untrained = "bert.pooler."  # there is none

    def __init__(self) -> None:
        self.tokenizer = DnaTokenizer()
        ordinary = np.arange(self.tokenizer.num_special, self.tokenizer.vocabulary)
        self.vocabulary = MaskVocabulary(self.tokenizer.cls_id, self.tokenizer.sep_id, self.tokenizer.mask_id, ordinary)

    def new_encoder(self, settings: TrainingSettings) -> MaskedMosaicBert:
        """Make the module: matrices of deviation 0.02 as published, those that end a branch smaller, as in GPT-2."""
        torch.manual_seed(settings.seed)
        config = MosaicBertConfig(
            vocab_size=self.tokenizer.vocabulary,
            hidden_size=settings.hidden_dim,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.attention_heads,
            intermediate_size=4 * settings.hidden_dim,
        )
        model = MaskedMosaicBert(config)
        branch_ends = ("output.dense.weight", "mlp.wo.weight")
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                shrink = math.sqrt(2 * settings.num_layers) if name.endswith(branch_ends) else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)
        return model

    def token_ids(self, letters: str) -> NDArray[np.int64]:
        """Return the tokens of one sequence, without [CLS] and [SEP]."""
        return self.tokenizer.encode([letters])[0][1:-1]

    def epoch_ids(self, genomes: Sequence[str], random: np.random.Generator) -> Sequence[NDArray[np.int64]]:
        """Tokenise one strand of each genome, chosen at random."""
        strands = random.integers(2, size=len(genomes)).tolist()
        return [
            self.token_ids(reverse_complement(letters) if strand else letters)
            for letters, strand in zip(genomes, strands, strict=True)
        ]

    def mask(self, windows: Sequence[NDArray[np.int64]], random: np.random.Generator) -> MaskedBatch:
        return mask_tokens(windows, self.vocabulary, random)

    def loss(self, model: MaskedMosaicBert, batch: MaskedBatch) -> torch.Tensor:
        """
        Return the mean loss of the hidden tokens.

        Attention is made of plain products: on a CPU the backward pass of PyTorch's fused kernel took 12 times as long
        as its forward pass (torch 2.13, AVX-512), and a step two thirds longer in all.
        """
        with sdpa_kernel(SDPBackend.MATH):
            return functional.cross_entropy(model(batch).float(), batch.targets_M)

    def unigram_nats(self, training: Sequence[str]) -> NDArray[np.float64]:
        """Return what each token costs by its share of the training records' tokens, one added to each count, (V,)."""
        counts_V = np.ones(self.tokenizer.vocabulary)
        for letters in training:
            counts_V += np.bincount(self.token_ids(letters), minlength=len(counts_V))
        shares_V = counts_V[self.vocabulary.ordinary] / counts_V[self.vocabulary.ordinary].sum()
        nats_V = np.full(len(counts_V), np.inf)
        nats_V[self.vocabulary.ordinary] = -np.log(shares_V)
        return nats_V

    def held_out_loss(
        self, model: MaskedMosaicBert, held_out: Sequence[str], unigram_nats_V: NDArray[np.float64]
    ) -> HeldOutLoss:
        """Compare the encoder with the token frequencies of the training part, on evenly spaced windows."""
        device = model.bert.embeddings.word_embeddings.weight.device
        batches = (batch.to(device) for batch in self._held_out_batches(held_out))
        return loss_against_unigram(batches, model, unigram_nats_V)

    def _held_out_batches(self, held_out: Sequence[str]) -> Iterator[MaskedBatch]:
        random = np.random.default_rng(MASK_SEED)
        windows = [window for letters in held_out for window in _spaced_windows(self.token_ids(letters))]
        for start in range(0, len(windows), _BATCH_WINDOWS):
            some = windows[start : start + _BATCH_WINDOWS]
            yield mask_tokens(some, self.vocabulary, random, masked_share=1.0, random_share=0.0)


def _spaced_windows(tokens: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return up to eight windows of *tokens*, evenly spaced, the first at its start; none of a shorter sequence."""
    num_windows = min(len(tokens) // EVALUATION_WINDOW_TOKENS, EVALUATION_WINDOWS_A_RECORD)
    starts = np.linspace(0, len(tokens) - EVALUATION_WINDOW_TOKENS, num_windows, dtype=np.int64).tolist()
    return [tokens[start : start + EVALUATION_WINDOW_TOKENS] for start in starts]


def save_masked_bert(model: MaskedMosaicBert, path: Path) -> None:
    """
    Write encoder and head in float32 under the published names, the configuration in the metadata.

    The decoder's matrix is skipped: it is the token embeddings.
    """
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt", CONFIG_KEY: model.bert.config.to_json()})
    path.chmod(0o644)  # safetensors lets only the owner read


def load_masked_bert(path: Path) -> MaskedMosaicBert:
    """Open what ``save_masked_bert`` wrote, on the CPU."""
    with safe_open(path, framework="pt") as file:
        model = MaskedMosaicBert(MosaicBertConfig.from_json(file.metadata()[CONFIG_KEY]))
    model.load_state_dict(load_file(path))
    return model.eval()
