"""The end of a prediction: its counts, what is missing, its notes, and the error that it ends a command with."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro import durable, run_folders
from virnucpro.choices import Keep, WrittenGenes
from virnucpro.config import fingerprint
from virnucpro.data.frames import chunks_per_contig
from virnucpro.errors import ExitCode, WorkersFailedError
from virnucpro.models.contigs.homology import CELLULAR
from virnucpro.pipeline.prediction.sample import sample_notes
from virnucpro.pipeline.prediction.settings import EVERY_CONTIG
from virnucpro.pipeline.run.run import remove_files, remove_run, remove_unpacked
from virnucpro.pipeline.run.run_result import notes_on_files
from virnucpro.pipeline.shard_aggregator import FAILED_HEADER
from virnucpro.run_layout import RunLayout
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from virnucpro.pipeline.prediction.preparation import PredictionRun
    from virnucpro.pipeline.run.run_result import RunResult
    from virnucpro.run_layout import PredictionLayout

    ReportWriter = Callable[[PredictionLayout], Path]
    """Makes ``report.html`` from the other files of a run."""

EMBEDDING_STAGES = ("dna", "protein")
QUARANTINED = "quarantined"
"""Count of contigs that ended the processes which computed them; absent where there are none."""
QUARANTINES = {"composition": "composition", "contigs": "genes"}
"""Stage -> what of a contig may end processes."""
_COLOURS = {
    Call.VIRUS: "#c84e00",
    Call.NOT_VIRUS: "#1f6fa8",
    Call.UNDECIDED: "#8b94a1",
    Call.TOO_SHORT: "#c3cad5",
    Call.NO_OPEN_FRAME: "#dfe4ea",
}


@dataclass(frozen=True, kw_only=True)
class PredictionResult:
    output_dir: Path
    """The run's folder."""
    state: str
    """complete or partial."""
    counts: Mapping[str, int]
    """Contigs, chunks, frames and calls, as in ``run.json``."""
    sequences: str
    """What the sequences are called: contigs, reads or sequences."""
    notes: tuple[str, ...]
    """What the user should know, a sentence each."""
    stages_s: Mapping[str, float]
    """Seconds by stage, stages of earlier starts included."""
    computed: tuple[str, ...]
    """Stages that this start did."""
    contigs_path: Path
    report_path: Path | None
    """``report.html``; None where only tables were wanted."""
    fingerprint: str
    """Of classifier, models and chunk length."""
    embeddings: tuple[RunResult, ...] = ()
    """How the embedding runs of this start went."""
    was_complete: bool = False
    """The folder held all of it already; nothing was computed."""

    def raise_unless(self, *, allow_partial: bool) -> None:
        """
        Raise the error of missing frames, or contigs in quarantine; with *allow_partial* they are none.

        Raises:
            WorkersFailedError, OutputError: By what happened to the embedding runs.
        """
        if (number := self.counts.get(QUARANTINED)) and not allow_partial:
            raise WorkersFailedError(
                {},
                world_size=0,
                missing_sequences=number,
                total_sequences=self.counts["contigs"],
                partial_path=str(self.contigs_path),
                exit_code=ExitCode.PARTIAL,
            )
        for result in self.embeddings:
            result.raise_unless(allow_partial=allow_partial)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json`` and for task results."""
        return {
            "state": self.state,
            "output_dir": str(self.output_dir),
            "contigs_path": str(self.contigs_path),
            "report_path": None if self.report_path is None else str(self.report_path),
            "fingerprint": self.fingerprint,
            "counts": dict(self.counts),
            "sequences": self.sequences,
            "notes": list(self.notes),
            "stages_s": dict(self.stages_s),
            "computed": list(self.computed),
            "embeddings": [result.to_json() for result in self.embeddings],
        }


def close_prediction(
    run: PredictionRun, embeddings: Sequence[RunResult], write_report: ReportWriter
) -> PredictionResult:
    """List what is missing, prove that the counts add up, write the outcome into the manifest, and then the report."""
    layout, manifest, config = run.layout, run.manifest, run.config
    stages, num_nt = manifest.stages, int(run.open_index().lengths[:].sum())
    manifest.counts = _counts(run)
    _list_failed(run)
    _prove_counts(manifest.counts)
    manifest.notes = _notes(manifest.counts, manifest.sequences, chunk_nt=config.chunk_nt, min_nt=config.min_nt)
    manifest.notes += notes_on_files(run.open_index().counts)
    if manifest.counts["contigs"]:
        manifest.notes += _notes_of_cascade(run)
    if "genes" in manifest.counts:
        whose = manifest.sequences if config.genes is WrittenGenes.ALL else f"viral {manifest.sequences}"
        manifest.notes.append(f"{manifest.counts['genes']:,} genes of {whose} in genes.gff3 and genes.faa")
    if config.only_viral:
        manifest.notes.append(f"tables and tracks hold viral {manifest.sequences} alone (--only-viral)")
    manifest.notes += [f"{stage}: {note}" for stage in config.encoders for note in stages[stage].notes]
    manifest.notes += manifest.processors_differ()
    if manifest.sample is not None and manifest.counts["contigs"]:
        at = 0 if config.fdr else len(manifest.notes)  # what was asked for may have no effect: that comes first
        manifest.notes[at:at] = sample_notes(manifest.sample, manifest.sequences, config.fdr)
    manifest.notes += [config.card.worth] if config.card.worth else []
    if not manifest.counts["missing_frames"] and config.cascade and not config.keeps_frames(num_nt):
        _remove_frames(run)
    is_partial = manifest.counts["missing_frames"] or QUARANTINED in manifest.counts
    manifest.end("partial" if is_partial else "complete")
    manifest.output_settings = config.output_settings()
    manifest.files = {
        name: sha256
        for stage in ("composition", "fragments", "classify", "contigs")
        if stage in stages
        for name, sha256 in stages[stage].files.items()
    }
    _write_multiqc(layout, manifest.counts)
    manifest.files[layout.multiqc.name] = durable.sha256_of(layout.multiqc)
    if layout.failed_sequences.exists():
        manifest.files[layout.failed_sequences.name] = durable.sha256_of(layout.failed_sequences)
    stages.pop("report", None)
    manifest.write(layout.manifest)
    if config.keep is not Keep.TABLES:
        began_s = time.monotonic()
        written = write_report(layout)
        seconds = time.monotonic() - began_s
        manifest.files[written.name] = durable.sha256_of(written)
        run.record("report", fingerprint(manifest.files), [written], {}, seconds=seconds)
    elif layout.report.name in manifest.outputs:
        durable.remove(layout.report)  # of an earlier start
    if manifest.state == "complete":
        remove_unpacked(layout)
    return prediction_result(run, embeddings)


def _counts(run: PredictionRun) -> dict[str, int]:
    """Return the counts of the manifest, from the index and what the stages counted."""
    config, stages, index = run.config, run.manifest.stages, run.open_index()
    lengths = index.lengths[:]
    looked_at = lengths >= config.min_nt
    quarantined = {number for stage in QUARANTINES if stage in stages for number in stages[stage].quarantined}
    fragments = stages["fragments"].counts if config.cascade is not None else {}
    classified = stages["classify"].counts if config.cascade is not None else {"frames": 0, "scored": 0}
    return {
        "contigs": len(index),
        "short_contigs": int(np.count_nonzero(~looked_at)),
        "chunks": int(chunks_per_contig(lengths, config.chunk_nt, config.min_nt).sum()),
        "searched": stages["composition"].counts["searched"] if config.composition is not None else 0,
        "embedded": fragments.get("contigs", 0),
        "open_chunks": fragments.get("open_chunks", 0),
        "frames": classified["frames"],
        "skipped": index.num_skipped,
        "scored_frames": classified["scored"],
        "missing_frames": classified["frames"] - classified["scored"],
        "short_for_classifier": int(np.count_nonzero((lengths < config.chunk_nt / 2) & looked_at)),
        **stages["contigs"].counts,
        **({QUARANTINED: len(quarantined)} if quarantined else {}),
    }


def _remove_frames(run: PredictionRun) -> None:
    """Remove the frames' files and the embedding runs: the scores are there, and nothing else reads them."""
    layout, record = run.layout, run.manifest.stages["fragments"]
    frames = [*run.nucleotide_files, *run.protein_files]
    names = {path.name for path in frames}
    record.files = {name: sha256 for name, sha256 in record.files.items() if name not in names}
    run.manifest.write(layout.manifest)
    remove_files(layout, frames, with_manifest=False)
    for folder in (layout.dna_dir, layout.protein_dir):
        remove_run(RunLayout(folder))


