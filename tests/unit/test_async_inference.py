"""The loop that feeds a model: order, finiteness, and equal rows for equal batches."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.fakes import HASH_WIDTH, ByteTokenizer, HashModel, SmallMemoryModel, hash_vector
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.errors import ConfigurationError, SequenceError
from virnucpro.pipeline.async_inference import BATCHES_AHEAD, AsyncInferenceRunner, _made_ahead
from virnucpro.pipeline.failures import FailureClass


def batch_of(*sequences, first=0):
    records = [SequenceRecord(first + n, f"id{first + n}", sequence) for n, sequence in enumerate(sequences)]
    return VarlenCollator(ByteTokenizer(), max_residues=100)(records)


class Poisoned(HashModel):
    """Gives one number that is not finite for one sequence."""

    def __init__(self, value, poison):
        super().__init__()
        self.value, self.poison = value, hash_vector(poison)

    def __call__(self, *args):
        rows = super().__call__(*args)
        rows[(rows == torch.from_numpy(self.poison)).all(dim=1), -1] = self.value
        return rows


def test_results_come_in_the_order_of_the_batches():
    batches = [batch_of("MK" * n, "A" * n, first=10 * n) for n in range(1, 20)]
    results = list(AsyncInferenceRunner(HashModel(), "cpu").run(batches))
    assert [result.positions for result in results] == [batch.positions for batch in batches]
    for n, (batch, result) in enumerate(zip(batches, results, strict=True), start=1):
        assert result.sequence_ids == batch.sequence_ids
        assert result.num_tokens == batch.num_tokens == 3 * n + 4
        assert result.embeddings.dtype == np.float32
        assert result.embeddings.tolist() == [hash_vector("MK" * n).tolist(), hash_vector("A" * n).tolist()]


def test_a_result_comes_before_the_next_batch_is_fetched():
    fetched = []

    def batches():
        for n in range(3):
            fetched.append(n)
            yield batch_of("M", first=n)

    results = AsyncInferenceRunner(HashModel(), "cpu").run(batches())
    assert next(results).positions == (0,)
    assert fetched == [0]


def test_no_batches_give_no_results():
    assert list(AsyncInferenceRunner(HashModel(), "cpu").run([])) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_costs_its_sequence_the_row_and_no_other(value):
    runner = AsyncInferenceRunner(Poisoned(value, "WWW"), "cpu")
    first, second = runner.run([batch_of("MK", "A"), batch_of("MKT", "AC", "WWW", "D", first=5)])
    assert (first.positions, first.failed) == ((0, 1), ())
    assert (second.positions, second.sequence_ids) == ((5, 6, 8), ("id5", "id6", "id8"))
    assert second.embeddings.tolist() == [hash_vector(sequence).tolist() for sequence in ("MKT", "AC", "D")]
    assert not second.is_resplit
    (failed,) = second.failed
    assert (failed.position, failed.sequence_id, failed.failure) == (7, "id7", FailureClass.NOT_FINITE)


class Failing(HashModel):
    """Raises for batches that hold one of *poison*, the first *times* times."""

    def __init__(self, poison, times=10**9, error=RuntimeError):
        super().__init__()
        self.poison, self.times, self.error = poison, times, error
        self.sizes = []

    def __call__(self, input_ids_T, cu_seqlens, lengths):
        self.sizes.append(len(lengths))
        text = bytes(input_ids_T.numpy().astype("uint8")).decode("latin-1")
        if self.times and any(f"\0{sequence}\1" in text for sequence in self.poison):
            self.times -= 1
            raise self.error("the test asked for it")
        return super().__call__(input_ids_T, cu_seqlens, lengths)


def test_an_error_on_one_sequence_is_narrowed_down_within_the_process():
    sequences = words(32, 10)
    model = Failing([sequences[19]])
    before, result, after = AsyncInferenceRunner(model, "cpu").run(
        [batch_of("MK"), batch_of(*sequences, first=1), batch_of("AC", first=50)]
    )
    assert (before.positions, after.positions) == ((0,), (50,))
    assert result.positions == tuple(position for position in range(1, 33) if position != 20)
    assert result.embeddings.tolist() == [
        hash_vector(sequence).tolist() for sequence in sequences if sequence != sequences[19]
    ]
    assert (result.is_resplit, before.is_resplit, after.is_resplit) == (True, False, False)
    (failed,) = result.failed
    assert (failed.position, failed.failure) == (20, FailureClass.APPLICATION_ERROR)
    assert failed.what == "RuntimeError: the test asked for it"
    assert len(model.sizes) <= 2 + 2 * (1 + 2 * 5)


def test_an_error_that_goes_away_costs_nothing_not_even_last_bits():
    (result,) = AsyncInferenceRunner(Failing(["MKT"], times=1), "cpu").run([batch_of("MKT", "AC")])
    assert (result.positions, result.is_resplit, result.failed) == ((0, 1), False, ())


def test_when_everything_fails_the_sequences_are_not_to_blame():
    sequences = words(40, 10)
    runner = AsyncInferenceRunner(Failing(sequences), "cpu")
    with pytest.raises(SequenceError, match="as did 7 sequences before it, and none succeeded"):
        list(runner.run([batch_of(*sequences)]))


@pytest.mark.parametrize(
    "error", [ConfigurationError, OSError, torch.AcceleratorError], ids=["ours", "system", "device"]
)
def test_an_error_that_is_no_sequences_fault_ends_the_work_after_what_came_before(error):
    runner = AsyncInferenceRunner(Failing(["WWW"], error=error), "cpu")
    results = runner.run([batch_of("MK"), batch_of("WWW", "A", first=1)])
    assert next(results).positions == (0,)
    with pytest.raises(error, match="asked for it"):
        next(results)


def test_the_machines_memory_counts_like_the_devices():
    sequences = words(4, 10)
    (result,) = AsyncInferenceRunner(Failing([sequences[1]], error=MemoryError), "cpu").run([batch_of(*sequences)])
    assert [item.failure for item in result.failed] == [FailureClass.HOST_OUT_OF_MEMORY]
    assert result.oom_splits == 2, "4 in 2 and 2, and 2 in 1 and 1"
    assert result.positions == (0, 2, 3)


def test_a_sequence_without_tokens_is_named_and_the_others_are_computed():
    class Strict(ByteTokenizer):
        def encode(self, sequences):
            if any("#" in sequence for sequence in sequences):
                raise SequenceError("sequence 1 of the batch", "'#' is no letter")
            return super().encode(sequences)

    records = [SequenceRecord(n, f"id{n}", sequence) for n, sequence in enumerate(["MK", "A#", "AC"])]
    collator = VarlenCollator(Strict(), max_residues=9)
    for batch in (collator(records), collator(records[1:2])):
        assert [(item.position, item.sequence_id, item.what) for item in batch.unreadable] == [
            (1, "id1", "'#' is no letter")
        ]
        (result,) = AsyncInferenceRunner(HashModel(), "cpu").run([batch])
        assert result.positions == batch.positions
        assert 0 <= result.seconds < 60, "and not the seconds since the machine was started"
        assert result.oom_splits == 0
        assert [(item.position, item.failure) for item in result.failed] == [(1, FailureClass.APPLICATION_ERROR)]


def test_each_batch_is_announced_before_the_model_gets_it():
    said = []
    model = HashModel(lambda number, sequences: said.append(("computed", number)))
    batches = [batch_of("M", first=n) for n in range(2)]
    list(AsyncInferenceRunner(model, "cpu").run(batches, on_start=lambda batch: said.append(batch.positions)))
    assert said == [(0,), ("computed", 0), (1,), ("computed", 1)]


@pytest.mark.parametrize("then_whole", [False, True])
def test_computing_apart_announces_each_sequence_suspects_last_and_gives_the_whole(then_whole):
    said = []
    batch = batch_of("MKT", "AC", "D", first=5)
    runner = AsyncInferenceRunner(HashModel(), "cpu")
    result = runner.run_apart(
        batch, on_start=lambda some: said.append(some.positions), last=frozenset({5, 99}), then_whole=then_whole
    )
    assert said == [(7,), (6,), (5,)] + [(5, 6, 7)] * then_whole
    assert (result.positions, result.is_resplit) == ((5, 6, 7), not then_whole)
    assert result.embeddings.tolist() == [hash_vector(sequence).tolist() for sequence in ("MKT", "AC", "D")]


def test_a_block_with_a_sequence_that_fails_apart_is_not_computed_whole():
    model = Failing(["AC"])
    result = AsyncInferenceRunner(model, "cpu").run_apart(batch_of("MKT", "AC", "D"), on_start=lambda _: None)
    assert (result.positions, result.is_resplit) == ((0, 2), True)
    assert max(model.sizes) == 1


def test_many_equal_batches_give_equal_rows():
    torch.manual_seed(0)

    class Mean(torch.nn.Module):
        hidden_dim = 16

        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(256, 16)

        def forward(self, input_ids_T, cu_seqlens, lengths):
            return torch.stack([rows.mean(0) for rows in self.table(input_ids_T).split(list(lengths))])

    batch = batch_of("MKTAYIAKQR", "ACD", "WYV" * 9)
    results = list(AsyncInferenceRunner(Mean(), "cpu").run([batch] * 50))
    assert len({result.embeddings.tobytes() for result in results}) == 1
    assert np.linalg.norm(results[0].embeddings, axis=1).min() > 0


def test_half_precision_rows_become_float32():
    class Half(HashModel):
        def __call__(self, *args):
            return super().__call__(*args).to(torch.bfloat16)

    (result,) = AsyncInferenceRunner(Half(), "cpu").run([batch_of("MKT")])
    assert result.embeddings.dtype == np.float32
    assert result.embeddings.shape == (1, HASH_WIDTH)
    assert np.allclose(result.embeddings[0], hash_vector("MKT"), atol=1e-2)


def test_no_gradient_is_kept():
    class Learning(HashModel):
        def __call__(self, *args):
            rows = super().__call__(*args)
            self.gradients = torch.is_grad_enabled()
            return rows

    model = Learning()
    list(AsyncInferenceRunner(model, "cpu").run([batch_of("M")]))
    assert model.gradients is False


def words(count, length, *, first=0):
    """Different sequences of *length* letters."""
    return [f"{first + number:0{length}d}" for number in range(count)]


def test_a_batch_that_does_not_fit_is_computed_in_halves_and_says_so():
    model = SmallMemoryModel(most_tokens=50)
    sequences = words(10, 10)  # 12 tokens each
    batches = [
        batch_of(*words(4, 10, first=50)),
        batch_of(*sequences, first=4),
        batch_of(*words(2, 10, first=70), first=14),
    ]
    results = list(AsyncInferenceRunner(model, "cpu").run(batches))
    assert model.asked == [48, 120, 60, 24, 36, 60, 24, 36, 24]
    assert [result.is_resplit for result in results] == [False, True, False]
    assert [result.positions for result in results] == [batch.positions for batch in batches]
    assert results[1].sequence_ids == batches[1].sequence_ids
    assert results[1].num_tokens == 120
    assert results[1].embeddings.tolist() == [hash_vector(sequence).tolist() for sequence in sequences]


def test_a_sequence_that_does_not_fit_alone_gets_no_row_and_is_named():
    runner = AsyncInferenceRunner(SmallMemoryModel(most_tokens=30), "cpu")
    first, second = runner.run([batch_of("M" * 20), batch_of("A", "C" * 40, "D", first=1)])
    assert first.positions == (0,)
    assert (second.positions, second.is_resplit) == ((1, 3), True)
    (failed,) = second.failed
    assert (failed.sequence_id, failed.failure) == ("id2", FailureClass.DEVICE_OUT_OF_MEMORY)
    assert "does not fit into the memory of cpu even alone (42 tokens)" in failed.what


def test_many_sequences_that_do_not_fit_are_no_fault_of_the_device():
    runner = AsyncInferenceRunner(SmallMemoryModel(most_tokens=30), "cpu")
    *long, short = runner.run([batch_of("M" * (40 + n), first=n) for n in range(20)] + [batch_of("MK", first=20)])
    assert all(not result.positions and len(result.failed) == 1 for result in long)
    assert short.positions == (20,)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [([5, 5], ([5], [5])), ([9, 1, 1], ([9], [1, 1])), ([1, 1, 9], ([1, 1], [9])), ([3, 3, 3], ([3], [3, 3]))],
)
def test_halves_have_about_as_many_tokens_each(sizes, expected):
    batch = batch_of(*("MKTAYIAKQ"[:size] for size in sizes))
    halves = batch.halves()
    assert tuple([length - 2 for length in half.lengths] for half in halves) == expected
    assert torch.cat([half.input_ids_T for half in halves]).equal(batch.input_ids_T)
    assert halves[0].sequence_ids + halves[1].sequence_ids == batch.sequence_ids
    assert halves[0].positions + halves[1].positions == batch.positions
    for half in halves:
        assert half.cu_seqlens.tolist() == np.cumsum([0, *half.lengths]).tolist()
        assert half.cu_seqlens.dtype is torch.int32
        assert half.num_tokens == sum(half.lengths)


def test_no_batch_is_started_after_the_stop():
    stop = threading.Event()
    model = HashModel()
    results = AsyncInferenceRunner(model, "cpu").run([batch_of("M", first=n) for n in range(9)], stop=stop)
    assert [next(results).positions, next(results).positions] == [(0,), (1,)]
    stop.set()
    assert list(results) == []
    assert model.batches == 2


def test_batches_are_made_ahead_in_order_by_another_thread_and_never_many():
    made, threads = [], set()

    def batches():
        for n in range(20):
            made.append(n)
            threads.add(threading.current_thread().name)
            yield n

    for taken, n in enumerate(_made_ahead(batches())):
        assert n == taken
        assert len(made) <= taken + 1 + BATCHES_AHEAD
    assert made == list(range(20))
    assert len(threads) == 1
    assert threading.current_thread().name not in threads


def test_an_error_of_the_loader_comes_after_the_batches_before_it():
    def batches():
        yield "first"
        yield "second"
        raise SequenceError("id7", "has a letter without a token")

    ahead = _made_ahead(batches())
    assert [next(ahead), next(ahead)] == ["first", "second"]
    with pytest.raises(SequenceError, match="id7"):
        next(ahead)


def test_the_thread_ends_when_nobody_wants_its_batches():
    ahead = _made_ahead(batch_of("M", first=n) for n in range(100))
    next(ahead)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("batches-ahead")]
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches-ahead")]
