"""
Every setting of a run, once: title, help, bounds, default, unit, environment variable, and whether it decides bytes.

Options of the commands, forms of the flows, arguments of the library, fingerprints, the settings in ``run.json`` and
``docs/settings.md`` are made from these models. Nothing here opens a file. A number of 0 or an empty text stands for
"automatic", so that no field changes its type.
"""

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from virnucpro import texts
from virnucpro.choices import (
    AUTO_SHARDED_BYTES,
    AUTO_SHARDED_ROWS,
    AUTO_TOKEN_BUDGET,
    CASCADE_AUTO,
    DEFAULT_CLASSIFIER,
    DEFAULT_MAX_RESIDUES,
    DEFAULT_PROTEIN_MODEL,
    LEAST_PRIOR_CONTIGS,
    PRIOR_OFF,
    UNLIMITED_LETTERS,
    BadRecordPolicy,
    GapPolicy,
    Keep,
    LogLevel,
    LongPolicy,
    PrecisionChoice,
    ResultForm,
    StopPolicy,
    TableFormat,
    WrittenGenes,
)
from virnucpro.knobs import Box, knob, rule

DEFAULT_CACHE_GIB = 10.0
"""Some 8 million rows of 320 numbers, or 1 million of 2560."""
MAX_STARTS = 64
"""Processes started for one rank, at most, however much each of them gets done."""
MOST_PORT = 65535
"""Largest port of TCP."""


OFTEN = "Options"
"""Heading of the options that most people use, in the help of a command."""
OF_CALLS = "Advanced (calls)"


# A table: each setting in as few lines as it takes.
# fmt: off


class Hardware(Box):
    """Which devices compute, and how."""

    model_config = ConfigDict(json_schema_extra={"allOf": [
        rule(
            "devices", {"pattern": r"^\s*cpu\s*$"}, "workers_per_device", {"exclusiveMinimum": 1},
            "1, because only GPUs are shared by several workers",
        ),
        rule(
            "devices", {"not": {"pattern": r"^\s*(auto|cpu)\s*$"}}, "workers", {"exclusiveMinimum": 0},
            "0, because CPU workers are not for a list of GPUs",
        ),
        rule(
            "runner", {"pattern": "^(ray|dask)"}, "devices", {"not": {"pattern": r"^\s*(auto|cpu)\s*$"}},
            "auto or cpu, because a cluster gives each task its device",
        ),
        rule(
            "runner", {"pattern": "^(ray|dask)"}, "workers_per_device", {"exclusiveMinimum": 1},
            "1, because a cluster gives each task its device",
        ),
    ]})

    runner: str = knob(
        "threads", "Runner",
        "threads: this machine. ray or dask: a small cluster on this machine. ray://HOST:PORT or dask://HOST:PORT: a "
        "running cluster. dask://slurm: workers that SLURM starts. All but threads run as the Prefect flow; all hosts "
        "need the same folders.", text=texts.RUNNER,
        metavar="threads|ray|dask|ray://HOST:PORT|dask://HOST:PORT|dask://slurm", faces="command form"
    )
    devices: str = knob(
        "auto", "Devices",
        "auto: every GPU that is free, else the CPU. auto:2: two free GPUs. cpu. Or a list such as 0,1. A run waits "
        "for a GPU that another run on this host holds.", text=texts.DEVICES, metavar="LIST", panel=OFTEN
    )
    workers: int = knob(
        0, "CPU workers",
        "CPU processes; on a cluster at most so many tasks at a time, with SLURM the workers of its jobs. Not for a "
        "list of GPUs.", ge=0, le=1024, metavar="N", panel=OFTEN,
        auto="one per core, as memory and input allow; what a cluster has; one with SLURM"
    )
    workers_per_device: int = knob(
        1, "Workers per GPU", "Processes that share each GPU: several can pay for small models. 1 for the CPU.", ge=1,
        le=64, metavar="N"
    )
    loader_processes: int | None = knob(
        None, "Loader processes",
        "Beside each worker, to read and tokenise ahead. 0: the worker does it, which is faster for proteins.",
        ge=0, le=64, metavar="N", auto="2 for much DNA on a GPU with cores to spare, else 0"
    )
    precision: PrecisionChoice = knob(
        PrecisionChoice.AUTO,
        "Precision",
        "auto: fp32 on a CPU; on a GPU fp16 for ESM-2, bf16 for DNABERT-S (fp16 where a GPU has no bf16).",
        decides=True
    )
    token_budget: int = knob(
        AUTO_TOKEN_BUDGET, "Tokens in a block", "At most; never less than the longest sequence.", ge=0, le=10**9,
        metavar="auto|TOKENS", unit="tokens", auto="a number that suits CPUs, or what a short trial on each GPU finds",
        word="auto", decides=True
    )
    threads: int = knob(
        1, "Threads", "Threads of each CPU worker. Other numbers give other last bits.", ge=1, le=1024, metavar="N",
        decides=True, recorded="threads_per_worker"
    )

    @model_validator(mode="after")
    def _rules_across_fields(self) -> Self:
        devices = self.devices.strip()
        if self.runner != "threads" and (devices not in {"auto", "cpu"} or self.workers_per_device > 1):
            raise PydanticCustomError(
                "usage",
                "the runner {runner} gives each task its device: devices is auto or cpu, with one worker per device",
                {"runner": self.runner},
            )
        if devices == "cpu" and self.workers_per_device > 1:
            raise ValueError("several workers per device are for GPUs: with the CPU give the number of CPU workers")
        if devices not in {"auto", "cpu"} and self.workers:
            raise ValueError("CPU workers are given, but the devices are GPUs")
        return self


