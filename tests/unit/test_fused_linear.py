"""The packed product against PyTorch's plain one, alone and with what is fused into it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from virnucpro.models.encoders.fused_linear import FusedLinear, can_pack

CPU = torch.device("cpu")

needs_onednn = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.float64])
def dtype(request):
    return request.param


@pytest.fixture
def layer(dtype):
    torch.manual_seed(1)
    return FusedLinear(96, 40).to(dtype).requires_grad_(requires_grad=False)


def _tolerance(dtype):
    return {"atol": 2e-6, "rtol": 2e-6} if dtype in {torch.float32, torch.float64} else {"atol": 0.02, "rtol": 0.02}


def test_packed_and_plain_layers_compute_the_same(layer, dtype):
    x_TI, residual_TO = torch.randn(33, 96).to(dtype), torch.randn(33, 40).to(dtype)
    plain = functional.linear(x_TI.double(), layer.weight.double(), layer.bias.double())
    layer.pack()
    torch.testing.assert_close(layer(x_TI).double(), plain, **_tolerance(dtype))
    torch.testing.assert_close(layer.gelu(x_TI).double(), functional.gelu(plain), **_tolerance(dtype))
    added = layer.add_to(residual_TO.clone(), x_TI)
    torch.testing.assert_close(added.double(), residual_TO.double() + plain, **_tolerance(dtype))
    assert added.dtype is dtype


@needs_onednn
def test_packing_gives_the_plain_weight_up_and_keeps_its_numbers():
    layer = FusedLinear(64, 128).requires_grad_(requires_grad=False)
    weight = layer.weight.clone()
    layer.pack()
    assert layer.weight.numel() == 0
    x_TI = torch.randn(5, 64, dtype=torch.float64)
    exact = functional.linear(x_TI, weight.double(), layer.bias.double())
    assert torch.equal(layer(x_TI), exact)


def test_what_cannot_be_packed_stays_as_it_is():
    layer = FusedLinear(8, 8).double()
    layer.pack()
    assert layer.weight.shape == (8, 8)
    assert not can_pack(torch.device("cuda"), torch.float32)
