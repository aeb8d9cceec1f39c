"""Weights into an encoder: nothing initialised, nothing imported for it, nothing left out, no file kept mapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from virnucpro.errors import WeightsError
from virnucpro.models.encoders.loading import filled, own_tensors
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR

LOADERS = {
    "virnucpro-tiny-protein": "virnucpro.models.esm2_flash:load_esm2_model",
    "virnucpro-tiny-dna": "virnucpro.models.dnabert_s:load_dnabert_s",
}
WITHOUT_COMPILER = """
import importlib, sys
name, loader = sys.argv[1:]
module, function = loader.split(":")
model, _ = getattr(importlib.import_module(module), function)(name, "cpu")
print(len([name for name in ("torch._dynamo", "sympy") if name in sys.modules]))
print("model.safetensors" in open("/proc/self/maps").read())
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.look_up = nn.Embedding(4, 3)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("slopes", torch.ones(2), persistent=False)


def weights_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in model.state_dict().items()]


@pytest.mark.parametrize("name", LOADERS)
def test_loading_imports_no_compiler_and_keeps_no_file_mapped(name):
    command = [sys.executable, "-c", WITHOUT_COMPILER, name, LOADERS[name]]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert (BUNDLED_WEIGHTS_DIR / name / "model.safetensors").is_file()
    assert found == ["0", "False"]


def test_every_weight_is_the_one_given_and_none_is_drawn():
    given = weights_of(Small())
    state = torch.get_rng_state()
    model = filled(Small, given)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in given:
        assert torch.equal(model.state_dict()[name], tensor)
        assert model.state_dict()[name].data_ptr() == tensor.data_ptr()


def test_a_weight_that_is_absent_is_named():
    with pytest.raises(RuntimeError, match=r"linear\.bias"):
        filled(Small, [(name, tensor) for name, tensor in weights_of(Small()) if name != "linear.bias"])


def test_a_buffer_without_values_is_an_error_that_names_it():
    model = filled(Small, weights_of(Small()))
    with pytest.raises(WeightsError, match="slopes of the encoder got no values"):
        own_tensors(model, Path("some.pt"))
    model.slopes = torch.ones(2)
    own_tensors(model, Path("some.pt"))
    assert all(tensor.is_cpu for tensor in (*model.parameters(), *model.buffers()))


def test_parameters_get_memory_of_their_own():
    given = weights_of(Small())
    model = filled(Small, given)
    model.slopes = torch.ones(2)
    own_tensors(model, Path("some.pt"))
    for name, tensor in given:
        assert torch.equal(model.state_dict()[name], tensor)
        assert model.state_dict()[name].data_ptr() != tensor.data_ptr()
