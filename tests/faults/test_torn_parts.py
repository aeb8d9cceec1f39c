"""
Row 5: the power goes while a part, a shard or the index is on its way to disk.

Every write is recorded. What may be on disk after the cut is any beginning of the writes, any one of them lost, and
any one of them only begun; each of these files must be told from the whole one, by its seal or as the index's readers
tell it.
"""

from __future__ import annotations

import numpy as np
import pytest

from virnucpro import durable
from virnucpro.errors import ResultError
from virnucpro.store.parts import BlockRows, SealedBlocks, write_part, write_shard


@pytest.fixture
def recorded(monkeypatch):
    """Every write of this test, by the temporary name: (where, bytes); HDF5's own as one of the whole file."""
    writes: dict[str, list[tuple[int, bytes]]] = {}
    write_at = durable.NewFile.write_at

    def record(file, data, at_bytes):
        log = writes.setdefault(file.path.name.split(".h5.")[0].lstrip("."), [])
        log.append((at_bytes, bytes(memoryview(data).tobytes())))
        return write_at(file, data, at_bytes)

    monkeypatch.setattr(durable.NewFile, "write_at", record)
    return writes


def played(writes, whole: bytes, *, size=None) -> bytes:
    """What a file holds after *writes*; what no write of ours made is as it is in the whole file."""
    image = bytearray(whole if size is None else whole[:size])
    for at, data in writes:
        image[at : at + len(data)] = data
    return bytes(image)


def states_after_a_cut(writes, whole: bytes):
    """Every beginning of the writes, every one dropped, every one torn in its middle."""
    blank = bytes(len(whole))
    for number, (at, data) in enumerate(writes):
        yield f"the first {number} of {len(writes)} writes", played(writes[:number], blank)
        if number:
            yield (
                f"cut off after {number} writes",
                played(writes[:number], whole, size=max(a + len(d) for a, d in writes[:number])),
            )
        rest = [*writes[:number], *writes[number + 1 :]]
        yield f"write {number} lost", played(rest, whole[:at] + bytes(len(data)) + whole[at + len(data) :])
        half = (at + len(data) // 2, bytes(len(data) - len(data) // 2))
        yield f"write {number} torn", played([half], whole)
        for sector in range(0, len(data), 4096):  # a page of it that did not get there
            page = (at + sector, bytes(min(4096, len(data) - sector)))
            yield f"page {sector // 4096} of write {number} lost", played([page], whole)


def blocks(first, count, rows=3, width=64):
    for number in range(first, first + count):
        values = np.random.default_rng(number).random((rows, width), dtype=np.float32) + 0.5
        yield BlockRows(
            number, np.arange(number * rows, (number + 1) * rows), [f"b{number}_{n}" for n in range(rows)], values
        )


def accepted(path, states, whole):
    """Try each state under the name *path*; return (tries, those that were taken for whole)."""
    tries, wrong = 0, []
    for what, image in states:
        if image == whole:
            continue
        path.write_bytes(image)
        tries += 1
        try:
            SealedBlocks.open(path).check()
        except ResultError:
            continue
        wrong.append(what)
    return tries, wrong


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.soak)])
def test_a_part_of_which_a_write_was_lost_is_never_taken_for_whole(tmp_path, recorded, soak_table, step):
    path = write_part(tmp_path, list(blocks(0, 20)), plan_fingerprint="plan")
    whole = path.read_bytes()
    (writes,) = recorded.values()
    assert played(writes, bytes(len(whole))) == whole  # every byte of a part is written by us
    tries, wrong = accepted(path, states_after_a_cut(writes, whole), whole)
    prefixes = ((f"{size} bytes", whole[:size]) for size in range(0, len(whole), step))
    more_tries, more_wrong = accepted(path, prefixes, whole)
    soak_table(
        "a truncated part, or a lost write of it (power cut)",
        tries=tries + more_tries,
        differing=len(wrong + more_wrong),
    )
    assert wrong + more_wrong == []
    assert tries > 10
    assert more_tries > 300


@pytest.mark.parametrize("step", [512, pytest.param(32, marks=pytest.mark.soak)])
def test_a_shard_of_which_a_write_was_lost_is_never_taken_for_whole(tmp_path, recorded, soak_table, step):
    parts = [write_part(tmp_path, list(blocks(n * 5, 5)), plan_fingerprint="plan") for n in range(4)]
    recorded.clear()
    path = tmp_path / "shard_0.h5"
    write_shard(path, [SealedBlocks.open(part) for part in parts], plan_fingerprint="plan", hidden_dim=64)
    whole = path.read_bytes()
    writes = recorded["shard_0"]
    assert len(writes) >= 4 + 3  # the empty image, rows of four parts, the table of blocks, the seal
    tries, wrong = accepted(path, states_after_a_cut(writes, whole), whole)
    places = range(0, len(whole), step)
    holes = ((f"hole at {at}", played([(at, bytes(len(whole[at : at + step])))], whole)) for at in places)
    more_tries, more_wrong = accepted(path, holes, whole)
    soak_table("a lost write of a shard (power cut)", tries=tries + more_tries, differing=len(wrong + more_wrong))
    assert wrong + more_wrong == []
    assert tries > 15
