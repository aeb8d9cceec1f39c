"""The loop that feeds a model: order, finiteness, and equal rows for equal batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fakes import HASH_WIDTH, ByteTokenizer, HashModel, hash_vector
from virnucpro.data.collators import VarlenCollator
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.errors import SequenceError
from virnucpro.pipeline.async_inference import AsyncInferenceRunner


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
