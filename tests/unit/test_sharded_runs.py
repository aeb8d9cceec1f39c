"""Runs whose result is sharded, with real worker processes: what they leave, how they go on, what is refused."""

from __future__ import annotations

import json
import random

import pytest

from tests import fakes
from tests.faults.forked import run_forked
from tests.strategies import edit_manifest, flip_bit
from virnucpro.choices import AUTO_SHARDED_ROWS, ResultForm
from virnucpro.config import RunLimits
from virnucpro.errors import OutputError, SettingsChangedError
from virnucpro.pipeline import shard_aggregator
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run import run as run_folder
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.run.run_status import status_of
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.store.locks.run_lock import RunLock
from virnucpro.store.reader import read_embeddings
from virnucpro.store.results import forms, hdf5

SHARDED, SINGLE, AUTO = ResultForm.SHARDED, ResultForm.SINGLE, ResultForm.AUTO
ROWS_OF_SHARD = 25


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", ROWS_OF_SHARD)


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(11)
    lengths = [chooser.randint(1, 40) for _ in range(80)]
    sequences = {f"p{n}|é": "".join(chooser.choices("ACDEFGHIKLMN", k=lengths[n])) for n in range(80)}
    sequences["a_copy"] = sequences["p7|é"]
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path, sequences


def run(fasta, out, form, config=None, **options):
    """The whole run in a process forked from this one: the real one, without seconds of imports."""
    ended = run_forked(fasta, out, config or fakes.hash_config(), result_form=form, **options)
    assert ended.code == 0, ended.errors


def check_rows(path, sequences):
    with read_embeddings(path) as found:
        assert list(found) == list(sequences)
        for name, sequence in sequences.items():
            assert (found[name] == fakes.hash_vector(sequence)).all(), name


def files_of(out):
    return {path.name: path.read_bytes() for path in (out / "embeddings").iterdir()}


def test_a_sharded_run_is_complete_verifiable_and_not_computed_again(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    result = run_embedding([fasta], out, fakes.hash_config(), [CPU] * 2, result_form=SHARDED)
    assert (result.state, result.output_path, result.num_rows) == ("complete", out / "embeddings", 81)
    assert result.to_json()["output_path"] == str(out / "embeddings")
    check_rows(out, sequences)
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["settings"]["result_form"] == "sharded"
    names = [f"embeddings/shard-{number:05d}-of-00004.h5" for number in range(4)]
    assert sorted(manifest["files"]) == ["embeddings/ids.index", *names]
    assert sorted(path.name for path in out.iterdir()) == [
        ".run.lock", "embeddings", "logs", "metrics.prom", "run.json", "work",
    ]  # fmt: skip
    found = verify_run(out)
    assert (found.state, found.num_rows, found.problems) == ("complete", 81, [])
    assert status_of(out).state == "complete"
    before = files_of(out)
    again = run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=AUTO)
    assert (again.ranks, again.output_path) == ((), out / "embeddings")
    assert files_of(out) == before


def test_the_form_is_chosen_by_size_and_a_folder_keeps_its_own(tmp_path, proteins, monkeypatch):
    fasta, sequences = proteins
    large, small = tmp_path / "large", tmp_path / "small"
    assert AUTO_SHARDED_ROWS > 1_000_000
    monkeypatch.setattr(forms, "AUTO_SHARDED_ROWS", 81)
    run(fasta, large, AUTO)
    monkeypatch.setattr(forms, "AUTO_SHARDED_ROWS", 82)
    run(fasta, small, AUTO)
    assert (large / "embeddings" / "ids.index").exists()
    assert (small / "embeddings.h5").exists()
    (large / "embeddings" / "ids.index").unlink()
    monkeypatch.setattr(forms, "AUTO_SHARDED_ROWS", 81)
    (small / "embeddings.h5").write_bytes(b"damaged")
    for out in (large, small):  # both are computed again, in the form that they had
        run(fasta, out, AUTO)
        check_rows(out, sequences)
    assert not (small / "embeddings").exists()
    assert not (large / "embeddings.h5").exists()


@pytest.mark.parametrize(("before", "now"), [(SHARDED, SINGLE), (SINGLE, SHARDED)])
def test_another_form_is_refused_with_both_until_the_run_starts_afresh(tmp_path, proteins, before, now):
    fasta, sequences = proteins
    out = tmp_path / "out"
    run(fasta, out, before)
    with pytest.raises(SettingsChangedError, match=f"result_form was '{before}', now '{now}'") as caught:
        run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=now)
    assert caught.value.differences == {"result_form": (str(before), str(now))}
    assert verify_run(out).problems == []
    run(fasta, out, now, restart=True)
    assert (out / "embeddings").exists() == (now is SHARDED)
    assert (out / "embeddings.h5").exists() == (now is SINGLE)
    check_rows(out, sequences)
    assert verify_run(out).problems == []


def test_a_folder_of_before_there_was_a_choice_is_single(tmp_path, proteins):
    fasta, _ = proteins
    out = tmp_path / "out"
    run(fasta, out, SINGLE)
    edit_manifest(out / "run.json", lambda values: values["settings"].pop("result_form"))
    assert verify_run(out).problems == []
    assert run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=AUTO).ranks == ()
    with pytest.raises(SettingsChangedError, match="result_form was 'single', now 'sharded'"):
        run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=SHARDED)


