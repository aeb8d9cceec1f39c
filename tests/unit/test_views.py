"""What a person sees while a run goes on: bars that fit the terminal, lines in a log, and no harm to the run."""

from __future__ import annotations

import errno
import sys
import threading
from dataclasses import replace

import pytest
import structlog

from tests.snapshots import (
    NOW,
    ShownTerminal,
    of_size,
    rank_snapshot,
    run_snapshot,
    stage_snapshot,
    work_snapshot,
)
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.show.progress import (
    PLAIN_INTERVAL_S,
    PlainView,
    QuietView,
    TerminalView,
    terminal_view,
)
from virnucpro.telemetry.show.standard_error import StandardError
from virnucpro.telemetry.show.terminal import Terminal
from virnucpro.telemetry.snapshot import RankState

LOADING = {"state": RankState.LOADING, "sequences": 0, "tokens_left": 100_000, "tokens_per_second": 0.0}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    of_size(monkeypatch, 80)


@pytest.fixture
def terminal():
    return ShownTerminal()


@pytest.fixture
def view(terminal):
    made = TerminalView(Terminal(terminal))
    yield made
    made.close()


def many(number, **changes):
    return [
        rank_snapshot(rank, sequences=1_234_567, tokens_per_second=198_765.0, seconds_left=4_321.0 + rank, **changes)
        for rank in range(number)
    ]


# --- a terminal -------------------------------------------------------------------------------------------------------


def test_each_rank_has_a_bar_with_its_device_its_figures_and_the_time_that_its_tokens_leave(view, terminal):
    view.update(run_snapshot(rank_snapshot(0), rank_snapshot(1, device="cuda:3", tokens_left=75_000, seconds_left=83)))
    stage, first, second, both, notes = terminal.seen()
    assert stage.endswith("computing embeddings with virnucpro-tiny-protein, 1 min 3 s")
    assert first.split("  ")[0] == "rank 0 cuda:0"
    assert (first.count("█"), first.count("░")) == (8, 6)
    assert second.startswith("rank 1 cuda:3  ███░░░")
    assert second.endswith("25 %  200 sequences   5,000 tokens/s  1:23 left")
    assert both.startswith("all 2 ranks")
    assert both.endswith("42 %  400 sequences  10,000 tokens/s  1:23 left")
    assert notes == "300 of 1,000 rows on disk"


def test_a_bar_that_is_drawn_again_takes_the_place_of_the_one_before(view, terminal):
    for left in (90_000, 50_000, 0):
        view.update(run_snapshot(rank_snapshot(tokens_left=left)))
    assert len(terminal.seen()) == 3
    assert " 100 %" in terminal.seen()[1]


def test_before_there_is_a_rate_the_state_stands_in_its_place(view, terminal):
    view.update(
        run_snapshot(
            rank_snapshot(0, **LOADING, seconds_left=None),
            rank_snapshot(1, **{**LOADING, "state": RankState.STARTING}, rows=None, seconds_left=None),
            rank_snapshot(2, **{**LOADING, "state": RankState.COMPUTING}, seconds_left=None),
        )
    )
    _, loading, starting, computing, *_ = terminal.seen()
    assert loading.endswith("  0 %  loading the model")
    assert starting.endswith("  0 %  starting")
    assert computing.endswith("  0 %  computing its first batch")


def test_what_was_done_before_and_what_failed_stands_below_the_bars(view, terminal):
    embedding = work_snapshot(
        rank_snapshot(0, restarts={"died": 1, "hung": 1}),
        tokens=200_000,
        tokens_left=40_000,
        tokens_before=100_000,
        failed={"not_finite": 2},
        skipped=10,
    )
    view.update(run_snapshot(rank_snapshot(0), embeddings=(embedding,)))
    assert terminal.seen()[-1] == "150 of 990 rows on disk, 50 % was done before, 2 restarts, 2 sequences failed"


@pytest.mark.parametrize("columns", [200, 100, 80, 60, 40, 20, 8])
@pytest.mark.parametrize("number", [1, 8, 64])
def test_no_line_is_wider_than_the_terminal_and_no_more_lines_than_it_has(monkeypatch, columns, number):
    of_size(monkeypatch, columns, 24)
    terminal = ShownTerminal(columns=columns - 1)
    view = TerminalView(Terminal(terminal))
    for _ in range(2):
        view.update(run_snapshot(*many(number)))
    seen = terminal.seen()
    view.close()
    assert max(map(len, seen)) < columns
    assert len(seen) == min(number + 2 + (number > 1), 23)
    assert terminal.seen() == []


