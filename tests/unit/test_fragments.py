"""Where chunks begin and end, and which of their frames are open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.plain_fragments import plain_bounds, plain_frames
from virnucpro.data.frames import FRAMES, bounds_of_chunks, chunk_bounds, chunks_per_contig, open_frames

lengths_nt = st.integers(1, 60_000)
chunks_nt = st.sampled_from([300, 500]) | st.integers(1, 700)
dna = st.text("ACGT", max_size=40) | st.text("ACGTNRYN", max_size=40) | st.text("ACG", max_size=40)


def bounds(length: int, chunk_nt: int) -> list[tuple[int, int]]:
    starts, ends = chunk_bounds(length, chunk_nt)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def frames_of(*chunks: str) -> list[list[tuple[str, str, str]]]:
    """Name, protein and nucleotides of the open frames of each chunk, all translated at once."""
    ends = np.cumsum([len(chunk) for chunk in chunks])
    found = open_frames("".join(chunks).encode(), ends - [len(chunk) for chunk in chunks], ends)
    frames = [[] for _ in chunks]
    for chunk, frame, protein, nucleotides in zip(*found[1:], strict=True):
        frames[chunk].append((FRAMES[frame], protein.decode(), nucleotides.decode()))
    for bits, some in zip(found.bits.tolist(), frames, strict=True):
        assert [name for number, name in enumerate(FRAMES) if bits >> number & 1] == [name for name, *_ in some]
        assert bits < 64
    return frames


# --- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(0, 1)]),
        (2, [(0, 2)]),
        (3, [(0, 3)]),
        (499, [(0, 499)]),
        (500, [(0, 500)]),
        (501, [(0, 500), (250, 501)]),
        (999, [(0, 500), (499, 999)]),
        (1000, [(0, 500), (500, 1000)]),
        (1200, [(0, 500), (399, 899), (798, 1200)]),
        (1498, [(0, 500), (499, 999), (998, 1498)]),
    ],
)
def test_contigs_are_cut_as_the_rules_say(length, expected):
    assert bounds(length, 500) == expected


@example(length=501, chunk_nt=500)
@example(length=60_000, chunk_nt=1)
@given(length=lengths_nt, chunk_nt=chunks_nt)
def test_chunks_cover_the_contig_in_steps_and_none_is_too_long(length, chunk_nt):
    starts, ends = chunk_bounds(length, chunk_nt)
    assert len(starts) == -(-length // chunk_nt) == chunks_per_contig(np.array([length]), chunk_nt)[0]
    assert (starts[0], ends[-1]) == (0, length)
    assert (np.diff(starts) > 0).all()
    assert (starts[1:] <= ends[:-1]).all(), "no base between two chunks"
    assert (ends[:-1] - starts[:-1] == chunk_nt).all(), "only the last may be shorter"
    assert 0 < ends[-1] - starts[-1] <= chunk_nt


@settings(max_examples=40)
@given(lengths=st.lists(lengths_nt, min_size=1, max_size=5), chunk_nt=st.sampled_from([300, 500]))
def test_many_contigs_at_once_are_cut_like_each_alone(lengths, chunk_nt):
    expected = [plain_bounds(length, chunk_nt) for length in lengths]
    starts, ends = chunk_bounds(np.array(lengths), chunk_nt)
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [one for some in expected for one in some]
    counts = chunks_per_contig(np.array(lengths), chunk_nt)
    assert counts.tolist() == [len(some) for some in expected]
    last_starts, last_ends = bounds_of_chunks(np.array(lengths), counts - 1, chunk_nt)
    assert list(zip(last_starts.tolist(), last_ends.tolist(), strict=True)) == [some[-1] for some in expected]


def test_contigs_below_the_least_length_have_no_chunk():
    lengths = np.array([1, 299, 300, 301, 1000])
    assert chunks_per_contig(lengths, 500, 300).tolist() == [0, 0, 1, 1, 2]
    assert chunks_per_contig(lengths, 500).tolist() == [1, 1, 1, 1, 2]


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ("A", []),
        ("AC", []),
        ("ATG", [("F1", "M", "ATG"), ("R1", "H", "CAT")]),
        (
            "ATGC",
            [("F1", "M", "ATGC"), ("F2", "C", "TGC"), ("R1", "A", "GCAT"), ("R2", "H", "CAT")],
        ),
        ("TAA", [("R1", "L", "TTA")]),
        ("TTA", [("F1", "L", "TTA")]),
        ("NNN", []),
        ("NNNNNNNN", []),
        # a codon that is no codon gives no residue, and the nucleotides are as long as the residues ask for
        (
            "ATGANGGCC",
            [
                ("F1", "MA", "ATGANGG"),
                ("F3", "G", "GANG"),
                ("R1", "GH", "GGCCNTC"),
                ("R2", "A", "GCCN"),
                ("R3", "S", "CCNT"),
            ],
        ),
        # only A, C, G and T are complemented
        ("RYATG", [("F3", "M", "ATG"), ("R1", "H", "CATY")]),
    ],
)
def test_open_frames_are_those_of_the_rules(chunk, expected):
    assert frames_of(chunk) == [expected]


@settings(max_examples=200)
@given(st.lists(dna, min_size=1, max_size=6))
def test_chunks_are_translated_whatever_stands_beside_them(chunks):
    chunks = [chunk or "N" for chunk in chunks]
    assert frames_of(*chunks) == [plain_frames(chunk) for chunk in chunks]


def test_no_chunk_at_all_has_no_frame():
    nothing = np.empty(0, dtype=np.int64)
    found = open_frames(b"ACGT", nothing, nothing)
    assert (len(found.bits), len(found.frames), found.proteins) == (0, 0, [])
