"""Locks of GPUs, held by real processes: each GPU has one holder, who is known, and goes with it however it ends."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pynvml
import pytest

from tests.fake_nvml import FakeGpu, FakeNvml
from tests.fakes import NOBODY, another_user
from virnucpro.errors import DeviceError, ExitCode, OutputError
from virnucpro.pipeline.devices import Device
from virnucpro.pipeline.hardware.device_locks import DeviceHolder, DeviceLocks, lock_dir, lock_names

A, B, C = ("GPU-a", "GPU-b", "GPU-c")


@pytest.fixture
def folder(tmp_path):
    return lock_dir({"VIRNUCPRO_LOCK_DIR": str(tmp_path / "locks")})


@contextmanager
def child(work):
    """Run *work* in a process of its own; yield its number once it has said that it is ready; kill it at the end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            os.close(reads)
            work(lambda: os.write(writes, b"!"))
            code = 0
        os._exit(code)
    os.close(writes)
    try:
        with os.fdopen(reads, "rb", buffering=0) as said:
            assert said.read(1) == b"!", "the process did not get ready"
            yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def hold(folder, names, run_id="theirs"):
    def work(ready):
        assert DeviceLocks(folder).take(names, least=len(names), most=len(names), run_id=run_id) == names
        ready()
        time.sleep(60)

    return child(work)


def test_a_lock_has_one_holder_who_is_known(folder):
    ours = DeviceLocks(folder)
    with hold(folder, [A], run_id="run7") as pid:
        assert ours.take([A], least=1, most=1, run_id="ours") is None
        holder = ours.holder(A)
        assert (holder.pid, holder.run_id) == (pid, "run7")
        assert holder.user == DeviceHolder.ourselves("").user
        assert ours.take([A, B], least=1, most=2, run_id="ours") == [B]
        assert ours.holder(B).pid == os.getpid()
        ours.release()
        assert ours.holder(B) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_goes_with_its_holder_however_that_ends(folder, number):
    ours = DeviceLocks(folder)
    with hold(folder, [A]) as pid:
        os.kill(pid, number)
        os.waitpid(pid, 0)
        assert ours.take([A], least=1, most=1, run_id="ours") == [A]
        assert ours.holder(A).pid == os.getpid()
    ours.release()


def test_a_lock_does_not_outlive_its_holder_in_a_program_that_the_holder_started(folder, tmp_path):
    def work(ready):
        DeviceLocks(folder).take([A], least=1, most=1, run_id="theirs")
        program = subprocess.Popen(["sleep", "60"], close_fds=False)
        (tmp_path / "pid").write_text(str(program.pid))
        ready()
        time.sleep(60)

    with child(work) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        program = int((tmp_path / "pid").read_text())
        try:
            ours = DeviceLocks(folder)
            assert ours.take([A], least=1, most=1, run_id="ours") == [A]
            ours.release()
            os.kill(program, 0)  # it lives
        finally:
            os.kill(program, signal.SIGKILL)


def test_all_are_taken_or_none(folder):
    ours, third = DeviceLocks(folder), DeviceLocks(folder)
    with hold(folder, [B]):
        assert ours.take([A, B], least=2, most=2, run_id="ours") is None
        assert third.take([A], least=1, most=1, run_id="third") == [A]  # nothing of it was kept
        third.release()
        assert ours.take([A, B, C], least=2, most=2, run_id="ours") == [A, C]
    ours.release()


def test_no_more_than_asked_for_are_taken(folder):
    ours, third = DeviceLocks(folder), DeviceLocks(folder)
    assert ours.take([A, B, C], least=1, most=2, run_id="ours") == [A, B]
    assert third.take([A, B, C], least=1, most=3, run_id="third") == [C]
    ours.release()
    third.release()


