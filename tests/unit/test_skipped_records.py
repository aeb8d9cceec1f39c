"""Bad records that are left out are listed, and everything still adds up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import hash_config, hash_vector
from virnucpro.config import InputRules
from virnucpro.data.index.build import lines_at
from virnucpro.data.reading.problems import SkippedRecords, read_skipped
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, ExitCode, WorkersFailedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.store.reader import read_embeddings

SKIP = InputRules(on_bad_record="skip")

FIRST = b">a\nMKV\n>gap\nMK-V\n>b\nMK*\n>a again\nWWW\n>x\nXXX\n"
SECOND = b">empty\n\n>b\nMKV\n>two words\nM1\n>c\nKKK\n"


def build(folder: Path, rules: InputRules = SKIP, *contents: bytes) -> SequenceIndex:
    files = []
    for number, content in enumerate(contents):
        files.append(folder / f"{number}.fa")
        files[-1].write_bytes(content)
    return SequenceIndex.build(files, folder / "index", unpack_dir=folder, rules=rules)


def test_what_is_left_out_is_known_by_file_line_id_and_reason(tmp_path):
    index = build(tmp_path, SKIP, FIRST, SECOND)
    first, second = tmp_path / "0.fa", tmp_path / "1.fa"
    assert index.sequence_ids(range(len(index))) == ["a", "x", "c", "b"]
    assert [(bad.sequence_id, bad.reason) for bad in index.skipped()] == [
        ("gap", f"{first}:4: gap '-' at column 3"),
        ("empty", f"{second}:1: empty sequence"),
        ("two", f"{second}:6: unexpected character '1' at column 2"),
        ("a", f"{first}:7: duplicate id, first at {first}:1"),
        ("b", f"{second}:3: duplicate id, first at {first}:5"),
    ]
    assert (len(index), index.num_skipped, index.num_records) == (4, 5, 9)
    assert [index.read(position).sequence for position in range(4)] == ["MKV", "XXX", "KKK", "MK"]
    assert index.low_information.tolist() == [0, 1, 0, 0]


def test_a_run_leaves_bad_records_out_lists_them_and_ends_complete(tmp_path):
    (tmp_path / "0.fa").write_bytes(FIRST)
    (tmp_path / "1.fa").write_bytes(SECOND)
    result = run_embedding(
        [tmp_path / "0.fa", tmp_path / "1.fa"], tmp_path / "out", hash_config(on_bad_record="skip"), [CPU]
    )
    result.raise_unless(allow_partial=False)
    assert (result.state, result.num_records, result.num_rows, result.num_skipped, result.num_missing) == (
        "complete",
        9,
        4,
        5,
        0,
    )
    assert "5 invalid records were skipped (listed in failed_sequences.tsv)" in result.notes()
    with read_embeddings(tmp_path / "out") as rows:
        assert rows.ids == ("a", "b", "x", "c")
        assert (rows["b"] == hash_vector("MK")).all()
    with h5py.File(tmp_path / "out" / "embeddings.h5") as file:
        assert file["low_information"][()].tolist() == [0, 0, 1, 0]
    lines = (tmp_path / "out" / "failed_sequences.tsv").read_text().splitlines()
    assert lines[0] == "sequence_id\treason\tattempts"
    assert [line.split("\t")[::2] for line in lines[1:]] == [[name, "0"] for name in ("gap", "empty", "two", "a", "b")]
    found = verify_run(tmp_path / "out")
    assert (found.state, found.problems, found.num_skipped) == ("complete", [], 5)


def test_other_rules_make_another_index(tmp_path):
    good = build(tmp_path, SKIP, b">a\nMK-V\n>b\nMK\n")
    assert len(good) == 1
    again = SequenceIndex.ensure(
        [tmp_path / "0.fa"], tmp_path / "index", unpack_dir=tmp_path, rules=InputRules(gaps="remove")
    )
    assert (len(again), again.counts["removed_gaps"], again.read(0).sequence) == (2, 1, "MKV")
    same = SequenceIndex.ensure(
        [tmp_path / "0.fa"], tmp_path / "index", unpack_dir=tmp_path, rules=InputRules(gaps="remove")
    )
    assert same.file_sha256 == again.file_sha256
    with pytest.raises(BadInputError, match="gap '-' at column 3"):
        SequenceIndex.ensure([tmp_path / "0.fa"], tmp_path / "index", unpack_dir=tmp_path)


def test_an_input_of_bad_records_only_is_refused_and_shows_the_first_of_them(tmp_path):
    with pytest.raises(BadInputError) as caught:
        build(tmp_path, SKIP, b"".join(b">s%d\n-\n" % number for number in range(1234)))
    *shown, last = str(caught.value).splitlines()
    assert len(shown) == 19
    assert shown[0] == f"{tmp_path}/0.fa:2: gap '-' at column 1 (s0): fix or remove it"
    assert last.startswith("input: no record is left: all 1,234 are bad: fix them, or use --allow-empty")
    empty = build(tmp_path, InputRules(on_bad_record="skip", allow_empty=True), b">a\n-\n")
    assert (len(empty), empty.num_skipped) == (0, 1)


def test_a_header_without_end_costs_one_record_only(tmp_path):
    index = build(tmp_path, SKIP, b">a\nM\n>" + b"h" * 3_000_000 + b"\n>b\nK\n")
    assert index.sequence_ids(range(2)) == ["a", "b"]
    (bad,) = index.skipped()
    assert (bad.line, bad.what) == (3, "header of more than 65536 bytes")
    assert len(bad.sequence_id) == 1024


ids = st.binary(max_size=20) | st.text(max_size=20).map(str.encode)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**9), ids, st.text(max_size=9)), max_size=30))
def test_whatever_is_left_out_comes_back_as_one_line_of_a_table(added):
    skipped = SkippedRecords()
    for one in added:
        skipped.add(*one)
    read = list(read_skipped(b"".join(skipped.pieces()), ["a", "b\tb", "c\nc"]))
    assert [(bad.path, bad.line) for bad in read] == [(["a", "b\tb", "c\nc"][one[0]], one[1]) for one in added]
    assert all(text.isprintable() for bad in read for text in (bad.sequence_id, bad.reason))


@given(st.text("a\n", max_size=60), st.data())
def test_lines_are_those_of_counting(tmp_path_factory, text, data):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_text(text)
    offsets = data.draw(st.lists(st.integers(0, max(0, len(text) - 1)), max_size=8))
    import numpy as np

    lines = lines_at(str(path), np.array(offsets, dtype=np.int64))
    assert lines.tolist() == [1 + text[:offset].count("\n") for offset in offsets]


PEAK_GROWTH = """
import sys
from pathlib import Path
from virnucpro.config import InputRules
from virnucpro.data.sequence_index import SequenceIndex
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
folder, rules = Path(sys.argv[1]), InputRules(on_bad_record="skip")
(folder / "small.fa").write_bytes(b">a\\nM\\n>b\\n-\\n>a\\nM\\n")
SequenceIndex.build([folder / "small.fa"], folder / "i", unpack_dir=folder, rules=rules)
before = peak()
index = SequenceIndex.build([folder / "big.fa"], folder / "i", unpack_dir=folder, rules=rules)
print(peak() - before, len(index), index.num_skipped, sum(1 for _ in index.skipped()))
"""


@pytest.mark.parametrize(
    ("bad", "count"),
    [(b"M-V", 100_000), (b"MKV", 100_000), pytest.param(b"MKV", 1_000_000, marks=pytest.mark.slow)],
    ids=["gaps", "duplicates", "a million duplicates"],
)
def test_many_bad_records_take_little_memory(tmp_path, bad, count):
    with (tmp_path / "big.fa").open("wb") as file:
        file.write(b">s0\nMKV\n")
        for number in range(count):
            file.write(b">s%d\n%b\n" % (number % 1000 if bad == b"MKV" else number + 1, bad))
    command = [sys.executable, "-c", PEAK_GROWTH, str(tmp_path)]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200, env=path).stdout.split()
    kept = 1000 if bad == b"MKV" else 1
    assert list(map(int, told[1:])) == [kept, count + 1 - kept, count + 1 - kept]
    print(f"{int(told[0]) >> 10} MiB")
    assert int(told[0]) < (32 << 10) + count * 250 // 1024  # KiB


def test_what_is_left_out_and_what_fails_are_told_apart_and_add_up(tmp_path):
    (tmp_path / "0.fa").write_bytes(FIRST)
    config = hash_config(
        on_bad_record="skip", loader="tests.fakes:load_poisoned_model", weights_path="MK", token_budget=5
    )
    result = run_embedding([tmp_path / "0.fa"], tmp_path / "out", config, [CPU])
    assert (result.state, result.num_records, result.num_rows, result.num_skipped, result.num_missing) == (
        "partial",
        5,
        2,
        2,
        1,
    )
    with pytest.raises(WorkersFailedError) as caught:
        result.raise_unless(allow_partial=False)
    assert caught.value.exit_code == ExitCode.PARTIAL
    lines = (tmp_path / "out" / "failed_sequences.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[0] for line in lines] == ["gap", "a", "b"]
    assert [line.split("\t")[2] == "0" for line in lines] == [True, True, False]
    found = verify_run(tmp_path / "out")
    assert (found.state, found.problems, found.num_skipped) == ("partial", [], 2)
