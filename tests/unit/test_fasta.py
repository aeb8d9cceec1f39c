"""The FASTA rules, as a user meets them: which files are accepted, and what is said about the others."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import string
import subprocess
import sys
import unicodedata
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import another_user
from virnucpro.config import InputRules
from virnucpro.data.reading.fasta_scan import scan_fasta
from virnucpro.data.reading.problems import Problems, read_skipped
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ExitCode, OutputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from pathlib import Path

AS_RESIDUES = str.maketrans("0123456789", "GHIKLMNPQR")
PROTEINS = InputRules()

PLAIN_IDS = "remove it; an id ends at a space or tab only"
LETTERS_ONLY = "remove it: residues are ASCII letters"
CONVERT_CR = "CR line ends: convert them with: tr '\\r' '\\n' < FILE > NEW_FILE"
NO_RECORDS = "FILE: no records: name a file with at least one FASTA record, or use --allow-empty"
GAPS = "remove the gaps, or use --gaps=remove"
STOPS = "cut the sequence there, or use --stop=x"
HEADER_FIRST = "text before the first '>': begin the file with a header line, '>' and an id"
UTF16 = "UTF-16 text, not FASTA: convert it with: iconv"
EMPTY = "add its residues or remove the record"

PACKED = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "Zstandard": partial(zstd.compress, options={zstd.CompressionParameter.checksum_flag: 1}),  # as the program does
}

ACCEPTED = {
    "no newline at the end": (b">a\nMKV", [("a", "MKV")]),
    "blank lines": (b"\n \n>a\n\nMK\n\nV\n\n>b\nM\n\n", [("a", "MKV"), ("b", "M")]),
    "CRLF": (b">a x\r\nMK\r\nV\r\n>b\r\nM", [("a", "MKV"), ("b", "M")]),
    "CR at the very end": (b">a\nMKV\r", [("a", "MKV")]),
    "BOM": (b"\xef\xbb\xbf>a\nMKV\n", [("a", "MKV")]),
    "lowercase": (b">a\nmkV\n", [("a", "MKV")]),
    "stop at the end": (b">a\nMK\nV*\n\n>b\nM*", [("a", "MKV"), ("b", "M")]),
    "stop on a line of its own": (b">a\nMKV\n*\n", [("a", "MKV")]),
    "rare residues": (b">a\nUOBZX\n", [("a", "UOBZX")]),
    "J": (b">a\nMJj\n", [("a", "MXX")]),
    "all X": (b">a\nXXX\n", [("a", "XXX")]),
    "blanks inside": (b">a\nM K\tV \n", [("a", "MKV")]),
    "UTF-8 id": (">é\nMKV\n".encode(), [("é", "MKV")]),
    "composed and decomposed ids are two": (">é\nM\n>e\u0301\nM\n".encode(), [("é", "M"), ("e\u0301", "M")]),
    "description in another encoding": (b">a caf\xe9\nMKV\n", [("a", "MKV")]),
    "tab after the id": (b">a\tb c\nMKV\n", [("a", "MKV")]),
    "'>' and '/' in the header": (b">../../etc/passwd >x\nMKV\n", [("../../etc/passwd", "MKV")]),
    "1 residue": (b">a\nM\n", [("a", "M")]),
    "2,000 residues": (b">a\n" + b"M" * 2000 + b"\n", [("a", "M" * 2000)]),
    "uneven widths": (b">a\nM\nKVL\nAA\n", [("a", "MKVLAA")]),
    "gzip": (gzip.compress(b">a\nMKV\n"), [("a", "MKV")]),
    **{
        f"{name} with two members": (pack(b">a\nMK") + pack(b"V\n>b\nM\n"), [("a", "MKV"), ("b", "M")])
        for name, pack in PACKED.items()
    },
    "xz with padding": (lzma.compress(b">a\nMKV\n") + bytes(8) + lzma.compress(b">b\nM\n"), [("a", "MKV"), ("b", "M")]),
    "Zstandard behind a skipped frame, as of pzstd": (
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd.compress(b">a\nMKV\n"),
        [("a", "MKV")],
    ),
    "id of 1024 bytes": (b">" + b"a" * 1024 + b"\nM\n", [("a" * 1024, "M")]),
    "header of 64 KiB": (b">a " + b"d" * (65536 - 2) + b"\nM\n", [("a", "M")]),
}

REFUSED = {
    "empty file": (b"", NO_RECORDS),
    "only newlines": (b"\n\r\n \n\n", NO_RECORDS),
    "only a BOM": (b"\xef\xbb\xbf", NO_RECORDS),
    "no header": (b"MKV\n>a\nM\n", f"FILE:1: {HEADER_FIRST}"),
    "text after blank lines": (b"\n\nMKV\n", f"FILE:3: {HEADER_FIRST}"),
    "comment": (b"; made by hand\n>a\nM\n", f"FILE:1: {HEADER_FIRST}"),
    "blank before '>'": (b" >a\nM\n", f"FILE:1: {HEADER_FIRST}"),
    "no sequence, last": (b">a\nM\n>b\n", f"FILE:3: empty sequence (b): {EMPTY}"),
    "no sequence, between": (b">a\n>b\nM\n", f"FILE:1: empty sequence (a): {EMPTY}"),
    "only a stop": (b">a\n*\n", f"FILE:1: empty sequence (a): {EMPTY}"),
    "duplicate id": (
        b">a x\nM\n>b\nM\n>a y\nK\n",
        "FILE:5: duplicate id, first at FILE:1 (a): give every record an id of its own",
    ),
    "old Mac CR": (b">a\rMKV\r>b\rM\r", f"FILE:1: {CONVERT_CR}"),
    "one CR inside": (b">a\nMK\rV\n", "FILE:2: CR line ends (a)" + CONVERT_CR.removeprefix("CR line ends")),
    "CR in a header": (b">a\rMK\n>b\nM\n", "FILE:1: CR line ends (a\\rMK)" + CONVERT_CR.removeprefix("CR line ends")),
    "CR in a description": (
        b">a x\rMK\nM\n",
        "FILE:1: CR line ends (a)" + CONVERT_CR.removeprefix("CR line ends"),
    ),
    "stop inside": (b">a\nM\nK*V\n", f"FILE:3: stop '*' inside the sequence at column 2 (a): {STOPS}"),
    "two stops": (b">a\nMKV**\n", f"FILE:2: stop '*' inside the sequence at column 4 (a): {STOPS}"),
    "gap -": (b">a\nMK-V\n", f"FILE:2: gap '-' at column 3 (a): {GAPS}"),
    "gap .": (b">a\n.MKV\n", f"FILE:2: gap '.' at column 1 (a): {GAPS}"),
    "digit": (b">a\nMK1V\n", f"FILE:2: unexpected character '1' at column 3 (a): {LETTERS_ONLY}"),
    "sign": (b">a\nMKV\nM@\n", f"FILE:3: unexpected character '@' at column 2 (a): {LETTERS_ONLY}"),
    "'>' inside a line": (
        b">a\nMKV>b\nM\n",
        "FILE:2: '>' inside a sequence line at column 4 (a): start the header on a line of its own",
    ),
    "special token": (
        b">a\nMK<eos>V\n",
        "FILE:2: special token '<eos>' at column 3 (a): remove it: only residues are read",
    ),
    "non-ASCII residue": (">a\nMéV\n".encode(), f"FILE:2: non-ASCII byte 0xC3 at column 2 (a): {LETTERS_ONLY}"),
    "NUL in the sequence": (
        b">a\nM\0V\n",
        "FILE:2: NUL byte at column 2 (a): make the file again: it is damaged or not text",
    ),
    "control character in the sequence": (
        b">a\nM\x0bV\n",
        f"FILE:2: control character 0x0B at column 2 (a): {LETTERS_ONLY}",
    ),
    "latin-1 id": (
        b">caf\xe9\nM\n",
        "FILE:1: id is not UTF-8 (byte 0xE9) (caf\ufffd): convert the file with: iconv -f latin1 -t utf-8",
    ),
    "NUL in the id": (
        b">a\0b\nM\n",
        "FILE:1: control or blank character U+0000 in the id (a\\x00b): remove it; an id ends at a space or tab only",
    ),
    "ANSI in the id": (
        b">a\x1b[31m\nM\n",
        f"FILE:1: control or blank character U+001B in the id (a\\x1b[31m): {PLAIN_IDS}",
    ),
    "NBSP in the id": (
        ">a\u00a0b\nM\n".encode(),
        "FILE:1: control or blank character U+00A0 in the id (a\\xa0b): remove it; an id ends at a space or tab only",
    ),
    "U+2028 in the id": (
        ">a\u2028b\nM\n".encode(),
        "FILE:1: control or blank character U+2028 in the id (a\\u2028b): remove it; an id ends at a space or tab only",
    ),
    "separator in the id": (
        b">a\x1cb\nM\n",
        "FILE:1: control or blank character U+001C in the id (a\\x1cb): remove it; an id ends at a space or tab only",
    ),
    "empty id": (b">\nMKV\n", "FILE:1: empty id: write an id right behind '>'"),
    "empty id, description": (b"> desc\nMKV\n", "FILE:1: empty id: write an id right behind '>'"),
    "long id": (
        b">" + b"a" * 1025 + b"\nM\n",
        f"FILE:1: id of more than 1024 bytes ({'a' * 80}...): shorten it; it ends at the first space or tab",
    ),
    "long header": (
        b">a " + b"d" * (65536 - 1) + b"\nM\n",
        "FILE:1: header of more than 65536 bytes (a): shorten it, or look for a lost line end",
    ),
    "header of 1 MB": (
        b">a " + b"d" * 1_000_000 + b"\nM\n",
        "FILE:1: header of more than 65536 bytes (a): shorten it, or look for a lost line end",
    ),
    "FASTQ": (b"@r\nACGT\n+\nIIII\n", "FILE:1: FASTQ, not FASTA: convert it with: seqtk seq -A FILE > NEW_FILE"),
    "FASTQ in gzip": (
        gzip.compress(b"@r\nACGT\n+\nIIII\n"),
        "FILE:1: FASTQ, not FASTA: convert it with: seqtk seq -A FILE > NEW_FILE",
    ),
    **{
        f"truncated {name}": (
            pack(b">a\nMKV\n" * 100)[:-9],
            f"FILE: truncated {name}: copy or download the file again",
        )
        for name, pack in PACKED.items()
    },
    **{f"{name} of nothing": (pack(b""), NO_RECORDS) for name, pack in PACKED.items()},
    "bzip2 in Zstandard": (
        zstd.compress(bz2.compress(b">a\nM\n")),
        "FILE: bzip2 inside Zstandard, not FASTA: unpack it with: unzstd FILE",
    ),
    "gzip twice": (
        gzip.compress(gzip.compress(b">a\nM\n")),
        "FILE: gzip inside gzip, not FASTA: unpack it with: gunzip FILE",
    ),
    "UTF-16": (">a\nM\n".encode("utf-16"), f"FILE: {UTF16} -f utf-16 -t utf-8 FILE > NEW_FILE"),
    "UTF-16 without BOM": (">a\nM\n".encode("utf-16-le"), f"FILE: {UTF16} -f utf-16le -t utf-8 FILE > NEW_FILE"),
    "binary": (b"\x7fELF\0\0\x01\n>a\nM\n", "FILE: binary data, not FASTA: name a FASTA file"),
}


def build(content: bytes, folder: Path, name: str = "input.fasta") -> SequenceIndex:
    path = folder / name
    path.write_bytes(content)
    return SequenceIndex.build([path], folder / "index", unpack_dir=folder / "unpacked")


def problems_of(files: list[str | Path], folder: Path) -> list[str]:
    with pytest.raises(BadInputError) as caught:
        SequenceIndex.build(files, folder / "index", unpack_dir=folder / "unpacked")
    assert caught.value.exit_code == ExitCode.BAD_INPUT
    assert not os.path.lexists(folder / "index")
    return [str(problem) for problem in caught.value.problems]


def in_input_order(index: SequenceIndex) -> list[tuple[str, str]]:
    records = sorted(
        (index.read(position) for position in range(len(index))), key=lambda r: index.input_rows[r.position]
    )
    return [(record.sequence_id, record.sequence) for record in records]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_input_gives_exactly_these_records(name, tmp_path):
    content, expected = ACCEPTED[name]
    assert in_input_order(build(content, tmp_path)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_input_is_told_with_line_and_remedy(name, tmp_path):
    content, expected = REFUSED[name]
    path = tmp_path / "input.fasta"
    path.write_bytes(content)
    assert problems_of([path], tmp_path) == [expected.replace("FILE:", f"{path}:")]


def test_compression_is_told_by_content_and_never_by_name(tmp_path):
    assert len(build(b">a\nMKV\n", tmp_path, "plain.fasta.gz")) == 1
    assert len(build(gzip.compress(b">a\nMKV\n"), tmp_path, "packed.fasta")) == 1


def test_what_was_normalised_is_counted(tmp_path):
    index = build(b">a\nMJ j*\n>b\nJ\tM\n", tmp_path)
    assert index.counts == {
        "mapped_j": 3,
        "removed_blanks": 2,
        "stripped_stops": 1,
        "removed_gaps": 0,
        "stops_as_x": 0,
        "ambiguous": 3,
        "low_information": 0,
        "lacks_bgzip_end": 0,
        "mate_files": 0,
        "skipped": 0,
    }


def test_j_is_counted_in_plain_blocks_too(tmp_path):
    assert build(b">a\nMJj\n>b\nMK\nJ\n", tmp_path).counts["mapped_j"] == 3


def test_a_missing_file_a_folder_and_a_dangling_link_are_told_with_the_systems_text(tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    told = problems_of([tmp_path / "missing", tmp_path, tmp_path / "dangling"], tmp_path)
    assert told == [
        f"{tmp_path}/missing: No such file or directory: check the name and the permissions",
        f"{tmp_path}: Is a directory: name the FASTA files in it",
        f"{tmp_path}/dangling: No such file or directory: check the name and the permissions",
    ]


def test_a_file_without_permission_is_told_with_the_systems_text(tmp_path):
    path = tmp_path / "closed.fasta"
    path.write_bytes(b">a\nM\n")
    path.chmod(0)
    with another_user():
        told = problems_of([path], tmp_path)
    assert told == [f"{path}: Permission denied: check the name and the permissions"]


def test_pipes_and_standard_input_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert problems_of(["-", tmp_path / "pipe"], tmp_path) == [
        "-: only the commands predict and embed read standard input: save it to a regular file first",
        f"{tmp_path}/pipe: not a regular file (a pipe, socket or device): save it to a regular file first",
    ]


@pytest.mark.parametrize(
    ("content", "what", "remedy"),
    [
        (b"LOCUS       X 60 bp DNA\n", "GenBank", "any2fasta FILE"),
        (b"ID   X; SV 1; linear\n", "EMBL", "any2fasta FILE"),
        (b"##gff-version 3\n", "GFF3", "sed '1,/^##FASTA/d' FILE"),
        (b"H\tVN:Z:1.0\nS\t1\tACGT\n", "GFA", "awk '/^S/ "),
        (b"S\t1\tACGT\n", "GFA", "awk '/^S/ "),
        (b"\n<!DOCTYPE html>\n", "HTML or XML", "download the file again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer", "git lfs pull"),
        (b"a.fa".ljust(257, b"\0") + b"ustar\0", "tar", "tar -xf FILE"),
        (b"7z\xbc\xaf\x27\x1c", "7z", "7z x FILE"),
        (b"Rar!\x1a\x07\x01", "rar", "unrar x FILE"),
        (b"\x1f\x9d\x90", "compress (.Z)", "gzip -d FILE"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_another_format_is_named_with_how_to_convert_it(tmp_path, content, what, remedy, pack):
    (tmp_path / "input").write_bytes(pack(content))
    (told,) = problems_of([tmp_path / "input"], tmp_path)
    assert told.startswith(f"{tmp_path}/input: {what}, not FASTA: ")
    assert remedy in told


def test_no_file_at_all_is_bad_input(tmp_path):
    assert problems_of([], tmp_path) == ["input: no files: name at least one FASTA file"]


@pytest.mark.parametrize("name", PACKED)
def test_damaged_compression_is_told(name, tmp_path):
    packed = bytearray(PACKED[name](os.urandom(1000).hex().encode()))
    packed[200] ^= 0xFF
    path = tmp_path / "a.fasta"
    path.write_bytes(packed)
    assert problems_of([path], tmp_path)[0].startswith(f"{path}: damaged {name} (")


@pytest.mark.parametrize("name", PACKED)
def test_a_second_member_with_a_damaged_start_is_not_left_out_silently(name, tmp_path):
    pack = PACKED[name]
    path = tmp_path / "a.fasta"
    path.write_bytes(pack(b">a\nMKV\n") + b"?" + pack(b">b\nMKV\n")[1:])
    assert problems_of([path], tmp_path)[0].startswith(f"{path}: damaged {name} (")


@pytest.mark.parametrize("name", PACKED)
def test_an_exploding_archive_is_stopped_and_leaves_nothing_behind(name, tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(PACKED[name](b">a\n" + b"M" * 5_000_000))
    with pytest.raises(BadInputError, match=f"{name} that unpacks to more than 2000000 bytes: unpack it yourself"):
        SequenceIndex.build([path], tmp_path / "i", unpack_dir=tmp_path / "u", max_unpacked_bytes=2_000_000)
    assert list((tmp_path / "u").iterdir()) == []


@pytest.mark.may_skip
@pytest.mark.parametrize("program", ["zstd --long=31", "pzstd -p 4", "xz -T2 --block-size=100KiB", "bzip2 -1"])
def test_what_the_programs_write_is_read(program, tmp_path):
    name, *options = program.split()
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    records = [
        (f"s{n}", hashlib.sha256(str(n).encode()).hexdigest().upper().translate(AS_RESIDUES)) for n in range(20_000)
    ]
    text = "".join(f">{name}\n{sequence}\n" for name, sequence in records).encode()
    packed = subprocess.run([name, "-q", *options, "-c"], input=text, capture_output=True, check=True).stdout
    assert len(packed) < 0.8 * len(text)
    assert in_input_order(build(packed, tmp_path)) == records


def test_a_folder_that_cannot_take_the_unpacked_copy_is_an_output_error(tmp_path):
    (tmp_path / "u").write_text("a file where the folder should be")
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b">a\nM\n"))
    with pytest.raises(OutputError):
        SequenceIndex.build([path], tmp_path / "i", unpack_dir=tmp_path / "u")


def test_duplicates_across_files_name_both_places(tmp_path):
    first, second = tmp_path / "1.fa", tmp_path / "2.fa"
    first.write_bytes(b">a\nM\nK\n>b\nM\n")
    second.write_bytes(b"\n>c\nM\n>b again\nK\n>a\nM\n")
    assert problems_of([first, second], tmp_path) == [
        f"{second}:4: duplicate id, first at {first}:4 (b): give every record an id of its own",
        f"{second}:6: duplicate id, first at {first}:1 (a): give every record an id of its own",
    ]


def test_problems_of_all_files_are_collected_in_order(tmp_path):
    first, third = tmp_path / "1.fa", tmp_path / "3.fa"
    first.write_bytes(b">a\nM-\n>b\nM1\n")
    third.write_bytes(b">c\n")
    told = problems_of([first, tmp_path / "2.fa", third], tmp_path)
    assert [line.split(":")[0].removeprefix(f"{tmp_path}/") for line in told] == ["1.fa", "1.fa", "2.fa", "3.fa"]


@pytest.mark.parametrize(("count", "more"), [(20, False), (21, True)])
def test_at_most_twenty_problems_are_told(count, more, tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(b"".join(b">s%d\n-\n" % number for number in range(count)))
    with pytest.raises(BadInputError) as caught:
        SequenceIndex.build([path], tmp_path / "i", unpack_dir=tmp_path)
    assert len(caught.value.problems) == 20
    assert caught.value.more is more


def test_a_real_protein_file_passes_every_check(data_dir, tmp_path):
    source = data_dir / "proteins" / "uniprot_20000.fasta.gz"
    index = SequenceIndex.build([source], tmp_path / "index", unpack_dir=tmp_path)
    records = [text.split(b"\n", 1) for text in gzip.decompress(source.read_bytes())[1:].split(b"\n>")]
    assert len(index) == len(records) == 20_000
    assert in_input_order(index) == [
        (header.split()[0].decode(), residues.replace(b"\n", b"").decode()) for header, residues in records
    ]


# --- the reader against a plain one ----------------------------------------------------------------------------------


def plain_read(data: bytes, rules: InputRules = PROTEINS) -> tuple[list[tuple[str, str]], list[int]]:
    """Read FASTA line by line, as plainly as can be: the good records, and the line of each bad one's first fault."""
    blocks: list[list[tuple[int, bytes]]] = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if raw.startswith(b">"):
            blocks.append([])
        elif not blocks and raw.strip(b" \t\r"):
            return [], [number]
        if blocks:
            blocks[-1].append((number, raw.removesuffix(b"\r")))
    read = [plain_record(block, rules) for block in blocks]
    return [record for record, fault in read if fault is None], [fault for _, fault in read if fault is not None]


