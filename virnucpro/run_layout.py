"""Every file of a run, named once. Knows paths only: nothing here opens or creates anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SHARD_NAME = re.compile(r"shard_(\d+)\.h5")
RESULT_SHARD_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.h5")
UNPACKED_NAME = re.compile(r"[0-9a-f]{64}\.fasta")
LOG_NAME = re.compile(r"worker_\d+\.log")
FRAMES_NAME = re.compile(r"[^/]+(_identified_nucleotide\.fa|_identified_protein\.faa|_chunked\d+\.fa)")
PART_NAME = re.compile(r"part_-?\d{8,}_\w+\.h5")
WORKER_LOCK_NAME = re.compile(r"\d+\.\d+\.[0-9a-f]{8}\.lock")


@dataclass(frozen=True)
class FolderLayout:
    """What the folders of all runs have in common."""

    output_dir: Path

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
    def unpacked_dir(self) -> Path:
        """FASTA copies of inputs that are compressed or of another format, for random access."""
        return self.work_dir / "unpacked"

    @property
    def failed_sequences(self) -> Path:
        """Sequences without a row or a score: id, reason, attempts, tab-separated."""
        return self.output_dir / "failed_sequences.tsv"

    @property
    def live_status(self) -> Path:
        """How the run is, rewritten every few seconds while it goes on; removed at its end."""
        return self.work_dir / "status.json"

    @property
    def metrics_textfile(self) -> Path:
        """The last figures of the run, for the textfile collector of Prometheus' node exporter."""
        return self.output_dir / "metrics.prom"

    @property
    def trace(self) -> Path:
        """The timeline of a profiled run, for Perfetto."""
        return self.output_dir / "trace.json"

    @property
    def spans_dir(self) -> Path:
        """What each process of a profiled run has measured, until the timeline is made of it."""
        return self.work_dir / "spans"

    def unpacked(self) -> list[Path]:
        """Return the unpacked inputs that exist."""
        return [path for path in self.unpacked_dir.glob("*.fasta") if UNPACKED_NAME.fullmatch(path.name)]


@dataclass(frozen=True)
class ShardedLayout:
    """The files of a sharded result, under a folder of their own."""

    folder: Path

    @property
    def index(self) -> Path:
        """Which row an id has. Written last: this name exists only when every shard is there."""
        return self.folder / "ids.index"

    def shard(self, number: int, num_shards: int) -> Path:
        """The file number *number*, from 0, of *num_shards*."""
        return self.folder / f"shard-{number:05d}-of-{num_shards:05d}.h5"

    def shards(self) -> list[Path]:
        """Return the shards that exist, of whatever number."""
        return sorted(path for path in self.folder.glob("shard-*.h5") if RESULT_SHARD_NAME.fullmatch(path.name))


@dataclass(frozen=True)
class RunLayout(FolderLayout):
    """The files of an embedding run, under one output folder."""

    def result(self, suffix: str, *, is_partial: bool) -> Path:
        """The result in the form with this suffix; a partial one is removed by the run that completes it."""
        return self.output_dir / f"embeddings{'.partial' if is_partial else ''}{suffix}"

    @property
    def embeddings(self) -> Path:
        """The result as one file. This name exists only when every row that can be had is in it."""
        return self.result(".h5", is_partial=False)

    @property
    def partial_embeddings(self) -> Path:
        """The rows that exist, when some are missing; removed by the run that completes it."""
        return self.result(".h5", is_partial=True)

    @property
    def index(self) -> Path:
        """The sequence index."""
        return self.work_dir / "sequences.index"

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

    def worker_locks(self) -> list[Path]:
        """Return the files of workers that exist."""
        return [path for path in self.worker_locks_dir.glob("*.lock") if WORKER_LOCK_NAME.fullmatch(path.name)]

    def host_check(self, owner: str) -> Path:
        """A file that proves that a host can write and rename here; gone at once."""
        return self.output_dir / f".host_check.{owner}"

    @property
    def all_units_dir(self) -> Path:
        """What hosts tell each other, a folder for each start of the run."""
        return self.work_dir / "units"

    def units(self, run_id: str) -> UnitsLayout:
        """What hosts tell each other in one start of the run."""
        return UnitsLayout(self.all_units_dir / run_id)

    @property
    def log_dir(self) -> Path:
        """One file of JSON lines a worker."""
        return self.output_dir / "logs"

    def shard(self, rank: int) -> Path:
        """Everything that *rank* finished."""
        return self.output_dir / f"shard_{rank}.h5"

    def worker_log(self, rank: int) -> Path:
        """What the processes of *rank* have logged."""
        return self.log_dir / f"worker_{rank}.log"

    def worker_logs(self) -> list[Path]:
        """Return the log files that exist."""
        return [path for path in self.log_dir.glob("worker_*.log") if LOG_NAME.fullmatch(path.name)]

    def shards(self) -> list[Path]:
        """Return the shards that exist, by rank."""
        matches = ((SHARD_NAME.fullmatch(path.name), path) for path in self.output_dir.glob("shard_*.h5"))
        found = [(int(match[1]), path) for match, path in matches if match]
        return [path for _, path in sorted(found)]


