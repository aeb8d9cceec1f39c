"""Packing without padding, and a loader that loses and invents nothing."""

from __future__ import annotations

import functools
import operator
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ByteTokenizer
from tests.strategies import MadeRun, residues
from virnucpro.data.collators import VarlenCollator, create_async_dataloader
from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceRecord


def records_of(sequences):
    return [SequenceRecord(10 + number, f"id{number}", sequence) for number, sequence in enumerate(sequences)]


@given(st.lists(residues, min_size=1, max_size=12), st.integers(1, 40))
def test_a_batch_holds_the_cut_sequences_end_to_end(sequences, max_residues):
    batch = VarlenCollator(ByteTokenizer(), max_residues=max_residues)(records_of(sequences))
    expected = [[0, *sequence[:max_residues].encode(), 1] for sequence in sequences]
    assert batch.input_ids_T.tolist() == functools.reduce(operator.iadd, expected, [])
    assert batch.num_tokens == sum(map(len, expected))
    assert batch.lengths == tuple(map(len, expected))
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(batch.lengths)]
    assert batch.positions == tuple(range(10, 10 + len(sequences)))
    assert batch.sequence_ids == tuple(f"id{number}" for number in range(len(sequences)))


def test_a_batch_has_the_types_that_kernels_expect():
    batch = VarlenCollator(ByteTokenizer(), max_residues=5)(records_of(["MK", "A"]))
    assert batch.input_ids_T.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.shape == (3,)


def test_a_collator_has_no_memory():
    collator = VarlenCollator(ByteTokenizer(), max_residues=8)
    first = collator(records_of(["MKT", "AC"]))
    collator(records_of(["WWWWW"]))
    assert torch.equal(collator(records_of(["MKT", "AC"])).input_ids_T, first.input_ids_T)


def random_run(folder, num_records=40, seed=3):
    chooser = random.Random(seed)
    records = [(f"s{n}", "".join(chooser.choices("ACDEFGHIKL", k=chooser.randint(1, 30)))) for n in range(num_records)]
    return MadeRun(folder, records)


def check_loader(run, batches, loader_processes):
    dataset = IndexBasedDataset(run.index, run.plan.positions)
    loader = create_async_dataloader(
        dataset, VarlenCollator(ByteTokenizer(), max_residues=99), batches, loader_processes=loader_processes
    )
    found = list(loader)
    expected = [[int(run.plan.positions[number]) for number in batch] for batch in batches]
    assert [list(batch.positions) for batch in found] == expected
    for batch in found:
        assert list(batch.sequence_ids) == run.index.sequence_ids(batch.positions)
        bounds = batch.cu_seqlens.tolist()
        for name, start, end in zip(batch.sequence_ids, bounds[:-1], bounds[1:], strict=True):
            assert bytes(batch.input_ids_T[start + 1 : end - 1].tolist()).decode() == run.sequence_of[name]
    return loader


@pytest.mark.parametrize("loader_processes", [0, 1, 2])
def test_what_goes_in_comes_out_in_order_for_any_number_of_loader_processes(tmp_path, loader_processes):
    run = random_run(tmp_path)
    plan = run.plan
    batches = [range(int(start), int(end)) for start, end in zip(plan.starts[:-1], plan.starts[1:], strict=True)]
    assert len(batches) > 5
    check_loader(run, batches, loader_processes)


@given(data=st.data())
@settings(max_examples=25)
def test_what_goes_in_comes_out_in_order_for_any_batching(tmp_path_factory, data):
    run = random_run(tmp_path_factory.mktemp("run"), num_records=12)
    num_sequences = len(run.plan.positions)
    numbers = data.draw(st.permutations(range(num_sequences)))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_sequences - 1))))
    batches = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, num_sequences], strict=True)]
    check_loader(run, batches, 0)


def test_batches_are_asked_for_one_by_one_when_they_are_about_to_be_made(tmp_path):
    run = random_run(tmp_path, num_records=10)
    asked = []

    def batches():
        for first in range(0, 10, 2):
            asked.append(first)
            yield range(first, first + 2)

    loader = create_async_dataloader(
        IndexBasedDataset(run.index), VarlenCollator(ByteTokenizer(), max_residues=99), batches()
    )
    came = []
    for number, batch in enumerate(loader):
        assert asked == list(range(0, 2 * number + 1, 2))
        came += batch.positions
    assert came == list(range(10))


def test_no_batches_give_nothing(tmp_path):
    run = random_run(tmp_path, num_records=3)
    loader = create_async_dataloader(
        IndexBasedDataset(run.index, []), VarlenCollator(ByteTokenizer(), max_residues=9), []
    )
    assert list(loader) == []
