"""``virnucpro status``: the state of the run in a folder, from any host that sees the folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from virnucpro.commands.options import AsJson, RunDir
from virnucpro.commands.output import ignoring_closed_output, print_renderable
from virnucpro.errors import printable
from virnucpro.pipeline.run.run_status import RunStatus, status_of
from virnucpro.store.manifest import PredictionManifest, RunManifest
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.snapshot import SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.telemetry.snapshot import GpuSample, WorkSnapshot

_STYLES = {
    "running": "green",
    "complete": "green",
    "partial": "yellow",
    "stopped": "yellow",
    "interrupted": "yellow",
    "silent": "red",
    "failed": "red",
}
_COUNTED = {
    "records": "records",
    "rows": "rows",
    "missing": "missing",
    "contigs": "contigs",
    "virus": "virus",
    "not_virus": "not virus",
    "undecided": "undecided",
    "too_short": "too short",
    "no_open_frame": "without an open frame",
    "by_sequence": "scored by sequence alone",
    "scored_frames": "frames scored",
    "missing_frames": "frames missing",
    "skipped": "skipped",
}


def status(output: RunDir, as_json: AsJson = False) -> None:
    """
    Show the state of a run: stage, progress, speed, failures, and what to do next.

    It works beside the run, from another terminal or another machine that sees the folder, and does not disturb it.
    """
    found = status_of(output)
    with ignoring_closed_output():
        if as_json:
            print(json.dumps(found.to_json()))
        else:
            _print_status(found)


def _print_status(found: RunStatus) -> None:
    _print_head(found)
    if found.embedding is not None:
        _print_embedding(found, found.embedding)
    elif ranks := found.ranks_of_before():
        _print_ranks_of_before(ranks)
    _print_counts(found)
    for problem in found.problems:
        _print(printable(problem), style="yellow")
    print(f"next: {printable(found.next_step)}")


def _print_head(found: RunStatus) -> None:
    head = Text(printable(str(found.output_dir)) + ": ")
    head.append(found.state, style=f"bold {_STYLES[found.state]}")
    is_prediction = found.kind == "prediction"
    kind = f"{found.kind} run" if found.kind == "embedding" else found.kind
    embedding = found.embedding
    figures = [f" ({kind})" if kind else ""]
    if embedding is not None and not embedding.is_over:
        what = "embedding" if embedding.counts == SEQUENCES else "stage"
        of_it = f" of this {what}" if is_prediction else ""  # one of several, and not the last
        figures.append(wording.percent(embedding.progress, decimals=1) + of_it)
        if embedding.seconds_left is not None and found.state == "running":
            figures.append(f"about {wording.about(embedding.seconds_left)} left{of_it and ' of it'}")
    head.append(", ".join(figures))
    print_renderable(head, soft_wrap=True)
    if found.part_of is not None:
        _print("the given folder belongs to this run, which computes it now")
    lines = []
    if found.holder is not None:
        lines.append(f"process {found.holder.pid} on {printable(found.holder.host)}")
    if found.seconds is not None:
        verb = {"running": "has run for", "silent": "had run for", "interrupted": "had run for"}.get(
            found.state, "took"
        )
        stages = ", ".join(f"{printable(name)} {wording.duration(seconds)}" for name, seconds in found.stages_s.items())
        lines.append(f"{verb} {wording.duration(found.seconds)}{f' ({stages})' if stages else ''}")
    if found.age_s is not None:
        lines.append(f"last heartbeat {wording.duration(found.age_s)} ago")
    if lines:
        _print(", ".join(lines))
    doing = None if found.snapshot is None else wording.doing(found.snapshot)
    if doing is not None and found.snapshot is not None and found.snapshot.stage is not None:
        since = wording.duration(found.snapshot.stage.seconds)
        _print(f"{doing}, for {since}")


def _print_embedding(found: RunStatus, embedding: WorkSnapshot) -> None:
    assert found.snapshot is not None
    rows = []
    is_spread = found.live is not None and not {rank.host for rank in embedding.ranks} <= {"", found.live.host}
    for rank in embedding.ranks:
        is_running = found.state == "running"
        state = wording.rank_state(rank, now=found.snapshot.now) if is_running else wording.state_of_before(rank)
        left = "" if rank.seconds_left is None else f"{wording.clock(rank.seconds_left)} left"
        rows.append(
            {
                "rank": str(rank.rank),
                "host": printable(rank.host) if is_spread else "",
                "device": printable(rank.device),
                "done": wording.percent(wording.rank_share(rank)),
                "computed": f"{wording.computed(rank, embedding):,}",
                "rows": "" if rank.rows is None or embedding.counts != SEQUENCES else f"{rank.rows:,}",
                f"{embedding.measure}/s": f"{rank.tokens_per_second:,.0f}" if state is None else "",
                "restarts": _counted(rank.restarts),
                "GPU": _gpu_text(found.gpu_of(rank)),
                "state": left if state is None else state,
            }
        )
    _print_table(rows)
    notes = wording.notes(embedding)
    rate = wording.tokens_per_second(embedding)
    if rate and found.state == "running":
        notes.insert(0, f"{rate:,.0f} {embedding.measure}/s")
    if notes:
        _print(f"{', '.join(notes)}")
    if found.failed:
        _print(f"{embedding.counts} that failed: {_counted(found.failed)}", style="red")
    free, size = found.snapshot.disk_free_bytes, found.snapshot.disk_size_bytes
    if wording.is_nearly_full(free, size):
        of = "" if size is None else f" of {wording.size(size)}"
        _print(f"the disk is nearly full: {wording.size(free or 0)}{of} are left", style="red")


def _gpu_text(gpu: GpuSample | None) -> str:
    if gpu is None:
        return ""
    figures = []
    if gpu.utilization is not None:
        figures.append(wording.percent(gpu.utilization))
    if gpu.memory_used_bytes is not None:
        figures.append(wording.size(gpu.memory_used_bytes))
    if gpu.temperature_celsius is not None:
        figures.append(f"{gpu.temperature_celsius:.0f} C")
    return ", ".join(figures)


def _print_ranks_of_before(ranks: Sequence[Mapping[str, Any]]) -> None:
    _print_table(
        [
            {
                "rank": str(rank["rank"]),
                "host": printable(rank["host"] or ""),
                "device": printable(str(rank["device"])),
                "computed": "" if rank["sequences"] is None else f"{rank['sequences']:,}",
                "tokens/s": "" if rank["tokens_per_second"] is None else f"{rank['tokens_per_second']:,.0f}",
                "attempts": str(rank["attempts"]),
                "failures": _counted(rank["restarts"]),
                "state": _ending(rank),
            }
            for rank in ranks
        ],
    )


def _ending(rank: Mapping[str, Any]) -> str:
    names = ("state", "failure", "reason") if rank["state"] != "stopped" else ("state",)
    return ": ".join(printable(rank[name]) for name in names if rank[name])


def _print_counts(found: RunStatus) -> None:
    if found.manifest is None or found.embedding is not None:
        return
    counts = found.manifest.counts
    names = _COUNTED
    if isinstance(found.manifest, PredictionManifest):
        names = {**names, "contigs": printable(found.manifest.sequences)}
    counted = [f"{counts[name]:,} {what}" for name, what in names.items() if counts.get(name)]
    if counted:
        _print(", ".join(counted))
    if found.state != "complete" and not isinstance(found.manifest, RunManifest) and found.manifest.stages:
        _print(f"finished stages: {', '.join(map(printable, found.manifest.stages))}")


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows under the names of their cells, without empty columns."""
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=True)
    names = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    for name in names:
        is_words = name in {"host", "device", "GPU", "state", "restarts", "failures"}
        table.add_column(name, justify="left" if is_words else "right", no_wrap=name != "state")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    print_renderable(table)


def _print(line: str, *, style: str = "") -> None:
    """Print a line that is safe for a terminal."""
    print_renderable(Text(f"  {line}", style=style), soft_wrap=True)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {printable(name)}" for name, number in counts.items())
