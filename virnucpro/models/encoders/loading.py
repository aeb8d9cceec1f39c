"""Weights into an encoder without initialised tensors, second copies or mapped files; each tensor must be filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from virnucpro.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

Encoder = TypeVar("Encoder", bound=nn.Module)


class _NoInitialisation(TorchFunctionMode):
    """
    Leave parameters as they were allocated.

    On the meta device initialising costs no arithmetic, but ``normal_`` (of every ``nn.Embedding``) imports torch's
    compiler with sympy: 820 modules, 0.9 CPU s.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == nn.init.__name__:
            return kwargs.get("tensor", *args[:1])
        return function(*args, **kwargs)


def filled(make: Callable[[], Encoder], weights: Iterable[tuple[str, torch.Tensor]]) -> Encoder:
    """Return what *make* builds, with *weights* by name as they are: their dtypes, devices and memory."""
    with torch.device("meta"), _NoInitialisation():
        model = make()
    model.load_state_dict(dict(weights), assign=True)
    return model


def own_tensors(model: nn.Module, weights_path: Path) -> None:
    """Copy parameters that are still parts of a mapped file, else kept as a whole; WeightsError without values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise WeightsError(weights_path.stem, f"{weights_path} was read, but {name} of the encoder got no values")
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
