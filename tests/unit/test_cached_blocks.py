"""Runs around one embedding cache: what is served, what is not, and what such a run says of itself."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import fakes
from tests.strategies import flip_bit, write_fasta
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.store.embedding_cache import FILE_NAME
from virnucpro.store.reader import read_embeddings


@pytest.fixture
def records():
    chooser = random.Random(23)
    lengths = [chooser.randint(1, 40) for _ in range(60)]
    found = [(f"p{n}", "".join(chooser.choices("ACDEFGHIKLMNPQRSTVWY", k=length))) for n, length in enumerate(lengths)]
    return [*found, ("a_copy", found[7][1])]


def run(folder, name, records, *, ranks=1, stop=None, on_message=None, **settings):
    fasta = write_fasta(folder / f"{name}.fasta", records)
    config = fakes.hash_config(**{"cache_dir": str(folder / "cache"), **settings})
    result = run_embedding([fasta], folder / name, config, [CPU] * ranks, stop=stop, on_message=on_message)
    assert result.state == "complete", result.ranks
    return result


def cached_and_computed(result):
    return sum(rank.sequences_cached for rank in result.ranks), sum(rank.sequences for rank in result.ranks)


def check_rows(result, records):
    with read_embeddings(result.output_path) as embeddings:
        assert embeddings.ids == tuple(name for name, _ in records)
        for name, sequence in records:
            assert (embeddings[name] == fakes.hash_vector(sequence)).all(), name


def test_a_second_run_is_served_whole_without_loading_the_model_and_says_so(tmp_path, records):
    first = run(tmp_path, "first", records)
    assert (cached_and_computed(first), first.promise) == ((0, 60), "bytes")
    again = run(tmp_path, "again", records, ranks=2)
    assert cached_and_computed(again) == (60, 0)
    assert all(rank.attention_kernel is None for rank in again.ranks), "no model was loaded"
    assert again.output_path.read_bytes() == first.output_path.read_bytes()
    check_rows(again, records)
    manifest = json.loads((tmp_path / "again" / "run.json").read_text())
    assert manifest["promise"] == again.to_json()["promise"] == "tolerance"
    assert manifest["counts"]["cached_blocks"] == again.num_cached_blocks == manifest["plan"]["blocks"] > 10
    assert sum(rank["sequences_cached"] for rank in manifest["ranks"]) == 60
    assert any("blocks came from the embedding cache (60 sequences" in note for note in again.notes())
    assert verify_run(tmp_path / "again").problems == []
    reports = [json.loads(line) for line in (tmp_path / "again/logs/worker_0.log").read_text().splitlines()]
    assert [line["sequences"] for line in reports if line["event"] == "worker.cached"] == [
        again.ranks[0].sequences_cached
    ]


def test_a_block_of_which_a_sequence_is_missing_is_computed_whole(tmp_path, records):
    run(tmp_path, "first", records)
    longest = max(records[:60], key=lambda record: len(record[1]))
    other = [(name, "W" * len(sequence) if name == longest[0] else sequence) for name, sequence in records]
    result = run(tmp_path, "other", other)
    cached, computed = cached_and_computed(result)
    blocks = json.loads((tmp_path / "other/run.json").read_text())["plan"]["blocks"]
    assert result.num_cached_blocks == blocks - 1, "the block of the new sequence and no other"
    assert (cached + computed, computed > 0) == (60, True)
    check_rows(result, other)
    whole = run(tmp_path, "whole", other)
    assert whole.num_cached_blocks == blocks, "what was computed is in the cache as well"


@pytest.mark.slow
@pytest.mark.long
def test_rows_of_another_model_precision_or_limit_are_never_served(tmp_path, records):
    run(tmp_path, "first", records)
    spaces = {fakes.hash_config().cache_space()}
    others = [{"weights_sha256": "1" * 64}, {"config_sha256": "1"}, {"precision": "bf16"}, {"max_residues": 39}]
    for number, changes in enumerate(others):
        other = run(tmp_path, f"{number}", records, **changes)
        assert (cached_and_computed(other), other.promise) == ((0, 60), "bytes")
        spaces.add(fakes.hash_config(**changes).cache_space())
    spaces.add(fakes.hash_config(loader="tests.fakes:load_faulty_model").cache_space())
    assert len(spaces) == 6
    same = {"token_budget": 100, "threads_per_worker": 2, "weights_path": "elsewhere", "model_name": "alias"}
    assert fakes.hash_config(**same).cache_space() in spaces
    assert cached_and_computed(run(tmp_path, "again", records, precision="bf16")) == (60, 0)


@pytest.mark.slow
def test_another_plan_is_served_too(tmp_path, records):
    run(tmp_path, "first", records)
    other = run(tmp_path, "other", records[::-1], ranks=3, token_budget=200)
    assert cached_and_computed(other) == (60, 0)
    check_rows(other, records[::-1])


def test_without_a_folder_nothing_is_cached(tmp_path, records):
    result = run(tmp_path, "first", records, cache_dir=None)
    assert (result.promise, result.num_cached_blocks) == ("bytes", 0)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_was_killed_leaves_the_cache_usable_and_resumes_beside_it(tmp_path, records):
    cache = str(tmp_path / "cache")
    plan = {"rank": 0, "how": "sigkill", "before_batch": 10}
    config = fakes.faulty_config(tmp_path / "faults.json", plan, cache_dir=cache)
    fasta = write_fasta(tmp_path / "in.fasta", records)
    result = run_embedding([fasta], tmp_path / "out", config, [CPU])
    assert (result.state, result.ranks[0].attempts) == ("complete", 2)
    assert result.ranks[0].sequences_resumed > 0
    assert result.promise == "bytes", "what this run computed itself was resumed from its parts"
    check_rows(result, records)
    again = run(tmp_path, "again", records, loader=config.loader, weights_path=config.weights_path)
    assert cached_and_computed(again) == (60, 0)
    check_rows(again, records)


@pytest.mark.slow
@pytest.mark.long
def test_a_run_may_be_resumed_with_a_cache_and_promises_tolerance(tmp_path, records):
    run(tmp_path, "first", records, loader="tests.fakes:load_faulty_model", weights_path=str(idle(tmp_path)))
    settings = {"loader": "tests.fakes:load_faulty_model", "token_budget": 64}
    plan = {"rank": 0, "how": "sigkill", "before_batch": 6, "times": 1}
    config = fakes.faulty_config(tmp_path / "faults.json", plan)
    fasta = write_fasta(tmp_path / "resumed.fasta", records)
    stopped = run_embedding([fasta], tmp_path / "resumed", config, [CPU], limits=RunLimits(attempts=1))
    assert stopped.state == "partial"
    result = run(tmp_path, "resumed", records, weights_path=config.weights_path, **settings)
    assert result.promise == "tolerance"
    assert 0 < result.ranks[0].sequences_resumed < 60
    assert result.ranks[0].sequences_resumed + result.ranks[0].sequences_cached == 60
    check_rows(result, records)


def idle(folder):
    """A control file of the faulty model that asks for no fault."""
    fakes.faulty_config(folder / "idle.json", {"how": "none"})
    return folder / "idle.json"


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_cache_that_cannot_be_used_is_said_once_and_everything_is_computed(tmp_path, records, is_folder):
    cache = tmp_path / "cache"
    if is_folder:
        cache.mkdir()
        (cache / FILE_NAME).write_text("not a database, and longer than the header of one" * 50)
    else:
        cache.write_text("")
    result = run(tmp_path, "other", records, ranks=2)
    assert (cached_and_computed(result), result.promise) == ((0, 60), "bytes")
    assert len([note for note in result.notes() if "the embedding cache" in note and "cannot be used" in note]) == 1
    for rank in range(2):
        log = (tmp_path / f"other/logs/worker_{rank}.log").read_text()
        assert log.count("cache.unusable") == 1
    check_rows(result, records)


def test_a_damaged_row_is_computed_again_and_served_afterwards(tmp_path, records):
    run(tmp_path, "first", records)
    path = tmp_path / "cache" / FILE_NAME
    at = path.read_bytes().index(fakes.hash_vector(records[3][1]).tobytes())
    flip_bit(path, 8 * at + 3)
    result = run(tmp_path, "other", records)
    assert cached_and_computed(result)[1] > 0
    check_rows(result, records)
    assert cached_and_computed(run(tmp_path, "again", records)) == (60, 0)


@pytest.mark.slow
@pytest.mark.long
def test_runs_at_the_same_time_share_a_cache(tmp_path, records):
    with ThreadPoolExecutor() as threads:
        started = [threads.submit(run, tmp_path, f"{number}", records, ranks=2) for number in range(2)]
    for result in [future.result() for future in started]:
        assert sum(cached_and_computed(result)) == 60
        check_rows(result, records)
    assert cached_and_computed(run(tmp_path, "again", records)) == (60, 0)


def test_a_cache_must_have_room_for_something():
    with pytest.raises(ConfigurationError, match="cache_gib is 1e-06"):
        fakes.hash_config(cache_gib=1e-6)
