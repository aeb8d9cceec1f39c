"""
The three programs that ``embedding.py`` compares, each from a FASTA file to embeddings on disk, on one thread.

They share one set of random weights in fair-esm's layout. ``FairEsm`` is the loop of fair-esm 2.0.0's
``scripts/extract.py`` (``--include mean``, 4,096 tokens a batch, a file for each sequence); ``Transformers`` is
``EsmModel`` with SDPA attention over length-sorted batches padded to the longest, the rows in one HDF5 file;
``VirNucPro`` is the worker's own path: index, plan, loader, runner, sealed parts.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import esm
import h5py
import numpy as np
import torch
from transformers import EsmConfig, EsmModel
from workloads import MAX_RESIDUES

from virnucpro.choices import DEFAULT_TOKEN_BUDGET
from virnucpro.config import ModelConfig
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.store.parts import BlockRows, write_part

if TYPE_CHECKING:
    from pathlib import Path

PEER_TOKENS = 4096
"""Tokens of a padded batch: the default of fair-esm's extract.py."""
SHAPES = {"8M": (6, 320, 20), "35M": (12, 480, 20), "150M": (30, 640, 20), "650M": (33, 1280, 20)}
"""Layers, width, heads."""


def useful_flops(size: str, lengths: list[int]) -> float:
    """Return the multiplications and additions that sequences of *lengths* residues need, BOS and EOS included."""
    layers, width, _ = SHAPES[size]
    tokens = [min(length, MAX_RESIDUES) + 2 for length in lengths]
    return float(sum(n * (24 * layers * width**2 + 4 * n * width * layers) for n in tokens))


def random_checkpoint(size: str, folder: Path) -> Path:
    """Save an ESM-2 of random weights as fair-esm saves its own."""
    layers, width, heads = SHAPES[size]
    torch.manual_seed(0)
    model = esm.ESM2(num_layers=layers, embed_dim=width, attention_heads=heads)
    settings = argparse.Namespace(
        encoder_layers=layers, encoder_embed_dim=width, encoder_attention_heads=heads, token_dropout=True
    )
    state = {f"encoder.sentence_encoder.{name}": tensor for name, tensor in model.state_dict().items()}
    path = folder / f"random_{size}.pt"
    torch.save({"cfg": {"model": settings}, "model": state}, path)
    return path


def _fair_esm_model(checkpoint: Path, size: str) -> esm.ESM2:
    layers, width, heads = SHAPES[size]
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(checkpoint, weights_only=True, mmap=True)["model"]
    with torch.device("meta"):
        model = esm.ESM2(num_layers=layers, embed_dim=width, attention_heads=heads)
    prefix = "encoder.sentence_encoder."
    model.load_state_dict({name.removeprefix(prefix): tensor.clone() for name, tensor in state.items()}, assign=True)
    return model.eval()


class FairEsm:
    """fair-esm's own extraction loop."""

    name = "fair-esm"

    def __init__(self, checkpoint: Path, size: str) -> None:
        self.model = _fair_esm_model(checkpoint, size)
        self.layers = SHAPES[size][0]
        self.alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
        self.slots = 0
        """Tokens of the last run, padding included."""

    @torch.no_grad()
    def run(self, fasta: Path, out: Path) -> dict[str, np.ndarray]:
        """Embed *fasta*; a ``.pt`` file for each sequence."""
        dataset = esm.FastaBatchedDataset.from_file(fasta)
        batches = dataset.get_batch_indices(PEER_TOKENS, extra_toks_per_seq=1)
        convert = self.alphabet.get_batch_converter(MAX_RESIDUES)
        loader = torch.utils.data.DataLoader(dataset, collate_fn=convert, batch_sampler=batches)
        rows, self.slots = {}, 0
        for labels, sequences, tokens in loader:
            self.slots += tokens.numel()
            states = self.model(tokens, repr_layers=[self.layers], return_contacts=False)
            states = states["representations"][self.layers].to(device="cpu")
            for i, label in enumerate(labels):
                mean = states[i, 1 : 1 + min(MAX_RESIDUES, len(sequences[i]))].mean(0).clone()
                torch.save({"label": label, "mean_representations": {self.layers: mean}}, out / f"{label}.pt")
                rows[label] = mean.numpy()
        return rows


