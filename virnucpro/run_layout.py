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


class _At:
    """A file or folder at a fixed place in the folder of a run."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, layout: FolderLayout | EvaluationLayout, _of: object = None) -> Path:
        return layout.output_dir / self._place


@dataclass(frozen=True)
class FolderLayout:
    """Files common to all kinds of run."""

    output_dir: Path

    manifest = _At("run.json")
    """Settings, versions and outcome of the run."""
    lock = _At(".run.lock")
    """Held by the process that works in this folder."""
    work_dir = _At("work")
    """Needed while the run lasts and to resume it: index, unpacked input, parts."""
    unpacked_dir = _At("work/unpacked")
    """Saved standard input, and FASTA copies of compressed inputs and other formats, for random access."""
    failed_sequences = _At("failed_sequences.tsv")
    """Sequences without a row or a score: id, reason, attempts, tab-separated."""
    live_status = _At("work/status.json")
    """State of the run, rewritten every few seconds; removed at its end."""
    metrics_textfile = _At("metrics.prom")
    """Last metrics, for the textfile collector of Prometheus' node exporter."""
    trace = _At("trace.json")
    """Timeline of a profiled run, for Perfetto."""
    spans_dir = _At("work/spans")
    """Spans of each process of a profiled run, until the timeline is made."""
    log_dir = _At("logs")
    """One file of JSON lines for each worker."""
    worker_locks_dir = _At("work/workers")
    """One file for each worker process, locked while it lives."""

    def fixed(self) -> list[Path]:
        """Return every file and folder whose name depends on nothing, whether it exists or not."""
        places = {name for kind in type(self).__mro__ for name, one in vars(kind).items() if isinstance(one, _At)}
        return [getattr(self, name) for name in sorted(places)]

    def worker_locks(self) -> list[Path]:
        """Return the existing lock files of workers."""
        return [path for path in self.worker_locks_dir.glob("*.lock") if WORKER_LOCK_NAME.fullmatch(path.name)]

    def worker_log(self, rank: int) -> Path:
        return self.log_dir / f"worker_{rank}.log"

    def worker_logs(self) -> list[Path]:
        """Return the existing log files."""
        return [path for path in self.log_dir.glob("worker_*.log") if LOG_NAME.fullmatch(path.name)]

    def host_check(self, owner: str) -> Path:
        """Temporary file that proves that a host can write and rename here."""
        return self.output_dir / f".host_check.{owner}"

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

    index = _At("work/sequences.index")
    parts_dir = _At("work/parts")
    """Finished blocks, until their shard is sealed."""
    reservation = _At("work/.reserved")
    """Reserves disk space for the result and the closing files."""

    shared_rows_dir = _At("work/rows")
    """What the hosts of a cluster need to write the shards of a result, and what they have written."""

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

    prediction_dir = _At("prediction")
    """The evaluated prediction, where the evaluation makes one."""
    document = _At("evaluation.json")
    table = _At("evaluation.tsv")
    page = _At("evaluation.html")
    agreement = _At("agreement.json")
    agreement_table = _At("agreement.tsv")

    def left_out(self, number: int) -> Path:
        """Contigs of the truth without a score in table *number* (from 1), one id in each line."""
        return self.output_dir / f"without_score_{number}.txt"


@dataclass(frozen=True)
class PredictionLayout(FolderLayout):
    """Files of a prediction; its two embedding runs have folders of their own."""

    contig_index = _At("work/contigs.index")
    open_frames = _At("work/open_frames.u8")
    """Kept frames of each chunk of the embedded contigs: one byte, in input order."""
    contig_parts = _At("work/contigs")
    """Folder of composition scores, and then of genes, some contigs a file, until all are there."""
    composition_scores = _At("work/composition_scores.f32")
    """Composition score, P(virus), of each contig: float32, in input order; NaN without a score."""
    composition_windows = _At("work/composition_windows.f32")
    evidence = _At("work/evidence.f32")
    """What the score of each contig rests on: rows of ``calls.evidence.COLUMNS``."""
    topologies = _At("work/topologies.u8")
    """``calls.topology.Topology`` of each contig: one byte."""
    frame_scores = _At("work/frame_scores.f32")
    """P(other) and P(virus) of each kept frame: float32, in frame order; NaN without a row."""
    contig_scores = _At("work/contig_scores.f32")
    """P(virus) of each contig by a contig model that reads embeddings, too: as ``composition_scores``."""
    window_scores = _At("work/window_scores.f32")
    dna_dir = _At("dna")
    """Embedding run of the frames' nucleotides."""
    protein_dir = _At("protein")
    """Embedding run of the frames' proteins."""
    prediction_results = _At("prediction_results.txt")
    """One line for each kept frame, as in the original program."""
    highest_score = _At("prediction_results_highestscore.csv")
    """One line for each chunk with a kept frame, as in the original program."""
    contigs = _At("contigs.tsv")
    """One line for each contig of the input."""
    contigs_json = _At("contigs.json")
    """The same as a JSON array of objects."""
    contigs_parquet = _At("contigs.parquet")
    """The same as a Parquet table."""
    viral_fasta = _At("viral.fasta")
    """The contigs called viral."""
    genes = _At("genes.gff3")
    """Genes of contigs, of the viral ones by default, as GFF3."""
    gene_proteins = _At("genes.faa")
    tracks = _At("tracks.bedgraph")
    """P(virus) along the long contigs, as bedGraph."""
    viral_regions = _At("viral_regions.bed")
    """Runs of viral chunks in the long contigs, as BED."""
    proviruses = _At("viral_regions.fasta")
    """Those that are not the whole contig, cut out."""
    multiqc = _At("virnucpro_mqc.json")
    """Number of sequences of each call, for MultiQC's report of all samples."""
    report = _At("report.html")

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
            self.proviruses,
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

    split = _At("work/split.json")
    """Part of each genome."""
    fragments = _At("work/fragments.fasta")
    """Contigs for training and test."""
    further_fragments = _At("work/further_fragments.fasta")
    """Fragments of which only the letters are used, as FASTA."""
    further_fragments_table = _At("work/further_fragments.tsv")
    fragments_table = _At("work/fragments.tsv")
    """Origin and label of each of them."""
    contig_index = _At("work/contigs.index")
    open_frames = _At("work/open_frames.u8")
    """Open frames of each of their chunks: one byte."""
    nucleotide_frames = _At("work/frames.fa")
    protein_frames = _At("work/frames.faa")

    def with_chunks(self, chunk_nt: int) -> TrainingLayout:
        """Return the layout for test chunks of another length; removed once the classifier exists."""
        return TrainingLayout(self.output_dir / f"chunks_{chunk_nt}")

    trained_dir = _At("work/trained")
    """The classifier before its evaluation."""
    dna_dir = _At("dna")
    """Embedding run of the frames' nucleotides; removed once the classifier exists."""
    protein_dir = _At("protein")
    """Embedding run of the frames' proteins; likewise."""
    evaluation = _At("evaluation.json")
    """Evaluation on the test part."""
    card_text = _At("MODEL_CARD.md")
    """The card for readers."""
