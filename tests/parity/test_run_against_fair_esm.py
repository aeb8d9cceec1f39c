"""A whole run, files and processes and all, against fair-esm's own forward on the same real proteins."""

from __future__ import annotations

import argparse

import esm
import numpy as np
import pytest
import torch

from tests.settings import embedding_config
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.store.reader import read_embeddings

pytestmark = pytest.mark.data

MAX_RESIDUES = 1500


@pytest.fixture(scope="module")
def checkpoint(data_dir):
    return data_dir / "weights" / "esm2_t6_8M_hemopi2ft.pt"


@pytest.fixture(scope="module")
def proteins(tmp_path_factory, examples_dir):
    """Real proteins from 1 residue to beyond the limit, the long ones made by joining."""
    index = SequenceIndex.build(
        [examples_dir / "proteins.fasta"],
        tmp_path_factory.mktemp("index") / "index",
        unpack_dir=tmp_path_factory.mktemp("unpacked"),
    )
    records = [index.read(position) for position in range(0, len(index), 28)]
    chosen = {record.sequence_id: record.sequence for record in records}
    chosen["one_residue"] = "M"
    chosen["at_the_limit"] = (records[0].sequence * 2)[:MAX_RESIDUES]
    chosen["beyond_the_limit"] = (records[1].sequence * 3)[: MAX_RESIDUES + 300]
    path = tmp_path_factory.mktemp("fasta") / "proteins.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in chosen.items()))
    return path, chosen


@pytest.fixture(scope="module")
def one_at_a_time(checkpoint):
    """fair-esm's own model, one sequence at a time, the mean over residues of the last layer."""
    torch.set_num_threads(1)
    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(checkpoint))
    model.eval()
    convert = alphabet.get_batch_converter()

    def row(sequence):
        with torch.inference_mode():
            _, _, tokens = convert([("", sequence)])
            states = model(tokens, repr_layers=[model.num_layers])["representations"][model.num_layers]
        return states[0, 1 : len(sequence) + 1].mean(0).numpy()

    return row


@pytest.fixture(scope="module")
def expected(one_at_a_time, proteins):
    return {name: one_at_a_time(sequence[:MAX_RESIDUES]) for name, sequence in proteins[1].items()}


@pytest.mark.parametrize(
    ("workers", "loader_processes", "token_budget"),
    [(1, 0, 4096), (2, 0, 1600), pytest.param(1, 2, 3000, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_every_row_equals_fair_esms_within_1e_5(
    tmp_path, checkpoint, proteins, expected, workers, loader_processes, token_budget
):
    path, sequences = proteins
    config = embedding_config(
        model=checkpoint, token_budget=token_budget, max_residues=MAX_RESIDUES, loader_processes=loader_processes
    )
    result = run_embedding([path], tmp_path / "out", config, [CPU] * workers)
    result.raise_unless(allow_partial=False)
    assert result.num_truncated == 1
    with read_embeddings(tmp_path / "out") as embeddings:
        assert embeddings.ids == tuple(sequences)
        worst = max(float(np.abs(embeddings[name] - expected[name]).max()) for name in sequences)
    print(f"largest difference from fair-esm over {len(sequences)} proteins: {worst:.2e}")
    assert worst < 1e-5


@pytest.mark.slow
def test_a_long_proteins_row_is_the_mean_of_fair_esms_over_its_windows(tmp_path, checkpoint, proteins, one_at_a_time):
    path, sequences = proteins
    config = embedding_config(model=checkpoint, token_budget=2000, max_residues=300, long="window")
    result = run_embedding([path], tmp_path / "out", config, [CPU])
    result.raise_unless(allow_partial=False)
    assert result.num_truncated == 0
    long = [name for name, sequence in sequences.items() if len(sequence) > 300]
    assert result.noticed["windowed"] == len(long) >= 2
    worst = 0.0
    with read_embeddings(tmp_path / "out") as embeddings:
        for name, sequence in sequences.items():
            if len(sequence) > 300:
                starts = [*range(0, len(sequence) - 300, 150), len(sequence) - 300]
                row = np.mean([one_at_a_time(sequence[start : start + 300]) for start in starts], axis=0)
            else:
                row = one_at_a_time(sequence)
            worst = max(worst, float(np.abs(embeddings[name] - row).max()))
    print(f"largest difference from fair-esm's windows over {len(long)} long proteins: {worst:.2e}")
    assert worst < 1e-5