@dataclass(frozen=True)
class UnitsLayout:
    """The files by which the hosts of one start of a run share its work out."""

    folder: Path

    @property
    def plan(self) -> Path:
        """Which blocks each unit holds; also proves that a host sees this very folder."""
        return self.folder / "units.json"

    @property
    def claims_dir(self) -> Path:
        """One file a claimed unit, which names its owner."""
        return self.folder / "claims"

    @property
    def done_dir(self) -> Path:
        """One file a unit whose blocks are durable."""
        return self.folder / "done"

    @property
    def owners_dir(self) -> Path:
        """One file an owner, rewritten as long as it lives."""
        return self.folder / "owners"

    @property
    def said_dir(self) -> Path:
        """One file of JSON lines an owner: what its worker said."""
        return self.folder / "said"

    @property
    def readings_dir(self) -> Path:
        """One file an owner, where metrics are served: how its GPU is, and what its worker uses of its host."""
        return self.folder / "readings"

    def owner(self, name: str) -> Path:
        """The sign of life of an owner."""
        return self.owners_dir / name

    def said(self, owner: str) -> Path:
        """What the worker of an owner said."""
        return self.said_dir / f"{owner}.jsonl"

    def reading(self, owner: str) -> Path:
        """What an owner has seen last of its host."""
        return self.readings_dir / owner

    @property
    def result_dir(self) -> Path:
        """The work on the result that any host may do: a numbered folder for each pass over its files."""
        return self.folder / "result"

    @property
    def task(self) -> Path:
        """What is to be done with each file of a pass."""
        return self.folder / "task.json"

    @property
    def written_dir(self) -> Path:
        """What the hosts have written in a pass, until the driver moves it to its place."""
        return self.folder / "written"

    def answer(self, item: int) -> Path:
        """What has come of one file of a pass."""
        return self.said_dir / f"{item}.json"

    @property
    def driver(self) -> Path:
        """The sign of life of the process that shares the work out, and its word that everybody is to stop."""
        return self.folder / "driver"


@dataclass(frozen=True)
class EvaluationLayout:
    """The files of an evaluation, under one output folder."""

    output_dir: Path

    @property
    def prediction_dir(self) -> Path:
        """The identification that is evaluated, where the evaluation makes one."""
        return self.output_dir / "prediction"

    @property
    def document(self) -> Path:
        """All that was measured."""
        return self.output_dir / "evaluation.json"

    @property
    def table(self) -> Path:
        """The measures, one line a stratum."""
        return self.output_dir / "evaluation.tsv"

    @property
    def page(self) -> Path:
        """The page to look at."""
        return self.output_dir / "evaluation.html"

    def left_out(self, number: int) -> Path:
        """Contigs of the truth that table *number*, from 1, has no score of; one id a line."""
        return self.output_dir / f"without_score_{number}.txt"


