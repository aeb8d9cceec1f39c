"""The sequence index: its order, its copies, what makes it stale, and what reading through it promises."""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virnucpro.data.sequence_index import SequenceIndex, get_worker_indices
from virnucpro.errors import (
    BadInputError,
    ConfigurationError,
    IndexFormatError,
    InputChangedError,
    OutputError,
)

FASTA = b">a one\nMKV\n>b\nMKVLA\nMK\n>c\nMKV\n>d\nMJV\n>e\nmxv*\n"


def write(folder: Path, content: bytes = FASTA, name: str = "a.fasta") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def build(files, folder: Path) -> SequenceIndex:
    return SequenceIndex.build(files, folder / "the.index", unpack_dir=folder / "unpacked")


def ensure(files, folder: Path) -> SequenceIndex:
    return SequenceIndex.ensure(files, folder / "the.index", unpack_dir=folder / "unpacked")


def ids(index: SequenceIndex) -> list[str]:
    return index.sequence_ids(range(len(index)))


def test_sequences_are_sorted_longest_first_with_ties_in_the_order_of_the_input(tmp_path):
    index = build([write(tmp_path)], tmp_path)
    assert ids(index) == ["b", "a", "c", "d", "e"]
    assert index.lengths.tolist() == [7, 3, 3, 3, 3]
    assert index.input_rows.tolist() == [1, 0, 2, 3, 4]
    assert [index.sequence_id(position) for position in range(5)] == ids(index)
    assert [index.read(position).sequence for position in range(5)] == ["MKVLAMK", "MKV", "MKV", "MXV", "MXV"]


def test_copies_point_to_the_first_sequence_that_the_model_would_see_as_the_same(tmp_path):
    index = build([write(tmp_path)], tmp_path)
    assert index.representatives.tolist() == [0, 1, 1, 3, 3]
    assert index.copied.tolist() == [1, 3]
    assert index.rows_of(np.array([3, 0, 1])).tolist() == [2, 1, 2]
    assert index.sequence_hashes[1].tobytes() == hashlib.sha256(b"MKV").digest()[:16]


def test_files_keep_the_order_in_which_they_are_given(tmp_path):
    second, first = write(tmp_path, b">x\nMKV\n", "2.fa"), write(tmp_path, b">y\nMK\n>z\nMKV\n", "1.fa")
    index = build([second, first], tmp_path)
    assert ids(index) == ["x", "z", "y"]
    assert index.input_rows.tolist() == [0, 2, 1]
    assert [index.path_of(position) for position in range(3)] == [str(second), str(first), str(first)]
    assert [file.num_records for file in index.files] == [1, 2]


