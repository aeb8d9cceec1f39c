"""What an HDF5 file must be before it is read, and the mapping that reads it."""

from __future__ import annotations

import random

import h5py
import numpy as np
import pytest

from virnucpro import durable, read_embeddings
from virnucpro.errors import ResultError
from virnucpro.run_layout import RunLayout
from virnucpro.store import schema
from virnucpro.store.reader import Embeddings

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = ["z", "a", "é/..", "m"]


def write_result(path, rows=ROWS, ids=IDS, dtype=schema.UTF8):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("embeddings", data=rows)
        file.create_dataset("sequence_ids", data=ids, dtype=dtype)
    return path


def soft_link(file, folder):
    file["elsewhere"] = h5py.SoftLink("/embeddings")


def dangling_soft_link(file, folder):
    file["elsewhere"] = h5py.SoftLink("/nowhere")


def external_link(file, folder):
    write_result(folder / "other.h5")
    file["elsewhere"] = h5py.ExternalLink("other.h5", "/embeddings")


def external_storage(file, folder):
    (folder / "secret").write_bytes(bytes(48))
    file.create_dataset("elsewhere", (4, 3), dtype="f4", external=[(str(folder / "secret"), 0, 48)])


def virtual_dataset(file, folder):
    other = write_result(folder / "other.h5")
    layout = h5py.VirtualLayout(shape=(4, 3), dtype="f4")
    layout[:] = h5py.VirtualSource(str(other), "embeddings", shape=(4, 3))
    file.create_virtual_dataset("elsewhere", layout)


def group(file, folder):
    file.create_group("elsewhere")


def named_type(file, folder):
    file["elsewhere"] = np.dtype("f4")


FOREIGN = [soft_link, dangling_soft_link, external_link, external_storage, virtual_dataset, group, named_type]


@pytest.mark.parametrize("add", FOREIGN, ids=lambda add: add.__name__)
def test_anything_but_hard_links_to_plain_datasets_is_refused(tmp_path, add):
    path = write_result(tmp_path / "result.h5")
    schema.open_checked(path).close()
    with h5py.File(path, "r+") as file:
        add(file, tmp_path)
    with pytest.raises(ResultError, match=r"'elsewhere'.*refused"):
        schema.open_checked(path)


@pytest.mark.parametrize("add", FOREIGN[:5], ids=lambda add: add.__name__)
def test_rows_that_lie_outside_the_file_are_refused(tmp_path, add):
    path = write_result(tmp_path / "result.h5")
    with h5py.File(path, "r+") as file:
        add(file, tmp_path)
        del file["embeddings"]
        file.move("elsewhere", "embeddings")
    with pytest.raises(ResultError, match=r"'embeddings'.*refused"):
        read_embeddings(path)


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        (ROWS.astype(np.float64), IDS),
        (ROWS.astype(np.float16), IDS),
        (ROWS.astype(">f4"), IDS),
        (ROWS.astype(np.int32), IDS),
        (ROWS[0], IDS[:3]),
        (ROWS[None], IDS[:1]),
        (ROWS, IDS[:3]),
        (ROWS[:3], IDS),
        (ROWS, [IDS]),
    ],
)
def test_another_type_or_shape_is_refused(tmp_path, rows, ids):
    with pytest.raises(ResultError, match="expected"):
        Embeddings(write_result(tmp_path / "result.h5", rows, ids))


def test_ids_that_are_numbers_are_refused(tmp_path):
    with pytest.raises(ResultError, match="expected one id"):
        Embeddings(write_result(tmp_path / "result.h5", ids=[1, 2, 3, 4], dtype="i8"))


@pytest.mark.parametrize("name", ["embeddings", "sequence_ids"])
def test_a_missing_dataset_is_named(tmp_path, name):
    path = write_result(tmp_path / "result.h5")
    with h5py.File(path, "r+") as file:
        del file[name]
    with pytest.raises(ResultError, match=f"no dataset '{name}'"):
        Embeddings(path)


def test_an_id_that_is_not_utf8_is_refused(tmp_path):
    path = write_result(tmp_path / "result.h5", ids=[b"a", b"b", b"caf\xe9", b"d"])
    with pytest.raises(ResultError, match="not UTF-8"):
        Embeddings(path)


def test_an_id_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(ResultError, match="more than one row"):
        Embeddings(write_result(tmp_path / "result.h5", ids=["a", "b", "a", "c"]))


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all", b"\x89HDF\r\n\x1a\n" + bytes(100)])
def test_what_is_not_hdf5_is_refused(tmp_path, content):
    path = tmp_path / "result.h5"
    path.write_bytes(content)
    with pytest.raises(ResultError, match="HDF5"):
        Embeddings(path)


@pytest.mark.parametrize("width", [0, 320])
def test_a_result_without_rows_is_accepted(tmp_path, width):
    path = write_result(tmp_path / "result.h5", np.empty((0, width), np.float32), [])
    with Embeddings(path) as found:
        assert (len(found), found.hidden_dim, found.ids) == (0, width, ())
        assert found.to_numpy().shape == (0, width)
        assert found.to_numpy([]).shape == (0, width)
        assert dict(found) == {}


