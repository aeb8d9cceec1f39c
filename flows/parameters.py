"""
What a run of a deployment may be told: the form in Prefect's page, and what is checked before a run exists.

Prefect turns each class into a box of the form, each field into a line with its title and help, and checks every
value against bounds, choices and the rules across fields when a run is asked for; the same rules hold in the process
that runs the flow. Nothing here opens a file. A number of 0 or an empty text stands for "what suits", so that a form
has no field to be switched between two types.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from virnucpro.config import (
    AUTO_SHARDED_BYTES,
    AUTO_SHARDED_ROWS,
    DEFAULT_CACHE_GIB,
    RUNNERS,
)
from virnucpro.pipeline.recovery import MAX_STARTS
from virnucpro.telemetry.metrics_options import MOST_PORT, MetricsOptions, metrics_options

_UUID = r"(GPU|MIG)-[0-9A-Za-z/-]+"
DEVICES = rf"^\s*(auto(:[1-9][0-9]*)?|cpu|[0-9]+(\s*,\s*[0-9]+)*|{_UUID}(\s*,\s*{_UUID})*)\s*$"
"""Devices as the command line takes them; which of them exist only the worker knows."""
_MOST_MINUTES = 60.0 * 24 * 365


class Box(BaseModel):
    """A box of the form: an unknown name in it is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Hardware(Box):
    """Which devices compute, and how."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {
                    "if": {"properties": {"devices": {"pattern": r"^\s*cpu\s*$"}}, "required": ["devices"]},
                    "then": {"properties": {"workers_per_device": {"maximum": 1}}},
                },
                {
                    "if": {
                        "properties": {"devices": {"not": {"pattern": r"^\s*(auto|cpu)\s*$"}}},
                        "required": ["devices"],
                    },
                    "then": {"properties": {"workers": {"maximum": 0}}},
                },
            ]
        }
    )

    runner: str = Field(
        default="threads",
        pattern=RUNNERS,
        title="Runner",
        description="threads: this machine. ray or dask: a small cluster on this machine. ray://HOST:PORT or "
        "dask://HOST:PORT: a cluster that stands. dask://slurm: workers that SLURM starts. All hosts share the folder.",
    )
    devices: str = Field(
        default="auto",
        pattern=DEVICES,
        title="Devices",
        description="auto: every GPU that is free, else the CPU. auto:2: two free GPUs. cpu. Or a list such as 0,1. "
        "A GPU that another run has is waited for.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        title="CPU workers",
        description="Processes that compute on the CPU; 0: one a core, as far as memory and the input go. "
        "Not for a list of GPUs.",
    )
    workers_per_device: int = Field(
        default=1,
        ge=1,
        le=16,
        title="Workers per GPU",
        description="Processes that share each GPU; 1 for the CPU.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        title="Precision",
        description="auto: fp32 on a CPU; on a GPU fp16 for ESM-2 and bf16 for DNABERT-S.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=1024,
        title="Threads",
        description="Threads of each CPU worker. Other numbers give other last bits.",
    )
    token_budget: int = Field(
        default=0,
        ge=0,
        le=10**9,
        title="Tokens in a block",
        description="At the most; never less than the longest sequence. 0: a number that suits CPUs, or what a short "
        "trial on each GPU finds.",
    )

    @model_validator(mode="after")
    def _rules_across_fields(self) -> Self:
        devices = self.devices.strip()
        if devices == "cpu" and self.workers_per_device > 1:
            raise ValueError("several workers per device are for GPUs: with the CPU give the number of CPU workers")
        if self.runner != "threads" and (devices not in {"auto", "cpu"} or self.workers_per_device > 1):
            raise ValueError("a cluster gives each task its device: devices is auto or cpu, with one worker a device")
        if devices not in {"auto", "cpu"} and self.workers:
            raise ValueError("CPU workers are given, but the devices are GPUs")
        return self


class _RecordRules(Box):
    """How the records of the input are read, whatever they are."""

    gaps: Literal["error", "remove"] = Field(
        default="error", title="Gaps", description="What happens to - and . in a sequence."
    )
    on_bad_record: Literal["error", "skip"] = Field(
        default="error",
        title="Bad records",
        description="What happens to a record that breaks a rule; skip lists it in failed_sequences.tsv.",
    )
    allow_empty: bool = Field(
        default=False,
        title="Empty input",
        description="An input without records gives an empty result instead of an error.",
    )


class SequenceRules(_RecordRules):
    """How the sequences of the input are read."""

    stop: Literal["error", "x"] = Field(
        default="error", title="Stops", description="What happens to * inside a protein; x reads it as X."
    )
    max_residues: int = Field(
        default=0,
        ge=0,
        le=10**9,
        title="Longest sequence",
        description="Residues that are embedded; 0: 1022 for proteins, and no limit for models of DNA.",
    )
    long: Literal["truncate", "window", "error"] = Field(
        default="truncate",
        title="Longer sequences",
        description="Are cut, embedded as the mean of half-overlapping windows, or an error.",
    )


class ContigRules(_RecordRules):
    """How the contigs of the input are read."""

    min_length: int = Field(
        default=0,
        ge=0,
        le=10**9,
        title="Shortest contig",
        description="Nucleotides below which contigs are listed but not looked at.",
    )


class Models(Box):
    """Models other than those that the classifier was trained with: seldom what you want."""

    dna_model: str = Field(
        default="", title="Model of DNA", description="A registered name or a path; empty: the classifier's."
    )
    protein_model: str = Field(
        default="", title="Model of proteins", description="A registered name or a path; empty: the classifier's."
    )
    chunk: int = Field(
        default=0,
        ge=0,
        le=10**6,
        title="Chunk",
        description="Nucleotides of a chunk, of those that the classifier takes; 0 is what it was trained with.",
    )


class _Result(Box):
    """What becomes of a result, whatever it is."""

    allow_partial: bool = Field(
        default=False,
        title="Partial result",
        description="Complete with the name Partial where something could not be computed, instead of failing.",
    )
    restart: bool = Field(
        default=False,
        title="Start afresh",
        description="Remove what the folder holds of earlier runs first, instead of continuing them.",
    )


class EmbeddingResult(_Result):
    """What becomes of the result."""

    form: Literal["auto", "single", "sharded", "parquet"] = Field(
        default="auto",
        title="Form",
        description="single: the file embeddings.h5. sharded: the folder embeddings, of files of neighbouring rows and "
        "an index of their ids. parquet: the file embeddings.parquet (needs the extra parquet). "
        f"auto: sharded from {AUTO_SHARDED_ROWS:,} rows or {AUTO_SHARDED_BYTES >> 30} GiB on; a folder keeps its form.",
    )
    keep_shards: bool = Field(
        default=False, title="Keep shards", description="Keep each worker's shard beside the result."
    )


class PredictionOutput(_Result):
    """What is written, and what becomes of it."""

    formats: list[Literal["tsv", "json", "parquet"]] = Field(
        default=[],
        title="Formats",
        description="Of the table of contigs; TSV is always written. None: those that the folder has.",
    )
    keep_chunks: bool = Field(default=False, title="Keep chunks", description="Write the chunks as FASTA, too.")


class Cache(Box):
    """Weights, and rows of earlier runs."""

    weights_dir: str = Field(
        default="", title="Weights", description="Folder that is looked into for weights first; empty: none."
    )
    cache_dir: str = Field(
        default="",
        title="Cache of rows",
        description="Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones: the "
        "same numbers within the tolerance, not the same bytes. Empty: none.",
    )
    cache_gib: float = Field(
        default=DEFAULT_CACHE_GIB,
        ge=0.001,
        le=1e6,
        title="Size of the cache",
        description="GiB that the cache takes at the most.",
    )


class Monitoring(Box):
    """Metrics, logs and the timeline."""

    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=MOST_PORT,
        title="Port of the metrics",
        description="Serve Prometheus metrics there, on 127.0.0.1, while the run goes on; 0: a free one. "
        "None: VIRNUCPRO_METRICS_PORT of the worker, else not served. On a cluster each host serves its own, too, as "
        "the network below says.",
    )
    metrics_targets: str = Field(
        default="",
        title="Targets of Prometheus",
        description="Folder of Prometheus' file_sd_configs that gets a file with the address while the run goes on; on "
        "a cluster, where it is to be a shared folder, one for each host as well. Empty: VIRNUCPRO_METRICS_TARGETS of "
        "the worker, else none.",
    )
    metrics_network: str = Field(
        default="",
        pattern=r"^(\d{1,3}(\.\d{1,3}){3}(/\d{1,2})?)?$",
        title="Network of the metrics",
        description="Serve metrics to this IPv4 network, as in 10.1.0.0/16, by each host's address in it; everybody "
        "there can read them. Empty: VIRNUCPRO_METRICS_NETWORK of the worker, else to this host alone, and a cluster's "
        "other hosts serve none.",
    )
    pushgateway: str = Field(
        default="",
        pattern=r"^(https?://\S+)?$",
        title="Pushgateway",
        description="URL of a Prometheus pushgateway that gets the metrics, too; empty: VIRNUCPRO_PUSHGATEWAY of the "
        "worker, else none.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", title="Level of the logs", description="Of the workers' log files."
    )
    profile: bool = Field(
        default=False,
        title="Timeline",
        description="Record when each worker did what to every batch: OUT/trace.json, for ui.perfetto.dev.",
    )


class Limits(Box):
    """How long, and how often."""

    worker_retries: int = Field(
        default=2,
        ge=0,
        le=MAX_STARTS - 1,
        title="Retries of a worker",
        description="How often in a row a worker is started again after it failed without getting anything done, "
        "before its work goes to the others.",
    )
    time_limit_minutes: float = Field(
        default=0,
        ge=0,
        le=_MOST_MINUTES,
        title="Time limit",
        description="Minutes after which the run is stopped and ends as TimedOut; what it did is kept, and the next "
        "run in the folder continues. 0: none.",
    )


def metrics_of(monitoring: Monitoring) -> MetricsOptions:
    """
    Return where metrics go, as the form or else the environment of the flow's process says.

    Raises:
        ConfigurationError: The network is none, or the pushgateway's address cannot be one.
    """
    return metrics_options(
        port=monitoring.metrics_port,
        targets=monitoring.metrics_targets,
        network=monitoring.metrics_network,
        pushgateway=monitoring.pushgateway,
    )


def model_settings(hardware: Hardware, cache: Cache, monitoring: Monitoring) -> dict[str, Any]:
    """Return what ``configure_model`` and ``configure_prediction`` both take from these boxes."""
    return {
        "precision": hardware.precision,
        "token_budget": hardware.token_budget,
        "threads_per_worker": hardware.threads,
        "workers_per_device": hardware.workers_per_device,
        "weights_dir": Path(cache.weights_dir) if cache.weights_dir else None,
        "cache_dir": cache.cache_dir or None,
        "cache_gib": cache.cache_gib,
        "log_level": monitoring.log_level,
        "profile": monitoring.profile,
    }
