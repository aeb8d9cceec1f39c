"""
What ``gpu_check.py`` computes with: models of the published shapes with random weights, sequences, and their FLOPs.

Lengths of proteins are drawn from those of ``examples/proteins.fasta``: 400 real proteins of 8 to 1,487 residues.

Random weights are drawn so that states stay of order one through all layers: products keep the size of their input,
and what a layer adds shrinks with the depth. Legend: L layers, D model width, n tokens of a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from virnucpro.data.collators import PackedBatch
from virnucpro.data.packing import plan_blocks
from virnucpro.models.dnabert_s import PackedMosaicBert
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.encoders.esm2_checkpoint import ROTARY_NAME, Architecture
from virnucpro.models.esm2_flash import packed_esm2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from virnucpro.models.esm2_flash import PackedESM2

PROTEINS = Path(__file__).resolve().parents[1] / "examples" / "proteins.fasta"
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


def random_esm2(architecture: Architecture, device: torch.device, dtype: torch.dtype) -> PackedESM2:
    """Make an ESM-2 of random weights, the same in every dtype on a kind of device."""
    tensors = fair_esm_tensors(architecture, device, dtype) | {ROTARY_NAME: rotary_frequencies(architecture)}
    return packed_esm2(architecture, tensors, device, dtype, mask_idx=MASK)


def fair_esm_tensors(
    architecture: Architecture, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Draw the weights of an ESM-2 by fair-esm's names, less the rotary frequencies."""
    width = architecture.hidden_dim
    of_layer = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
    of_layer |= {"fc1": (4 * width, width), "fc2": (width, 4 * width)}
    of_layer |= {"self_attn_layer_norm": (width,), "final_layer_norm": (width,)}
    modules = {f"layers.{n}.{name}": shape for n in range(architecture.num_layers) for name, shape in of_layer.items()}
    shapes = {"embed_tokens.weight": (architecture.vocabulary, width)}
    for name, shape in {**modules, "emb_layer_norm_after": (width,)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator(device).manual_seed(SEED)
    return {
        name: draw(name, shape, architecture.num_layers, generator, device).to(dtype) for name, shape in shapes.items()
    }


def rotary_frequencies(architecture: Architecture) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim)


def random_mosaic_bert(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> PackedMosaicBert:
    """Make a DNABERT-S of random weights, ready for inference."""
    config = mosaic_bert_config(is_tiny=is_tiny)
    with torch.device("meta"):
        model = PackedMosaicBert(config)
    randomise(model, config.num_hidden_layers, device, dtype)
    model.prepare_for_inference()
    return model


def mosaic_bert_config(*, is_tiny: bool) -> MosaicBertConfig:
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return MosaicBertConfig(**tiny) if is_tiny else MosaicBertConfig()


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


def protein_tokens(num_sequences: int) -> list[int]:
    """Return tokens of sequences as long as real proteins (median 290 residues, truncated at 1,022), longest first."""
    records = PROTEINS.read_text().removeprefix(">").split("\n>")
    residues = [min(1022, len("".join(record.splitlines()[1:]))) for record in records]
    drawn = np.random.default_rng(SEED).choice(residues, size=num_sequences)
    return sorted((drawn + 2).tolist(), reverse=True)


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
