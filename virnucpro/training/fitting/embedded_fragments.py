"""
Fragments cut into chunks and open frames, joined with the frames' embeddings.

Frames are cut and embedded exactly as a prediction does it, so the means over a contig's frames are what the contig
model sees there. The frame classifier skips chunks with ambiguous letters; of records with annotated proteins it learns
only from frames whose protein is part of one, of others from every open frame, since the coding one is not known.

Annotated proteins are the translations of CDS features in GenBank flat files, or FASTA of CDS translations. A flat
file's translations belong to its record's VERSION (or, without one, to its ACCESSION or LOCUS). In FASTA, a protein
belongs to the record whose accession is between ``lcl|`` and ``_prot_`` in its id, as NCBI writes it, or before the
last ``_``, as gene callers write it. Everything else in these files is ignored.

Legend: C fragments, F frames, D and E widths of DNA and protein embeddings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.calls.frame_order import FrameOrder, RowStream, join
from virnucpro.choices import SequenceKind
from virnucpro.config import InputRules
from virnucpro.data.fragments import write_fragments
from virnucpro.data.frames import chunk_bounds
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, InputProblem, ResultError
from virnucpro.run_layout import RunLayout
from virnucpro.training.fitting.training_fragments import read_training_fragments
from virnucpro.training.genomes.records import read_records, read_text

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, FloatArray, IntArray
    from virnucpro.data.fragments import FragmentCounts
    from virnucpro.run_layout import TrainingLayout
    from virnucpro.training.fitting.training_fragments import TrainingFragment

_NCBI_ID = re.compile(r"(?:lcl\|)?(?P<record>\S+?)_prot_\S+")
_FEATURE = re.compile(r" {5}(?P<key>\S+) ")
_TRANSLATION = re.compile(r' {21}/translation="(?P<residues>[^"]*)(?P<end>"?)')
_REMEDY = "give GenBank flat files with /translation, or FASTA of proteins named RECORD_prot_... or RECORD_number"
BETWEEN = "*"
"""Separates two proteins of a record: no open frame has it."""
_RULES = InputRules(sequence_kind=SequenceKind.DNA)


class Annotations:
    def __init__(self, proteins_of: dict[str, str]) -> None:
        self._proteins_of = proteins_of

    def is_part(self, accession: str, protein: str) -> bool:
        """
        Whether *protein* is part of one of the record's proteins; True for a record without annotation.

        A record that is a range of a sequence has the sequence's proteins.
        """
        known = self._proteins_of.get(accession) or self._proteins_of.get(accession.partition(":")[0])
        return known is None or protein in known


def read_annotations(paths: Sequence[Path]) -> Annotations:
    """Read GenBank flat files or FASTA, plain or gzip."""
    proteins_of: dict[str, list[str]] = {}
    for path in paths:
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or "not ASCII text"
            raise BadInputError([InputProblem(str(path), None, what, _REMEDY)]) from error
        found = list(_of_fasta(path) if text.startswith(">") else _of_flat_file(text))
        for accession, protein in found:
            proteins_of.setdefault(accession, []).append(protein)
        if not found:
            raise BadInputError([InputProblem(str(path), None, "it has no translation of a record's CDS", _REMEDY)])
    return Annotations({name: BETWEEN.join(proteins) for name, proteins in proteins_of.items()})


def _of_fasta(path: Path) -> Iterator[tuple[str, str]]:
    for record in read_records(path):
        ncbi = _NCBI_ID.fullmatch(record.accession)
        accession = ncbi["record"] if ncbi else record.accession.rpartition("_")[0]
        if accession:
            yield accession, record.letters.rstrip("*")


def _of_flat_file(text: str) -> Iterator[tuple[str, str]]:
    accession = key = ""
    residues: list[str] | None = None
    for line in text.splitlines():
        if residues is not None:
            part, end, _ = line.strip().partition('"')
            residues.append(part)
            if end:
                yield accession, "".join(residues).upper()
                residues = None
        elif line.startswith(("LOCUS", "ACCESSION", "VERSION")):
            accession = [*line.split(), accession][1]
        elif feature := _FEATURE.match(line):
            key = feature["key"]
        elif key == "CDS" and (translation := _TRANSLATION.match(line)):
            if translation["end"]:
                yield accession, translation["residues"].upper()
            else:
                residues = [translation["residues"]]
        elif line.startswith("//"):
            accession = key = ""


@dataclass(frozen=True, kw_only=True)
class EmbeddedFragments:
    """Fragments and their embedded frames, in the order of the fragments."""

    fragments: list[TrainingFragment]
    is_virus_C: BoolArray
    chunks_C: IntArray
    frames_C: IntArray
    """int64 (C,): embedded frames."""
    dna_CD: FloatArray
    """float32 (C, D): mean over the frames; zeros without any."""
    protein_CE: FloatArray
    """float32 (C, E): likewise."""
    features_FD: FloatArray
    """float32 (F, D + E)."""
    fragment_of_F: IntArray
    is_example_F: BoolArray
    """bool (F,): whether the frame classifier may learn from it."""

    def of_part(self, part: str) -> BoolArray:
        """Return which fragments are of a part, bool (C,)."""
        return np.array([fragment.part == part for fragment in self.fragments])


def cut_frames(layout: TrainingLayout, chunk_nt: int, stop: threading.Event | None = None) -> FragmentCounts:
    """Cut the fragments of a training into chunks, and write their open frames."""
    index = SequenceIndex.ensure([layout.fragments], layout.contig_index, unpack_dir=layout.unpacked_dir, rules=_RULES)
    return write_fragments(
        index,
        chunk_nt=chunk_nt,
        min_nt=0,
        nucleotide=[layout.nucleotide_frames],
        protein=[layout.protein_frames],
        chunked=None,
        open_frames=layout.open_frames,
        stop=stop,
    )


def read_embedded(layout: TrainingLayout, chunk_nt: int, annotations: Annotations | None) -> EmbeddedFragments:
    """Return fragments, frames and both complete embeddings, joined by the frames' ids."""
    fragments = read_training_fragments(layout.fragments, layout.fragments_table)
    order = FrameOrder(SequenceIndex.open(layout.contig_index), layout.open_frames, chunk_nt=chunk_nt, min_nt=0)
    chunks, frames_of_chunks, features = [], [], []
    with (
        RowStream(RunLayout(layout.dna_dir).embeddings) as dna,
        RowStream(RunLayout(layout.protein_dir).embeddings) as protein,
    ):
        for batch in order.batches():
            names = batch.frame_ids()
            has_both, rows = join(dna, protein, names)
            if not has_both.all():
                raise ResultError(layout.output_dir, f"the frame {names[int(np.argmin(has_both))]} has no embedding")
            chunks.append(batch.chunks_per_contig)
            frames_of_chunks.append(batch.frames_per_chunk)
            features.append(rows)
        dna.finish()
        protein.finish()
        dna_dim = dna.hidden_dim
    chunks_C, frames_K = np.concatenate(chunks), np.concatenate(frames_of_chunks)
    fragment_of_chunks = np.repeat(np.arange(len(fragments)), chunks_C)
    fragment_of_F = np.repeat(fragment_of_chunks, frames_K)
    features_FD = np.concatenate(features)
    frames_C = np.bincount(fragment_of_F, minlength=len(fragments))
    means = _means(features_FD, frames_C)
    is_clear_F = np.repeat(_is_clear(fragments, chunk_nt), frames_K)
    return EmbeddedFragments(
        fragments=fragments,
        is_virus_C=np.array([fragment.is_virus for fragment in fragments]),
        chunks_C=chunks_C,
        frames_C=frames_C,
        dna_CD=np.ascontiguousarray(means[:, :dna_dim]),
        protein_CE=np.ascontiguousarray(means[:, dna_dim:]),
        features_FD=features_FD,
        fragment_of_F=fragment_of_F,
        is_example_F=is_clear_F & _is_annotated(layout, fragments, fragment_of_F, annotations),
    )


