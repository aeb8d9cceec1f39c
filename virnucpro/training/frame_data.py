"""
Frames to train a classifier on: pieces of genomes, cut and embedded as a user's contigs are.

A piece is one chunk: mostly of the classifier's full chunk length, a quarter of them shorter, as contigs below that
length are. Every open frame of a viral piece is an example of a virus, whichever frame is the coding one: the reading
frame of a contig is not known either. Legend: F frames, D columns of features (DNA, then protein).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.config import InputRules, SequenceKind
from virnucpro.data.fragment_files import write_fragments
from virnucpro.data.fragments import FRAMES, chunks_per_contig
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import ResultError
from virnucpro.pipeline.device_claim import claim_devices
from virnucpro.pipeline.multi_gpu_inference import configure_model, run_embedding
from virnucpro.store.reader import read_embeddings
from virnucpro.training.genomes import KMER_LIMIT, Genome, reverse_complement, sketch
from virnucpro.training.split import connected, linked_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    IntArray = np.ndarray[Any, np.dtype[np.int64]]
    FloatArray = np.ndarray[Any, np.dtype[np.float32]]

SHORTEST_NT = 300
"""Nucleotides of the shortest piece."""
SHORT_SHARE = 0.25
"""Share of the pieces that are shorter than a whole chunk."""
MOST_COVERAGE = 2.0
"""Times that a genome's letters are used before no more pieces are cut of it, where a group is small."""


@dataclass(frozen=True, kw_only=True)
class FrameSet:
    """The open frames of some contigs, embedded, in the order of the contigs."""

    contigs: list[str]
    """Ids of the contigs, in the order of the file."""
    chunks_per_contig: IntArray
    """int64 (contigs,)."""
    frames_per_chunk: IntArray
    """int64 (chunks,): open frames of each chunk, contig by contig."""
    features_FD: FloatArray
    """float32 (F, D)."""

    def contig_of_frames(self) -> IntArray:
        """Return the number of the contig that each frame is of, int64 (F,)."""
        chunk_contigs = np.repeat(np.arange(len(self.contigs)), self.chunks_per_contig)
        return np.repeat(chunk_contigs, self.frames_per_chunk)


def without_relatives(genomes: Sequence[Genome], references: Sequence[Genome]) -> tuple[list[Genome], list[Genome]]:
    """
    Part genomes that are linked with a reference, directly or through others, from those that are not.

    Args:
        genomes: Records to train on.
        references: Records that what is trained will be judged by.

    Returns:
        Genomes without and with a link; links are those of ``virnucpro.training.genomes``.
    """
    records = [*genomes, *references]
    numbers: dict[str, int] = {}
    same = np.array([numbers.setdefault(record.source, number) for number, record in enumerate(records)])
    first, second = linked_pairs([sketch(record.letters) for record in records], KMER_LIMIT)
    groups = connected((np.append(first, np.arange(len(records))), np.append(second, same)), len(records))
    is_linked = np.isin(groups[: len(genomes)], groups[len(genomes) :])
    sides = [genome for genome, linked in zip(genomes, is_linked, strict=True) if not linked]
    return sides, [genome for genome, linked in zip(genomes, is_linked, strict=True) if linked]


