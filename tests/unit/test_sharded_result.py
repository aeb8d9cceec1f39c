"""A result in shards is the result in one file: the same ids, rows and order, found without holding the ids."""

from __future__ import annotations

import shutil
import threading
from collections import Counter

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import HASH_WIDTH, hash_config
from tests.strategies import MadeRun, fasta_records, flip_bit
from virnucpro import durable, read_embeddings
from virnucpro.choices import AUTO_SHARDED_BYTES, AUTO_SHARDED_ROWS, ResultForm
from virnucpro.config import InputRules
from virnucpro.data.packing import make_plan
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import OutputError, ResultError
from virnucpro.pipeline.blocks.finished_blocks import seal_shard
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.run_layout import RunLayout
from virnucpro.store.reader import Embeddings
from virnucpro.store.results import hdf5, id_index, sharded_rows
from virnucpro.store.results.forms import choose_result_form
from virnucpro.store.results.hdf5 import most_rows_of_shard, shard_bounds

SHARDED, SINGLE = ResultForm.SHARDED, ResultForm.SINGLE


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 7)


@pytest.fixture
def run(tmp_path):
    records = [(f"s{n}", "ACDEFGHIKL"[n % 10 :] * (n % 5 + 1) + "MKV"[: n % 3]) for n in range(40)]
    made = MadeRun(tmp_path, [*records, ("copy", records[5][1])], max_residues=20)
    made.write_part(range(len(made.plan)))
    return made


def aggregate(run, form=SHARDED):
    return aggregate_shards(
        run.layout,
        run.index,
        run.plan,
        max_residues=run.config.max_residues,
        hidden_dim=run.config.hidden_dim,
        result_form=form,
    )


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def contents(path):
    """Ids, rows, and what is said of cut and uninformative sequences, of one file or of all shards in their order."""
    files = sorted(path.glob("shard-*.h5")) if path.is_dir() else [path]
    ids, rows, cut, low = [], [], [], []
    for each in files:
        with h5py.File(each) as file:
            ids += file["sequence_ids"][()].tolist()
            rows.append(file["embeddings"][()])
            cut += (file["truncated_from"][()] if "truncated_from" in file else np.zeros(len(rows[-1]))).tolist()
            low += (file["low_information"][()] if "low_information" in file else np.zeros(len(rows[-1]))).tolist()
    return ids, np.concatenate(rows).tobytes(), cut, low


def finished(run):
    """The folder of shards of a run in which nothing is missing."""
    result = aggregate(run)
    assert result.is_complete
    return result.output_path


def check_mapping(path, wanted):
    """Everything that a mapping of *wanted*, id -> vector, does."""
    with read_embeddings(path) as found:
        names = list(wanted)
        assert (len(found), len(found.ids), found.hidden_dim) == (len(names), len(names), HASH_WIDTH)
        assert list(found) == list(found.ids) == names
        assert "nobody" not in found
        assert 1 not in found
        assert found.get("nobody") is None
        assert all(name in found and name in found.ids for name in names)
        for name in names:
            assert found[name].dtype == np.float32
            assert found[name].tobytes() == wanted[name].tobytes()
        everything = np.stack(list(wanted.values())) if names else np.empty((0, HASH_WIDTH), np.float32)
        assert found.to_numpy().tobytes() == everything.tobytes()
        odd = [*names[::-2], *names[:3], *names[:3]]
        assert found.to_numpy(odd).tobytes() == b"".join(wanted[name].tobytes() for name in odd)
        assert found.to_numpy(iter([])).shape == (0, HASH_WIDTH)
        for which in (slice(2, 30, 3), slice(None, None, -1), slice(5, 5), slice(-4, None)):
            assert found.ids[which] == tuple(names[which])
        if names:
            assert (found.ids[0], found.ids[-1]) == (names[0], names[-1])
        with pytest.raises(IndexError):
            found.ids[len(names)]
        with pytest.raises(KeyError, match="nobody"):
            found["nobody"]
        with pytest.raises(KeyError, match="nobody"):
            found.to_numpy([*names[:1], "nobody"])
        assert f"{len(names)} sequences x {HASH_WIDTH}" in repr(found)


