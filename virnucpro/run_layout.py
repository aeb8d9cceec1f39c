"""Every file of a run, named once. Paths only: nothing is opened or created here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SHARD_NAME = re.compile(r"shard_(\d+)\.h5")
RESULT_SHARD_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}\.h5")
UNPACKED_NAME = re.compile(r"[0-9a-f]{64}\.(fasta|stdin)")
STDIN_NAME = re.compile(r"[0-9a-f]{64}\.stdin")
LOG_NAME = re.compile(r"worker_\d+\.log")
FRAMES_NAME = re.compile(r"[^/]+(_identified_nucleotide\.fa|_identified_protein\.faa|_chunked\d+\.fa)")
PART_NAME = re.compile(r"part_-?\d{8,}_\w+\.h5")
WORKER_LOCK_NAME = re.compile(r"\d+\.\d+\.[0-9a-f]{8}\.lock")


@dataclass(frozen=True)
class FolderLayout:
    """Files common to all kinds of run."""

    output_dir: Path

    @property
    def manifest(self) -> Path:
        """Settings, versions and outcome of the run."""
        return self.output_dir / "run.json"

    @property
    def lock(self) -> Path:
        """Held by the process that works in this folder."""
        return self.output_dir / ".run.lock"

    @property
    def work_dir(self) -> Path:
        """Needed while the run lasts and to resume it: index, unpacked input, parts."""
        return self.output_dir / "work"

    @property
    def unpacked_dir(self) -> Path:
        """Saved standard input, and FASTA copies of compressed inputs and other formats, for random access."""
        return self.work_dir / "unpacked"

    @property
    def failed_sequences(self) -> Path:
        """Sequences without a row or a score: id, reason, attempts, tab-separated."""
        return self.output_dir / "failed_sequences.tsv"

    @property
    def live_status(self) -> Path:
        """State of the run, rewritten every few seconds; removed at its end."""
        return self.work_dir / "status.json"

    @property
    def metrics_textfile(self) -> Path:
        """Last metrics, for the textfile collector of Prometheus' node exporter."""
        return self.output_dir / "metrics.prom"

    @property
    def trace(self) -> Path:
        """Timeline of a profiled run, for Perfetto."""
        return self.output_dir / "trace.json"

    @property
    def spans_dir(self) -> Path:
        """Spans of each process of a profiled run, until the timeline is made."""
        return self.work_dir / "spans"

    @property
    def log_dir(self) -> Path:
        """One file of JSON lines for each worker."""
        return self.output_dir / "logs"

    @property
    def worker_locks_dir(self) -> Path:
        """One file for each worker process, locked while it lives."""
        return self.work_dir / "workers"

    def worker_locks(self) -> list[Path]:
        """Return the existing lock files of workers."""
        return [path for path in self.worker_locks_dir.glob("*.lock") if WORKER_LOCK_NAME.fullmatch(path.name)]

    def worker_log(self, rank: int) -> Path:
        return self.log_dir / f"worker_{rank}.log"

    def worker_logs(self) -> list[Path]:
        """Return the existing log files."""
        return [path for path in self.log_dir.glob("worker_*.log") if LOG_NAME.fullmatch(path.name)]

    def saved_stdin(self, sha256: str) -> Path:
        """Standard input of this hex sha256, until the run is complete."""
        return self.unpacked_dir / f"{sha256}.stdin"

    def unpacked(self) -> list[Path]:
        """Return the existing copies of inputs."""
        return [path for path in self.unpacked_dir.glob("*.*") if UNPACKED_NAME.fullmatch(path.name)]


@dataclass(frozen=True)
class ShardedLayout:
    """Files of a sharded result, in a folder of their own."""

    folder: Path

    @property
    def index(self) -> Path:
        """Row of each id. Written last: exists only when every shard does."""
        return self.folder / "ids.index"

    def shard(self, number: int, num_shards: int) -> Path:
        """File *number* of *num_shards*, from 0."""
        return self.folder / f"shard-{number:05d}-of-{num_shards:05d}.h5"

    def shards(self) -> list[Path]:
        """Return the existing shards of any number."""
        return sorted(path for path in self.folder.glob("shard-*.h5") if RESULT_SHARD_NAME.fullmatch(path.name))