def test_a_result_is_a_mapping_in_the_order_of_its_rows(tmp_path):
    with Embeddings(write_result(tmp_path / "result.h5")) as found:
        assert found.ids == tuple(IDS)
        assert list(found) == IDS
        assert len(found) == 4
        assert found.hidden_dim == 3
        for number, name in enumerate(IDS):
            assert name in found
            assert found[name].dtype == np.float32
            assert found[name].tolist() == ROWS[number].tolist()
        assert "b" not in found
        assert 1 not in found
        assert found.get("b") is None
        assert "4 sequences x 3" in repr(found)


def test_rows_are_read_only_when_they_are_asked_for(tmp_path):
    path = write_result(tmp_path / "result.h5")
    found = Embeddings(path)
    with schema.open_hdf5(path, "r") as file:
        offset = file["embeddings"].id.get_offset()
    with path.open("rb+") as file:
        file.seek(offset + 12)
        file.write(np.array([7, 8, 9], np.float32).tobytes())
    assert found["a"].tolist() == [7, 8, 9]
    found.close()
    with pytest.raises((ValueError, OSError)):
        found["a"]


def test_many_rows_come_in_the_order_asked_for_with_repeats(tmp_path):
    with Embeddings(write_result(tmp_path / "result.h5")) as found:
        assert found.to_numpy().tobytes() == ROWS.tobytes()
        wanted = ["m", "a", "m", "z", "a"]
        assert found.to_numpy(wanted).tolist() == ROWS[[3, 1, 3, 0, 1]].tolist()
        assert found.to_numpy(iter(["m"])).shape == (1, 3)
        assert found.to_numpy([]).shape == (0, 3)


def test_an_id_that_is_not_there_is_a_key_error(tmp_path):
    with Embeddings(write_result(tmp_path / "result.h5")) as found:
        with pytest.raises(KeyError, match="nobody"):
            found["nobody"]
        with pytest.raises(KeyError, match="nobody"):
            found.to_numpy(["a", "nobody"])


def test_a_result_is_found_by_its_file_or_by_its_runs_folder(tmp_path):
    layout = RunLayout(tmp_path)
    write_result(layout.embeddings)
    write_result(layout.partial_embeddings, ROWS[:1], IDS[:1])
    for where in (tmp_path, str(tmp_path), layout.embeddings, str(layout.embeddings)):
        with read_embeddings(where) as found:
            assert found.ids == tuple(IDS)
    with read_embeddings(layout.partial_embeddings) as found:
        assert found.ids == ("z",)


def test_a_folder_with_a_partial_result_only_says_so(tmp_path):
    layout = RunLayout(tmp_path)
    write_result(layout.partial_embeddings)
    with pytest.raises(ResultError, match=r"partial result only: open .*embeddings\.partial\.h5"):
        read_embeddings(tmp_path)


@pytest.mark.parametrize("name", ["", "absent", "absent/embeddings.h5"])
def test_an_absent_result_is_missing(tmp_path, name):
    with pytest.raises(ResultError, match="is missing"):
        read_embeddings(tmp_path / name)


def test_a_refused_file_is_not_left_open(tmp_path):
    for path in (
        write_result(tmp_path / "double.h5", ids=["a", "a", "b", "c"]),
        write_result(tmp_path / "wide.h5", ROWS.astype(np.float64)),
    ):
        with pytest.raises(ResultError):
            Embeddings(path)
        with h5py.File(path, "r+"):  # refused by HDF5's own lock while it is open elsewhere
            pass


@pytest.mark.parametrize("longest", [1, 30, 700, 1024])
@pytest.mark.parametrize("num_sequences", [1, 300, 9_000])
def test_a_file_of_rows_never_takes_more_than_its_bytes_at_the_most(tmp_path, num_sequences, longest):
    chooser = random.Random(longest)
    names = ["x" * chooser.randint(max(1, longest - 20), longest) for _ in range(num_sequences)]
    most_bytes = schema.bytes_at_most(num_sequences, 8, id_bytes=sum(map(len, names)))
    with durable.NewFile(tmp_path / "rows.h5") as new:
        with schema.created(new, most_bytes=most_bytes) as file:
            ids = file.create_dataset(schema.SEQUENCE_IDS, (num_sequences,), dtype=schema.UTF8, track_times=False)
            for start in range(0, num_sequences, schema.IDS_PER_WRITE):
                ids[start : start + schema.IDS_PER_WRITE] = names[start : start + schema.IDS_PER_WRITE]
            for name in (schema.TRUNCATED_FROM, schema.POSITIONS):
                file.create_dataset(name, data=np.zeros(num_sequences, np.int64), track_times=False)
            schema.early_allocated(file, schema.EMBEDDINGS, (num_sequences, 8))
        size_bytes = new.path.stat().st_size
    assert size_bytes <= most_bytes
    assert most_bytes < 1.5 * size_bytes + schema.OVERHEAD_BYTES
