"""
Linear layers for inference, fused with the operation that follows them.

On a CPU the weight is laid out once for oneDNN's matrix product, and the GELU or the sum with the residual is done on
each tile of the product while it is in the cache. Measured on an AVX-512 core at ESM-2 8M's shapes, fp32: 179 to 188
GFLOP/s instead of 170 to 177, with the GELU 164 to 179 instead of 150 to 168. The operators are those that
``torch.compile`` itself emits for CPUs (``torch.ops.mkldnn``); where a build has none, and on GPUs, the plain functions
do the same. Legend: T tokens, I channels in, O channels out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS_MULTIPLE = 32
"""Packed products should have a multiple of this many rows: oneDNN compiles and keeps a kernel for every number of
rows (about 1 ms and 0.45 MB each, at most a thousand of them)."""

CPU_ROWS = 1024
"""Tokens of a feed-forward at a time on a CPU: its hidden states, several times as wide, then reuse the same memory.
ESM-2: 4 % faster at 150M's width, 2 to 3 % at 650M's, than 4,000 tokens at a time."""

_PACKED_DTYPES = (torch.float32, torch.bfloat16)


class FusedLinear(nn.Linear):
    """
    ``x_TI @ weight.T + bias``, alone, through GELU, or added to a residual.

    An input of another dtype than the weight's is computed in its own: float64 where an fp32 model needs it.
    """

    _packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Lay the weight out for this CPU, where possible; the plain weight is dropped, so memory stays the same."""
        weight = self.weight
        if not can_pack(weight.device, weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # noqa: SLF001  torch.compile's own operator
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        if self._is_packed_for(x_TI):
            return _pointwise(x_TI, self._packed, self.bias, "none")
        bias = None if self.bias is None else self.bias.to(x_TI.dtype)
        return functional.linear(x_TI, self._plain_weight(x_TI.dtype), bias)

    def gelu(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return ``gelu(forward(x))`` with the exact (erf) GELU, shape (T, O)."""
        if self._is_packed_for(x_TI):
            return _pointwise(x_TI, self._packed, self.bias, "gelu")
        return functional.gelu(self.forward(x_TI))

    def add_to(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """Return ``residual + forward(x)``, shape (T, O)."""
        if self._is_packed_for(x_TI):
            added: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(  # noqa: SLF001
                x_TI, residual_TO, self._packed, self.bias, "add"
            )
            return added
        return residual_TO + self.forward(x_TI)

    def _is_packed_for(self, x_TI: torch.Tensor) -> bool:
        return self._packed is not None and x_TI.dtype is self._packed.dtype

    def _plain_weight(self, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight if self._packed is None else self._packed.to_dense()
        return weight.to(dtype)


def normalised(norm: nn.LayerNorm, x_TD: torch.Tensor) -> torch.Tensor:
    """Apply *norm* in the dtype of *x_TD*."""
    weight, bias = (parameter.to(x_TD.dtype) for parameter in (norm.weight, norm.bias))
    return functional.layer_norm(x_TD, norm.normalized_shape, weight, bias, norm.eps)


def pack_layers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.pack()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build and machine have oneDNN's packed product for weights of *dtype* on *device*."""
    if device.type != "cpu" or dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")


def fill_up(
    input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, Sequence[int]]:
    """Pad a batch on a CPU to a multiple of ``ROWS_MULTIPLE`` tokens by one sequence; the caller drops its rows."""
    num_tokens = input_ids_T.shape[0]
    spare = -num_tokens % ROWS_MULTIPLE if input_ids_T.device.type == "cpu" else 0
    if not spare:
        return input_ids_T, cu_seqlens, lengths
    filled_T = functional.pad(input_ids_T, (0, spare))
    return filled_T, functional.pad(cu_seqlens, (0, 1), value=num_tokens + spare), (*lengths, spare)


def by_rows(feed_forward: Callable[[torch.Tensor], torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
    """Return ``feed_forward(x_TD)``, on a CPU by ``CPU_ROWS`` tokens at a time; no token's result depends on others."""
    if x_TD.device.type != "cpu" or x_TD.shape[0] <= CPU_ROWS:
        return feed_forward(x_TD)
    return torch.cat([feed_forward(rows_RD) for rows_RD in torch.split(x_TD, CPU_ROWS)])


def _pointwise(
    x_TI: torch.Tensor, packed: torch.Tensor | None, bias: torch.Tensor | None, function: str
) -> torch.Tensor:
    """Multiply, add the bias and apply *function* ("none" or "gelu", the latter by erf)."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed, bias, function, [], "none")  # noqa: SLF001
    return product
