"""
Row 23: the whole catalogue of bad and odd input, as proteins and as DNA, through the command line.

Each input either gives exactly the records that it should, or ends with 65 and names file, line and what to do. Never
a traceback, never "0 sequences" with exit code 0.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import h5py
import pytest

import virnucpro
from tests.command_line import Ended, run
from tests.fakes import another_user
from tests.predictions import hash_prediction, predict
from tests.strategies import write_fasta
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ConfigurationError
from virnucpro.store.contig_table import read_contig_calls
from virnucpro.store.reader import read_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = {"protein": "virnucpro-tiny-protein", "DNA": "virnucpro-tiny-dna"}
SEQUENCES = {"protein": b"MKVL", "DNA": b"ACGT"}

EMPTY_ID = "write an id right behind '>'"
PLAIN_ID = "remove it; an id ends at a space or tab only"
ASCII = "are ASCII letters"
CR = "convert them with: tr"
NOT_DNA = "give DNA; for proteins there is `virnucpro embed`"


@dataclass(frozen=True)
class Accepted:
    """The records that an input gives; *id* stands for the id, *seq* for a sequence of the kind."""

    records: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Refused:
    """What is said: the line (None: the file as a whole), what is wrong, and what to do."""

    line: int | None
    what: str
    remedy: str


def gives(*sequences: str) -> Accepted:
    """Records id1, id2 ... with these sequences; SEQ stands for a sequence of the kind."""
    return Accepted(tuple((f"ID{number}", sequence) for number, sequence in enumerate(sequences, start=1)))


WHOLE = gives("SEQ")
DNA_LETTER = "at column {} stands for no nucleotide of DNA"
Outcome = Accepted | Refused

CATALOGUE: dict[str, tuple[bytes, Outcome, Outcome | None]] = {
    "empty file": (b"", Refused(None, "no records", "--allow-empty"), None),
    "only newlines": (b"\n\n\r\n\n", Refused(None, "no records", "--allow-empty"), None),
    "no header": (b"SEQ\nSEQ\n", Refused(1, "text before the first '>'", "begin the file with a header line"), None),
    "text before the first header": (
        b"note\n>ID1\nSEQ\n",
        Refused(1, "text before the first '>'", "header line"),
        None,
    ),
    "comment": (b"; made by hand\n>ID1\nSEQ\n", Refused(1, "text before the first '>'", "header line"), None),
    "header without sequence, last": (
        b">ID1\nSEQ\n>ID2\n",
        Refused(3, "empty sequence (ID2)", "remove the record"),
        None,
    ),
    "header without sequence, between": (b">ID1\n>ID2\nSEQ\n", Refused(1, "empty sequence (ID1)", "remove the"), None),
    "no newline at the end": (b">ID1\nSEQ", WHOLE, None),
    "duplicate id": (
        b">ID1 x\nSEQ\n>ID1 y\nSEQ\n",
        Refused(3, "duplicate id, first at FILE:1", "an id of its own"),
        None,
    ),
    "blank lines": (b"\n>ID1\n\nSEQ\n\n\n>ID2\nSEQ\n\n", gives("SEQ", "SEQ"), None),
    "CRLF": (b">ID1 x\r\nSEQ\r\nSEQ\r\n", gives("SEQSEQ"), None),
    "old Mac CR": (b">ID1\rSEQ\r>ID2\rSEQ\r", Refused(1, "CR line ends", CR), None),
    "one CR inside": (b">ID1\nSEQ\n>ID2\nSEQ\rSEQ\n", Refused(4, "CR line ends", CR), None),
    "lowercase": (b">ID1\nacgt\n", gives("ACGT"), None),
    "stop at the end": (
        b">ID1\nSEQ*\n",
        WHOLE,
        Refused(2, "'*' " + DNA_LETTER.format(5), NOT_DNA),
    ),
    "stop inside": (
        b">ID1\nSEQ*SEQ\n",
        Refused(2, "stop '*' inside the sequence at column 5", "--stop=x"),
        Refused(2, "'*' " + DNA_LETTER.format(5), NOT_DNA),
    ),
    "gap -": (b">ID1\nSEQ\nSEQ-SEQ\n", Refused(3, "gap '-' at column 5", "--gaps=remove"), None),
    "gap .": (b">ID1\nSEQ.SEQ\n", Refused(2, "gap '.' at column 5", "--gaps=remove"), None),
    "U O B Z X": (b">ID1\nSEQUOBZX\n", gives("SEQUOBZX"), Refused(2, "'U' " + DNA_LETTER.format(5), "write T for U")),
    "RNA": (b">ID1\nACGU\n", gives("ACGU"), Refused(2, "'U' " + DNA_LETTER.format(4), "T for U")),
    "J": (b">ID1\nACJj\n", gives("ACXX"), Refused(2, "'J' " + DNA_LETTER.format(3), NOT_DNA)),
    "protein": (b">ID1\nACGMKVLAE\n", gives("ACGMKVLAE"), Refused(2, "'L' " + DNA_LETTER.format(7), NOT_DNA)),
    "all X": (b">ID1\nXXX\n", gives("XXX"), Refused(2, "'X' " + DNA_LETTER.format(1), NOT_DNA)),
    "all N": (b">ID1\nNNNN\n", gives("NNNN"), None),
    "IUPAC letters": (b">ID1\nACGTRYSWKMBDHVN\n", gives("ACGTRYSWKMBDHVN"), None),
    "a run of N": (b">ID1\nSEQNNNNNNNNNNNNNNNNNNNNSEQ\n", gives("SEQ" + "N" * 20 + "SEQ"), None),
    "digits": (b">ID1\nSEQ\n1 SEQ\n", Refused(3, "unexpected character '1' at column 1", ASCII), None),
    "@": (b">ID1\nSEQ@\n", Refused(2, "unexpected character '@' at column 5", ASCII), None),
    "#": (b">ID1\nSEQ#SEQ\n", Refused(2, "unexpected character '#' at column 5", ASCII), None),
    "!": (b">ID1\n!\n", Refused(2, "unexpected character '!' at column 1", ASCII), None),
    "> inside a line": (
        b">ID1\nSEQ>ID2\nSEQ\n",
        Refused(2, "'>' inside a sequence line at column 5", "a line of its own"),
        None,
    ),
    "<eos>": (b">ID1\nSEQ<eos>SEQ\n", Refused(2, "special token '<eos>' at column 5", "remove it"), None),
    "<mask>": (b">ID1\n<mask>\n", Refused(2, "special token '<mask>' at column 1", "remove it"), None),
    "blanks inside": (b">ID1\nSEQ SEQ\t\nSEQ \n", gives("SEQSEQSEQ"), None),
    "é in the sequence": (">ID1\nSEQé\n".encode(), Refused(2, "non-ASCII byte 0xC3 at column 5", ASCII), None),
    "UTF-8 id": (">IDé☃\nSEQ\n".encode(), Accepted((("IDé☃", "SEQ"),)), None),
    "ids that NFC would make one": (
        ">IDé\nSEQ\n>IDe\u0301\nSEQ\n".encode(),
        Accepted((("IDé", "SEQ"), ("IDe\u0301", "SEQ"))),
        None,
    ),
    "latin-1 id": (b">caf\xe9\nSEQ\n", Refused(1, "id is not UTF-8 (byte 0xE9)", "iconv -f latin1"), None),
    "BOM": (b"\xef\xbb\xbf>ID1\nSEQ\n", WHOLE, None),
    "UTF-16": (">ID1\nSEQ\n".encode("utf-16"), Refused(None, "UTF-16 text", "iconv -f utf-16"), None),
    "UTF-16 without BOM": (">ID1\nSEQ\n".encode("utf-16-le"), Refused(None, "UTF-16 text", "iconv -f utf-16le"), None),
    "NUL in the sequence": (b">ID1\nSE\0QSEQ\n", Refused(2, "NUL byte at column 3", "make the file again"), None),
    "NUL in the id": (b">I\0D\nSEQ\n", Refused(1, "U+0000 in the id", PLAIN_ID), None),
    "empty id": (b">\nSEQ\n", Refused(1, "empty id", EMPTY_ID), None),
    "empty id with a description": (b"> desc\nSEQ\n", Refused(1, "empty id", EMPTY_ID), None),
    "'>' in the header": (b">ID1>x >y\nSEQ\n", Accepted((("ID1>x", "SEQ"),)), None),
    "a path as id": (b">../../etc/passwd_ID\nSEQ\n", Accepted((("../../etc/passwd_ID", "SEQ"),)), None),
    "ANSI in the id": (b">a\x1b[31mred\nSEQ\n", Refused(1, "U+001B in the id (a\\x1b[31mred)", PLAIN_ID), None),
    "NBSP in the id": (">a\u00a0b\nSEQ\n".encode(), Refused(1, "U+00A0 in the id", PLAIN_ID), None),
    "U+2028 in the id": (">a\u2028b\nSEQ\n".encode(), Refused(1, "U+2028 in the id", PLAIN_ID), None),
    "\\x1c in the id": (b">a\x1cb\nSEQ\n", Refused(1, "U+001C in the id", PLAIN_ID), None),
    "header of 1 MB": (
        b">ID1 " + b"d" * 1_000_000 + b"\nSEQ\n",
        Refused(1, "header of more than 65536", "shorten it"),
        None,
    ),
    "id of 1025 bytes": (b">" + b"i" * 1025 + b"\nSEQ\n", Refused(1, "id of more than 1024 bytes", "shorten it"), None),
    "one line of 3 MB": (b">ID1\n" + b"ACGT" * 750_000 + b"\n", gives("ACGT" * 750_000), None),
    "FASTQ": (b"@ID1\nSEQ\n+\nIIII\n", Refused(1, "FASTQ, not FASTA", "seqtk seq -A"), WHOLE),
    "FASTQ cut short": (
        b"@ID1\nSEQ\n+\nIIII\n@ID2\nSE",
        Refused(1, "FASTQ, not FASTA", "seqtk seq -A"),
        Refused(6, "damaged or truncated FASTQ", "copy or download"),
    ),
    "gzip": (gzip.compress(b">ID1\nSEQ\n"), WHOLE, None),
    "gzip cut short": (
        gzip.compress(b">ID1\nSEQ\n" * 99)[:-9],
        Refused(None, "truncated gzip", "copy or download"),
        None,
    ),
    "gzip of nothing": (gzip.compress(b""), Refused(None, "no records", "--allow-empty"), None),
    "gzip with two members": (gzip.compress(b">ID1\nSE") + gzip.compress(b"Q\n>ID2\nSEQ\n"), gives("SEQ", "SEQ"), None),
    "bzip2": (bz2.compress(b">ID1\nACGT\n"), gives("ACGT"), None),
    "xz": (lzma.compress(b">ID1\nACGT\n"), gives("ACGT"), None),
    "Zstandard": (b"\x28\xb5\x2f\xfd\x04\x00", Refused(None, "Zstandard", "copy or download the file again"), None),
    "random binary": (bytes(range(256)) * 9, Refused(None, "binary data", "name a FASTA file"), None),
    "cut inside a record": (b">ID1\nSEQ\n>ID2\nSE", gives("SEQ", "SE"), None),
    "one letter": (b">ID1\nA\n", gives("A"), None),
    "uneven widths": (b">ID1\nSEQ\nSEQSEQ\nA\nSEQ\n", gives("SEQSEQSEQASEQ"), None),
    "more than 1022 letters": (b">ID1\n" + b"ACGT" * 300 + b"\n", gives("ACGT" * 300), None),
}

# whole inputs in one piece, by the module that compressed them
COMPRESSED = {"gzip": gzip, "bzip2": bz2, "xz": lzma}

CASES = [(name, kind) for name in CATALOGUE for kind in MODELS]


def outcome_of(name: str, kind: str) -> Outcome:
    _, protein, dna = CATALOGUE[name]
    return protein if dna is None or kind == "protein" else dna


ACCEPTED = [(name, kind) for name, kind in CASES if isinstance(outcome_of(name, kind), Accepted)]
REFUSED = [(name, kind) for name, kind in CASES if isinstance(outcome_of(name, kind), Refused)]


def content_of(name: str, kind: str, prefix: str = "ID") -> bytes:
    """The bytes of an input; compressed ones are made again with what stands for ids and sequences filled in."""

    def filled(text: bytes) -> bytes:
        return text.replace(b"ID", prefix.encode()).replace(b"SEQ", SEQUENCES[kind]).replace(b"SE", SEQUENCES[kind][:2])

    content = CATALOGUE[name][0]
    if name in COMPRESSED:
        codec = COMPRESSED[name]
        return codec.compress(filled(codec.decompress(content)))
    if name == "gzip with two members":
        text = filled(gzip.decompress(content))
        return gzip.compress(text[:7]) + gzip.compress(text[7:])
    return content if b"\0" in content and not content.startswith(b">") else filled(content)


def records_of(name: str, kind: str, prefix: str = "ID") -> list[tuple[str, str]]:
    sequence = SEQUENCES[kind].decode()
    records = outcome_of(name, kind).records
    return [
        (record_id.replace("ID", prefix), text.replace("SEQ", sequence).replace("SE", sequence[:2]))
        for record_id, text in records
    ]


def read_all(index: SequenceIndex) -> list[tuple[str, str]]:
    by_row = sorted(range(len(index)), key=lambda position: int(index.input_rows[position]))
    return [(record.sequence_id, record.sequence) for record in map(index.read, by_row)]


def embed(kind: str, *arguments: object):
    return run("embed", *arguments, "--model", MODELS[kind], "--devices", "cpu")


def check_refusal(ended, path, expected: Refused) -> None:
    assert ended.code == 65, ended
    assert "Traceback" not in ended.err
    where = f"{path}: " if expected.line is None else f"{path}:{expected.line}: "
    (told,) = [line for line in ended.err.splitlines() if line.startswith(where)]
    assert expected.what.replace("FILE", str(path)) in told
    assert expected.remedy in told.rpartition(expected.what.replace("FILE", str(path)))[2]


@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_cannot_be_used_ends_with_65_and_names_file_line_and_remedy(tmp_path, name, kind):
    path = tmp_path / "input.fasta"
    path.write_bytes(content_of(name, kind))
    ended = embed(kind, path, "-o", tmp_path / "out")
    check_refusal(ended, path, outcome_of(name, kind))
    assert ended.out == ""
    assert sorted(tmp_path.iterdir()) == [path], "a run that never began leaves nothing"


@pytest.mark.parametrize(("name", "kind"), ACCEPTED)
def test_what_can_be_used_gives_exactly_its_records(tmp_path, name, kind):
    path = tmp_path / "input.fasta"
    path.write_bytes(content_of(name, kind))
    ended = run("index", path, "-o", tmp_path / "index", "--kind", kind.lower())
    expected = records_of(name, kind)
    assert (ended.code, ended.err) == (0, "")
    assert f": {len(expected):,} sequences of 1 file(s)" in ended.out
    assert read_all(SequenceIndex.open(tmp_path / "index")) == expected


@pytest.mark.parametrize("kind", MODELS)
def test_everything_that_can_be_used_is_embedded_in_one_run(tmp_path, kind):
    names = [name for name, one in ACCEPTED if one == kind and name != "one line of 3 MB"]
    expected = []
    for number, name in enumerate(names):
        (tmp_path / f"{number}.fasta").write_bytes(content_of(name, kind, f"i{number}_"))
        expected += records_of(name, kind, f"i{number}_")
    out = tmp_path / "out"
    ended = embed(kind, *(tmp_path / f"{number}.fasta" for number in range(len(names))), "-o", out, "--json")
    assert ended.code == 0, ended.err
    outcome = json.loads(ended.out)
    assert (outcome["records"], outcome["rows"], outcome["missing"]) == (len(expected), len(expected), 0)
    manifest = json.loads((out / "run.json").read_text())
    assert [(item["path"], len(item["sha256"])) for item in manifest["inputs"]] == [
        (str((tmp_path / f"{number}.fasta").resolve()), 64) for number in range(len(names))
    ]
    unknown = "X" if kind == "protein" else "N"
    several = "XBZ" if kind == "protein" else "RYSWKMBDHVN"
    assert outcome["noticed"]["low_information"] == 1
    assert outcome["noticed"]["ambiguous"] == sum(text.count(one) for _, text in expected for one in several)
    assert outcome["noticed"]["mapped_j"] == (2 if kind == "protein" else 0)
    with read_embeddings(out) as rows:
        assert list(rows) == [name for name, _ in expected]
    with h5py.File(out / "embeddings.h5") as file:
        low = file["low_information"][()].tolist()
        assert low == [int(set(text) == {unknown}) for _, text in expected]
        if kind == "protein":
            cut = [len(text) if len(text) > 1022 else 0 for _, text in expected]
            assert file["truncated_from"][()].tolist() == cut
            assert sum(map(bool, cut)) == 1
        else:
            assert "truncated_from" not in file


@pytest.mark.parametrize("kind", MODELS)
def test_every_problem_of_a_file_is_told_at_once_and_twenty_at_the_most(tmp_path, kind):
    path, good = tmp_path / "input.fasta", SEQUENCES[kind]
    path.write_bytes(b">a\n%b-\n>b\n%b1\n>\n%b\n>a\n%b\n>long\n%b\n" % (good, good, good, good, good * 9))
    ended = embed(kind, path, "-o", tmp_path / "out", "--max-residues", "30", "--long=error")
    assert [line.split(": ")[0] for line in ended.problems] == [f"{path}:{n}" for n in (2, 4, 5, 7, 9)]
    assert "raise --max-residues, or use --long truncate" in ended.err
    path.write_bytes(b"".join(b">s%d\n-\n" % number for number in range(21)))
    ended = embed(kind, path, "-o", tmp_path / "out")
    assert ended.code == 65
    assert len(ended.problems) == 21
    assert "... and more: only the first 20 problems are shown" in ended.err


@pytest.mark.parametrize(
    ("option", "text", "kind", "sequence", "noticed"),
    [
        ("--gaps=remove", b"--SEQ.SE-Q\n", "protein", "SEQSEQ", {"removed_gaps": 4}),
        ("--gaps=remove", b"--SEQ.SE-Q\n", "DNA", "SEQSEQ", {"removed_gaps": 4}),
        ("--gaps=remove", b"SEQ*--\n", "protein", "SEQ", {"removed_gaps": 2, "stripped_stops": 1}),
        ("--stop=x", b"*SEQ**SEQ**\n", "protein", "XSEQXXSEQX", {"stops_as_x": 4, "stripped_stops": 1}),
    ],
)
def test_a_setting_reads_what_is_refused_without_it(tmp_path, option, text, kind, sequence, noticed):
    path, out, filled = tmp_path / "input.fasta", tmp_path / "index", SEQUENCES[kind]
    path.write_bytes(b">a\n" + text.replace(b"SE-Q", filled[:2] + b"-" + filled[2:]).replace(b"SEQ", filled))
    if option != "--gaps=remove" or b"*" not in text:
        assert run("index", path, "-o", out, "--kind", kind).code == 65
    assert run("index", path, "-o", out, "--kind", kind, option).code == 0
    index = SequenceIndex.open(out)
    assert read_all(index) == [("a", sequence.replace("SEQ", filled.decode()))]
    assert {name: index.counts[name] for name in noticed} == noticed


def test_stops_are_no_letters_of_dna_whatever_is_asked_for(tmp_path):
    path = tmp_path / "input.fasta"
    path.write_bytes(b">a\nAC*GT\n")
    ended = embed("DNA", path, "-o", tmp_path / "out", "--stop=x")
    check_refusal(ended, path, Refused(2, "'*' at column 3 stands for no nucleotide of DNA", NOT_DNA))


@pytest.mark.parametrize("kind", MODELS)
def test_bad_records_of_every_sort_are_left_out_and_listed_when_that_is_asked_for(tmp_path, kind):
    by_record = [
        name
        for name, one in REFUSED
        if one == kind
        and content_of(name, kind).startswith(b">")
        and "UTF-16" not in name
        and name
        not in {"old Mac CR", "header without sequence, last", "duplicate id", "> inside a line", "one CR inside"}
    ]
    assert len(by_record) > 20
    path, out = tmp_path / "input.fasta", tmp_path / "out"
    with path.open("wb") as file:
        for number, name in enumerate(by_record):
            text = content_of(name, kind, f"i{number}_")
            file.write(text.partition(b"\n>")[0] + b"\n>good%d\n%b\n" % (number, SEQUENCES[kind]))
    ended = run("index", path, "-o", out, "--kind", kind, "--on-bad-record=skip")
    assert ended.code == 0
    index = SequenceIndex.open(out)
    assert (len(index), index.num_skipped) == (len(by_record), len(by_record))
    skipped = list(index.skipped())
    for name, bad in zip(by_record, skipped, strict=True):
        assert outcome_of(name, kind).what.split(" (")[0] in bad.reason, name
    assert len(ended.err.splitlines()) == 21
    assert f"... and more: {len(by_record):,} records were skipped in all" in ended.err


def test_an_empty_input_gives_an_empty_result_only_when_that_is_asked_for(tmp_path):
    for name in ("1.fasta", "2.fasta"):
        (tmp_path / name).write_bytes(b"\n")
    arguments = (tmp_path / "1.fasta", tmp_path / "2.fasta", "-o", tmp_path / "out")
    assert embed("protein", *arguments).code == 65
    ended = embed("protein", *arguments, "--allow-empty", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["state"] == "complete"
    with read_embeddings(tmp_path / "out") as rows:
        assert len(rows) == 0
    assert run("verify", tmp_path / "out").code == 0
    assert embed("protein", *arguments).code == 65
    assert embed("protein", *arguments, "--allow-empty").code == 0


def make_folder(path):
    path.mkdir()


def make_dangling_link(path):
    path.symlink_to(path.with_name("nowhere"))


def make_pipe(path):
    os.mkfifo(path)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("make", "what", "remedy"),
    [
        (lambda path: None, "No such file or directory", "check the name"),
        (make_folder, "Is a directory", "name the FASTA files in it"),
        (make_dangling_link, "No such file or directory", "check the name"),
        (make_pipe, "not a regular file", "save it to a regular file first"),
    ],
    ids=["missing", "folder", "dangling link", "pipe"],
)
def test_what_is_no_readable_file_is_told_with_the_systems_text(tmp_path, make: Callable, what, remedy, kind):
    path = tmp_path / "input.fasta"
    make(path)
    check_refusal(embed(kind, path, "-o", tmp_path / "out"), path, Refused(None, what, remedy))


def test_a_file_without_permission_is_told_with_the_systems_text(tmp_path):
    path = tmp_path / "input.fasta"
    path.write_bytes(b">a\nMKV\n")
    path.chmod(0)
    with another_user():
        ended = run("index", path, "-o", tmp_path / "index")
    check_refusal(ended, path, Refused(None, "Permission denied", "check the name and the permissions"))


@pytest.mark.parametrize("kind", MODELS)
def test_links_and_names_with_blanks_and_other_letters_are_read(tmp_path, kind):
    folder = tmp_path / "Ordner mit Übung"
    folder.mkdir()
    (folder / "in put.fasta").write_bytes(b">a\n" + SEQUENCES[kind])
    (tmp_path / "link").symlink_to(folder / "in put.fasta")
    (tmp_path / "named.gz").write_bytes(b">b\n" + SEQUENCES[kind])
    ended = run("index", tmp_path / "link", tmp_path / "named.gz", "-o", tmp_path / "index", "--kind", kind)
    assert ended.code == 0, ended.err
    assert [file.real_path for file in SequenceIndex.open(tmp_path / "index").files] == [
        str(folder / "in put.fasta"),
        str(tmp_path / "named.gz"),
    ]


def test_a_process_of_its_own_says_the_same_and_nothing_else(tmp_path):
    names = ["duplicate id", "gzip cut short", "ANSI in the id", "random binary", "digits"]
    files = [tmp_path / f"{number}.fasta" for number in range(len(names))]
    for path, name in zip(files, names, strict=True):
        path.write_bytes(content_of(name, "protein", path.stem))
    done = subprocess.run(
        [sys.executable, "-m", "virnucpro", "embed", *files, "-o", tmp_path / "out", "--model", MODELS["protein"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (65, "")
    told = sorted(Ended(done.returncode, done.stdout, done.stderr).problems)
    assert len(told) == len(names)
    for line, path, name in zip(told, files, names, strict=True):
        assert line.startswith(f"{path}:")
        assert outcome_of(name, "protein").what.replace("FILE", str(path)) in line


@pytest.mark.slow
def test_the_library_takes_the_same_settings_and_refuses_what_is_none_of_them(tmp_path):
    path = tmp_path / "input.fasta"
    path.write_bytes(b">a\nMK-V*L*\n>b\nM1\n>long\n" + b"MKVL" * 9 + b"\n")
    settings = {"devices": "cpu", "gaps": "remove", "stop": "x", "on_bad_record": "skip", "allow_empty": True}
    with virnucpro.embed_fasta(path, tmp_path / "out", long="window", max_residues=20, **settings) as rows:
        assert list(rows) == ["a", "long"]
    assert (tmp_path / "out" / "failed_sequences.tsv").read_text().splitlines()[1:] == [
        f"b\t{path}:4: unexpected character '1' at column 2\t0"
    ]
    recorded = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert {name: recorded[name] for name in ("gaps", "stops", "on_bad_record", "long_policy")} == {
        "gaps": "remove",
        "stops": "x",
        "on_bad_record": "skip",
        "long_policy": "window",
    }
    for wrong in ({"gaps": "keep"}, {"stop": "y"}, {"on_bad_record": "drop"}, {"long": "cut"}):
        with pytest.raises(ConfigurationError, match="it should be"):
            virnucpro.embed_fasta(path, tmp_path / "other", devices="cpu", **wrong)
    with pytest.raises(BadInputError, match="gap '-' at column 3"):
        virnucpro.embed_fasta(path, tmp_path / "other", devices="cpu")


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("--gaps=remove", "gaps"),
        ("--stop=x", "stops"),
        ("--on-bad-record=skip", "on_bad_record"),
        ("--long=window", "long_policy"),
    ],
)
def test_a_finished_run_is_not_continued_under_other_rules(finished, option, setting):
    path, out = finished
    ended = embed("protein", path, "-o", out, option)
    assert ended.code == 78
    assert f"{setting} was " in ended.err
    assert embed("protein", path, "-o", out, "--long=error").code == 0, "nothing was cut, so nothing differs"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "input.fasta").write_bytes(b">a\nMKVL\n")
    assert embed("protein", folder / "input.fasta", "-o", folder / "out").code == 0
    return folder / "input.fasta", folder / "out"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_id_is_taken_exactly_where_the_names_of_its_chunks_have_room(tmp_path, soak_table):
    config = hash_prediction(tmp_path)
    config = replace(config, rules=replace(config.rules, on_bad_record="skip"))
    records = [
        (f"{chunks}_".ljust(id_bytes, "x"), "ATG" * (chunks * config.chunk_nt // 3))
        for chunks in (1, 9, 10, 99, 100)
        for id_bytes in range(1000, 1031)
    ]
    taken = {name for name, _ in records if len(f"{name}_chunk_{name.partition('_')[0]}F1") <= 1024}
    predict([write_fasta(tmp_path / "in.fa", records)], tmp_path / "out", config)
    rows = list(read_contig_calls(tmp_path / "out/contigs.tsv"))
    differing = len(taken ^ {row.contig for row in rows if row.length is not None})
    lost = len(records) - len(rows)
    soak_table("an id near the limit of its length", tries=len(records), lost=lost, differing=differing)
    assert (lost, differing) == (0, 0)
