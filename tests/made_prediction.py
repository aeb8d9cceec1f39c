"""
The final files of a prediction, made by hand: what a report is written from, without a run.

Lengths, chunks, frames and scores are drawn as a metagenome has them; a contig of a bacterium holds a prophage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.calls.viral_regions import (
    LONG_CONTIG_NT,
    bed_header,
    bed_lines,
    bedgraph_header,
    bedgraph_lines,
    find_regions,
    track_intervals,
)
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import COLUMNS
from virnucpro.store.manifest import PredictionManifest, SampleRecord, StageRecord

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_NT = 500
COUNTS = ("chunks", "open_chunks", "viral_chunks", "frames", "viral_frames")
FINGERPRINT = "1f0c2a9be4d37586"
UNDECIDED = "undecided"
NO_OPEN_FRAME = "no open frame"
WHY_NO_OPEN_FRAME = "every reading frame of every chunk holds a stop codon"
BY_SEQUENCE = "no open frame: scored by its sequence alone"
WHY_UNDECIDED = "the score is between the two thresholds"


@dataclass
class Contig:
    """One contig to be made: *virus_from* to *virus_to* of it (shares of its length) score as a virus does."""

    name: str
    length_nt: int
    virus_from: float = 0.0
    virus_to: float = 0.0
    open_share: float = 0.9
    left_out: str = ""


@dataclass
class MadePrediction:
    """What was written, for tests to compare with."""

    layout: PredictionLayout
    rows: list[dict[str, str]] = field(default_factory=list)

    def count(self, call: str) -> int:
        """Contigs with a score that have *call*, or all that no frame is open in."""
        return sum(row["call"] == call and (row["score"] != "" or call == NO_OPEN_FRAME) for row in self.rows)


def some_contigs(number: int = 400, seed: int = 7) -> list[Contig]:
    """As an assembler leaves them: mostly short, a third viral, a bacterium with a prophage, a few of one chunk."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(7.6, 1.1, number), 300, 90_000).astype(int).tolist()
    contigs = [
        Contig(f"k141_{1000 + 7 * n}", length, 0, float(random.random() < 0.35), 0.9 if length > 900 else 0.6)
        for n, length in enumerate(lengths)
    ]
    if number >= 100:
        contigs[11] = Contig("NODE_12_length_248310_cov_31.7", 248_310, 0.41, 0.56)
        contigs[40] = Contig("k141_phage_complete", 48_502, 0, 1)
        contigs[71] = Contig("k141_two_prophages", 91_400, 0.7, 0.92)
    return contigs


def make_prediction(
    folder: Path,
    contigs: list[Contig] | None = None,
    *,
    threshold: float = 0.5,
    missing_frames: int = 0,
    classifier: str = "virnucpro-tiny",
    contig_model: bool = False,
    seed: int = 7,
) -> MadePrediction:
    """Write ``contigs.tsv``, ``viral.fasta``, tracks, regions, ``failed_sequences.tsv``, ``run.json`` into *folder*."""
    random = np.random.default_rng(seed)
    made = MadePrediction(PredictionLayout(folder))
    folder.mkdir(parents=True, exist_ok=True)
    tracks, regions, failed = [], [], []
    totals = dict.fromkeys(("chunks", "open_chunks", "frames"), 0)
    for contig in some_contigs() if contigs is None else contigs:
        if contig.left_out:
            failed.append(f"{contig.name}\t{contig.left_out}\t0\n")
            made.rows.append(_row(contig.name, call=UNDECIDED, reason=f"skipped: {contig.left_out}"))
            continue
        row, starts, ends, p = _scored(contig, random, threshold)
        if contig_model and row["call"] == NO_OPEN_FRAME:
            row |= {"score": "0.02", "call": "not virus", "reason": BY_SEQUENCE}
        made.rows.append(row)
        for name in totals:
            totals[name] += int(row[name])
        if contig.length_nt >= LONG_CONTIG_NT:
            tracks.append(bedgraph_lines(contig.name, track_intervals(starts, ends, p)))
            regions.append(bed_lines(contig.name, find_regions(starts, ends, p, 0.5)))
    made.rows.sort(key=lambda row: row["length"] == "")
    failed += [f"k141_1000_chunk_{n + 1}F2\tapplication_error\t3\n" for n in range(missing_frames)]
    layout = made.layout
    lines = ["\t".join(COLUMNS), *("\t".join(row.values()) for row in made.rows)]
    layout.viral_fasta.write_text("".join(record_of(row) for row in made.rows if row["call"] == "virus"))
    layout.contigs.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    layout.tracks.write_text(bedgraph_header(classifier, FINGERPRINT) + "".join(tracks), encoding="utf-8")
    layout.viral_regions.write_text(bed_header(classifier, FINGERPRINT) + "".join(regions), encoding="utf-8")
    if failed:
        layout.failed_sequences.write_text("sequence_id\treason\tattempts\n" + "".join(failed), encoding="utf-8")
    skipped = len(failed) - missing_frames
    manifest = _manifest(made, totals, threshold, missing_frames, classifier, skipped)
    if contig_model:
        manifest.models["classifier"]["contig_model_sha256"] = "c0de" * 16
        manifest.counts["by_sequence"] = sum(row["reason"] == BY_SEQUENCE for row in made.rows)
    manifest.write(layout.manifest)
    return made