_GAPS = knob(GapPolicy.ERROR, "Gaps", "What happens to - and . in a sequence.", decides=True)
_ON_BAD_RECORD = knob(
    BadRecordPolicy.ERROR, "Bad records",
    "What happens to a record that breaks a rule: nothing is computed, or it is skipped and listed in "
    "failed_sequences.tsv.", decides=True
)
_RNA = knob(False, "RNA", "Read U as T in nucleotides; outputs have T.", decides=True)
_ALLOW_EMPTY = knob(False, "Empty input", "An input without records gives an empty result instead of an error.")


class SequenceRules(Box):
    """How the sequences of the input are read."""

    max_residues: int = knob(
        0, "Longest sequence", "Residues (of DNA: nucleotides) of a sequence that are embedded.", ge=0,
        le=UNLIMITED_LETTERS, metavar="RESIDUES", unit="residues",
        auto=f"{DEFAULT_MAX_RESIDUES} for proteins, no limit for models of DNA", decides=True
    )
    gaps: GapPolicy = _GAPS
    stop: StopPolicy = knob(
        StopPolicy.ERROR, "Stops",
        "What happens to * inside a protein; x reads it as X. One at the end is always removed.", decides=True,
        recorded="stops"
    )
    on_bad_record: BadRecordPolicy = _ON_BAD_RECORD
    rna: bool = _RNA
    allow_empty: bool = _ALLOW_EMPTY
    long: LongPolicy = knob(
        LongPolicy.TRUNCATE, "Longer sequences",
        "They are truncated, embedded as the mean of half-overlapping windows of that length, or an error.",
        decides=True, recorded="long_policy"
    )


class ContigRules(Box):
    """How the contigs of the input are read."""

    gaps: GapPolicy = _GAPS
    on_bad_record: BadRecordPolicy = _ON_BAD_RECORD
    rna: bool = _RNA
    allow_empty: bool = _ALLOW_EMPTY
    min_length: int = knob(
        0, "Shortest contig", "Nucleotides below which contigs are listed but not classified.", ge=0,
        le=UNLIMITED_LETTERS, metavar="NT", unit="nt", auto="none", decides=True, panel=OFTEN
    )


class Models(Box):
    """Models other than those that the classifier was trained with: seldom what you want."""

    dna_model: str = knob(
        "", "Model of DNA", "A registered name or a path.", text=texts.DNA_MODEL, metavar="NAME|PATH",
        auto="what the classifier was trained with", decides=True
    )
    protein_model: str = knob(
        "", "Model of proteins", "A registered name or a path.", text=texts.PROTEIN_MODEL, metavar="NAME|PATH",
        auto="what the classifier was trained with", decides=True
    )
    chunk: int = knob(
        0, "Chunk", "Nucleotides of a chunk, one of those that the classifier takes.", ge=0, le=10**6, metavar="NT",
        unit="nt", auto="what the classifier was trained with", decides=True
    )