def test_of_more_ranks_than_fit_those_in_trouble_and_the_slowest_are_shown_and_the_others_counted(view, terminal):
    ranks = many(64)
    ranks[5] = replace(ranks[5], state=RankState.LOST)
    ranks[7] = replace(ranks[7], last_progress=NOW - 900)
    ranks[60] = replace(ranks[60], state=RankState.COMPLETE)
    view.update(run_snapshot(*ranks))
    lines = terminal.seen()
    shown = [int(line.split()[1]) for line in lines if line.startswith("rank")]
    assert shown == [5, 7, *range(46, 60), 61, 62, 63]
    assert lines[1].endswith("lost, others do its work")
    assert lines[2].endswith("no batch for 15 min")
    assert "and 45 others: 44 computing, 1 complete" in lines


def test_a_rank_that_failed_is_red_and_one_that_is_complete_green(view, terminal):
    view.update(run_snapshot(rank_snapshot(0, state=RankState.FAILED), rank_snapshot(1, state=RankState.COMPLETE)))
    assert "\x1b[1;31m200 sequences  failed, starts again" in terminal.written
    assert "\x1b[32m200 sequences  complete" in terminal.written


def test_no_color_leaves_bars_that_say_the_same(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = ShownTerminal()
    view = TerminalView(Terminal(terminal))
    view.update(run_snapshot(rank_snapshot(state=RankState.FAILED)))
    assert "\x1b[" not in terminal.written.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert "█████████░░░" in terminal.seen()[1]
    view.close()


def test_a_terminal_without_unicode_has_bars_as_well():
    terminal = ShownTerminal(encoding="iso-8859-1")
    view = TerminalView(Terminal(terminal))
    view.update(run_snapshot(rank_snapshot()))
    assert "#####...." in terminal.seen()[1]
    view.close()


def test_before_there_are_workers_the_stage_is_shown_and_moves(view, terminal):
    frames = set()
    for _ in range(3):
        view.update(run_snapshot())
        frames.update(terminal.seen())
    assert {frame[2:] for frame in frames} == {"checking and indexing the input, 12 s"}
    assert len(frames) == 3


def test_a_prediction_names_the_stage_around(view, terminal):
    stages = (
        stage_snapshot("dna", seconds=70.0, started=NOW - 70),
        stage_snapshot("embed", model="virnucpro-tiny-dna"),
    )
    view.update(run_snapshot(rank_snapshot(), stages=stages))
    assert terminal.seen()[0][2:] == "embedding the frames' DNA with virnucpro-tiny-dna, 1 min 3 s"
    view.update(run_snapshot(stages=(stages[0], stage_snapshot("index", model="virnucpro-tiny-dna"))))
    assert terminal.seen()[0][2:] == "embedding the frames' DNA: checking the input and the devices, 1 min 3 s"


def test_a_stage_that_took_a_while_leaves_a_line_and_its_bars_go(view, terminal):
    view.update(run_snapshot(rank_snapshot()))
    done = work_snapshot(rank_snapshot(tokens_left=0, tokens=63_000, state=RankState.COMPLETE), is_over=True)
    stages = (
        stage_snapshot("protein", started=NOW - 64, seconds=70.0),
        stage_snapshot("index", started=NOW - 64, seconds=0.2, is_over=True),
        stage_snapshot("embed", model=done.model, is_over=True),
        stage_snapshot("aggregate", model=done.model, started=NOW, seconds=4.0),
    )
    for _ in range(2):
        view.update(run_snapshot(rank_snapshot(), stages=stages, embeddings=(done,)))
    first, second = terminal.seen()
    assert first == "embedding the frames' proteins: 150 of 1,000 rows on disk after 1 min 3 s"
    assert second[2:] == "embedding the frames' proteins: putting the result together, 4 s"
    over = tuple(replace(stage, is_over=True) for stage in stages)
    view.update(run_snapshot(stages=over, embeddings=(done,)))
    assert terminal.seen() == [first, "putting the result together: 4.0 s"], "the stage around has no line of its own"


def test_what_is_said_or_printed_comes_above_the_bars(view, terminal):
    view.update(run_snapshot(rank_snapshot()))
    view.say("rank 0 failed:\n  out of memory")
    print("a warning", file=sys.stderr)
    sys.stderr.write("half a ")
    view.update(run_snapshot(rank_snapshot()))
    sys.stderr.write("line\n")
    assert terminal.seen()[:4] == ["rank 0 failed:", "  out of memory", "a warning", "half a line"]
    assert len(terminal.seen()) == 7


def test_what_the_program_warns_of_comes_above_the_bars(view, terminal):
    warn = structlog.PrintLogger(file=StandardError()).warning
    view.update(run_snapshot(rank_snapshot()))
    warn("rank.failed")
    view.update(run_snapshot(rank_snapshot()))
    assert terminal.seen()[0] == "rank.failed"
    assert len(terminal.seen()) == 4


def test_a_warning_that_nobody_reads_harms_nothing(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", terminal)
    warn = structlog.PrintLogger(file=StandardError()).warning
    warn("read")
    terminal.refuses = BrokenPipeError(errno.EPIPE, "gone")
    warn("not read")
    warn("nor this")
    assert terminal.seen() == ["read"]


def test_standard_error_is_given_back_and_nothing_of_it_is_lost(terminal):
    before = sys.stderr
    view = TerminalView(Terminal(terminal))
    view.update(run_snapshot(rank_snapshot()))
    assert sys.stderr is not before
    sys.stderr.write("no end of line")
    view.close()
    assert sys.stderr is before
    assert terminal.seen() == ["no end of line"]


@pytest.mark.parametrize("is_said_first", [False, True])
def test_once_the_run_was_told_to_stop_the_bars_go_on_below_what_the_terminal_was_told(terminal, is_said_first):
    stop = threading.Event()
    view = TerminalView(Terminal(terminal, interrupted=stop), stop=stop)
    view.update(run_snapshot(rank_snapshot()))
    terminal.write("^C\nstopping as soon as what is finished is safe\n")
    stop.set()
    if is_said_first:
        view.say("rank 0 stops")
    for _ in range(3):
        view.update(run_snapshot(rank_snapshot()))
    seen = terminal.seen()
    said_first = ["rank 0 stops"] * is_said_first
    assert seen[3:-3] == ["^C", "stopping as soon as what is finished is safe", *said_first]
    assert seen[-3].endswith("; stopping")
    view.close()
    assert terminal.seen() == seen[:-3]


def test_what_the_terminal_itself_writes_below_the_bars_goes_with_them(view, terminal):
    view.update(run_snapshot(rank_snapshot()))
    terminal.write("^C")
    view.update(run_snapshot())
    assert len(terminal.seen()) == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), BrokenPipeError(errno.EPIPE, "gone")])
