"""What a person sees: plain lines that add the ranks up, or nothing."""

from __future__ import annotations

import re

import pytest

from virnucpro.telemetry.progress import PLAIN_INTERVAL_S, DownloadProgress, RunProgress


def tell(progress, rank, *messages):
    for message in messages:
        progress.on_message(rank, message)


def resumed(tokens):
    return {"kind": "resumed", "sequences": 0, "tokens_to_do": tokens}


def done(sequences, tokens):
    return {"kind": "progress", "sequences": sequences, "tokens": tokens}


LOADED = {"kind": "model_loaded", "seconds": 0.1}


def next_line(progress, capsys, rank=0, message=None):
    """The line that the next message brings once the interval has passed."""
    capsys.readouterr()
    progress._last_line_s -= PLAIN_INTERVAL_S + 1
    progress.on_message(rank, message or {"kind": "heartbeat"})
    out, err = capsys.readouterr()
    assert out == "", "standard output belongs to the result"
    return err


def test_a_line_adds_up_all_ranks_by_tokens(capsys):
    with RunProgress(["cpu", "cpu"]) as progress:
        tell(progress, 0, resumed(1000), LOADED, done(10, 500))
        tell(progress, 1, resumed(3000), LOADED, done(1200, 700))
        line = next_line(progress, capsys)
    assert line.startswith(" 30.0 % of tokens, 1,210 sequences, ")
    assert re.search(r"[\d,]+ tokens/s, about [\d,]+ s left\n$", line)


def test_no_line_comes_before_the_interval_has_passed(capsys):
    with RunProgress(["cpu"]) as progress:
        tell(progress, 0, resumed(10), LOADED, *(done(n, n) for n in range(10)))
        assert capsys.readouterr().err == ""
        assert next_line(progress, capsys) != ""
        tell(progress, 0, done(10, 10))
        assert capsys.readouterr().err == ""


def test_nothing_to_do_is_not_divided_by(capsys):
    with RunProgress(["cpu"]) as progress:
        assert next_line(progress, capsys) == "  0.0 % of tokens, 0 sequences, 0 tokens/s\n"


def test_a_new_attempt_starts_its_rank_from_what_is_left(capsys):
    with RunProgress(["cpu"]) as progress:
        tell(progress, 0, resumed(1000), LOADED, done(10, 600))
        tell(progress, 0, resumed(400))
        assert next_line(progress, capsys).startswith("  0.0 % of tokens, 0 sequences")
        tell(progress, 0, LOADED, done(1, 100))
        assert next_line(progress, capsys).startswith(" 25.0 % of tokens, 1 sequences")


def test_a_report_and_an_unknown_kind_change_nothing(capsys):
    with RunProgress(["cpu"]) as progress:
        tell(progress, 0, resumed(100), LOADED, done(5, 50))
        tell(progress, 0, {"rank": 0, "status": "complete", "num_sequences": 9}, {"kind": "of tomorrow"})
        assert next_line(progress, capsys).startswith(" 50.0 % of tokens, 5 sequences")


def test_quiet_is_quiet(capsys):
    with RunProgress(["cpu"], is_quiet=True) as progress, DownloadProgress(is_quiet=True) as download:
        tell(progress, 0, resumed(100), LOADED, done(5, 50))
        download.advance(10, 100)
        assert next_line(progress, capsys) == ""


def test_a_message_of_a_rank_that_does_not_exist_is_an_error():
    with RunProgress(["cpu"]) as progress, pytest.raises(IndexError):
        progress.on_message(1, LOADED)


def test_a_download_of_unknown_size_is_shown_without_an_error(capsys):
    with DownloadProgress() as download:
        download.advance(0, None)
        download.advance(1 << 20, None)
    assert "weights" in capsys.readouterr().err
