"""A device that cannot hold a block splits it and marks it: whole runs, with a device whose memory the test sets."""

from __future__ import annotations

import json
import random

import pytest

from tests.fakes import hash_config, hash_vector
from tests.strategies import write_fasta
from virnucpro.config import RunLimits
from virnucpro.errors import WorkersFailedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.store.reader import read_embeddings


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(2)
    records = [(f"p{n}", "".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=n % 30 + 1))) for n in range(60)]
    return write_fasta(tmp_path / "in.fasta", records), dict(records)


def embed(tmp_path, fasta, *, device_tokens, token_budget):
    memory = tmp_path / "tokens_that_fit.txt"
    memory.write_text(str(device_tokens))
    config = hash_config(
        loader="tests.fakes:load_small_memory_model", weights_path=str(memory), token_budget=token_budget
    )
    return run_embedding([fasta], tmp_path / "out", config, [CPU, CPU], limits=RunLimits(attempts=2))


def test_rows_of_split_blocks_are_the_same_and_the_run_says_how_many_there_were(tmp_path, proteins):
    fasta, sequences = proteins
    result = embed(tmp_path, fasta, device_tokens=50, token_budget=100)
    assert result.state == "complete"
    with read_embeddings(tmp_path / "out") as rows:
        assert sorted(rows.ids) == sorted(sequences)
        for name, sequence in sequences.items():
            assert abs(rows[name] - hash_vector(sequence)).max() <= 1e-5
    manifest = json.loads((tmp_path / "out" / "run.json").read_text())
    assert 0 < manifest["counts"]["resplit_blocks"] <= manifest["plan"]["blocks"]
    assert manifest["promise"] == "tolerance"
    assert [rank["attempts"] for rank in manifest["ranks"]] == [1, 1]  # met in process, without a new one
    logged = [
        json.loads(line) for path in (tmp_path / "out" / "logs").iterdir() for line in path.read_text().splitlines()
    ]
    marked = [line["block"] for line in logged if line["event"] == "block.resplit"]
    assert len(set(marked)) == len(marked) == manifest["counts"]["resplit_blocks"]


def test_a_device_that_holds_every_block_splits_none(tmp_path, proteins):
    result = embed(tmp_path, proteins[0], device_tokens=100, token_budget=100)
    assert (result.state, result.num_resplit_blocks, result.promise) == ("complete", 0, "bytes")


def test_a_sequence_that_overflows_is_computed_in_float32_and_the_run_says_so(tmp_path, proteins):
    fasta, sequences = proteins
    config = hash_config(loader="tests.fakes:load_overflowing_model", weights_path=sequences["p40"])
    result = run_embedding([fasta], tmp_path / "out", config, [CPU], limits=RunLimits(attempts=1))
    assert (result.state, result.num_rows, result.num_widened_blocks, result.promise) == ("complete", 60, 1, "bytes")
    assert [note for note in result.notes() if "overflowed" in note] == [
        "sequences of 1 block overflowed and were computed in fp32 (sequence.widened in logs/)"
    ]
    with read_embeddings(tmp_path / "out") as rows:
        assert abs(rows["p40"] - hash_vector(sequences["p40"])).max() <= 1e-5
    lines = [json.loads(line) for line in (tmp_path / "out" / "logs" / "worker_0.log").read_text().splitlines()]
    assert [line["sequence_id"] for line in lines if line["event"] == "sequence.widened"] == ["p40"]
    again = run_embedding([fasta], tmp_path / "out", config, [CPU], limits=RunLimits(attempts=1))
    assert (
        again.num_widened_blocks == json.loads((tmp_path / "out" / "run.json").read_text())["counts"]["widened_blocks"]
    )
    assert again.num_widened_blocks == 1


def test_a_sequence_that_does_not_fit_alone_is_named_and_the_rest_is_kept(tmp_path, proteins):
    fasta, sequences = proteins
    result = embed(tmp_path, fasta, device_tokens=31, token_budget=64)  # the longest have 32 tokens
    assert result.state == "partial"
    with pytest.raises(WorkersFailedError, match="2 of 60 sequences missing"):
        result.raise_unless(allow_partial=False)
    listed = (result.output_dir / "failed_sequences.tsv").read_text().splitlines()[1:]
    assert listed == ["p29\tdevice_out_of_memory\t1", "p59\tdevice_out_of_memory\t1"]
    assert 0 < result.num_rows < len(sequences)