@given(records=fasta_records(max_size=40), rows=st.integers(1, 12), cut=st.integers(3, 30), data=st.data())
@settings(max_examples=16)
def test_shards_hold_what_one_file_holds_whatever_the_input_and_what_is_missing(
    tmp_path_factory, records, rows, cut, data
):
    hdf5.SHARD_ROWS = rows
    run = MadeRun(tmp_path_factory.mktemp("run"), records, token_budget=40, max_residues=cut)
    done = data.draw(st.sets(st.sampled_from(range(len(run.plan)))))
    for block in done:
        run.write_part([block])
    single, in_shards = aggregate(run, SINGLE), aggregate(run)
    assert (single.num_rows, single.num_truncated) == (in_shards.num_rows, in_shards.num_truncated)
    assert single.missing_positions.tolist() == in_shards.missing_positions.tolist()
    if not done:
        assert in_shards.output_path is None
        return
    assert in_shards.output_path.name == single.output_path.name.removesuffix(".h5")
    assert contents(in_shards.output_path) == contents(single.output_path)
    files = {f"{in_shards.output_path.name}/{name}" for name in bytes_of(in_shards.output_path)}
    assert in_shards.files == {name: durable.sha256_of(run.layout.output_dir / name) for name in files}
    assert len(files) == 1 + -(-in_shards.num_rows // rows)
    validate_result(in_shards.output_path, run.index, expected_rows=in_shards.num_rows, expected_files=in_shards.files)
    names = run.names_of(done)
    check_mapping(in_shards.output_path, {name: run.vector(name) for name, _ in records if name in names})


@given(data=st.data())
@settings(max_examples=15)
def test_the_bytes_are_the_same_whatever_the_parts_and_ranks_were(tmp_path_factory, data):
    run = MadeRun(tmp_path_factory.mktemp("run"), [(f"s{n}", "MKVLA"[n % 5 :] * (n % 9 + 1)) for n in range(50)])
    run.write_part(range(len(run.plan)))
    reference = aggregate(run)
    whole = bytes_of(reference.output_path)
    shutil.rmtree(run.layout.parts_dir)
    shutil.rmtree(reference.output_path)
    for blocks in np.array_split(data.draw(st.permutations(range(len(run.plan)))), data.draw(st.integers(1, 5))):
        if len(blocks):
            run.write_part(blocks.tolist())
        world_size = data.draw(st.integers(1, 4))
        rank = data.draw(st.integers(0, world_size - 1))
        seal_shard(rank, run.plan.rank_blocks(rank, world_size), run.plan, run.layout, hidden_dim=HASH_WIDTH)
    assert aggregate(run) == reference
    assert bytes_of(reference.output_path) == whole


def test_a_shard_is_an_embeddings_file_of_neighbouring_rows(run):
    path = finished(run)
    names = [name for name, _ in run.records]
    assert [each.name for each in sorted(path.iterdir())] == [
        "ids.index",
        *(f"shard-{number:05d}-of-00006.h5" for number in range(6)),
    ]
    for number, rows in enumerate(shard_bounds(len(names), rows_per_shard=7)):
        with Embeddings(path / f"shard-{number:05d}-of-00006.h5") as shard:
            assert list(shard.ids) == names[rows.start : rows.stop]
    check_mapping(path, {name: run.vector(name) for name in names})
    check_mapping(run.layout.output_dir, {name: run.vector(name) for name in names})


def test_an_input_without_records_gives_one_shard_without_rows(tmp_path):
    layout = RunLayout(tmp_path / "out")
    (tmp_path / "empty.fasta").write_text("")
    SequenceIndex.build(
        [tmp_path / "empty.fasta"], layout.index, unpack_dir=tmp_path, rules=InputRules(allow_empty=True)
    )
    index = SequenceIndex.open(layout.index)
    plan = make_plan(index, hash_config(), device_type="cpu")
    result = aggregate_shards(layout, index, plan, max_residues=9, hidden_dim=HASH_WIDTH, result_form=SHARDED)
    assert (result.num_rows, result.is_complete, len(result.files)) == (0, True, 2)
    validate_result(result.output_path, index, expected_rows=0, expected_files=result.files)
    check_mapping(layout.output_dir, {})


def test_ids_of_the_same_hash_keep_their_own_rows(run, monkeypatch):
    monkeypatch.setattr(id_index, "id_hash", lambda name: bytes([len(name)]) * 8)
    path = finished(run)
    check_mapping(path, {name: run.vector(name) for name, _ in run.records})


def test_an_id_that_stands_twice_is_not_guessed_at(run):
    path = finished(run)
    with h5py.File(path / "shard-00002-of-00006.h5", "r+") as file:
        file["sequence_ids"][3] = "s1"
    names = ["s1" if name == "s17" else name for name, _ in run.records]
    sizes = [each.stat().st_size for each in sorted(path.glob("shard-*"))]
    id_index.write_id_index(
        path / "ids.index", id_index.id_hashes(names), hidden_dim=HASH_WIDTH, rows_per_shard=7, shard_bytes=sizes
    )
    with read_embeddings(path) as found:
        assert found["s2"].tobytes() == run.vector("s2").tobytes()
        with pytest.raises(ResultError, match="an id has more than one row"):
            found["s1"]


def test_only_so_many_shards_are_open_at_a_time_and_none_after_the_end(run, monkeypatch):
    monkeypatch.setattr(sharded_rows, "MOST_OPEN_SHARDS", 2)
    path = finished(run)
    with read_embeddings(path) as found:
        for step in (1, 7, 13):
            for name, _ in run.records[::step]:
                assert found[name].tobytes() == run.vector(name).tobytes()
        assert len(found._rows._open) == 2
        ids = iter(found)
        first = next(ids)
        assert [found[name].shape for name in found.ids[30:33]] == [(HASH_WIDTH,)] * 3
        assert [first, *ids] == [name for name, _ in run.records]
    for shard in path.glob("shard-*.h5"):
        with h5py.File(shard, "r+"):  # refused by HDF5's own lock while it is open elsewhere
            pass
    with pytest.raises(ValueError, match="closed"):
        found["s1"]
    with pytest.raises(ValueError, match="closed"):
        list(found)


def test_several_threads_may_read_at_once(run, monkeypatch):
    monkeypatch.setattr(sharded_rows, "MOST_OPEN_SHARDS", 1)
    path = finished(run)
    wrong = Counter()
    with read_embeddings(path) as found:

        def read(offset):
            for name, _ in (run.records[offset:] + run.records[:offset]) * 4:
                try:
                    wrong[offset] += found[name].tobytes() != run.vector(name).tobytes()
                except Exception as error:  # noqa: BLE001  of another thread: told below
                    wrong[repr(error)] += 1

        threads = [threading.Thread(target=read, args=(9 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong.total(), wrong


# --- damage ---


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "spoil", "what"),
    [
        ("ids.index", lambda path: path.unlink(), r"embeddings/ids\.index: is missing"),
        ("ids.index", cut_short, r"ids\.index: damaged"),
        ("shard-00001-of-00006.h5", lambda path: path.unlink(), r"shard-00001-of-00006\.h5: is missing"),
        ("shard-00001-of-00006.h5", cut_short, r"shard-00001-of-00006\.h5: damaged: has \d+ bytes instead of \d+"),
        ("shard-00001-of-00006.h5", lambda path: path.write_bytes(bytes(path.stat().st_size)), r"shard-00001.*HDF5"),
    ],
)
def test_a_damaged_or_absent_file_is_named_by_the_reader_and_by_validation(run, name, spoil, what):
    path = finished(run)
    files = aggregate(run).files
    spoil(path / name)
    with pytest.raises(ResultError, match=what), read_embeddings(run.layout.output_dir) as found:
        found["s10"]
    with pytest.raises(ResultError, match=name):
        validate_result(path, run.index, expected_rows=41, expected_files=files)
    with pytest.raises(ResultError, match=name):
        validate_result(path, run.index, expected_rows=41, expected_files=None)


def test_a_flipped_bit_in_any_file_is_named_by_validation(run):
    result = aggregate(run)
    check = {"expected_rows": 41, "expected_files": result.files}
    for path in result.output_path.iterdir():
        for bit in (5, 4 * path.stat().st_size, 8 * path.stat().st_size - 3):
            flip_bit(path, bit)
            with pytest.raises(ResultError, match=f"{path.name}: damaged: its sha256"):
                validate_result(result.output_path, run.index, **check)
            flip_bit(path, bit)
    validate_result(result.output_path, run.index, **check)


def swap_files(path):
    one, two = path / "shard-00001-of-00006.h5", path / "shard-00002-of-00006.h5"
    aside = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(aside)


def swap_ids(path):
    with h5py.File(path / "shard-00001-of-00006.h5", "r+") as file:
        names = file["sequence_ids"][()]
        names[[3, 4]] = names[[4, 3]]
        file["sequence_ids"][...] = names


def put_nan(path):
    with h5py.File(path / "shard-00005-of-00006.h5", "r+") as file:
        file["embeddings"][5, 0] = np.nan


def lead_astray(path):
    names = [f"s{n}" for n in range(40)]
    sizes = [each.stat().st_size for each in sorted(path.glob("shard-*"))]
    hashes = id_index.id_hashes(["copy", *names])
    id_index.write_id_index(path / "ids.index", hashes, hidden_dim=HASH_WIDTH, rows_per_shard=7, shard_bytes=sizes)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (swap_files, "'s14' is not in the input, or in the wrong place"),
        (swap_ids, "'s11' is not in the input"),
        (put_nan, r"shard-00005-of-00006\.h5: a number in rows 0 to 8191 is not finite"),
        (lead_astray, r"ids\.index: does not lead to the ids of its shards"),
    ],
)
def test_validation_says_what_does_not_hold(run, change, what):
    path = finished(run)
    change(path)
    with pytest.raises(ResultError, match=what):
        validate_result(path, run.index, expected_rows=41, expected_files=None)