def _means(features_FD: FloatArray, frames_C: IntArray) -> FloatArray:
    """Return the mean of each fragment's rows, zeros without any."""
    means = np.zeros((len(frames_C), features_FD.shape[1]), dtype=np.float32)
    ends = np.cumsum(frames_C)
    for fragment in np.flatnonzero(frames_C).tolist():
        means[fragment] = features_FD[ends[fragment] - frames_C[fragment] : ends[fragment]].mean(
            axis=0, dtype=np.float64
        )
    return means


def _is_clear(fragments: Sequence[TrainingFragment], chunk_nt: int) -> BoolArray:
    """Return which chunks have no ambiguous letter, bool (chunks,)."""
    return np.array(
        [
            not fragment.letters[start:end].strip("ACGT")
            for fragment in fragments
            for start, end in zip(*chunk_bounds(len(fragment.letters), chunk_nt), strict=True)
        ]
    )


def _is_annotated(
    layout: TrainingLayout,
    fragments: Sequence[TrainingFragment],
    fragment_of_F: IntArray,
    annotations: Annotations | None,
) -> BoolArray:
    if annotations is None:
        return np.ones(len(fragment_of_F), dtype=bool)
    proteins = read_records(layout.protein_frames)
    return np.array(
        [
            annotations.is_part(fragments[fragment].accession, record.letters)
            for fragment, record in zip(fragment_of_F.tolist(), proteins, strict=True)
        ]
    )
