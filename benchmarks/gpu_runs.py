"""
What only whole runs on a GPU show: ``virnucpro embed`` as users start it, in processes of its own.

Sections of parts c and d of ``gpu_check.py``. The runs need what the command line needs (``make gpu-kit`` fetches what
a rented machine lacks); proteins and DNA are random, of usual lengths, and so are the weights, of the published shapes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks import gpu_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu_measure import Check
    from virnucpro.models.encoders.esm2_checkpoint import Architecture

REPOSITORY = Path(__file__).resolve().parents[1]
NEEDED = (
    *("virnucpro", "structlog", "pydantic", "h5py", "esm", "typer", "rich", "orjson", "dnaio", "pydustmasker"),
    *("psutil", "prometheus_client", "pynvml", "safetensors", "tokenizers"),
)
"""Packages of a run; ``make gpu-kit`` fetches all but the last two."""
AMINO_ACIDS = np.frombuffer(b"LAGVSERTIDPKQNFYMHWC", dtype=np.uint8)
NUCLEOTIDES = np.frombuffer(b"ACGT", dtype=np.uint8)
STEADY_BUDGET = 32768
"""Tokens of a block where two runs must give the same bytes."""
LEFT_FREE_GIB = 7
"""Memory that another process leaves: for 650M and its smallest blocks, not for those that are asked for."""


def with_folder(section: Callable[[Check, Path], dict[str, Any]]) -> Callable[[Check], dict[str, Any]]:
    """Give a section a folder that goes at its end."""

    @functools.wraps(section)
    def one(check: Check) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="virnucpro_gpu_check_") as folder:
            return section(check, Path(folder))

    return one


@with_folder
def run_of_proteins(check: Check, folder: Path) -> dict[str, Any]:
    """Embed 20,000 proteins with 650M as a user does, and read its metrics while it runs."""
    fasta = write_proteins(folder, 60 if check.is_tiny else 20_000)
    weights = write_esm2(folder, gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"], check.device)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with started(check, fasta, folder / "out", weights, "--metrics-port", str(port)) as process:
        metrics = list(scraped(process, port))
    figures = figures_of(folder / "out")
    show_run(check, f"{figures['rows']:,} proteins, 650M", figures)
    check.expect("proteins: rows missing", value=figures["missing"], most=0)
    verified = subprocess.run(
        command("verify", folder / "out"), check=False, capture_output=True, text=True, cwd=REPOSITORY
    )
    check.expect("proteins: exit code of verify", value=verified.returncode, most=0)
    utilisation = [
        one["virnucpro_gpu_utilization_ratio"] for one in metrics if "virnucpro_gpu_utilization_ratio" in one
    ]
    if check.device.type == "cuda":
        check.expect("scrapes that tell the GPU's utilisation", value=len(utilisation), least=1)
        check.show("utilisation while it ran", ", ".join(f"{value:.0%}" for value in utilisation))
    return {**figures, "scrapes": metrics}


@with_folder
def run_that_is_killed(check: Check, folder: Path) -> dict[str, Any]:
    """Kill a run that has durable rows, continue it, kill its worker; the bytes are those of a run left alone."""
    fasta = write_proteins(folder, 12_000, shorter=8 if check.is_tiny else 1)
    weights = write_esm2(folder, gpu_models.TINY if check.is_tiny else gpu_models.ESM2["650M"], check.device)
    budget = ("--token-budget", str(1100 if check.is_tiny else STEADY_BUDGET))
    alone, killed = folder / "alone", folder / "killed"
    with started(check, fasta, alone, weights, *budget):
        pass
    with started(check, fasta, killed, weights, *budget) as process:
        while process.poll() is None and not list(killed.rglob("part_*.h5")):
            time.sleep(0.05)
        is_killed = process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    with started(check, fasta, killed, weights, *budget):
        pid = wait_for_worker(killed)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    differ = (killed / "embeddings.h5").read_bytes() != (alone / "embeddings.h5").read_bytes()
    check.expect("bytes differ after a run and then its worker were killed", value=differ, most=0)
    figures = {"run_killed": is_killed, "worker_killed": pid is not None, **figures_of(killed)}
    rank = manifest_of(killed)["ranks"][0]
    check.expect("processes that continued it", value=rank["attempts"], least=2)
    check.expect("rows that it did not compute again", value=rank["sequences_resumed"], least=1)
    return {**figures, "rank": rank}


@with_folder
def two_workers_on_one_gpu(check: Check, folder: Path) -> dict[str, Any]:
    """Compare one and two processes on one GPU for a model too small to fill it."""
    fasta = write_proteins(folder, 60 if check.is_tiny else 20_000)
    weights = write_esm2(folder, gpu_models.TINY if check.is_tiny else gpu_models.ESM2["8M"], check.device)
    figures = {}
    for workers in (1, 2):
        out = folder / f"out{workers}"
        more = () if check.device.type == "cpu" else ("--workers-per-device", str(workers))
        with started(check, fasta, out, weights, *more):
            pass
        figures[str(workers)] = figures_of(out)
        show_run(check, f"8M, {workers} on one GPU", figures[str(workers)])
        check.expect(f"8M, {workers} on one GPU: rows missing", value=figures[str(workers)]["missing"], most=0)
    return figures


@with_folder
def run_without_memory(check: Check, folder: Path) -> dict[str, Any]:
    """Embed where another process holds most of the memory: blocks are computed in halves, and no row is missing."""
    if check.device.type != "cuda":
        return check.left_out("memory that runs out", "no GPU, no memory to take")
    fasta = write_proteins(folder, 3_000)
    weights = write_esm2(folder, gpu_models.ESM2["650M"], check.device)
    free_bytes, _ = torch.cuda.mem_get_info(check.device)
    ballast = torch.empty(max(0, free_bytes - (LEFT_FREE_GIB << 30)), dtype=torch.uint8, device=check.device)
    try:
        with started(check, fasta, folder / "out", weights, "--token-budget", str(1 << 18)):
            pass
    finally:
        del ballast
        torch.cuda.empty_cache()
    figures = figures_of(folder / "out")
    show_run(check, f"650M in {LEFT_FREE_GIB} GiB, blocks of 262,144 tokens", figures)
    check.expect("rows missing where memory is short", value=figures["missing"], most=0)
    check.expect("blocks that were computed in halves", value=figures["resplit_blocks"], least=1)
    return figures


@with_folder
def run_of_dna(check: Check, folder: Path) -> dict[str, Any]:
    """Embed DNA with DNABERT-S's shape, its tokenizer in the loop: as a user does, and with two loader processes."""
    fasta = write_fasta(folder / "dna.fasta", [500] * (60 if check.is_tiny else 40_000), NUCLEOTIDES)
    weights = write_dnabert(folder, is_tiny=check.is_tiny)
    figures = {}
    for loaders in ("default", "2"):
        more = () if loaders == "default" else ("--loader-processes", loaders)
        with started(check, fasta, folder / f"out_{loaders}", weights, *more):
            pass
        figures[loaders] = figures_of(folder / f"out_{loaders}")
        show_run(check, f"DNABERT-S, 500 nt, {loaders} loaders", figures[loaders])
        check.expect(f"DNA, {loaders} loaders: rows missing", value=figures[loaders]["missing"], most=0)
    return figures


