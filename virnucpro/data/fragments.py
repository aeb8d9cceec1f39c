"""
Writes the fragments of contigs: chunks, their open frames, and which frames of each chunk are open.

The files of frames and chunks have the original program's format and order, one set for each input file. One byte for
each chunk, in the order of the input, records its open frames: with the contigs' lengths and ids it gives every frame's
id and place without reading text. Memory is that of a batch of chunks, a group of contigs, and eight bytes a contig.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from virnucpro import durable
from virnucpro.data.frames import (
    FRAMES,
    NucleotideWindow,
    OpenFrames,
    bounds_of_chunks,
    chunks_per_contig,
    open_frames,
    stream_nucleotides,
)
from virnucpro.errors import StoppedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, IntArray
    from virnucpro.data.sequence_index import SequenceIndex


_CONTIGS_AT_ONCE = 1 << 16
_CHUNKS_AT_ONCE = 1 << 11
_LINE_NT = 60
"""Nucleotides of a line of the file of chunks."""


@dataclass(frozen=True, kw_only=True)
class FragmentCounts:
    contigs: int
    """Contigs that were cut into chunks."""
    chunks: int
    open_chunks: int
    """Chunks with at least one open frame."""
    frames: int


class _Outputs(NamedTuple):
    nucleotide: durable.NewFile
    protein: durable.NewFile
    chunked: durable.NewFile | None
    open_frames: durable.NewFile


class _Chunks(NamedTuple):
    ids: list[str]
    contigs: IntArray
    """int64 (chunks,): contig of each, as an index into ``ids``."""
    numbers: IntArray
    """int64 (chunks,): number of each in its contig, from 0."""
    starts: IntArray
    """int64 (chunks,): first letter of each, counted from the first letter of the first chunk."""
    ends: IntArray
    """int64 (chunks,): letter after each."""

    def names(self, chunks: IntArray) -> list[str]:
        pairs = zip(self.contigs[chunks].tolist(), (self.numbers[chunks] + 1).tolist(), strict=True)
        return [f"{self.ids[contig]}_chunk_{number}" for contig, number in pairs]


def write_fragments(
    index: SequenceIndex,
    *,
    chunk_nt: int,
    min_nt: int,
    nucleotide: Sequence[Path],
    protein: Sequence[Path],
    chunked: Sequence[Path] | None,
    open_frames: Path,
    chosen: BoolArray | None = None,
    stop: threading.Event | None = None,
) -> FragmentCounts:
    """
    Divide the contigs of an index into chunks, and write the chunks' open frames; each file is replaced as a whole.

    Args:
        min_nt: Nucleotides below which a contig has no chunks; 0 takes them all.
        nucleotide: Paths for the nucleotides of open frames, one for each file of the index.
        protein: Paths for their proteins, same as above.
        chunked: Paths for the chunks, same as above; None writes none.
        open_frames: Path for one byte a chunk, in the order of the input: bit f is set where frame f is open.
        chosen: bool (contigs,), in the order of the input: which contigs; None for all.
    """
    positions = index.in_input_order()
    wanted = index.lengths[positions] >= min_nt
    if chosen is not None:
        wanted &= chosen
    contigs = chunks = open_chunks = frames = 0
    first = 0
    with durable.replacing(open_frames) as bits_file:
        for number, file in enumerate(index.files):
            of_file = positions[first : first + file.num_records][wanted[first : first + file.num_records]]
            first += file.num_records
            with ExitStack() as stack:
                outputs = _Outputs(
                    stack.enter_context(durable.replacing(nucleotide[number])),
                    stack.enter_context(durable.replacing(protein[number])),
                    None if chunked is None else stack.enter_context(durable.replacing(chunked[number])),
                    bits_file,
                )
                for at in range(0, len(of_file), _CONTIGS_AT_ONCE):
                    group = of_file[at : at + _CONTIGS_AT_ONCE]
                    contigs += len(group)
                    for found in _write_contigs(index, group, chunk_nt, outputs):
                        chunks += len(found.bits)
                        open_chunks += int(np.count_nonzero(found.bits))
                        frames += len(found.frames)
                        if stop is not None and stop.is_set():
                            raise StoppedError
                    index.release_pages()
    return FragmentCounts(contigs=contigs, chunks=chunks, open_chunks=open_chunks, frames=frames)


def _write_contigs(index: SequenceIndex, positions: IntArray, chunk_nt: int, outputs: _Outputs) -> Iterator[OpenFrames]:
    window = NucleotideWindow(stream_nucleotides(index, positions))
    for chunks, first_nt in _batches(index, positions, chunk_nt):
        letters = window.read(first_nt, int(chunks.ends[-1]))
        found = open_frames(letters.upper(), chunks.starts, chunks.ends)
        outputs.open_frames.write(found.bits.tobytes())
        _write_frames(chunks, found, outputs)
        if outputs.chunked is not None:
            outputs.chunked.write(_chunk_text(chunks, letters))
        yield found
    window.finish()


def _batches(index: SequenceIndex, positions: IntArray, chunk_nt: int) -> Iterator[tuple[_Chunks, int]]:
    """Yield chunks in batches, each with its first letter, counted over all contigs."""
    lengths = index.lengths[positions]
    counts = chunks_per_contig(lengths, chunk_nt)
    chunk_ends, letter_ends = np.cumsum(counts), np.cumsum(lengths)
    num_chunks = int(counts.sum())
    for at in range(0, num_chunks, _CHUNKS_AT_ONCE):
        chunks = np.arange(at, min(at + _CHUNKS_AT_ONCE, num_chunks))
        contigs = np.searchsorted(chunk_ends, chunks, side="right")
        numbers = chunks - (chunk_ends - counts)[contigs]
        starts, ends = bounds_of_chunks(lengths[contigs], numbers, chunk_nt)
        shifts = (letter_ends - lengths)[contigs]
        first_nt = int(shifts[0] + starts[0])
        shifts -= first_nt
        ids = index.sequence_ids(positions[contigs[0] : contigs[-1] + 1])
        yield _Chunks(ids, contigs - contigs[0], numbers, starts + shifts, ends + shifts), first_nt


def _write_frames(chunks: _Chunks, found: OpenFrames, outputs: _Outputs) -> None:
    headers = [
        f">{name}{FRAMES[frame]}\n".encode()
        for name, frame in zip(chunks.names(found.chunks), found.frames.tolist(), strict=True)
    ]
    for file, sequences in ((outputs.nucleotide, found.nucleotides), (outputs.protein, found.proteins)):
        file.write(b"".join([header + sequence + b"\n" for header, sequence in zip(headers, sequences, strict=True)]))


def _chunk_text(chunks: _Chunks, letters: bytes) -> bytes:
    names = chunks.names(np.arange(len(chunks.starts)))
    lines = []
    for name, start, end in zip(names, chunks.starts.tolist(), chunks.ends.tolist(), strict=True):
        lines.append(f">{name}".encode())
        lines += [letters[at : min(at + _LINE_NT, end)] for at in range(start, end, _LINE_NT)]
    lines.append(b"")
    return b"\n".join(lines)
