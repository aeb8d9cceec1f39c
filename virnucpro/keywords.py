"""Types of the settings as keywords, for mypy and editors; made by python -m tools.settings_page."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

from virnucpro.choices import (
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


class RunKeywords(TypedDict, total=False):
    """Settings of every run."""

    devices: str
    workers: int | None
    workers_per_device: int
    loader_processes: int | None
    precision: PrecisionChoice | Literal["auto", "fp32", "bf16", "fp16"]
    token_budget: int | None
    threads: int
    weights_dir: str | PathLike[str] | None
    cache_dir: str | PathLike[str] | None
    cache_gib: float
    worker_retries: int
    time_limit_minutes: float | None
    metrics_port: int | None
    metrics_targets: str | PathLike[str] | None
    metrics_network: str | None
    pushgateway: str | None
    log_level: LogLevel | Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    profile: bool


class EmbeddingKeywords(RunKeywords, total=False):
    """Settings of ``embed_fasta``."""

    model: str | PathLike[str] | None
    max_residues: int | None
    gaps: GapPolicy | Literal["error", "remove"]
    stop: StopPolicy | Literal["error", "x"]
    on_bad_record: BadRecordPolicy | Literal["error", "skip"]
    rna: bool
    allow_empty: bool
    long: LongPolicy | Literal["truncate", "window", "error"]
    allow_partial: bool
    restart: bool
    result_form: ResultForm | Literal["auto", "single", "sharded", "parquet"]
    keep_shards: bool


class PredictionKeywords(RunKeywords, total=False):
    """Settings of ``predict_fasta``."""

    classifier: str | PathLike[str] | None
    threshold: float | None
    prior: str | None
    fdr: float | None
    cascade: str
    dna_model: str | PathLike[str] | None
    protein_model: str | PathLike[str] | None
    chunk: int | None
    gaps: GapPolicy | Literal["error", "remove"]
    on_bad_record: BadRecordPolicy | Literal["error", "skip"]
    rna: bool
    allow_empty: bool
    min_length: int | None
    allow_partial: bool
    restart: bool
    formats: Sequence[TableFormat | Literal["tsv", "json", "parquet"]] | None
    keep: Keep | Literal["auto", "all", "tables"]
    genes: WrittenGenes | Literal["auto", "viral", "all", "none"]
    only_viral: bool
    keep_chunks: bool