def prediction_result(
    run: PredictionRun, embeddings: Sequence[RunResult] = (), *, was_complete: bool = False
) -> PredictionResult:
    """Return the outcome that the manifest has."""
    manifest = run.manifest
    return PredictionResult(
        output_dir=run.layout.output_dir,
        state=manifest.state,
        counts=manifest.counts,
        sequences=manifest.sequences,
        notes=tuple(manifest.notes),
        stages_s={name: stage.seconds for name, stage in manifest.stages.items()},
        computed=tuple(run.computed),
        contigs_path=run.layout.contigs,
        report_path=None if run.config.keep is Keep.TABLES else run.layout.report,
        fingerprint=manifest.fingerprint,
        embeddings=tuple(embeddings),
        was_complete=was_complete,
    )


def _notes(counts: Mapping[str, int], sequences: str, *, chunk_nt: int, min_nt: int) -> list[str]:
    """Return what the user should know about a prediction, a sentence each."""
    sentences = {
        "skipped": "{were} skipped: invalid records, listed in failed_sequences.tsv",
        "short_contigs": f"shorter than {min_nt:,} nt {{were}} not scored",
        "short_for_classifier": f"{{are}} shorter than {chunk_nt / 2:g} nt: calls of this length are unreliable",
        "no_open_frame": "without an open frame {were} not scored",
        "searched": f"with a composition score above {CELLULAR:g} {{were}} compared with known proteins",
        "viral_by_composition": "{are} called viral by composition alone",
        "by_sequence": "without an open frame {were} scored by composition alone",
        "escaped_ids": "whose id begins like a control line of tracks: its first character is written as %XX there",
        "missing_frames": "{were} not embedded (listed in failed_sequences.tsv)",
        QUARANTINED: "{were} quarantined: each ended the processes that computed it (listed in failed_sequences.tsv)",
    }
    notes = []
    for name, sentence in sentences.items():
        if number := counts.get(name):
            what = "open frames" if name == "missing_frames" else sequences
            one, be = (what.removesuffix("s"), ("is", "was")) if number == 1 else (what, ("are", "were"))
            notes.append(f"{number:,} {one} {sentence.format(are=be[0], were=be[1])}")
    return notes