_ALLOW_PARTIAL = knob(
    False, "Partial result",
    "Succeed where some rows are missing, as long as there are any: exit code 0; under Prefect Completed with the "
    "name Partial."
)
RESTART = knob(
    False, "Restart",
    "Remove what the output folder holds of earlier runs, and nothing else in it, instead of continuing them."
)


class EmbeddingResult(Box):
    """What becomes of the result."""

    allow_partial: bool = _ALLOW_PARTIAL
    restart: bool = RESTART
    form: ResultForm = knob(
        ResultForm.AUTO, "Form",
        "single: the file embeddings.h5. sharded: the folder embeddings, of files of neighbouring rows and an index of "
        "their ids. parquet: the file embeddings.parquet (needs the extra parquet). "
        f"auto: sharded from {AUTO_SHARDED_ROWS:,} rows or {AUTO_SHARDED_BYTES >> 30} GiB; a folder keeps its form.",
        option="--result-form", argument="result_form", decides=True, recorded="result_form", panel=OFTEN
    )
    keep_shards: bool = knob(False, "Keep shards", "Keep each worker's shard beside the result.")


class PredictionOutput(Box):
    """What is written, and what becomes of it."""

    allow_partial: bool = _ALLOW_PARTIAL
    restart: bool = RESTART
    formats: list[TableFormat] = knob(
        [], "Formats", "Formats of the table of contigs; TSV is always written. May be given twice.", option="--format",
        auto="those of the folder, at first tsv", panel=OFTEN
    )
    keep: Keep = knob(
        Keep.AUTO, "Keep",
        "What a complete run leaves. all: tables, report and, where contigs are embedded, frames and embeddings. "
        "tables: tables, viral.fasta and genes. auto: all, from 1 Gb of contigs on without frames and embeddings."
    )
    genes: WrittenGenes = knob(
        WrittenGenes.AUTO, "Genes",
        "Contigs whose genes are written, as genes.gff3 and genes.faa. viral: those called viral. "
        "auto: those of the folder, at first viral."
    )
    only_viral: bool = knob(
        False, "Only viral",
        "Write only the contigs called viral into contigs.tsv, its other formats, tracks and regions; run.json and the "
        "report still count all. The next start without it writes whole tables, which `evaluate` needs."
    )
    keep_chunks: bool = knob(False, "Keep chunks", "Write the chunks of embedded contigs as FASTA, too.")


class Cache(Box):
    """Weights, and rows of earlier runs."""

    weights_dir: str = knob(
        "", "Weights", "Folder that is searched for weights first.", metavar="DIR", auto="none",
        env="VIRNUCPRO_WEIGHTS"
    )
    cache_dir: str = knob(
        "", "Cache of rows",
        "Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones: the same numbers "
        "within the tolerance, not the same bytes.", metavar="DIR", auto="none"
    )
    cache_gib: float = knob(
        DEFAULT_CACHE_GIB, "Size of the cache", "GiB that the cache takes, at most.", ge=0.001, le=1e6,
        option="--cache-size", metavar="GIB", unit="GiB"
    )


class Monitoring(Box):
    """Metrics, logs and the timeline."""

    metrics_port: int | None = knob(
        None, "Port of the metrics",
        "Serve Prometheus metrics at http://127.0.0.1:PORT/metrics during the run; 0: a free port.",
        ge=0, le=MOST_PORT, metavar="PORT", auto="not served", env="VIRNUCPRO_METRICS_PORT"
    )
    metrics_targets: str = knob(
        "", "Targets of Prometheus",
        "Folder of Prometheus' file_sd_configs that gets a file with the address during the run.",
        metavar="DIR", auto="none", env="VIRNUCPRO_METRICS_TARGETS"
    )
    metrics_network: str = knob(
        "", "Network of the metrics",
        "Serve metrics to this IPv4 network, as in 10.1.0.0/16, by the address of the run's host in it: everyone "
        "there can read them.", text=texts.NETWORK,
        metavar="NETWORK", auto="127.0.0.1", env="VIRNUCPRO_METRICS_NETWORK"
    )
    pushgateway: str = knob(
        "", "Pushgateway", "Push metrics to this Prometheus pushgateway, too.", text=texts.ADDRESS,
        metavar="URL", auto="none", env="VIRNUCPRO_PUSHGATEWAY"
    )
    log_level: LogLevel = knob(LogLevel.INFO, "Level of the logs", "Of the workers' log files.")
    profile: bool = knob(
        False, "Timeline",
        "Record when each worker did what to every batch, in OUT/trace.json, a timeline for ui.perfetto.dev."
    )