def plain_record(lines: list[tuple[int, bytes]], rules: InputRules) -> tuple[tuple[str, str], int | None]:
    (head, header), *body = lines
    name = header[1:].replace(b"\t", b" ").split(b" ")[0]
    is_protein = rules.sequence_kind == "protein"
    letters = string.ascii_uppercase if is_protein else "ACGTRYSWKMBDHVN"
    removed = b" \t" + b"-." * (rules.gaps == "remove")
    where = [(number, byte) for number, line in body for byte in line if byte not in removed]
    text = "".join(chr(byte) for _, byte in where).upper()
    if is_protein and text.endswith("*"):
        text = text[:-1]
        where.pop()
    if rules.rna:
        text = text.replace("U", "T")
    if is_protein and rules.stops == "x":
        text = text.replace("*", "X")
    faults = [number for (number, _), letter in zip(where, text, strict=True) if letter not in letters]
    if is_protein:
        text = text.replace("J", "X")
    record = name.decode("utf-8", "replace"), text
    if b"\r" in header or not plain_id(name):
        return record, head
    if not text or len(text) > (rules.most_residues or len(text)):
        faults.append(head)
    return record, faults[0] if faults else None


def plain_id(name: bytes) -> bool:
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return False
    return text != "" and not any(unicodedata.category(char) in ("Cc", "Cf", "Zs", "Zl", "Zp") for char in text)