@dataclass(frozen=True)
class RunLayout(FolderLayout):
    """Files of an embedding run."""

    def result(self, suffix: str, *, is_partial: bool) -> Path:
        """The result in the form with this suffix; a partial one is removed by the run that completes it."""
        return self.output_dir / f"embeddings{'.partial' if is_partial else ''}{suffix}"

    @property
    def embeddings(self) -> Path:
        """The result as one file; exists only with every obtainable row."""
        return self.result(".h5", is_partial=False)

    @property
    def partial_embeddings(self) -> Path:
        """The existing rows, when some are missing; removed by the run that completes it."""
        return self.result(".h5", is_partial=True)

    @property
    def index(self) -> Path:
        return self.work_dir / "sequences.index"

    @property
    def parts_dir(self) -> Path:
        """Finished blocks, until their shard is sealed."""
        return self.work_dir / "parts"

    @property
    def reservation(self) -> Path:
        """Reserves disk space for the result and the closing files."""
        return self.work_dir / ".reserved"

    def host_check(self, owner: str) -> Path:
        """Temporary file that proves that a host can write and rename here."""
        return self.output_dir / f".host_check.{owner}"

    @property
    def shared_rows_dir(self) -> Path:
        """What the hosts of a cluster need to write the shards of a result, and what they have written."""
        return self.work_dir / "rows"

    def shard(self, rank: int) -> Path:
        """Everything that *rank* finished."""
        return self.output_dir / f"shard_{rank}.h5"

    def shards(self) -> list[Path]:
        """Return the existing shards, by rank."""
        matches = ((SHARD_NAME.fullmatch(path.name), path) for path in self.output_dir.glob("shard_*.h5"))
        found = [(int(match[1]), path) for match, path in matches if match]
        return [path for _, path in sorted(found)]


@dataclass(frozen=True)
class EvaluationLayout:
    """Files of an evaluation."""

    output_dir: Path

    @property
    def prediction_dir(self) -> Path:
        """The evaluated prediction, where the evaluation makes one."""
        return self.output_dir / "prediction"

    @property
    def document(self) -> Path:
        """All measurements."""
        return self.output_dir / "evaluation.json"

    @property
    def table(self) -> Path:
        return self.output_dir / "evaluation.tsv"

    @property
    def page(self) -> Path:
        return self.output_dir / "evaluation.html"

    def left_out(self, number: int) -> Path:
        """Contigs of the truth without a score in table *number* (from 1), one id in each line."""
        return self.output_dir / f"without_score_{number}.txt"


