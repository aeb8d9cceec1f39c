"""Snapshots of runs that never were, and a terminal that knows what a person sees on it."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace

from virnucpro.telemetry.snapshot import (
    BatchSeconds,
    RankSnapshot,
    RankState,
    RunSnapshot,
    StageSnapshot,
    WorkSnapshot,
)
from virnucpro.this_host import host_name

NOW = 1_800_000_000.0


def rank_snapshot(rank=0, **changes) -> RankSnapshot:
    """A rank in the middle of its work: 40 of 100 thousand tokens are left."""
    made = RankSnapshot(
        rank=rank,
        device=f"cuda:{rank}",
        host=host_name(),
        state=RankState.COMPUTING,
        pid=4000 + rank,
        attempts=1,
        rows=150,
        sequences=200,
        tokens=60_000,
        batches=20,
        batch_seconds=BatchSeconds(bounds=(0.1, 1.0), counts=(5, 15, 0), total_s=12.0),
        packing_efficiency=0.97,
        tokens_to_do=100_000,
        tokens_left=40_000,
        tokens_per_second=5_000.0,
        seconds_left=8.0,
        written_bytes=1_000_000,
        cache_hits=0,
        oom_splits=0,
        restarts={},
        model_load_s=2.5,
        last_progress=NOW - 1,
        last_batch=None,
    )
    return replace(made, **changes)


def work_snapshot(*ranks, **changes) -> WorkSnapshot:
    """An embedding run with these ranks, and nothing done before."""
    made = WorkSnapshot(
        model="virnucpro-tiny-protein",
        precision="fp32",
        token_budget=4096,
        records=1000,
        copies=0,
        skipped=0,
        ranks=ranks,
        tokens=sum(rank.tokens_to_do for rank in ranks),
        tokens_left=sum(rank.tokens_left for rank in ranks),
        tokens_before=0,
        seconds_left=max((rank.seconds_left for rank in ranks if rank.seconds_left is not None), default=None),
        failed={},
        quarantined={},
        is_over=False,
    )
    return replace(made, **changes)


def stage_snapshot(name, *, model="", started=NOW - 63, seconds=63.0, is_over=False) -> StageSnapshot:
    times = {"started": started, "seconds": seconds, "elapsed": seconds}
    return StageSnapshot(name=name, model=model, **times, depth=0, is_over=is_over)


def run_snapshot(*ranks, **changes) -> RunSnapshot:
    """A run that computes with these ranks; without any, one that indexes its input."""
    embedding = work_snapshot(*ranks)
    made = RunSnapshot(
        run_id="abc123def456",
        output_dir="/data/out",
        started=NOW - 70,
        now=NOW,
        stages=((stage_snapshot("embed", model=embedding.model) if ranks else stage_snapshot("index", seconds=12.0)),),
        embeddings=(embedding,) if ranks else (),
        gpus=(),
        disk_free_bytes=500 * 2**30,
        disk_size_bytes=1000 * 2**30,
    )
    return replace(made, **changes)


class ShownTerminal(io.StringIO):
    """
    A terminal: understands what our own code writes to one, and nothing else.

    Args:
        refuses: The error of every write from some moment on.
    """

    def __init__(self, *, columns=80, encoding="utf-8") -> None:
        super().__init__()
        self.columns = columns
        self.written = ""
        self.refuses: OSError | None = None
        self._encoding = encoding
        self._rows = [""]
        self._row = 0
        self._is_at_start = True

    @property
    def encoding(self):
        return self._encoding

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.refuses is not None:
            raise self.refuses
        text.encode(self._encoding)
        self.written += text
        for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", text):
            self._take(piece)
        return len(text)

    def _take(self, piece: str) -> None:
        if piece == "\n":
            self._row, self._is_at_start = self._row + 1, True
            self._rows.extend([""] * (self._row + 1 - len(self._rows)))
        elif piece == "\x1b[1A":
            assert self._row, "above the first line"
            self._row -= 1
        elif piece == "\r":
            self._is_at_start = True
        elif piece == "\x1b[J":
            assert self._is_at_start
            self._rows[self._row :] = [""]
        elif not piece.endswith("m"):
            assert piece.isprintable(), repr(piece)
            assert len(self._rows[self._row]) + len(piece) <= self.columns or "/" in piece, "a line wraps"
            self._rows[self._row] += piece
            self._is_at_start = False

    def seen(self) -> list[str]:
        """The lines that a person sees, without the empty ones below."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows


def of_size(monkeypatch, columns, lines=24):
    """Let every terminal be of this size."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    monkeypatch.setenv("TERM", "xterm-256color")
    assert os.environ["COLUMNS"] == str(columns)
