"""
Row 26: what somebody hostile may hand us: weights, results, folders, names, archives.

Each payload would make a file (the marker), read or change one of somebody else's, or take all memory. Each is refused
with an error of ours; the marker is never there, and what was precious is as it was.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import pickle
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
import torch

from tests.fakes import hash_config
from tests.faults.forked import run_forked, small_input
from tests.faults.processes import ROOT
from virnucpro import durable
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.errors import BadInputError, OutputError, ResultError, WeightsError
from virnucpro.models.dnabert_s import load_dnabert_s
from virnucpro.models.esm2_flash import load_esm2_model
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import RunLayout
from virnucpro.store import schema
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.parts import BlockRows, SealedBlocks, write_part
from virnucpro.store.reader import read_embeddings

CPU = torch.device("cpu")


# --- weights ---------------------------------------------------------------------------------------------------------


class Runs:
    """Calls *function* with *arguments* when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def as_zip(contents) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def as_old_torch(contents) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def with_payload_in(place, payload):
    namespace = argparse.Namespace(encoder_layers=1, encoder_embed_dim=8, encoder_attention_heads=2, token_dropout=True)
    contents = {"model": {"embed_tokens.weight": torch.zeros(33, 8)}, "cfg": {"model": namespace}}
    if place == "whole":
        return payload
    if place == "extra":
        return {**contents, "extra": payload}
    if place == "tensor":
        return {**contents, "model": {"embed_tokens.weight": payload}}
    namespace.encoder_layers = payload
    return contents


@pytest.mark.parametrize("load", [load_esm2_model, load_dnabert_s])
@pytest.mark.parametrize("save", [as_zip, as_old_torch, pickle.dumps])
@pytest.mark.parametrize("place", ["whole", "extra", "tensor", "setting"])
def test_weights_run_nothing_that_is_in_them(tmp_path, load, save, place):
    marker = tmp_path / "marker"
    for payload in (
        Runs(os.system, f"touch {marker}"),
        Runs(eval, f"open({str(marker)!r}, 'w')"),
        Runs(os.mkdir, marker),
    ):
        path = tmp_path / ("pytorch_model.bin" if load is load_dnabert_s else "weights.pt")
        path.write_bytes(save(with_payload_in(place, payload)))
        with pytest.raises(WeightsError) as caught:
            load(path, CPU, precision="fp32")
        assert caught.value.exit_code == 78
        assert not marker.exists()