def test_rows_that_exist_are_sharded_too_and_a_second_run_completes_them(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 8})
    limits = RunLimits(attempts=1, stop_grace_s=1.0)
    result = run_embedding([fasta], out, config, [CPU], limits=limits, result_form=SHARDED)
    assert (result.state, result.output_path) == ("partial", out / "embeddings.partial")
    result.raise_unless(allow_partial=True)
    assert not (out / "embeddings").exists()
    missing = {line.split("\t")[0] for line in (out / "failed_sequences.tsv").read_text().splitlines()[1:]}
    assert 0 < len(missing) == result.num_missing < len(sequences)
    check_rows(out / "embeddings.partial", {n: s for n, s in sequences.items() if n not in missing})
    found = verify_run(out)
    assert (found.state, found.problems) == ("partial", [])
    assert {name.split("/")[0] for name in json.loads((out / "run.json").read_text())["files"]} == {
        "embeddings.partial",
        "failed_sequences.tsv",
    }
    again = run_embedding([fasta], out, config, [CPU] * 2, limits=limits, result_form=AUTO)
    assert again.state == "complete"
    assert not (out / "embeddings.partial").exists()
    whole = tmp_path / "whole"
    run(fasta, whole, SHARDED, config)
    assert files_of(out) == files_of(whole)
    check_rows(out, sequences)


@pytest.mark.parametrize("name", ["ids.index", "shard-00002-of-00004.h5"])
@pytest.mark.parametrize("how", ["flip", "remove"])
def test_what_is_damaged_or_gone_is_named_and_computed_again(tmp_path, proteins, name, how):
    fasta, sequences = proteins
    out = tmp_path / "out"
    run(fasta, out, SHARDED)
    whole = files_of(out)
    path = out / "embeddings" / name
    if how == "flip":
        flip_bit(path, 8 * (path.stat().st_size - 5))
        what = f"embeddings/{name}: damaged: its sha256 is not the one that run.json recorded"
    else:
        path.unlink()
        what = f"embeddings/{name}: is missing"
    problems = verify_run(out).problems
    assert len(problems) == 1
    assert what in problems[0]
    run(fasta, out, SHARDED)
    assert files_of(out) == whole
    check_rows(out, sequences)


def test_records_that_are_left_out_are_listed_and_the_counts_add_up(tmp_path):
    fasta, out = tmp_path / "in.fasta", tmp_path / "out"
    fasta.write_text(">a\nMKV\n>bad\nMK-V\n>b\nMKVLA\n")
    config = fakes.hash_config(on_bad_record="skip")
    run(fasta, out, SHARDED, config)
    check_rows(out, {"a": "MKV", "b": "MKVLA"})
    assert verify_run(out).problems == []
    (out / "failed_sequences.tsv").unlink()
    assert run_embedding([fasta], out, config, [CPU], result_form=SHARDED).ranks == ()
    assert verify_run(out).problems == []


def test_somebody_elses_shards_are_not_touched(tmp_path, proteins):
    out = tmp_path / "out"
    (out / "embeddings").mkdir(parents=True)
    shard = out / "embeddings" / "shard-00000-of-00001.h5"
    shard.write_text("somebody's")
    for restart in (False, True):
        with pytest.raises(OutputError, match=r"no run\.json that tells whose"):
            run_embedding([proteins[0]], out, fakes.hash_config(), [CPU], result_form=SHARDED, restart=restart)
    assert shard.read_text() == "somebody's"


def test_the_reservation_has_room_for_every_shard_and_gives_way_shard_by_shard(tmp_path, proteins, monkeypatch):
    fasta, _ = proteins
    run = prepare_run([fasta], tmp_path / "out", fakes.hash_config(), [CPU], run_id="one", result_form=SHARDED)
    reserved_bytes = run.layout.reservation.stat().st_size
    index = run.open_index()
    plain = prepare_run([fasta], tmp_path / "plain", fakes.hash_config(), [CPU], run_id="one")
    assert reserved_bytes >= plain.layout.reservation.stat().st_size + 16 * len(index)
    left = []
    before = run_folder.give_way_to_result

    def note(layout, num_bytes):
        before(layout, num_bytes)
        left.append(layout.reservation.stat().st_size)

    monkeypatch.setattr(shard_aggregator, "give_way_to_result", note)
    result = run_embedding([fasta], tmp_path / "out", fakes.hash_config(), [CPU], result_form=SHARDED)
    assert len(left) == 5
    assert left == sorted(left, reverse=True)
    written_bytes = sum(path.stat().st_size for path in result.output_path.iterdir())
    assert left[-1] >= run_folder.MANIFEST_BYTES
    assert reserved_bytes - run_folder.MANIFEST_BYTES >= written_bytes


def test_a_run_that_was_killed_while_it_wrote_shards_needs_no_more_room_than_before(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    spec = "MainProcess/file.rename:5:kill"
    assert run_forked(fasta, out, fakes.hash_config(), failpoint=spec, result_form=SHARDED).code == -9
    left = list((out / "embeddings").glob("shard-*.h5"))
    assert 0 < len(left) < 4, [path.name for path in out.iterdir()]
    with RunLock(out / ".run.lock", run_id="again"):
        prepare_run([fasta], out, fakes.hash_config(), [CPU], run_id="again", result_form=AUTO)
    assert not (out / "embeddings").exists()
    run(fasta, out, AUTO, workers=2)
    check_rows(out, sequences)