@dataclass(frozen=True)
class PredictionLayout(FolderLayout):
    """The files of an identification, under one output folder. The two embedding runs have folders of their own."""

    @property
    def contig_index(self) -> Path:
        """Index of the contigs."""
        return self.work_dir / "contigs.index"

    @property
    def open_frames(self) -> Path:
        """Which frames of each chunk were kept: one byte a chunk, in the order of the input."""
        return self.work_dir / "open_frames.u8"

    @property
    def frame_scores(self) -> Path:
        """P(other) and P(virus) of each kept frame: float32, in the frames' order; NaN where one has no row."""
        return self.work_dir / "frame_scores.f32"

    @property
    def contig_scores(self) -> Path:
        """P(virus) of each contig by the contig model: float32, in the order of the input; NaN where it has none."""
        return self.work_dir / "contig_scores.f32"

    @property
    def window_scores(self) -> Path:
        """P(virus) around each chunk of the long contigs by the contig model: float32, likewise."""
        return self.work_dir / "window_scores.f32"

    @property
    def dna_dir(self) -> Path:
        """The embedding run of the frames' nucleotides."""
        return self.output_dir / "dna"

    @property
    def protein_dir(self) -> Path:
        """The embedding run of the frames' proteins."""
        return self.output_dir / "protein"

    @property
    def prediction_results(self) -> Path:
        """One line a kept frame, as the original program wrote them."""
        return self.output_dir / "prediction_results.txt"

    @property
    def highest_score(self) -> Path:
        """One line a chunk with a kept frame, as the original program wrote them."""
        return self.output_dir / "prediction_results_highestscore.csv"

    @property
    def contigs(self) -> Path:
        """One line a contig of the input."""
        return self.output_dir / "contigs.tsv"

    @property
    def contigs_json(self) -> Path:
        """The same as a JSON array of objects."""
        return self.output_dir / "contigs.json"

    @property
    def contigs_parquet(self) -> Path:
        """The same as an Apache Parquet table."""
        return self.output_dir / "contigs.parquet"

    @property
    def viral_fasta(self) -> Path:
        """The contigs that are called viral."""
        return self.output_dir / "viral.fasta"

    @property
    def tracks(self) -> Path:
        """P(virus) along the long contigs, as bedGraph."""
        return self.output_dir / "tracks.bedgraph"

    @property
    def viral_regions(self) -> Path:
        """Runs of viral chunks in the long contigs, as BED."""
        return self.output_dir / "viral_regions.bed"

    @property
    def report(self) -> Path:
        """The page to look at."""
        return self.output_dir / "report.html"

    def results(self) -> list[Path]:
        """Return the names of the results that do not depend on the input's."""
        return [
            self.prediction_results,
            self.highest_score,
            self.contigs,
            self.contigs_json,
            self.contigs_parquet,
            self.viral_fasta,
            self.tracks,
            self.viral_regions,
            self.failed_sequences,
            self.report,
            self.metrics_textfile,
            self.trace,
        ]

    def has_output(self, name: str) -> bool:
        """Whether a run may write a file of this name into its folder, beside the embedding runs."""
        return name in {path.name for path in self.results()} or FRAMES_NAME.fullmatch(name) is not None

    def nucleotide_frames(self, stem: str) -> Path:
        """Nucleotides of the kept frames of the input file with this stem."""
        return self.output_dir / f"{stem}_identified_nucleotide.fa"

    def protein_frames(self, stem: str) -> Path:
        """Proteins of the kept frames of the input file with this stem."""
        return self.output_dir / f"{stem}_identified_protein.faa"

    def chunks(self, stem: str, chunk_length: int) -> Path:
        """Every chunk of the input file with this stem; written only on request."""
        return self.output_dir / f"{stem}_chunked{chunk_length}.fa"


@dataclass(frozen=True)
class TrainingLayout(FolderLayout):
    """The files of a training, under the folder of the classifier that it makes; the classifier's are its card's."""

    @property
    def split(self) -> Path:
        """Which genome is in which part."""
        return self.work_dir / "split.json"

    @property
    def pieces(self) -> Path:
        """The contigs that are trained and measured on."""
        return self.work_dir / "pieces.fasta"

    @property
    def pieces_table(self) -> Path:
        """What each of them is, and where it was cut."""
        return self.work_dir / "pieces.tsv"

    @property
    def contig_index(self) -> Path:
        """Their index."""
        return self.work_dir / "contigs.index"

    @property
    def open_frames(self) -> Path:
        """Which frames of each of their chunks are open: one byte a chunk."""
        return self.work_dir / "open_frames.u8"

    @property
    def nucleotide_frames(self) -> Path:
        """Nucleotides of the open frames."""
        return self.work_dir / "frames.fa"

    @property
    def protein_frames(self) -> Path:
        """Proteins of the open frames."""
        return self.work_dir / "frames.faa"

    def with_chunks(self, chunk_nt: int) -> TrainingLayout:
        """Return the same of the test part in chunks of another length; removed once the classifier is there."""
        return TrainingLayout(self.output_dir / f"chunks_{chunk_nt}")

    @property
    def trained_dir(self) -> Path:
        """The classifier before it was measured."""
        return self.work_dir / "trained"

    @property
    def dna_dir(self) -> Path:
        """The embedding run of the frames' nucleotides; removed once the classifier is there."""
        return self.output_dir / "dna"

    @property
    def protein_dir(self) -> Path:
        """The embedding run of the frames' proteins; likewise."""
        return self.output_dir / "protein"

    @property
    def evaluation(self) -> Path:
        """What the classifier is worth on the test part."""
        return self.output_dir / "evaluation.json"

    @property
    def card_text(self) -> Path:
        """The card for readers."""
        return self.output_dir / "MODEL_CARD.md"
