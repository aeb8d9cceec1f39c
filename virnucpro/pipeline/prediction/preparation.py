"""
A prediction under way, and what happens before its first stage: compare settings, index the contigs, open the manifest.

Nothing is removed before the input is known to be fit, and no file of another owner is written over.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virnucpro import durable
from virnucpro.calls.frame_order import FrameOrder
from virnucpro.calls.score_files import ScoreReader, map_scores
from virnucpro.choices import CASCADE_OFF, Keep, TableFormat, WrittenGenes
from virnucpro.data.index.file import content_is_intact
from virnucpro.data.reading.compressed import SUFFIXES
from virnucpro.data.reading.input_files import holds_reads, input_name, unusable
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ConfigurationError, OutputError, SettingsChangedError, printable
from virnucpro.pipeline.prediction.sample import refuse_unknown_fdr
from virnucpro.pipeline.prediction.settings import EVERY_CONTIG
from virnucpro.pipeline.run.run import (
    Preparation,
    about_indexed,
    all_intact,
    ensure_index,
    prepare,
    remove_files,
    remove_unpacked,
    start_from_scratch,
)
from virnucpro.pipeline.run.stages import EmbeddingJob, StagedRun
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.manifest import PredictionManifest, not_a_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from virnucpro.arrays import BoolArray
    from virnucpro.pipeline.prediction.settings import PredictionConfig

_SEQUENCE_SUFFIX = re.compile(
    rf"(\.(fa|fas|fasta|fna|ffn|fsa|fq|fastq|bam|sam|txt|seq))?(\.({'|'.join(SUFFIXES)}))?$", re.IGNORECASE
)


@dataclass(kw_only=True)
class PredictionRun(StagedRun):
    """A prediction under way; the stages share it."""

    layout: PredictionLayout
    manifest: PredictionManifest
    config: PredictionConfig
    stems: tuple[str, ...]
    """Of the input files; their frames' files begin with them."""
    notices: list[str] = field(default_factory=list)
    """What was kept of the folder's settings, and what was changed, a sentence each."""

    def open_index(self) -> SequenceIndex:
        return SequenceIndex.open(self.layout.contig_index)

    def is_embedded(self) -> BoolArray | None:
        """Return which contigs are embedded, bool (contigs,), in input order; None for all or none."""
        cascade = self.config.cascade
        if cascade in {None, EVERY_CONTIG}:
            return None
        return cascade.embeds(map_scores(self.layout.composition_scores, "scores", len(self.open_index())))

    def unscored(self) -> dict[int, tuple[str, int]]:
        """Return number in the input -> why, of the contigs whose composition is not computed."""
        record = self.manifest.stages.get("composition")
        return {} if record is None else record.quarantined

    def frame_order(self) -> FrameOrder:
        """Return all contigs and frames in their order; the fragments, if there are to be any, must be there."""
        config = self.config
        return FrameOrder(
            self.open_index(),
            None if config.cascade is None else self.layout.open_frames,
            chunk_nt=config.chunk_nt,
            min_nt=config.min_nt,
            is_embedded=self.is_embedded(),
        )

    def score_reader(self, order: FrameOrder) -> ScoreReader:
        """Return the scores of contigs that do not come from their frames alone."""
        config, layout = self.config, self.layout
        by_composition = None if config.composition is None else (layout.composition_scores, layout.composition_windows)
        evidence = None
        if config.composition is not None:
            evidence = layout.evidence, layout.topologies, config.composition.records
        if config.is_by_composition:
            return ScoreReader(order, by_composition, None, evidence)
        own = (layout.contig_scores, layout.window_scores) if config.reads_embeddings else None
        return ScoreReader(order, own, by_composition, evidence)

    def embedding_job(self, stage: str) -> EmbeddingJob:
        """Return the embedding run of the frames' ``dna`` or ``protein``."""
        files, folder = {
            "dna": (self.nucleotide_files, self.layout.dna_dir),
            "protein": (self.protein_files, self.layout.protein_dir),
        }[stage]
        return EmbeddingJob(stage=stage, model=self.config.encoders[stage], files=files, folder=folder)

    @property
    def nucleotide_files(self) -> list[Path]:
        """Nucleotides of the kept frames, one file an input file."""
        return [self.layout.nucleotide_frames(stem) for stem in self.stems]

    @property
    def protein_files(self) -> list[Path]:
        """Proteins of the kept frames, one file an input file."""
        return [self.layout.protein_frames(stem) for stem in self.stems]

    @property
    def chunk_files(self) -> list[Path]:
        """Chunks, one file an input file; written on request."""
        return [self.layout.chunks(stem, self.config.chunk_nt) for stem in self.stems]


