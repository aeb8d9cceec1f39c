"""Numbers, states and stages of a run as users read them, the same on the terminal, in `status` and under Prefect."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from virnucpro.errors import printable
from virnucpro.stage_names import EVERY
from virnucpro.telemetry.snapshot import SEQUENCES, RankState
from virnucpro.this_host import host_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.telemetry.snapshot import RankSnapshot, RunSnapshot, StageSnapshot, WorkSnapshot

STALL_S = 300.0
"""Seconds without a finished batch after which a computing rank is shown as silent."""
LOW_DISK_BYTES = 2 * 2**30
"""Free bytes below which a disk is nearly full."""
LOW_DISK_SHARE = 0.02
"""Free share below which it is, too."""

_STATES = {
    RankState.WAITING: "waiting",
    RankState.STARTING: "starting",
    RankState.LOADING: "loading the model",
    RankState.COMPUTING: "computing its first batch",
    RankState.FINISHING: "writing its last rows",
    RankState.COMPLETE: "complete",
    RankState.FAILED: "failed, starts again",
    RankState.LOST: "lost, others do its work",
    RankState.STOPPED: "stopped",
}
_UNDER_WAY = {RankState.WAITING, RankState.STARTING, RankState.LOADING, RankState.COMPUTING, RankState.FINISHING}


def duration(seconds: float) -> str:
    """Return seconds in at most two units: ``3.2 s``, ``1 min 23 s``, ``1 h 12 min``."""
    whole = round(seconds)
    if whole < 10:
        return f"{max(0.0, seconds):.1f} s"
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller_size
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(seconds)


def about(seconds: float) -> str:
    """Return an estimate: as ``duration``, without fractions."""
    return duration(seconds) if seconds >= 10 else f"{max(0, round(seconds))} s"


def clock(seconds: float) -> str:
    """Return an estimate as ``1:23`` or ``1:12:05``; from one day on as ``duration``."""
    whole = max(0, round(seconds))
    if whole >= 86400:
        return duration(whole)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def percent(share: float, *, decimals: int = 0) -> str:
    """Return a share of 0 to 1 in percent, rounded down, so that 100 % means done."""
    scale = 10**decimals
    floored = int(min(max(share, 0.0), 1.0) * 100 * scale + 1e-9) / scale
    return f"{floored:.{decimals}f} %"


def size(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:,.0f} KiB"
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def stage_title(stage: StageSnapshot) -> str:
    """Return what a stage does; safe for a terminal."""
    if stage.model and stage.name == "index":  # includes the probe of the GPUs
        return "checking the input and the devices"
    title = EVERY[stage.name].title if stage.name in EVERY else printable(stage.name)
    return f"{title} with {printable(stage.model)}" if stage.model and stage.name == "embed" else title


def doing(snapshot: RunSnapshot) -> str | None:
    """Return what a run does, innermost stage last; None between stages. Safe for a terminal."""
    stages = [stage for stage in snapshot.stages if not stage.is_over]
    if not stages:
        return None
    *outer, inner = stages
    if outer and inner.name == "embed":
        return f"{stage_title(outer[-1])} with {printable(inner.model)}"
    return ": ".join(stage_title(stage) for stage in [*outer[-1:], inner])


def rank_name(rank: RankSnapshot) -> str:
    """Return rank and place; safe for a terminal."""
    return f"rank {rank.rank} {rank_place(rank)}"


def rank_place(rank: RankSnapshot) -> str:
    """Return a rank's device, after its host where that is another one; safe for a terminal."""
    is_elsewhere = rank.host not in {"", host_name()}
    return printable(f"{rank.host} {rank.device}" if is_elsewhere else rank.device)


def rank_state(rank: RankSnapshot, *, now: float) -> str | None:
    """Return a rank's state, None where its rate says more; *now* is the Unix time of the snapshot."""
    if rank.state is not RankState.COMPUTING:
        return _STATES[rank.state]
    if (silent_s := silence(rank, now=now)) is not None:
        return f"no batch for {duration(silent_s)}"
    return None if rank.tokens_per_second > 0 else _STATES[rank.state]


def state_of_before(rank: RankSnapshot) -> str:
    """Return the last known state of a rank whose run has ended."""
    return f"was {rank.state}" if rank.state in _UNDER_WAY else rank.state.value


def rank_share(rank: RankSnapshot) -> float:
    """Return the computed share of a rank's tokens, 0 to 1."""
    if rank.state is RankState.COMPLETE:
        return 1.0
    return 1 - rank.tokens_left / rank.tokens_to_do if rank.tokens_to_do else 0.0


def silence(rank: RankSnapshot, *, now: float) -> float | None:
    """Return the seconds since the last batch of a computing rank, None below ``STALL_S``."""
    if rank.state is not RankState.COMPUTING or rank.last_progress is None or now - rank.last_progress <= STALL_S:
        return None
    return now - rank.last_progress


def computed(rank: RankSnapshot, embedding: WorkSnapshot) -> int:
    """Return the sequences that a rank has computed; of contigs those that are durable, as each is computed twice."""
    return rank.sequences if embedding.counts == SEQUENCES else rank.rows or 0


def states(ranks: Sequence[RankSnapshot]) -> str:
    return ", ".join(f"{number} {state.value}" for state, number in Counter(rank.state for rank in ranks).most_common())


def done_before(embedding: WorkSnapshot) -> float:
    """Return the share of the plan's tokens computed by earlier starts, as far as ranks have reported it."""
    return embedding.tokens_before / embedding.tokens if embedding.tokens else 0.0


def tokens_per_second(embedding: WorkSnapshot) -> float:
    """Return the planned tokens per second of the ranks that compute now."""
    return sum(rank.tokens_per_second for rank in embedding.ranks if rank.state is RankState.COMPUTING)


def progress_of(embedding: WorkSnapshot) -> str:
    """Return the line of a log for a moment within an embedding run; safe for a terminal."""
    figures = [percent(embedding.progress, decimals=1)]
    rate = tokens_per_second(embedding)
    figures.append(f"{rate:,.0f} {embedding.measure}/s" if rate else states(embedding.ranks))
    if embedding.seconds_left is not None:
        figures.append(f"about {about(embedding.seconds_left)} left")
    return ", ".join([*figures, *notes(embedding)])


def notes(embedding: WorkSnapshot) -> list[str]:
    """Return short notes on an embedding run; safe for a terminal."""
    kept = embedding.records - embedding.skipped
    rows = "rows" if embedding.counts == SEQUENCES else embedding.counts
    found = [f"{embedding.rows:,} of {kept:,} {rows} on disk"] if embedding.rows else []
    if (before := done_before(embedding)) >= 0.01:
        found.append(f"{percent(before)} was done before")
    if restarts := sum(sum(rank.restarts.values()) for rank in embedding.ranks):
        found.append(f"{restarts:,} restart{'s' * (restarts != 1)}")
    if missing := sum(embedding.failed.values()) + sum(embedding.quarantined.values()):
        found.append(f"{missing:,} {embedding.counts.removesuffix('s')}{'s' * (missing != 1)} failed")
    return found


def is_nearly_full(free_bytes: int | None, size_bytes: int | None) -> bool:
    """Whether a disk has less than ``LOW_DISK_BYTES`` or ``LOW_DISK_SHARE`` free."""
    if free_bytes is None:
        return False
    return free_bytes < LOW_DISK_BYTES or (size_bytes is not None and free_bytes < LOW_DISK_SHARE * size_bytes)
