"""The driver's book of units: every block ends once, computed or given up, whatever becomes of the workers."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.errors import HostCheckError
from virnucpro.pipeline.work import units
from virnucpro.pipeline.work.units import MOST_LOSSES, UnitBook, UnitRecord
from virnucpro.telemetry.ranks import Rank

DEVICES = 2
REFUSED = HostCheckError("host-b", "/shared/run", "is not there")


def book_of(blocks, *, of_all=None):
    """A book of some blocks of the same size."""
    return UnitBook(list(blocks), np.full(of_all or max(blocks, default=-1) + 1, 100, np.int64))


def record(*, rank=None, **values):
    return UnitRecord(rank=rank or Rank(rank=0, device="cpu"), rows=0, tokens=0, seconds=0.0, **values)


def all_units(book, *, devices=DEVICES):
    """Hand out what there is."""
    return list(iter(lambda: book.next(devices), None))


class Bookkeeper:
    """Follows what is handed out; each block waits, is out, or is done, and none is handed out twice at a time."""

    def __init__(self, tokens, todo):
        self.book = UnitBook(todo, np.array(tokens, np.int64))
        self.todo, self.waits, self.done, self.out = todo, set(todo), set(), []

    def hand_out(self, devices):
        if (unit := self.book.next(devices)) is None:
            assert not self.waits - self.book.given_up.keys()
            return
        assert list(unit.blocks) == sorted(set(unit.blocks))
        assert unit.blocks
        assert self.waits.issuperset(unit.blocks)
        assert {block for block, _ in unit.quarantined.values()}.issubset(unit.blocks)
        assert unit.suspects.keys() <= set(unit.blocks)
        self.waits.difference_update(unit.blocks)
        self.out.append(unit)

    def end(self, unit, how, left):
        """End a unit that is out, of whose blocks the first *left* were not computed."""
        back, quarantined = list(unit.blocks), {unit.blocks[0] * 10: (unit.blocks[0], ("died", 3))}
        self.out.remove(unit)
        match how:
            case "lost":
                self.book.lost(unit)
            case "refused":
                self.book.take(unit, record(is_lost=True, error=REFUSED))
            case "unproved" if not unit.losses:  # else nobody else is asked
                self.book.take(unit, record(left=back[:left], quarantined=quarantined, is_proved=False, is_lost=True))
            case _:
                back = back[:left]
                suspects = dict.fromkeys(back, 1)
                self.book.take(unit, record(left=back, quarantined=quarantined, suspects=suspects))
        self.waits.update(back)
        self.done.update(set(unit.blocks).difference(back))

    def check_end(self):
        assert self.book.is_done
        given_up = self.book.given_up.keys()
        assert self.done.isdisjoint(given_up)
        assert self.done | given_up == set(self.todo)


@given(st.data(), st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 5))
def test_every_block_is_done_or_given_up_whatever_becomes_of_the_units(data, tokens, devices):
    todo = [block for block in range(len(tokens)) if data.draw(st.booleans())]
    kept = Bookkeeper(tokens, todo)
    ends = st.sampled_from(["computed", "lost", "refused", "unproved", "closed"])
    with patch.object(units, "MOST_LOSSES", 2):
        for _ in range(data.draw(st.integers(0, 60))):
            if not kept.out or data.draw(st.booleans()):
                kept.hand_out(devices)
                continue
            unit, how = data.draw(st.sampled_from(kept.out)), data.draw(ends)
            if how == "closed":
                kept.book.close(("cannot_write", 1))
                assert kept.waits <= kept.book.given_up.keys()
            else:
                kept.end(unit, how, data.draw(st.integers(0, len(unit.blocks))))
        while not kept.book.is_done:
            kept.hand_out(devices)
            for unit in list(kept.out):
                kept.end(unit, "computed", 0)
    kept.check_end()


@pytest.mark.parametrize("devices", [1, 4, 100])
def test_units_get_smaller_so_that_a_device_ten_times_slower_ends_with_the_others(devices):
    blocks = 20_000 * devices
    sizes = [len(unit.blocks) for unit in all_units(book_of(range(blocks)), devices=devices)]
    assert all(before >= after for before, after in pairwise(sizes))
    assert len(sizes) < 40 * devices
    rates = [1.0 if number % 2 else 0.1 for number in range(devices)]
    free_at = [0.0] * devices
    for size in sizes:
        soonest = min(range(devices), key=lambda number: free_at[number])
        free_at[soonest] += size / rates[soonest]
    assert max(free_at) < 1.05 * blocks / sum(rates)


def test_only_blocks_that_are_to_be_computed_are_handed_out_and_a_large_one_is_a_unit_alone():
    tokens = np.array([10_000, 1, 1, 1, 1, 1], np.int64)
    assert [unit.blocks for unit in all_units(UnitBook([0, 2, 5], tokens), devices=1)] == [[0], [2, 5]]
    assert UnitBook([], tokens).is_done


def test_more_devices_later_get_smaller_units():
    book = book_of(range(10_000))
    first, second = book.next(1), book.next(10)
    assert len(second.blocks) < len(first.blocks) / 5


def test_a_unit_that_is_lost_again_is_halved_and_given_up_in_the_end():
    book = book_of([3, 4, 5, 6])
    with patch.object(units, "UNITS_OF_A_SHARE", 1):
        unit = book.next(1)
    known = {40: (4, ("died", 3)), 60: (6, ("hung", 2))}
    book.take(unit, record(left=unit.blocks, suspects={4: 2, 6: 1}, quarantined=known, is_lost=True))
    again = book.next(1)
    assert (again.blocks, again.losses) == ([3, 4, 5, 6], 1)
    book.lost(again)
    first, second = all_units(book)
    assert (first.blocks, first.suspects, first.quarantined) == ([3, 4], {4: 2}, {40: (4, ("died", 3))})
    assert (second.blocks, second.suspects, second.quarantined) == ([5, 6], {6: 1}, {60: (6, ("hung", 2))})
    book.take(first, record())
    book.lost(second)
    losses = 3
    while lost := all_units(book):
        assert all(len(unit.blocks) == 1 for unit in lost)
        assert not book.given_up
        for unit in lost:
            book.lost(unit)
        losses += 1
    assert losses == MOST_LOSSES + 1
    assert book.given_up == dict.fromkeys([5, 6], ("died", MOST_LOSSES + 1))


def test_what_a_worker_could_not_compute_is_assigned_again_with_what_is_known_of_it():
    book = book_of(range(64))
    unit = book.next(1)
    assert unit.blocks == list(range(8))
    failed = Rank(rank=0, device="cpu", state="failed", failure="hung", attempts=3)
    known = {10: (1, ("died", 3)), 70: (7, ("hung", 2))}
    book.take(unit, record(rank=failed, left=[6, 7], suspects={7: 2}, quarantined=known, is_lost=True))
    assert book.quarantined() == {10: ("died", 3), 70: ("hung", 2)}
    again = book.next(1)
    assert (again.blocks, again.suspects, again.quarantined) == ([6, 7], {7: 2}, {70: (7, ("hung", 2))})
    with patch.object(units, "MOST_LOSSES", 1):
        book.take(again, record(rank=failed, left=[7], is_lost=True))
    assert book.given_up == {7: ("hung", 3)}


def test_a_worker_that_has_computed_nothing_proves_nothing_against_sequences_the_first_time():
    book = book_of([0])
    against = {0: (0, ("device_error", 1))}
    book.take(book.next(1), record(quarantined=against, is_proved=False))
    assert book.quarantined() == {}
    again = book.next(1)
    assert (again.blocks, again.quarantined) == ([0], {})
    book.take(again, record(quarantined=against, is_proved=False))
    assert book.quarantined() == {0: ("device_error", 1)}
    assert book.is_done


def test_a_refused_host_counts_against_nothing():
    book = book_of([0])
    for _ in range(MOST_LOSSES + 5):
        unit = book.next(1)
        assert unit.losses == 0
        book.take(unit, record(is_lost=True, error=REFUSED))
    assert not book.is_done
    assert book.given_up == {}


def test_a_closed_book_gives_up_what_is_not_handed_out_and_waits_for_the_rest():
    book = book_of(range(64))
    out, lost = book.next(1), book.next(1)
    book.lost(lost)
    book.close(("cannot_write", 2))
    assert book.given_up == dict.fromkeys(range(len(out.blocks), 64), ("cannot_write", 2))
    assert not book.has_more
    assert not book.is_done
    book.take(out, record())
    assert book.is_done


def test_a_missing_sequence_has_the_reason_of_its_own_or_that_of_its_block():
    book = book_of([0, 1])
    book._quarantined, book.given_up = {5: ("hung", 4)}, {0: ("died", 13)}
    assert book.why_missing(5, 0, []) == ("hung", 4)
    assert book.why_missing(6, 0, []) == ("died", 13)
    assert book.why_missing(6, 1, []) == ("unknown", 0)
