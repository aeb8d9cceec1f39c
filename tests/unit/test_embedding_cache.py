"""The embedding cache: equal rows or none, within its bound, whatever happens to its processes and its file."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import cache_rows, put_and_get, put_forever
from tests.strategies import flip_bit
from virnucpro.errors import CacheError
from virnucpro.store import embedding_cache
from virnucpro.store.embedding_cache import FILE_NAME, EmbeddingCache, file_system_of

MIB = 1 << 20


def opened(folder, space="model", max_bytes=64 * MIB, **others):
    return EmbeddingCache(folder, space, max_bytes=max_bytes, **others)


def test_rows_come_back_as_they_were_put_in_the_order_asked_for(tmp_path):
    hashes, rows = cache_rows(range(3000))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
    order = np.random.default_rng(1).permutation(3000)
    with opened(tmp_path) as cache:
        found = cache.get(hashes[order])
        assert found.dtype == np.float32
        assert found.tobytes() == rows[order].tobytes()


@pytest.mark.parametrize("width", [1, 8, 320, 2560, 30_000])
def test_rows_of_any_width(tmp_path, width):
    hashes, _ = cache_rows(range(40))
    rows = np.random.default_rng(width).normal(size=(40, width)).astype(np.float32)
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
        assert cache.get(hashes).tobytes() == rows.tobytes()


def test_one_missing_row_means_none(tmp_path):
    hashes, rows = cache_rows(range(10))
    with opened(tmp_path) as cache:
        cache.put(np.delete(hashes, 7, axis=0), np.delete(rows, 7, axis=0))
        assert cache.get(hashes) is None
        assert cache.get(hashes[:7]).tobytes() == rows[:7].tobytes()
        cache.put(hashes, rows)
        assert cache.get(hashes).tobytes() == rows.tobytes()


def test_rows_of_another_space_are_not_there(tmp_path):
    hashes, rows = cache_rows(range(10))
    with opened(tmp_path) as cache, opened(tmp_path, "another model") as other:
        cache.put(hashes, rows)
        assert other.get(hashes) is None
        other.put(hashes, rows + 1)
        assert cache.get(hashes).tobytes() == rows.tobytes()
        assert other.get(hashes).tobytes() == (rows + 1).tobytes()


def test_rows_that_are_there_already_stay(tmp_path):
    hashes, rows = cache_rows(range(10))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
        cache.put(hashes, rows + 1)
        assert cache.get(hashes).tobytes() == rows.tobytes()


def test_the_file_keeps_its_bound_and_the_least_recently_used_rows_go(tmp_path):
    now = [0.0]
    bound = 6 * MIB
    batches = [cache_rows(range(n * 200, n * 200 + 200), width=1024) for n in range(40)]
    with opened(tmp_path, max_bytes=bound, clock=lambda: now[0]) as cache:
        for number, (hashes, rows) in enumerate(batches):
            now[0] = number
            cache.put(hashes, rows)
            assert cache.get(hashes) is not None
            cache.get(batches[0][0])  # used again and again, so that it never goes
            assert (tmp_path / FILE_NAME).stat().st_size <= bound
        there = [number for number, (hashes, _) in enumerate(batches) if cache.get(hashes) is not None]
    assert there[0] == 0
    assert there[1:] == list(range(there[1], 40)), "what went is what was put first"
    assert 4 <= len(there) < 8


def test_a_smaller_bound_shortens_the_file(tmp_path):
    with opened(tmp_path) as cache:
        for n in range(20):
            cache.put(*cache_rows(range(n * 100, n * 100 + 100), width=1024))
    assert (tmp_path / FILE_NAME).stat().st_size > 7 * MIB
    with opened(tmp_path, max_bytes=3 * MIB) as cache:
        cache.put(*cache_rows([5000], width=1024))
        assert cache.get(cache_rows([5000])[0]) is not None
    assert (tmp_path / FILE_NAME).stat().st_size <= 3 * MIB


def test_more_than_the_bound_at_once_is_left_out(tmp_path):
    with opened(tmp_path, max_bytes=2 * MIB) as cache:
        hashes, rows = cache_rows(range(4000), width=512)
        cache.put(hashes, rows)
        assert cache.get(hashes[:1]) is None


def test_a_flipped_bit_is_never_served(tmp_path):
    hashes, rows = cache_rows(range(200))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    outcomes = {"served": 0, "missing": 0, "refused": 0}
    chooser = random.Random(3)
    for _ in range(100):
        path.write_bytes(whole)
        for _ in range(chooser.choice([1, 1, 50])):
            flip_bit(path, chooser.randrange(len(whole) * 8))
        try:
            with opened(tmp_path) as cache:
                for start in range(0, 200, 10):
                    found = cache.get(hashes[start : start + 10])
                    if found is not None:
                        assert found.tobytes() == rows[start : start + 10].tobytes()
                    outcomes["missing" if found is None else "served"] += 1
        except CacheError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_a_damaged_row_is_put_again(tmp_path):
    hashes, rows = cache_rows(range(20))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
    path = tmp_path / FILE_NAME
    flip_bit(path, 8 * (path.read_bytes().index(rows[4].tobytes()) + 9) + 2)
    with opened(tmp_path) as cache:
        assert cache.get(hashes) is None
        cache.put(hashes, rows)
        assert cache.get(hashes).tobytes() == rows.tobytes()


def test_several_processes_read_and_write_at_once(tmp_path):
    ctx = multiprocessing.get_context("spawn")
    results = ctx.SimpleQueue()
    # the folder does not exist: all of them make the cache
    arguments = [(tmp_path / "new", "model", seed, 64 * MIB, 400, results) for seed in range(4)]
    workers = [ctx.Process(target=put_and_get, args=some) for some in arguments]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert sum(results.get() for _ in workers) > 0
    with opened(tmp_path / "new") as cache:
        hashes, rows = cache_rows(range(2000))
        found = [cache.get(hashes[n : n + 1]) for n in range(2000)]
        assert sum(row is not None for row in found) > 1500
        assert all(row is None or row.tobytes() == rows[n].tobytes() for n, row in enumerate(found))
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME]


@pytest.mark.slow
def test_processes_killed_while_they_write_leave_a_usable_cache(tmp_path):
    ctx = multiprocessing.get_context("fork")
    chooser = random.Random(8)
    hashes, rows = cache_rows(range(20_000))
    bound = 3 * MIB  # evictions go on all the time
    for seed in range(25):
        workers = [ctx.Process(target=put_forever, args=(tmp_path, "model", 2 * seed + n, bound)) for n in range(2)]
        for worker in workers:
            worker.start()
        time.sleep(chooser.uniform(0.05, 0.3))
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        with opened(tmp_path, max_bytes=bound) as cache:
            served = 0
            for n in chooser.sample(range(20_000), 300):
                found = cache.get(hashes[n : n + 1])
                served += found is not None
                assert found is None or found.tobytes() == rows[n].tobytes()
        assert (tmp_path / FILE_NAME).stat().st_size <= bound
    assert served > 0
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_process_that_holds_the_lock_delays_but_does_not_break(tmp_path, monkeypatch):
    monkeypatch.setattr(embedding_cache, "LOCK_TIMEOUT_S", 0.2)
    hashes, rows = cache_rows(range(10))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)
        holder = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        assert cache.get(hashes).tobytes() == rows.tobytes()
        with pytest.raises(CacheError, match="locked"):
            cache.put(*cache_rows(range(10, 20)))
        holder.execute("ROLLBACK")
        cache.put(*cache_rows(range(10, 20)))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file.*Not a directory"):
        opened(tmp_path / "file" / "cache")


def test_a_file_of_another_format_is_refused_and_left_as_it_is(tmp_path):
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(CacheError, match="format 99"):
        opened(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / FILE_NAME).write_text("a text of somebody's own, longer than one header" * 100)
    with pytest.raises(CacheError, match="not a database"):
        opened(tmp_path / "other")
    assert (tmp_path / FILE_NAME).read_bytes() == before


def in_child(function):
    """Run *function* in a forked process; return its exit code."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:  # noqa: BLE001  # the test's own process must not go on twice
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_folder_that_only_others_may_write_to_is_refused():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened(folder).close()
        (folder / FILE_NAME).chmod(0o444)
        folder.chmod(0o555)

        def as_nobody():
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            with pytest.raises(CacheError, match=r"readonly|unable to open"):
                opened(folder)

        assert in_child(as_nobody) == 0
        folder.chmod(0o755)


def test_a_full_disk_is_refused_and_leaves_what_was_there(tmp_path):
    hashes, rows = cache_rows(range(100))
    with opened(tmp_path) as cache:
        cache.put(hashes, rows)

    def put_many(cache):
        for n in range(1, 100):
            cache.put(*cache_rows(range(n * 1000, n * 1000 + 1000)))

    def with_a_small_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
        with opened(tmp_path) as cache:
            with pytest.raises(CacheError):
                put_many(cache)
            assert cache.get(hashes).tobytes() == rows.tobytes()

    assert in_child(with_a_small_disk) == 0
    with opened(tmp_path) as cache:
        assert cache.get(hashes).tobytes() == rows.tobytes()
        cache.put(*cache_rows(range(5000, 6000)))


def test_a_network_file_system_is_refused(tmp_path, monkeypatch):
    assert file_system_of(tmp_path) not in {None, "nfs4"}
    monkeypatch.setattr(embedding_cache, "file_system_of", lambda folder: "nfs4")
    with pytest.raises(CacheError, match=r"network file system \(nfs4\)"):
        opened(tmp_path)
