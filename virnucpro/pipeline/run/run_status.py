"""
How a run is, from its folder alone: the lock file, the live status, ``run.json``.

Nothing is written or locked, so it works beside the run, from another terminal and from another machine that sees the
folder. Any of these files may be torn or forged: one that cannot be read is listed as a problem, and is no error.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from virnucpro.errors import ResultError
from virnucpro.pipeline.failures import FailureClass
from virnucpro.run_layout import FolderLayout, PredictionLayout
from virnucpro.store.locks.holder import holder_of
from virnucpro.store.manifest import RunManifest, read_manifest
from virnucpro.telemetry.show import wording
from virnucpro.telemetry.show.status_file import WRITE_INTERVAL_S, read_status, to_json
from virnucpro.telemetry.snapshot import SEQUENCES, RankState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from virnucpro.store.locks.holder import Holder
    from virnucpro.store.manifest import AnyManifest
    from virnucpro.telemetry.show.status_file import SavedStatus
    from virnucpro.telemetry.snapshot import GpuSample, RankSnapshot, RunSnapshot, WorkSnapshot

FRESH_S = 60.0
"""Seconds for which a live status counts where the run's process cannot be seen."""
NEXT_WRITE_S = 2 * WRITE_INTERVAL_S
"""Seconds in which a running run writes its status again."""
FORMAT = 1
"""Version of ``RunStatus.to_json``."""
_FINISHED = ("complete", "partial", "failed", "stopped")
_KINDS = {"an embedding run": "embedding", "a prediction": "prediction", "a training": "training"}
"""What ``to_json`` calls them."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    output_dir: Path
    state: str
    """running; silent: its process cannot be seen and its status is old; interrupted: it was killed;
    complete, partial, failed or stopped."""
    kind: str
    """embedding, prediction or training; empty as long as there is no ``run.json``."""
    holder: Holder | None
    manifest: AnyManifest | None
    live: SavedStatus | None
    age_s: float | None
    """Seconds since then."""
    problems: tuple[str, ...]
    """What could not be read, a sentence each."""
    part_of: Path | None = None
    """The folder of the prediction that the given folder is a part of; this status is the prediction's."""

    @property
    def snapshot(self) -> RunSnapshot | None:
        """How the run was when it last wrote its status."""
        return None if self.live is None else self.live.snapshot

    @property
    def embedding(self) -> WorkSnapshot | None:
        """The embedding run that began last, while the run is running."""
        return None if self.snapshot is None else self.snapshot.embedding

    @property
    def seconds(self) -> float | None:
        """
        Seconds that this start took, or has taken so far.

        Of a finished run of several stages the sum of theirs; of one that was stopped that sum at least.
        """
        if self.snapshot is not None:
            return max(0.0, self.snapshot.now - self.snapshot.started)
        stages_s = sum(self.stages_s.values())
        if stages_s and self.state in {"complete", "partial"}:
            return stages_s
        begun, ended = None, time.time()
        if self.state == "running" and self.holder is not None:
            begun = _unix_time(self.holder.since)
        elif self.state in _FINISHED and self.manifest is not None:
            begun, ended = _unix_time(self.manifest.started), _unix_time(self.manifest.finished) or -math.inf
        return None if begun is None or ended < begun else max(ended - begun, stages_s)

    @property
    def stages_s(self) -> dict[str, float]:
        """Seconds of each finished stage of a prediction or training that is over, whenever it was done."""
        if self.state not in _FINISHED or self.manifest is None or isinstance(self.manifest, RunManifest):
            return {}
        found = {name: stage.seconds for name, stage in self.manifest.stages.items()}
        return {name: value for name, value in found.items() if isinstance(value, float) and 0 <= value < math.inf}

    @property
    def failed(self) -> dict[str, int]:
        """Failure class -> sequences without a row in this start."""
        embeddings = () if self.snapshot is None else self.snapshot.embeddings
        return _sum(values for item in embeddings for values in (item.failed, item.quarantined))

    @property
    def restarts(self) -> dict[str, int]:
        """Failure class -> processes started again after it; of a run that is over, processes that failed."""
        if self.snapshot is not None:
            return _sum(rank.restarts for item in self.snapshot.embeddings for rank in item.ranks)
        return _sum(map(_failures, self._ranks_of_manifest()))

    @property
    def worker_logs(self) -> str:
        """Shell pattern of the workers' log files."""
        embedding = self.embedding
        is_whole = self.kind in {"", "embedding"} or (embedding is not None and embedding.counts != SEQUENCES)
        runs = "" if is_whole or (embedding is None and self._have_contigs_failed()) else "*/"
        return f"{shlex.quote(str(self.output_dir))}/{runs}logs/worker_*.log"

    def _have_contigs_failed(self) -> bool:
        """Whether a prediction that is over has logs of its own workers, and came to no embedding."""
        return bool(FolderLayout(self.output_dir).worker_logs()) and not any(self.output_dir.glob("*/logs"))

    @property
    def next_step(self) -> str:
        folder = shlex.quote(str(self.output_dir))
        host = "" if self.holder is None else f"process {self.holder.pid} on {self.holder.host}"
        has_workers = self.snapshot is not None and bool(self.snapshot.embeddings)
        return {
            "running": f"nothing; follow the logs of its workers with `tail -F {self.worker_logs}`"
            if has_workers
            else "nothing; wait",
            "silent": f"look whether {host} still runs; if it does not, start the same command again to continue",
            "interrupted": "start the same command again to continue; finished work is kept",
            "stopped": "start the same command again to continue; finished work is kept",
            "failed": f"see why with `tail {self.worker_logs}`, then start the same command again to continue",
            "partial": f"start the same command again to compute what {folder}/failed_sequences.tsv lists",
            "complete": f"nothing; `virnucpro verify {folder}` checks the result again",
        }[self.state]

    def to_json(self) -> dict[str, Any]:
        """
        Return plain data. The names stay; what is not known is null.

        format, state, kind, output_dir, part_of, host, pid, run_id; started and finished (ISO 8601); seconds (of this
        start; of a finished prediction or training of all its stages, whenever they were done), age_s (of the figures
        below). While it runs: doing (text), stages (name, model, seconds, is_over), and of the embedding run
        (or work on contigs, whose tokens are nucleotides) that began last model, progress and done_before (0 to 1),
        seconds_left, tokens_per_second, rows (durable), records. ranks: rank, host, device, state, progress, sequences
        (computed), rows, tokens_per_second, seconds_left, attempts, restarts, last_progress (Unix time), failure and
        reason (of a run that is over). failed and restarts by failure class; disk_free_bytes, disk_size_bytes,
        disk_nearly_full; counts (of ``run.json``); problems; next_step; snapshot (all of ``RunSnapshot``).
        """
        snapshot, embedding, manifest, holder = self.snapshot, self.embedding, self.manifest, self.holder
        free, size = (None, None) if snapshot is None else (snapshot.disk_free_bytes, snapshot.disk_size_bytes)
        ranks = () if embedding is None else embedding.ranks
        return {
            "format": FORMAT,
            "state": self.state,
            "kind": self.kind,
            "output_dir": str(self.output_dir),
            "part_of": None if self.part_of is None else str(self.part_of),
            "host": holder.host if holder is not None else None if manifest is None else manifest.host,
            "pid": None if holder is None else holder.pid,
            "run_id": holder.run_id if holder is not None else None if manifest is None else manifest.run_id,
            "started": holder.since if holder is not None else None if manifest is None else manifest.started,
            "finished": None if manifest is None or self.state not in _FINISHED else manifest.finished,
            "seconds": self.seconds,
            "age_s": self.age_s,
            "doing": None if snapshot is None else wording.doing(snapshot),
            "stages": [] if snapshot is None else [to_json(stage) for stage in snapshot.stages],
            "model": None if embedding is None else embedding.model,
            "progress": None if embedding is None else embedding.progress,
            "done_before": None if embedding is None else wording.done_before(embedding),
            "seconds_left": None if embedding is None else embedding.seconds_left,
            "tokens_per_second": None if embedding is None else wording.tokens_per_second(embedding),
            "rows": None if embedding is None else embedding.rows,
            "records": None if embedding is None else embedding.records,
            "ranks": [_rank_to_json(rank) for rank in ranks] or self.ranks_of_before(),
            "failed": self.failed,
            "restarts": self.restarts,
            "disk_free_bytes": free,
            "disk_size_bytes": size,
            "disk_nearly_full": wording.is_nearly_full(free, size),
            "counts": {} if manifest is None else dict(manifest.counts),
            "problems": list(self.problems),
            "next_step": self.next_step,
            "snapshot": None if snapshot is None else to_json(snapshot),
        }

    def gpu_of(self, rank: RankSnapshot) -> GpuSample | None:
        gpus = () if self.snapshot is None else self.snapshot.gpus
        return next((gpu for gpu in gpus if (gpu.host, gpu.device) == (rank.host, rank.device)), None)

    def ranks_of_before(self) -> list[dict[str, Any]]:
        """Return how the ranks of an embedding run went that is over, in the form of ``to_json``."""
        kinds = {"rank": int, "host": str, "device": str, "state": str, "sequences": int, "tokens_per_second": float}
        kinds |= {"attempts": int, "failure": str, "reason": str}
        nothing = dict.fromkeys(("progress", "rows", "seconds_left", "last_progress"))
        return [
            {
                **{name: rank.get(name) if type(rank.get(name)) is kind else None for name, kind in kinds.items()},
                **nothing,
                "restarts": _failures(rank),
            }
            for rank in self._ranks_of_manifest()
        ]

    def _ranks_of_manifest(self) -> list[dict[str, Any]]:
        return self.manifest.ranks if isinstance(self.manifest, RunManifest) and self.state in _FINISHED else []


