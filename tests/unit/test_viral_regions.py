"""Tracks and regions of one contig, against plainly written rules over every position, and as genome browsers read."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.calls.viral_regions import (
    ViralRegion,
    bed_header,
    bed_lines,
    bedgraph_header,
    bedgraph_lines,
    track_intervals,
    viral_runs,
)


@st.composite
def chunked_contigs(draw):
    """Bounds of chunks that cover a contig and overlap or touch, P(virus) with NaN, and which chunks are viral."""
    chunk_nt = draw(st.integers(4, 60))
    steps = draw(st.lists(st.integers(2, chunk_nt), max_size=40))
    starts = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    length_nt = int(starts[-1]) + draw(st.integers(2, chunk_nt))
    ends = np.minimum(starts + chunk_nt, length_nt)
    p = np.array(draw(st.lists(st.none() | st.floats(0, 1), min_size=len(starts), max_size=len(starts))), dtype=float)
    return starts, ends, p, np.nan_to_num(p) >= draw(st.floats(0.05, 1))


def runs_of_chunks(is_viral):
    """First and last chunk of each run, chunk by chunk from section to section: the rule as it is told to users."""
    runs, chunk = [], 0
    while chunk < len(is_viral):
        if not is_viral[chunk]:
            chunk += 1
            continue
        first = last = chunk
        others = 0
        while chunk + 1 < len(is_viral) and others <= 2:
            chunk += 1
            last, others = (chunk, 0) if is_viral[chunk] else (last, others + 1)
        if sum(is_viral[first : last + 1]) >= 3:
            runs.append((first, last))
        chunk = last + 1
    return runs


@given(chunked_contigs())
def test_every_position_has_the_score_of_a_chunk_that_covers_it_and_none_has_two(contig):
    starts, ends, p, _ = contig
    track = track_intervals(starts, ends, p)
    assert (track.starts < track.ends).all()
    assert (track.ends[:-1] <= track.starts[1:]).all()
    for start, end, value in zip(*track, strict=True):
        assert any((starts <= start) & (end <= ends) & (p == value))
    covered = np.zeros(ends[-1], dtype=bool)
    for start, end in zip(track.starts, track.ends, strict=True):
        covered[start:end] = True
    only_known = np.zeros(ends[-1], dtype=bool)
    only_unknown = np.ones(ends[-1], dtype=bool)
    for chunk in range(len(starts)):
        only_known[starts[chunk] : ends[chunk]] = True
        if not np.isnan(p[chunk]):
            only_unknown[starts[chunk] : ends[chunk]] = False
    for chunk in np.flatnonzero(np.isnan(p)):
        only_known[starts[chunk] : ends[chunk]] = False
    assert covered[only_known].all()
    assert not covered[only_unknown].any()


def test_neighbours_meet_in_the_middle_of_their_overlap():
    track = track_intervals(np.array([0, 480, 960]), np.array([500, 980, 1460]), np.array([0.25, np.nan, 1.0]))
    assert [column.tolist() for column in track] == [[0, 970], [490, 1460], [0.25, 1.0]]


def test_a_contig_without_chunks_has_neither_track_nor_region():
    nothing = np.empty(0, dtype=np.int64)
    assert bedgraph_lines("c", track_intervals(nothing, nothing, nothing.astype(float))) == ""
    assert viral_runs(nothing, nothing, nothing.astype(float), nothing.astype(bool)) == []


@given(chunked_contigs())
def test_runs_are_those_of_the_rule_read_chunk_by_chunk(contig):
    starts, ends, p, is_viral = contig
    expected = [
        (starts[a], ends[b], int(is_viral[a : b + 1].sum()), b - a + 1, pytest.approx(np.nanmean(p[a : b + 1])))
        for a, b in runs_of_chunks(is_viral.tolist())
    ]
    found = viral_runs(starts, ends, p, is_viral)
    assert [(r.start, r.end, r.viral_chunks, r.chunks, r.p_virus) for r in found] == expected


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("..VV..", []),
        ("..VVV.", [(2, 5)]),
        ("V..V..V", [(0, 7)]),
        ("V...V..V", []),
        ("VVV...VVV", [(0, 3), (6, 9)]),
        ("VVV--VV...", [(0, 7)]),
        ("VVV.--VVV", [(0, 3), (6, 9)]),
        ("VVVVVVVV", [(0, 8)]),
    ],
)
def test_a_run_bridges_two_chunks_and_not_three(calls, expected):
    """V: viral, a dot: not viral, a dash: no open frame."""
    starts = np.arange(len(calls)) * 500
    p = np.array([{"V": 0.9, ".": 0.2, "-": np.nan}[call] for call in calls])
    found = viral_runs(starts, starts + 500, p, p > 0.5)
    assert [(region.start // 500, region.end // 500) for region in found] == expected
    for region, (first, last) in zip(found, expected, strict=True):
        known = [{"V": 0.9, ".": 0.2}[call] for call in calls[first:last] if call != "-"]
        assert region.p_virus == pytest.approx(sum(known) / len(known))


def test_the_text_is_what_genome_browsers_read():
    track = track_intervals(np.array([0, 490]), np.array([500, 990]), np.array([0.5, 1e-7], dtype=np.float32))
    assert bedgraph_lines("k141_1", track) == "k141_1\t0\t495\t0.5000\nk141_1\t495\t990\t0.0000\n"
    regions = [ViralRegion(0, 1500, 0.99961, 3, 3), ViralRegion(9000, 12_000, 0.5, 4, 6)]
    assert bed_lines("k141_1", regions) == (
        "k141_1\t0\t1500\tk141_1_region_1\t1000\t.\nk141_1\t9000\t12000\tk141_1_region_2\t500\t.\n"
    )


def test_a_track_line_is_one_line_whatever_the_classifier_is_called():
    for header in (bedgraph_header('my "best"\tmodel\n2', "00ff"), bed_header('my "best"\tmodel\n2', "00ff")):
        assert header.count("\n") == 1
        assert header.endswith("\n")
        attributes = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', header))
        assert attributes["description"] == "\"virnucpro my 'best' model 2 00ff\""
        assert re.sub(r'(\w+)=("[^"]*"|\S+)', "", header).split() == ["track"]


def test_a_region_of_a_contig_with_an_endless_name_keeps_its_number():
    (line,) = bed_lines("c" * 1000, [ViralRegion(0, 1500, 0.9, 3, 3)]).splitlines()
    columns = line.split("\t")
    assert columns[0] == "c" * 1000
    assert len(columns[3]) == 255
    assert columns[3].endswith("_region_1")
