"""
Row 23, the random half: whatever bytes an input holds, it is indexed, or refused by name, line and remedy.

``fuzz_one`` is one example, for anything that makes bytes; the short version here is the same each time, ``make soak``
tries thousands of others.
"""

from __future__ import annotations

import gzip
import random
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command_line import run
from virnucpro.data.sequence_index import SequenceIndex

if TYPE_CHECKING:
    from pathlib import Path

LETTERS = {"protein": set("ABCDEFGHIKLMNOPQRSTUVWXYZ"), "DNA": set("ACGTRYSWKMBDHVN")}
OPTIONS = (
    (),
    ("--on-bad-record=skip",),
    ("--gaps=remove", "--stop=x"),
    ("--gaps=remove", "--stop=x", "--on-bad-record=skip"),
    ("--allow-empty", "--on-bad-record=skip"),
)
ODD = [
    b"\n",
    b"\n>",
    b">",
    b"\r",
    b"\r\n",
    b"*",
    b"-",
    b".",
    b" ",
    b"\t",
    b"\0",
    b"\x1b",
    b"\xff",
    b"\xc3\xa9",
    b"<eos>",
]
ODD += [b"J", b"X" * 9, b"N" * 9, b"@", b"7", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"> \n", b">" + b"i" * 1025 + b"\n"]


def fuzz_one(data: bytes, folder: Path, *, kind: str = "protein", options: tuple[str, ...] = ()) -> str:
    """
    Give one input to the command line and check what comes out.

    Args:
        data: The bytes of the input file.
        folder: A folder to work in; its files are replaced.
        kind: ``protein`` or ``DNA``.
        options: Further options of ``virnucpro index``.

    Returns:
        ``indexed`` or ``refused``.

    Raises:
        AssertionError: A traceback, an exit code that is neither 0 nor 65, no record with exit code 0, a refusal that
            does not name the file, a record that does not add up or holds letters that the model must not see.
    """
    path, index_path = folder / "fuzzed.fasta", folder / "fuzzed.index"
    path.write_bytes(data)
    ended = run("index", path, "-o", index_path, "--kind", kind, *options)
    assert "Traceback" not in ended.err, ended.err
    if ended.code != 0:
        assert ended.code == 65, ended
        lines = ended.err.splitlines()
        assert 0 < len(lines) <= 21
        named = re.compile(rf"({re.escape(str(path))}(:\d+)?|input): .+: .+|\.\.\. and more: .*", re.DOTALL)
        assert all(named.fullmatch(line) for line in lines), ended.err
        assert all(line.isprintable() for line in lines), "what a terminal could act on is escaped"
        return "refused"
    index = SequenceIndex.open(index_path)
    skipped = list(index.skipped())
    assert len(index) + len(skipped) == index.num_records
    assert len(index) > 0 or "--allow-empty" in options
    assert f": {len(index):,} sequences of 1 file(s)" in ended.out
    assert not skipped or "--on-bad-record=skip" in options
    for position in range(len(index)):
        record = index.read(position)
        assert record.sequence
        assert set(record.sequence) <= LETTERS[kind]
    names = index.sequence_ids(range(len(index)))
    assert len(set(names)) == len(names)
    assert all(names)
    return "indexed"


def mutated(data: bytes, chooser: random.Random) -> bytes:
    """Return *data* with one to five odd things done to it: bytes put in, taken out, exchanged, doubled, cut off."""
    for _ in range(chooser.randint(1, 5)):
        at = chooser.randint(0, len(data))
        end = min(len(data), at + chooser.choice([1, 1, 2, 30, 300]))
        how = chooser.randrange(6)
        if how < 3:
            data = data[:at] + chooser.choice(ODD) + data[at if how else end :]
        elif how == 3:
            data = data[:at] + data[end:]
        elif how == 4:
            data = data[:end] + data[at:end] + data[end:]
        else:
            data = data[:at]
    return data


def pick(chooser: random.Random, sources: dict[str, bytes]) -> tuple[bytes, str, tuple[str, ...]]:
    """Choose an input for ``fuzz_one``: bytes, kind, options."""
    kind = chooser.choice(sorted(sources))
    if chooser.random() < 0.15:
        data = chooser.randbytes(chooser.randint(0, 400))
    elif chooser.random() < 0.1:
        data = b"".join(chooser.choice([*ODD, b">a", b">b x", b"ACGT"]) for _ in range(chooser.randint(0, 40)))
    else:
        data = mutated(sources[kind], chooser)
    if chooser.random() < 0.1:
        data = gzip.compress(data, mtime=0)
        data = mutated(data, chooser) if chooser.random() < 0.3 else data
    return data, kind, chooser.choice(OPTIONS)


@pytest.fixture
def sources(examples_dir) -> dict[str, bytes]:
    """Real proteins, and DNA: the same letters as far as DNA has them."""
    proteins = b">" + b">".join((examples_dir / "proteins.fasta").read_bytes().split(b">")[1:9])
    chooser = random.Random(5)
    dna = b"".join(
        b">contig_%d real\n" % number + bytes(chooser.choices(b"ACGTacgtN", k=chooser.randint(40, 400))) + b"\n"
        for number in range(8)
    )
    return {"protein": proteins, "DNA": dna}


def fuzz(number: int, seed: int, sources: dict[str, bytes], folder: Path) -> dict[str, int]:
    """Try *number* inputs; return how many were indexed and refused."""
    ended = {"indexed": 0, "refused": 0}
    for example in range(number):
        data, kind, options = pick(random.Random(f"{seed} {example}"), sources)
        try:
            ended[fuzz_one(data, folder, kind=kind, options=options)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, example {example}: {kind} {options} {data[:2000]!r}")
            raise
    return ended


def test_changed_real_input_is_indexed_or_refused_by_name_and_line(tmp_path, sources, seed):
    ended = fuzz(250, seed, sources, tmp_path)
    print(ended)
    assert min(ended.values()) > 25, "both ways must have been gone"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_thousands_of_changed_inputs_are_indexed_or_refused(tmp_path, sources, seed, soak_table):
    ended = fuzz(5000, seed, sources, tmp_path)
    soak_table("fuzzed FASTA files", tries=5000, note=f"{ended['indexed']} indexed, {ended['refused']} refused")


@settings(max_examples=60)
@given(data=st.binary(max_size=300), kind=st.sampled_from(sorted(LETTERS)), options=st.sampled_from(OPTIONS))
def test_any_bytes_are_indexed_or_refused(data, kind, options, tmp_path_factory):
    fuzz_one(data, tmp_path_factory.mktemp("fuzz"), kind=kind, options=options)
    fuzz_one(b">a\n" + data, tmp_path_factory.mktemp("fuzz"), kind=kind, options=options)
