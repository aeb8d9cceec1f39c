"""Reads in FASTQ and BAM: which files are accepted, what their ids are, and what is said about the others."""

from __future__ import annotations

import gzip
import hashlib
import random
import struct
from typing import TYPE_CHECKING

import numpy as np
import pysam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.choices import SequenceKind
from virnucpro.config import InputRules
from virnucpro.data.reading import read_formats
from virnucpro.data.reading.read_formats import BAM_END, bam_as_fasta, fastq_as_fasta
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ExitCode
from virnucpro.pipeline.run.run_result import notes_on_files, notes_on_input

if TYPE_CHECKING:
    from pathlib import Path

DNA = InputRules(sequence_kind=SequenceKind.DNA)
UNALIGNED = {"HD": {"VN": "1.6", "SO": "unsorted"}}
ALIGNED = {"HD": {"VN": "1.6"}, "SQ": [{"SN": "chr1", "LN": 1000}]}

AGAIN = "copy or download the file again"
FOUR_LINES = f"{AGAIN}; a record has four lines"
NAME_MATES = """write /1 and /2 behind the ids of mates: awk 'NR % 4 == 1 {$1 = $1 "/1"} 1' FILE > NEW_FILE"""
TO_FASTQ = "convert it with: samtools fastq -N FILE > NEW_FILE"

ACCEPTED = {
    "plain": (b"@a x\nACGT\n+\nIIII\n@b\nNN\n+\n!!\n", [("a", "ACGT"), ("b", "NN")]),
    "no newline at the end": (b"@a\nACGT\n+\nIIII", [("a", "ACGT")]),
    "CRLF": (b"@a x\r\nACGT\r\n+\r\nIIII\r\n", [("a", "ACGT")]),
    "blank lines at the end": (b"@a\nAC\n+\nII\n\n\r\n\n\n\n\n", [("a", "AC")]),
    "comments in any encoding": (
        "@a 5 µg\nAC\n+\nII\n@µ x\nGT\n+\nII\n".encode() + b"@c 5 \xb5g\nAA\n+\nII\n",
        [("a", "AC"), ("µ", "GT"), ("c", "AA")],
    ),
    "header twice": (b"@a x\nAC\n+a x\nII\n", [("a", "AC")]),
    "lowercase and IUPAC": (b"@a\nacgtRYn\n+\nIIIIIII\n", [("a", "ACGTRYN")]),
    "qualities that look like headers": (b"@a\nACGT\n+\n@>+@\n@b\nA\n+\n>\n", [("a", "ACGT"), ("b", "A")]),
    "gzip with two members": (
        gzip.compress(b"@a\nAC\n+\nII\n@b\nA") + gzip.compress(b"C\n+\nII\n"),
        [("a", "AC"), ("b", "AC")],
    ),
    "first of a pair": (b"@a 1:N:0:ATCACG\nAC\n+\nII\n", [("a/1", "AC")]),
    "second of a pair": (b"@a\t2:Y:18:1\nAC\n+\nII\n", [("a/2", "AC")]),
    "a pair in one file": (b"@a 1:N:0:A\nAC\n+\nII\n@a 2:N:0:A\nGT\n+\nII\n", [("a/1", "AC"), ("a/2", "GT")]),
    "an id that says it already": (b"@a/1 1:N:0:A\nAC\n+\nII\n@b/2\nAC\n+\nII\n", [("a/1", "AC"), ("b/2", "AC")]),
    "a pair from the European archive": (
        b"@a.1 M:7:11/1\nAC\n+\nII\n@a.1 M:7:11/2 x\nGT\n+\nII\n",
        [("a.1/1", "AC"), ("a.1/2", "GT")],
    ),
    "comments that only look alike": (
        b"@a 1:2:3\nAC\n+\nII\n@b 3:N:0\nAC\n+\nII\n@c x/12\nAC\n+\nII\n@d x 1:N:0\nAC\n+\nII\n",
        [("a", "AC"), ("b", "AC"), ("c", "AC"), ("d", "AC")],
    ),
}

