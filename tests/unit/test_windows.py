"""Long sequences as the mean of half-overlapping windows: cut, packed, planned, computed, cached, resumed."""

from __future__ import annotations

import itertools
import random

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer, HashModel, SmallMemoryModel, faulty_config, hash_config, hash_vector
from tests.settings import embedding_config
from tests.strategies import MadeRun, write_fasta
from virnucpro.choices import LongPolicy
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.packing import count_windows, make_plan, tokens_of, windows_of
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.models.dnabert_s import load_dnabert_s
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.pipeline.async_inference import AsyncInferenceRunner
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.store.reader import read_embeddings

WIDTH = 10


def mean_of_windows(sequence: str, max_residues: int, row=hash_vector) -> np.ndarray:
    """By the definition: windows every half of *max_residues*, the last one where the sequence ends."""
    if len(sequence) <= max_residues:
        return row(sequence)
    last = len(sequence) - max_residues
    starts = [*range(0, last, max(1, max_residues // 2)), last]
    rows = [row(sequence[start : start + max_residues]).astype(np.float64) for start in starts]
    return np.mean(rows, axis=0).astype(np.float32)


@given(st.integers(1, 400), st.integers(1, 60))
def test_windows_cover_the_sequence_are_of_one_length_and_overlap_by_half(num_letters, max_residues):
    sequence = "".join(map(chr, range(1000, 1000 + num_letters)))
    windows = windows_of(sequence, max_residues)
    assert len(windows) == count_windows(np.array([num_letters]), max_residues)[0]
    if num_letters <= max_residues:
        assert windows == [sequence]
        return
    assert {len(window) for window in windows} == {max_residues}
    starts = [sequence.index(window) for window in windows]
    assert starts[0] == 0
    assert starts[-1] == num_letters - max_residues
    steps = np.diff(starts)
    assert (steps[:-1] == max(1, max_residues // 2)).all()
    assert 0 < steps[-1] <= max(1, max_residues // 2)
    assert set("".join(windows)) == set(sequence)


def records_of(sequences) -> list[SequenceRecord]:
    return [SequenceRecord(number, f"s{number}", sequence) for number, sequence in enumerate(sequences)]


def random_sequences(number, longest=60, seed=3) -> list[str]:
    chooser = random.Random(seed)
    return ["".join(chooser.choices("ACDEFGHIKL", k=chooser.randint(1, longest))) for _ in range(number)]


@given(st.lists(st.text("ACDEF", min_size=1, max_size=70), min_size=1, max_size=8), st.integers(1, 30))
def test_a_batch_costs_what_the_plan_counts_and_gives_one_row_a_sequence(sequences, max_residues):
    batch = VarlenCollator(ByteTokenizer(), max_residues=max_residues, in_windows=True)(records_of(sequences))
    tokens = tokens_of(np.array(list(map(len, sequences))), max_residues=max_residues, in_windows=True)
    assert batch.num_tokens == tokens.sum()
    (result,) = AsyncInferenceRunner(HashModel(), "cpu").run([batch])
    expected = np.stack([mean_of_windows(sequence, max_residues) for sequence in sequences])
    np.testing.assert_array_equal(result.embeddings, expected)
    assert [single.num_tokens for single in batch.singles()] == tokens.tolist()
    if len(sequences) > 1:
        first, second = batch.halves()
        assert (*first.positions, *second.positions) == batch.positions
        assert (first.num_tokens, second.num_tokens) == (
            tokens[: len(first.positions)].sum(),
            tokens[len(first.positions) :].sum(),
        )


def test_a_sequence_whose_windows_do_not_fit_together_is_computed_in_pieces_of_them():
    sequences = random_sequences(5, longest=90)
    collate = VarlenCollator(ByteTokenizer(), max_residues=WIDTH, in_windows=True)
    (result,) = AsyncInferenceRunner(SmallMemoryModel(30), "cpu").run([collate(records_of(sequences))])
    assert (result.is_resplit, result.failed) == (True, ())
    expected = np.stack([mean_of_windows(sequence, WIDTH) for sequence in sequences])
    np.testing.assert_allclose(result.embeddings, expected, atol=1e-6)
    (result,) = AsyncInferenceRunner(SmallMemoryModel(11), "cpu").run([collate(records_of([sequences[0], "ACD"]))])
    assert [item.position for item in result.failed] == [0]
    assert result.positions == (1,)


def test_the_budget_is_raised_to_the_longest_sequences_windows(tmp_path):
    run = MadeRun(tmp_path, [("long", "ACDEFGHIKL" * 7), ("short", "ACD")], token_budget=500)
    config = hash_config(max_residues=WIDTH, long_policy="window", token_budget=500)
    plan = make_plan(run.index, config, device_type="cpu")
    assert plan.tokens.tolist() == [13 * 12 + 5]
    assert plan.fingerprint != make_plan(run.index, hash_config(max_residues=WIDTH), device_type="cpu").fingerprint


def test_rows_of_windows_have_a_space_of_their_own_in_the_cache():
    spaces = {policy: hash_config(long_policy=policy).cache_space() for policy in LongPolicy}
    assert spaces[LongPolicy.TRUNCATE] == spaces[LongPolicy.ERROR] != spaces[LongPolicy.WINDOW]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same input with one worker, with two that fill a cache, with two of which one dies, and from the cache."""
    folder = tmp_path_factory.mktemp("windows")
    records = [(f"s{number}", sequence) for number, sequence in enumerate(random_sequences(40))]
    fasta = write_fasta(folder / "in.fasta", [*records, ("copy", records[0][1])])
    settings = {"max_residues": WIDTH, "long_policy": "window"}
    dying = faulty_config(folder / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 1}, **settings)
    cached = hash_config(**settings, cache_dir=str(folder / "cache"))
    results = {
        "one": run_embedding([fasta], folder / "one", hash_config(**settings), [CPU]),
        "two": run_embedding([fasta], folder / "two", cached, [CPU] * 2),
        "dying": run_embedding([fasta], folder / "dying", dying, [CPU] * 2),
        "cached": run_embedding([fasta], folder / "cached", cached, [CPU]),
    }
    return folder, dict(records), results


@pytest.mark.slow
@pytest.mark.long
def test_a_run_gives_the_mean_of_windows_and_cuts_nothing(runs):
    folder, records, results = runs
    long = sum(len(sequence) > WIDTH for sequence in records.values())
    assert (results["one"].num_truncated, results["one"].noticed["windowed"]) == (
        0,
        long + (len(records["s0"]) > WIDTH),
    )
    assert any("are the mean of their windows" in note for note in results["one"].notes())
    with read_embeddings(folder / "one") as rows:
        for name, sequence in records.items():
            np.testing.assert_array_equal(rows[name], mean_of_windows(sequence, WIDTH), err_msg=name)
        np.testing.assert_array_equal(rows["copy"], rows["s0"])
    with h5py.File(folder / "one" / "embeddings.h5") as file:
        assert "truncated_from" not in file


@pytest.mark.parametrize("name", ["two", "dying", "cached"])
def test_the_bytes_do_not_depend_on_workers_deaths_or_a_cache(runs, name):
    folder, _, results = runs
    assert results[name].state == "complete"
    assert (folder / name / "embeddings.h5").read_bytes() == (folder / "one" / "embeddings.h5").read_bytes()
    assert (results[name].num_cached_blocks > 0) is (name == "cached")


def test_a_worker_did_die(runs):
    assert sum(rank.attempts for rank in runs[2]["dying"].ranks) == 3


@pytest.mark.parametrize(
    ("name", "load", "letters"),
    [
        ("virnucpro-tiny-protein", load_esm2_model, "ACDEFGHIKLMNPQRSTVWY"),
        ("virnucpro-tiny-dna", load_dnabert_s, "ACGT"),
    ],
)
def test_the_bundled_models_rows_are_the_mean_of_windows_computed_one_at_a_time(tmp_path, name, load, letters):
    chooser = random.Random(4)
    records = [(f"s{n}", "".join(chooser.choices(letters, k=n))) for n in (700, 301, 300, 150, 449, 3)]
    config = embedding_config(model=name, token_budget=900, max_residues=300, long="window")
    result = run_embedding([write_fasta(tmp_path / "in.fasta", records)], tmp_path / "out", config, [CPU])
    assert (result.state, result.noticed["windowed"]) == ("complete", 3)
    model, tokenizer = load(name, "cpu")

    def row(sequence):
        input_ids, lengths = tokenizer.encode([sequence])
        starts = torch.tensor([0, *itertools.accumulate(lengths.tolist())], dtype=torch.int32)
        return model(torch.from_numpy(input_ids), starts, lengths.tolist())[0].numpy()

    with read_embeddings(tmp_path / "out") as rows:
        for record_id, sequence in records:
            np.testing.assert_allclose(rows[record_id], mean_of_windows(sequence, 300, row), atol=1e-5)