def scan(data: bytes, block_bytes: int, rules: InputRules = PROTEINS):
    """Scan *data* in blocks; return its good records and hashes, and the lines of its problems."""
    problems = Problems(rules.on_bad_record)
    descriptor = os.memfd_create("fasta")
    try:
        os.write(descriptor, data)
        found = scan_fasta(descriptor, "x", problems, rules=rules, block_bytes=block_bytes)
    finally:
        os.close(descriptor)
    lines = [bad.line for bad in read_skipped(b"".join(problems.skipped.pieces()), ["x"])]
    was_refused = False
    try:
        problems.raise_if_any()
    except BadInputError as error:
        lines = [problem.line for problem in error.problems]
        was_refused = True
    rows = []
    for block in found.rows:
        ends = block.id_bytes.cumsum().tolist()
        names = [
            block.ids[end - size : end].decode("utf-8", "replace")
            for end, size in zip(ends, block.id_bytes, strict=True)
        ]
        places = [
            data[at : at + size] for at, size in zip(block.offsets.tolist(), block.record_bytes.tolist(), strict=True)
        ]
        hashes = [bytes(one) for one in block.sequence_hashes]
        rows += zip(names, block.residues.tolist(), hashes, places, block.low_information.tolist(), strict=True)
    return rows, lines, None if was_refused else found


