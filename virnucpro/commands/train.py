"""``virnucpro train``: labelled genomes in, a classifier with its card out."""

from __future__ import annotations

import importlib
import json
import shlex
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from virnucpro.commands.options import (
    LOG_LEVELS,
    AsJson,
    CacheDir,
    CacheSize,
    Devices,
    Flow,
    LogLevel,
    MetricsNetwork,
    MetricsPort,
    MetricsTargets,
    PrecisionName,
    Profile,
    PushgatewayUrl,
    Runner,
    Threads,
    TokenBudget,
    WeightsDir,
    Workers,
    WorkersPerDevice,
    check_choice,
    check_runner,
    flow_boxes,
    output_folder,
)
from virnucpro.commands.output import told_if_anybody_reads
from virnucpro.config import AUTO_TOKEN_BUDGET, DEFAULT_CACHE_GIB
from virnucpro.errors import StoppedError, printable
from virnucpro.interrupts import stop_on_signals
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL
from virnucpro.pipeline.device_claim import claim_devices
from virnucpro.telemetry.metrics_options import metrics_options
from virnucpro.telemetry.progress import DownloadProgress, terminal_view
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.training.genomes.labelled_genomes import check_files
from virnucpro.training.training_settings import (
    DEFAULT_HELD_OUT_SHARE,
    DEFAULT_PIECES,
    LEAST_PIECES,
    LENGTHS_NT,
    MOST_HELD_OUT_SHARE,
    configure_training,
)

if TYPE_CHECKING:
    from virnucpro.training.classifier_training import TrainingResult

_TRAINING = "virnucpro.training.classifier_training"
"""By name: it imports scipy, which no other command needs."""


def group_weight(text: str | tuple[str, float]) -> tuple[str, float]:
    """Return the group and the weight that were asked for."""
    if isinstance(text, tuple):
        return text
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not name or not 0 <= weight < float("inf"):
        raise typer.BadParameter(f"{text!r} is no GROUP=NUMBER, such as microvirus=2")
    return name, weight


def length_weight(text: str | tuple[int, float]) -> tuple[int, float]:
    """Return the nucleotides and the weight that were asked for."""
    if isinstance(text, tuple):
        return text
    length, _, number = text.partition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = -1.0
    if not length.isdecimal() or not 0 <= weight < float("inf"):
        raise typer.BadParameter(f"{text!r} is no NT=NUMBER, such as 300=2")
    return int(length), weight


