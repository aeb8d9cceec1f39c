"""Options that several commands take, each told once, and the checks of their values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from virnucpro.config import (
    AUTO_TOKEN_BUDGET,
    RUNNERS,
    BadRecordPolicy,
    GapPolicy,
    StopPolicy,
)
from virnucpro.telemetry.metrics_options import METRICS_NETWORK, METRICS_PORT, METRICS_TARGETS, MOST_PORT, PUSHGATEWAY

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
MOST_TOKENS = 10**9
"""Largest token budget that is taken."""


def token_budget(text: str | int) -> int:
    """Return the tokens that were asked for; 0, the default, is auto."""
    if text in ("auto", AUTO_TOKEN_BUDGET):
        return AUTO_TOKEN_BUDGET
    if not (str(text).isdecimal() and 1 <= int(text) <= MOST_TOKENS):
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of tokens from 1 to {MOST_TOKENS}")
    return int(text)


def runner_name(text: str) -> str:
    """Return the name of a runner, if it is one."""
    if not re.match(RUNNERS, text):
        raise typer.BadParameter(
            f"{text!r} is none of threads, ray, ray://HOST:PORT, dask, dask://HOST:PORT, dask://slurm"
        )
    return text


def check_runner(runner: str, devices: str, workers_per_device: int) -> None:
    """
    Refuse devices of this machine for a cluster, which gives each task its own.

    Raises:
        typer.BadParameter: They are given.
    """
    if runner != "threads" and (devices.strip() not in {"auto", "cpu"} or workers_per_device > 1):
        raise typer.BadParameter(
            f"--runner {runner} gives each task its device: --devices is auto or cpu then, with one worker a device"
        )


def check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """
    Refuse a value of *option* that is none of *allowed*.

    Raises:
        typer.BadParameter: It is not.
    """
    if value not in allowed:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(allowed)}.", param_hint=option)


FastaFiles = Annotated[
    list[Path],
    typer.Argument(
        readable=False,
        metavar="FASTA",
        help="Files of proteins (FASTA), or of DNA with a model of DNA (FASTA, FASTQ, unaligned BAM); text files plain or gzip.",
        show_default=False,
    ),
]

WeightsDir = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="DIR",
        help="Folder that is looked into for weights first.",
        envvar="VIRNUCPRO_WEIGHTS",
        show_default=False,
    ),
]

Gaps = Annotated[GapPolicy, typer.Option(help="What happens to - and . in a sequence.")]

Stop = Annotated[
    StopPolicy,
    typer.Option(help="What happens to * inside a protein; x reads it as X. One at the end is always taken off."),
]

OnBadRecord = Annotated[
    BadRecordPolicy,
    typer.Option(
        help="What happens to a record that breaks a rule: nothing is computed, or it is left out and listed (by embed in failed_sequences.tsv)."
    ),
]

AllowEmpty = Annotated[
    bool, typer.Option("--allow-empty", help="An input without records gives an empty result instead of an error.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")]


def output_folder(text: str) -> Path:
    """Return the folder that was named; an empty name, as of an unset variable, is none."""
    if not text:
        raise typer.BadParameter("the name of the folder is empty")
    return Path(text)


OutputDir = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        parser=output_folder,
        metavar="OUT",
        help="Folder of the run: result, manifest, logs.",
        show_default=False,
    ),
]

RunDir = Annotated[
    Path, typer.Argument(readable=False, metavar="OUT", help="Output folder of a run.", show_default=False)
]

Devices = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="auto (every visible GPU that is free, else the CPU), auto:N (N free GPUs), cpu, or a list such as 0,1. A GPU that another run on this host holds is waited for.",
    ),
]

Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU workers; of a cluster (--runner) its tasks at the most, of SLURM the workers of its jobs.",
        show_default="one a core, as memory and input allow; of a cluster what it has; of SLURM one",
    ),
]

WorkersPerDevice = Annotated[
    int, typer.Option(min=1, max=64, help="Workers that share each GPU: more can pay for small models.")
]

PrecisionName = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="auto|fp32|bf16|fp16",
        help="auto is fp32 on a CPU; on a GPU fp16 for ESM-2, bf16 for DNABERT-S.",
    ),
]

TokenBudget = Annotated[
    int,
    typer.Option(
        parser=token_budget,
        metavar="auto|TOKENS",
        help="Tokens in one block at the most, never less than the longest sequence; auto tries GPUs out first.",
        show_default="auto",
    ),
]

Threads = Annotated[
    int, typer.Option(min=1, max=1024, help="Threads of each CPU worker. Other numbers give other last bits.")
]

CacheDir = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="DIR",
        help="Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones. A run served from it gives the same numbers within the tolerance, not the same bytes.",
        show_default=False,
    ),
]

CacheSize = Annotated[float, typer.Option(min=0.001, metavar="GIB", help="GiB that the cache takes at the most.")]

AllowPartial = Annotated[
    bool, typer.Option("--allow-partial", help="End with 0 when some rows are missing, as long as there are any.")
]

Restart = Annotated[
    bool,
    typer.Option("--restart", help="Remove what OUT holds of earlier runs, and nothing else in it, and start afresh."),
]

Flow = Annotated[bool, typer.Option("--flow", help="Run the same job as the Prefect flow, in this process.")]

Runner = Annotated[
    str,
    typer.Option(
        parser=runner_name,
        metavar="threads|ray|dask|ray://HOST:PORT|dask://HOST:PORT|dask://slurm",
        help="Where the work is done: this machine; a small cluster on it, of --workers tasks; a cluster that stands; workers that SLURM starts. Anything but threads runs as the Prefect flow. Every host needs the same folders.",
    ),
]

Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Record when each worker did what to every batch, and write OUT/trace.json, a timeline for ui.perfetto.dev.",
    ),
]

MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_PORT,
        metavar="PORT",
        help="Serve Prometheus metrics at http://127.0.0.1:PORT/metrics while the run goes on; 0 takes a free port. "
        "On a cluster each host serves its own, too, as --metrics-network says.",
        show_default=f"{METRICS_PORT}, else not served",
    ),
]

MetricsTargets = Annotated[
    Path | None,
    typer.Option(
        readable=False,
        metavar="DIR",
        help="Folder of Prometheus' file_sd_configs: gets a file with the address while the run goes on; on a cluster, "
        "where it is to be a shared folder, one for each host as well.",
        show_default=f"{METRICS_TARGETS}, else none",
    ),
]

MetricsNetwork = Annotated[
    str | None,
    typer.Option(
        metavar="NETWORK",
        help="Serve metrics to this IPv4 network, as in 10.1.0.0/16, by each host's address in it, instead of to this "
        "host alone. Everybody there can read them. A cluster's other hosts serve theirs only with it.",
        show_default=f"{METRICS_NETWORK}, else 127.0.0.1",
    ),
]

PushgatewayUrl = Annotated[
    str | None,
    typer.Option(
        "--pushgateway",
        metavar="URL",
        help="Push metrics to this Prometheus pushgateway, too.",
        show_default=f"{PUSHGATEWAY}, else none",
    ),
]


def flow_boxes(
    *,
    runner: str = "threads",
    devices: str,
    workers: int | None,
    workers_per_device: int,
    precision: str,
    threads: int,
    token_budget: int,
    weights_dir: Path | None,
    cache_dir: Path | None,
    cache_gib: float,
    metrics: dict[str, Any],
    log_level: str,
    profile: bool,
) -> dict[str, dict[str, Any]]:
    """
    Return the options that all commands have as boxes of the flows' parameters (``flows/parameters.py``).

    *metrics* is what ``metrics_options`` takes, as it was given: the flow asks the environment itself.
    """
    return {
        "hardware": {
            "runner": runner,
            "devices": devices,
            "workers": workers or 0,
            "workers_per_device": workers_per_device,
            "precision": precision,
            "threads": threads,
            "token_budget": token_budget,
        },
        "cache": {
            "weights_dir": "" if weights_dir is None else str(weights_dir),
            "cache_dir": "" if cache_dir is None else str(cache_dir.absolute()),
            "cache_gib": cache_gib,
        },
        "monitoring": {
            "metrics_port": metrics["port"],
            "metrics_targets": str(metrics["targets"].absolute()) if metrics["targets"] else "",
            "metrics_network": metrics["network"] or "",
            "pushgateway": metrics["pushgateway"] or "",
            "log_level": log_level,
            "profile": profile,
        },
    }


LogLevel = Annotated[str, typer.Option(metavar="|".join(LOG_LEVELS), help="Of the workers' log files.")]
