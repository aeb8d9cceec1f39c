"""
The embedding job as a Prefect flow: build_index -> embed_shard per device -> aggregate_shards -> validate_embeddings.

Completed when every sequence has its row; Completed and named ``Partial`` when rows are missing and that was allowed;
Failed otherwise, with a sentence that counts what is missing and names where the rest is. Running it again in the
same folder continues it.
"""

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.allowed_roots import check_allowed
from flows.command_line import run_here
from flows.parent_lines import send_lines_to_prefect
from flows.tasks import RankBook, aggregate_shards, build_index, embed_shard, validate_embeddings
from flows.telemetry import run_telemetry
from virnucpro.config import AUTO_TOKEN_BUDGET, DEFAULT_CACHE_GIB, MetricsOptions, RunLimits
from virnucpro.errors import VirNucProError
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, is_path
from virnucpro.pipeline.cpu_workers import devices_for
from virnucpro.pipeline.devices import select_devices
from virnucpro.pipeline.multi_gpu_inference import configure_model, new_run_id
from virnucpro.pipeline.run_completion import close_run, failure_noted, finished_result, stop_run
from virnucpro.pipeline.run_preparation import PreparedRun
from virnucpro.pipeline.run_result import RunResult
from virnucpro.report.artifacts import markdown_text
from virnucpro.run_layout import RunLayout
from virnucpro.store.run_lock import RunLock
from virnucpro.telemetry.run_telemetry import RunTelemetry

MAX_RANKS = 64
"""Ranks that run at the same time; more than any one machine has devices."""