def cut_pieces(genomes: Sequence[Genome], num_pieces: int, chunk_nt: int, random: np.random.Generator) -> list[str]:
    """
    Cut pieces at random places of the genomes, as many from each source as from any other, as far as it goes.

    Args:
        genomes: Records of one group.
        num_pieces: Pieces wanted; fewer come out where ``MOST_COVERAGE`` is reached.
        chunk_nt: Nucleotides of a chunk.
        random: Draws source, record, length, place and strand.

    Returns:
        Letters of each piece, of A, C, G and T only, of either strand.
    """
    by_source: dict[str, list[Genome]] = {}
    for genome in genomes:
        if len(genome.letters) >= SHORTEST_NT:
            by_source.setdefault(genome.source, []).append(genome)
    room_nt = {name: MOST_COVERAGE * sum(len(g.letters) for g in records) for name, records in by_source.items()}
    pieces: list[str] = []
    while room_nt and len(pieces) < num_pieces:
        for name in list(room_nt):
            records = by_source[name]
            lengths = np.array([len(genome.letters) for genome in records])
            record = records[int(random.choice(len(records), p=lengths / lengths.sum()))]
            is_short = random.random() < SHORT_SHARE
            wanted_nt = int(random.integers(SHORTEST_NT, chunk_nt)) if is_short else chunk_nt
            start = int(random.integers(max(len(record.letters) - wanted_nt, 0) + 1))
            piece = record.letters[start : start + wanted_nt]
            room_nt[name] -= len(piece)
            if room_nt[name] < 0:
                del room_nt[name]
            if not piece.strip("ACGT"):
                pieces.append(piece if random.random() < 1 / 2 else reverse_complement(piece))
    return pieces[:num_pieces]


def embed_frames(
    fasta: Path, work_dir: Path, *, chunk_nt: int, dna_model: str, protein_model: str, workers: int
) -> FrameSet:
    """
    Cut contigs into chunks and embed their open frames with both models; starting again continues.

    Args:
        fasta: The contigs.
        work_dir: Folder for the index, the frames and the two embedding runs.
        chunk_nt: Nucleotides of a chunk.
        dna_model: Registered name.
        protein_model: Registered name.
        workers: CPU workers.

    Returns:
        The frames.

    Raises:
        BadInputError: The file is no FASTA of DNA.
        WorkersFailedError: Rows are missing.
        ResultError: The two runs are not of the same frames.
    """
    work_dir.mkdir(parents=True, exist_ok=True)
    rules = InputRules(sequence_kind=SequenceKind.DNA)
    index = SequenceIndex.ensure([fasta], work_dir / "contigs.index", unpack_dir=work_dir / "unpacked", rules=rules)
    nucleotide, protein, bits_path = (work_dir / name for name in ("frames.fa", "frames.faa", "open_frames.u8"))
    write_fragments(
        index,
        chunk_nt=chunk_nt,
        min_nt=0,
        nucleotide=[nucleotide],
        protein=[protein],
        chunked=None,
        open_frames=bits_path,
    )
    bits = np.unpackbits(np.fromfile(bits_path, np.uint8)[:, None], axis=1, count=len(FRAMES), bitorder="little")
    in_order = index.in_input_order()
    contigs = index.sequence_ids(in_order)
    chunk_counts = chunks_per_contig(index.lengths[in_order], chunk_nt)
    expected = _frame_ids(contigs, chunk_counts, bits)
    columns = []
    for model, frames in ((dna_model, nucleotide), (protein_model, protein)):
        config = configure_model(model, device_type="cpu")
        run_dir = work_dir / model
        run_embedding([frames], run_dir, config, claim_devices("cpu", workers=workers)).raise_unless(
            allow_partial=False
        )
        with read_embeddings(run_dir) as rows:
            if list(rows.ids) != expected:
                raise ResultError(run_dir, "its rows are not those of the frames")
            columns.append(rows.to_numpy())
    return FrameSet(
        contigs=contigs,
        chunks_per_contig=chunk_counts,
        frames_per_chunk=bits.sum(axis=1, dtype=np.int64),
        features_FD=np.hstack(columns),
    )


def _frame_ids(
    contigs: Sequence[str], chunk_counts: IntArray, bits_C6: np.ndarray[Any, np.dtype[np.uint8]]
) -> list[str]:
    chunks = [
        f"{contig}_chunk_{i + 1}" for contig, n in zip(contigs, chunk_counts.tolist(), strict=True) for i in range(n)
    ]
    return [
        f"{chunks[chunk]}{FRAMES[frame]}"
        for chunk, frame in zip(*(x.tolist() for x in np.nonzero(bits_C6)), strict=True)
    ]
