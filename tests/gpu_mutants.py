"""
Change lines that only a GPU runs, one at a time, and show that a test without a GPU notices each.

    python -m tests.gpu_mutants

Each change is made in a copy of the tree. Minutes; ``make gpu-mutants``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUNNER = "virnucpro/pipeline/async_inference.py"
KERNELS = "virnucpro/models/encoders/attention_kernels.py"
CHOICE = "virnucpro/models/attention.py"
POOLING = "virnucpro/models/pooling.py"
BUDGET = "virnucpro/pipeline/plan/token_budget.py"
STEPS = "virnucpro/models/encoders/triton_kernels.py"
ESM2 = "virnucpro/models/esm2_flash.py"
DNABERT = "virnucpro/models/dnabert_s.py"
ORDER, FORWARD = "tests/unit/test_gpu_order.py", "tests/unit/test_gpu_forward.py"
TRITON = "tests/unit/test_triton_kernels.py"


@dataclass(frozen=True)
class Mutant:
    """A change of one place, and the tests that must fail with it."""

    what: str
    path: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "computing does not wait for its input", RUNNER, "        compute.wait_stream(self._copies_in)\n", "", ORDER
    ),
    Mutant(
        "rows are copied before they are there", RUNNER, "        self._copies_out.wait_stream(compute)\n", "", ORDER
    ),
    Mutant(
        "tensors of a flight are not held",
        RUNNER,
        "arrived, (input_ids_T, cu_seqlens, embeddings_SD), marks)",
        "arrived, (), marks)",
        ORDER,
    ),
    Mutant("rows are not page-locked", RUNNER, ", pin_memory=True)", ")", ORDER),
    Mutant(
        "rows block the host",
        RUNNER,
        "rows_SD.copy_(embeddings_SD, non_blocking=True)",
        "rows_SD.copy_(embeddings_SD)",
        ORDER,
    ),
    Mutant(
        "input blocks the host",
        RUNNER,
        "batch.input_ids_T.to(self.device, non_blocking=True)",
        "batch.input_ids_T.to(self.device)",
        ORDER,
    ),
    Mutant(
        "rows have arrived when they are computed",
        RUNNER,
        "self._copies_out.record_event()",
        "compute.record_event()",
        ORDER,
    ),
    Mutant("nobody waits for rows", RUNNER, "            self.arrived.synchronize()\n", "            pass\n", ORDER),
    Mutant(
        "what is in flight is not waited for at the end",
        RUNNER,
        "                    flight.wait()\n            batches.close()",
        "                    pass\n            batches.close()",
        ORDER,
    ),
    Mutant(
        "the device is not waited for after its memory ran out",
        RUNNER,
        "            torch.cuda.synchronize(self.device)  #",
        "            pass  #",
        ORDER,
    ),
    Mutant(
        "queries and keys are swapped",
        KERNELS,
        "varlen_attn(q_TNH, k_TNH, v_TNH,",
        "varlen_attn(k_TNH, q_TNH, v_TNH,",
        FORWARD,
    ),
    Mutant(
        "keys and values are swapped",
        KERNELS,
        "varlen_attn(q_TNH, k_TNH, v_TNH,",
        "varlen_attn(q_TNH, v_TNH, k_TNH,",
        FORWARD,
    ),
    Mutant(
        "bounds and the longest are swapped",
        KERNELS,
        "cu_seqlens, cu_seqlens, longest, longest)",
        "cu_seqlens, longest, cu_seqlens, longest)",
        FORWARD,
    ),
    Mutant("slopes are dropped", KERNELS, ", alibi_slopes=alibi_slopes_N", "", FORWARD),
    Mutant(
        "flash-attn's longest is the number of sequences",
        KERNELS,
        "cu_seqlens, cu_seqlens, longest, longest, alibi",
        "cu_seqlens, cu_seqlens, len(lengths), len(lengths), alibi",
        FORWARD,
    ),
    Mutant("padding is attended to", KERNELS, "v_GNLH, attn_mask=bias)", "v_GNLH)", FORWARD),
    Mutant(
        "a variable-length kernel on a card that has none",
        CHOICE,
        "elif capability < (8, 0):",
        "elif capability < (7, 0):",
        FORWARD,
    ),
    Mutant("PyTorch's kernel gets slopes", CHOICE, "elif has_varlen and not alibi:", "elif has_varlen:", FORWARD),
    Mutant("pooling reads bounds on the host", POOLING, "offsets=offsets,", "offsets=offsets.cpu(),", FORWARD),
    Mutant(
        "a trial that runs out of memory ends the probe",
        BUDGET,
        "        except RuntimeError as error:\n",
        "        except MemoryError as error:\n",
        ORDER,
    ),
    Mutant(
        "keys are not rotated",
        STEPS,
        "num_rows = num_tokens * 2 * num_heads",
        "num_rows = num_tokens * num_heads",
        TRITON,
    ),
    Mutant(
        "values are rotated", STEPS, "(rows // (2 * HEADS)).to(tl.int64)", "(rows // (3 * HEADS)).to(tl.int64)", TRITON
    ),
    Mutant("heads of the next token", STEPS, "heads = rows % (2 * HEADS)", "heads = rows % (2 * HEADS + 1)", TRITON),
    Mutant(
        "tokens are two thirds apart",
        STEPS,
        "tokens * (3 * HEADS * HEAD_DIM)",
        "tokens * (2 * HEADS * HEAD_DIM)",
        TRITON,
    ),
    Mutant(
        "a token turns by half of its angles",
        STEPS,
        "(tokens * HEAD_DIM)[:, None]",
        "(tokens * HEAD_DIM // 2)[:, None]",
        TRITON,
    ),
    Mutant("padded channels are written", STEPS, "& (channels < HEAD_DIM)", "& (channels < WIDTH)", TRITON),
    Mutant(
        "a rotation the other way",
        STEPS,
        "even * cosine - odd * sine, even * sine + odd",
        "even * cosine + odd * sine, odd",
        TRITON,
    ),
    Mutant(
        "rows are the padded width apart",
        STEPS,
        ".to(tl.int64) * DIM + channels",
        ".to(tl.int64) * WIDTH + channels",
        TRITON,
    ),
    Mutant("padding counts in the variance", STEPS, "tl.where(inside, total - mean, 0.0)", "total - mean", TRITON),
    Mutant("the mean is that of the padded width", STEPS, "tl.sum(total, 0) / DIM", "tl.sum(total, 0) / WIDTH", TRITON),
    Mutant("the sum is not kept", STEPS, "    tl.store(x + at, stored, mask=inside)\n", "", TRITON),
    Mutant(
        "channels are read one by one",
        STEPS,
        "tl.arange(0, WIDTH)[None, :]",
        "(tl.arange(0, WIDTH) * 5 % WIDTH)[None, :]",
        TRITON,
    ),
    Mutant(
        "a layer's own norm comes again",
        ESM2,
        "zip(layers, norms[1:], strict=True)",
        "zip(layers, norms, strict=False)",
        TRITON,
    ),
    Mutant(
        "the last norm is dropped",
        ESM2,
        "yield (normed_TD if layer is layers[-1] else x_TD)[:num_tokens]",
        "yield x_TD[:num_tokens]",
        TRITON,
    ),
    Mutant(
        "short proteins in bf16 go through fp32 on a GPU",
        ESM2,
        "if own is torch.bfloat16 and is_on_gpu:",
        "if own is torch.float16 and is_on_gpu:",
        FORWARD,
    ),
    Mutant(
        "what overflowed goes through the kernel of fp16",
        ESM2,
        "self._wider.get(dtype, self.attention)",
        "self.attention",
        FORWARD,
    ),
    Mutant(
        "DNA that overflowed goes through the kernel of fp16",
        DNABERT,
        "lengths, self._attention_in_float32, torch.float32)",
        "lengths, self.attention, torch.float32)",
        FORWARD,
    ),
    Mutant("kernels on a card that has none", ESM2, "TRITON_CAPABILITY = (8, 0)", "TRITON_CAPABILITY = (7, 0)", TRITON),
    Mutant(
        "a trial that fails ends the run",
        ESM2,
        "except Exception as error:  #",
        "except ImportError as error:  #",
        TRITON,
    ),
]


def is_caught(mutant: Mutant, tree: Path) -> bool:
    """Run the tests over a changed copy of the tree; whether one fails."""
    path = tree / mutant.path
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.path} has {text.count(mutant.old)} of {mutant.old!r}: bring the mutant up to date")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        return fails(mutant.tests, tree)
    finally:
        path.write_text(text, "utf-8")


def fails(tests: str, tree: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode not in {0, 1}:
        raise SystemExit(f"the tests did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(".git", ".venv", ".demo", ".*_cache"))
        if any(fails(tests, tree) for tests in (ORDER, FORWARD, TRITON)):
            raise SystemExit("the tests fail as it is: mend that first")
        missed = []
        for mutant in MUTANTS:
            caught = is_caught(mutant, tree)
            print(f"{'caught' if caught else 'MISSED'}  {mutant.path}: {mutant.what}", flush=True)
            missed += [] if caught else [mutant]
    print(f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} caught")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
