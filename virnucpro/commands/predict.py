"""``virnucpro predict``: contigs or reads in, calls and a report out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from virnucpro.commands.options import (
    LOG_LEVELS,
    AllowEmpty,
    AllowPartial,
    AsJson,
    CacheDir,
    CacheSize,
    Devices,
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
    Threads,
    TokenBudget,
    WeightsDir,
    Workers,
    WorkersPerDevice,
    check_choice,
    check_runner,
    flow_boxes,
)
from virnucpro.commands.output import told_if_anybody_reads
from virnucpro.commands.shown_prediction import shown_prediction
from virnucpro.config import AUTO_TOKEN_BUDGET, DEFAULT_CACHE_GIB, BadRecordPolicy, GapPolicy
from virnucpro.data.index_build import check_readable
from virnucpro.errors import printable
from virnucpro.models.classifier_card import DEFAULT_CLASSIFIER
from virnucpro.pipeline.device_claim import claim_devices
from virnucpro.pipeline.prediction_settings import TableFormat, configure_prediction
from virnucpro.telemetry.metrics_options import metrics_options
from virnucpro.telemetry.progress import DownloadProgress, say

if TYPE_CHECKING:
    from virnucpro.pipeline.prediction_result import PredictionResult

_MOST_NT = 10**9

ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|PATH", help="By default, and best, what the classifier was trained with.", show_default=False
    ),
]


def predict(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            metavar="INPUT",
            help="Contigs or reads: FASTA, FASTQ (both plain or gzip) or unaligned BAM.",
            show_default=False,
        ),
    ],
    output: OutputDir,
    classifier: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A bundled classifier, or the folder of one that `virnucpro train` or `virnucpro models convert-classifier` made. Without it, virnucpro-tiny.",
            show_default=False,
        ),
    ] = None,
    dna_model: ModelOption = None,
    protein_model: ModelOption = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NT", help="Nucleotides of a chunk.", show_default="what the classifier was trained with"
        ),
    ] = None,
    min_length: Annotated[
        int | None,
        typer.Option(
            min=1, max=_MOST_NT, metavar="NT", help="Contigs below are listed but not looked at.", show_default="none"
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Above 0 and below 1: P(virus) from which a contig is called viral; below the smaller of P and 1 - P it is called not viral.",
            show_default="the folder's, at first the classifier's",
        ),
    ] = None,
    table_format: Annotated[
        list[TableFormat] | None,
        typer.Option(
            "--format",
            help="Write the table of contigs in this format, too; may be given twice.",
            show_default="the folder's, at first tsv",
        ),
    ] = None,
    keep_chunks: Annotated[bool, typer.Option("--keep-chunks", help="Write the chunks as FASTA, too.")] = False,
    devices: Devices = "auto",
    workers: Workers = None,
    workers_per_device: WorkersPerDevice = 1,
    precision: PrecisionName = "auto",
    token_budget: TokenBudget = AUTO_TOKEN_BUDGET,
    threads: Threads = 1,
    gaps: Gaps = GapPolicy.ERROR,
    on_bad_record: OnBadRecord = BadRecordPolicy.ERROR,
    allow_empty: AllowEmpty = False,
    weights_dir: WeightsDir = None,
    cache_dir: CacheDir = None,
    cache_size: CacheSize = DEFAULT_CACHE_GIB,
    allow_partial: AllowPartial = False,
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
    Say of every contig whether it is viral: OUT/contigs.tsv, OUT/viral.fasta, and OUT/report.html to look at.

    Starting the same command again continues what is missing. Another --threshold or --format makes only tables and
    report again; without them the folder keeps those that it has.
    """
    check_runner(runner, devices, workers_per_device)
    check_choice("--log-level", log_level, LOG_LEVELS)
    check_choice("--precision", precision, ("auto", "fp32", "bf16", "fp16"))
    if threshold is not None and not 0 < threshold < 1:
        raise typer.BadParameter(f"{threshold:g} is not above 0 and below 1.", param_hint="--threshold")
    if classifier is None:
        say(
            f"No --classifier given: using the bundled classifier {DEFAULT_CLASSIFIER} "
            "(for the published ones see `virnucpro models convert-classifier --help`)."
        )
    check_readable(inputs)  # before weights are looked for or fetched
    asked: dict[str, Any] = {
        "port": metrics_port,
        "targets": metrics_targets,
        "network": metrics_network,
        "pushgateway": pushgateway,
    }
    metrics = metrics_options(**asked)
    if flow or runner != "threads":
        result = importlib.import_module("flows.predict").run_from_command_line(
            input_files=[str(path) for path in inputs],
            output_dir=str(output),
            classifier=classifier or DEFAULT_CLASSIFIER,
            threshold=threshold,
            result={
                "formats": [str(one) for one in table_format or ()],
                "keep_chunks": keep_chunks,
                "allow_partial": allow_partial,
                "restart": restart,
            },
            contigs={
                "min_length": min_length or 0,
                "gaps": gaps.value,
                "on_bad_record": on_bad_record.value,
                "allow_empty": allow_empty,
            },
            models={"dna_model": dna_model or "", "protein_model": protein_model or "", "chunk": chunk or 0},
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
            config = configure_prediction(
                classifier=classifier or DEFAULT_CLASSIFIER,
                dna_model=dna_model,
                protein_model=protein_model,
                chunk_nt=chunk,
                min_nt=min_length or 0,
                threshold=threshold,
                formats=table_format or (),
                keep_chunks=keep_chunks,
                device_type=claim.type,
                precision=precision,
                weights_dir=weights_dir,
                token_budget=token_budget,
                threads_per_worker=threads,
                workers_per_device=workers_per_device,
                gaps=gaps,
                on_bad_record=on_bad_record,
                allow_empty=allow_empty,
                cache_dir=cache_dir,
                cache_gib=cache_size,
                log_level=log_level,
                profile=profile,
                on_download=download.advance,
            )
        with shown_prediction(
            inputs, output, config, claim, metrics=metrics, workers=workers, restart=restart, is_quiet=as_json
        ) as result:
            _report(result, as_json=as_json, allow_partial=allow_partial)


def _report(result: PredictionResult, *, as_json: bool, allow_partial: bool) -> None:
    with told_if_anybody_reads():
        if as_json:
            print(json.dumps(result.to_json()))
        else:
            print_summary(result)
    result.raise_unless(allow_partial=allow_partial)
    if result.state == "partial":
        say(printable(f"partial: the missing frames are listed in {result.output_dir / 'failed_sequences.tsv'}"))


def print_summary(result: PredictionResult) -> None:
    """Print what users are told of a result."""
    counts = result.counts
    if result.was_complete:
        print(f"{printable(str(result.output_dir))}: already complete; nothing was computed")
    calls = [
        f"{counts[name]:,} {what}"
        for name, what in (
            ("virus", "virus"),
            ("not_virus", "not virus"),
            ("undecided", "undecided"),
            ("too_short", "too short"),
            ("no_open_frame", "without an open frame"),
        )
        if counts.get(name) or name in {"virus", "not_virus"}
    ]
    sequences = result.sequences.removesuffix("s" if counts["contigs"] == 1 else "")
    print(f"{counts['contigs']:,} {printable(sequences)}: {', '.join(calls)}")
    print(
        f"  {counts['chunks']:,} chunks, {counts['open_chunks']:,} with an open frame; "
        f"{counts['scored_frames']:,} of {counts['frames']:,} open frames scored"
    )
    for note in result.notes:
        print(f"  {printable(note)}")
    before = [name for name in result.stages_s if name not in result.computed]
    for title, names in (("", result.computed), ("done before: ", before)):
        if names:
            print(f"  {title}{', '.join(f'{name} {result.stages_s[name]:.1f} s' for name in names)}")
    print(f"calls:  {printable(str(result.contigs_path))}")
    print(f"report: {printable(str(result.report_path))}")