def test_runs_that_all_need_two_of_three_get_them_in_turn_and_never_the_same(folder, tmp_path):
    book = tmp_path / "book"
    book.touch()
    names = {0: [A, B, C], 1: [C, B, A], 2: [B, C, A]}

    def work(number):
        locks = DeviceLocks(folder)
        for _ in range(30):
            while (taken := locks.take(names[number], least=2, most=2, run_id=str(number))) is None:
                time.sleep(0.0005)
            with book.open("a") as file:
                file.write("".join(f"+{name}\n" for name in taken))
                file.flush()
                file.write("".join(f"-{name}\n" for name in taken))
            locks.release()

    pids = []
    for number in names:
        pid = os.fork()
        if pid == 0:
            code = 1
            with suppress(BaseException):
                work(number)
                code = 0
            os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    held = set()
    lines = book.read_text().split()
    for line in lines:
        assert (line[1:] in held) is (line[0] == "-"), "two runs had one device"
        (held.add if line[0] == "+" else held.remove)(line[1:])
    assert len(lines) == 3 * 30 * 4


def test_two_runs_in_one_process_do_not_share_a_device(folder):
    ours, got = DeviceLocks(folder), []
    ours.take([A], least=1, most=1, run_id="ours")
    thread = threading.Thread(target=lambda: got.append(DeviceLocks(folder).take([A], least=1, most=1, run_id="two")))
    thread.start()
    thread.join()
    assert got == [None]
    ours.release()


def test_somebody_who_stands_still_while_choosing_holds_up_nobody_for_good(folder, monkeypatch):
    monkeypatch.setattr("virnucpro.pipeline.hardware.device_locks._SOON_S", 0.05)
    with DeviceLocks(folder)._alone() as theirs:
        assert theirs is not None
        assert DeviceLocks(folder).take([A], least=1, most=1, run_id="ours") is None
    ours = DeviceLocks(folder)
    assert ours.take([A], least=1, most=1, run_id="ours") == [A]
    ours.release()


# --- the folder ---


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
@pytest.mark.may_skip
@pytest.mark.parametrize("second", ["root", "nobody"])
def test_two_users_share_the_locks(for_all_users, second):
    before = os.umask(0o077)
    try:
        folder = lock_dir({"VIRNUCPRO_LOCK_DIR": str(for_all_users / "locks")})
        assert folder.stat().st_mode & 0o7777 == 0o1777

        def take_and_say():
            locks = DeviceLocks(folder)
            taken = locks.take([A, B], least=2, most=2, run_id="one")
            return locks, taken, locks.holder(A)

        def as_nobody():
            with another_user():
                return take_and_say()

        for first in ("nobody", "root") if second == "root" else ("root", "nobody"):
            locks, taken, holder = take_and_say() if first == "root" else as_nobody()
            assert taken == [A, B]
            assert holder.user == ("root" if first == "root" else pwd.getpwuid(NOBODY).pw_name)
            locks.release()
            assert stat_of(folder / f"{A}.lock") == 0o666
    finally:
        os.umask(before)


def stat_of(path):
    return path.stat().st_mode & 0o7777


def test_the_folder_is_the_one_that_is_named_else_the_first_that_can_be_made(tmp_path):
    named = tmp_path / "named"
    missing = tmp_path / "read-only" / "virnucpro"
    second = tmp_path / "second"
    assert lock_dir({"VIRNUCPRO_LOCK_DIR": str(named)}, usual=[second]) == named
    assert not second.exists()
    assert lock_dir({}, usual=[missing, second]) == second
    assert lock_dir({}, usual=[missing, second]) == second
    assert stat_of(second) == stat_of(named) == 0o1777
    with pytest.raises(OutputError, match="VIRNUCPRO_LOCK_DIR") as caught:
        lock_dir({"VIRNUCPRO_LOCK_DIR": str(missing)}, usual=[second])
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / "locks").mkdir(mode=0o750)
    assert stat_of(lock_dir({"VIRNUCPRO_LOCK_DIR": str(tmp_path / "locks")})) == 0o750


def test_a_usual_folder_that_cannot_be_used_is_not_passed_over(tmp_path):
    (tmp_path / "first").touch()
    folder = lock_dir({}, usual=[tmp_path / "first", tmp_path / "second"])
    with pytest.raises(OutputError, match=r"Not a directory.*VIRNUCPRO_LOCK_DIR"):
        DeviceLocks(folder).take([A], least=1, most=1, run_id="ours")


