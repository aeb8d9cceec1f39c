"""
What happens before the first stage of an identification: settings compared, contigs indexed, manifest opened.

Nothing is removed before the input is known to be fit, and nothing of somebody else is written over.
"""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.data.index.file import content_is_intact
from virnucpro.data.reading.input_files import holds_reads
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ConfigurationError, OutputError, printable
from virnucpro.pipeline.continuation import is_same_input, refuse_other_settings
from virnucpro.pipeline.fresh_start import start_afresh
from virnucpro.pipeline.prediction_run import PredictionRun, is_intact
from virnucpro.pipeline.run_preparation import COMPUTING_PACKAGES, installed_version, remove_unpacked
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.settings import TableFormat
from virnucpro.store.json_manifest import not_a_manifest
from virnucpro.store.prediction_manifest import PredictionManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from virnucpro.pipeline.prediction_settings import PredictionConfig

_SEQUENCE_SUFFIX = re.compile(r"(\.(fa|fas|fasta|fna|ffn|fsa|fq|fastq|bam|sam|txt|seq))?(\.gz)?$", re.IGNORECASE)


def prepare_prediction(
    input_files: Sequence[str | Path],
    output_dir: str | Path,
    config: PredictionConfig,
    device_type: str,
    *,
    run_id: str,
    restart: bool = False,
) -> PredictionRun:
    """
    Compare with what the folder holds, index the contigs, and open or continue the manifest. The caller holds the lock.

    Args:
        input_files: FASTA, FASTQ or unaligned BAM, plain or gzip, in the order of the result.
        output_dir: The run's folder.
        config: What to compute.
        device_type: ``cpu`` or ``cuda``.
        run_id: Unique to this start.
        restart: Remove what the folder holds of earlier runs first.

    Raises:
        BadInputError: The input cannot be used; tells every problem.
        ConfigurationError: Two inputs would write the same files.
        SettingsChangedError: The folder holds a run of other input or settings.
        OutputError: The folder cannot be written, or holds files of somebody else.
        ResultError: The folder holds an embedding run.
    """
    layout = PredictionLayout(Path(output_dir))
    stems = _stems(input_files)
    earlier = PredictionManifest.read(layout.manifest) if layout.manifest.exists() else None
    settings = config.scores_settings(device_type)
    notices: list[str] = []
    if earlier is not None and earlier.settings == settings and not restart:
        config, notices = _continued(layout, config, earlier.output_settings)
    outputs = _outputs(layout, stems, config)
    _refuse_to_overwrite_inputs(layout, outputs, input_files)
    if restart and earlier is not None:
        start_prediction_afresh(layout, _ensure_index(layout, input_files, config))
        earlier = None
    _refuse_foreign_files(layout, outputs, earlier)
    if earlier is not None and earlier.stages:
        is_same = is_same_input(layout.output_dir, earlier, input_files, settings)
        refuse_other_settings(layout.output_dir, earlier, settings)
        if is_same and _finished_as_asked(layout, earlier, config):
            _remove_strays(layout)
            if not content_is_intact(layout.contig_index):  # verify needs it
                _ensure_index(layout, input_files, config)
                remove_unpacked(layout)
            return PredictionRun(
                run_id=run_id,
                layout=layout,
                config=config,
                stems=stems,
                manifest=earlier,
                already_complete=True,
                notices=notices,
            )
    elif earlier is not None:  # it did not get anything done: what it began to write may be of another input
        keep = {Path(os.path.realpath(path)) for path in input_files}
        _remove(layout, set(earlier.outputs) - set(outputs), keep=keep)
    index = _ensure_index(layout, input_files, config)
    _remove_strays(layout)
    manifest = PredictionManifest(
        run_id=run_id,
        state="running",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        inputs=[{"path": file.real_path, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in index.files],
        settings=settings,
        sequences=_sequences(input_files),
        output_settings=config.output_settings(),
        models=config.models(),
        fingerprint=config.fingerprint,
        versions={
            "python": platform.python_version(),
            **{name: installed_version(name) for name in COMPUTING_PACKAGES},
        },
        devices=earlier.devices if earlier is not None else [],
        outputs=sorted({*outputs, *(earlier.outputs if earlier is not None else [])}),
        stages=earlier.stages if earlier is not None else {},
    )
    run = PredictionRun(
        run_id=run_id,
        layout=layout,
        config=config,
        stems=stems,
        manifest=manifest,
        already_complete=False,
        notices=notices,
    )
    manifest.write(layout.manifest)
    return run


def start_prediction_afresh(layout: PredictionLayout, index: SequenceIndex) -> None:
    """
    Remove every file of an earlier identification, and nothing else; the manifest goes last.

    Args:
        layout: The run's folder.
        index: Of the contigs that are to be identified now; it stays, and so does what it reads.

    Raises:
        OutputError: A file cannot be removed.
        ResultError: ``run.json`` is of an embedding run, or none of ours.
    """
    manifest = PredictionManifest.read(layout.manifest)
    for embedding in (layout.dna_dir, layout.protein_dir):
        start_afresh(RunLayout(embedding))
    needed = {Path(file.read_path) for file in index.files}
    _remove(layout, manifest.outputs, keep=needed | {Path(file.real_path) for file in index.files})
    unpacked = [path for path in layout.unpacked() if path.absolute() not in needed]
    scores = [layout.frame_scores, layout.contig_scores, layout.window_scores]
    for path in [*unpacked, layout.open_frames, *scores]:
        durable.remove(path)
    durable.remove(layout.manifest)


def _remove_strays(layout: PredictionLayout) -> None:
    """Remove what a run that was killed left half written; the input has been accepted."""
    for folder in (layout.output_dir, layout.work_dir, layout.unpacked_dir):
        durable.remove_strays(folder)


def _ensure_index(
    layout: PredictionLayout, input_files: Sequence[str | Path], config: PredictionConfig
) -> SequenceIndex:
    rules = replace(config.rules, chunk_nt=config.chunk_nt)
    try:
        return SequenceIndex.ensure(input_files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=rules)
    except BadInputError:
        if not layout.manifest.exists():  # no earlier run needs what was unpacked
            remove_unpacked(layout)
        raise
    except OutputError:
        durable.remove_strays(layout.unpacked_dir)  # of a run that was killed: they may be what fills the disk
        raise


def _continued(
    layout: PredictionLayout, asked: PredictionConfig, recorded: Mapping[str, Any]
) -> tuple[PredictionConfig, list[str]]:
    """Return *asked* with the folder's output settings where none were given, and what users should know of it."""
    try:
        config = asked.keeping(recorded)
    except TypeError as error:
        raise not_a_manifest(layout.manifest, f"output settings that are none ({error})") from error
    notices = []
    now = config.output_settings()
    for name, default in asked.output_settings().items():
        title, before = name.replace("_", " "), recorded.get(name)
        if now[name] != default:
            notices.append(f"{title} {_shown(now[name])}: kept from the earlier run in this folder")
        elif before != now[name]:
            notices.append(f"{title} {_shown(now[name])}: it was {_shown(before)} in the earlier run in this folder")
    return config, notices


def _shown(value: object) -> str:
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _outputs(layout: PredictionLayout, stems: Sequence[str], config: PredictionConfig) -> list[str]:
    """Return the names of all files that a run is to write into its folder, beside the embedding runs."""
    formats = {layout.contigs_json: TableFormat.JSON, layout.contigs_parquet: TableFormat.PARQUET}
    results = [path for path in layout.results() if formats.get(path, TableFormat.TSV) in config.formats]
    frames = [path(stem) for stem in stems for path in (layout.nucleotide_frames, layout.protein_frames)]
    chunks = [layout.chunks(stem, config.chunk_nt) for stem in stems] if config.keep_chunks else []
    return sorted(path.name for path in [*results, *frames, *chunks])


def _refuse_to_overwrite_inputs(
    layout: PredictionLayout, outputs: Sequence[str], input_files: Sequence[str | Path]
) -> None:
    inputs = {os.path.realpath(path) for path in input_files}
    for path in (layout.output_dir / name for name in outputs):
        if os.path.realpath(path) in inputs:
            raise OutputError(path, "it is an input, and the run would write a file of that name: use another folder")


def _refuse_foreign_files(layout: PredictionLayout, outputs: Sequence[str], earlier: PredictionManifest | None) -> None:
    """Refuse to write over a file that no run of this folder was to write."""
    announced = set(earlier.outputs) if earlier is not None else set()
    for path in (layout.output_dir / name for name in outputs):
        if path.name not in announced and os.path.lexists(path):
            raise OutputError(path, "there is such a file, and no run.json that tells whose: use another folder")


def _remove(layout: PredictionLayout, names: Iterable[str], *, keep: set[Path]) -> None:
    for path in (layout.output_dir / name for name in sorted(names)):
        if path.resolve() not in keep:
            durable.remove(path)


def _sequences(input_files: Sequence[str | Path]) -> str:
    kinds = {holds_reads(path) for path in input_files}
    return "sequences" if len(kinds) > 1 else "reads" if True in kinds else "contigs"


def _stems(input_files: Sequence[str | Path]) -> tuple[str, ...]:
    names = [Path(os.fspath(path)).name for path in input_files]
    stems = [_SEQUENCE_SUFFIX.sub("", name) or name for name in names]
    for stem in stems:
        if stems.count(stem) > 1:
            same = ", ".join(os.fspath(path) for path, one in zip(input_files, stems, strict=True) if one == stem)
            raise ConfigurationError(
                f"{same}: the frames of each would be written to {stem}_identified_nucleotide.fa: "
                "rename one, or give each an output folder of its own"
            )
    return tuple(stems)


def _finished_as_asked(layout: PredictionLayout, earlier: PredictionManifest, config: PredictionConfig) -> bool:
    if earlier.state != "complete" or earlier.output_settings != config.output_settings():
        return False
    if not earlier.counts.get("contigs") and not config.rules.allow_empty:
        return False  # indexing says that there is nothing
    wanted = {layout.contigs.name, layout.report.name}
    return wanted <= earlier.files.keys() and all(
        is_intact(layout.output_dir / name, sha256) for name, sha256 in earlier.files.items()
    )
