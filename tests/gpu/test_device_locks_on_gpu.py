"""The locks of real GPUs are named by the UUIDs that CUDA itself tells, number by number."""

from __future__ import annotations

import pytest

pytest.importorskip("pynvml")


def test_each_number_has_the_lock_of_the_gpu_that_cuda_means_by_it(tmp_path):
    import torch

    from virnucpro.pipeline.devices import Device
    from virnucpro.pipeline.hardware.device_locks import DeviceLocks, lock_names

    devices = [Device(str(number)) for number in range(torch.cuda.device_count())]
    names = lock_names(devices, environ={})
    said = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(len(devices))]
    assert list(names) == said
    first, second = DeviceLocks(tmp_path), DeviceLocks(tmp_path)
    assert first.take(said, least=1, most=len(said), run_id="one") == said
    assert second.take(said, least=1, most=1, run_id="two") is None
    assert second.holder(said[0]).run_id == "one"
    first.release()
    assert second.take(said, least=1, most=1, run_id="two") == said[:1]
    second.release()