def status_of(output_dir: Path) -> RunStatus:
    """Return how a run is, from its folder; ``ResultError`` where it holds no run, or nothing of it can be read."""
    layout = FolderLayout(output_dir)
    if not output_dir.is_dir():
        raise ResultError(output_dir, "is not a folder: give the output folder of a run")
    holder = holder_of(layout.lock)
    around = _prediction_around(output_dir)
    if holder is not None and around is not None and not layout.live_status.exists():
        whole = holder_of(FolderLayout(around).lock)
        if whole is not None and (whole.host, whole.pid) == (holder.host, holder.pid):
            return _status_of(FolderLayout(around), whole, part_of=around)
    return _status_of(layout, holder)


def _status_of(layout: FolderLayout, holder: Holder | None, *, part_of: Path | None = None) -> RunStatus:
    problems = []
    live = manifest = None
    if holder is not None:  # else one that is left over is old
        try:
            live = read_status(layout.live_status)
        except ResultError as error:
            problems.append(str(error))
    try:
        manifest = manifest_in(layout)
    except ResultError as error:
        if holder is None:
            raise
        problems.append(str(error))
    age_s = None if live is None else max(0.0, time.time() - live.written)
    return RunStatus(
        output_dir=layout.output_dir,
        state=_state(layout, holder, manifest, age_s),
        kind="" if manifest is None else _KINDS[manifest.noun],
        holder=holder,
        manifest=manifest,
        live=live,
        age_s=age_s,
        problems=tuple(problems),
        part_of=part_of,
    )


