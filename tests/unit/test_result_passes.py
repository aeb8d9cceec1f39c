"""A sharded result whose files several hosts make is the one that one process writes, whoever fails at it."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.strategies import MadeRun, flip_bit
from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.errors import OutputError, ResultError, SourceGoneError, VirNucProError
from virnucpro.pipeline.blocks.finished_blocks import seal_shard
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hosts import result_passes as passes
from virnucpro.pipeline.hosts.result_passes import ResultPasses
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.store.parts import SealedBlocks
from virnucpro.store.results import hdf5

SHARDS = 6
HOST = "a host"
"""Name of the threads that stand for other hosts."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 7)


@pytest.fixture
def run(tmp_path):
    records = [(f"s{n}", "ACDEFGHIKL"[n % 10 :] * (n % 5 + 1) + "MKV"[: n % 3]) for n in range(40)]
    made = MadeRun(tmp_path, [*records, ("copy", records[5][1])], max_residues=20)
    blocks = len(made.plan)
    made.write_part(range(blocks // 2))
    seal_shard(0, range(blocks // 2), made.plan, made.layout, hidden_dim=made.config.hidden_dim)
    middle = 3 * blocks // 4
    made.write_part(range(blocks // 2, middle))
    made.write_part(range(middle, blocks))
    made.prepared = PreparedRun(
        run_id="abcdef012345",
        output_dir=made.layout.output_dir,
        model_config=made.config,
        devices=(CPU, CPU),
        num_blocks=blocks,
        already_complete=False,
        result_form=ResultForm.SHARDED,
    )
    return made


class Hosts:
    """Does each item in a thread, as an engine does: it sends pickles, and what a host cannot do is done here."""

    def __init__(self):
        self.done = Counter()
        """Name of the function -> items."""

    def __call__(self, function, items):
        data = [pickle.dumps((function, item)) for item in items]
        with ThreadPoolExecutor(2, thread_name_prefix=HOST) as pool:
            futures = [pool.submit(self._item, one) for one in data]
        answers = []
        for future, item in zip(futures, items, strict=True):
            try:
                answers.append(pickle.loads(future.result()))
            except VirNucProError:
                answers.append(function(item))
        return answers

    def _item(self, data):
        function, item = pickle.loads(data)
        answer = function(item)
        self.done[getattr(function, "func", function).__name__] += 1
        return pickle.dumps(answer)


@pytest.fixture
def elsewhere():
    return Hosts()


@pytest.fixture
def hosts(run, elsewhere):
    return ResultPasses(run.prepared, elsewhere)


def aggregate(run, hosts=None):
    return aggregate_shards(
        run.layout,
        run.index,
        run.plan,
        max_residues=run.config.max_residues,
        hidden_dim=run.config.hidden_dim,
        result_form=ResultForm.SHARDED,
        hosts=hosts,
    )


def validate(run, result, hosts):
    validate_result(
        result.output_path, run.index, expected_rows=result.num_rows, expected_files=result.files, hosts=hosts
    )


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_host():
    return threading.current_thread().name.startswith(HOST)


def test_what_hosts_write_is_what_one_process_writes(run, hosts, elsewhere):
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    assert len(before) == SHARDS + 1
    result = aggregate(run, hosts)
    validate(run, result, hosts)
    assert result == alone
    assert bytes_of(result.output_path) == before
    assert elsewhere.done == {"_seal": 3, "_write": SHARDS, "_holds": SHARDS}


def test_what_is_missing_is_missing_whoever_writes(run, hosts):
    run.layout.shard(0).unlink()
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    assert alone.num_missing
    result = aggregate(run, hosts)
    validate(run, result, hosts)
    assert result == alone
    assert bytes_of(result.output_path) == before


def test_rows_that_two_files_hold_are_taken_once(run, hosts):
    run.write_part([0])
    run.write_part(range(len(run.plan) // 2 + 1))
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    assert aggregate(run, hosts) == alone
    assert bytes_of(alone.output_path) == before


@pytest.mark.parametrize("method", ["check", "open"])
def test_a_host_that_cannot_read_a_file_is_not_believed(run, hosts, elsewhere, monkeypatch, method):
    alone = bytes_of(aggregate(run).output_path)
    original, refused = getattr(SealedBlocks, method), []

    def refused_to_the_host(*args, **settings):
        if is_host() and not elsewhere.done["_write"] and len(refused) < 3:
            refused.append(args)
            raise OSError(5, "Input/output error")
        return original(*args, **settings)

    monkeypatch.setattr(SealedBlocks, method, refused_to_the_host)
    result = aggregate(run, hosts)
    assert len(refused) == 3
    assert result.is_complete
    assert bytes_of(result.output_path) == alone


def test_what_a_host_cannot_write_is_written_by_another(run, hosts, monkeypatch):
    alone = bytes_of(aggregate(run).output_path)
    write, refused = passes.write_file, []

    def refused_to_the_host(path, rows):
        if is_host():
            refused.append(path)
            raise OutputError(path, "Read-only file system")
        write(path, rows)

    monkeypatch.setattr(passes, "write_file", refused_to_the_host)
    result = aggregate(run, hosts)
    assert len(refused) == SHARDS
    assert bytes_of(result.output_path) == alone


def test_where_a_source_went_all_is_read_again(run, hosts, monkeypatch):
    alone = bytes_of(aggregate(run).output_path)
    write, gone = passes.write_file, []

    def gone_twice(path, rows):
        if len(gone) < 2:
            gone.append(path)
            raise SourceGoneError(path)
        write(path, rows)

    monkeypatch.setattr(passes, "write_file", gone_twice)
    monkeypatch.setattr(hosts, "_do", lambda function, items: [function(item) for item in items])
    result = aggregate(run, hosts)
    validate(run, result, hosts)
    assert len(gone) == 2
    assert bytes_of(result.output_path) == alone


def test_a_damaged_shard_is_named_though_a_host_found_it(run, hosts):
    result = aggregate(run, hosts)
    flip_bit(sorted(result.output_path.glob("shard-*"))[2], 9000)
    with pytest.raises(ResultError, match="damaged") as caught:
        validate(run, result, hosts)
    assert "shard-00002-of" in caught.value.path


def test_an_index_of_other_ids_is_found_though_hosts_looked_at_the_shards(run, hosts):
    result = aggregate(run, hosts)
    index = result.output_path / "ids.index"
    flip_bit(index, 8 * (index.stat().st_size - 16))
    files = {**result.files, "embeddings/ids.index": durable.sha256_of(index)}
    with pytest.raises(ResultError, match=r"ids\.index"):
        validate_result(result.output_path, run.index, expected_rows=41, expected_files=files, hosts=hosts)


def test_a_shard_that_is_written_twice_is_written_under_names_of_their_own_and_nothing_is_left(
    run, elsewhere, monkeypatch
):
    places, write = [], passes.write_file

    def noted(path, rows):
        places.append(path)
        write(path, rows)

    def twice(function, items):
        """As an engine that has lost sight of a host and asks another."""
        elsewhere(function, items)
        return elsewhere(function, items)

    monkeypatch.setattr(passes, "write_file", noted)
    result = aggregate(run, ResultPasses(run.prepared, twice))
    assert len(set(places)) == 2 * SHARDS
    assert {path.parent for path in places} == {run.layout.shared_rows_dir}
    assert not run.layout.shared_rows_dir.exists()
    validate(run, result, None)
