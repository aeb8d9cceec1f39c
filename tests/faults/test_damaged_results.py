"""
Results, parts and tables changed by a byte, with and without a manifest: each is refused as documented, or reads as it
was; nothing hangs, and nothing changed is used where a checksum tells.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from tests.command_line import run
from tests.faults.forked import run_job
from tests.made_prediction import Contig, make_prediction
from tests.strategies import MadeRun, edit_manifest
from virnucpro import durable, in_child, read_embeddings, read_prediction
from virnucpro.choices import ResultForm
from virnucpro.errors import ResultError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.report.prediction.artifacts import report_markdown
from virnucpro.store import schema
from virnucpro.store.parts import SealedBlocks, part_paths
from virnucpro.store.results import hdf5
from virnucpro.training.evaluation.tables import read_scores

SLOWEST_S = 20.0
TRIES = 25


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 40 sequences in each form, and its sealed parts."""
    folder = tmp_path_factory.mktemp("run")
    chooser = random.Random(5)
    letters = ["".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=chooser.randint(1, 40))) for _ in range(40)]
    made = MadeRun(folder, [(f"sequence_{number}", sequence) for number, sequence in enumerate(letters)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5, "SHARD_ROWS", 15)
        for form in (ResultForm.SINGLE, ResultForm.SHARDED, ResultForm.PARQUET):
            if form is not ResultForm.PARQUET or pytest.importorskip("pyarrow"):
                run_embedding([made.fasta], folder / form, made.config, [CPU], result_form=form)
    made.write_part(range(len(made.plan)))
    return SimpleNamespace(made=made, folder=folder)


def mutate(data: bytes, chooser: random.Random) -> bytes:
    at = chooser.randrange(len(data))
    how = chooser.choice(["flip", "insert", "insert", "set", "cut"])
    if how == "flip":
        return data[:at] + bytes([data[at] ^ 1 << chooser.randrange(8)]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + bytes([chooser.choice([0, chooser.randrange(256)])]) + data[at:]
    if how == "set":
        return data[:at] + bytes([(data[at] + 1 + chooser.randrange(255)) % 256]) + data[at + 1 :]
    return data[:at]


def files_of(folder):
    names = ("embeddings", "shard-", "ids.")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name.startswith(names))


def read_all(path):
    with read_embeddings(path) as found:
        return tuple(found.ids), found.to_numpy().tobytes(), found[found.ids[0]].tobytes()


def tried(read, seconds=SLOWEST_S):
    """What a read came to: its value, or None where it was refused; anything else that is raised fails the test."""
    began_s = time.monotonic()
    try:
        found = read()
    except ResultError:
        found = None
    assert time.monotonic() - began_s < seconds
    return found


@pytest.mark.parametrize("form", [ResultForm.SINGLE, ResultForm.SHARDED, ResultForm.PARQUET])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_changed_result_is_refused_beside_its_manifest_and_reads_or_is_refused_without(
    finished, tmp_path, form, has_manifest
):
    names = ("embeddings" + {"single": ".h5", "sharded": "", "parquet": ".parquet"}[form], "run.json")
    for name in names if has_manifest else names[:1]:
        source = finished.folder / form / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    whole = read_all(tmp_path)
    chooser, files, seen = random.Random(f"{form}{has_manifest}"), files_of(tmp_path), Counter()

    def job():
        for _ in range(TRIES):
            path = chooser.choice(files)
            data = path.read_bytes()
            changed = mutate(data, chooser)
            path.write_bytes(changed)
            found = tried(lambda: read_all(tmp_path))
            seen["refused" if found is None else "as before" if found == whole else "other"] += 1
            path.write_bytes(data)
        assert not has_manifest or seen["refused"] == TRIES, seen
        assert seen["refused"] > 0

    ended = run_job(job, tmp_path / "job")
    assert ended.code == 0, ended.errors


def test_a_part_with_a_forged_seal_is_refused_or_read_and_nothing_else(finished, tmp_path):
    (part,) = part_paths(finished.made.layout.parts_dir)
    data = part.read_bytes()[: -durable.SEAL_BYTES]
    chooser = random.Random(8)

    def job():
        refused = 0
        for number in range(60):
            path = tmp_path / f"part_{number}.h5"
            durable.write_bytes(path, mutate(data, chooser), seal=True)

            def read(path=path):
                source = SealedBlocks.open(path)
                source.check()
                return list(source.iter_sequence_ids())

            refused += tried(read) is None
        assert refused > 4

    ended = run_job(job, tmp_path / "job")
    assert ended.code == 0, ended.errors


def test_ids_that_refer_to_one_long_text_are_refused_before_they_take_memory(tmp_path):
    path = tmp_path / "embeddings.h5"
    with h5py.File(path, "w") as file:
        file["embeddings"] = np.zeros((8000, 4), np.float32)
        ids = file.create_dataset("sequence_ids", (8000,), schema.UTF8)
        ids[:1] = "x" * 1_000_000
        offset = ids.id.get_offset()
    data = bytearray(path.read_bytes())
    data[offset : offset + 16 * 8000] = data[offset : offset + 16] * 8000
    path.write_bytes(data)
    with pytest.raises(ResultError, match="more text than the file has bytes: refused"):
        read_embeddings(path)
    with pytest.raises(ResultError, match="more text"):  # a forged part, and a result whose checksum was forged, too
        schema.open_embeddings(path, is_known=True)


def test_a_reader_that_hangs_crashes_or_takes_memory_is_ended_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(in_child, "CPU_SECONDS", 1)
    path = tmp_path / "file"
    path.write_bytes(b"x")

    def spin(_):
        while True:
            pass

    def grow(_):
        return bytes(1 << 30)

    for read in (spin, lambda _: os.kill(os.getpid(), signal.SIGSEGV), grow):
        with pytest.raises(ResultError, match="crashes, or takes more time or memory"):
            in_child.read_in_child(path, read)
    monkeypatch.setattr(in_child, "WALL_SECONDS", 0.2)
    with pytest.raises(ResultError, match="more time"):
        in_child.read_in_child(path, lambda _: time.sleep(60))


@pytest.fixture
def prediction(tmp_path):
    made = make_prediction(tmp_path / "out", [Contig("v1", 1000, 0, 1), Contig("n1", 1000)])
    layout = made.layout

    def record(values):
        values["files"] = {path.name: durable.sha256_of(path) for path in (layout.contigs, layout.viral_regions)}

    edit_manifest(layout.manifest, record)
    (tmp_path / "reads.paf").write_text("r\t100\t0\t100\t+\tv1\t1000\t0\t100\t90\t100\t60\n")
    return layout


def test_a_changed_table_of_contigs_is_used_by_no_reader(prediction, tmp_path):
    readers = (read_prediction, lambda out: read_scores(out / "contigs.tsv"), lambda _: report_markdown(prediction))
    for read in readers:
        read(prediction.output_dir)
    data = prediction.contigs.read_bytes()
    assert run("label-reads", prediction.output_dir, "--paf", tmp_path / "reads.paf").code == 0
    swapped = data.replace(b"\tvirus\t", b"\tundecided\t") if b"\tvirus\t" in data else data.replace(b"0.", b"1.", 1)
    chooser = random.Random(2)
    for changed in (swapped, *(mutate(data, chooser) for _ in range(200))):
        prediction.contigs.write_bytes(changed)
        for read in readers:
            assert tried(lambda read=read: read(prediction.output_dir)) is None
    done = run("label-reads", prediction.output_dir, "--paf", tmp_path / "reads.paf")
    assert (done.code, "sha256 is not the one that run.json recorded" in done.err) == (65, True), done.err


def test_a_named_pipe_in_place_of_a_file_of_a_result_is_refused_at_once(prediction, finished, tmp_path):
    readers = (read_prediction, lambda out: read_scores(out / "contigs.tsv"), lambda _: report_markdown(prediction))
    for path in (prediction.contigs, prediction.manifest):
        kept = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        for read in readers:
            assert tried(lambda read=read: read(prediction.output_dir), seconds=2) is None
        assert run("label-reads", prediction.output_dir, "--paf", tmp_path / "reads.paf").code == 65
        path.unlink()
        path.write_bytes(kept)
    for form in (ResultForm.SINGLE, ResultForm.SHARDED, ResultForm.PARQUET):
        folder = tmp_path / form
        shutil.copytree(finished.folder / form, folder)
        for path in [*files_of(folder), folder / "run.json"]:
            kept = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            assert tried(lambda folder=folder: read_all(folder), seconds=2) is None, path
            path.unlink()
            path.write_bytes(kept)
        read_all(folder)
    os.mkfifo(tmp_path / "part_000000000_x.h5")
    assert tried(lambda: SealedBlocks.open(tmp_path / "part_000000000_x.h5"), seconds=2) is None
