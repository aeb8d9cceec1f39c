"""Units of work, claimed by real processes in one folder: every one is done, whatever happens to who had it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.errors import OutputError, ResultError
from virnucpro.pipeline.work import unit_claims
from virnucpro.pipeline.work.unit_claims import (
    UnitClaims,
    UnitSource,
    cut_units,
    numbers_in,
    owners_of_done,
    read_units,
    write_units,
)
from virnucpro.run_layout import UnitsLayout
from virnucpro.store.locks import lease
from virnucpro.store.locks.lease import ExpiryWatch, Lease

LEASE_S = 1.5


def make_units(folder, *, blocks=40, devices=1, lease_s=LEASE_S):
    return write_units(
        folder,
        run_id="r1",
        plan_fingerprint="f",
        blocks=range(blocks),
        tokens=np.full(blocks, 100, np.int64),
        devices=devices,
        lease_s=lease_s,
    )


@pytest.fixture
def start(tmp_path):
    """Start processes that claim; what is left of them at the end is killed."""
    (tmp_path / "notes").mkdir()
    started = []

    def one(seconds_a_unit):
        arguments = [tmp_path / "units", tmp_path / "notes", str(seconds_a_unit)]
        process = subprocess.Popen([sys.executable, "-m", "tests.claimers", *arguments], cwd=Path(__file__).parents[2])
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.wait()


def notes_of(tmp_path, process, word):
    path = tmp_path / "notes" / str(process.pid)
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


def wait_until(is_so, timeout_s=60):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


# --- units of a plan ---


@given(st.lists(st.integers(1, 5000), max_size=300), st.integers(1, 12))
def test_units_cover_the_blocks_to_do_once_and_in_order(tokens, devices):
    units = cut_units(np.array(tokens, np.int64), devices=devices)
    assert [place for unit in units for place in unit] == list(range(len(tokens)))
    assert all(units)
    assert units == cut_units(np.array(tokens, np.int64), devices=devices)


@pytest.mark.parametrize("devices", [1, 4, 100])
def test_units_get_smaller_so_that_a_device_ten_times_slower_ends_with_the_others(devices):
    tokens = np.full(20_000 * devices, 4096, np.int64)
    units = cut_units(tokens, devices=devices)
    assert len(units) < 40 * devices
    rates = [1.0 if number % 2 else 0.1 for number in range(devices)]
    free_at = [0.0] * devices
    for unit in units:
        soonest = min(range(devices), key=lambda number: free_at[number])
        free_at[soonest] += len(unit) / rates[soonest]
    ideal = len(tokens) / sum(rates)
    assert max(free_at) < 1.05 * ideal


def test_what_is_written_is_read_again_and_leaves_out_what_is_done(tmp_path):
    todo = [3, 4, 5, 9, 12, 13]
    tokens = np.full(20, 7, np.int64)
    written = write_units(tmp_path, run_id="r", plan_fingerprint="f", blocks=todo, tokens=tokens, devices=2)
    found = read_units(tmp_path)
    assert found == written
    assert [block for unit in range(len(found)) for block in found.blocks(unit)] == todo


def test_a_folder_without_units_is_refused_by_name(tmp_path):
    with pytest.raises(ResultError, match=r"units\.json"):
        read_units(tmp_path)


def test_no_blocks_to_do_are_no_units_and_everything_is_done(tmp_path):
    make_units(tmp_path, blocks=0)
    claims = UnitClaims(UnitSource(tmp_path, "a"))
    assert claims.all_done()
    assert claims.take() is None
    assert claims.wait(threading.Event()) is None


# --- one owner ---


def test_a_unit_is_done_once_all_its_blocks_are_durable(tmp_path):
    plan = make_units(tmp_path)
    claims = UnitClaims(UnitSource(tmp_path, "a"))
    first, second = claims.take(), claims.take()
    assert (first.number, second.number) == (0, 1)
    claims.mark_durable([*first.blocks[:-1], *second.blocks])
    assert numbers_in(UnitsLayout(tmp_path).done_dir) == {1}
    claims.mark_durable(first.blocks[-1:])
    assert owners_of_done(tmp_path, range(len(plan))) == {0: "a", 1: "a"}


def test_owners_that_begin_together_do_not_all_try_the_same_units(tmp_path, monkeypatch):
    owners = 64
    make_units(tmp_path, blocks=100 * owners, devices=owners)
    lost = 0

    class Counting(UnitClaims):
        def _claim(self, unit):
            nonlocal lost
            is_ours = super()._claim(unit)
            lost += not is_ours
            return is_ours

    everybody = [Counting(UnitSource(tmp_path, f"owner-{number}")) for number in range(owners)]
    monkeypatch.setattr(unit_claims, "numbers_in", lambda *_, **__: set())  # all have looked before any has claimed
    taken = [one.take().number for one in everybody]
    assert len(set(taken)) == owners
    assert max(taken) < 2 * owners, "the units at the end, which are small, are kept for the end"
    assert lost < 8 * owners, "in the order of the units it is 31.5 tries an owner"


def test_whoever_takes_a_free_unit_lists_the_claims_only_and_whoever_waits_lists_them_seldom(tmp_path, monkeypatch):
    listed = []

    def looked(folder, *, refresh=False):
        listed.append(folder.name)
        return numbers_in(folder, refresh=refresh)

    make_units(tmp_path, lease_s=6)
    claims, other = (UnitClaims(UnitSource(tmp_path, name)) for name in "ab")
    monkeypatch.setattr(unit_claims, "numbers_in", looked)
    first = claims.take()
    assert listed == ["claims"]
    claims.mark_durable(first.blocks)
    while (unit := claims.take()) is not None:
        claims.mark_durable(unit.blocks[:-1])
    monkeypatch.setattr(unit_claims, "UNITS_LOOKED_AT_A_SECOND", 0.001)
    listed.clear()
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    assert other.wait(stop) is None
    assert listed == ["done", "claims", "done"], "one look in half a second, since each takes long"


def test_the_next_process_of_an_owner_gets_its_unfinished_units_first_and_knows_that_they_were_begun(tmp_path):
    make_units(tmp_path)
    before = UnitClaims(UnitSource(tmp_path, "a"))
    units = [before.take() for _ in range(3)]
    before.mark_durable(units[1].blocks)
    claims = UnitClaims(UnitSource(tmp_path, "a"))
    taken = [claims.take() for _ in range(3)]
    assert [(unit.number, unit.is_fresh) for unit in taken] == [(0, False), (2, False), (3, True)]
    assert claims.own_blocks() == sorted(block for unit in [*units, taken[-1]] for block in unit.blocks)


def test_what_is_released_is_free_for_others_at_once_and_what_is_done_stays_done(tmp_path):
    make_units(tmp_path, lease_s=1000)
    claims = UnitClaims(UnitSource(tmp_path, "a"))
    units = [claims.take() for _ in range(3)]
    claims.mark_durable(units[0].blocks)
    claims.release()
    other = UnitClaims(UnitSource(tmp_path, "b"))
    assert [other.take().number for _ in range(2)] == [1, 2]


def test_a_unit_that_an_owner_lost_is_not_released_for_its_new_owner(tmp_path):
    make_units(tmp_path)
    layout = UnitsLayout(tmp_path)
    frozen = UnitClaims(UnitSource(tmp_path, "a"))
    unit = frozen.take().number
    (layout.claims_dir / f"{unit:06d}").unlink()
    assert UnitClaims(UnitSource(tmp_path, "b")).take().number == unit
    frozen.release()
    assert UnitClaims(UnitSource(tmp_path, "c")).take().number == unit + 1


def test_waiting_ends_when_it_is_told_to_and_says_that_it_goes_on(tmp_path):
    make_units(tmp_path, blocks=1, lease_s=1000)
    assert UnitClaims(UnitSource(tmp_path, "a")).take() is not None
    stop, words = threading.Event(), []

    def on_wait():
        words.append(time.monotonic())
        if len(words) == 2:
            stop.set()

    assert UnitClaims(UnitSource(tmp_path, "b")).wait(stop, on_wait) is None
    assert len(words) == 2


def test_a_folder_that_goes_away_is_an_output_error(tmp_path):
    make_units(tmp_path)
    claims = UnitClaims(UnitSource(tmp_path, "a"))
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(OutputError):
        claims.take()


def test_a_claim_that_cannot_be_read_lapses_like_one_of_nobody(tmp_path):
    make_units(tmp_path, blocks=1, lease_s=0.5)
    (UnitsLayout(tmp_path).claims_dir / "000000").write_bytes(b"")
    assert UnitClaims(UnitSource(tmp_path, "a")).wait(threading.Event()).number == 0


def test_an_owner_whose_lease_lapsed_is_robbed_by_one_of_many_only(tmp_path):
    make_units(tmp_path, blocks=1, lease_s=0.3)
    assert UnitClaims(UnitSource(tmp_path, "gone")).take() is not None
    stop, taken = threading.Event(), []

    def rob(name):
        with Lease(UnitsLayout(tmp_path).owner(name), {}, lease_s=0.3):
            unit = UnitClaims(UnitSource(tmp_path, name)).wait(stop)
            if unit is not None:
                taken.append(name)
                time.sleep(1.5)
                stop.set()

    threads = [threading.Thread(target=rob, args=(f"robber{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1


# --- leases ---


def test_a_read_that_hangs_tells_nothing_of_whether_a_lease_lapses(tmp_path, monkeypatch):
    path = tmp_path / "owner"
    path.write_text("{}")
    watch = ExpiryWatch(0.3)
    assert not watch.has_expired(path)

    def hangs(path):
        time.sleep(0.5)
        return path.read_bytes()

    with monkeypatch.context() as patched:
        patched.setattr(lease, "_bytes_of", hangs)
        assert not watch.has_expired(path), "the file system was away, for the owner as well"
    assert not watch.has_expired(path)
    time.sleep(0.4)
    assert watch.has_expired(path)


def test_a_lease_is_judged_by_the_clock_of_who_looks_never_by_its_dates(tmp_path):
    path = tmp_path / "owner"
    watch = ExpiryWatch(0.6)
    with Lease(path, {"host": "a"}, lease_s=0.6):
        deadline_s = time.monotonic() + 1.5
        while time.monotonic() < deadline_s:
            os.utime(path, (0, 0))  # a host whose clock stands at 1970
            assert not watch.has_expired(path)
            time.sleep(0.05)
    path.write_bytes(b"the last word")
    os.utime(path, (4e9, 4e9))  # one whose clock is a century ahead
    assert not watch.has_expired(path)
    time.sleep(0.8)
    assert watch.has_expired(path)
    path.write_bytes(b"back again")
    assert not watch.has_expired(path)


def test_a_lease_that_ends_well_leaves_no_file(tmp_path):
    with Lease(tmp_path / "owner", {"host": "a"}):
        assert b'"host": "a"' in (tmp_path / "owner").read_bytes()
    assert not (tmp_path / "owner").exists()


# --- several processes ---


def test_several_processes_do_every_unit_exactly_once(tmp_path, start):
    plan = make_units(tmp_path / "units", blocks=300, devices=3, lease_s=60)
    processes = [start(0.005) for _ in range(4)]
    for process in processes:
        assert process.wait(60) == 0
    did = Counter(unit for process in processes for unit in notes_of(tmp_path, process, "did"))
    assert did == dict.fromkeys(range(len(plan)), 1)
    assert sum(bool(notes_of(tmp_path, process, "did")) for process in processes) > 1
    left = [path for path in (tmp_path / "units").rglob("*") if path.name.startswith(".")]
    assert left == list(UnitsLayout(tmp_path / "units").owners_dir.iterdir()) == []


def test_the_unit_of_a_process_that_was_killed_is_done_by_another_after_its_lease(tmp_path, start):
    plan = make_units(tmp_path / "units", blocks=20)
    victim = start(3600)
    wait_until(lambda: notes_of(tmp_path, victim, "took"))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    killed_s = time.monotonic()
    others = [start(0.01) for _ in range(2)]
    for process in others:
        assert process.wait(60) == 0
    assert time.monotonic() - killed_s > LEASE_S
    did = Counter(unit for process in others for unit in notes_of(tmp_path, process, "did"))
    assert did == dict.fromkeys(range(len(plan)), 1)


def test_an_owner_that_stood_still_and_goes_on_does_no_harm(tmp_path, start):
    plan = make_units(tmp_path / "units", blocks=20)
    frozen = start(1.0)
    wait_until(lambda: notes_of(tmp_path, frozen, "took"))
    frozen.send_signal(signal.SIGSTOP)
    other = start(0.01)
    assert other.wait(60) == 0
    assert len(numbers_in(UnitsLayout(tmp_path / "units").done_dir)) == len(plan)
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 0
    did = Counter(unit for process in (frozen, other) for unit in notes_of(tmp_path, process, "did"))
    assert sorted(did) == list(range(len(plan)))
    assert did.total() <= len(plan) + 1, "only the unit that it had may be done twice"


def test_a_living_owner_keeps_its_unit_however_long_it_takes(tmp_path, start):
    plan = make_units(tmp_path / "units", blocks=3)
    slow = start(3 * LEASE_S)
    wait_until(lambda: notes_of(tmp_path, slow, "took"))
    other = start(0.01)
    assert (other.wait(60), slow.wait(60)) == (0, 0)
    did = Counter(unit for process in (slow, other) for unit in notes_of(tmp_path, process, "did"))
    assert did == dict.fromkeys(range(len(plan)), 1)
