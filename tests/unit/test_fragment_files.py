"""What contigs are cut into, as files: the original program's bytes, a plain second reading's bytes, and no others."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.plain_fragments import plain_files
from tests.strategies import random_contigs, write_fasta
from virnucpro.choices import SequenceKind
from virnucpro.config import InputRules
from virnucpro.data.fragments import FragmentCounts, write_fragments
from virnucpro.data.frames import FRAMES, chunks_per_contig, stream_nucleotides
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import InputChangedError, StoppedError

DNA = InputRules(sequence_kind=SequenceKind.DNA)


class Written:
    """The fragments of some input files, in a folder."""

    def __init__(self, inputs: list[Path], folder: Path, *, rules=DNA, **settings):
        names = [f"{number}" for number in range(len(inputs))]
        self.index = SequenceIndex.build(inputs, folder / "index", unpack_dir=folder / "unpacked", rules=rules)
        self.nucleotide = [folder / "out" / f"{name}_identified_nucleotide.fa" for name in names]
        self.protein = [folder / "out" / f"{name}_identified_protein.faa" for name in names]
        self.chunked = [folder / "out" / f"{name}_chunked.fa" for name in names]
        self.open_frames = folder / "out" / "open_frames.u8"
        self.counts = self.write(**settings)

    def write(self, *, chunk_nt=500, min_nt=0, keep_chunks=True, stop=None) -> FragmentCounts:
        return write_fragments(
            self.index,
            chunk_nt=chunk_nt,
            min_nt=min_nt,
            nucleotide=self.nucleotide,
            protein=self.protein,
            chunked=self.chunked if keep_chunks else None,
            open_frames=self.open_frames,
            stop=stop,
        )

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.open_frames.parent.iterdir()}

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
        chunks=len(bits),
        open_chunks=sum(1 for one in bits if one),
        frames=nucleotides.count(">"),
    )
    assert 0 < written.counts.open_chunks < written.counts.chunks


def test_each_input_file_has_files_of_its_own_and_the_bits_go_on(tmp_path):
    records = random_contigs(60, seed=1, longest=5_000)
    parts = records[:20], records[20:21], records[21:]
    wrapped = "".join(f">{name} text\r\n{text[:50]}\r\n\r\n {text[50:]}\r\n" for name, text in parts[0])
    (tmp_path / "a").write_bytes(wrapped.encode())
    (tmp_path / "b").write_bytes(f">{parts[1][0][0]}\n-{parts[1][0][1]}.".encode())
    bad = f">bad\nACGU\n>{parts[2][0][0]}\nACGT\n>empty\n"
    good = [f">{name}\n{text}\n" for name, text in parts[2]]
    (tmp_path / "c").write_bytes(gzip.compress("".join([*good[:9], bad, *good[9:]]).encode()))
    rules = InputRules(sequence_kind=SequenceKind.DNA, gaps="remove", on_bad_record="skip")
    written = Written([tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path, rules=rules)
    assert written.index.num_skipped == 3
    bits = []
    for number, part in enumerate(parts):
        *texts, some_bits = plain_files(part, 500)
        bits += some_bits
        paths = written.chunked[number], written.nucleotide[number], written.protein[number]
        assert [path.read_text() for path in paths] == texts
    assert written.bits() == bits
    assert written.counts.contigs == 60


def test_lengths_ids_and_bits_give_every_id_in_the_files(tmp_path):
    records = random_contigs(400, seed=2, longest=20_000)
    written = Written([write_fasta(tmp_path / "in.fasta", records)], tmp_path, min_nt=250)
    index = written.index
    positions = index.in_input_order()
    counts = chunks_per_contig(index.lengths[positions], 500, 250)
    bits = iter(written.bits())
    ids = [
        f"{contig}_chunk_{number}{frame}"
        for contig, count in zip(index.sequence_ids(positions), counts.tolist(), strict=True)
        for number in range(1, count + 1)
        for open_frames in [next(bits)]
        for f, frame in enumerate(FRAMES)
        if open_frames >> f & 1
    ]
    assert list(bits) == []
    for path in (written.nucleotide[0], written.protein[0]):
        assert [line[1:] for line in path.read_text().splitlines() if line.startswith(">")] == ids
        assert len(path.read_text().splitlines()) == 2 * written.counts.frames == 2 * len(ids)
    short = [name for name, text in records if len(text) < 250]
    assert len(records) - written.counts.contigs == len(short) > 50
    kept = [record for record in records if record[0] not in short]
    assert written.chunked[0].read_text() == plain_files(kept, 500)[0]


def test_chunks_are_written_only_when_they_are_asked_for(tmp_path):
    fasta = write_fasta(tmp_path / "in.fasta", [("a", "ACGT" * 200)])
    written = Written([fasta], tmp_path, keep_chunks=False)
    assert sorted(written.contents()) == ["0_identified_nucleotide.fa", "0_identified_protein.faa", "open_frames.u8"]


def test_an_empty_input_has_empty_files(tmp_path):
    (tmp_path / "in.fasta").write_bytes(b"")
    written = Written([tmp_path / "in.fasta"], tmp_path, rules=InputRules(sequence_kind="DNA", allow_empty=True))
    assert set(written.contents().values()) == {b""}
    assert written.counts == FragmentCounts(contigs=0, chunks=0, open_chunks=0, frames=0)


def test_work_that_is_told_to_stop_leaves_the_files_as_they_were(tmp_path):
    written = Written([write_fasta(tmp_path / "in.fasta", random_contigs(50, seed=3, longest=5_000))], tmp_path)
    before = written.contents()
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        written.write(chunk_nt=300, stop=stop)
    assert written.contents() == before


LONG = "ACGTTGCA" * 400_000
"""Longer than what is read at once."""
EDITS = {
    "another id": (">b\n", ">c\n"),
    "another letter": (">b\nACG\n", ">b\nACC\n"),
    "a letter less": (">b\nACG\n", ">b\nAC\n\n"),
    "another last letter of a long contig": (LONG, LONG[:-1] + "T"),
    "a long contig that is a letter shorter": (LONG, LONG[:-1] + "\n"),
    "another id of a long contig": (">d\n", ">e\n"),
    "a file that ends before the last contig": (f">d\n{LONG}\n", ""),
    "a file that ends inside the last contig": (LONG, LONG[: len(LONG) // 2]),
    "lines that moved": (">a x\n", ">a\n"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_input_that_changed_is_an_error_and_leaves_the_files_as_they_were(tmp_path, edit):
    text = f">a x\nACGTA\n>b\nACG\n>d\n{LONG}\n"
    path = tmp_path / "in.fasta"
    path.write_text(text)
    written = Written([path], tmp_path)
    before = written.contents()
    edited = text.replace(*EDITS[edit])
    assert edited != text, "the edit finds its place"
    path.write_text(edited)
    with pytest.raises(InputChangedError, match="the file changed after it was indexed"):
        written.write(chunk_nt=300)
    assert written.contents() == before


def test_an_input_that_is_gone_is_an_error(tmp_path):
    path = write_fasta(tmp_path / "in.fasta", [("a", "ACGT")])
    written = Written([path], tmp_path)
    path.unlink()
    written.index = SequenceIndex.open(tmp_path / "index")
    with pytest.raises(InputChangedError, match=r"changed after it was indexed \(seen at record a\)"):
        written.write()


@pytest.mark.parametrize("block_bytes", [66_000, 100_000, 1 << 21])
def test_letters_are_the_same_however_many_bytes_are_read_at_once(tmp_path, block_bytes):
    records = [*random_contigs(300, seed=4, longest=200_000), ("long", LONG)]
    text = "".join(f">{name} {'x' * 500}\n{text[:77]}\n \n{text[77:]}\n" for name, text in records)
    (tmp_path / "in.fasta").write_text(text)
    index = SequenceIndex.build([tmp_path / "in.fasta"], tmp_path / "index", unpack_dir=tmp_path, rules=DNA)
    pieces = list(stream_nucleotides(index, index.in_input_order(), block_bytes=block_bytes))
    assert b"".join(pieces).decode() == "".join(text for _, text in records)
    assert max(map(len, pieces)) <= block_bytes
    some = index.in_input_order()[5:300:7]
    letters = b"".join(stream_nucleotides(index, some, block_bytes=block_bytes)).decode()
    assert letters == "".join(text for _, text in records[5:300:7])


def test_letters_of_rna_are_those_of_its_dna_in_the_case_of_the_input(tmp_path):
    records = [("long", LONG), ("lower", "acgtttgu" * 9), ("mixed", "ACGTTUTAAUn" * 9)]
    path = write_fasta(tmp_path / "in.fasta", [(name, text.replace("T", "U")) for name, text in records])
    rules = replace(DNA, rna=True)
    index = SequenceIndex.build([path], tmp_path / "index", unpack_dir=tmp_path, rules=rules)
    expected = [text.replace("u", "t").replace("U", "T") for _, text in records]
    letters = b"".join(stream_nucleotides(index, index.in_input_order(), block_bytes=66_000)).decode()
    assert letters == "".join(expected)
    assert [record.sequence for record in map(index.read, index.in_input_order().tolist())] == [
        text.upper() for text in expected
    ]
    plain = write_fasta(
        tmp_path / "dna.fasta", [(name, text) for (name, _), text in zip(records, expected, strict=True)]
    )
    of_dna = SequenceIndex.build([plain], tmp_path / "other", unpack_dir=tmp_path, rules=DNA)
    assert (index.sequence_hashes == of_dna.sequence_hashes).all()
    assert not index.fits([path], DNA)
    assert index.fits([path], rules)


MEASURED = """
import json, sys
from pathlib import Path
from virnucpro.data.fragments import write_fragments
from virnucpro.data.sequence_index import SequenceIndex

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
index = SequenceIndex.open(folder / "index")
paths = {name: [folder / name] for name in ("nucleotide", "protein", "chunked")}
before = peak_kib()
counts = write_fragments(index, chunk_nt=500, min_nt=0, open_frames=folder / "bits", **paths)
print(json.dumps({"growth_kib": peak_kib() - before, "chunks": counts.chunks}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("megabases", "contig_nt"), [(20, None), (5, 150)], ids=["one contig", "reads of 150"])
def test_ten_times_the_input_takes_the_same_memory(tmp_path, megabases, contig_nt):
    peaks = []
    letters = np.random.default_rng(1).choice(np.frombuffer(b"ACGT", np.uint8), 1_000_000).tobytes()
    for millions in (megabases, 10 * megabases):
        fasta = tmp_path / f"{millions}.fasta"
        with fasta.open("wb") as file:
            file.write(b">one\n" if contig_nt is None else b"")
            for number in range(millions):
                if contig_nt is None:
                    file.write(letters + b"\n")
                    continue
                starts = range(0, len(letters) - contig_nt + 1, contig_nt)
                file.writelines(b">c%d_%d\n%b\n" % (number, at, letters[at : at + contig_nt]) for at in starts)
        SequenceIndex.build([fasta], tmp_path / "index", unpack_dir=tmp_path, rules=DNA)
        command = [sys.executable, "-c", MEASURED, str(tmp_path)]
        told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
        peaks.append(json.loads(told))
        fasta.unlink()
    print(peaks)
    few, many = peaks
    assert many["chunks"] > 9 * few["chunks"] >= 9 * 33_000
    assert many["growth_kib"] - few["growth_kib"] < 16 << 10
