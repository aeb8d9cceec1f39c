"""What contigs are cut into, as files: the original program's bytes, a plain second reading's bytes, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.plain_fragments import plain_files
from tests.strategies import random_contigs, write_fasta
from virnucpro.config import InputRules, SequenceKind
from virnucpro.data.fragment_files import FragmentCounts, write_fragments
from virnucpro.data.sequence_index import SequenceIndex

if TYPE_CHECKING:
    from pathlib import Path

DNA = InputRules(sequence_kind=SequenceKind.DNA)


class Written:
    """The fragments of some input files, in a folder."""

    def __init__(self, inputs: list[Path], folder: Path, *, chunk_nt=500, min_nt=0, keep_chunks=True, stop=None):
        names = [f"{number}" for number in range(len(inputs))]
        self.index = SequenceIndex.build(inputs, folder / "index", unpack_dir=folder / "unpacked", rules=DNA)
        self.nucleotide = [folder / f"{name}_identified_nucleotide.fa" for name in names]
        self.protein = [folder / f"{name}_identified_protein.faa" for name in names]
        self.chunked = [folder / f"{name}_chunked.fa" for name in names]
        self.open_frames = folder / "open_frames.u8"
        self.counts: FragmentCounts = write_fragments(
            self.index,
            chunk_nt=chunk_nt,
            min_nt=min_nt,
            nucleotide=self.nucleotide,
            protein=self.protein,
            chunked=self.chunked if keep_chunks else None,
            open_frames=self.open_frames,
            stop=stop,
        )

    def bits(self) -> list[int]:
        return np.fromfile(self.open_frames, dtype=np.uint8).tolist()


@pytest.mark.data
@pytest.mark.parametrize(("stem", "chunks", "frames"), [("test_with_orfs", 2, 4), ("test_sequences_small", 11, 0)])
def test_the_files_of_the_original_program_are_met_bit_for_bit(data_dir, tmp_path, stem, chunks, frames):
    golden = data_dir / "golden"
    written = Written([golden / f"{stem}.fa"], tmp_path)
    assert (written.counts.chunks, written.counts.frames) == (chunks, frames)
    if not frames:
        assert written.nucleotide[0].read_bytes() == written.protein[0].read_bytes() == b""
        assert written.bits() == [0] * chunks
        return
    for path, name in (
        (written.chunked[0], f"{stem}_chunked500.fa"),
        (written.nucleotide[0], f"{stem}_identified_nucleotide.fa"),
        (written.protein[0], f"{stem}_identified_protein.faa"),
    ):
        assert path.read_bytes() == (golden / name).read_bytes(), name


@pytest.mark.parametrize("chunk_nt", [300, 500])
def test_ten_thousand_contigs_give_what_a_plain_second_reading_gives(tmp_path, chunk_nt):
    records = random_contigs(10_000, seed=chunk_nt)
    written = Written([write_fasta(tmp_path / "in.fasta", records)], tmp_path, chunk_nt=chunk_nt)
    chunks, nucleotides, proteins, bits = plain_files(records, chunk_nt)
    assert written.chunked[0].read_text() == chunks
    assert written.nucleotide[0].read_text() == nucleotides
    assert written.protein[0].read_text() == proteins
    assert written.bits() == bits
    assert written.counts == FragmentCounts(
        contigs=10_000,
        short_contigs=0,
        chunks=len(bits),
        open_chunks=sum(1 for one in bits if one),
        frames=nucleotides.count(">"),
    )
    assert 0 < written.counts.open_chunks < written.counts.chunks
