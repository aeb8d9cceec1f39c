"""The loop that feeds a model: order, finiteness, and equal rows for equal batches."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.fakes import HASH_WIDTH, ByteTokenizer, HashModel, SmallMemoryModel, hash_vector
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.errors import SequenceError
from virnucpro.pipeline.async_inference import BATCHES_AHEAD, AsyncInferenceRunner, _made_ahead


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
def test_a_number_that_is_not_finite_names_its_sequence(value):
    runner = AsyncInferenceRunner(Poisoned(value, "WWW"), "cpu")
    results = runner.run([batch_of("MK", "A"), batch_of("MKT", "AC", "WWW", "D", first=5)])
    assert next(results).positions == (0, 1)
    with pytest.raises(SequenceError, match=r"id7.*not finite") as caught:
        next(results)
    assert caught.value.sequence_id == "id7"


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


def test_a_sequence_that_does_not_fit_alone_is_an_error_that_names_it():
    runner = AsyncInferenceRunner(SmallMemoryModel(most_tokens=30), "cpu")
    results = runner.run([batch_of("M" * 20), batch_of("A", "C" * 40, "D", first=1)])
    assert next(results).positions == (0,)
    with pytest.raises(SequenceError, match=r"id2.*does not fit.*42 tokens") as caught:
        next(results)
    assert caught.value.sequence_id == "id2"


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