def test_a_terminal_that_goes_in_the_middle_harms_nothing(terminal, error):
    view = TerminalView(Terminal(terminal))
    view.update(run_snapshot(rank_snapshot()))
    terminal.refuses = error
    view.update(run_snapshot(rank_snapshot()))
    view.say("nobody reads it")
    print("nor this", file=sys.stderr)
    view.close()
    assert len(terminal.seen()) == 3


# --- a log ------------------------------------------------------------------------------------------------------------


def said(capsys):
    out, err = capsys.readouterr()
    assert out == "", "standard output belongs to the result"
    return [line[len("00:00:00  ") :] for line in err.splitlines()]


def test_a_log_has_a_line_when_a_stage_begins_and_then_one_every_half_minute(capsys):
    view = PlainView()
    view.update(run_snapshot())
    assert said(capsys) == ["checking and indexing the input"]
    ranks = many(2)
    at = [replace(run_snapshot(*ranks), now=NOW + seconds) for seconds in (1, 2, 29, 32, 61, 62)]
    for snapshot in at[:3]:
        view.update(snapshot)
    assert said(capsys) == []
    view.update(at[3])
    view.update(at[4])
    assert said(capsys) == ["60.0 %, 397,530 tokens/s, about 1 h 12 min left, 300 of 1,000 rows on disk"]
    view.update(at[5])
    assert len(said(capsys)) == 1
    view.close()


