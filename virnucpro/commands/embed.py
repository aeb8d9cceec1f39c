"""``virnucpro embed``: sequences into one validated file."""

from __future__ import annotations

import importlib
import json
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from virnucpro.commands.options import (
    LOG_LEVELS,
    AllowEmpty,
    AllowPartial,
    AsJson,
    CacheDir,
    CacheSize,
    Devices,
    FastaFiles,
    Flow,
    Gaps,
    LogLevel,
    MetricsNetwork,
    MetricsPort,
    MetricsTargets,
    OnBadRecord,
    OutputDir,
    PrecisionName,
    Profile,
    PushgatewayUrl,
    Restart,
    Runner,
    Stop,
    Threads,
    TokenBudget,
    WeightsDir,
    Workers,
    WorkersPerDevice,
    check_choice,
    check_runner,
    flow_boxes,
)
from virnucpro.commands.output import print_renderable, told_if_anybody_reads
from virnucpro.config import (
    AUTO_SHARDED_BYTES,
    AUTO_SHARDED_ROWS,
    AUTO_TOKEN_BUDGET,
    DEFAULT_CACHE_GIB,
    DEFAULT_MAX_RESIDUES,
    UNLIMITED_LETTERS,
    BadRecordPolicy,
    GapPolicy,
    LongPolicy,
    ResultForm,
    StopPolicy,
)
from virnucpro.data.index_build import check_readable
from virnucpro.errors import StoppedError, printable
from virnucpro.interrupts import stop_on_signals
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.device_claim import claim_devices
from virnucpro.pipeline.multi_gpu_inference import configure_model, run_embedding
from virnucpro.store.results.forms import require_form
from virnucpro.telemetry.metrics_options import metrics_options
from virnucpro.telemetry.progress import DownloadProgress, say, terminal_view
from virnucpro.telemetry.run_telemetry import RunTelemetry

if TYPE_CHECKING:
    from virnucpro.pipeline.run_result import RunResult