REFUSED = {
    "cut inside a header": (b"@a\nAC\n+\nII\n@", f"FILE:5: damaged or truncated FASTQ (it ends inside* {FOUR_LINES}"),
    "cut inside a sequence": (
        b"@a\nAC\n+\nII\n@b\nA",
        f"FILE:6: damaged or truncated FASTQ (it ends inside a record): {FOUR_LINES}",
    ),
    "cut inside qualities": (
        b"@a\nAC\n+\nII\n@b\nAC\n+\nI",
        f"FILE:8: damaged or truncated FASTQ (sequence and qualities differ in length, * {FOUR_LINES}",
    ),
    "sequence over two lines": (
        b"@a\nAC\nGT\n+\nIIII\n",
        "FILE:3: FASTQ with a sequence on several lines: join them with: seqtk seq -l0 FILE > NEW_FILE",
    ),
    "another header": (b"@a\nAC\n+b\nII\n", f"FILE:3: damaged or truncated FASTQ (no '+' line, or* {FOUR_LINES}"),
    "FASTA behind FASTQ": (
        b"@a\nAC\n+\nII\n>b\nAC\nGT\nAC\n",
        f"FILE:5: damaged or truncated FASTQ (no '@' at the start of a record): {FOUR_LINES}",
    ),
    "blank line": (b"@a\nAC\n+\nII\n\n@b\nAC\n+\nII\n", f"FILE:5: damaged or truncated FASTQ (no '@'* {FOUR_LINES}"),
    "text behind blank lines": (b"@a\nAC\n+\nII\n\n\n\n\nx\n", f"FILE:5: damaged or truncated FASTQ (* {FOUR_LINES}"),
    "qualities that are not ASCII": (
        b"@a\nAC\n+\nI\xff\n",
        f"FILE:4: damaged or truncated FASTQ (*not ASCII): {FOUR_LINES}",
    ),
    "CR in a header": (
        b"@a x\ry\nAC\n+\nII\n",
        "FILE:1: CR line ends (a): convert them with: tr '\\r' '\\n' < FILE > NEW_FILE",
    ),
    "zero-length read": (
        b"@a\nAC\n+\nII\n@b\n\n+\n\n",
        "FILE:5: empty sequence (b): add its residues or remove the record",
    ),
    "a letter of no nucleotide": (
        b"@a\nAC\n+\nII\n@b\nAUG\n+\nIII\n",
        "FILE:6: 'U' at column 2 stands for no nucleotide of DNA (b): write T for U, or use --rna",
    ),
    "a sequence that would begin a record": (
        b"@a\nAC\n+\nII\n@b\n>x\n+\nII\n",
        f"FILE:6: unexpected character '>' at column 1: {AGAIN}",
    ),
    "NUL": (
        b"@a\nA\0C\n+\nIII\n",
        "FILE:2: NUL byte at column 2 (a): make the file again: it is damaged or not text",
    ),
    "an id that is not UTF-8": (
        b"@a\nAC\n+\nII\n@b\xe9\nAC\n+\nII\n",
        "FILE:5: id is not UTF-8 (byte 0xE9) (b\N{REPLACEMENT CHARACTER}): convert the file with: iconv*",
    ),
    "a sequence that is not ASCII": (
        b"@a\nA\xc3\n+\nII\n",
        "FILE:2: non-ASCII byte 0xC3 at column 2 (a): remove it: nucleotides are ASCII letters",
    ),
    "no id": (b"@ x\nAC\n+\nII\n", "FILE:1: empty id: write an id right behind '>'"),
    "duplicate id": (
        b"@a\nAC\n+\nII\n@b\nAC\n+\nII\n@a\nGT\n+\nII\n",
        f"FILE:9: duplicate id, first at FILE:1 (a): {NAME_MATES}",
    ),
    "gzip cut short": (gzip.compress(b"@a\nAC\n+\nII\n" * 999)[:-9], f"FILE: truncated gzip: {AGAIN}"),
    "SAM": (b"@HD\tVN:1.6\n", f"FILE: SAM, not FASTA: {TO_FASTQ}"),
    "SAM without a first line": (b"@SQ\tSN:chr1\tLN:9\n", f"FILE: SAM, not FASTA: {TO_FASTQ}"),
    "CRAM": (b"CRAM\x03\x01", f"FILE: CRAM, not FASTA: {TO_FASTQ}"),
}