@flow(
    name="embed",
    flow_run_name="embed into {output_dir}",
    task_runner=ThreadPoolTaskRunner(max_workers=MAX_RANKS),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def embed(
    fasta_files: list[str],
    output_dir: str,
    model: str = DEFAULT_PROTEIN_MODEL,
    devices: str = "auto",
    workers: int | None = None,
    workers_per_device: int = 1,
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    token_budget: int | None = None,
    threads: int = 1,
    max_residues: int | None = None,
    long: Literal["truncate", "window", "error"] = "truncate",
    gaps: Literal["error", "remove"] = "error",
    stop: Literal["error", "x"] = "error",
    on_bad_record: Literal["error", "skip"] = "error",
    allow_empty: bool = False,
    weights_dir: str | None = None,
    cache_dir: str | None = None,
    cache_gib: float = DEFAULT_CACHE_GIB,
    allow_partial: bool = False,
    keep_shards: bool = False,
    restart: bool = False,
    metrics_port: int | None = None,
    metrics_targets: str | None = None,
    pushgateway: str | None = None,
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO",
    profile: bool = False,
    worker_retries: int = 2,
) -> State[Any]:
    """
    Embed every sequence of the input (proteins, or DNA with a model of DNA) into OUT/embeddings.h5.

    Args:
        fasta_files: FASTA files of what the model takes, plain or gzip; the result has their order.
        output_dir: Folder of the run: result, manifest, logs. A second run in it continues the first.
        model: A registered name, or the path of a checkpoint; by default the bundled demonstration encoder.
        devices: auto (every visible GPU, else the CPU), cpu, or a list such as 0,1.
        workers: CPU workers, by default one a core as far as memory and the input go.
        workers_per_device: Workers that share each GPU.
        precision: auto is fp32 on a CPU; on a GPU fp16 for ESM-2, bf16 for DNABERT-S.
        token_budget: Tokens in one block at the most, never less than the longest sequence; by default a number that
            suits CPUs, or what a short trial on each GPU finds.
        threads: Threads of each CPU worker.
        max_residues: Residues of a sequence that are embedded; by default 1022, and no limit for models of DNA.
        long: What happens to longer sequences: cut, the mean of half-overlapping windows, or an error.
        gaps: What happens to - and . in a sequence.
        stop: What happens to * inside a protein; x reads it as X.
        on_bad_record: What happens to a record that breaks a rule; skip lists it in failed_sequences.tsv.
        allow_empty: An input without records gives an empty result instead of an error.
        weights_dir: Folder that is looked into for weights first.
        cache_dir: Folder, on a local disk, that keeps rows for later runs and serves those of earlier ones; a run
            served from it gives the same numbers within the tolerance, not the same bytes.
        cache_gib: GiB that the cache takes at the most.
        allow_partial: Complete with the name Partial when some rows are missing.
        keep_shards: Keep each worker's shard beside the result.
        restart: Remove what the folder holds of earlier runs first, and start afresh.
        metrics_port: Serve Prometheus metrics at this port of 127.0.0.1 while the run goes on; 0 takes a free one.
        metrics_targets: Folder of Prometheus' file_sd_configs: gets a file with the port while the run goes on.
        pushgateway: URL of a Prometheus pushgateway that gets the metrics, too.
        log_level: Of the workers' log files.
        profile: Record when each worker did what to every batch, and write OUT/trace.json, a timeline for
            ui.perfetto.dev.
        worker_retries: How often in a row a rank's process is started again after it failed without getting
            anything done, before its work goes to the other ranks.
    """
    send_lines_to_prefect()
    run_id = new_run_id()
    try:
        check_allowed(
            fasta_files=fasta_files,
            output_dir=output_dir,
            model=model if is_path(model) else None,
            weights_dir=weights_dir,
            cache_dir=cache_dir,
            metrics_targets=metrics_targets,
        )
        metrics = MetricsOptions(port=metrics_port, targets_dir=metrics_targets, pushgateway=pushgateway)
        chosen = select_devices(devices, workers=workers, workers_per_device=workers_per_device)
        model_config = configure_model(
            model,
            device_type=chosen[0].type,
            precision=precision,
            weights_dir=None if weights_dir is None else Path(weights_dir),
            token_budget=AUTO_TOKEN_BUDGET if token_budget is None else token_budget,
            threads_per_worker=threads,
            workers_per_device=workers_per_device,
            max_residues=max_residues,
            long_policy=long,
            gaps=gaps,
            stops=stop,
            on_bad_record=on_bad_record,
            allow_empty=allow_empty,
            cache_dir=cache_dir,
            cache_gib=cache_gib,
            log_level=log_level,
            profile=profile,
        )
        chosen = devices_for(chosen, model_config, fasta_files, workers=workers)
        layout = RunLayout(Path(output_dir))
        with run_telemetry(metrics) as telemetry:
            with RunLock(layout.lock, run_id=run_id), telemetry.running(layout, run_id):
                with telemetry.stage("index", model=model_config.model_name):
                    indexed = build_index(
                        fasta_files, output_dir, model_config, chosen, run_id, restart, return_state=True
                    )
                    run = cast("PreparedRun", indexed.result())
                if run.already_complete:
                    result = finished_result(run, keep_shards=keep_shards)
                else:
                    result = _embed_and_aggregate(
                        run, telemetry, worker_retries=worker_retries, keep_shards=keep_shards
                    )
            _publish(result)
        result.raise_unless(allow_partial=allow_partial)
    except VirNucProError as error:
        return Failed(message=str(error), data=error)
    if result.state == "partial":
        missing = f"{result.num_missing:,} of {result.num_records:,} sequences missing"
        return Completed(name="Partial", message=f"{missing}, partial result at {result.output_path}", data=result)
    return Completed(message=f"{result.num_rows:,} sequences in {result.output_path}", data=result)


def run_from_command_line(**parameters: Any) -> RunResult:
    """
    Run the flow in this process, against the API that the environment names or an embedded server.

    Args:
        parameters: Of ``embed``.

    Returns:
        How it went.

    Raises:
        VirNucProError: As the plain command would raise, with the same exit code.
    """
    result = run_here(embed, parameters)
    assert isinstance(result, RunResult)
    return result


def _embed_and_aggregate(
    run: PreparedRun, telemetry: RunTelemetry, *, worker_retries: int, keep_shards: bool
) -> RunResult:
    stage = partial(telemetry.stage, model=run.model_config.model_name)
    stages_s = partial(telemetry.stages_s, run.model_config.model_name)
    with failure_noted(run):
        embedding = telemetry.begin_embedding(run.facts())
        book = RankBook(run, RunLimits(attempts=worker_retries + 1), embedding)
        try:
            with stage("embed"):
                _run_ranks(run, book)
        except BaseException:
            stop_run(run, book.in_order(), stages_s=stages_s())
            raise
        finally:
            embedding.over()
        with stage("aggregate"):
            aggregation = aggregate_shards(run, book)
        with stage("validate"):
            validate_embeddings(run, aggregation)
        return close_run(run, book.in_order(), aggregation, stages_s=stages_s(), keep_shards=keep_shards)


def _run_ranks(run: PreparedRun, book: RankBook) -> None:
    """
    Run one task a rank to its last attempt, then the work of lost ranks as tasks of the others.

    When we are told to stop, no worker is left.
    """
    futures: list[PrefectFuture[Any]] = []
    ranks = list(range(run.world_size))
    try:
        while ranks:
            futures.extend(embed_shard.submit(run, rank, book) for rank in ranks)
            wait(futures)
            ranks = book.recovery.take_over(book.in_order())
            if ranks:
                get_run_logger().warning("ranks were lost: %s take over what they left", ranks)
    except BaseException:
        book.stop.set()
        get_run_logger().warning("stopping: workers end at their next batch boundary")
        wait(futures)
        raise


def _publish(result: RunResult) -> None:
    """Leave a table of the ranks and a page about the run where Prefect's users look for them."""
    rows = [
        {
            "rank": rank.rank,
            "device": rank.device,
            "computed": rank.sequences,
            "resumed": rank.sequences_resumed,
            "tokens": rank.tokens,
            "seconds": round(rank.seconds, 1),
            "tokens/s": round(rank.tokens_per_second),
            "retries": max(0, rank.attempts - 1),
            "state": rank.state if rank.failure is None else f"{rank.state}: {rank.failure}",
        }
        for rank in result.ranks
    ]
    where = markdown_text(str(result.output_dir))
    create_table_artifact(table=rows, key="embed-ranks", description=f"Ranks of the run in {where}")
    create_markdown_artifact(markdown=_markdown(result, rows), key="embed-summary", description=where)


def _markdown(result: RunResult, rows: list[dict[str, Any]]) -> str:
    layout = RunLayout(result.output_dir.absolute())  # who reads the page does not know our working directory
    counts = f"{result.num_rows:,} of {result.num_records:,} sequences have their row."
    notes = [f"- {markdown_text(note)}" for note in result.notes()]
    lines = [f"# Embedding: {result.state}", "", counts, "", *notes, ""]
    if rows:
        header = list(rows[0])
        lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
        lines += ["| " + " | ".join(markdown_text(str(row[name])) for name in header) + " |" for row in rows]
        tokens, seconds = sum(row["tokens"] for row in rows), sum(result.stages_s.values())
        lines += ["", f"In all {tokens:,} tokens in {seconds:.1f} s (all stages)."]
    else:
        lines += ["The folder held the finished result already; nothing was computed."]
    lines += ["", "| file | where |", "| --- | --- |"]
    result_path = None if result.output_path is None else result.output_path.absolute()
    files = [("result", result_path), ("manifest", layout.manifest), ("logs", layout.log_dir)]
    if result.num_missing or result.num_skipped:
        files.append(("missing sequences", layout.failed_sequences))
    lines += [f"| {name} | {markdown_text(str(path))} |" for name, path in files if path is not None]
    return "\n".join(lines)
