"""Lines come back in the order of their bytes, however many pieces they were sorted in."""

from __future__ import annotations

import random

import pytest

from virnucpro.store.sorted_lines import SortedLines


@pytest.mark.parametrize("in_memory", [1, 7, 50, 10_000])
def test_all_lines_come_back_in_order(tmp_path, in_memory):
    chooser = random.Random(3)
    lines = [f"c{chooser.randint(0, 300)}_chunk_{n}\t{n % 2 == 0}\n".encode() for n in range(200)]
    chooser.shuffle(lines)
    with SortedLines(tmp_path, lines_in_memory=in_memory) as collected:
        for start in range(0, len(lines), 9):
            collected.add(lines[start : start + 9])
        assert b"".join(collected.pieces()) == b"".join(sorted(lines))
    assert list(tmp_path.iterdir()) == []


def test_the_order_is_that_of_the_ids_alone(tmp_path):
    """As pandas orders them: a tab after the id is less than anything that an id may go on with."""
    ids = ["a_chunk_10", "a_chunk_1", "a_chunk_2", "a", "aé_chunk_1", "a_1_chunk_1", "A_chunk_1"]
    with SortedLines(tmp_path, lines_in_memory=3) as collected:
        collected.add(f"{name}\tTrue\n".encode() for name in ids)
        found = b"".join(collected.pieces()).decode().splitlines()
    assert [line.split("\t")[0] for line in found] == sorted(ids)
