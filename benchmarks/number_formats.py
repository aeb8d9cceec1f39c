"""
What number formats and GELU's tanh form cost ESM-2's rows: lowest and median cosine to fp32, on real proteins.

``python benchmarks/number_formats.py CHECKPOINT.pt PROTEINS.fasta.gz``; fp8 is simulated: rows of weights and of inputs
are scaled to e4m3 before each of a layer's four products, and all else is fp32.
"""

from __future__ import annotations

import gzip
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from virnucpro.models import esm2_flash
from virnucpro.models.encoders.fused_linear import FusedLinear

SHORT = (3, 5, 8, 12, 20, 28, 40, 55, 62)
E4M3_MAX = 448


def windows(path: Path) -> dict[str, list[str]]:
    with gzip.open(path, "rt") as lines:
        joined = "".join("\0" if line.startswith(">") else line.strip() for line in lines)
    proteins = [protein for protein in joined.split("\0")[1:3001] if len(protein) >= 300][:60]
    rng = np.random.default_rng(1)
    cut = {
        "3 to 62 residues": [(protein, length) for protein in proteins for length in SHORT],
        "166 residues": [(protein, 166) for protein in proteins],
    }
    return {
        what: [protein[(start := rng.integers(0, len(protein) - length)) : start + length] for protein, length in some]
        for what, some in cut.items()
    }


def rows(model: esm2_flash.PackedESM2, tokenizer: esm2_flash.ProteinTokenizer, sequences: list[str]) -> torch.Tensor:
    found = []
    for first in range(0, len(sequences), 40):
        ids, lengths = tokenizer.encode(sequences[first : first + 40])
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        found.append(model(torch.from_numpy(ids), starts, lengths.tolist()).double())
    return torch.cat(found)


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


class InFp8(FusedLinear):
    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(in_e4m3(x_TI.float()), in_e4m3(self._plain_weight(torch.float32)), bias)

    def _is_packed_for(self, _x_TI: torch.Tensor) -> bool:
        return False


class TanhGelu(FusedLinear):
    def gelu(self, x_TI: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.forward(x_TI), approximate="tanh")


def changed(model: torch.nn.Module, kind: type[FusedLinear]) -> None:
    for module in model.modules():
        if type(module) is FusedLinear:
            module.__class__ = kind


def main() -> None:
    weights, proteins = Path(sys.argv[1]), windows(Path(sys.argv[2]))
    torch.set_num_threads(1)
    expected, found = {}, {}
    for precision in ("fp32", "fp16", "bf16"):
        for kind in (FusedLinear, TanhGelu, *([InFp8] if precision == "fp32" else [])):
            model, tokenizer = esm2_flash.load_esm2_model(weights, "cpu", precision=precision)
            changed(model, kind)
            for what, sequences in proteins.items():
                these = rows(model, tokenizer, sequences)
                expected.setdefault(what, these)
                cosines = functional.cosine_similarity(these, expected[what])
                figures = {"lowest": float(cosines.min()), "median": float(cosines.median())}
                figures |= {"below 0.999": int((cosines < 0.999).sum()), "of": len(cosines)}
                found[f"{'fp8' if kind is InFp8 else precision}, {kind.__name__}, {what}"] = figures
                print(f"{'fp8' if kind is InFp8 else precision}, {kind.__name__}, {what}: {figures}", flush=True)
    machine = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    about = {"date": str(datetime.now(UTC).date()), "torch": torch.__version__, "processor": machine.partition(": ")[2]}
    about |= {"weights": weights.name, "proteins": sys.argv[2].rpartition("/")[2]}
    path = Path(__file__).parent / "results" / f"number_formats_{datetime.now(UTC).date()}.json"
    path.write_text(json.dumps({**about, "cosines": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