def build(contents: list[bytes], folder: Path, rules=DNA, **limits) -> SequenceIndex:
    """Index files whose names say nothing about what they hold."""
    paths = [folder / f"reads{number}" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return SequenceIndex.build(paths, folder / "index", unpack_dir=folder / "unpacked", rules=rules, **limits)


def records_of(index: SequenceIndex) -> list[tuple[str, str]]:
    records = [index.read(position) for position in index.in_input_order().tolist()]
    return [(record.sequence_id, record.sequence) for record in records]


def refusal_of(contents: list[bytes], folder: Path, rules=DNA, **limits) -> list[str]:
    with pytest.raises(BadInputError) as caught:
        build(contents, folder, rules, **limits)
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    return [str(problem).replace(str(folder / "reads"), "FILE") for problem in caught.value.problems]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_fastq_gives_exactly_these_reads(name, packed, tmp_path):
    content, expected = ACCEPTED[name]
    if packed and not content.startswith(b"\x1f"):
        content = gzip.compress(content)
    index = build([content], tmp_path)
    assert records_of(index) == expected
    assert (index.files[0].size_bytes, index.files[0].sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_reads_are_told_with_line_and_remedy(name, tmp_path):
    content, expected = REFUSED[name]
    (told,) = refusal_of([content], tmp_path)
    begin, cut, end = expected.replace("FILE:", "FILE0:").partition("*")
    assert told == begin if not cut else told.startswith(begin) and told.endswith(end)
    assert list((tmp_path / "unpacked").glob("*.tmp")) == []


def test_the_two_files_of_a_pair_never_have_an_id_in_common(tmp_path):
    first, second = (b"@a %d:N:0:ACGT\nAC\n+\nII\n@b %d:N:0:ACGT\nAC\n+\nII\n" % (mate, mate) for mate in (1, 2))
    assert [name for name, _ in records_of(build([first, second], tmp_path))] == ["a/1", "b/1", "a/2", "b/2"]
    plain = b"@a\nAC\n+\nII\n"
    assert refusal_of([plain, plain], tmp_path) == [f"FILE1:1: duplicate id, first at FILE0:1 (a): {NAME_MATES}"]


def test_two_files_with_the_same_ids_in_the_same_order_are_mates(tmp_path):
    first, second = b"@a x\nAC\n+\nII\n@b\t1\n\n+\n\n", b"@a x\nGT\n+\nII\n@b\nGG\n+\nII\n"
    rules = InputRules(sequence_kind=SequenceKind.DNA, on_bad_record="skip")
    index = build([first, gzip.compress(second)], tmp_path, rules)
    assert records_of(index) == [("a/1", "AC"), ("a/2", "GT"), ("b/2", "GG")]
    assert [(one.sequence_id, one.what) for one in index.skipped()] == [("b/1", "empty sequence")]
    assert index.counts["mate_files"] == 2
    (note,) = notes_on_files(index.counts)
    assert "were read as mates" in note


@pytest.mark.parametrize(
    "others",
    [
        [gzip.compress(b"@a\nAC\n+\nII\n@b\nAC\n+\nII\n")],  # the same reads
        [b"@b\nGT\n+\nII\n@a\nGG\n+\nII\n"],  # another order
        [b"@a\nGT\n+\nII\n"],  # fewer reads
        [b"@a\nGT\n+\nII\n@b\nGG\n+\nII\n", b"@a\nTT\n+\nII\n@b\nTT\n+\nII\n"],  # three files
        [b">a\nGT\n>b\nGG\n"],  # no reads
    ],
)
def test_other_files_with_the_same_ids_are_no_mates(others, tmp_path):
    told = refusal_of([b"@a\nAC\n+\nII\n@b\nAC\n+\nII\n", *others], tmp_path)
    assert all("duplicate id" in one for one in told)
    marked = [b"@a/1\n%b\n+\nII\n" % letters for letters in (b"AC", b"GT")]
    assert len(refusal_of(marked, tmp_path)) == 1


@pytest.mark.parametrize("start", [b">", b"@"])
def test_a_bgzip_file_without_its_last_block_is_noticed(start, tmp_path):
    path = tmp_path / "whole"
    with pysam.BGZFile(str(path), "wb") as file:
        file.write(b"@a\nAC\n+\nII\n" if start == b"@" else b">a\nAC\n")
    whole = path.read_bytes()
    assert whole.endswith(BAM_END)
    assert notes_on_files(build([whole], tmp_path).counts) == []
    assert notes_on_files(build([gzip.compress(b">a\nAC\n")], tmp_path).counts) == []
    index = build([whole.removesuffix(BAM_END)], tmp_path)
    assert records_of(index) == [("a", "AC")]
    assert index.counts["lacks_bgzip_end"] == 1
    (note,) = notes_on_files(index.counts)
    assert note.startswith("1 bgzip file has no end-of-file block")
    assert note in notes_on_input(index.counts)


def test_zero_length_reads_can_be_left_out_and_are_listed_with_their_lines(tmp_path):
    rules = InputRules(sequence_kind=SequenceKind.DNA, on_bad_record="skip")
    index = build([b"@a\n\n+\n\n@b\nAC\n+\nII\n@c\n\n+\n\n"], tmp_path, rules)
    assert records_of(index) == [("b", "AC")]
    assert [(one.line, one.sequence_id, one.what) for one in index.skipped()] == [
        (1, "a", "empty sequence"),
        (9, "c", "empty sequence"),
    ]


def test_reads_are_not_for_protein_models(tmp_path):
    proteins = InputRules()
    bam = bam_of(tmp_path, [("a", "ACGT", 4)])
    assert refusal_of([b"\n@a\nAC\n+\nII\n", gzip.compress(b"@a\nAC\n+\nII\n"), bam], tmp_path, proteins) == [
        "FILE0:2: FASTQ, not FASTA: convert it with: seqtk seq -A FILE > NEW_FILE",
        "FILE1:1: FASTQ, not FASTA: convert it with: seqtk seq -A FILE > NEW_FILE",
        "FILE2: BAM, not FASTA: convert it with: samtools fasta FILE > NEW_FILE",
    ]


def test_an_index_of_reads_is_used_again_until_its_file_or_its_copy_changes(tmp_path):
    content = b"@a\nACGT\n+\nIIII\n"
    first = build([content], tmp_path)

    def again():
        return SequenceIndex.ensure(
            [tmp_path / "reads0"], tmp_path / "index", unpack_dir=tmp_path / "unpacked", rules=DNA
        )

    written = (tmp_path / "index").stat().st_ino
    assert again().file_sha256 == first.file_sha256
    assert (tmp_path / "index").stat().st_ino == written
    (copy,) = (tmp_path / "unpacked").iterdir()
    copy.write_bytes(b">a\nACGG\n\n\n")
    assert records_of(again()) == [("a", "ACGT")]
    (tmp_path / "reads0").write_bytes(b"@a\nACCC\n+\nIIII\n")
    assert records_of(again()) == [("a", "ACCC")]


def test_an_exploding_file_of_reads_is_refused(tmp_path):
    content = gzip.compress(b"@a\n" + b"A" * 3_000_000 + b"\n+\n" + b"I" * 3_000_000 + b"\n")
    (told,) = refusal_of([content], tmp_path, max_unpacked_bytes=4_000_000)
    assert told.startswith("FILE0: gzip that unpacks to more than 4000000 bytes: unpack it yourself")


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(read_formats, "_MAX_READ_BYTES", 3_000_000)
    content = b"@b\nAC\n+\nII\n@a\n" + b"A" * 6_000_000
    assert refusal_of([content], tmp_path) == [f"FILE0:6: line of more than 3000000 bytes: {AGAIN}"]


@settings(max_examples=60)
@given(
    reads=st.lists(st.text("ACGTN", max_size=8), min_size=1, max_size=6),
    block_bytes=st.integers(1, 40),
    cut=st.integers(0, 200),
)
def test_fastq_cut_anywhere_gives_whole_reads_or_an_error(reads, block_bytes, cut):
    records = [f"@r{number}\n{read}\n+\n{'I' * len(read)}\n" for number, read in enumerate(reads)]
    text = "".join(records).encode()[: max(1, cut)]
    blocks = (text[at : at + block_bytes] for at in range(0, len(text), block_bytes))
    expected = "".join(f">r{number}\n{read}\n\n\n" for number, read in enumerate(reads)).encode()
    ends = np.cumsum([len(record) for record in records])
    try:
        found = b"".join(fastq_as_fasta(blocks, "x"))
    except BadInputError:
        assert len(text) not in ends
    else:
        whole = int(np.searchsorted(ends, len(text) + 1, side="right"))  # the last line feed may be missing
        assert whole
        assert found == b"".join(line + b"\n" for line in expected.split(b"\n")[: 4 * whole])


def test_fastq_with_any_damage_is_read_or_refused_and_no_read_becomes_two():
    whole = b"".join(b"@r%d 1:N:0:A\nACGTN\n+\nIIIII\n@s%d\n\n+\n\n" % (number, number) for number in range(3))
    rng = random.Random(7)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(1, len(damaged))
            damaged[at : at + rng.randrange(3)] = rng.choice(
                [b"\n", b">", b"@", b"+", b"\r", b"\0", b"\xff", b"", b"\n>"]
            )
        try:
            text = b"".join(fastq_as_fasta(iter([bytes(damaged)]), "x"))
        except BadInputError:
            refused += 1
        else:
            assert text.count(b"\n") == 4 * sum(line.startswith(b">") for line in text.split(b"\n"))
    assert 200 < refused < 2000


def bam_of(folder: Path, reads, header=UNALIGNED, *, reference=False) -> bytes:
    """What htslib writes for reads (name, sequence, flags)."""
    path = folder / "made.bam"
    with pysam.AlignmentFile(path, "wb", header=header) as file:
        for name, sequence, flags in reads:
            read = pysam.AlignedSegment()
            read.query_name, read.query_sequence, read.flag = name, sequence, flags
            if reference and not flags & 4:
                read.reference_id, read.reference_start, read.cigarstring = 0, 5, f"{len(sequence)}M"
            read.set_tag("RG", "group")
            file.write(read)
    content = path.read_bytes()
    path.unlink()
    return content


def test_unaligned_bam_gives_the_reads_that_htslib_wrote(tmp_path):
    rng = random.Random(5)
    reads = [("all", "ACMGRSVTWYHKDBN", 4), ("failed/quality", "ACG", 4 | 512)]
    reads += [(f"r{number}", "".join(rng.choices("ACGTN", k=rng.randint(1, 3000))), 4) for number in range(900)]
    index = build([bam_of(tmp_path, reads)], tmp_path)
    assert records_of(index) == [(name, sequence) for name, sequence, _ in reads]


def test_pairs_in_bam_are_told_by_their_flags(tmp_path):
    reads = [("a", "ACG", 77), ("a", "TTT", 141), ("b/1", "AC", 77), ("c", "AC", 1 | 4), ("d", "AC", 4 | 64)]
    index = build([bam_of(tmp_path, reads)], tmp_path)
    assert [name for name, _ in records_of(index)] == ["a/1", "a/2", "b/1", "c", "d"]


@pytest.mark.parametrize("flags", [0, 16, 4 | 256, 4 | 2048])
def test_aligned_bam_is_refused_with_the_number_of_the_record(tmp_path, flags):
    content = bam_of(tmp_path, [("a", "AC", 4), ("b", "AC", flags)], ALIGNED, reference=True)
    assert refusal_of([content], tmp_path) == [
        f"FILE0:2: aligned read, and only BAM of reads that are not aligned is read (b): {TO_FASTQ}"
    ]


def test_problems_of_bam_give_the_number_of_the_record(tmp_path):
    content = bam_of(tmp_path, [("a", "AC", 4), ("b", "A=C", 4), ("c", None, 4), ("a", "AC", 4)])
    assert refusal_of([content], tmp_path) == [
        "FILE0:2: unexpected character '=' at column 2 (b): remove it: nucleotides are ASCII letters",
        "FILE0:3: empty sequence (c): add its residues or remove the record",
        "FILE0:4: duplicate id, first at FILE0:1 (a): give every record an id of its own",
    ]


def test_bam_without_reads_is_as_an_empty_file(tmp_path):
    content = bam_of(tmp_path, [])
    assert refusal_of([content, b""], tmp_path) == [
        f"FILE{number}: no records: name a file with at least one FASTA record, or use --allow-empty"
        for number in (0, 1)
    ]
    index = build([content], tmp_path, InputRules(sequence_kind=SequenceKind.DNA, allow_empty=True))
    assert len(index) == 0


def test_bam_that_is_not_compressed_is_read_too(tmp_path):
    content = gzip.decompress(bam_of(tmp_path, [("a", "ACG", 4)]))
    assert records_of(build([content], tmp_path)) == [("a", "ACG")]


def test_compressed_bam_cut_anywhere_is_an_error(tmp_path):
    content = bam_of(tmp_path, [(f"r{number}", "ACGT" * 9, 4) for number in range(3)])
    assert content.endswith(BAM_END)
    for end in range(16, len(content)):
        (told,) = refusal_of([content[:end]], tmp_path)
        assert told.startswith("FILE0: truncated") or "damaged gzip" in told, end


def test_bam_cut_anywhere_gives_whole_reads_or_an_error(tmp_path):
    unpacked = gzip.decompress(bam_of(tmp_path, [(f"r{number}", "ACGT" * 9, 4) for number in range(3)]))
    (text_bytes,) = struct.unpack_from("<I", unpacked, 4)
    ends = [8 + text_bytes + 4]
    while ends[-1] < len(unpacked):
        ends.append(ends[-1] + 4 + struct.unpack_from("<I", unpacked, ends[-1])[0])
    assert len(ends) == 4
    for end in range(4, len(unpacked) + 1):
        fasta = bam_as_fasta(iter([unpacked[:end]]), "x")
        if end in ends:
            assert b"".join(fasta).count(b">") == ends.index(end)
        else:
            with pytest.raises(BadInputError, match="truncated BAM"):
                b"".join(fasta)


def test_bam_with_any_damage_ends_in_an_error_and_never_in_a_crash(tmp_path):
    whole = gzip.decompress(bam_of(tmp_path, [("a", "ACGTN", 77), ("b", "ACGRYSWKM", 4)]))
    rng = random.Random(11)
    sizes = [0, 1, 31, 32, 33, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1]
    refused = 0
    for _ in range(4000):
        damaged = bytearray(whole)
        at = rng.randrange(4, len(damaged))
        sort = rng.randrange(3)
        if sort == 0:
            damaged[at] = rng.randrange(256)
        elif sort == 1:
            damaged[at : at + 4] = struct.pack("<I", rng.choice(sizes))
        else:
            del damaged[at : at + rng.randint(1, 20)]
        try:
            b"".join(bam_as_fasta(iter([bytes(damaged)]), "x"))
        except BadInputError:
            refused += 1
    assert refused > 2000
