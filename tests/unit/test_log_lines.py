"""One line of a log for a person: it says what the JSON says, and nothing that it holds can pass for something else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.telemetry.log_lines import NO_TIME, entry_line, frame_lines, log_sentence, parse_line

HIDDEN = (*range(0x21), 0x7F, 0x85, 0xA0, 0xAD, 0x200B, 0x202E, 0x2028, 0x2029, 0xFEFF)
EVERYTHING = "".join(map(chr, HIDDEN))
ANYTHING = st.recursive(
    st.text() | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


def line_of(**values):
    return json.dumps({"timestamp": "2026-11-21T18:00:00.123456Z", "level": "info", "event": "e", **values}).encode()


def test_a_line_is_shown_with_time_level_and_values():
    line = line_of(
        event="part.written", part="p.h5", blocks=7, whole=True, of=None, rank=1, device="cuda:3", run_id="r"
    )
    shown = entry_line(parse_line(line))
    assert shown.split() == [
        *("2026-11-21", "18:00:00.123Z", "INFO"),
        *("part.written", "part=p.h5", "blocks=7", "whole=true", "of=null"),
    ]


def test_only_the_first_line_of_a_process_has_run_and_task():
    bound = {"run_id": "abc", "task": "t-1", "attempt": 2, "device": "cpu", "rank": 0}
    assert "abc" not in entry_line(parse_line(line_of(**bound)))
    assert entry_line(parse_line(line_of(**bound, event="worker.started"))).endswith("run_id=abc task=t-1")


def test_lines_of_libraries_name_their_logger():
    assert entry_line(parse_line(line_of(event="part.written a=1", logger="torch.x"))).endswith(
        " torch.x: part.written a=1"
    )


def test_a_value_is_quoted_where_it_could_be_taken_for_something_else():
    shown = {
        "a-b.c/d:e": "v=a-b.c/d:e",
        "": 'v=""',
        "a b": 'v="a b"',
        "x=1": 'v="x=1"',
        'a"b': r'v="a\"b"',
        "a\\b": r'v="a\\b"',
        "|": 'v="|"',
        "`": 'v="`"',
        "a\nb": r'v="a\nb"',
    }
    assert {value: log_sentence({"event": "e", "fields": {"v": value}}) for value in shown} == {
        value: f"e {text}" for value, text in shown.items()
    }


@given(st.text(), st.text(), st.dictionaries(st.text(), ANYTHING, max_size=3))
@settings(max_examples=50)
def test_whatever_a_line_holds_is_one_printable_line(event, device, fields):
    line = line_of(**{**fields, "event": event, "device": device, "timestamp": "2026-11-21T18:00:00Z", "level": "info"})
    entry = parse_line(line)
    assert not entry.is_text
    shown = entry_line(entry)
    assert shown.isprintable()
    assert shown.startswith("2026-11-21 18:00:00.000Z")
    assert log_sentence({"event": event, "fields": fields}).isprintable()


@given(st.binary() | st.text().map(str.encode) | st.just(EVERYTHING.encode()))
def test_any_bytes_are_shown_as_text(line):
    entry = parse_line(line)
    assert entry_line(entry).isprintable()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b'"text"',
        b"[" * 100_000,
        b'{"event": "e"}',
        b'{"event": 1, "timestamp": "2026-11-21T18:00:00Z"}',
        b'{"event": "e", "timestamp": 7}',
        b'{"event": "e", "timestamp": "2026-11-21T18:00:00"}',
        b'{"event": "part.wr{"event": "e", "timestamp": "2026-11-21T18:00:00Z"}',
    ],
)
def test_what_is_no_line_of_ours_is_text(line):
    entry = parse_line(line)
    assert (entry.is_text, entry.time, entry.level) == (True, NO_TIME, "INFO")
    assert "| " in entry_line(entry)


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_exception_value_of_a_foreign_line_can_be_shown(value):
    entry = parse_line(line_of(exception=value))
    assert entry_line(entry).isprintable()
    assert all(line.isprintable() for line in frame_lines(entry.exception, frames=3))