TOKENS = [
    b">",
    b">a",
    b">b c",
    b"\n",
    b"\n",
    b"\n",
    b"\r\n",
    b"\r",
    b"M",
    b"kV",
    b"J",
    b"*",
    b" ",
    b"\t",
    b"-",
    b".",
    b"ACgn",
    b"NN",
    b"AuUt",
    b"X",
    b"\xc3\xa9",
]
messy = st.lists(st.sampled_from(TOKENS), max_size=40).map(b"".join)
residue_lines = st.lists(st.text("ACDEFGHIKLMNPQRSTVWYXjm", max_size=12).map(str.encode), min_size=1, max_size=6)
tidy_records = st.tuples(st.sampled_from([b"a", b"b1 text", b"c\tx"]), residue_lines)
tidy = st.lists(tidy_records.map(lambda pair: b">" + b"\n".join([pair[0], *pair[1]])), min_size=1, max_size=12).map(
    b"\n".join
)


@st.composite
def almost_tidy(draw: st.DrawFn) -> bytes:
    """Tidy records, with other line ends perhaps, and one odd thing somewhere perhaps."""
    data = draw(tidy).replace(b"\n", draw(st.sampled_from([b"\n", b"\r\n"])))
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.sampled_from([b"", *TOKENS])) + data[at:]


