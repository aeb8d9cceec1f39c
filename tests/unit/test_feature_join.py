"""Rows are joined by id: what is missing is told, what does not belong is refused."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from virnucpro.calls.frame_order import RowStream, join
from virnucpro.errors import ResultError

IDS = [f"c_chunk_{n}F1" for n in range(1, 8)]


def write_rows(path, ids, width):
    """Each row holds the number of its id, and its column."""
    numbers = [int(name.removeprefix("c_chunk_").removesuffix("F1")) for name in ids]
    with h5py.File(path, "w") as file:
        file["embeddings"] = np.array([[10 * n + k for k in range(width)] for n in numbers], np.float32).reshape(
            -1, width
        )
        file.create_dataset("sequence_ids", data=list(ids), shape=(len(ids),), dtype=h5py.string_dtype())
    return path


def joined(tmp_path, dna_ids, protein_ids, *, at_once):
    """Join all frames, *at_once* at a time; return which have both rows, and the rows."""
    has_both, rows = [], []
    with (
        RowStream(write_rows(tmp_path / "dna.h5", dna_ids, 3)) as dna,
        RowStream(write_rows(tmp_path / "protein.h5", protein_ids, 2)) as protein,
    ):
        for start in range(0, len(IDS), at_once):
            has, features = join(dna, protein, IDS[start : start + at_once])
            has_both += has.tolist()
            rows += features.tolist()
        dna.finish()
        protein.finish()
    return has_both, rows


def features_of(name):
    n = int(name.removeprefix("c_chunk_").removesuffix("F1"))
    return [10 * n, 10 * n + 1, 10 * n + 2, 10 * n, 10 * n + 1]


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("lost_dna", [(), (0,), (6,), (2, 3), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("lost_protein", [(), (1,), (3, 6)])
def test_every_frame_with_both_rows_gets_its_own_and_no_other(tmp_path, at_once, lost_dna, lost_protein):
    dna_ids = [name for n, name in enumerate(IDS) if n not in lost_dna]
    protein_ids = [name for n, name in enumerate(IDS) if n not in lost_protein]
    has_both, rows = joined(tmp_path, dna_ids, protein_ids, at_once=at_once)
    expected = [n not in lost_dna and n not in lost_protein for n in range(len(IDS))]
    assert has_both == expected
    assert rows == [features_of(name) for name, has in zip(IDS, expected, strict=True) if has]


@pytest.mark.parametrize(
    "ids",
    [
        [*IDS, "stranger"],
        ["stranger", *IDS],
        [*IDS[:3], "stranger", *IDS[3:]],
        [IDS[1], IDS[0], *IDS[2:]],
        [*IDS, IDS[0]],
        [IDS[0], *IDS],
    ],
)
@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_rows_of_other_frames_twice_or_out_of_order_are_refused(tmp_path, ids, at_once):
    if "stranger" in ids:
        ids = [name.replace("stranger", "c_chunk_99F1") for name in ids]
    with pytest.raises(ResultError, match="is not the frame expected there"):
        joined(tmp_path, ids, IDS, at_once=at_once)


def test_what_is_no_file_of_embeddings_is_refused(tmp_path):
    with pytest.raises(ResultError, match="is missing"):
        RowStream(tmp_path / "absent.h5")
    (tmp_path / "text.h5").write_text("no HDF5")
    with pytest.raises(ResultError):
        RowStream(tmp_path / "text.h5")


@pytest.mark.data
def test_the_recorded_run_of_the_original_is_joined_to_its_own_numbers(tmp_path, data_dir):
    torch = pytest.importorskip("torch")
    recorded = {
        name: torch.load(data_dir / f"golden/test_with_orfs_{name}.pt", weights_only=True)
        for name in ("nucleotide_output_1_DNABERT_S", "protein_output_1_ESM", "merged_output_1_merged")
    }
    merged = recorded["merged_output_1_merged"]
    ids, expected = list(merged["ids"]), merged["data"].numpy()
    streams = []
    for name in ("nucleotide_output_1_DNABERT_S", "protein_output_1_ESM"):
        rows = _rows_by_id(recorded[name])
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["embeddings"] = np.stack([rows[one] for one in ids])
            file.create_dataset("sequence_ids", data=ids, dtype=h5py.string_dtype())
        streams.append(RowStream(tmp_path / f"{name}.h5"))
    has_both, features = join(*streams, ids)
    assert has_both.all()
    assert features.shape == (4, 3328)
    assert features.tobytes() == expected.astype(np.float32).tobytes()


def _rows_by_id(recorded):
    """The rows of one of the original program's files, by id: the proteins stand in another order."""
    if "proteins" in recorded:
        named = zip(recorded["proteins"], recorded["data"], strict=True)
    else:
        named = ((item["label"], item["mean_representation"]) for item in recorded["data"])
    return {name: np.asarray(row, dtype=np.float32) for name, row in named}
