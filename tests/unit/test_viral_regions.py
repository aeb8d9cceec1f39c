"""Tracks and regions of one contig, against every position and every path of states, and as genome browsers read."""

from __future__ import annotations

import re
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.calls.viral_regions import (
    MOST_LOG_ODDS,
    SWITCH_COST,
    ViralRegion,
    bed_header,
    bed_lines,
    bedgraph_header,
    bedgraph_lines,
    find_regions,
    track_intervals,
)


@st.composite
def chunked_contigs(draw):
    """Bounds of chunks that cover a contig and overlap or touch, and P(virus) with NaN."""
    chunk_nt = draw(st.integers(4, 60))
    steps = draw(st.lists(st.integers(2, chunk_nt), max_size=40))
    starts = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    length_nt = int(starts[-1]) + draw(st.integers(2, chunk_nt))
    ends = np.minimum(starts + chunk_nt, length_nt)
    p = np.array(draw(st.lists(st.none() | st.floats(0, 1), min_size=len(starts), max_size=len(starts))), dtype=float)
    return starts, ends, p


def evidence_of(p, threshold):
    """Log-odds against the threshold, limited."""
    odds = np.clip(p, 1e-12, 1 - 1e-12)
    difference = np.log(odds / (1 - odds)) - np.log(threshold / (1 - threshold))
    return np.clip(difference, -MOST_LOG_ODDS, MOST_LOG_ODDS)


def worth(path, evidence):
    """What a path of states gathers, less its switches."""
    gathered = sum(one for one, state in zip(evidence, path, strict=True) if state)
    return gathered - SWITCH_COST * sum(a != b for a, b in pairwise(path))


@given(chunked_contigs())
def test_every_position_has_the_score_of_a_chunk_that_covers_it_and_none_has_two(contig):
    starts, ends, p = contig
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
    assert find_regions(nothing, nothing, nothing.astype(float), 0.5) == []


@given(
    st.lists(st.none() | st.sampled_from([0.0, 0.02, 0.98, 1.0]) | st.floats(0, 1), min_size=1, max_size=11),
    st.floats(0.05, 0.95),
)
def test_no_path_of_states_is_worth_more_than_the_regions(values, threshold):
    p = np.array([np.nan if value is None else value for value in values])
    starts = np.arange(len(p)) * 500
    is_known = ~np.isnan(p)
    evidence = evidence_of(p[is_known], threshold).tolist()
    path = np.zeros(len(p), dtype=bool)
    for region in find_regions(starts, starts + 500, p, threshold):
        path[region.start // 500 : region.end // 500] = True
    best = max(worth(other, evidence) for other in product((False, True), repeat=len(evidence)))
    assert worth(path[is_known].tolist(), evidence) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ("." * 20, []),
        ("V" * 20, [(0, 20)]),
        ("v" * 20, [(0, 20)]),
        ("-" * 20, []),
        ("." * 10 + "V" * 2 + "." * 10, []),
        ("." * 10 + "V" * 3 + "." * 10, [(10, 13)]),
        ("V" + "." * 10, []),
        ("VV" + "." * 10, [(0, 2)]),
        ("." * 10 + "VVVV", [(10, 14)]),
        ("." * 10 + "VVVV" + "." + "VVVVV" + "." * 10, [(10, 20)]),
        ("V" * 9 + "." * 2 + "V" * 9, [(0, 20)]),
        ("V" * 9 + "." * 3 + "V" * 9, [(0, 9), (12, 21)]),
        ("." * 10 + "VVVV" + "-" * 12 + "VVVV" + "." * 10, [(10, 30)]),
        ("." * 10 + "V" * 8 + "---" + "." * 10, [(10, 18)]),
        ("--" + "V" * 5 + "--", [(2, 7)]),
    ],
)
def test_a_region_takes_evidence_at_each_border(chunks, expected):
    """V: surely viral, v: just above the threshold, a dot: surely not, a dash: no P(virus)."""
    p_of = {"V": 0.99, "v": 0.61, ".": 0.02, "-": np.nan}
    starts = np.arange(len(chunks)) * 480
    p = np.array([p_of[chunk] for chunk in chunks], dtype=np.float32)
    found = find_regions(starts, starts + 500, p, 0.6)
    assert [(region.start, region.end) for region in found] == [(a * 480, (b - 1) * 480 + 500) for a, b in expected]
    for region, (first, last) in zip(found, expected, strict=True):
        known = [p_of[chunk] for chunk in chunks[first:last] if chunk != "-"]
        assert region.p_virus == pytest.approx(sum(known) / len(known), rel=1e-6)


@pytest.mark.parametrize(("threshold", "number"), [(0.5, 1), (0.8, 0), (0.0, 1), (1.0, 0)])
def test_the_threshold_decides_what_speaks_for_a_virus(threshold, number):
    starts = np.arange(30) * 500
    assert len(find_regions(starts, starts + 500, np.full(30, 0.7), threshold)) == number


def test_the_text_is_what_genome_browsers_read():
    track = track_intervals(np.array([0, 490]), np.array([500, 990]), np.array([0.5, 1e-7], dtype=np.float32))
    assert bedgraph_lines("k141_1", track) == "k141_1\t0\t495\t0.5000\nk141_1\t495\t990\t0.0000\n"
    regions = [ViralRegion(0, 1500, 0.99961), ViralRegion(9000, 12_000, 0.5)]
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
    (line,) = bed_lines("c" * 1000, [ViralRegion(0, 1500, 0.9)]).splitlines()
    columns = line.split("\t")
    assert columns[0] == "c" * 1000
    assert len(columns[3]) == 255
    assert columns[3].endswith("_region_1")


@pytest.mark.parametrize(
    ("contig", "expected"),
    [("#1", "%231"), ("track", "%74rack"), ("browser_2", "%62rowser_2"), ("k141_1", "k141_1"), ("µ#", "µ#")],
)
def test_an_id_that_begins_as_a_control_line_of_tracks_is_escaped(contig, expected):
    track = track_intervals(np.array([0]), np.array([500]), np.array([0.5]))
    assert bedgraph_lines(contig, track) == f"{expected}\t0\t500\t0.5000\n"
    assert bed_lines(contig, [ViralRegion(0, 1500, 0.9)]).startswith(f"{expected}\t0\t1500\t")
