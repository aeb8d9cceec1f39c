"""The outcome of an embedding run: its counts, its notes, and the error that it ends a command with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from virnucpro.errors import ConfigurationError, ExitCode, OutputError, StoppedError, WorkersFailedError, printable
from virnucpro.pipeline.failures import FailureClass, exit_code_of
from virnucpro.this_host import processors_differ

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from virnucpro.telemetry.ranks import Rank


@dataclass(frozen=True, kw_only=True)
class RunResult:
    output_dir: Path
    output_path: Path | None
    """``embeddings.h5``, or ``embeddings``, the folder of a sharded result; with ``.partial`` where rows are missing;
    None where there is no row."""
    state: str
    """complete, partial, failed or stopped."""
    num_records: int
    num_rows: int
    num_copies: int = 0
    """Records that are copies of another sequence and were not computed again."""
    num_truncated: int = 0
    """Rows whose sequence was truncated to the residue limit."""
    num_resplit_blocks: int = 0
    """Blocks of the plan that were computed in pieces because they did not fit the device."""
    num_cached_blocks: int = 0
    """Blocks of the plan whose rows came from the embedding cache."""
    num_widened_blocks: int = 0
    """Blocks of the plan of which some rows overflowed in half precision, and were computed in fp32."""
    processors: dict[str, list[str]] = field(default_factory=dict)
    """What computed the rows."""
    ranks: tuple[Rank, ...]
    """How each rank went; empty when the folder held the finished result already."""
    stages_s: Mapping[str, float]
    noticed: Mapping[str, int]
    """What was noticed of the input, by the names of ``SequenceIndex.counts``; ``windowed``: the sequences that are the
    mean of several windows."""

    @property
    def num_skipped(self) -> int:
        """Records that break a rule and were skipped; listed in ``failed_sequences.tsv``."""
        return self.noticed.get("skipped", 0)

    @property
    def num_missing(self) -> int:
        """Records without a row, though they should have one."""
        return self.num_records - self.num_rows - self.num_skipped

    @property
    def promise(self) -> str:
        """``bytes`` where one processor computed every block whole, so that it gives them again; else ``tolerance``."""
        differs = self.num_resplit_blocks or self.num_cached_blocks or len(self.processors) > 1
        return "tolerance" if differs else "bytes"

    @property
    def failed_ranks(self) -> list[int]:
        """Ranks that gave up."""
        return [outcome.rank for outcome in self.ranks if outcome.state != "complete"]

    @property
    def lost_ranks(self) -> str:
        """The ranks that gave up, and why; empty where none did."""
        lost = [outcome for outcome in self.ranks if outcome.state == "failed"]
        return "; ".join(f"rank {item.rank} on {item.device} ({item.failure}: {item.reason})" for item in lost)

    def notes(self) -> list[str]:
        """Return what the user should know about the rows, a sentence each."""
        notes = notes_on_input(self.noticed)
        if self.state == "complete" and self.lost_ranks:
            notes.append(f"the remaining workers did the work of {self.lost_ranks}")
        if self.num_copies:
            one = self.num_copies == 1
            what = "duplicate shares" if one else "duplicates share"
            notes.append(f"{self.num_copies:,} {what} the row of an identical sequence")
        if self.num_truncated:
            notes.append(f"{self.num_truncated:,} truncated to the residue limit (dataset truncated_from)")
        if self.num_resplit_blocks:
            notes.append(f"{self.num_resplit_blocks:,} blocks did not fit the device: computed in smaller batches")
        if self.num_cached_blocks:
            sequences = sum(rank.sequences_cached for rank in self.ranks)
            of_these = f" ({sequences:,} sequences in this start)" if sequences else ""
            notes.append(f"{self.num_cached_blocks:,} blocks came from the embedding cache{of_these}")
        if self.num_widened_blocks:
            of = f"{self.num_widened_blocks:,} block" + "s" * (self.num_widened_blocks > 1)
            notes.append(f"sequences of {of} overflowed and were computed in fp32 (sequence.widened in logs/)")
        notes += processors_differ(self.processors)
        if self.num_resplit_blocks or self.num_cached_blocks:
            notes.append("another run gives the same numbers within the tolerance, not the same bytes")
        notes.extend(sorted({printable(rank.cache_problem) for rank in self.ranks if rank.cache_problem is not None}))
        return notes

    def raise_unless(self, *, allow_partial: bool) -> None:
        """Raise the error of what is no success; with *allow_partial* a result with some rows is one."""
        if self.state == "complete":
            return
        if self.state == "stopped":
            raise StoppedError
        failed = [outcome for outcome in self.ranks if outcome.state != "complete"]
        classes = {FailureClass(outcome.failure or FailureClass.DIED) for outcome in failed}
        reason = next((outcome.reason or "unknown" for outcome in failed), "a block's rows were found damaged")
        if classes == {FailureClass.CONFIGURATION} and self.output_path is None:
            raise ConfigurationError(reason)
        if (refused := first_refused_write(failed)) is not None:
            raise refused
        if self.state == "partial" and allow_partial:
            return
        code = ExitCode.PARTIAL
        if self.output_path is None and failed:
            code = exit_code_of(classes.pop()) if len(classes) == 1 else ExitCode.INTERNAL
            if all(outcome.failure == FailureClass.HOST_OUT_OF_MEMORY for outcome in failed):
                code = ExitCode.CONFIGURATION  # it was worth a retry; now the user has to see to it
        raise WorkersFailedError(
            {outcome.rank: f"{outcome.failure}: {outcome.reason}" for outcome in failed},
            world_size=len(self.ranks),
            missing_sequences=self.num_missing,
            total_sequences=self.num_records,
            partial_path=None if self.output_path is None else str(self.output_path),
            exit_code=code,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json`` and for task results."""
        return {
            "state": self.state,
            "output_dir": str(self.output_dir),
            "output_path": None if self.output_path is None else str(self.output_path),
            "records": self.num_records,
            "rows": self.num_rows,
            "missing": self.num_missing,
            "skipped": self.num_skipped,
            "copies": self.num_copies,
            "truncated": self.num_truncated,
            "resplit_blocks": self.num_resplit_blocks,
            "cached_blocks": self.num_cached_blocks,
            "widened_blocks": self.num_widened_blocks,
            "processors": self.processors,
            "promise": self.promise,
            "failed_ranks": self.failed_ranks,
            "ranks": [outcome.to_json() for outcome in self.ranks],
            "stages_s": dict(self.stages_s),
            "noticed": dict(self.noticed),
        }