class Transformers:
    """``EsmModel`` of transformers, SDPA, batches of sequences of like length."""

    name = "transformers"

    def __init__(self, checkpoint: Path, size: str) -> None:
        layers, width, heads = SHAPES[size]
        config = EsmConfig(
            vocab_size=33,
            mask_token_id=32,
            pad_token_id=1,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
            attn_implementation="sdpa",
            layer_norm_eps=1e-5,
        )
        self.model = EsmModel(config, add_pooling_layer=False).eval()
        self._take_weights(_fair_esm_model(checkpoint, size))
        self.alphabet = esm.data.Alphabet.from_architecture("ESM-1b")
        self.slots = 0

    def _take_weights(self, source: esm.ESM2) -> None:
        """Rename fair-esm's tensors; a tensor of the model without a value is an error."""
        renamed = {"embeddings.word_embeddings.weight": source.embed_tokens.weight}
        parts = {
            "self_attn.q_proj": "attention.self.query",
            "self_attn.k_proj": "attention.self.key",
            "self_attn.v_proj": "attention.self.value",
            "self_attn.out_proj": "attention.output.dense",
            "self_attn_layer_norm": "attention.LayerNorm",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
            "final_layer_norm": "LayerNorm",
        }
        for i, layer in enumerate(source.layers):
            for theirs, ours in parts.items():
                module = layer.get_submodule(theirs)
                renamed[f"encoder.layer.{i}.{ours}.weight"] = module.weight
                renamed[f"encoder.layer.{i}.{ours}.bias"] = module.bias
        renamed["encoder.emb_layer_norm_after.weight"] = source.emb_layer_norm_after.weight
        renamed["encoder.emb_layer_norm_after.bias"] = source.emb_layer_norm_after.bias
        missing, unexpected = self.model.load_state_dict(renamed, strict=False, assign=True)
        left = [name for name in missing if "inv_freq" not in name and not name.startswith("contact_head")]
        assert not left, left
        assert not unexpected, unexpected

    @torch.inference_mode()
    def run(self, fasta: Path, out: Path) -> dict[str, np.ndarray]:
        """Embed *fasta* into one HDF5 file."""
        dataset = esm.FastaBatchedDataset.from_file(fasta)
        records = sorted(
            zip(dataset.sequence_labels, dataset.sequence_strs, strict=True), key=lambda record: -len(record[1])
        )
        convert = self.alphabet.get_batch_converter(MAX_RESIDUES)
        rows, self.slots, start = {}, 0, 0
        while start < len(records):
            count = max(1, PEER_TOKENS // (min(len(records[start][1]), MAX_RESIDUES) + 2))
            labels, sequences, tokens = convert(records[start : start + count])
            self.slots += tokens.numel()
            states = self.model(input_ids=tokens, attention_mask=tokens.ne(1)).last_hidden_state
            for i, label in enumerate(labels):
                rows[label] = states[i, 1 : 1 + min(MAX_RESIDUES, len(sequences[i]))].mean(0).numpy()
            start += count
        with h5py.File(out / "embeddings.h5", "w") as file:
            file["embeddings"] = np.stack(list(rows.values()))
            file["sequence_ids"] = list(rows)
        return rows


class VirNucPro:
    """Our worker's path, in this process."""

    name = "virnucpro"

    def __init__(
        self, checkpoint: Path, size: str, *, token_budget: int = DEFAULT_TOKEN_BUDGET, precision: str = "fp32"
    ) -> None:
        self.model, self.tokenizer = load_esm2_model(checkpoint, "cpu", precision=precision)
        self.config = ModelConfig(
            model_name=size,
            weights_path=str(checkpoint),
            weights_sha256="0" * 64,
            hidden_dim=self.model.hidden_dim,
            max_residues=MAX_RESIDUES,
            token_budget=token_budget,
        )
        self.slots = 0

    def run(self, fasta: Path, out: Path) -> dict[str, np.ndarray]:
        """Embed *fasta* into sealed parts."""
        index = SequenceIndex.build([fasta], out / "bench.index", unpack_dir=out)
        plan = make_plan(index, self.config, device_type="cpu")
        blocks = [plan.block_positions(block) for block in range(len(plan))]
        numbers = np.split(np.arange(len(plan.positions)), plan.starts[1:-1])
        loader = create_async_dataloader(
            IndexBasedDataset(index, plan.positions), VarlenCollator(self.tokenizer, max_residues=MAX_RESIDUES), numbers
        )
        rows, finished, self.slots = {}, [], 0
        for block, result in enumerate(AsyncInferenceRunner(self.model, "cpu").run(loader)):
            self.slots += result.num_tokens
            finished.append(BlockRows(block, blocks[block], result.sequence_ids, result.embeddings))
            rows.update(zip(result.sequence_ids, result.embeddings, strict=True))
        write_part(out, finished, plan_fingerprint=plan.fingerprint)
        return rows


PROGRAMS = (FairEsm, Transformers, VirNucPro)