def prepare_prediction(
    input_files: Sequence[str | Path],
    output_dir: str | Path,
    config: PredictionConfig,
    device_type: str,
    *,
    run_id: str,
    restart: bool = False,
) -> PredictionRun:
    """Compare with what the folder holds, index the contigs, and open or resume the manifest; the folder is locked."""
    kind = _PredictionPreparation(
        run_id=run_id,
        layout=PredictionLayout(Path(output_dir)),
        inputs=input_files,
        config=config,
        device_type=device_type,
        stems=_stems(input_files, config),
    )
    manifest, index = prepare(kind, restart=restart)
    if index is None and not content_is_intact(kind.layout.contig_index):  # verify needs it
        kind.read_input()
        remove_unpacked(kind.layout)
    return PredictionRun(
        run_id=run_id,
        layout=kind.layout,
        manifest=manifest,
        config=kind.config,
        stems=kind.stems,
        notices=kind.notices,
        already_complete=index is None,
    )


@dataclass(kw_only=True)
class _PredictionPreparation(Preparation[PredictionManifest, SequenceIndex]):
    manifest_type = PredictionManifest

    run_id: str
    layout: PredictionLayout
    inputs: Sequence[str | Path]
    config: PredictionConfig
    device_type: str
    stems: tuple[str, ...]
    notices: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """Names of all files that the run is to write into its folder, beside the embedding runs."""

    def adopt(self, earlier: PredictionManifest | None) -> None:
        if earlier is not None and earlier.settings == self.settings(earlier):
            self.config, self.notices = _continued(self.layout, self.config, earlier.output_settings)
        self.outputs = _outputs(self.layout, self.stems, self.config)
        _refuse_long_names(self.layout, self.outputs, self.inputs)
        _refuse_to_overwrite_inputs(self.layout, self.outputs, self.inputs)

    def resumes(self, earlier: PredictionManifest) -> bool:
        return bool(earlier.stages)

    def read_input(self) -> SequenceIndex:
        rules = replace(self.config.rules, chunk_nt=self.config.chunk_nt)
        index = ensure_index(self.layout, self.layout.contig_index, self.inputs, rules)
        refuse_unknown_fdr(self.config, int((index.lengths >= self.config.min_nt).sum()))
        return index

    def start_from_scratch(self, earlier: PredictionManifest, source: SequenceIndex) -> None:
        layout = self.layout
        for embedding in (layout.dna_dir, layout.protein_dir):
            start_from_scratch(RunLayout(embedding))
        files = [
            *(layout.output_dir / name for name in sorted(earlier.outputs)),
            *layout.unpacked(),
            layout.open_frames,
            layout.frame_scores,
            layout.composition_scores,
            layout.composition_windows,
            layout.evidence,
            layout.topologies,
            layout.contig_scores,
            layout.window_scores,
            *layout.worker_logs(),
        ]
        durable.remove_tree(layout.contig_parts)
        keep = {Path(path) for file in source.files for path in (file.read_path, file.real_path)}
        remove_files(layout, files, keep=keep)

    def foreign(self, earlier: PredictionManifest | None) -> list[Path]:
        announced = earlier.outputs if earlier is not None else []
        return [self.layout.output_dir / name for name in self.outputs if name not in announced]

    def settings(self, earlier: PredictionManifest | None) -> dict[str, Any]:
        del earlier
        return self.config.scores_settings(self.device_type)

    def refuse_changes(self, earlier: PredictionManifest, settings: dict[str, Any]) -> None:
        """See ``Preparation``; another cascade is named without the settings of encoders that follow from it."""
        before, now = (values.get("cascade", CASCADE_OFF) for values in (earlier.settings, settings))
        if before != now:
            raise SettingsChangedError(self.layout.output_dir, {"cascade": (before, now)})
        super().refuse_changes(earlier, settings)

    def is_finished(self, earlier: PredictionManifest) -> bool:
        layout, config = self.layout, self.config
        if earlier.state != "complete" or earlier.output_settings != config.output_settings():
            return False
        if not earlier.counts.get("contigs") and not config.rules.allow_empty:
            return False  # indexing says that there is nothing
        report = [] if config.keep is Keep.TABLES else [layout.report.name]
        wanted = {layout.contigs.name, layout.multiqc.name, *report}
        return wanted <= earlier.files.keys() and all_intact(layout.output_dir, earlier.files)

    def begin(self, source: SequenceIndex, earlier: PredictionManifest | None) -> PredictionManifest:
        layout, config = self.layout, self.config
        announced = earlier.outputs if earlier is not None else []
        if earlier is not None and not self.resumes(earlier):  # what it began to write may be of another input
            keep = {Path(os.path.realpath(path)) for path in self.inputs}
            forgotten = sorted(set(announced) - set(self.outputs))
            remove_files(layout, [layout.output_dir / name for name in forgotten], keep=keep, with_manifest=False)
        manifest = PredictionManifest.begin(
            self.run_id,
            inputs=about_indexed(source),
            settings=self.settings(earlier),
            sequences=_sequences(self.inputs),
            output_settings=config.output_settings(),
            models=config.models(),
            fingerprint=config.fingerprint,
            devices=earlier.devices if earlier is not None else [],
            outputs=sorted({*self.outputs, *announced}),
            stages=earlier.stages if earlier is not None else {},
        )
        manifest.write(layout.manifest)
        return manifest


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
        title, before = name.replace("_", " "), recorded.get(name, default)  # an earlier version had fewer
        if now[name] != default:
            notices.append(f"{title} {_shown(now[name])}: kept from the earlier run in this folder")
        elif before != now[name] and name == "threshold" and now["fdr"] is not None:
            notices.append(f"threshold {_shown(before)} of the earlier run in this folder gives way to the FDR")
        elif before != now[name]:
            notices.append(f"{title} is now {_shown(now[name])}; the earlier run in this folder used {_shown(before)}")
    return config, notices


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _outputs(layout: PredictionLayout, stems: Sequence[str], config: PredictionConfig) -> list[str]:
    """Return the names of all files that a run is to write into its folder, beside the embedding runs."""
    formats = {layout.contigs_json: TableFormat.JSON, layout.contigs_parquet: TableFormat.PARQUET}
    results = [path for path in layout.results() if formats.get(path, TableFormat.TSV) in config.formats]
    absent = {layout.report} if config.keep is Keep.TABLES else set()
    if config.genes is WrittenGenes.NONE:
        absent |= {layout.genes, layout.gene_proteins}
    if config.cascade is None:
        absent |= {layout.prediction_results, layout.highest_score}
        return sorted(path.name for path in results if path not in absent)
    results = [path for path in results if path not in absent]
    frames = [path(stem) for stem in stems for path in (layout.nucleotide_frames, layout.protein_frames)]
    chunks = [layout.chunks(stem, config.chunk_nt) for stem in stems] if config.keep_chunks else []
    return sorted(path.name for path in [*results, *frames, *chunks])


