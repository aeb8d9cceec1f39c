"""
What ``gpu_check.py`` computes with: models of the published shapes with random weights, sequences, and their FLOPs.

Random weights are drawn so that states stay of order one through all layers: products keep the size of their input,
and what a layer adds shrinks with the depth. Legend: L layers, D model width, n tokens of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from virnucpro.data.collators import PackedBatch
from virnucpro.data.packing import plan_blocks
from virnucpro.models.encoders.esm2_checkpoint import ROTARY_NAME, Architecture
from virnucpro.models.esm2_flash import PackedESM2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEED = 20261121
MASK = 32
BOS, EOS, FIRST_LETTER, LAST_LETTER = 0, 2, 4, 23

ESM2 = {
    "8M": Architecture(num_layers=6, hidden_dim=320, attention_heads=20),
    "650M": Architecture(num_layers=33, hidden_dim=1280, attention_heads=20),
    "3B": Architecture(num_layers=36, hidden_dim=2560, attention_heads=40),
}
TINY = Architecture(num_layers=2, hidden_dim=64, attention_heads=4)

TOKENS_OF_A_CHUNK = 168
"""Residues of a frame of a 500-nt chunk, 166, with BOS and EOS."""


def random_esm2(
    architecture: Architecture, device: torch.device, dtype: torch.dtype, *, seed: int = SEED
) -> PackedESM2:
    """Make an ESM-2 of random weights; the same seed gives the same weights in every dtype on a kind of device."""
    with torch.device("meta"):
        model = PackedESM2(architecture, mask_idx=MASK)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    generator = torch.Generator(device).manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        if name == ROTARY_NAME:
            half = architecture.head_dim // 2
            state[name] = 10000.0 ** -(torch.arange(half, device=device, dtype=torch.float32) / half)
        else:
            state[name] = draw(name, shape, architecture.num_layers, generator, device).to(dtype)
    model.load_state_dict(state, assign=True)
    model.prepare_for_inference()
    return model


def randomise(model: torch.nn.Module, num_layers: int, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model that is on the meta device random weights on *device*."""
    generator = torch.Generator(device).manual_seed(SEED)
    state = {
        name: draw(name, tuple(x.shape), num_layers, generator, device).to(dtype)
        for name, x in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(requires_grad=False)


def draw(
    name: str, shape: tuple[int, ...], num_layers: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    draw = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if "norm" in name.lower():
        return 0.02 * draw + (1.0 if name.endswith("weight") else 0.0)
    if len(shape) == 1:
        return 0.02 * draw
    if "embed" in name.lower():
        return draw
    adds_to_the_stream = any(part in name for part in ("out_proj", "fc2", "output.dense", "mlp.wo"))
    return draw * shape[-1] ** -0.5 * ((2 * num_layers) ** -0.5 if adds_to_the_stream else 1.0)


def chunk_tokens(num_sequences: int) -> list[int]:
    """Return the tokens of frames of 500-nt chunks: all equal."""
    return [TOKENS_OF_A_CHUNK] * num_sequences


def uniprot_tokens(num_sequences: int) -> list[int]:
    """Return tokens of sequences of UniProt-like lengths (median 287 residues, truncated at 1,022), longest first."""
    residues = np.random.default_rng(SEED).lognormal(5.66, 0.72, size=num_sequences)
    return sorted((np.clip(residues, 8, 1022).astype(int) + 2).tolist(), reverse=True)


def dna_tokens(num_sequences: int) -> list[int]:
    """Return BPE tokens of 500-nt chunks, 80 to 130 with [CLS] and [SEP]; not sorted: the chunks are equally long."""
    return np.random.default_rng(SEED).integers(80, 131, size=num_sequences).tolist()


def blocks_of(tokens: Sequence[int], *, token_budget: int) -> Iterator[PackedBatch]:
    """Pack random sequences of *tokens* tokens as a run would; page-locked where there is a GPU."""
    rng = np.random.default_rng(SEED)
    for block in plan_blocks(tokens, token_budget=token_budget):
        batch = random_batch([tokens[number] for number in block], rng, first=block.start)
        yield batch.pin_memory() if torch.cuda.is_available() else batch


def random_batch(lengths: Sequence[int], rng: np.random.Generator, *, first: int = 0) -> PackedBatch:
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(FIRST_LETTER, LAST_LETTER + 1, size=int(starts[-1]))
    ids[starts[:-1]], ids[starts[1:] - 1] = BOS, EOS
    numbers = range(first, first + len(lengths))
    return PackedBatch(
        positions=tuple(numbers),
        sequence_ids=tuple(f"s{number}" for number in numbers),
        input_ids_T=torch.from_numpy(ids),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        lengths=tuple(int(length) for length in lengths),
    )


def esm2_flops(architecture: Architecture, tokens: Sequence[int]) -> float:
    """Count the useful operations of a forward pass: 24·L·D² + 4·n·D·L a token."""
    layers, width = architecture.num_layers, architecture.hidden_dim
    return float(sum(n * layers * (24 * width**2 + 4 * n * width) for n in tokens))


def mosaic_bert_flops(config: Any, tokens: Sequence[int]) -> float:
    """Count those of a MosaicBERT with F the width of the feed-forward: L·(8·D² + 6·D·F + 4·n·D) a token."""
    layers, width, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    return float(sum(n * layers * (8 * width**2 + 6 * width * inner + 4 * n * width) for n in tokens))


def share_overlapped(copies: Sequence[tuple[float, float]], computations: Sequence[tuple[float, float]]) -> float:
    """
    Return the share of the copies' time in which something was computed.

    Args:
        copies: (start, end) of each.
        computations: (start, end) of each, in the same unit; they may overlap one another.
    """
    busy: list[list[float]] = []
    for start, end in sorted(computations):
        if busy and start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], end)
        else:
            busy.append([start, end])
    both = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in busy)
    total = sum(end - start for start, end in copies)
    return both / total if total else 0.0
