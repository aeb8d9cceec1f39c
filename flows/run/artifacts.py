"""The artifacts of a flow run in Prefect's UI: tables and pages, made from the run's own record."""

import os
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import deployment

from flows.run.allowed_roots import data_roots
from flows.run.names import artifact_key
from virnucpro.allowed_roots import is_under
from virnucpro.pipeline.prediction.result import PredictionResult
from virnucpro.pipeline.run.run_result import RunResult
from virnucpro.report.prediction.artifacts import markdown_text, report_markdown, report_table
from virnucpro.report.prediction.summary import read_columns
from virnucpro.report.served_files import address_of
from virnucpro.run_folders import read_bytes
from virnucpro.run_layout import PredictionLayout, RunLayout, TrainingLayout
from virnucpro.telemetry.show import wording

REPORTS_URL = "VIRNUCPRO_REPORTS_URL"
"""Environment variable of the worker: where ``virnucpro serve-reports`` is reached, as https://HOST/reports."""
MISSING_LINES = 1000
"""Lines of ``failed_sequences.tsv`` in the table of what is missing; the file has all."""


def publish_embedding(result: RunResult, model: str) -> None:
    """Leave a table of the ranks with their devices, a page about the run, and a table of what is missing."""
    key = partial(artifact_key, "embed", model)  # a prediction has those of two models
    total_tokens = sum(rank.tokens for rank in result.ranks)
    rows = [
        {
            "rank": rank.rank,
            **({"host": rank.host} if rank.host is not None else {}),
            "device": rank.device,
            "computed": rank.sequences,
            "resumed": rank.sequences_resumed,
            "tokens": rank.tokens,
            "share": wording.percent(rank.tokens / total_tokens if total_tokens else 0.0),
            "seconds": round(rank.seconds, 1),
            "tokens/s": round(rank.tokens_per_second),
            "retries": max(0, rank.attempts - 1),
            "state": rank.state if rank.failure is None else f"{rank.state}: {rank.failure}",
        }
        for rank in result.ranks
    ]
    where = markdown_text(str(result.output_dir))
    create_table_artifact(table=rows, key=key("ranks"), description=f"What each device did for {where}")
    create_markdown_artifact(markdown=embedding_markdown(result, rows), key=key("summary"), description=where)
    if result.num_missing or result.num_skipped:
        _publish_missing(RunLayout(result.output_dir).failed_sequences, key=key("missing"), where=where)


def publish_prediction(result: PredictionResult) -> None:
    """Leave the summary, the likeliest contigs, the report as a link or path, and a table of what is missing."""
    layout = PredictionLayout(result.output_dir.absolute())  # readers of the page do not know our working directory
    where = markdown_text(str(layout.output_dir))
    create_markdown_artifact(markdown=report_markdown(layout), key="predict-summary", description=where)
    create_table_artifact(
        table=report_table(layout), key="predict-contigs", description=f"Likeliest contigs of {where}"
    )
    if result.report_path is not None:
        _publish_file(layout.report, key="predict-report", where=where)
    if layout.failed_sequences.exists():
        _publish_missing(layout.failed_sequences, key="predict-missing", where=where)


def publish_training(output_dir: Path) -> None:
    """Leave the classifier's card, and a link to it or its path."""
    layout = TrainingLayout(output_dir.absolute())
    where = markdown_text(str(layout.output_dir))
    create_markdown_artifact(markdown=read_bytes(layout.card_text).decode(), key="train-card", description=where)
    _publish_file(layout.card_text, key="train-classifier", where=where)


def embedding_markdown(result: RunResult, rows: list[dict[str, Any]]) -> str:
    """Return the page about an embedding run; *rows* is its table of ranks."""
    layout = RunLayout(result.output_dir.absolute())
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


def served_url(path: Path) -> str | None:
    """Return the http address of a report, None where none is served: no server is named, or the path is elsewhere."""
    base = os.environ.get(REPORTS_URL, "")
    roots = data_roots(is_deployed=deployment.id is not None)
    if not base.startswith(("https://", "http://")) or roots is None or not is_under(str(path), roots):
        return None
    return base.rstrip("/") + address_of(path)


def _publish_file(path: Path, *, key: str, where: str) -> None:
    """
    Leave a link to a file where it is served, else its path: browsers open no ``file://`` link of a page.

    Both are in the description too: the page of an artifact's key shows nothing else of it (Prefect 3.8).
    """
    url = served_url(path)
    shown = markdown_text(str(path)) if url is None else f"[{path.name}]({url})"
    description = shown if url is None else f"{shown} of {where}"
    create_markdown_artifact(markdown=shown, key=key, description=description)


def _publish_missing(failed_sequences: Path, *, key: str, where: str) -> None:
    """Leave the first lines of what has no row or no score, and why."""
    lines = (columns for _, columns in read_columns(failed_sequences))
    header = next(lines, [])
    rows = [dict(zip(header, columns, strict=False)) for columns in islice(lines, MISSING_LINES)]
    more = sum(1 for _ in lines)
    rest = f"; {more:,} more in failed_sequences.tsv" if more else ""
    create_table_artifact(table=rows, key=key, description=f"What is missing in {where}{rest}")