def test_validation_wants_every_row(run):
    with pytest.raises(ResultError, match=r"ids\.index: has 41 rows, expected 40"):
        validate_result(finished(run), run.index, expected_rows=40, expected_files=None)


# --- what is in the folder ---


def test_shards_of_another_number_and_an_old_index_do_not_stay_beside_the_new_ones(run, monkeypatch):
    path = finished(run)
    (path / "notes.txt").write_text("somebody's")
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 30)
    assert finished(run) == path
    assert {each.name for each in path.iterdir()} == {
        "ids.index",
        "notes.txt",
        "shard-00000-of-00002.h5",
        "shard-00001-of-00002.h5",
    }


def test_the_index_goes_before_a_shard_is_written_over(run, monkeypatch):
    path = finished(run)
    whole = bytes_of(path)

    def refuse(*_args, **_options):
        raise OutputError(path, "refused")

    monkeypatch.setattr("virnucpro.store.schema.write_rows", refuse)
    with pytest.raises(OutputError, match="refused"):
        aggregate(run)
    assert not (path / "ids.index").exists()
    with pytest.raises(ResultError, match=r"ids\.index: is missing"):
        read_embeddings(run.layout.output_dir)
    monkeypatch.undo()
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 7)
    finished(run)
    assert bytes_of(path) == whole