def embed(
    fasta: FastaFiles,
    output: OutputDir,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A name from `virnucpro models list`, or the path of a fair-esm .pt file or of DNABERT-S weights. Without it, the bundled demonstration encoder.",
            show_default=False,
        ),
    ] = None,
    devices: Devices = "auto",
    workers: Workers = None,
    workers_per_device: WorkersPerDevice = 1,
    precision: PrecisionName = "auto",
    token_budget: TokenBudget = AUTO_TOKEN_BUDGET,
    threads: Threads = 1,
    max_residues: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=UNLIMITED_LETTERS,
            metavar="RESIDUES",
            help="Residues (of DNA: nucleotides) of a sequence that are embedded.",
            show_default=f"{DEFAULT_MAX_RESIDUES}; DNA models: no limit",
        ),
    ] = None,
    long: Annotated[
        LongPolicy,
        typer.Option(
            help="What happens to longer sequences; window: they are the mean of half-overlapping windows of that length."
        ),
    ] = LongPolicy.TRUNCATE,
    gaps: Gaps = GapPolicy.ERROR,
    stop: Stop = StopPolicy.ERROR,
    on_bad_record: OnBadRecord = BadRecordPolicy.ERROR,
    allow_empty: AllowEmpty = False,
    weights_dir: WeightsDir = None,
    cache_dir: CacheDir = None,
    cache_size: CacheSize = DEFAULT_CACHE_GIB,
    allow_partial: AllowPartial = False,
    keep_shards: Annotated[
        bool, typer.Option("--keep-shards", help="Keep each worker's shard beside the result.")
    ] = False,
    result_form: Annotated[
        ResultForm,
        typer.Option(
            help=f"single: OUT/embeddings.h5. sharded: OUT/embeddings/, files of neighbouring rows and an index of their ids, read as one. parquet: OUT/embeddings.parquet (needs the extra parquet). auto: sharded from {AUTO_SHARDED_ROWS:,} rows or {AUTO_SHARDED_BYTES >> 30} GiB on; OUT keeps its form."
        ),
    ] = ResultForm.AUTO,
    restart: Restart = False,
    flow: Flow = False,
    runner: Runner = "threads",
    metrics_port: MetricsPort = None,
    metrics_targets: MetricsTargets = None,
    metrics_network: MetricsNetwork = None,
    pushgateway: PushgatewayUrl = None,
    log_level: LogLevel = "INFO",
    profile: Profile = False,
    as_json: AsJson = False,
) -> None:
    """
    Embed every protein, or with a model of DNA every contig, of the FASTA files into OUT/embeddings.h5, in their order.

    A large result is a folder of shards, OUT/embeddings, instead.

    Starting the same command again continues what is missing.
    """
    check_runner(runner, devices, workers_per_device)
    check_choice("--log-level", log_level, LOG_LEVELS)
    check_choice("--precision", precision, ("auto", "fp32", "bf16", "fp16"))
    require_form(result_form)
    if model is None:
        say(
            f"No --model given: using the bundled demonstration encoder {DEFAULT_PROTEIN_MODEL} "
            "(for the published models see `virnucpro models list`)."
        )
    check_readable(fasta)  # before weights are looked for or fetched
    asked: dict[str, Any] = {
        "port": metrics_port,
        "targets": metrics_targets,
        "network": metrics_network,
        "pushgateway": pushgateway,
    }
    metrics = metrics_options(**asked)
    if flow or runner != "threads":
        result = importlib.import_module("flows.embed").run_from_command_line(
            fasta_files=[str(path) for path in fasta],
            output_dir=str(output),
            model=model or DEFAULT_PROTEIN_MODEL,
            sequences={
                "max_residues": max_residues or 0,
                "long": long.value,
                "gaps": gaps.value,
                "stop": stop.value,
                "on_bad_record": on_bad_record.value,
                "allow_empty": allow_empty,
            },
            result={
                "allow_partial": allow_partial,
                "form": result_form.value,
                "keep_shards": keep_shards,
                "restart": restart,
            },
            **flow_boxes(
                runner=runner,
                devices=devices,
                workers=workers,
                workers_per_device=workers_per_device,
                precision=precision,
                threads=threads,
                token_budget=token_budget,
                weights_dir=weights_dir,
                cache_dir=cache_dir,
                cache_gib=cache_size,
                metrics=asked,
                log_level=log_level,
                profile=profile,
            ),
        )
        _report(result, as_json=as_json, allow_partial=allow_partial)
    else:
        claim = claim_devices(devices, workers=workers, workers_per_device=workers_per_device)
        with DownloadProgress(is_quiet=as_json) as download:
            config = configure_model(
                model or DEFAULT_PROTEIN_MODEL,
                device_type=claim.type,
                precision=precision,
                weights_dir=weights_dir,
                token_budget=token_budget,
                threads_per_worker=threads,
                workers_per_device=workers_per_device,
                max_residues=max_residues,
                long_policy=long,
                gaps=gaps,
                stops=stop,
                on_bad_record=on_bad_record,
                allow_empty=allow_empty,
                cache_dir=cache_dir,
                cache_gib=cache_size,
                log_level=log_level,
                profile=profile,
                on_download=download.advance,
            )
        claim = devices_for(claim, config, fasta, workers=workers)
        told_to_stop = threading.Event()
        with RunTelemetry(metrics, [terminal_view(is_quiet=as_json, stop=told_to_stop)]) as telemetry:
            with stop_on_signals(told_to_stop, telemetry.has_workers) as stopping:
                try:
                    result = run_embedding(
                        fasta,
                        output,
                        config,
                        claim,
                        telemetry=telemetry,
                        stop=told_to_stop,
                        keep_shards=keep_shards,
                        restart=restart,
                        result_form=result_form,
                    )
                except StoppedError:  # before there were workers
                    raise StoppedError(stopping.signal_number) from None
            if result.state == "stopped":
                raise StoppedError(stopping.signal_number)
            _report(result, as_json=as_json, allow_partial=allow_partial)


def _report(result: RunResult, *, as_json: bool, allow_partial: bool) -> None:
    with told_if_anybody_reads():
        if as_json:
            print(json.dumps(result.to_json()))
        else:
            _print_summary(result)
    result.raise_unless(allow_partial=allow_partial)
    if result.state == "partial":
        say(printable(f"partial: the missing sequences are listed in {result.output_dir / 'failed_sequences.tsv'}"))


def _print_summary(result: RunResult) -> None:
    if not result.ranks:
        print(
            f"{printable(str(result.output_path))}: already complete, {result.num_rows:,} sequences; nothing was computed"
        )
        _print_notes(result)
        return
    is_spread = any(rank.host for rank in result.ranks)
    table = Table(
        "rank",
        *(["host"] if is_spread else []),
        "device",
        "computed",
        "resumed",
        "tokens",
        "seconds",
        "tokens/s",
        "attempts",
        "state",
        box=None,
        pad_edge=False,
    )
    for rank in result.ranks:
        table.add_row(
            str(rank.rank),
            *([printable(rank.host or "")] if is_spread else []),
            rank.device,
            f"{rank.sequences:,}",
            f"{rank.sequences_resumed:,}",
            f"{rank.tokens:,}",
            f"{rank.seconds:.1f}",
            f"{rank.tokens_per_second:,.0f}",
            str(rank.attempts),
            rank.state,
        )
    print_renderable(table)
    where = "no result" if result.output_path is None else printable(str(result.output_path))
    print(f"{result.num_rows:,} of {result.num_records:,} sequences -> {where}")
    _print_notes(result)


def _print_notes(result: RunResult) -> None:
    for note in result.notes():
        print(f"  {printable(note)}")