class Limits(Box):
    """How long, and how often."""

    worker_retries: int = knob(
        2, "Retries of a worker",
        "How often in a row a worker is restarted after it failed without progress, before its work goes to the "
        "others.", ge=0, le=MAX_STARTS - 1, metavar="N"
    )
    time_limit_minutes: float = knob(
        0, "Time limit",
        "Minutes after which the run is stopped; what is done is kept, and the next run in the folder continues.", ge=0,
        le=60.0 * 24 * 365, option="--time-limit", metavar="MINUTES", unit="minutes", auto="none"
    )


FilePath = Annotated[str, Field(min_length=1)]
"""A path that is given."""


class RunSettings(Box):
    """What runs of every kind have."""

    hardware: Hardware = Hardware()
    cache: Cache = Cache()
    limits: Limits = Limits()
    monitoring: Monitoring = Monitoring()


class EmbeddingSettings(RunSettings):
    """Settings of ``virnucpro embed``."""

    model: FilePath = knob(
        DEFAULT_PROTEIN_MODEL, "Model",
        "A name from `virnucpro models list`, or the path of a fair-esm .pt file or of DNABERT-S weights.",
        text=texts.MODEL, metavar="NAME|PATH", auto="the bundled demonstration encoder", decides=True, panel=OFTEN
    )
    sequences: SequenceRules = SequenceRules()
    result: EmbeddingResult = EmbeddingResult()


class PredictionSettings(RunSettings):
    """Settings of ``virnucpro predict``."""

    classifier: FilePath = knob(
        DEFAULT_CLASSIFIER, "Classifier",
        "A bundled classifier, or the folder of one that `virnucpro train` or `virnucpro models convert-classifier` "
        "made.", text=texts.CLASSIFIER, metavar="NAME|PATH", auto=DEFAULT_CLASSIFIER, decides=True, panel=OF_CALLS
    )
    threshold: float | None = knob(
        None, "Threshold",
        "Contigs are called viral from this score on; from this posterior on where the share of viruses is known "
        "(--prior). Below the smaller of P and 1 - P they are called not viral.", gt=0, lt=1, metavar="P", panel=OFTEN,
        auto="that of the folder, at first the classifier's"
    )
    prior: str = knob(
        "", "Prior",
        "Share of viruses among the contigs. auto: estimated from their scores, where at least "
        f"{LEAST_PRIOR_CONTIGS} have one. Contigs are then called by their posterior: the score, given this share. "
        "off: by their score.", text=texts.PRIOR, metavar="auto|FRACTION|off", panel=OF_CALLS,
        auto="that of the folder, at first auto"
    )
    fdr: float | None = knob(
        None, "False discovery rate",
        "Call contigs viral from the lowest score whose expected false discovery rate in this sample is at most Q. "
        "Needs the prior, and excludes a threshold.", gt=0, lt=1, metavar="Q", panel=OFTEN,
        auto="that of the folder, at first none"
    )
    cascade: str = knob(
        CASCADE_AUTO, "Cascade",
        "Which contigs are embedded. auto: none for a classifier of composition alone, as the bundled one is; all for "
        "others. off: all. LOW,HIGH: those whose composition score (by the bundled classifier, unless the classifier "
        "has one) is between the two; the others keep that score.", text=texts.CASCADE,
        metavar="auto|off|LOW,HIGH", panel=OF_CALLS, decides=True
    )
    models: Models = Models()
    contigs: ContigRules = ContigRules()
    result: PredictionOutput = PredictionOutput()

    @model_validator(mode="after")
    def _one_rule_of_calls(self) -> Self:
        if self.fdr is not None and self.threshold is not None:
            raise PydanticCustomError(
                "usage", "a threshold and a false discovery rate exclude each other: give one of them"
            )
        if self.fdr is not None and self.prior == PRIOR_OFF:
            raise PydanticCustomError("usage", "a false discovery rate needs the prior: choose auto or a share")
        return self

    @model_validator(mode="after")
    def _cascade_has_room(self) -> Self:
        low, _, high = self.cascade.partition(",")
        if high and float(low) > float(high):
            raise PydanticCustomError("usage", f"the cascade is {self.cascade}: the lower score comes first")
        return self
