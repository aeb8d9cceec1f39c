"""The dataset: the records that were asked for, in that order, in any process."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from virnucpro.data.sequence_dataset import IndexBasedDataset
from virnucpro.data.sequence_index import SequenceIndex


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(b">a\nM\n>b\nMK\n>c\nMKV\n>d\nMKVL\n")
    index = SequenceIndex.build([path], tmp_path / "index", unpack_dir=tmp_path)
    return IndexBasedDataset(index, np.array([3, 0, 1]))


def test_records_come_in_the_order_of_the_indices(dataset):
    assert len(dataset) == 3
    assert [(dataset[number].position, dataset[number].sequence) for number in range(3)] == [
        (3, "M"),
        (0, "MKVL"),
        (1, "MKV"),
    ]


def test_several_records_come_in_the_order_asked_for(dataset):
    assert [record.sequence_id for record in dataset.__getitems__([2, 0])] == ["c", "a"]


def test_iteration_ends_after_the_last_record(dataset):
    assert [record.sequence_id for record in dataset] == ["a", "d", "c"]


def test_without_indices_every_record_is_there_by_its_position(dataset):
    everything = IndexBasedDataset(dataset.index)
    assert len(everything) == 4
    assert [record.sequence_id for record in everything.__getitems__([3, 0])] == ["a", "d"]
    assert [record.position for record in everything] == [0, 1, 2, 3]


def test_a_dataset_of_nothing_is_empty(dataset):
    assert len(IndexBasedDataset(dataset.index, [])) == 0
    assert IndexBasedDataset(dataset.index, []).__getitems__([]) == []


def test_a_spawned_process_reads_the_same_records(dataset):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(dataset.__getitems__, ([0, 1, 2],)) == dataset.__getitems__([0, 1, 2])


def test_neither_index_nor_dataset_imports_torch():
    code = "import sys, virnucpro.data.sequence_dataset, virnucpro.data.sequence_index; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True, timeout=60
    )
    assert told.stdout == "False\n"
