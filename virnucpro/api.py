"""The library face: what a script or a notebook calls. Everything else is reached through these."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from virnucpro.config import RunLimits
from virnucpro.data.index.build import check_readable
from virnucpro.errors import BadInputError, StoppedError, TimeLimitError
from virnucpro.knobs import from_flat, settings_of
from virnucpro.models.configuration import configure_model
from virnucpro.pipeline.gpu_coordinator import warnings_to_stderr
from virnucpro.pipeline.hardware.device_claim import claim_for, devices_for
from virnucpro.pipeline.multi_gpu_inference import listed, run_embedding, warn_of_demonstration
from virnucpro.pipeline.prediction.prediction import run_prediction
from virnucpro.pipeline.prediction.settings import configure_prediction
from virnucpro.report.prediction.page import write_report
from virnucpro.settings import EmbeddingSettings, PredictionSettings
from virnucpro.store.reader import Embeddings, Prediction, read_embeddings, read_prediction
from virnucpro.store.results.forms import require_form
from virnucpro.telemetry.metrics.options import metrics_options
from virnucpro.telemetry.run_telemetry import RunTelemetry
from virnucpro.telemetry.show.progress import QuietView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from virnucpro.arrays import FloatArray
    from virnucpro.keywords import EmbeddingKeywords, PredictionKeywords
    from virnucpro.settings import RunSettings

Function = TypeVar("Function", bound=Callable[..., Any])

_UNSET: tuple[object, ...] = (0, "", [])
"""Defaults that stand for something that is found out: None says so more plainly."""


def _documented(kind: type[RunSettings]) -> Callable[[Function], Function]:
    """Give a function that takes settings as keywords their signature, and their help in its docstring."""

    def decorate(function: Function) -> Function:
        settings = settings_of(kind, face="library")
        own = inspect.signature(function)
        keywords, lines = [], []
        for one in settings:
            default = None if one.knob.auto and one.info.default in _UNSET else one.info.default
            keywords.append(
                inspect.Parameter(
                    one.argument, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=one.info.annotation
                )
            )
            found = f" By default {one.knob.automatic}." if one.knob.auto else ""
            lines.append(f"    {one.argument}: {one.knob.help}{found}")
        mine = [parameter for name, parameter in own.parameters.items() if name != "settings"]
        function.__signature__ = own.replace(parameters=[*mine, *keywords])  # type: ignore[attr-defined]
        # without its indentation, as Python 3.13 itself keeps a docstring
        function.__doc__ = (inspect.getdoc(function) or "").replace("    settings: SETTINGS", "\n".join(lines))
        return function

    return decorate


@_documented(EmbeddingSettings)
def embed_fasta(
    fasta_files: str | Path | Sequence[str | Path], output_dir: str | Path, **settings: Unpack[EmbeddingKeywords]
) -> Embeddings:
    """
    Embed every sequence of FASTA files; starting again in the same folder continues what is missing.

    Proteins or DNA, as the model takes.

    Args:
        fasta_files: One path or several, plain or compressed; the result has their order.
        output_dir: Folder of the run: result, manifest and logs.
        settings: SETTINGS

    Returns:
        A mapping from sequence id to vector, open on ``output_dir``.

    Raises:
        BadInputError: The input cannot be used; tells every problem by file and line.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        WorkersFailedError: Rows are missing, and that was not allowed.
        TimeLimitError: The time limit has passed.
        OutputError: Something cannot be written.
    """
    asked = from_flat(EmbeddingSettings, settings)
    if "model" not in asked.model_fields_set:
        warn_of_demonstration()
    warnings_to_stderr()
    files = listed(fasta_files)
    check_readable(files)
    require_form(asked.result.form)
    workers = asked.hardware.workers or None
    claim = claim_for(asked.hardware)
    config = configure_model(asked, device_type=claim.type)
    with _run_of(asked) as how:
        result = run_embedding(
            files,
            output_dir,
            config,
            devices_for(claim, config, files, workers=workers),
            keep_shards=asked.result.keep_shards,
            restart=asked.result.restart,
            result_form=asked.result.form,
            **how,
        )
        if result.state == "stopped":
            raise StoppedError
    result.raise_unless(allow_partial=asked.result.allow_partial)
    return read_embeddings(output_dir)


def embed_sequences(sequences: Mapping[str, str] | Sequence[str], **settings: Unpack[EmbeddingKeywords]) -> FloatArray:
    """
    Embed sequences in memory, without a folder that is kept.

    Args:
        sequences: Proteins or DNA, as the model takes; of a mapping the values.
        settings: Those of ``embed_fasta``, above all ``model``.

    Returns:
        One row a sequence, in their order: float32 (num_sequences, hidden_dim).

    Raises:
        BadInputError: A sequence cannot be used; named by its number, from 0.
        TypeError: One text, not a list of texts.
        ConfigurationError, WorkersFailedError, TimeLimitError, OutputError: As ``embed_fasta``.
    """
    if isinstance(sequences, str):
        raise TypeError("give a list of sequences, not one text")
    texts = ["".join(text.split()) for text in (sequences.values() if isinstance(sequences, Mapping) else sequences)]
    with TemporaryDirectory(prefix="virnucpro_") as folder:
        fasta = Path(folder, "sequences.fasta")
        fasta.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(texts)))
        try:
            with embed_fasta(fasta, Path(folder, "out"), **settings) as rows:
                return rows.to_numpy(map(str, range(len(texts))))
        except BadInputError as error:
            named = [replace(one, path="sequences", line=None) for one in error.problems]
            raise BadInputError(named) from None


@_documented(PredictionSettings)
def predict_fasta(
    input_files: str | Path | Sequence[str | Path], output_dir: str | Path, **settings: Unpack[PredictionKeywords]
) -> Prediction:
    """
    Classify each contig as viral or not; starting again in the same folder continues what is missing.

    Args:
        input_files: One path or several: FASTA, FASTQ (both plain, gzip, bzip2, xz or Zstandard) or unaligned BAM.
        output_dir: Folder of the run: tables, viral contigs, report, manifest.
        settings: SETTINGS

    Returns:
        A sequence with a record for every contig of the input in its order, then one for every record that was skipped;
        ``to_pandas()`` and ``to_polars()`` make a frame of it.

    Raises:
        BadInputError: The input cannot be used; tells every problem by file and line.
        ConfigurationError: A setting cannot work, or the folder holds another run.
        WorkersFailedError: Open frames could not be embedded, and that was not allowed; the tables hold what could.
        TimeLimitError: The time limit has passed.
        OutputError: Something cannot be written.
    """
    asked = from_flat(PredictionSettings, settings)
    warnings_to_stderr()
    files = listed(input_files)
    check_readable(files)
    workers = asked.hardware.workers or None
    claim = claim_for(asked.hardware)
    config = configure_prediction(asked, device_type=claim.type)
    with _run_of(asked) as how:
        result = run_prediction(
            files,
            output_dir,
            config,
            claim,
            write_report=write_report,
            workers=workers,
            restart=asked.result.restart,
            **how,
        )
    result.raise_unless(allow_partial=asked.result.allow_partial)
    return read_prediction(result.output_dir)


@contextmanager
def _run_of(settings: RunSettings) -> Iterator[dict[str, Any]]:
    """
    Yield how a run is watched and limited: what the pipelines take as keywords.

    Raises:
        TimeLimitError: The time limit has passed; it counts until the next batch, in any thread.
    """
    stop, minutes = threading.Event(), settings.limits.time_limit_minutes
    clock = threading.Timer(minutes * 60, stop.set)
    clock.daemon = True
    if minutes:
        clock.start()
    try:
        with RunTelemetry(metrics_options(settings.monitoring), [QuietView()]) as telemetry:
            limits = RunLimits.of(settings.limits)
            yield {"telemetry": telemetry, "stop": stop, "limits": limits}
    except StoppedError:
        raise TimeLimitError(minutes) from None
    finally:
        clock.cancel()
