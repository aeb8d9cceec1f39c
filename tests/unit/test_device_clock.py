"""A GPU's times on the host's clock, with events made by hand: what needs a real GPU is in ``tests/gpu``."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.traces import out_of_order, overlapping
from virnucpro import spans
from virnucpro.pipeline.hardware.device_clock import DeviceMarks, _Tie

BATCH = SimpleNamespace(positions=(4, 5), num_tokens=77)


class MadeEvent:
    """An event that the device reached at a given millisecond of its own clock."""

    def __init__(self, milliseconds):
        self.milliseconds = milliseconds

    def elapsed_time(self, later):
        return float(np.float32(later.milliseconds - self.milliseconds))


@pytest.fixture
def folder(tmp_path):
    spans.enable(
        tmp_path, {"model": "esm2", "rank": 0, "device": "cuda:0", "attempt": 1}, block_of=lambda position: position
    )
    yield tmp_path
    spans.disable()


def recorded(folder):
    (path,) = folder.iterdir()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        [one["cat"], one["name"], round(1000 * one["ts"]), round(1000 * one["dur"]), one["args"]]
        for one in events
        if "block" in one.get("args", {})
    ]


def marks(tie_at_ms, tie_at_ns, last_ns, *marked):
    made = DeviceMarks(_Tie(MadeEvent(tie_at_ms), tie_at_ns, 0), last_ns)
    made._marked = [(lane, MadeEvent(begin), MadeEvent(end)) for lane, begin, end in marked]
    return made


def test_times_of_the_device_are_told_on_the_hosts_clock(folder):
    in_ms = (("host-to-device", 1001.0, 1001.5), ("compute", 1001.5, 1021.5), ("device-to-host", 1021.5, 1021.75))
    marks(1000.0, 5_000_000_000, {}, *in_ms).record(BATCH)
    about = {"block": 4, "sequences": 2, "tokens": 77}
    assert recorded(folder) == [
        ["host-to-device", "host-to-device", 5_001_000_000, 500_000, about],
        ["compute", "compute", 5_001_500_000, 20_000_000, about],
        ["device-to-host", "device-to-host", 5_021_500_000, 250_000, about],
    ]


def test_what_two_ties_say_differently_makes_no_spans_overlap(folder):
    last_ns = {}
    marks(1000.0, 5_000_000_000, last_ns, ("compute", 1001.0, 1011.0)).record(BATCH)
    marks(2000.0, 5_999_970_000, last_ns, ("compute", 1011.0, 1021.0)).record(BATCH)  # 30 us earlier than it was
    marks(2000.0, 5_999_970_000, last_ns, ("compute", 1021.0, 1021.25)).record(BATCH)
    found = [(begin, begin + duration) for _, _, begin, duration, _ in recorded(folder)]
    assert found == [
        (5_001_000_000, 5_011_000_000),
        (5_011_000_000, 5_020_970_000),
        (5_020_970_000, 5_021_220_000),
    ]


def lanes(**changes):
    made = {
        spans.LAUNCHING: [(0, 5, 1), (5, 9, 2)],
        spans.HOST_TO_DEVICE: [(1, 2, 1), (6, 7, 2)],
        spans.COMPUTE: [(2, 10, 1), (10, 20, 2)],
        spans.DEVICE_TO_HOST: [(10, 12, 1), (20, 22, 2)],
    }
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, 0),
        ({spans.COMPUTE: [(1, 10, 1), (10, 20, 2)]}, 1),  # before it was copied in
        ({spans.DEVICE_TO_HOST: [(9, 12, 1), (19, 22, 2)]}, 2),
        ({spans.COMPUTE: [(2, 10, 2), (10, 20, 1)]}, 2),  # of another block
        ({spans.HOST_TO_DEVICE: [(-2_000_000, 2, 1), (6, 7, 2)]}, 1),  # long before it was launched
    ],
)
def test_the_check_of_a_gpus_spans_sees_what_is_out_of_order(changes, wrong):
    assert out_of_order(lanes(**changes)) == wrong
    assert overlapping(lanes(**changes)) == 0


def test_the_check_of_a_gpus_spans_sees_overlaps():
    assert overlapping(lanes(compute=[(2, 11, 1), (10, 20, 2)])) == 1
