"""
Whether int8 matrix products pay on CPUs: their error on real weights, and their speed.

Run it as ``python benchmarks/int8_on_cpu.py --checkpoint esm2_t6_8M.pt [--rounds 5] [--write]``. The four linear
layers of every block of ESM-2 are replaced by PyTorch's dynamic int8 layers (weights per channel, activations per
tensor); fp32 and bf16 are our own paths. Figures are CPU seconds over fp32's within a round, one thread, and the
cosine of each sequence's embedding to that in fp32. What was found, and why there is no ``--precision int8``: the
results beside this file; bf16 is both faster and a hundred times closer where the CPU has it.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from bench_common import machine, spread, write_result
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear
from torch.ao.quantization import per_channel_dynamic_qconfig
from torch.nn import functional
from workloads import MAX_RESIDUES, chunks, proteins

from virnucpro.choices import DEFAULT_TOKEN_BUDGET
from virnucpro.data.collators import PackedBatch, VarlenCollator
from virnucpro.data.packing import plan_blocks
from virnucpro.data.sequence_index import SequenceRecord
from virnucpro.models.esm2_flash import PackedESM2, load_esm2_model

if TYPE_CHECKING:
    from virnucpro.models.encoders.fused_linear import FusedLinear


class Int8Linear(nn.Module):
    """Stands in for a ``FusedLinear``; what is not float32 (short sequences) goes to the layer it replaces."""

    def __init__(self, replaced: FusedLinear) -> None:
        super().__init__()
        self.replaced = replaced
        plain = nn.Linear(replaced.in_features, replaced.out_features)
        # a packed weight as a plain one: the product with the unit matrix is exact in float64
        plain.weight.data = (replaced(torch.eye(replaced.in_features, dtype=torch.float64)) - replaced.bias).T.float()
        plain.bias.data = replaced.bias.data
        plain.qconfig = per_channel_dynamic_qconfig
        self.int8 = DynamicLinear.from_float(plain)

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        """As ``FusedLinear``."""
        return self.int8(x_TI) if x_TI.dtype is torch.float32 else self.replaced(x_TI)

    def gelu(self, x_TI: torch.Tensor) -> torch.Tensor:
        """As ``FusedLinear``."""
        return functional.gelu(self.forward(x_TI))

    def add_to(self, residual_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """As ``FusedLinear``."""
        return residual_TO.add_(self.forward(x_TI))


def with_int8(model: PackedESM2) -> PackedESM2:
    """Replace the linear layers of *model*."""
    for layer in model.layers:
        for name in ("qkv_proj", "out_proj", "fc1", "fc2"):
            setattr(layer, name, Int8Linear(getattr(layer, name)))
    return model


def batches(collate: VarlenCollator) -> list[PackedBatch]:
    """Return blocks of the 400 chunks and of every eighth example protein."""
    records = sorted([*chunks(), *proteins()[::8]], key=lambda record: -len(record[1]))
    tokens = [min(len(residues), MAX_RESIDUES) + 2 for _, residues in records]
    blocks = plan_blocks(tokens, token_budget=DEFAULT_TOKEN_BUDGET)
    return [collate([SequenceRecord(number, *records[number]) for number in block]) for block in blocks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="real weights: errors of random ones say little")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plain, tokenizer = load_esm2_model(options.checkpoint, "cpu")
    forward = {
        "fp32": plain,
        "bf16": load_esm2_model(options.checkpoint, "cpu", precision="bf16")[0],
        "int8": with_int8(load_esm2_model(options.checkpoint, "cpu")[0]),
    }
    work = batches(VarlenCollator(tokenizer, max_residues=MAX_RESIDUES))
    seconds: dict[str, list[float]] = {name: [] for name in forward}
    rows: dict[str, torch.Tensor] = {}
    for number in range(options.rounds + 1):
        for name, model in forward.items():
            start = time.process_time()
            rows[name] = torch.cat([model(batch.input_ids_T, batch.cu_seqlens, batch.lengths) for batch in work])
            if number:
                seconds[name].append(time.process_time() - start)
    report: dict[str, object] = {
        "machine": machine("torch"),
        "checkpoint": options.checkpoint.name,
        "sequences": len(rows["fp32"]),
        "tokens": sum(batch.num_tokens for batch in work),
        "rounds": options.rounds,
    }
    for name in ("bf16", "int8"):
        cosine = torch.cosine_similarity(rows[name].double(), rows["fp32"].double())
        report[name] = {
            "times_as_fast_as_fp32": spread([a / b for a, b in zip(seconds["fp32"], seconds[name], strict=True)]),
            "cosine": {"least": round(float(cosine.min()), 5), "median": round(float(cosine.median()), 5)},
            "share_below_0.999": round(float((cosine < 0.999).double().mean()), 4),
        }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("int8_on_cpu", report)


if __name__ == "__main__":
    main()
