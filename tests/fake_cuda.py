"""
GPU code without a GPU: tensors that have a shape, a type and the device ``cuda``, but no numbers.

PyTorch's fake tensors run every operator's own rules of shapes, types and devices. Two things are added: a CPU build
refuses four of Python's methods on them, which go to the ATen operators that they mean; and what makes the host wait
for the device is an error (reading a number of a tensor is one by PyTorch's own rules).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten


class HostWaitError(AssertionError):
    """The host would wait for the device."""


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Let tensors of the device ``cuda`` be made and computed with; only shapes, types and devices are known."""
    with FakeTensorMode(), _NoWaits(), _PythonsOperators():
        yield


class _NoWaits(TorchDispatchMode):
    """Refuses copies to the host, and operators whose output's shape the host has to wait for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in {_aten.nonzero.default, _aten.masked_select.default, _aten._local_scalar_dense.default}:
            raise HostWaitError(f"{function}: its output depends on numbers that the device has")
        if function is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise HostWaitError("repeat_interleave without output_size")
        out = function(*args, **kwargs)
        if function in {_aten._to_copy.default, _aten.copy_.default} and not kwargs.get("non_blocking"):
            source = args[1] if function is _aten.copy_.default else args[0]
            if source.device != out.device:
                raise HostWaitError(f"{function}: from {source.device} to {out.device}")
        return out


class _PythonsOperators(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            return _indexed(*args)
        if function is torch.Tensor.__setitem__:
            tensor, index, value = args
            return _aten.copy_.default(_indexed(tensor, index), value)
        if function is torch.Tensor.copy_:
            return _aten.copy_.default(*args, **(kwargs or {}))
        if function is torch.Tensor.__invert__:
            return torch.bitwise_not(*args)
        return function(*args, **(kwargs or {}))


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return ``tensor[index]``; a tensor among the index is the only part of it."""
    if isinstance(index, torch.Tensor):
        return _aten.index.Tensor(tensor, [index])
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        elif isinstance(part, slice):
            tensor = _aten.slice.Tensor(tensor, dim, *part.indices(tensor.shape[dim]))
        else:
            raise TypeError(f"{part!r} is no index that the code on GPUs uses")
        dim += 1
    return tensor
