"""Every file of a run, named once. Knows paths only: nothing here opens or creates anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SHARD_NAME = re.compile(r"shard_(\d+)\.h5")
UNPACKED_NAME = re.compile(r"[0-9a-f]{64}\.fasta")
LOG_NAME = re.compile(r"worker_\d+\.log")


@dataclass(frozen=True)
class RunLayout:
    """The files under one output folder."""

    output_dir: Path

    @property
    def embeddings(self) -> Path:
        """The result. This name exists only when every row that can be had is in it."""
        return self.output_dir / "embeddings.h5"

    @property
    def partial_embeddings(self) -> Path:
        """The rows that exist, when some are missing; removed by the run that completes it."""
        return self.output_dir / "embeddings.partial.h5"

    @property
    def failed_sequences(self) -> Path:
        """Sequences without a row: id, reason, attempts, tab-separated."""
        return self.output_dir / "failed_sequences.tsv"

    @property
    def manifest(self) -> Path:
        """What the run is and how it went."""
        return self.output_dir / "run.json"

    @property
    def lock(self) -> Path:
        """Held by the process that works in this folder."""
        return self.output_dir / ".run.lock"

    @property
    def work_dir(self) -> Path:
        """What the run needs while it runs and to resume: index, unpacked input, parts."""
        return self.output_dir / "work"

    @property
    def index(self) -> Path:
        """The sequence index."""
        return self.work_dir / "sequences.index"

    @property
    def unpacked_dir(self) -> Path:
        """Copies of compressed inputs, which need random access."""
        return self.work_dir / "unpacked"

    @property
    def parts_dir(self) -> Path:
        """Finished blocks, until their shard is sealed."""
        return self.work_dir / "parts"

    @property
    def reservation(self) -> Path:
        """Keeps the space of the result and of the last words while the run goes on."""
        return self.work_dir / ".reserved"

    @property
    def worker_locks_dir(self) -> Path:
        """One file a worker process, locked as long as it lives."""
        return self.work_dir / "workers"

    @property
    def log_dir(self) -> Path:
        """One file of JSON lines a worker."""
        return self.output_dir / "logs"

    def shard(self, rank: int) -> Path:
        """Everything that *rank* finished."""
        return self.output_dir / f"shard_{rank}.h5"

    def unpacked(self) -> list[Path]:
        """Return the unpacked inputs that exist."""
        return [path for path in self.unpacked_dir.glob("*.fasta") if UNPACKED_NAME.fullmatch(path.name)]

    def worker_logs(self) -> list[Path]:
        """Return the log files that exist."""
        return [path for path in self.log_dir.glob("worker_*.log") if LOG_NAME.fullmatch(path.name)]

    def shards(self) -> list[Path]:
        """Return the shards that exist, by rank."""
        matches = ((SHARD_NAME.fullmatch(path.name), path) for path in self.output_dir.glob("shard_*.h5"))
        found = [(int(match[1]), path) for match, path in matches if match]
        return [path for _, path in sorted(found)]