def test_a_line_of_a_log_without_a_rate_says_what_the_ranks_do(capsys):
    view = PlainView()
    ranks = [rank_snapshot(rank, **LOADING, rows=0, seconds_left=None) for rank in range(3)]
    view.update(run_snapshot(*ranks))
    view.update(replace(run_snapshot(*ranks), now=NOW + PLAIN_INTERVAL_S))
    assert said(capsys) == ["computing embeddings with virnucpro-tiny-protein", "0.0 %, 3 loading the model"]


def test_the_end_of_an_embedding_that_was_stopped_says_where(capsys):
    view = PlainView()
    snapshot = run_snapshot(rank_snapshot())
    view.update(snapshot)
    said(capsys)
    view.update(replace(snapshot, stages=(replace(snapshot.stages[0], is_over=True),)))
    assert said(capsys) == ["computing embeddings: 150 of 1,000 rows on disk after 1 min 3 s, ended at 60 %"]


def test_only_a_long_stage_has_a_line_at_its_end(capsys):
    view = PlainView()
    stages = [
        stage_snapshot("fragments", started=NOW - 5000, seconds=2.0),
        stage_snapshot("classify", started=NOW - 4321, seconds=4321.0),
    ]
    view.update(run_snapshot(stages=tuple(stages)))
    said(capsys)
    view.update(run_snapshot(stages=tuple(replace(stage, is_over=True) for stage in stages)))
    assert said(capsys) == ["classifying the frames: 1 h 12 min"]


def test_a_stage_that_is_over_before_anybody_looked_has_no_line(capsys):
    PlainView().update(run_snapshot(stages=(stage_snapshot("index", is_over=True, seconds=0.1),)))
    assert said(capsys) == []


def test_a_log_that_is_closed_harms_nothing(monkeypatch):
    closed = ShownTerminal()
    closed.refuses = BrokenPipeError(errno.EPIPE, "gone")
    monkeypatch.setattr(sys, "stderr", closed)
    view = PlainView()
    view.update(run_snapshot())
    view.say("nobody reads it")
    view.close()


def test_a_terminal_gets_bars_a_log_gets_lines_and_who_wants_quiet_gets_it(monkeypatch, terminal, capsys):
    assert isinstance(terminal_view(), PlainView)
    assert isinstance(terminal_view(is_quiet=True), QuietView)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert isinstance(terminal_view(), TerminalView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(terminal_view(), PlainView)
    quiet = terminal_view(is_quiet=True)
    quiet.update(run_snapshot(rank_snapshot()))
    quiet.close()
    assert terminal.written == ""
    quiet.say("rank 1 failed")
    assert terminal.written == "rank 1 failed\n", "what goes wrong is told whoever wants quiet"


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words", "as_clock"),
    [
        (0.04, "0.0 s", "0:00"),
        (9.44, "9.4 s", "0:09"),
        (9.6, "10 s", "0:10"),
        (59.7, "1 min", "1:00"),
        (83, "1 min 23 s", "1:23"),
        (3600, "1 h", "1:00:00"),
        (4321, "1 h 12 min", "1:12:01"),
        (86399.9, "1 d", "1 d"),
        (200_000, "2 d 7 h", "2 d 7 h"),
    ],
)
def test_durations_are_for_people(seconds, words, as_clock):
    assert wording.duration(seconds) == words
    assert wording.clock(seconds) == as_clock


def test_a_hundred_percent_is_the_end_and_nothing_less():
    assert [wording.percent(share) for share in (0.0, 0.29, 0.999999, 1.0, 7.0)] == [
        "0 %",
        "29 %",
        "99 %",
        "100 %",
        "100 %",
    ]
    assert wording.percent(0.99999, decimals=1) == "99.9 %"


def test_names_from_outside_are_safe_for_a_terminal():
    rank = rank_snapshot(device="cuda\x1b]0;forged\x07\nrank 1")
    assert wording.rank_name(rank) == r"rank 0 cuda\x1b]0;forged\x07\nrank 1"
    elsewhere = replace(rank, host="node-7", device="cuda:3")
    assert wording.rank_name(elsewhere) == "rank 0 node-7 cuda:3"
    assert wording.stage_title(stage_snapshot("embed", model="m\x1b[2J")) == r"computing embeddings with m\x1b[2J"