def record_of(row: dict[str, str]) -> str:
    """Return the record of a viral contig; the same name and length have the same letters."""
    random = np.random.default_rng([int(row["length"]), *row["contig"].encode()])
    letters = np.frombuffer(b"ACGT", np.uint8)[random.integers(0, 4, int(row["length"]))].tobytes().decode()
    lines = "".join(f"{letters[at : at + 60]}\n" for at in range(0, len(letters), 60))
    return f">{row['contig']} score={row['score']} length={row['length']} fingerprint={FINGERPRINT}\n{lines}"


def _row(contig: str, **values: object) -> dict[str, str]:
    row = dict.fromkeys(COLUMNS, "") | dict.fromkeys(COUNTS, "0") | {"embedded": "yes"}
    row |= {"contig": contig, **{name: str(value) for name, value in values.items()}, "fingerprint": FINGERPRINT}
    return row


def _scored(contig: Contig, random: np.random.Generator, threshold: float):
    chunks = -(-contig.length_nt // CHUNK_NT)
    starts = np.linspace(0, max(0, contig.length_nt - CHUNK_NT), chunks).astype(np.int64)
    ends = np.minimum(starts + CHUNK_NT, contig.length_nt)
    middle = (starts + ends) / 2 / contig.length_nt
    is_virus = (middle >= contig.virus_from) & (middle < contig.virus_to)
    logits = random.normal(np.where(is_virus, 2.6, -2.6), 1.6)
    frames_of_chunk = np.where(random.random(chunks) < contig.open_share, 1 + random.binomial(5, 0.15, chunks), 0)
    p = np.where(frames_of_chunk > 0, 1 / (1 + np.exp(-logits)), np.nan)
    frames, open_chunks = int(frames_of_chunk.sum()), int((frames_of_chunk > 0).sum())
    row = _row(contig.name, length=contig.length_nt, chunks=chunks, open_chunks=open_chunks, frames=frames)
    if not frames:
        call, reason = NO_OPEN_FRAME, WHY_NO_OPEN_FRAME
    else:
        score = np.float32(1 / (1 + np.exp(-np.nanmean(np.where(frames_of_chunk > 0, logits, np.nan)))))
        low = min(threshold, 1 - threshold)
        call = "virus" if score >= threshold else "not virus" if score < low else UNDECIDED
        reason = WHY_UNDECIDED if call == UNDECIDED else ""
        viral_frames = int(frames_of_chunk[np.nan_to_num(p) > 0.5].sum())
        row |= {
            "viral_chunks": str(int((np.nan_to_num(p) >= 0.5).sum())),
            "viral_frames": str(viral_frames),
            "frame_support": str(round(viral_frames / frames, 3)),
            "score": str(score),
            "max_score": str(np.float32(np.nanmax(p))),
        }
    return {**row, "call": call, "reason": reason}, starts, ends, p


def _manifest(made, totals, threshold, missing_frames, classifier, skipped) -> PredictionManifest:
    seconds = {"fragments": 0.41, "dna": 212.7, "protein": 388.2, "classify": 1.32, "contigs": 0.22}
    model = {"sha256": "6e1c" * 16, "hidden_dim": 192}
    return PredictionManifest(
        run_id="20261121T151600-4f2a",
        state="partial" if missing_frames else "complete",
        started="2026-11-21T15:16:00+00:00",
        finished="2026-11-21T15:26:04+00:00",
        host="node7",
        inputs=[{"path": "/data/soil/soil_assembly.fasta.gz", "size_bytes": 734_003, "sha256": "ab" * 32}],
        settings={"chunk_nt": CHUNK_NT, "min_nt": 0},
        sample=SampleRecord(
            share=None,
            interval=None,
            why_off="the prior is off",
            virus_from=threshold,
            not_virus_below=min(threshold, 1 - threshold),
            fdr=None,
        ),
        output_settings={"threshold": threshold, "formats": ["tsv"], "keep_chunks": False},
        models={
            "dna": {"name": "virnucpro-tiny-dna", **model},
            "protein": {"name": "virnucpro-tiny-protein", **model},
            "classifier": {"name": classifier, "sha256": "90d2" * 16, "chunk_nt": CHUNK_NT},
        },
        fingerprint=FINGERPRINT,
        versions={"python": "3.12.3", "torch": "2.9.1", "virnucpro": "0.1.0"},
        devices=["cpu:0", "cpu:1"],
        stages={name: StageRecord(fingerprint="00", seconds=value, files={}) for name, value in seconds.items()},
        counts={
            "contigs": len(made.rows) - skipped,
            "embedded": len(made.rows) - skipped,
            "skipped": skipped,
            **totals,
            "scored_frames": totals["frames"] - missing_frames,
            "missing_frames": missing_frames,
        },
        notes=["41 contigs are shorter than the classifier's chunk of 500 nt: their scores are less certain."],
    )