def is_installed(name: str) -> bool:
    """Whether a package can be imported; of this one, whether it tells its version, as runs record it."""
    if name == "virnucpro":
        return bool(list(importlib.metadata.distributions(name=name)))
    return importlib.util.find_spec(name) is not None


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "virnucpro", *map(str, arguments)]


class started:  # noqa: N801  read as a word in `with started(...)`
    """Start ``virnucpro embed``; at the end wait for it, and say what it said unless it succeeded or was killed."""

    def __init__(self, check: Check, fasta: Path, out: Path, weights: Path, *more: str) -> None:
        devices = "0" if check.device.type == "cuda" else "cpu"
        workers = () if check.device.type == "cuda" else ("--workers", "1")
        self._command = command("embed", fasta, "-o", out, "--model", weights, "--devices", devices, *workers, *more)
        self._limit_s = max(20.0, min(120.0, check.seconds_left))

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            self._command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self._process

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            said, _ = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
            said, _ = self._process.communicate(timeout=30)
        if kind is None and self._process.returncode not in {0, -signal.SIGKILL}:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.returncode}: ... {said[-1500:]}")


def scraped(process: subprocess.Popen[str], port: int) -> Iterator[dict[str, float]]:
    """Yield the run's own series, summed over ranks, about once a second until it ends."""
    while process.poll() is None:
        time.sleep(1.0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            continue
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^(virnucpro_\w+)(?:\{.*\})? ([^ ]+)$", text, flags=re.MULTILINE):
            if "bucket" not in name:
                sums[name] = sums.get(name, 0.0) + float(value)
        yield sums


def wait_for_worker(out: Path) -> int | None:
    """Return the process of the newest worker a second after it loaded its model; None where there is none."""
    began = len(logged(out))
    for _ in range(1200):
        time.sleep(0.05)
        lines = logged(out)[began:]
        starts = [number for number, line in enumerate(lines) if line["event"] == "worker.started"]
        # the lines before are those of the process that tried the device out
        if starts and any(line["event"] in {"model.loaded", "model.kept"} for line in lines[starts[-1] :]):
            time.sleep(1.0)
            pid: int = lines[starts[-1]]["pid"]
            return pid if Path(f"/proc/{pid}").exists() else None
    return None


def logged(out: Path) -> list[dict[str, Any]]:
    """Return the whole lines of the first worker's log."""
    log = out / "logs" / "worker_0.log"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def manifest_of(out: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((out / "run.json").read_text())
    return contents


def figures_of(out: Path) -> dict[str, Any]:
    """Return what a finished run says of itself: rows, seconds of stages, tokens a second."""
    manifest = manifest_of(out)
    ranks = manifest["ranks"]
    tokens, seconds = sum(rank["tokens"] for rank in ranks), manifest["stages_s"]
    return {
        "rows": manifest["counts"]["rows"],
        "missing": manifest["counts"]["missing"],
        "resplit_blocks": manifest["counts"]["resplit_blocks"],
        "tokens": tokens,
        "stages_s": seconds,
        "compute_s": [rank["compute_s"] for rank in ranks],
        "tokens_per_second": [rank["tokens_per_second"] for rank in ranks],
        "tokens_per_second_of_the_run": tokens / sum(seconds.values()),
        "kernel": ranks[0]["attention_kernel"],
        "processors": manifest["processors"],
        "token_budget": manifest["plan"]["token_budget"],
        "probes": manifest["plan"]["probes"],
    }


def show_run(check: Check, what: str, figures: dict[str, Any]) -> None:
    speeds = " and ".join(f"{speed:,.0f}" for speed in figures["tokens_per_second"])
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in figures["stages_s"].items())
    check.show(what, f"{speeds} tokens/s computing; {figures['tokens']:,} tokens: {stages}; {figures['kernel']}")


# --- inputs ---


def write_proteins(folder: Path, count: int, *, shorter: int = 1) -> Path:
    """Write random proteins as long as real ones, or so many times *shorter*."""
    lengths = [-(-(tokens - 2) // shorter) for tokens in gpu_models.protein_tokens(count)]
    return write_fasta(folder / "p.fasta", lengths, AMINO_ACIDS)


def write_fasta(path: Path, lengths: list[int], letters: np.ndarray) -> Path:
    rng = np.random.default_rng(gpu_models.SEED)
    order = rng.permutation(len(lengths))
    with path.open("wb") as file:
        for number in order:
            file.write(b">s%d\n%b\n" % (number, rng.choice(letters, lengths[number]).tobytes()))
    return path


def write_esm2(folder: Path, architecture: Architecture, device: torch.device) -> Path:
    """Write an ESM-2 of random weights as safetensors of fair-esm's layout, in half precision."""
    from safetensors.torch import save_file  # noqa: PLC0415  not everywhere

    from virnucpro.models.encoders.esm2_checkpoint import ARCHITECTURE_KEY  # noqa: PLC0415

    drawn = gpu_models.fair_esm_tensors(architecture, device, torch.float16)
    tensors = {name: x.cpu() for name, x in drawn.items()}
    for number in range(architecture.num_layers):
        tensors[f"layers.{number}.self_attn.rot_emb.inv_freq"] = gpu_models.rotary_frequencies(architecture)
    save_file(tensors, folder / "esm2_random.safetensors", {ARCHITECTURE_KEY: architecture.to_json()})
    return folder / "esm2_random.safetensors"


def write_dnabert(folder: Path, *, is_tiny: bool) -> Path:
    """Write a DNABERT-S of random weights as safetensors."""
    from safetensors.torch import save_file  # noqa: PLC0415

    from virnucpro.models.dnabert_s import PackedMosaicBert  # noqa: PLC0415
    from virnucpro.models.encoders.dnabert_checkpoint import CONFIG_KEY  # noqa: PLC0415

    config = gpu_models.mosaic_bert_config(is_tiny=is_tiny)
    with torch.device("meta"):
        model = PackedMosaicBert(config)
    gpu_models.randomise(model, config.num_hidden_layers, torch.device("cpu"), torch.float32)
    save_file(dict(model.state_dict()), folder / "dnabert_random.safetensors", {CONFIG_KEY: config.to_json()})
    return folder / "dnabert_random.safetensors"