def test_the_payloads_would_work_if_they_were_let(tmp_path):
    pickle.loads(pickle.dumps(Runs(os.mkdir, tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_an_archive_with_a_pickle_of_its_own_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Runs(os.mkdir, tmp_path / "marker")))
        archive.writestr("archive/../../escaped", "outside")
    with pytest.raises(WeightsError):
        load_esm2_model(path, CPU)
    assert [name.name for name in tmp_path.iterdir()] == ["weights.pt"]


# --- HDF5 ------------------------------------------------------------------------------------------------------------


def external_link(file, secret):
    del file["embeddings"]
    file["embeddings"] = h5py.ExternalLink(str(secret), "embeddings")


def soft_link(file, _secret):
    file.move("embeddings", "other")
    file["embeddings"] = h5py.SoftLink("/other")


def link_beside(file, secret):
    file["extra"] = h5py.ExternalLink(str(secret), "embeddings")


def virtual_dataset(file, secret):
    del file["embeddings"]
    layout = h5py.VirtualLayout(shape=(3, 4), dtype=np.float32)
    layout[:] = h5py.VirtualSource(str(secret), "embeddings", shape=(3, 4))
    file.create_virtual_dataset("embeddings", layout)


def external_storage(file, secret):
    del file["embeddings"]
    file.create_dataset("embeddings", (3, 4), np.float32, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def group(file, _secret):
    del file["embeddings"]
    file.create_group("embeddings")


def filtered(file, _secret):
    del file["embeddings"]
    file.create_dataset("embeddings", data=np.ones((3, 4), np.float32), chunks=(3, 4), compression="gzip")


def chunked(file, _secret):
    del file["embeddings"]
    file.create_dataset("embeddings", (3, 4), np.float32, chunks=(1, 4), maxshape=(None, 4))


def references(file, _secret):
    file.create_dataset("extra", (3,), h5py.ref_dtype)
    del file["sequence_ids"]
    file.create_dataset("sequence_ids", data=[file["embeddings"].ref] * 3, dtype=h5py.ref_dtype)


def doubles(file, _secret):
    del file["embeddings"]
    file["embeddings"] = np.ones((3, 4))


def one_dimension(file, _secret):
    del file["embeddings"]
    file["embeddings"] = np.ones(3, np.float32)


def too_few_ids(file, _secret):
    del file["sequence_ids"]
    file.create_dataset("sequence_ids", data=["a", "b"], dtype=schema.UTF8)


def ids_that_are_no_text(file, _secret):
    del file["sequence_ids"]
    file["sequence_ids"] = np.arange(3)


def no_ids(file, _secret):
    del file["sequence_ids"]


def a_million_million_rows(file, _secret):
    del file["embeddings"], file["sequence_ids"]
    file.create_dataset("embeddings", (10**12, 4), np.float32)
    file.create_dataset("sequence_ids", (10**12,), schema.UTF8)


PAYLOADS = [
    *(external_link, soft_link, link_beside, virtual_dataset, external_storage, group, filtered, chunked, references),
    *(doubles, one_dimension, too_few_ids, ids_that_are_no_text, no_ids, a_million_million_rows),
]


def hostile_file(path, payload):
    """A file like ours of three rows, made hostile; beside it the secret that it may point to."""
    secret = path.with_name("secret.h5")
    for name in (secret, path):
        with h5py.File(name, "w") as file:
            file.create_dataset("embeddings", data=np.full((3, 4), 7, np.float32))
            file.create_dataset("sequence_ids", data=["a", "b", "c"], dtype=schema.UTF8)
    with h5py.File(path, "r+") as file:
        payload(file, secret)
    return secret.read_bytes()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hostile_result_is_refused(tmp_path, payload):
    path = tmp_path / "embeddings.h5"
    before = hostile_file(path, payload)
    with pytest.raises(ResultError) as caught:
        read_embeddings(path)
    assert caught.value.exit_code == 65
    assert path.with_name("secret.h5").read_bytes() == before


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_hostile_part_is_refused_with_and_without_a_seal(tmp_path, payload):
    path = tmp_path / "part.h5"
    hostile_file(path, payload)
    with pytest.raises(ResultError, match="truncated"):
        SealedBlocks.open(path)
    durable.write_bytes(tmp_path / "sealed.h5", path.read_bytes(), seal=True)
    with pytest.raises(ResultError):
        SealedBlocks.open(tmp_path / "sealed.h5")


def test_what_is_refused_is_only_what_is_hostile(tmp_path):
    hostile_file(tmp_path / "fine.h5", lambda file, secret: None)
    with read_embeddings(tmp_path / "fine.h5") as found:
        assert found.ids == ("a", "b", "c")
    rows = BlockRows(0, np.arange(2), ["a", "b"], np.ones((2, 3), np.float32))
    SealedBlocks.open(write_part(tmp_path, [rows], plan_fingerprint="p")).check()


def test_a_result_that_was_exchanged_for_a_hostile_one_is_a_problem_that_verify_names(tmp_path):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    assert run_forked(fasta, out, hash_config()).code == 0
    hostile_file(tmp_path / "hostile.h5", external_link)
    (tmp_path / "hostile.h5").replace(out / "embeddings.h5")
    assert verify_run(out).problems != []
    assert run_forked(fasta, out, hash_config()).code == 0
    assert verify_run(out).problems == []


# --- folders and names -----------------------------------------------------------------------------------------------

OURS = ("run.json", "embeddings.partial.h5", "failed_sequences.tsv", "logs/worker_0.log", "work/sequences.index")


@pytest.mark.parametrize("name", [*OURS, "work/.reserved", "shard_0.h5", "work/parts/part_000000000_000000000000.h5"])
def test_a_link_in_the_output_folder_leads_to_no_write_outside(tmp_path, name):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to(precious)
    ended = run_forked(fasta, out, hash_config())
    assert ended.code in (0, 65, 73), ended.errors
    assert "Traceback" not in ended.errors
    assert precious.read_text() == "precious"
    assert not precious.is_symlink()


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".run.lock").symlink_to(precious)
    with pytest.raises(OutputError, match="symbolic links"), RunLock(tmp_path / ".run.lock", run_id="a"):
        pass
    assert precious.read_text() == "precious"


def test_a_temporary_name_that_is_there_already_is_never_written(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    for name in ("precious", "link", "dangling"):
        with pytest.raises(FileExistsError):
            durable.NewFile(tmp_path / name)
    with pytest.raises(OSError, match="symbolic links"):
        durable.NewFile(tmp_path / "link", exists=True)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "made").exists()


def test_ids_never_become_paths(tmp_path):
    fasta, out = tmp_path / "in.fasta", tmp_path / "deep" / "out"
    out.parent.mkdir()
    names = ("../../escaped", "/etc/passwd", "a/../../b", "~/.ssh/authorized_keys", "$(touch marker)", "%s%n")
    fasta.write_text("".join(f">{name}\nMKVLA{'AG' * number}\n" for number, name in enumerate(names)))
    assert run_forked(fasta, out, hash_config()).code == 0
    with read_embeddings(out) as found:
        assert found.ids == ("../../escaped", "/etc/passwd", "a/../../b", "~/.ssh/authorized_keys", "$(touch", "%s%n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "in.fasta"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["out", "out.stderr"]


def test_names_of_files_and_records_cannot_reach_the_terminal(tmp_path):
    fasta = tmp_path / "evil\x1b[2J\x1b]0;owned\x07.fasta"
    fasta.write_text(">id\x1b[31m\nMKV\n>\x9b31m\nMKV\n")
    command = [sys.executable, "-m", "virnucpro", "index", str(fasta), "--output", str(tmp_path / "index")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 65
    assert b"\\x1b[2J" in done.stderr
    for byte in (b"\x1b", b"\x07", b"\xc2\x9b"):
        assert byte not in done.stdout + done.stderr
    command[-1] = str(tmp_path / "in\x1b[2Jthe\nway" / "index")
    (tmp_path / "in\x1b[2Jthe\nway").write_text("")
    fasta.write_text(">id\nMKV\n")
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 73
    assert b"\x1b" not in done.stderr


# --- archives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 40])
def test_a_gzip_bomb_stops_at_the_limit_and_leaves_nothing(tmp_path, members):
    bomb = tmp_path / "bomb.fasta.gz"
    bomb.write_bytes(gzip.compress(b">a\n" + b"A" * (40_000_000 // members)) * members)
    assert bomb.stat().st_size < 100_000
    layout = RunLayout(tmp_path / "out")
    with pytest.raises(BadInputError, match="unpacks to more than 1000000 bytes"):
        SequenceIndex.build([bomb], layout.index, unpack_dir=layout.unpacked_dir, max_unpacked_bytes=1_000_000)
    assert not layout.index.exists()
    assert not layout.unpacked_dir.exists() or list(layout.unpacked_dir.iterdir()) == []