def _state(layout: FolderLayout, holder: Holder | None, manifest: AnyManifest | None, age_s: float | None) -> str:
    if holder is not None and holder.is_alive is None:
        return "running" if age_s is not None and age_s < FRESH_S else "silent"
    if holder is not None:
        return "running" if holder.is_alive or _is_written_again(layout, age_s) else "interrupted"
    if manifest is None:
        if layout.lock.exists() and layout.work_dir.is_dir():
            return "interrupted"
        raise ResultError(layout.output_dir, "holds no run: give the output folder of a run")
    return manifest.state if manifest.state in _FINISHED else "interrupted"


def _is_written_again(layout: FolderLayout, age_s: float | None) -> bool:
    """Whether a process that is not seen writes the status: in a container, under our host's name."""
    if age_s is None or age_s > NEXT_WRITE_S:
        return False
    deadline_s = time.monotonic() + NEXT_WRITE_S
    try:
        first = layout.live_status.stat().st_ino
        while time.monotonic() < deadline_s:
            if layout.live_status.stat().st_ino != first:
                return True
            time.sleep(0.05)
    except OSError:  # it was removed: the run is just ending
        pass
    return False


def manifest_in(layout: FolderLayout) -> AnyManifest | None:
    """Return ``run.json`` of a folder, None where there is none; ``ResultError`` where it cannot be read."""
    return read_manifest(layout.manifest) if layout.manifest.exists() else None


def _prediction_around(output_dir: Path) -> Path | None:
    """Return the folder of the prediction that a folder is a part of, by its name."""
    around = output_dir.resolve().parent
    parts = PredictionLayout(around)
    return around if output_dir.resolve() in {parts.dna_dir, parts.protein_dir} else None


def _rank_to_json(rank: RankSnapshot) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host or None,
        "device": rank.device,
        "state": rank.state.value,
        "progress": wording.rank_share(rank),
        "sequences": rank.sequences,
        "rows": rank.rows,
        "tokens_per_second": rank.tokens_per_second if rank.state is RankState.COMPUTING else 0.0,
        "seconds_left": rank.seconds_left,
        "attempts": rank.attempts,
        "restarts": dict(rank.restarts),
        "last_progress": rank.last_progress,
        "failure": None,
        "reason": None,
    }


def _failures(rank: Mapping[str, Any]) -> dict[str, int]:
    """Return failure class -> processes of a rank of ``run.json`` that failed: one that was stopped did not."""
    failures = rank.get("failures")
    return Counter(str(item) for item in failures if item != FailureClass.STOPPED) if isinstance(failures, list) else {}


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def _unix_time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return None