def first_refused_write(outcomes: Sequence[Rank]) -> OutputError | None:
    """Return the error of the first rank that could not write a file, which names that file."""
    reason = next((one.reason for one in outcomes if one.failure == FailureClass.CANNOT_WRITE), None)
    path, _, what = (reason or "").removeprefix("cannot write ").partition(": ")
    return None if reason is None else OutputError(path, what)


def notes_on_input(noticed: Mapping[str, int]) -> list[str]:
    """Return what the user should know about how the input was read, a sentence each."""
    notes = []
    if number := noticed.get("skipped"):
        notes.append(f"{number:,} invalid records were skipped (listed in failed_sequences.tsv)")
    notes += notes_on_files(noticed)
    changes = [
        f"{noticed[name]:,} {what}"
        for name, what in (
            ("mapped_j", "J read as X"),
            ("stops_as_x", "stops inside sequences read as X"),
            ("stripped_stops", "stops at the end removed"),
            ("removed_gaps", "gaps removed"),
            ("removed_blanks", "blanks removed"),
        )
        if noticed.get(name)
    ]
    if changes:
        notes.append(f"changed while reading: {', '.join(changes)}")
    if number := noticed.get("ambiguous"):
        notes.append(f"{number:,} ambiguous residues or nucleotides (X, B, Z; of DNA all but A, C, G, T)")
    if number := noticed.get("windowed"):
        notes.append(f"{number:,} sequences longer than --max-residues are the mean of their windows")
    if number := noticed.get("low_information"):
        notes.append(f"{number:,} sequences are X or N only: their rows hold no information (dataset low_information)")
    return notes


def notes_on_files(noticed: Mapping[str, int]) -> list[str]:
    """Return what the user should know about whole input files, a sentence each."""
    notes = []
    if number := noticed.get("lacks_bgzip_end"):
        files = "bgzip file has" if number == 1 else "bgzip files have"
        notes.append(
            f"{number:,} {files} no end-of-file block and may be truncated: compare their sizes with those at "
            "the source (some programs never write this block)"
        )
    if number := noticed.get("mate_files"):
        notes.append(f"{number:,} FASTQ files with the same ids in the same order were read as mates /1 and /2")
    return notes