def test_a_whole_result_of_before_does_not_stand_beside_one_with_missing_rows(run):
    path = finished(run)
    shutil.rmtree(run.layout.parts_dir)
    run.write_part([0])
    result = aggregate(run)
    assert result.output_path == run.layout.result("", is_partial=True)
    assert not path.exists()
    with pytest.raises(ResultError, match=r"partial result only: open .*embeddings\.partial if that is enough"):
        read_embeddings(run.layout.output_dir)
    names = run.names_of([0])
    check_mapping(result.output_path, {name: run.vector(name) for name, _ in run.records if name in names})


# --- which form ---


@pytest.mark.parametrize(
    ("num_rows", "hidden_dim", "form"),
    [
        (0, 0, SINGLE),
        (AUTO_SHARDED_ROWS - 1, 0, SINGLE),
        (AUTO_SHARDED_ROWS, 0, SHARDED),
        (AUTO_SHARDED_BYTES // 10240 - 1, 2560, SINGLE),
        (AUTO_SHARDED_BYTES // 10240 + 1, 2560, SHARDED),
    ],
)
def test_large_results_are_sharded_by_themselves(num_rows, hidden_dim, form):
    assert choose_result_form(ResultForm.AUTO, num_rows=num_rows, hidden_dim=hidden_dim) is form
    for asked in (SINGLE, SHARDED):
        assert choose_result_form(asked, num_rows=num_rows, hidden_dim=hidden_dim) is asked


def test_a_shard_has_a_gibibyte_of_rows_or_a_million_of_them(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 1 << 20)
    assert most_rows_of_shard(2560) * 2560 * 4 <= 1 << 30 < (most_rows_of_shard(2560) + 1) * 2560 * 4
    assert most_rows_of_shard(8) == most_rows_of_shard(0) == 1 << 20
    assert most_rows_of_shard(1 << 30) == 1