@dataclass(frozen=True)
class PredictionLayout(FolderLayout):
    """Files of a prediction; its two embedding runs have folders of their own."""

    @property
    def contig_index(self) -> Path:
        return self.work_dir / "contigs.index"

    @property
    def open_frames(self) -> Path:
        """Kept frames of each chunk of the embedded contigs: one byte, in input order."""
        return self.work_dir / "open_frames.u8"

    @property
    def contig_parts(self) -> Path:
        """Folder of composition scores, and then of genes, some contigs a file, until all are there."""
        return self.work_dir / "contigs"

    @property
    def composition_scores(self) -> Path:
        """Composition score, P(virus), of each contig: float32, in input order; NaN without a score."""
        return self.work_dir / "composition_scores.f32"

    @property
    def composition_windows(self) -> Path:
        return self.work_dir / "composition_windows.f32"

    @property
    def frame_scores(self) -> Path:
        """P(other) and P(virus) of each kept frame: float32, in frame order; NaN without a row."""
        return self.work_dir / "frame_scores.f32"

    @property
    def contig_scores(self) -> Path:
        """P(virus) of each contig by a contig model that reads embeddings, too: as ``composition_scores``."""
        return self.work_dir / "contig_scores.f32"

    @property
    def window_scores(self) -> Path:
        return self.work_dir / "window_scores.f32"

    @property
    def dna_dir(self) -> Path:
        """Embedding run of the frames' nucleotides."""
        return self.output_dir / "dna"

    @property
    def protein_dir(self) -> Path:
        """Embedding run of the frames' proteins."""
        return self.output_dir / "protein"

    @property
    def prediction_results(self) -> Path:
        """One line for each kept frame, as in the original program."""
        return self.output_dir / "prediction_results.txt"

    @property
    def highest_score(self) -> Path:
        """One line for each chunk with a kept frame, as in the original program."""
        return self.output_dir / "prediction_results_highestscore.csv"

    @property
    def contigs(self) -> Path:
        """One line for each contig of the input."""
        return self.output_dir / "contigs.tsv"

    @property
    def contigs_json(self) -> Path:
        """The same as a JSON array of objects."""
        return self.output_dir / "contigs.json"

    @property
    def contigs_parquet(self) -> Path:
        """The same as a Parquet table."""
        return self.output_dir / "contigs.parquet"

    @property
    def viral_fasta(self) -> Path:
        """The contigs called viral."""
        return self.output_dir / "viral.fasta"

    @property
    def genes(self) -> Path:
        """Genes of contigs, of the viral ones by default, as GFF3."""
        return self.output_dir / "genes.gff3"

    @property
    def gene_proteins(self) -> Path:
        """The proteins of these genes."""
        return self.output_dir / "genes.faa"

    @property
    def tracks(self) -> Path:
        """P(virus) along the long contigs, as bedGraph."""
        return self.output_dir / "tracks.bedgraph"

    @property
    def viral_regions(self) -> Path:
        """Runs of viral chunks in the long contigs, as BED."""
        return self.output_dir / "viral_regions.bed"

    @property
    def multiqc(self) -> Path:
        """Number of sequences of each call, for MultiQC's report of all samples."""
        return self.output_dir / "virnucpro_mqc.json"

    @property
    def report(self) -> Path:
        return self.output_dir / "report.html"

    def results(self) -> list[Path]:
        """Return the results whose names do not depend on the input's."""
        return [
            self.prediction_results,
            self.highest_score,
            self.contigs,
            self.contigs_json,
            self.contigs_parquet,
            self.viral_fasta,
            self.genes,
            self.gene_proteins,
            self.tracks,
            self.viral_regions,
            self.failed_sequences,
            self.multiqc,
            self.report,
            self.metrics_textfile,
            self.trace,
        ]

    def has_output(self, name: str) -> bool:
        """Whether a run may write a file of this name into its folder, beside the embedding runs."""
        return name in {path.name for path in self.results()} or FRAMES_NAME.fullmatch(name) is not None

    def nucleotide_frames(self, stem: str) -> Path:
        """Nucleotides of the kept frames of an input file."""
        return self.output_dir / f"{stem}_identified_nucleotide.fa"

    def protein_frames(self, stem: str) -> Path:
        """Proteins of the kept frames of an input file."""
        return self.output_dir / f"{stem}_identified_protein.faa"

    def chunks(self, stem: str, chunk_length: int) -> Path:
        """Every chunk of an input file; written only on request."""
        return self.output_dir / f"{stem}_chunked{chunk_length}.fa"


@dataclass(frozen=True)
class TrainingLayout(FolderLayout):
    """Files of a training, in its classifier's folder; the classifier's own files are listed in its card."""

    @property
    def split(self) -> Path:
        """Part of each genome."""
        return self.work_dir / "split.json"

    @property
    def pieces(self) -> Path:
        """Contigs for training and test."""
        return self.work_dir / "pieces.fasta"

    @property
    def further_pieces(self) -> Path:
        """Pieces of which only the letters are used, as FASTA."""
        return self.work_dir / "further_pieces.fasta"

    @property
    def further_pieces_table(self) -> Path:
        return self.work_dir / "further_pieces.tsv"

    @property
    def pieces_table(self) -> Path:
        """Origin and label of each of them."""
        return self.work_dir / "pieces.tsv"

    @property
    def contig_index(self) -> Path:
        return self.work_dir / "contigs.index"

    @property
    def open_frames(self) -> Path:
        """Open frames of each of their chunks: one byte."""
        return self.work_dir / "open_frames.u8"

    @property
    def nucleotide_frames(self) -> Path:
        return self.work_dir / "frames.fa"

    @property
    def protein_frames(self) -> Path:
        return self.work_dir / "frames.faa"

    def with_chunks(self, chunk_nt: int) -> TrainingLayout:
        """Return the layout for test chunks of another length; removed once the classifier exists."""
        return TrainingLayout(self.output_dir / f"chunks_{chunk_nt}")

    @property
    def trained_dir(self) -> Path:
        """The classifier before its evaluation."""
        return self.work_dir / "trained"

    @property
    def dna_dir(self) -> Path:
        """Embedding run of the frames' nucleotides; removed once the classifier exists."""
        return self.output_dir / "dna"

    @property
    def protein_dir(self) -> Path:
        """Embedding run of the frames' proteins; likewise."""
        return self.output_dir / "protein"

    @property
    def evaluation(self) -> Path:
        """Evaluation on the test part."""
        return self.output_dir / "evaluation.json"

    @property
    def card_text(self) -> Path:
        """The card for readers."""
        return self.output_dir / "MODEL_CARD.md"