def _notes_of_cascade(run: PredictionRun) -> list[str]:
    cascade, counts = run.config.cascade, run.manifest.counts
    if cascade is None or cascade == EVERY_CONTIG:
        return []
    embedded = f"{counts['embedded']:,} of {counts['contigs']:,} {run.manifest.sequences} were embedded"
    limits = f"{cascade.low:g} to {cascade.high:g}"
    return [f"{embedded} (composition score {limits}); tables of frames hold only these"]


def _prove_counts(counts: Mapping[str, int]) -> None:
    """Assert that every contig has its call, and that every frame has its score or is counted as missing."""
    calls = sum(counts.get(_key_of(call), 0) for call in Call)
    assert calls == counts["contigs"], f"{calls} calls of {counts['contigs']} contigs"
    scored, missing = counts["scored_frames"], counts["missing_frames"]
    assert scored + missing == counts["frames"], f"{scored} scores and {missing} missing of {counts['frames']} frames"


def _list_failed(run: PredictionRun) -> None:
    """List the skipped contigs, those in quarantine, then the frames that a model has no row of."""
    layout, index, counts = run.layout, run.open_index(), run.manifest.counts
    if not index.num_skipped and not counts["missing_frames"] and QUARANTINED not in counts:
        durable.remove(layout.failed_sequences)
        return
    with durable.replacing(layout.failed_sequences) as file:
        file.write(FAILED_HEADER.encode())
        for record in index.skipped():
            file.write(f"{record.sequence_id}\t{record.reason}\t0\n".encode())
        for stage, what in QUARANTINES.items():
            quarantined = run.manifest.stages[stage].quarantined if stage in run.manifest.stages else {}
            for number, (failure, attempts) in sorted(quarantined.items()):
                (name,) = index.sequence_ids(index.in_input_order()[[number]])
                file.write(f"{name}\t{what}: {failure}\t{attempts}\n".encode())
        for stage in run.config.encoders:
            listed = RunLayout(run.embedding_job(stage).folder).failed_sequences
            if listed.is_file():
                with open(listed, encoding="utf-8", newline="\n", opener=run_folders.only_regular) as lines:
                    next(lines, None)
                    for line in lines:
                        name, _, rest = line.partition("\t")
                        file.write(f"{name}\t{stage}: {rest}".encode())


def _write_multiqc(layout: PredictionLayout, counts: Mapping[str, int]) -> None:
    """Write the number of sequences of each call, for MultiQC, which takes the categories of one file for all."""
    numbers = {_key_of(call): counts.get(_key_of(call), 0) for call in Call}
    content = {
        "id": "virnucpro",
        "section_name": "VirNucPro",
        "description": "Calls of contigs or reads: which are viral. Each sample is the output folder of a run.",
        "plot_type": "bargraph",
        "pconfig": {"id": "virnucpro_calls", "title": "VirNucPro: calls", "ylab": "Number of sequences"},
        "categories": {_key_of(call): {"name": call.capitalize(), "color": _COLOURS[call]} for call in Call},
        "data": {layout.output_dir.resolve().name: {key: n for key, n in numbers.items() if n or key == "virus"}},
    }
    durable.write_bytes(layout.multiqc, f"{json.dumps(content, indent=1)}\n".encode())


def _key_of(call: Call) -> str:
    """Return the name of the count of a call in ``run.json``."""
    return call.replace(" ", "_")
