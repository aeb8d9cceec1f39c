"""Figures as SVG: where a value is drawn, how axes are labelled, and what is said of marks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.report.figure import (
    SIZE,
    Axis,
    Figure,
    count_axis,
    length_axis,
    position_axis,
    round_up,
    share_axis,
    short_number,
)
from virnucpro.report.html_page import templates


def test_lengths_of_a_narrow_range_have_its_ends_as_labels():
    assert length_axis("nt", 250, 300).ticks == [(250, "250"), (300, "300")]
    assert [text for _, text in length_axis("nt", 150, 1200).ticks] == ["200", "500", "1k"]


@given(st.integers(1, 10**9))
def test_counts_have_few_labels_that_are_whole_numbers_from_0_to_within_the_axis(highest):
    axis = count_axis("contigs", highest)
    values = [value for value, _ in axis.ticks]
    assert values[0] == 0
    assert all(isinstance(value, int) for value in values)
    assert 2 <= len(values) <= 7
    assert axis.place(highest) <= 1


@given(st.integers(1, 10**9))
def test_on_a_log_scale_one_contig_has_a_height_and_labels_are_decades(highest):
    axis = count_axis("contigs", highest, is_log=True)
    assert 0 < axis.place(1) < axis.place(max(highest, 2)) < 1
    assert all(value == 10**n for n, (value, _) in enumerate(axis.ticks))


@given(st.integers(1, 10**7), st.integers(0, 10**7))
def test_lengths_lie_on_their_axis_and_so_do_its_labels(shortest, more):
    axis = length_axis("length", shortest, shortest + more)
    assert 0 < axis.place(shortest) <= axis.place(shortest + more) < 1
    assert all(0 <= axis.place(value) <= 1 for value, _ in axis.ticks)


@given(st.floats(1e-6, 1e12))
def test_rounding_up_gives_the_next_1_2_or_5(number):
    rounded = round_up(number)
    assert number * (1 - 1e-8) <= rounded <= 2.5 * number * (1 + 1e-8)
    assert f"{rounded:.0e}"[0] in "125"


@pytest.mark.parametrize(
    ("length_nt", "title", "labels"),
    [
        (20_000, "position (kb)", ["0", "5", "10", "15", "20"]),
        (900, "position (kb)", ["0", "0.2", "0.4", "0.6", "0.8"]),
        (2_400_000, "position (Mb)", ["0", "0.5", "1", "1.5", "2"]),
    ],
)
def test_positions_have_the_unit_that_fits(length_nt, title, labels):
    axis = position_axis("position", length_nt)
    assert (axis.title, [label for _, label in axis.ticks]) == (title, labels)


def test_short_numbers():
    assert [short_number(n) for n in (0, 950, 1000, 2500, 3_000_000)] == ["0", "950", "1k", "2.5k", "3M"]


def test_marks_are_drawn_where_their_values_are():
    figure = Figure(Axis("x", 0, 10, []), Axis("y", 0, 4, [(2, "<two>")]))
    figure.boxes("virus", [((1, 0), (2, 4))])
    figure.lines("curve ink", [[(0, 1), (5, 1), (5, 2), (10, 4)]])
    figure.dots("undecided", [(5, 2)], "ring")
    figure.tip(5, 2, "</script>")
    drawn = str(templates().get_template("macros.html").module.plot(figure, "one", "A plot"))
    paths = re.findall(r'<path class="([^"]*)" d="([^"]*)">', drawn)
    assert ("bar virus", f"M200 {SIZE}H400V0H200z") in paths
    assert ("curve ink", "M0 1500H1000V1000L2000 0") in paths
    assert ("dots ring undecided", "M1000 1000h0") in paths
    assert ("hole", "M1000 1000h0") in paths
    assert f'<svg viewBox="0 0 {SIZE} {SIZE}" ' in drawn
    assert '<span class="at-y" style="top:50%">&lt;two&gt;</span>' in drawn
    assert '[[1000,1000,"\\u003c/script\\u003e"]]' in drawn


def test_an_axis_that_goes_down_has_its_first_value_on_top():
    figure = Figure(share_axis("x"), Axis("", 1.5, -0.5, [(0, "a"), (1, "b")]))
    assert figure.at(0, 0)[1] < figure.at(0, 1)[1]
