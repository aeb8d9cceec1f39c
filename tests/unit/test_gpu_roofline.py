"""Targets of the GPU check: the healthy card that was measured meets them, one of half its speed does not."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_models, gpu_roofline
from benchmarks.bench_common import RESULTS
from virnucpro.models.encoders.dnabert_checkpoint import MosaicBertConfig
from virnucpro.models.encoders.esm2_checkpoint import Architecture

RECORDED = json.loads((RESULTS / "gpu_check_2026-11-26.json").read_text())["sections"]
"""Of one healthy H100; short sequences of a model in bf16 were computed in float32 then, and are not counted here."""
PEAK = RECORDED["peak"]
RATES = gpu_roofline.Rates(
    dict.fromkeys((torch.float16, torch.bfloat16), PEAK["median"] * 1e12), PEAK["copy_tb_s"] * 1e12
)
MEASURED = [
    (name, dtype, tokens)
    for name in ("650M", "3B")
    for dtype in (torch.float16, torch.bfloat16)
    for tokens in (53, 168, 400, 1022)
    if (dtype, tokens) != (torch.bfloat16, 53)
]


def share_of_esm2(name, dtype, tokens):
    row = RECORDED[f"esm2_{name.lower()}"][f"{str(dtype).removeprefix('torch.')}, {tokens} tokens"]
    shape = gpu_models.ESM2[name]
    return row["tokens_per_second"] / gpu_roofline.esm2_tokens_per_second(RATES, shape, [tokens], dtype, is_fused=True)


@pytest.mark.parametrize(("name", "dtype", "tokens"), MEASURED, ids=str)
def test_a_healthy_card_meets_the_target_of_esm2_and_one_of_half_its_speed_does_not(name, dtype, tokens):
    share, least = share_of_esm2(name, dtype, tokens), gpu_roofline.LEAST_SHARE["packed"]
    assert least * 1.05 < share < 1
    assert share / 2 < least


def test_a_healthy_card_meets_the_target_of_dnabert_s_and_one_of_half_its_speed_does_not():
    roof = gpu_roofline.dnabert_tokens_per_second(
        RATES, MosaicBertConfig(), gpu_models.dna_tokens(8000), torch.bfloat16, is_padded=True
    )
    share, least = RECORDED["dnabert_s"]["tokens_per_second"] / roof, gpu_roofline.LEAST_SHARE["padded"]
    assert least * 1.05 < share < 1
    assert share / 2 < least


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_of_the_predicted_gain_of_kernels_between_products_is_what_a_healthy_card_has(dtype):
    shape = gpu_models.ESM2["650M"]
    fused, plain = (
        gpu_roofline.esm2_tokens_per_second(RATES, shape, [168], getattr(torch, dtype), is_fused=is_fused)
        for is_fused in (True, False)
    )
    measured = RECORDED["variant"][dtype]["Triton kernels"]["gain"][0]
    assert 1.1 < (1 + fused / plain) / 2 < measured


def test_operations_are_those_of_the_formulas():
    architecture, config = Architecture(num_layers=3, hidden_dim=8, attention_heads=2), MosaicBertConfig()
    assert gpu_models.esm2_flops(architecture, [5, 2]) == 5 * 3 * (24 * 64 + 4 * 5 * 8) + 2 * 3 * (24 * 64 + 4 * 2 * 8)
    esm2 = gpu_roofline.esm2_kernels(8, 5, is_fused=True)
    assert 3 * 5 * sum(flops for flops, _ in esm2) == gpu_models.esm2_flops(architecture, [5])
    dnabert = gpu_roofline.dnabert_kernels(768, 3072, 12, 106, is_padded=True)
    assert 12 * 106 * sum(flops for flops, _ in dnabert) == gpu_models.mosaic_bert_flops(config, [106])


def test_a_kernel_takes_the_time_of_its_operations_or_of_its_bytes_whichever_is_longer():
    rates = gpu_roofline.Rates({torch.float16: 100.0}, 10.0)
    assert rates.seconds([(200.0, 1.0), (50.0, 4.0)], 5, torch.float16) == 2.0 + 4 * 5 * 2 / 10
