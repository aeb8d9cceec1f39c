"""Parts and shards: what went in comes out, whatever is damaged is refused."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import flip_bit
from virnucpro import durable
from virnucpro.errors import ResultError, SourceGoneError
from virnucpro.store import schema
from virnucpro.store.parts import (
    BlockRows,
    SealedBlocks,
    part_paths,
    read_block_numbers,
    write_part,
    write_shard,
)
from virnucpro.store.schema import BlockOrigin
from virnucpro.this_host import MOST_HOSTS, merged_processors


def block(number, num_sequences=3, width=4, first=None):
    """A block whose every value tells its block, row and column."""
    first = number * 10 if first is None else first
    values = number + np.arange(num_sequences)[:, None] / 16 + np.arange(width)[None, :] / 1024
    names = [f"s{number}_{row}_é" for row in range(num_sequences)]
    return BlockRows(number, np.arange(first, first + num_sequences), names, values.astype(np.float32))


def rows_of(source):
    return np.concatenate([np.empty((0, source.hidden_dim), np.float32), *source.iter_rows()])


def ids_of(source):
    return [name for names in source.iter_sequence_ids() for name in names]


def test_a_part_that_its_rank_seals_meanwhile_is_gone_and_not_unwritable(tmp_path, monkeypatch):
    sources = [SealedBlocks.open(write_part(tmp_path, [block(number)], plan_fingerprint="p")) for number in (1, 2)]
    write_ids = schema.write_ids

    def remove_then_write(*arguments):
        sources[1].path.unlink()
        write_ids(*arguments)

    monkeypatch.setattr(schema, "write_ids", remove_then_write)
    with pytest.raises(SourceGoneError):
        write_shard(tmp_path / "shard_0.h5", sources, plan_fingerprint="p", hidden_dim=4)
    assert not (tmp_path / "shard_0.h5").exists()


def test_a_part_that_goes_while_hdf5_opens_it_is_gone_and_not_unreadable(tmp_path, monkeypatch):
    source = SealedBlocks.open(write_part(tmp_path, [block(1)], plan_fingerprint="p"))

    def goes(path, *_args, **_more):
        source.path.unlink()
        raise OSError("Unable to synchronously open file (can't retrieve stat info for file)")

    monkeypatch.setattr(schema.h5py, "File", goes)
    with pytest.raises(SourceGoneError):
        next(source.iter_sequence_ids())


def test_a_part_gives_back_blocks_positions_ids_and_rows(tmp_path):
    blocks = [block(2, 3), block(7, 1), block(9, 5)]
    path = write_part(tmp_path, blocks, plan_fingerprint="the plan")
    source = SealedBlocks.open(path)
    source.check()
    assert source.plan_fingerprint == "the plan"
    assert source.blocks.tolist() == [[2, 3, 0], [7, 1, 0], [9, 5, 0]]
    assert source.positions.tolist() == [20, 21, 22, 70, 90, 91, 92, 93, 94]
    assert ids_of(source) == [name for item in blocks for name in item.sequence_ids]
    assert rows_of(source).tobytes() == np.concatenate([item.embeddings for item in blocks]).tobytes()
    assert source.hidden_dim == 4
    assert read_block_numbers(path).tolist() == [2, 7, 9]


def test_rows_from_anywhere_are_announced_to_the_system_before_they_are_read(tmp_path, monkeypatch):
    source = SealedBlocks.open(write_part(tmp_path, [block(1, 400, width=1 << 13)], plan_fingerprint="p"))
    announced, read, ahead = [], [], 0
    advise, pread = os.posix_fadvise, os.pread

    def tell(descriptor, offset, num_bytes, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        announced.append((num_bytes, offset))
        advise(descriptor, offset, num_bytes, advice)

    def look(descriptor, num_bytes, offset):
        nonlocal ahead
        read.append((num_bytes, offset))
        ahead = max(ahead, len(announced) - len(read))
        return pread(descriptor, num_bytes, offset)

    numbers = np.arange(0, 400, 4)
    numbers = numbers[numbers != 200]
    expected = rows_of(source)[numbers]
    monkeypatch.setattr(os, "posix_fadvise", tell)
    monkeypatch.setattr(os, "pread", look)
    found = [rows for _, rows in source.iter_rows_at(numbers)]
    assert np.concatenate(found).tobytes() == expected.tobytes()
    of_rows = [one for one in read if one[0] >= source.hidden_dim * 4]
    assert of_rows == announced
    assert len(of_rows) == len(numbers)
    assert 32 <= ahead <= 128


def test_a_part_is_an_hdf5_file_that_anyone_can_open(tmp_path):
    path = write_part(tmp_path, [block(1)], plan_fingerprint="p")
    with h5py.File(path) as file:
        assert file["embeddings"].dtype == np.float32
        assert file["embeddings"].shape == (3, 4)
        assert file["sequence_ids"].asstr()[0] == "s1_0_é"


def test_the_same_blocks_give_the_same_bytes_and_the_same_name(tmp_path):
    first = write_part(tmp_path / "a", [block(3), block(4)], plan_fingerprint="p")
    second = write_part(tmp_path / "b", [block(3), block(4)], plan_fingerprint="p")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True), min_size=2, max_size=6))
@settings(max_examples=40)
def test_parts_of_other_blocks_never_take_each_others_name(tmp_path_factory, lists):
    folder = tmp_path_factory.mktemp("parts")
    different = {tuple(sorted(numbers)) for numbers in lists}
    for numbers in different:
        write_part(folder, [block(number) for number in numbers], plan_fingerprint="p")
    assert len(part_paths(folder)) == len(different)
    found = {tuple(read_block_numbers(path).tolist()) for path in part_paths(folder)}
    assert found == different


def test_threads_write_parts_at_the_same_time(tmp_path):
    numbers = range(200)
    with ThreadPoolExecutor(4) as threads:
        paths = list(
            threads.map(lambda number: write_part(tmp_path, [block(number)], plan_fingerprint="plan"), numbers)
        )
    assert [SealedBlocks.open(path).blocks[0, 0] for path in paths] == list(numbers)


def test_every_flipped_bit_of_a_part_is_refused_before_hdf5_sees_it(tmp_path):
    path = write_part(tmp_path, [block(0), block(1)], plan_fingerprint="p")
    num_bits = path.stat().st_size * 8
    for bit in random.Random(7).sample(range(num_bits), 300):
        flip_bit(path, bit)
        with pytest.raises(ResultError):
            SealedBlocks.open(path)
        flip_bit(path, bit)
    SealedBlocks.open(path).check()


def test_the_numbers_at_the_end_are_right_or_refused(tmp_path):
    path = write_part(tmp_path, [block(5), block(6)], plan_fingerprint="p")
    size_bytes = path.stat().st_size
    table = range(size_bytes - durable.SEAL_BYTES - 64, size_bytes - durable.SEAL_BYTES)
    for byte in table:
        flip_bit(path, byte * 8 + byte % 8)
        with pytest.raises(ResultError):
            read_block_numbers(path)
        flip_bit(path, byte * 8 + byte % 8)
    for byte in range(0, table.start, 500):
        flip_bit(path, byte * 8)
        assert read_block_numbers(path).tolist() == [5, 6]
        flip_bit(path, byte * 8)


@pytest.mark.parametrize("kept", [0, 30, 100, 500, -1, -40, -104])
def test_a_part_that_is_cut_short_is_refused(tmp_path, kept):
    path = write_part(tmp_path, [block(0)], plan_fingerprint="p")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ResultError):
        SealedBlocks.open(path)
    with pytest.raises(ResultError):
        read_block_numbers(path)


def test_a_number_that_is_not_finite_is_found(tmp_path):
    bad = block(0)
    bad.embeddings[1, 2] = np.nan
    source = SealedBlocks.open(write_part(tmp_path, [bad], plan_fingerprint="p"))
    with pytest.raises(ResultError, match="not finite"):
        source.check()


@pytest.mark.parametrize(
    "broken",
    [
        BlockRows(0, np.arange(3), ["a", "b", "c"], np.zeros((2, 4), np.float32)),
        BlockRows(0, np.arange(3), ["a", "b"], np.zeros((3, 4), np.float32)),
        BlockRows(0, np.arange(2), ["a", "b", "c"], np.zeros((3, 4), np.float32)),
    ],
)
def test_rows_ids_and_positions_of_a_block_must_be_equally_many(tmp_path, broken):
    with pytest.raises(AssertionError, match="block 0"):
        write_part(tmp_path, [broken], plan_fingerprint="p")
    assert part_paths(tmp_path) == []


def test_blocks_that_do_not_add_up_to_the_rows_are_refused(tmp_path):
    path = write_part(tmp_path, [block(0)], plan_fingerprint="p")
    raw = path.read_bytes()[: -durable.SEAL_BYTES]
    (tmp_path / "open.h5").write_bytes(raw)
    for table in ([[0, 2, 0]], [[0, 5, 0], [1, -2, 0]]):
        with h5py.File(tmp_path / "open.h5", "r+") as file:
            del file["blocks"]
            file["blocks"] = np.array(table)
        durable.write_bytes(tmp_path / "forged.h5", (tmp_path / "open.h5").read_bytes(), seal=True)
        with pytest.raises(ResultError, match="add up"):
            SealedBlocks.open(tmp_path / "forged.h5")


def test_a_shard_names_the_processors_and_hosts_of_all_its_parts(tmp_path, monkeypatch):
    for number, (host, processor) in enumerate([("b", "x"), ("a", "x"), ("a", "y"), ("c", "")]):
        monkeypatch.setenv("VIRNUCPRO_HOST_NAME", host)
        write_part(tmp_path, [block(number)], plan_fingerprint="p", processor=processor)
    sources = [SealedBlocks.open(path) for path in part_paths(tmp_path)]
    assert [source.processors for source in sources] == [{"x": ["b"]}, {"x": ["a"]}, {"y": ["a"]}, {}]
    write_shard(tmp_path / "shard_0.h5", sources, plan_fingerprint="p", hidden_dim=4)
    assert SealedBlocks.open(tmp_path / "shard_0.h5").processors == {"x": ["a", "b"], "y": ["a"]}


def test_the_hosts_of_a_thousand_parts_fit_into_a_shard(tmp_path):
    hosts = [f"node-{number:04d}" for number in range(1000)]
    source = SealedBlocks.open(write_part(tmp_path, [block(0)], plan_fingerprint="p"))
    sources = [replace(source, processors={"x": [host]}) for host in hosts]
    assert merged_processors(source.processors for source in sources) == {"x": hosts[:MOST_HOSTS]}


@pytest.mark.parametrize("processors", ["", "[1]", '{"x": 1}', "{" * 99_999, b"\xff", 7])
def test_processors_that_are_none_are_refused(tmp_path, processors):
    path = write_part(tmp_path, [block(0)], plan_fingerprint="p")
    (tmp_path / "open.h5").write_bytes(path.read_bytes()[: -durable.SEAL_BYTES])
    with h5py.File(tmp_path / "open.h5", "r+") as file:
        file.attrs["processors"] = processors[: 1 << 15] if isinstance(processors, str) else processors
    durable.write_bytes(tmp_path / "forged.h5", (tmp_path / "open.h5").read_bytes(), seal=True)
    with pytest.raises(ResultError):
        SealedBlocks.open(tmp_path / "forged.h5")


@pytest.mark.parametrize("origin", [-1, 4])
def test_an_origin_that_does_not_exist_is_refused(tmp_path, origin):
    path = write_part(tmp_path, [replace(block(0), origin=origin)], plan_fingerprint="p")
    with pytest.raises(ResultError, match="origin"):
        SealedBlocks.open(path)


def test_parts_and_shards_keep_the_origin_of_each_block(tmp_path):
    origins = [BlockOrigin.CACHED, BlockOrigin.COMPUTED, BlockOrigin.RESPLIT]
    blocks = [replace(block(number), origin=origin) for number, origin in enumerate(origins)]
    parts = [write_part(tmp_path, some, plan_fingerprint="p") for some in (blocks[:2], blocks[2:])]
    write_shard(
        tmp_path / "shard_0.h5", [SealedBlocks.open(path) for path in parts], plan_fingerprint="p", hidden_dim=4
    )
    assert SealedBlocks.open(tmp_path / "shard_0.h5").blocks.tolist() == [[0, 3, 2], [1, 3, 0], [2, 3, 1]]


def test_an_open_source_can_be_read_after_another_file_took_its_name(tmp_path):
    path = write_part(tmp_path, [block(0)], plan_fingerprint="p")
    source = SealedBlocks.open(path)
    assert write_part(tmp_path, [block(0)], plan_fingerprint="p") == path
    source.check()
    assert rows_of(source).tobytes() == block(0).embeddings.tobytes()


@given(data=st.data())
@settings(max_examples=25)
def test_a_shard_holds_every_row_of_its_parts_in_their_order(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shard")
    numbers = data.draw(st.permutations(range(7)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 6))))
    groups = [numbers[a:b] for a, b in zip([0, *cuts], [*cuts, 7], strict=True)]
    paths = [write_part(folder, [block(n, n % 3 + 1) for n in group], plan_fingerprint="p") for group in groups]
    write_shard(folder / "shard_0.h5", [SealedBlocks.open(path) for path in paths], plan_fingerprint="p", hidden_dim=4)
    shard = SealedBlocks.open(folder / "shard_0.h5")
    shard.check()
    expected = [block(n, n % 3 + 1) for group in groups for n in group]
    assert shard.blocks[:, 0].tolist() == list(numbers)
    assert read_block_numbers(shard.path).tolist() == list(numbers)
    assert rows_of(shard).tobytes() == np.concatenate([item.embeddings for item in expected]).tobytes()
    assert ids_of(shard) == [name for item in expected for name in item.sequence_ids]
    assert shard.positions.tolist() == [p for item in expected for p in item.positions.tolist()]


def test_an_empty_shard_has_no_rows_and_the_models_width(tmp_path):
    write_shard(tmp_path / "shard_3.h5", [], plan_fingerprint="p", hidden_dim=320)
    shard = SealedBlocks.open(tmp_path / "shard_3.h5")
    shard.check()
    with h5py.File(shard.path) as file:
        assert file["embeddings"].shape == (0, 320)
        assert file["sequence_ids"].shape == (0,)
    assert (shard.hidden_dim, len(shard.positions), shard.blocks.shape) == (320, 0, (0, 3))


def test_a_shard_of_no_rows_and_no_width_joins_one_that_has_rows(tmp_path):
    write_shard(tmp_path / "empty.h5", [], plan_fingerprint="p", hidden_dim=0)
    sources = [
        SealedBlocks.open(tmp_path / "empty.h5"),
        SealedBlocks.open(write_part(tmp_path, [block(1)], plan_fingerprint="p")),
    ]
    write_shard(tmp_path / "both.h5", sources, plan_fingerprint="p", hidden_dim=0)
    assert rows_of(SealedBlocks.open(tmp_path / "both.h5")).tobytes() == block(1).embeddings.tobytes()


# --- write_rows ------------------------------------------------------------------------------------------------------


@contextmanager
def file_of_rows(path, shape):
    """A new file with the dataset of that shape, of which HDF5 has let go, and where the dataset begins."""
    with durable.NewFile(path) as file:
        with schema.created(file, most_bytes=schema.bytes_at_most(*shape, id_bytes=0)) as hdf5:
            offset = schema.early_allocated(hdf5, "embeddings", shape)
        yield file, offset


@given(data=st.data())
@settings(max_examples=60)
def test_rows_written_in_any_order_and_any_pieces_stand_where_they_belong(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("rows") / "rows.h5"
    num_rows, width = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    order = np.array(data.draw(st.permutations(range(num_rows))), dtype=np.int64)
    cuts = sorted(data.draw(st.sets(st.integers(0, num_rows), max_size=6)))
    expected = np.arange(num_rows * width, dtype=np.float32).reshape(num_rows, width)
    with file_of_rows(path, (num_rows, width)) as (file, offset):
        for start, end in zip([0, *cuts], [*cuts, num_rows], strict=True):
            numbers = np.sort(order[start:end]) if data.draw(st.booleans()) else order[start:end]
            schema.write_rows(file, offset, width, numbers, expected[numbers])
    with h5py.File(path) as file:
        assert file["embeddings"][()].tobytes() == expected.tobytes()


def test_writing_no_rows_writes_nothing(tmp_path):
    path = tmp_path / "rows.h5"
    with file_of_rows(path, (2, 3)) as (file, offset):
        before = path.read_bytes()
        schema.write_rows(file, offset, 3, np.empty(0, np.int64), np.empty((0, 3), np.float32))
        assert path.read_bytes() == before
        schema.write_rows(file, offset, 3, np.array([1]), np.full((1, 3), 5, np.float32))
        assert path.read_bytes() != before


def test_a_dataset_without_elements_takes_no_space(tmp_path):
    path = tmp_path / "rows.h5"
    with file_of_rows(path, (0, 8)) as (file, offset):
        size_bytes = path.stat().st_size
        assert offset is None
        schema.write_rows(file, None, 8, np.empty(0, np.int64), np.empty((0, 8), np.float32))
    assert path.stat().st_size == size_bytes


@pytest.mark.parametrize("rows", [np.zeros((2, 4), np.float32), np.zeros((1, 3), np.float32)])
def test_rows_of_another_width_or_number_are_never_written(tmp_path, rows):
    path = tmp_path / "rows.h5"
    with file_of_rows(path, (4, 3)) as (file, offset), pytest.raises(AssertionError):
        schema.write_rows(file, offset, 3, np.array([0, 1]), rows)


def test_rows_of_another_number_format_are_converted(tmp_path):
    path = tmp_path / "rows.h5"
    with file_of_rows(path, (2, 2)) as (file, offset):
        schema.write_rows(file, offset, 2, np.array([1, 0]), np.array([[3.0, 4.0], [1.0, 2.0]], dtype=">f8"))
    with h5py.File(path) as file:
        assert file["embeddings"][()].tolist() == [[1.0, 2.0], [3.0, 4.0]]
