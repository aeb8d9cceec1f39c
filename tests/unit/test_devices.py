"""Which devices are ours: every form of CUDA_VISIBLE_DEVICES and of --devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virnucpro.errors import DeviceError, ExitCode
from virnucpro.pipeline.devices import (
    CPU,
    VISIBLE_VARIABLE,
    Device,
    check_tokens,
    choose_devices,
    devices_for_ranks,
    first_devices,
    visible_tokens,
)

UUID_A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UUID_B = "GPU-1d0e7b2a-0000-1111-2222-333344445555"
MIG_NEW = "MIG-fd3b6f1a-0000-1111-2222-333344445555"
MIG_OLD = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"


def numbered(gpu_count):
    return [str(number) for number in range(gpu_count)]


def environ(value):
    return {} if value is None else {VISIBLE_VARIABLE: value}


def chosen_devices(choice, **settings):
    """One device a worker, were all of them free."""
    chosen = choose_devices(choice, **settings)
    return chosen.ranks(chosen.candidates[: chosen.most])


@pytest.mark.parametrize(
    ("value", "gpu_count", "tokens"),
    [
        (None, 0, []),
        (None, 3, ["0", "1", "2"]),
        ("", 3, []),
        ("  ", 3, []),
        ("0", 3, ["0"]),
        ("2,3", 4, ["2", "3"]),
        ("3,2", 4, ["3", "2"]),
        (" 2 , 3 ", 4, ["2", "3"]),
        ("07", 8, ["7"]),
        (UUID_A, 2, [UUID_A]),
        (f"{UUID_B},{UUID_A}", 2, [UUID_B, UUID_A]),
        ("GPU-8932f937", 2, ["GPU-8932f937"]),
        (MIG_NEW, 1, [MIG_NEW]),
        (f"{MIG_OLD},{MIG_NEW}", 1, [MIG_OLD, MIG_NEW]),
        ("-1", 2, []),
        ("0,-1,1", 2, ["0"]),
        ("1,-7", 2, ["1"]),
    ],
)
def test_the_visible_list_is_read_as_cuda_reads_it(value, gpu_count, tokens):
    assert visible_tokens(environ(value), present=numbered(gpu_count)) == tokens


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("0,0", "named twice"),
        ("1,01", "named twice"),
        (f"{UUID_A},{UUID_A}", "named twice"),
        (f"0,{UUID_A}", "mixed"),
        (f"{MIG_NEW},3", "mixed"),
        ("all", "'all' is neither"),
        ("0;1", "'0;1' is neither"),
        ("0,,1", "'' is neither"),
        ("0.5", "'0.5' is neither"),
        ("cuda:0", "'cuda:0' is neither"),
        ("GPU-", "'GPU-' is neither"),
        ("gpu-8932f937", "is neither"),
    ],
)
def test_a_list_that_cuda_would_take_otherwise_is_refused(value, what):
    with pytest.raises(DeviceError, match=what) as caught:
        visible_tokens(environ(value), present=numbered(4))
    assert VISIBLE_VARIABLE in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIGURATION


@given(st.lists(st.integers(0, 30).map(str) | st.sampled_from([UUID_A, UUID_B, MIG_NEW]), max_size=6))
def test_a_checked_list_names_each_device_once_in_one_form_or_is_refused(tokens):
    numbers = [token.isdigit() for token in tokens]
    if len(set(tokens)) == len(tokens) and (all(numbers) or not any(numbers)):
        assert check_tokens(tokens, source="x") == tokens
    else:
        with pytest.raises(DeviceError):
            check_tokens(tokens, source="x")


@pytest.mark.parametrize(
    ("choice", "visible", "gpu_count", "tokens"),
    [
        ("auto", None, 0, [""]),
        ("auto", "", 2, [""]),
        ("auto", "-1", 2, [""]),
        ("auto", "junk", 0, [""]),
        ("auto", None, 2, ["0", "1"]),
        ("auto", "3,2", 4, ["3", "2"]),
        ("auto", UUID_B, 4, [UUID_B]),
        ("cpu", "2,3", 4, [""]),
        (" cpu ", None, 4, [""]),
        ("0", "2,3", 4, ["2"]),
        ("1,0", "2,3", 4, ["3", "2"]),
        ("1", f"{UUID_A},{UUID_B}", 4, [UUID_B]),
        (UUID_B, f"{UUID_A},{UUID_B}", 4, [UUID_B]),
        (UUID_A, None, 2, [UUID_A]),
    ],
)
def test_the_users_choice_counts_within_the_visible_list(choice, visible, gpu_count, tokens):
    chosen = chosen_devices(choice, environ=environ(visible), present=numbered(gpu_count))
    assert [device.token for device in chosen] == tokens


@pytest.mark.parametrize(
    ("choice", "visible", "gpu_count", "what"),
    [
        ("", None, 2, "is empty"),
        (",", None, 2, "is empty"),
        ("0,0", None, 2, "named twice"),
        ("2", "4,5", 8, "no GPU 2"),
        ("0", None, 0, "no GPU 0 .*none"),
        ("0", "", 2, "no GPU 0 .*none"),
        (UUID_A, None, 0, "no GPU GPU-.*none"),
        (UUID_A, UUID_B, 2, "not in the visible list"),
        (f"0,{UUID_A}", None, 2, "mixed"),
        ("-1", None, 2, "'-1' is neither"),
        ("gpu", None, 2, "'gpu' is neither"),
        ("cpu,0", None, 2, "'cpu' is neither"),
        ("²", None, 4, "is neither"),
        ("auto", "0,0", 2, "CUDA_VISIBLE_DEVICES.*named twice"),
        ("auto:3", None, 2, "only 2 GPUs are visible .0, 1."),
        ("auto:1", "", 2, "only 0 GPUs are visible .none."),
        ("auto:0", None, 2, "1 or more"),
        ("auto:-1", None, 2, "1 or more"),
        ("auto:two", None, 2, "1 or more"),
        ("auto:²", None, 4, "1 or more"),
        ("auto:", None, 4, "1 or more"),
    ],
)
def test_a_device_that_is_not_ours_is_refused(choice, visible, gpu_count, what):
    with pytest.raises(DeviceError, match=what):
        chosen_devices(choice, environ=environ(visible), present=numbered(gpu_count))


@pytest.mark.parametrize(("workers", "num_devices"), [(None, 1), (1, 1), (4, 4)])
def test_cpu_workers_are_as_many_as_asked_for(workers, num_devices):
    for choice, gpu_count in (("cpu", 2), ("auto", 0)):
        assert chosen_devices(choice, workers=workers, environ={}, present=numbered(gpu_count)) == [CPU] * num_devices


@pytest.mark.parametrize("workers", [0, -1])
def test_a_number_of_workers_below_one_is_refused(workers):
    with pytest.raises(DeviceError, match="at least 1"):
        chosen_devices("cpu", workers=workers, environ={}, present=numbered(0))


def test_gpus_have_one_worker_each():
    assert len(chosen_devices("auto", workers=2, environ={}, present=numbered(2))) == 2
    for workers in (1, 3):
        with pytest.raises(DeviceError, match="number of CPU workers"):
            chosen_devices("auto", workers=workers, environ={}, present=numbered(2))


def test_ranks_map_to_the_parents_own_list_in_order():
    assert devices_for_ranks(2, environ("2,3,5")) == [Device("2"), Device("3")]
    assert devices_for_ranks(1, environ(UUID_A)) == [Device(UUID_A)]
    assert devices_for_ranks(3, environ("")) == [CPU, CPU, CPU]
    with pytest.raises(DeviceError, match="3 workers requested, but only 2"):
        devices_for_ranks(3, environ("2,3"))


def test_a_device_knows_its_type_and_its_label():
    assert (CPU.type, CPU.label) == ("cpu", "cpu")
    assert (Device("3").type, Device("3").label) == ("cuda", "cuda:3")
    assert Device(MIG_OLD).label == f"cuda:{MIG_OLD}"


def test_several_workers_share_each_gpu():
    devices = chosen_devices("auto", workers_per_device=2, environ={"CUDA_VISIBLE_DEVICES": "2,3"}, present=numbered(4))
    assert [device.token for device in devices] == ["2", "3", "2", "3"]


@pytest.mark.parametrize(
    ("choice", "least", "most"),
    [("auto", 1, 4), ("auto:1", 1, 1), (" auto:3 ", 3, 3), ("auto: 4", 4, 4), ("2,0", 2, 2)],
)
def test_a_choice_says_how_many_devices_are_enough(choice, least, most):
    chosen = choose_devices(choice, environ={}, present=numbered(4))
    assert (chosen.least, chosen.most, chosen.type) == (least, most, "cuda")
    assert len(chosen.candidates) == (2 if choice == "2,0" else 4)


def test_the_first_devices_are_those_that_ranks_map_to(monkeypatch):
    monkeypatch.setenv(VISIBLE_VARIABLE, "2,3,5")
    for world_size in (1, 2, 5):
        chosen = first_devices(world_size, workers_per_device=2)
        assert chosen.ranks(chosen.candidates) == devices_for_ranks(world_size, workers_per_device=2)
        assert chosen.least == chosen.most == len(chosen.candidates) == min(world_size, 3)


def test_workers_per_device_is_for_gpus():
    with pytest.raises(DeviceError, match="--workers"):
        chosen_devices("cpu", workers_per_device=2)
    with pytest.raises(DeviceError, match="at least 1"):
        chosen_devices("cpu", workers_per_device=0)
