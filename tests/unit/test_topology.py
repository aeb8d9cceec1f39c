"""Terminal repeats are found however a contig is read, and low complexity is none."""

from __future__ import annotations

import random

import pytest

from virnucpro.calls.topology import LONGEST_REPEAT_NT, SHORTEST_REPEAT_NT, ContigEnds, Topology

COMPLEMENT = bytes.maketrans(b"ACGT", b"TGCA")


def letters_of(count, seed=1):
    return bytes(random.Random(seed).choices(b"ACGT", k=count))


def topology_of(sequence, step=1000, overlap=100):
    ends = ContigEnds(len(sequence))
    for start in range(0, len(sequence), step):
        ends.read(max(start - overlap, 0), sequence[max(start - overlap, 0) : start + step])
    return ends.topology()


@pytest.mark.parametrize("repeat_nt", [SHORTEST_REPEAT_NT, 55, 2_000, LONGEST_REPEAT_NT])
@pytest.mark.parametrize("step", [700, 100_000])
def test_direct_and_inverted_repeats_of_any_length_are_found(repeat_nt, step):
    repeat, middle = letters_of(repeat_nt), letters_of(50_000, seed=2)
    assert topology_of(repeat + middle + repeat, step) is Topology.DIRECT
    assert topology_of(repeat + middle + repeat[::-1].translate(COMPLEMENT), step) is Topology.INVERTED
    assert topology_of(repeat + middle, step) is Topology.LINEAR


def test_a_shorter_repeat_or_one_with_another_letter_is_none():
    repeat, middle = letters_of(SHORTEST_REPEAT_NT), letters_of(5_000, seed=2)
    assert topology_of(repeat[1:] + middle + repeat[1:]) is Topology.LINEAR
    other = bytes([repeat[0]]) + repeat[1:10] + (b"A" if repeat[10:11] != b"A" else b"C") + repeat[11:]
    assert topology_of(repeat + middle + other) is Topology.LINEAR


@pytest.mark.parametrize("end", [b"A" * 60, b"AT" * 30, b"N" * 60, letters_of(30)[:19] + b"N" + letters_of(30)[19:]])
def test_low_complexity_and_unknown_letters_are_no_repeat(end):
    assert topology_of(end + letters_of(5_000, seed=2) + end) is Topology.LINEAR


def test_a_repeat_is_at_most_half_of_a_contig():
    half = letters_of(400)
    assert topology_of(half + half) is Topology.DIRECT
    assert topology_of(letters_of(30)) is Topology.LINEAR
    assert topology_of(b"") is Topology.LINEAR
