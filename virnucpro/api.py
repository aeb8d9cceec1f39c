"""The library face: what a script or a notebook calls. Everything else is reached through these."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from virnucpro.config import (
    AUTO_TOKEN_BUDGET,
    DEFAULT_CACHE_GIB,
    BadRecordPolicy,
    GapPolicy,
    LongPolicy,
    ResultForm,
    StopPolicy,
    one_of,
)
from virnucpro.data.index_build import check_readable
from virnucpro.models.classifier_card import DEFAULT_CLASSIFIER
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.device_claim import claim_devices
from virnucpro.pipeline.multi_gpu_inference import configure_model, run_embedding
from virnucpro.pipeline.prediction import run_prediction
from virnucpro.pipeline.prediction_settings import TableFormat, configure_prediction
from virnucpro.report.page import write_report
from virnucpro.store.contig_table import read_contig_calls
from virnucpro.store.reader import Embeddings, read_embeddings
from virnucpro.store.results.forms import require_form

if TYPE_CHECKING:
    from collections.abc import Sequence

    from virnucpro.store.contig_table import ContigCall


def embed_fasta(
    fasta_files: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    *,
    model: str | Path = DEFAULT_PROTEIN_MODEL,
    devices: str = "auto",
    workers: int | None = None,
    workers_per_device: int = 1,
    precision: str = "auto",
    token_budget: int | None = None,
    threads: int = 1,
    max_residues: int | None = None,
    long: LongPolicy | str = LongPolicy.TRUNCATE,
    gaps: GapPolicy | str = GapPolicy.ERROR,
    stop: StopPolicy | str = StopPolicy.ERROR,
    on_bad_record: BadRecordPolicy | str = BadRecordPolicy.ERROR,
    allow_empty: bool = False,
    weights_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    result_form: ResultForm | str = ResultForm.AUTO,
    restart: bool = False,
) -> Embeddings:
    """
    Embed every sequence of FASTA files; starting again in the same folder continues what is missing.

    Proteins or DNA, as the model takes.

    Args:
        fasta_files: One path or several, plain or gzip; the result has their order.
        output_dir: Folder of the run: result, manifest and logs.
        model: Registered name or path of a checkpoint; by default the bundled demonstration encoder.
        devices: ``auto`` (every visible GPU that is free, else the CPU), ``auto:N`` (N free GPUs), ``cpu``, or a list
            such as ``0,1``. A GPU that another run on this host holds is waited for.
        workers: CPU workers, by default one a core as far as memory and the input go.
        workers_per_device: Workers that share each GPU.
        precision: ``auto``, ``fp32``, ``bf16`` or ``fp16``.
        token_budget: Tokens in one block at the most; by default a number that suits CPUs, or what a short trial on
            each GPU finds.
        threads: Threads of each CPU worker.
        max_residues: Residues of a sequence that are embedded; by default 1022, and no limit for models of DNA.
        long: What happens to longer sequences: ``truncate``, ``window`` (the mean of half-overlapping windows of
            *max_residues*), or ``error``.
        gaps: What happens to ``-`` and ``.`` in a sequence: ``error`` or ``remove``.
        stop: What happens to ``*`` inside a protein: ``error``, or ``x`` to read it as X.
        on_bad_record: What happens to a record that breaks a rule: ``error``, or ``skip`` to leave it out and list it
            in ``failed_sequences.tsv``.
        allow_empty: An input without records gives an empty result instead of an error.
        weights_dir: Folder that is looked into for weights first.
        cache_dir: Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones; a run
            served from it gives the same numbers within the tolerance, not the same bytes.
        cache_gib: GiB that the cache takes at the most.
        result_form: ``single`` (one file), ``sharded`` (a folder of files and an index, read as one), ``parquet`` (one
            Apache Parquet file; needs the extra ``parquet``), or ``auto``, which is sharded for large results and keeps
            the form of the folder's earlier run.
        restart: Remove what the folder holds of earlier runs first, and start afresh.

    Returns:
        A mapping from sequence id to vector, open on ``output_dir``.

    Raises:
        BadInputError: The input cannot be used; tells every problem by file and line.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        WorkersFailedError: Rows are missing.
        OutputError: Something cannot be written.
    """
    _log_to_stderr()
    files = _listed(fasta_files)
    check_readable(files)
    form = require_form(one_of(ResultForm, "result_form", result_form))
    claim = claim_devices(devices, workers=workers, workers_per_device=workers_per_device)
    config = configure_model(
        model,
        device_type=claim.type,
        precision=precision,
        workers_per_device=workers_per_device,
        weights_dir=None if weights_dir is None else Path(weights_dir),
        token_budget=AUTO_TOKEN_BUDGET if token_budget is None else token_budget,
        threads_per_worker=threads,
        max_residues=max_residues,
        long_policy=long,
        gaps=gaps,
        stops=stop,
        on_bad_record=on_bad_record,
        allow_empty=allow_empty,
        cache_dir=cache_dir,
        cache_gib=cache_gib,
    )
    result = run_embedding(
        files,
        output_dir,
        config,
        devices_for(claim, config, files, workers=workers),
        restart=restart,
        result_form=form,
    )
    result.raise_unless(allow_partial=False)
    return read_embeddings(output_dir)


def predict_fasta(
    input_files: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    *,
    classifier: str | Path = DEFAULT_CLASSIFIER,
    dna_model: str | Path | None = None,
    protein_model: str | Path | None = None,
    chunk: int | None = None,
    min_length: int | None = None,
    threshold: float | None = None,
    formats: Sequence[TableFormat | str] = (),
    keep_chunks: bool = False,
    devices: str = "auto",
    workers: int | None = None,
    workers_per_device: int = 1,
    precision: str = "auto",
    token_budget: int | None = None,
    threads: int = 1,
    gaps: GapPolicy | str = GapPolicy.ERROR,
    on_bad_record: BadRecordPolicy | str = BadRecordPolicy.ERROR,
    allow_empty: bool = False,
    weights_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    restart: bool = False,
) -> list[ContigCall]:
    """
    Say of every contig whether it is viral; starting again in the same folder continues what is missing.

    Args:
        input_files: One path or several: FASTA, FASTQ (both plain or gzip) or unaligned BAM.
        output_dir: Folder of the run: tables, viral contigs, report, manifest.
        classifier: Name of a bundled classifier, or the folder of a converted one.
        dna_model: Name or path; by default, and best, what the classifier was trained with. So is *protein_model*.
        protein_model: As *dna_model*.
        chunk: Nucleotides of a chunk; only what the classifier was trained with is taken.
        min_length: Nucleotides below which a contig is listed but not looked at.
        threshold: P(virus) from which a contig is called viral; by default the folder's, at first the classifier's.
        formats: Formats of the table beside TSV: ``json``, ``parquet``; by default the folder's, at first none.
        keep_chunks: Write the chunks as FASTA, too; a folder goes on writing them.
        devices: As in ``embed_fasta``; so are the arguments that follow.
        workers: CPU workers.
        workers_per_device: Workers that share each GPU.
        precision: Of both models.
        token_budget: Tokens in one block at the most.
        threads: Threads of each CPU worker, and of the classifier.
        gaps: What happens to gaps in contigs.
        on_bad_record: What happens to a contig that breaks a rule.
        allow_empty: An input without contigs gives empty tables instead of an error.
        weights_dir: Folder that is looked into for weights first.
        cache_dir: Folder of the embedding cache.
        cache_gib: GiB that the cache takes at the most.
        restart: Remove what the folder holds of earlier runs first, and start afresh.

    Returns:
        A record for every contig of the input in its order, then one for every record that was left out.

    Raises:
        BadInputError: The input cannot be used; tells every problem by file and line.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        WorkersFailedError: Open frames could not be embedded; the tables hold what could.
        OutputError: Something cannot be written.
    """
    _log_to_stderr()
    files = _listed(input_files)
    check_readable(files)
    claim = claim_devices(devices, workers=workers, workers_per_device=workers_per_device)
    config = configure_prediction(
        classifier=classifier,
        dna_model=dna_model,
        protein_model=protein_model,
        chunk_nt=chunk,
        min_nt=min_length or 0,
        threshold=threshold,
        formats=formats,
        keep_chunks=keep_chunks,
        device_type=claim.type,
        precision=precision,
        weights_dir=None if weights_dir is None else Path(weights_dir),
        token_budget=AUTO_TOKEN_BUDGET if token_budget is None else token_budget,
        threads_per_worker=threads,
        workers_per_device=workers_per_device,
        gaps=gaps,
        on_bad_record=on_bad_record,
        allow_empty=allow_empty,
        cache_dir=cache_dir,
        cache_gib=cache_gib,
    )
    result = run_prediction(
        files,
        output_dir,
        config,
        claim,
        write_report=write_report,
        workers=workers,
        restart=restart,
    )
    result.raise_unless(allow_partial=False)
    return list(read_contig_calls(result.contigs_path))


def _listed(files: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [files] if isinstance(files, str | Path) else list(files)


def _log_to_stderr() -> None:
    if not structlog.is_configured():  # its default prints to standard output, which is the caller's
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
