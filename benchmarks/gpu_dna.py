"""DNABERT-S, part c of ``gpu_check.py``: with and without flash-attn, from tokens and from nucleotides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import gpu_models, gpu_roofline
from benchmarks.gpu_measure import HALF, median_and_ends, rates_of, rounds, speed_row, timed
from virnucpro.data.collators import VarlenCollator
from virnucpro.models.attention import AttentionChoice
from virnucpro.models.encoders.attention_kernels import padded_attention
from virnucpro.models.encoders.dnabert_checkpoint import DnaTokenizer
from virnucpro.pipeline.async_inference import AsyncInferenceRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.gpu_measure import Check
    from virnucpro.data.collators import PackedBatch

NUCLEOTIDES = 500
SEQUENCES_OF_A_BLOCK = 600
PADDED = AttentionChoice("sdpa-padded", padded_attention, "for comparison")


def dnabert_s(check: Check) -> dict[str, Any]:
    """Tokens a second of DNABERT-S, with flash-attn where it is installed, and in padded groups."""
    model = gpu_models.random_mosaic_bert(check.device, HALF, is_tiny=check.is_tiny)
    chosen = model.attention
    tokens = gpu_models.dna_tokens(12 if check.is_tiny else 8000)
    flops = gpu_models.mosaic_bert_flops(model.config, tokens) / sum(tokens)
    figures: dict[str, Any] = {"kernel": chosen.name, "reason": chosen.reason}
    if "flash" not in chosen.name:
        figures["flash-attn"] = check.left_out("DNABERT-S with flash-attn", chosen.reason)
    for choice in {one.name: one for one in (chosen, PADDED)}.values():
        model.attention = choice
        is_padded = "flash" not in choice.name
        roof = gpu_roofline.dnabert_tokens_per_second(rates_of(check), model.config, tokens, HALF, is_padded=is_padded)
        label, shares = f"DNABERT-S, 500 nt, {choice.name}", (flops / rates_of(check).products[HALF], 1 / roof)
        batches = list(gpu_models.blocks_of(tokens, token_budget=600 if check.is_tiny else 65536))
        figures[choice.name] = row = speed_row(check, label, model, batches, shares)
        if not check.is_tiny:
            least = gpu_roofline.LEAST_SHARE["padded" if is_padded else "packed"]
            check.expect(f"{label}: share of the roofline", value=row["share_of_roofline"], least=least)
    return figures[chosen.name] | figures


def dna_from_letters(check: Check) -> dict[str, Any]:
    """Tokens a second from nucleotides, one thread tokenising while the GPU computes; and of the tokenizer alone."""
    model = gpu_models.random_mosaic_bert(check.device, HALF, is_tiny=check.is_tiny)
    collate = VarlenCollator(DnaTokenizer(), max_residues=NUCLEOTIDES)
    count = 20 if check.is_tiny else 10 * SEQUENCES_OF_A_BLOCK
    letters = np.random.default_rng(gpu_models.SEED).choice(np.frombuffer(b"ACGT", np.uint8), (count, NUCLEOTIDES))
    records = [
        SimpleNamespace(position=number, sequence_id=f"s{number}", sequence=row.tobytes().decode())
        for number, row in enumerate(letters)
    ]

    def batches() -> Iterator[PackedBatch]:
        for first in range(0, count, SEQUENCES_OF_A_BLOCK):
            batch = collate(records[first : first + SEQUENCES_OF_A_BLOCK])
            yield batch.pin_memory() if check.is_on_gpu else batch

    def measured(way: str, work: Callable[[], Iterable[object]]) -> None:
        one_pass = lambda: timed(check, lambda: list(work()))  # noqa: E731
        one_pass()
        figures[way] = median_and_ends([tokens / seconds for seconds in rounds(check, one_pass)])
        check.show(f"DNABERT-S, 500 nt, {way}", f"{figures[way][0]:,.0f} tokens/s, one thread")

    tokens = sum(batch.num_tokens for batch in batches())
    figures: dict[str, Any] = {"tokens": tokens}
    measured("tokenizer alone", batches)
    for choice in {one.name: one for one in (model.attention, PADDED)}.values():
        model.attention = choice
        runner = AsyncInferenceRunner(model, check.device)
        measured(f"tokenizer and {choice.name}", lambda runner=runner: runner.run(batches()))
    return figures