rules_of_input = st.builds(
    InputRules,
    sequence_kind=st.sampled_from(["protein", "DNA"]),
    gaps=st.sampled_from(["error", "remove"]),
    stops=st.sampled_from(["error", "x"]),
    on_bad_record=st.sampled_from(["error", "skip"]),
    most_residues=st.none() | st.integers(1, 12),
) | st.builds(
    InputRules,
    sequence_kind=st.just("DNA"),
    rna=st.just(True),
    gaps=st.sampled_from(["error", "remove"]),
    on_bad_record=st.sampled_from(["error", "skip"]),
)


@settings(max_examples=600)
@given(
    data=messy | tidy | almost_tidy(),
    block_bytes=st.integers(1, 40) | st.just(1 << 19),
    rules=st.just(PROTEINS) | rules_of_input,
)
def test_every_block_size_reads_what_a_plain_reader_reads(data, block_bytes, rules):
    expected, fault_lines = plain_read(data, rules)
    if len(fault_lines) > BadInputError.MAX_PROBLEMS:
        return
    rows, lines, found = scan(data, block_bytes, rules)
    if not expected and not fault_lines:
        assert lines == [None]
        return
    assert lines == fault_lines
    assert (found is None) >= (bool(lines) and rules.on_bad_record == "error")
    if found is None:
        return
    assert found.sha256 == hashlib.sha256(data).hexdigest()
    unknown = "X" if rules.sequence_kind == "protein" else "N"
    assert [(name, residues, digest, low) for name, residues, digest, _, low in rows] == [
        (name, len(sequence), hashlib.sha256(sequence.encode()).digest()[:16], set(sequence) == {unknown})
        for name, sequence in expected
    ]
    assert [plain_read(place, rules)[0] for _, _, _, place, _ in rows] == [[record] for record in expected]
    several = "XBZ" if rules.sequence_kind == "protein" else "RYSWKMBDHVN"
    assert found.counts["ambiguous"] == sum(sequence.count(one) for _, sequence in expected for one in several)
    assert found.counts["low_information"] == sum(set(sequence) == {unknown} for _, sequence in expected)


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (b">a\nMKV\nMK*\n\nMKV\n", "x:3: stop '*' inside the sequence at column 3 (a): "),
        (b">a\r\nMKV\r\nMKVLAMKV-\r\n", "x:3: gap '-' at column 9 (a): "),
        (b">a\nMKV\n\n  MK\rV\n", "x:4: CR line ends (a): "),
        (b">a\r\n\r\r\n", "x:2: CR line ends (a): "),
        (b">a\r\nMKV\r\r\nM\r\n", "x:2: CR line ends (a): "),
        (b">a\nMKVLAMKV*MKV*\n", "x:2: stop '*' inside the sequence at column 9 (a): "),
    ],
)
def test_a_fault_is_told_at_the_same_place_however_the_record_is_cut(record, place):
    for block_bytes in range(1, 60):
        problems = Problems()
        descriptor = os.memfd_create("fasta")
        os.write(descriptor, record + b">b\nM\n")
        scan_fasta(descriptor, "x", problems, block_bytes=block_bytes)
        os.close(descriptor)
        with pytest.raises(BadInputError) as caught:
            problems.raise_if_any()
        assert len(caught.value.problems) == 1
        assert str(caught.value).startswith(place)


@settings(max_examples=200)
@given(data=st.binary(max_size=300) | st.binary(max_size=60).map(lambda tail: b">a\nMK" + tail))
def test_any_bytes_are_either_records_or_told_problems(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    try:
        index = build(data, folder)
    except BadInputError:
        return  # with at least one problem: an error without any cannot be made
    assert in_input_order(index)