def _refuse_long_names(layout: PredictionLayout, outputs: Sequence[str], input_files: Sequence[str | Path]) -> None:
    """Raise ``BadInputError`` where a file named after an input would have more bytes than a name can have."""
    excess = max(len(os.fsencode(name)) for name in outputs) - os.pathconf(layout.output_dir, "PC_NAME_MAX")
    if excess > 0:
        path = str(max(input_files, key=lambda one: len(os.fsencode(Path(one).name))))
        what = "outputs are named after it, and their names would be too long"
        raise unusable(path, what, f"shorten its name by {excess} bytes")


def _refuse_to_overwrite_inputs(
    layout: PredictionLayout, outputs: Sequence[str], input_files: Sequence[str | Path]
) -> None:
    inputs = {os.path.realpath(path) for path in input_files}
    for path in (layout.output_dir / name for name in outputs):
        if os.path.realpath(path) in inputs:
            raise OutputError(path, "it is an input, and the run would write a file of that name: use another folder")


def _sequences(input_files: Sequence[str | Path]) -> str:
    kinds = {holds_reads(path) for path in input_files}
    return "sequences" if len(kinds) > 1 else "reads" if True in kinds else "contigs"


def _stems(input_files: Sequence[str | Path], config: PredictionConfig) -> tuple[str, ...]:
    names = [Path(input_name(path)).name for path in input_files]
    stems = [_SEQUENCE_SUFFIX.sub("", name) or name for name in names]
    for stem in stems:
        if config.cascade is not None and stems.count(stem) > 1:
            same = ", ".join(os.fspath(path) for path, one in zip(input_files, stems, strict=True) if one == stem)
            raise ConfigurationError(
                f"{same}: files of each may be named after {stem}: rename one, or give each an output folder of its own"
            )
    return tuple(stems)