@settings(max_examples=60)
@given(
    sequences=st.lists(st.text("ACDJXacd", min_size=1, max_size=9), min_size=1, max_size=40),
    width=st.integers(1, 9),
    num_files=st.integers(1, 3),
)
def test_every_record_is_indexed_once_with_what_the_model_will_see(sequences, width, num_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    seen = [sequence.upper().replace("J", "X") for sequence in sequences]
    files = []
    share = -(-len(sequences) // num_files)
    for start in range(0, len(sequences), share):
        lines = []
        for number, sequence in enumerate(sequences[start : start + share], start=start):
            lines += [f">s{number} text", *(sequence[at : at + width] for at in range(0, len(sequence), width))]
        files.append(write(folder, "\n".join(lines).encode(), f"{start}.fa"))
    index = build(files, folder)
    records = [index.read(position) for position in range(len(index))]
    assert sorted(index.input_rows.tolist()) == list(range(len(sequences)))
    assert [record.sequence_id for record in records] == [f"s{row}" for row in index.input_rows]
    assert [record.sequence for record in records] == [seen[row] for row in index.input_rows]
    assert index.lengths.tolist() == [len(record.sequence) for record in records]
    keys = list(zip(-index.lengths, index.input_rows, strict=True))
    assert keys == sorted(keys)
    texts = [record.sequence for record in records]
    assert index.representatives.tolist() == [texts.index(text) for text in texts]


def test_a_record_takes_69_bytes_beside_its_id(tmp_path):
    sizes = []
    for count in (1000, 2000):
        write(tmp_path, b"".join(b">s%06d\nMKV\n" % number for number in range(count)))
        sizes.append(build([tmp_path / "a.fasta"], tmp_path).path.stat().st_size)
    assert (sizes[1] - sizes[0]) / 1000 == pytest.approx(69 + len("s000000"), abs=0.1)


def test_the_index_does_not_depend_on_dates_or_on_when_it_is_built(tmp_path):
    path = write(tmp_path)
    first = build([path], tmp_path).path.read_bytes()
    os.utime(path, (1, 1))
    assert build([path], tmp_path).path.read_bytes() == first


# --- memory ----------------------------------------------------------------------------------------------------------

PEAK_GROWTH = """
import sys
from pathlib import Path
from virnucpro.data.sequence_index import SequenceIndex
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
folder = Path(sys.argv[1])
(folder / "small.fa").write_bytes(b">a\\nM\\n" * 1)
SequenceIndex.build([folder / "small.fa"], folder / "i", unpack_dir=folder)
before = peak()
index = SequenceIndex.build([folder / "big.fa"], folder / "i", unpack_dir=folder)
print(peak() - before, index.lengths[0], index.sequence_hashes[0].tobytes().hex())
"""


def test_one_line_of_250_megabytes_is_read_in_constant_memory(tmp_path):
    digest = hashlib.sha256()
    with (tmp_path / "big.fa").open("wb") as file:
        file.write(b">one\n")
        for _ in range(250):
            file.write(b"ACDEFGHIKL" * 100_000)
            digest.update(b"ACDEFGHIKL" * 100_000)
    command = [sys.executable, "-c", PEAK_GROWTH, str(tmp_path)]
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, env=path).stdout.split()
    assert told[1:] == ["250000000", digest.digest()[:16].hex()]
    assert int(told[0]) < 16 << 10  # KiB


def test_a_large_index_opens_at_once(tmp_path):
    write(tmp_path, b"".join(b">s%d\nMKV\n" % number for number in range(200_000)))
    build([tmp_path / "a.fasta"], tmp_path)
    start = time.perf_counter()
    index = SequenceIndex.open(tmp_path / "the.index")
    assert index.lengths[-1] == 3
    assert time.perf_counter() - start < 0.1


# --- stale or damaged ------------------------------------------------------------------------------------------------

CHANGED = FASTA.replace(b"MKVLA", b"MKVLC")


def new_mtime(path: Path) -> None:
    path.write_bytes(CHANGED)
    os.utime(path, (2e9, 2e9))


def restored_older_file(path: Path) -> None:
    path.write_bytes(CHANGED)
    os.utime(path, (1e9, 1e9))


def same_mtime(path: Path) -> None:
    before = path.stat()
    path.write_bytes(CHANGED)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(FASTA.index(b"LA") + 1)
        file.write(b"C")


def moved_over(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(CHANGED)
    other.replace(path)


EDITS = [new_mtime, restored_older_file, same_mtime, in_place, moved_over]


@pytest.mark.parametrize("edit", EDITS)
def test_any_change_of_content_rebuilds_the_index(edit, tmp_path):
    path = write(tmp_path)
    before = ensure([path], tmp_path)
    edit(path)
    after = ensure([path], tmp_path)
    assert after.read(0).sequence == "MKVLCMK"
    assert after.content_fingerprint != before.content_fingerprint


@pytest.mark.parametrize("edit", EDITS)
def test_any_change_between_indexing_and_reading_is_refused(edit, tmp_path):
    path = write(tmp_path)
    index = build([path], tmp_path)
    edit(path)
    with pytest.raises(InputChangedError, match=r"changed after it was indexed \(seen at record b\)"):
        index.read(0)


def test_a_shorter_or_reordered_list_rebuilds_the_index(tmp_path):
    files = [write(tmp_path), write(tmp_path, b">z\nMMMMMMMMM\n", "b.fasta")]
    assert ids(ensure(files, tmp_path)) == ["z", "b", "a", "c", "d", "e"]
    assert ensure(files[::-1], tmp_path).input_rows.tolist() == [0, 2, 1, 3, 4, 5]
    assert ids(ensure(files[:1], tmp_path)) == ["b", "a", "c", "d", "e"]


def test_touching_a_file_keeps_the_index(tmp_path):
    path = write(tmp_path)
    before = ensure([path], tmp_path).path.stat()
    os.utime(path, (2e9, 2e9))
    index = ensure([path], tmp_path)
    after = index.path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert index.read(0).sequence == "MKVLAMK"


@pytest.mark.parametrize("content", [b">a one\nMKV\n", b"", FASTA[3:]], ids=["cut", "emptied", "shifted"])
def test_a_file_cut_or_shifted_after_indexing_is_refused(content, tmp_path):
    path = write(tmp_path)
    index = build([path], tmp_path)
    path.write_bytes(content)
    with pytest.raises(InputChangedError):
        index.read(0)


def test_a_file_removed_after_indexing_is_refused(tmp_path):
    path = write(tmp_path)
    index = build([path], tmp_path)
    path.unlink()
    with pytest.raises(InputChangedError):
        index.read(0)
    with pytest.raises(BadInputError, match="No such file or directory"):
        ensure([path], tmp_path)


def test_another_id_with_the_same_sequence_is_refused(tmp_path):
    path = write(tmp_path)
    index = build([path], tmp_path)
    path.write_bytes(FASTA.replace(b">b\n", b">B\n"))
    with pytest.raises(InputChangedError):
        index.read(0)


@pytest.mark.parametrize("damage", ["removed", "changed", "cut"])
def test_a_bad_unpacked_copy_is_made_again(damage, tmp_path):
    path = write(tmp_path, gzip.compress(FASTA), "a.fasta.gz")
    index = ensure([path], tmp_path)
    copy = Path(index.files[0].read_path)
    assert copy.parent == tmp_path / "unpacked"
    if damage == "removed":
        copy.unlink()
    else:
        copy.write_bytes(CHANGED if damage == "changed" else FASTA[:9])
    again = ensure([path], tmp_path)
    assert copy.read_bytes() == FASTA
    assert again.read(0).sequence == "MKVLAMK"
    assert again.files[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert again.files[0].size_bytes == path.stat().st_size


def test_links_are_followed_and_names_with_spaces_work(tmp_path):
    path = write(tmp_path, name="ä file.fasta")
    link = tmp_path / "link"
    link.symlink_to(path)
    index = build([link], tmp_path)
    assert index.files[0].path == str(link)
    assert index.files[0].real_path == str(path)
    assert index.read(0).sequence_id == "b"


def flip_a_bit(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda content: content[:-1], "bytes do not match its header"),
        (lambda content: content[:20], "truncated"),
        (lambda content: b"", "truncated"),
        (lambda content: content + b"x", "bytes do not match its header"),
        (lambda content: flip_a_bit(content, 0), "does not start with an index's magic"),
        (lambda content: flip_a_bit(content, 8), "version"),
        (lambda content: flip_a_bit(content, len(content) - 9), "description is damaged"),
        (lambda content: flip_a_bit(content, 16), "bytes do not match its header"),
    ],
)
def test_a_file_that_is_no_usable_index_is_refused(change, what, tmp_path):
    path = build([write(tmp_path)], tmp_path).path
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(IndexFormatError, match=what):
        SequenceIndex.open(path)


def test_a_missing_index_is_refused_with_the_systems_text(tmp_path):
    with pytest.raises(IndexFormatError, match="No such file or directory"):
        SequenceIndex.open(tmp_path / "none")


def test_an_index_with_any_flipped_bit_is_built_again(tmp_path):
    source = write(tmp_path)
    good = build([source], tmp_path).path.read_bytes()
    for at in range(0, len(good), 37):
        (tmp_path / "the.index").write_bytes(flip_a_bit(good, at))
        ensure([source], tmp_path)
        assert (tmp_path / "the.index").read_bytes() == good


def test_an_input_is_never_overwritten_by_its_index(tmp_path):
    path = write(tmp_path)
    with pytest.raises(OutputError, match="one of the inputs"):
        SequenceIndex.build([path], path, unpack_dir=tmp_path)
    assert path.read_bytes() == FASTA


def test_an_index_that_cannot_be_written_is_an_output_error_and_leaves_nothing(tmp_path):
    path = write(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError):
        SequenceIndex.build([path], tmp_path / "folder", unpack_dir=tmp_path)
    with pytest.raises(OutputError):
        SequenceIndex.build([path], path / "below" / "index", unpack_dir=tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.fasta", "folder"]


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_pickled_index_opens_the_same_file_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    index = SequenceIndex.build(["a.fasta"], Path("the.index"), unpack_dir=Path("unpacked"))
    data = pickle.dumps(index)
    monkeypatch.chdir("/")
    copy = pickle.loads(data)
    assert len(data) < 1000
    assert copy.read(0) == index.read(0)
    assert copy.content_fingerprint == index.content_fingerprint


def test_a_pickled_index_is_refused_once_it_was_rebuilt(tmp_path):
    path = write(tmp_path)
    data = pickle.dumps(build([path], tmp_path))
    path.write_bytes(CHANGED)
    build([path], tmp_path)
    with pytest.raises(IndexFormatError, match="rebuilt while a run used it"):
        pickle.loads(data)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_more_files_than_may_be_open_at_once_can_be_read(tmp_path):
    files = [write(tmp_path, b">s%d\nMK\n" % number, f"{number}.fa") for number in range(150)]
    index = build(files, tmp_path)
    before = open_files()
    assert [index.read(position).sequence_id for position in range(150)] == [f"s{number}" for number in range(150)]
    assert open_files() - before <= 64
    del index
    assert open_files() <= before


@dataclass
class Plan:
    blocks: list[list[int]]

    def __len__(self) -> int:
        return len(self.blocks)

    def block_positions(self, block: int) -> np.ndarray:
        return np.asarray(self.blocks[block], dtype=np.int64)


@given(num_blocks=st.integers(0, 9), world_size=st.integers(1, 7))
def test_every_block_goes_to_exactly_one_rank_in_order(num_blocks, world_size):
    plan = Plan([[3 * block, 3 * block + 1, 3 * block + 2] for block in range(num_blocks)])
    shares = [get_worker_indices([], rank, world_size, plan) for rank in range(world_size)]
    assert sorted(np.concatenate(shares).tolist()) == list(range(3 * num_blocks))
    assert all(share.dtype == np.int64 and (np.diff(share) > 0).all() for share in shares)
    assert all((share[::3] // 3 % world_size == rank).all() for rank, share in enumerate(shares))


def test_without_a_plan_ranks_take_every_nth_sequence(tmp_path):
    index = build([write(tmp_path)], tmp_path)
    assert [get_worker_indices(index, rank, 2).tolist() for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert get_worker_indices(index, 6, 7).tolist() == []


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_a_configuration_error(rank, world_size):
    with pytest.raises(ConfigurationError, match="does not exist"):
        get_worker_indices([], rank, world_size)