def test_nothing_that_is_planted_in_the_folder_is_followed_or_written(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / f"{A}.lock").symlink_to(victim)
    (folder / f"{B}.lock").hardlink_to(victim)
    os.mkfifo(folder / f"{C}.lock")
    for name in (A, B, C):
        with pytest.raises(OutputError):
            DeviceLocks(folder).take([name], least=1, most=1, run_id="ours")
        assert DeviceLocks(folder).holder(name) is None
    assert victim.read_text() == "precious"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(folder)
    with pytest.raises(OutputError):
        DeviceLocks(elsewhere).take(["GPU-d"], least=1, most=1, run_id="ours")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "1"}', "[" * 100_000, json.dumps({"host": 1}), "\0" * 9000])
def test_a_lock_file_that_tells_nothing_believable_is_a_holder_unknown(folder, text):
    (folder / f"{A}.lock").write_text(text)
    ours = DeviceLocks(folder)
    assert ours.holder(A) is None
    assert ours.take([A], least=1, most=1, run_id="ours") == [A]
    assert ours.holder(A).run_id == "ours"
    ours.release()


# --- names ---

UUIDS = [f"GPU-{number}8932f93-d72c-4106-c12f-20bd9faed9f6" for number in range(3)]
MIG = "MIG-fd3b6f1a-0000-1111-2222-333344445555"


def names_of(*tokens, gpus=None, order=None, **nvml):
    fake = FakeNvml([FakeGpu(uuid) for uuid in UUIDS] if gpus is None else gpus, **nvml)
    environ = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    names = lock_names([Device(token) for token in tokens], nvml=fake, environ=environ)
    assert fake.users == 0
    assert [device.token for device in names.values()] == list(tokens)
    return list(names)


def test_a_lock_is_named_by_uuid_however_the_gpu_is_named():
    assert names_of("2", "0") == names_of(UUIDS[2], UUIDS[0]) == names_of("GPU-28", "GPU-08") == [UUIDS[2], UUIDS[0]]


def test_numbers_that_cuda_may_count_otherwise_are_names_of_their_own():
    mixed = [FakeGpu(UUIDS[0], name="T4"), FakeGpu(UUIDS[1])]
    assert names_of("1", gpus=mixed) == names_of("1", gpus=mixed, order="FASTEST_FIRST") == ["GPU-1"]
    assert names_of("1", gpus=mixed, order="PCI_BUS_ID") == [UUIDS[1]]
    with_instances = [FakeGpu(UUIDS[0], instances=[FakeGpu(MIG)]), FakeGpu(UUIDS[1])]
    assert names_of("1", gpus=with_instances, order="PCI_BUS_ID") == ["GPU-1"]


def test_instances_are_named_by_their_own_uuid():
    gpus = [FakeGpu(UUIDS[0], instances=[FakeGpu(MIG)])]
    assert names_of(MIG, gpus=gpus) == names_of(MIG, has_driver=False) == [MIG]
    assert names_of(f"MIG-{UUIDS[0]}/1/2", gpus=gpus) == [f"MIG-{UUIDS[0]}_1_2"]


def test_without_the_drivers_word_the_token_is_the_name():
    assert names_of("0", "1", has_driver=False) == ["GPU-0", "GPU-1"]
    failing = {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_UNKNOWN}
    assert names_of("0", gpus=[FakeGpu(UUIDS[0], failing=failing)]) == ["GPU-0"]
    assert names_of(UUIDS[1], gpus=[FakeGpu(UUIDS[1], lost=True)]) == [UUIDS[1]]


def test_one_gpu_under_two_names_is_refused():
    with pytest.raises(DeviceError, match="one GPU"):
        names_of(UUIDS[0], "GPU-08")


def test_locks_cost_no_framework_and_no_prefect():
    module = "virnucpro.pipeline.hardware.device_locks"
    code = f"import sys, {module}; print([n for n in ('torch', 'prefect') if n in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