def train(
    labelled: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            metavar="LABELLED",
            help="FASTA files of genomes, plain or gzip, or folders of them. A file's name says what it holds, unless --labels does: train_virus_phages.fna.gz, nonviral-bacteria.fa.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            parser=output_folder,
            metavar="DIR",
            help="Folder of the classifier: weights, card.json, MODEL_CARD.md, evaluation.json. `virnucpro predict --classifier DIR` takes it.",
            show_default=False,
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="TABLE",
            help="Tab-separated, with a header: accession (of a record) or file, label (virus or nonviral), and, if you like, group and genome.",
            show_default="what the names of the files say",
        ),
    ] = None,
    annotations: Annotated[
        list[Path] | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Proteins of the genomes: GenBank flat files, or FASTA of CDS translations. Reading frames then count only where they are part of one. May be given again.",
            show_default=False,
        ),
    ] = None,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            readable=False,
            metavar="FASTA",
            help="Genomes or contigs that you will judge the classifier by: whatever is related to one is not used. May be given again.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What outputs call the classifier.", show_default="the folder's name")
    ] = None,
    chunk: Annotated[int, typer.Option(metavar="300|500", help="Nucleotides of a chunk.")] = 500,
    also_chunk: Annotated[
        list[int] | None,
        typer.Option(
            metavar="300|500",
            help="Nucleotides of other chunks that the classifier is measured with, and that predict may then use.",
            show_default=False,
        ),
    ] = None,
    dna_model: Annotated[str, typer.Option(metavar="NAME|PATH", help="Embeds the DNA.")] = DNA_MODEL,
    protein_model: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="Embeds the proteins.")
    ] = DEFAULT_PROTEIN_MODEL,
    pieces: Annotated[
        int,
        typer.Option(
            min=LEAST_PIECES,
            max=10**8,
            help="Contigs of 300 to 10,000 nt that are cut out of the genomes to train on; half of them are viral. A sixth as many stop the training, and a sixth measure it.",
        ),
    ] = DEFAULT_PIECES,
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out",
            min=0.01,
            max=MOST_HELD_OUT_SHARE,
            help="Share of each group's nucleotides that only measures, and as much that stops and calibrates.",
        ),
    ] = DEFAULT_HELD_OUT_SHARE,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, max=10**4, help="Passes over the training frames at the most.", show_default="100"),
    ] = None,
    length: Annotated[
        list[Any] | None,
        typer.Option(
            "--length-weight",
            parser=length_weight,
            metavar="NT=NUMBER",
            help="How often a piece has this length, against the others; may be given again.",
            show_default=", ".join(f"{length}={weight:g}" for length, weight in LENGTHS_NT.items()),
        ),
    ] = None,
    weight: Annotated[
        list[Any] | None,
        typer.Option(
            "--group-weight",
            parser=group_weight,
            metavar="GROUP=NUMBER",
            help="How many of a label's pieces come from this group, against the others; may be given again.",
            show_default="the root of the group's nucleotides",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of everything that is drawn by chance.")] = 1,
    shuffle_labels: Annotated[
        bool,
        typer.Option(
            "--shuffle-labels",
            help="Permute the labels of the genomes: a check that the evaluation does not leak (AUROC near 0.5).",
        ),
    ] = False,
    data_note: Annotated[
        str, typer.Option(help="What the card says of the origin and licence of the genomes.", show_default=False)
    ] = "",
    keep_work: Annotated[
        bool, typer.Option("--keep-work", help="Keep pieces and embeddings when the classifier is there.")
    ] = False,
    devices: Devices = "auto",
    workers: Workers = None,
    workers_per_device: WorkersPerDevice = 1,
    precision: PrecisionName = "auto",
    token_budget: TokenBudget = AUTO_TOKEN_BUDGET,
    threads: Threads = 1,
    weights_dir: WeightsDir = None,
    cache_dir: CacheDir = None,
    cache_size: CacheSize = DEFAULT_CACHE_GIB,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Remove what DIR holds of an earlier training, and nothing else in it, and start afresh."
        ),
    ] = False,
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
    Train a classifier on your own genomes, and measure it on others that are not related to them.

    The genomes are split into three parts by relatedness: most train, some stop the training and calibrate it, the
    others only measure. Starting the same command again continues a training that was stopped.
    """
    check_runner(runner, devices, workers_per_device)
    check_choice("--log-level", log_level, LOG_LEVELS)
    check_choice("--precision", precision, ("auto", "fp32", "bf16", "fp16"))
    check_files(labelled, labels, *(annotations or []), *(leave_out or []))  # before weights are looked for or fetched
    asked: dict[str, Any] = {
        "port": metrics_port,
        "targets": metrics_targets,
        "network": metrics_network,
        "pushgateway": pushgateway,
    }
    metrics = metrics_options(**asked)
    lengths, weights = dict(length or []), dict(weight or [])
    making: dict[str, Any] = {
        "name": name or output.absolute().name,
        "chunk_nt": chunk,
        "also_chunk_nt": also_chunk or [],
        "dna_model": dna_model,
        "protein_model": protein_model,
        "num_pieces": pieces,
        "held_out_share": held_out,
        "most_epochs": epochs,
        "length_weights": lengths,
        "group_weights": weights,
        "seed": seed,
        "shuffle_labels": shuffle_labels,
        "data_note": data_note,
        "keep_work": keep_work,
    }
    told = [
        *_told("--labels", labels),
        *(word for path in annotations or [] for word in _told("--annotations", path)),
        *(word for path in leave_out or [] for word in _told("--leave-out", path)),
        *_told("--name", making["name"]),
        *(_told("--chunk", chunk) if chunk != 500 else []),
        *(word for nt in also_chunk or [] for word in _told("--also-chunk", nt)),
        *(_told("--dna-model", dna_model) if dna_model != DNA_MODEL else []),
        *(_told("--protein-model", protein_model) if protein_model != DEFAULT_PROTEIN_MODEL else []),
        *(_told("--pieces", pieces) if pieces != DEFAULT_PIECES else []),
        *(_told("--held-out", held_out) if held_out != DEFAULT_HELD_OUT_SHARE else []),
        *_told("--epochs", epochs),
        *(word for nt, number in lengths.items() for word in _told("--length-weight", f"{nt}={number:g}")),
        *(word for group, number in weights.items() for word in _told("--group-weight", f"{group}={number:g}")),
        *(["--shuffle-labels"] if shuffle_labels else []),
        *_told("--seed", seed),
    ]
    command = shlex.join(["virnucpro", "train", *(path.name for path in labelled), "-o", "DIR", *told])
    if flow or runner != "threads":
        result = importlib.import_module("flows.train").run_from_command_line(
            labelled=[str(path) for path in labelled],
            output_dir=str(output),
            labels=str(labels or ""),
            annotations=[str(path) for path in annotations or []],
            leave_out=[str(path) for path in leave_out or []],
            training={**making, "most_epochs": epochs or 0, "command": command},
            result={"restart": restart},
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
        _report(result, as_json=as_json)
        return
    claim = claim_devices(devices, workers=workers, workers_per_device=workers_per_device)
    with DownloadProgress(is_quiet=as_json) as download:
        config = configure_training(
            **making,
            labels=labels,
            annotations=annotations or (),
            leave_out=leave_out or (),
            command=command,
            device_type=claim.type,
            precision=precision,
            weights_dir=weights_dir,
            token_budget=token_budget,
            threads_per_worker=threads,
            workers_per_device=workers_per_device,
            cache_dir=cache_dir,
            cache_gib=cache_size,
            log_level=log_level,
            profile=profile,
            on_download=download.advance,
        )
    told_to_stop = threading.Event()
    with RunTelemetry(metrics, [terminal_view(is_quiet=as_json, stop=told_to_stop)]) as telemetry:
        with stop_on_signals(told_to_stop, telemetry.has_workers) as stopping:
            try:
                result = importlib.import_module(_TRAINING).run_training(
                    labelled,
                    output,
                    config,
                    claim,
                    workers=workers,
                    telemetry=telemetry,
                    stop=told_to_stop,
                    restart=restart,
                )
            except StoppedError:
                raise StoppedError(stopping.signal_number) from None
        _report(result, as_json=as_json)


def _told(option: str, value: object) -> list[str]:
    """Return an option as the card's command has it: files by their names."""
    if value is None:
        return []
    return [option, value.name if isinstance(value, Path) else str(value)]


def _report(result: TrainingResult, *, as_json: bool) -> None:
    with told_if_anybody_reads():
        if as_json:
            print(json.dumps(result.to_json()))
            return
        where, counts = printable(str(result.output_dir)), result.counts
        if result.was_complete:
            print(f"{where}: already complete; nothing was computed")
        parts = ", ".join(f"{counts[f'{part} pieces']:,} {what}" for part, what in _PARTS.items())
        print(f"{counts['records']:,} records in {counts['clusters']:,} clusters that are not related")
        print(f"  {parts}; {counts['frames']:,} open frames embedded")
        for note in result.notes:
            print(f"  {printable(note)}")
        print(f"  {', '.join(f'{name} {seconds:.1f} s' for name, seconds in result.stages_s.items())}")
        print(printable(result.worth))
        print(f"card: {printable(str(result.output_dir / 'MODEL_CARD.md'))}")
        print(f"use:  virnucpro predict CONTIGS -o OUT --classifier {printable(shlex.quote(str(result.output_dir)))}")


_PARTS = {"train": "pieces train", "validation": "stop and calibrate", "test": "measure"}
