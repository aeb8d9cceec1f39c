"""A sharded result that several hosts put together is the one that one process writes, whoever comes and goes."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from contextlib import contextmanager

import pytest

from tests.strategies import MadeRun, flip_bit
from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.errors import OutputError, ResultError, SourceGoneError
from virnucpro.pipeline.blocks.finished_blocks import seal_shard
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.hosts import host_watch
from virnucpro.pipeline.hosts import result_passes as passes
from virnucpro.pipeline.hosts.result_passes import ResultPasses, help_with_result
from virnucpro.pipeline.run.run_preparation import PreparedRun
from virnucpro.pipeline.shard_aggregator import aggregate_shards, validate_result
from virnucpro.pipeline.work import unit_claims
from virnucpro.store.parts import SealedBlocks
from virnucpro.store.results import hdf5

SHARDS = 6
HOST = "a host"
"""Name of the thread that stands for another host."""


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 7)
    monkeypatch.setattr(passes, "LOOK_S", 0.01)
    monkeypatch.setattr(host_watch, "WATCH_INTERVAL_S", 0.01)


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


@contextmanager
def host(run, *, stop=None, lease_s=60.0):
    """Another host, here a thread; yields what it has done, or why it left, once it has ended."""
    ended = []

    def take_part():
        try:
            ended.append(help_with_result(run.prepared, stop=stop, lease_s=lease_s))
        except Exception as error:  # noqa: BLE001  # the test looks at it
            ended.append(error)

    thread = threading.Thread(target=take_part, name=HOST)
    thread.start()
    try:
        yield ended
    finally:
        thread.join(60)
        assert not thread.is_alive(), "it was told to stop"


def is_host():
    return threading.current_thread().name == HOST


@pytest.fixture
def together(monkeypatch):
    """The driver does nothing of a pass before the host has begun with it, so that both have their share."""
    begun = {}

    def with_the_host(make):
        def made(run, layout, task):
            do, host_has = make(run, layout, task), begun.setdefault(layout.folder, threading.Event())

            def done(item):
                if is_host():
                    host_has.set()
                assert host_has.wait(30)
                return do(item)

            return done

        return made

    monkeypatch.setattr(unit_claims, "LOOK_INTERVAL_S", 0.01)
    for kind, make in passes._KINDS.items():
        monkeypatch.setitem(passes._KINDS, kind, with_the_host(make))
    return begun


def test_what_hosts_write_together_is_what_one_process_writes(run, together):
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    assert len(before) == SHARDS + 1
    with ResultPasses(run.prepared) as hosts, host(run) as done:
        result = aggregate(run, hosts)
        validate(run, result, hosts)
        hosts.end()
    assert result == alone
    assert bytes_of(result.output_path) == before
    assert len(together) == 3
    assert all(host_has.is_set() for host_has in together.values()), "it had files to check, to write and to validate"
    assert 3 <= done[0] <= 3 + 2 * SHARDS


def test_the_driver_needs_nobody(run):
    alone = bytes_of(aggregate(run).output_path)
    with ResultPasses(run.prepared) as hosts:
        result = aggregate(run, hosts)
        validate(run, result, hosts)
    assert bytes_of(result.output_path) == alone


@pytest.mark.usefixtures("together")
def test_what_is_missing_is_missing_whoever_writes(run):
    run.layout.shard(0).unlink()
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    assert alone.num_missing
    with ResultPasses(run.prepared) as hosts, host(run) as done:
        result = aggregate(run, hosts)
        validate(run, result, hosts)
        hosts.end()
    assert result == alone
    assert bytes_of(result.output_path) == before
    assert done[0] > 0


def test_rows_that_two_files_hold_are_taken_once(run):
    run.write_part([0])
    run.write_part(range(len(run.plan) // 2 + 1))
    alone = aggregate(run)
    before = bytes_of(alone.output_path)
    with ResultPasses(run.prepared) as hosts:
        assert aggregate(run, hosts) == alone
    assert bytes_of(alone.output_path) == before


def _die_in_the_middle(prepared):
    write, written = passes.write_file, []

    def die_at_the_second(path, rows):
        if written:
            passes.os.kill(passes.os.getpid(), 9)
        write(path, rows)
        written.append(path)

    passes.write_file = die_at_the_second
    passes.LOOK_S = 0.01
    help_with_result(prepared)


def test_the_files_of_a_host_that_died_are_done_by_others(run, monkeypatch):
    alone = bytes_of(aggregate(run).output_path)
    host_process = multiprocessing.get_context("fork").Process(target=_die_in_the_middle, args=(run.prepared,))
    write = passes.write_file

    def once_it_is_dead(path, rows):
        host_process.join(30)
        write(path, rows)

    with ResultPasses(run.prepared, lease_s=1.2) as hosts:
        host_process.start()
        monkeypatch.setattr(passes, "write_file", once_it_is_dead)
        result = aggregate(run, hosts)
    assert host_process.exitcode == -9
    assert bytes_of(result.output_path) == alone


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("method", ["check", "open"])
def test_a_host_that_cannot_read_a_file_is_not_believed(run, monkeypatch, method):
    alone = bytes_of(aggregate(run).output_path)
    original = getattr(SealedBlocks, method)

    def refused_to_the_host(*args, **settings):
        if is_host():
            raise OSError(5, "Input/output error")
        return original(*args, **settings)

    monkeypatch.setattr(SealedBlocks, method, refused_to_the_host)
    with ResultPasses(run.prepared) as hosts, host(run):
        result = aggregate(run, hosts)
        hosts.end()
    assert result.is_complete
    assert bytes_of(result.output_path) == alone


@pytest.mark.usefixtures("together")
def test_a_host_that_cannot_write_leaves_and_the_others_write(run, monkeypatch):
    alone = bytes_of(aggregate(run).output_path)
    write = passes.write_file

    def refused_to_the_host(path, rows):
        if is_host():
            raise OutputError(path, "Read-only file system")
        write(path, rows)

    monkeypatch.setattr(passes, "write_file", refused_to_the_host)
    with ResultPasses(run.prepared) as hosts, host(run) as done:
        result = aggregate(run, hosts)
        hosts.end()
    assert "Read-only" in str(done[0])
    assert bytes_of(result.output_path) == alone


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("who", ["driver", "host"])
def test_where_a_source_went_all_is_read_again(run, monkeypatch, who):
    alone = bytes_of(aggregate(run).output_path)
    write, gone = passes.write_file, []

    def gone_once(path, rows):
        if not gone and is_host() == (who == "host"):
            gone.append(path)
            raise SourceGoneError(path)
        write(path, rows)

    monkeypatch.setattr(passes, "write_file", gone_once)
    with ResultPasses(run.prepared) as hosts, host(run) as done:
        result = aggregate(run, hosts)
        validate(run, result, hosts)
        hosts.end()
    assert gone
    assert bytes_of(result.output_path) == alone
    assert isinstance(done[0], int), "it takes part in what comes next"


@pytest.mark.usefixtures("together")
def test_a_damaged_shard_is_named_whoever_finds_it(run):
    with ResultPasses(run.prepared) as hosts, host(run):
        result = aggregate(run, hosts)
        flip_bit(sorted(result.output_path.glob("shard-*"))[2], 9000)
        try:
            with pytest.raises(ResultError, match="damaged") as caught:
                validate(run, result, hosts)
        finally:
            hosts.end()
    assert "shard-00002-of" in caught.value.path


def test_an_index_of_other_ids_is_found_though_hosts_looked_at_the_shards(run):
    with ResultPasses(run.prepared) as hosts:
        result = aggregate(run, hosts)
        index = result.output_path / "ids.index"
        flip_bit(index, 8 * (index.stat().st_size - 16))
        files = {**result.files, "embeddings/ids.index": durable.sha256_of(index)}
        with pytest.raises(ResultError, match=r"ids\.index"):
            validate_result(result.output_path, run.index, expected_rows=41, expected_files=files, hosts=hosts)


def test_a_host_ends_when_it_is_told_when_the_driver_is_gone_and_when_the_folder_is(run):
    stop = threading.Event()
    with ResultPasses(run.prepared) as hosts:
        with host(run, stop=stop) as done:
            stop.set()
        assert done == [0]
        with host(run) as done:
            hosts.end()
        assert done == [0]
    driver = run.layout.units(run.prepared.run_id).result_dir / "driver"
    driver.write_text(json.dumps({"host": "gone"}))
    began_s = time.monotonic()
    with host(run, lease_s=0.6) as done:
        pass
    assert done == [0]
    assert 0.5 < time.monotonic() - began_s < 30


def test_hosts_write_where_only_the_driver_moves_it_from(run, monkeypatch):
    places = []
    write = passes.write_file

    def noted(path, rows):
        places.append(path)
        write(path, rows)

    monkeypatch.setattr(passes, "write_file", noted)
    with ResultPasses(run.prepared) as hosts:
        aggregate(run, hosts)
    assert len(places) == SHARDS
    assert all(run.layout.all_units_dir in path.parents for path in places)
    assert not any(path.exists() for path in places)
