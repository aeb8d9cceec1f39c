"""
Embeddings in, scores of frames out: strict join by id, classifier, and the two tables of the original program.

Imports torch, so only the classifying process imports this module.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import orjson

from virnucpro import durable
from virnucpro.calls.frame_order import RowStream, join
from virnucpro.calls.frame_rules import ChunkScores
from virnucpro.errors import StoppedError, WeightsError
from virnucpro.models.classifier import BLOCK_ROWS, OTHERS, VIRUS, is_virus
from virnucpro.store.sorted_lines import SortedLines

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from virnucpro.arrays import FloatArray
    from virnucpro.calls.frame_order import ContigBatch, FrameOrder
    from virnucpro.models.classifier import Classifier
    from virnucpro.run_layout import PredictionLayout

RESULTS_HEADER = "Sequence_ID\tPrediction\tscore1\tscore2\n"
HIGHEST_HEADER = "Modified_ID\tIs_Virus\n"
"""The original program's header; its chunk ids are the frames' ids without the frame."""

FRAMES_AT_ONCE = BLOCK_ROWS
"""Frames in memory at once: 27 MB of features with the published models."""

_MOST_IN_SCIENTIFIC = np.float32(1e-4)
"""numpy prints this and smaller numbers in scientific notation."""
_LABELS = np.array([OTHERS, VIRUS])


def classify_frames(
    order: FrameOrder,
    classifier: Classifier,
    layout: PredictionLayout,
    *,
    dna: Path,
    protein: Path,
    threads: int,
    stop: threading.Event | None = None,
) -> dict[str, int]:
    """Score every frame that has both embeddings; return the numbers of ``frames`` and of ``scored`` ones."""
    frames = scored = 0
    with ExitStack() as stack:
        dna_rows, protein_rows = (stack.enter_context(RowStream(path)) for path in (dna, protein))
        lines = stack.enter_context(SortedLines(layout.work_dir))
        scores_file = stack.enter_context(durable.replacing(layout.frame_scores))
        results = stack.enter_context(durable.replacing(layout.prediction_results))
        results.write(RESULTS_HEADER.encode())
        for batch in order.batches():
            names = batch.frame_ids()
            scores = np.full((len(names), 2), np.nan, dtype=np.float32)
            for start in range(0, len(names), FRAMES_AT_ONCE):
                if stop is not None and stop.is_set():
                    raise StoppedError
                some = slice(start, start + FRAMES_AT_ONCE)
                has_row, features = join(dna_rows, protein_rows, names[some])
                probabilities = classifier.probabilities(features, threads=threads)
                with_row = names[some] if has_row.all() else [names[start + i] for i in np.flatnonzero(has_row)]
                _refuse_odd(probabilities, with_row, classifier.card.name)
                scores[some][has_row] = probabilities
                scored += len(probabilities)
                results.write(_lines(with_row, probabilities).encode())
            frames += len(names)
            scores_file.write(scores.tobytes())
            lines.add(_chunk_lines(batch, scores))
        dna_rows.finish()
        protein_rows.finish()
        with durable.replacing(layout.highest_score) as table:
            table.write(HIGHEST_HEADER.encode())
            for piece in lines.pieces():
                table.write(piece)
    return {"frames": frames, "scored": scored}


def _refuse_odd(probabilities: FloatArray, names: list[str], classifier: str) -> None:
    """Raise for the first frame with scores that are not finite."""
    odd = np.flatnonzero(~np.isfinite(probabilities).all(axis=1))
    if len(odd):
        value = probabilities[odd[0], 1]
        reason = f"they give {names[odd[0]]} P(virus) {value}: use another classifier"
        raise WeightsError(classifier, reason)


def _lines(names: list[str], probabilities: FloatArray) -> str:
    """Return the lines of ``prediction_results.txt``."""
    labels = _LABELS[is_virus(probabilities).astype(np.int8)].tolist()
    columns = zip(names, labels, *(texts_of(probabilities[:, column]) for column in (0, 1)), strict=True)
    return "".join([f"{name}\t{label}\t{other}\t{virus}\n" for name, label, other, virus in columns])


def texts_of(probabilities: FloatArray) -> list[str]:
    """Return each float32 of 0 to 1 as numpy prints it: the shortest text that reads back as the same number."""
    if not len(probabilities):
        return []
    numbers = np.ascontiguousarray(probabilities)
    texts = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].decode().split(",")
    for row in np.flatnonzero(numbers <= _MOST_IN_SCIENTIFIC).tolist():  # orjson has another form for these
        texts[row] = str(numbers[row])
    return texts


def _chunk_lines(batch: ContigBatch, scores: FloatArray) -> list[bytes]:
    """Return the lines of ``prediction_results_highestscore.csv``, one for each scored chunk."""
    chunks = ChunkScores.of(scores, batch.frames_per_chunk)
    is_open = batch.kept_frames != 0
    rows = zip(
        batch.open_chunk_ids(), chunks.is_scored[is_open].tolist(), chunks.is_viral[is_open].tolist(), strict=True
    )
    return [f"{name}\t{is_viral}\n".encode() for name, is_scored, is_viral in rows if is_scored]
