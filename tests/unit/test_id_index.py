"""From an id to its row through a file: every id is found, damage is named, the bytes follow from the ids alone."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import flip_bit
from virnucpro.errors import ResultError
from virnucpro.store.results import id_index
from virnucpro.store.results.id_index import IdIndex, bytes_at_most, id_hashes, write_id_index


def write(path, hashes, **changes):
    hashes = np.asarray(hashes, dtype=np.uint64)
    shards = max(1, -(-len(hashes) // 100))
    description = {"hidden_dim": 8, "rows_per_shard": 100, "shard_bytes": [1234] * shards, **changes}
    write_id_index(path, hashes, **description)
    return path


@pytest.mark.parametrize("num_rows", [0, 1, 2, 255, 256, 257, 511, 513, 5_000, 70_000])
def test_every_id_leads_to_its_row_and_no_other_id_leads_anywhere(tmp_path, num_rows):
    names = [f"contig_{number}_chunk_1F1" for number in range(num_rows)]
    path = write(tmp_path / "ids.index", id_hashes(names))
    index = IdIndex(path)
    assert (index.num_rows, index.hidden_dim, index.rows_per_shard) == (num_rows, 8, 100)
    assert all(index.candidates(name) == [row] for row, name in enumerate(names))
    assert index.candidates("nobody") == []
    index.check(id_hashes(names))
    assert path.stat().st_size <= bytes_at_most(num_rows, len(index.shard_bytes))
    index.close()
    assert index.is_closed
    if num_rows:
        with pytest.raises(ValueError, match="closed"):
            index.candidates(names[0])


@given(hashes=st.lists(st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1), max_size=600))
@settings(max_examples=40)
def test_ids_of_the_same_hash_are_all_named(tmp_path_factory, hashes):
    index = IdIndex(write(tmp_path_factory.mktemp("index") / "ids.index", hashes))
    for wanted in {*hashes, 12345}:
        before, id_index.id_hash = id_index.id_hash, lambda name: int(name).to_bytes(8, "little")
        try:
            found = index.candidates(str(wanted))
        finally:
            id_index.id_hash = before
        assert found == [row for row, value in enumerate(hashes) if value == wanted]
    index.check(np.array(hashes, dtype=np.uint64))


def test_the_same_ids_give_the_same_bytes_and_an_index_of_other_ids_is_told_apart(tmp_path):
    hashes = id_hashes(f"s{number}" for number in range(1_000))
    one, two = write(tmp_path / "one", hashes), write(tmp_path / "two", hashes)
    assert one.read_bytes() == two.read_bytes()
    others = hashes.copy()
    others[[3, 700]] = others[[700, 3]]
    for wrong in (others, hashes[:-1], np.append(hashes, hashes[:1])):
        with pytest.raises(ResultError, match="does not lead to the ids of its shards"):
            IdIndex(one).check(wrong)


def find_all(path, names):
    index = IdIndex(path)
    for name in names:
        index.candidates(name)


def test_no_flipped_bit_is_believed(tmp_path):
    names = [f"s{number}" for number in range(1_000)]
    path = write(tmp_path / "ids.index", id_hashes(names))
    chooser = random.Random(7)
    for bit in chooser.sample(range(8 * path.stat().st_size), 200):
        flip_bit(path, bit)
        with pytest.raises(ResultError, match=r"ids\.index: ") as caught:
            find_all(path, names)
        assert any(word in caught.value.what for word in ("damaged", "is no index of ids"))
        flip_bit(path, bit)
    IdIndex(path).check(id_hashes(names))


@pytest.mark.parametrize("keep", [0, 7, 40, -1, -5_000])
def test_one_that_is_cut_short_is_damaged(tmp_path, keep):
    path = write(tmp_path / "ids.index", id_hashes(f"s{number}" for number in range(1_000)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ResultError, match="damaged"):
        IdIndex(path)


@pytest.mark.parametrize(
    "changes",
    [{"shard_bytes": []}, {"shard_bytes": [1] * 9}, {"rows_per_shard": 0}, {"hidden_dim": -1}, {"hidden_dim": "wide"}],
)
def test_one_whose_shards_do_not_add_up_is_refused(tmp_path, changes):
    with pytest.raises(ResultError, match="shards"):
        IdIndex(write(tmp_path / "ids.index", id_hashes(["a", "b"]), **changes))


def test_one_made_up_to_lead_beside_its_rows_is_refused(tmp_path):
    path = write(tmp_path / "ids.index", id_hashes(["a"]))
    data = bytearray(path.read_bytes())
    data[-8:] = (5).to_bytes(8, "little")
    head = len(data) - 16 - 4
    data[head : head + 4] = zlib.crc32(data[-16:]).to_bytes(4, "little")
    data[32:36] = zlib.crc32(data[:32] + data[36:-16]).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ResultError, match="rows that the result does not have"):
        IdIndex(path).candidates("a")


def test_an_absent_one_is_missing_and_something_else_is_none(tmp_path):
    with pytest.raises(ResultError, match=r"ids\.index: is missing"):
        IdIndex(tmp_path / "ids.index")
    (tmp_path / "ids.index").write_bytes(bytes(1000))
    with pytest.raises(ResultError, match="is no index of ids"):
        IdIndex(tmp_path / "ids.index")
