"""Means over residues and over tokens: both ways of computing them, by hand and against each other."""

from __future__ import annotations

import pytest
import torch

from virnucpro.models.pooling import mean_over_residues, mean_over_tokens, segment_means

LENGTHS = (9, 9, 9, 7, 4, 4, 3, 5)
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def states(dtype=torch.float32):
    torch.manual_seed(3)
    hidden = torch.randn(sum(LENGTHS), 24, dtype=torch.float64)
    hidden[CU_SEQLENS[:-1].long()] = 1e6  # BOS and EOS: a mean that takes one of them in is far off
    hidden[CU_SEQLENS[1:].long() - 1] = -3e6
    return hidden.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bos_and_eos_are_left_out(dtype):
    hidden = states(dtype)
    expected = torch.stack([rows[1:-1].double().mean(0) for rows in hidden.split(LENGTHS)])
    for means in (mean_over_residues(hidden, CU_SEQLENS, LENGTHS), segment_means(hidden, CU_SEQLENS, excluded=1)):
        assert means.dtype is torch.float32
        assert (means - expected).abs().max() < 1e-6


def test_every_token_counts_where_none_is_special():
    hidden = torch.randn(sum(LENGTHS), 24)
    expected = torch.stack([rows.mean(0) for rows in hidden.split(LENGTHS)])
    for means in (mean_over_tokens(hidden, CU_SEQLENS, LENGTHS), segment_means(hidden, CU_SEQLENS, excluded=0)):
        assert (means - expected).abs().max() < 1e-6


def test_a_sequence_of_one_residue_is_that_residue():
    hidden = torch.randn(6, 5)
    cu_seqlens = torch.tensor([0, 3, 6]).int()
    for means in (mean_over_residues(hidden, cu_seqlens, (3, 3)), segment_means(hidden, cu_seqlens, excluded=1)):
        assert torch.equal(means, hidden[[1, 4]])


def test_a_thousand_half_precision_tokens_are_added_in_float32():
    hidden = torch.full((1024, 2), 1.0, dtype=torch.bfloat16)
    hidden[::2] = 1.0078125  # one step of bfloat16 above 1
    cu_seqlens = torch.tensor([0, 1024]).int()
    for means in (mean_over_tokens(hidden, cu_seqlens, (1024,)), segment_means(hidden, cu_seqlens, excluded=0)):
        assert (means - 1.00390625).abs().max() < 1e-6


def test_the_segments_never_ask_the_device_for_a_number():
    means = segment_means(states(torch.bfloat16).to("meta"), CU_SEQLENS.to("meta"), excluded=1)
    assert means.shape == (len(LENGTHS), 24)
