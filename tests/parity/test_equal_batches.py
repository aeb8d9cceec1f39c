"""Many equal batches give equal rows, bit for bit: nothing in the loop depends on when a batch comes or who read it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.config import ModelConfig
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

NUM_BATCHES = 60


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_many_equal_batches_of_the_bundled_model_give_equal_rows(tmp_path, loader_processes):
    chooser = random.Random(41)
    fasta = tmp_path / "in.fasta"
    sequences = ["".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=chooser.randint(1, 90))) for _ in range(24)]
    fasta.write_text("".join(f">s{n}\n{sequence}\n" for n, sequence in enumerate(sequences)))
    index = SequenceIndex.build([fasta], tmp_path / "in.index", unpack_dir=tmp_path)
    model, tokenizer = load_esm2_model(DEFAULT_PROTEIN_MODEL, "cpu")
    everything = range(len(index))
    loader = create_async_dataloader(
        IndexBasedDataset(index, everything),
        VarlenCollator(tokenizer, max_residues=ModelConfig.max_residues),
        [everything] * NUM_BATCHES,
        loader_processes=loader_processes,
    )
    results = list(AsyncInferenceRunner(model, "cpu").run(loader))
    assert len(results) == NUM_BATCHES
    assert {result.sequence_ids for result in results} == {tuple(index.sequence_ids(everything))}
    assert len({result.embeddings.tobytes() for result in results}) == 1
    rows = results[0].embeddings
    assert rows.shape == (24, model.hidden_dim)
    assert len(np.unique(rows, axis=0)) == 24, "other sequences have other rows"
