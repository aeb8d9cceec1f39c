"""Attention by plain exponentials against softmax written out in float64."""

from __future__ import annotations

import pytest
import torch

from virnucpro.models.attention import choose_attention
from virnucpro.models.encoders import attention_kernels
from virnucpro.models.encoders.attention_kernels import alibi_bias, exponential_attention, exponentials_are_exact

NUM_HEADS, HEAD_DIM = 6, 16
LENGTHS = (700, 512, 300, 220, 65, 65, 3, 1)  # queries in pieces, a head, some heads, all heads at a time
SLOPES_N = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.01])


def _qkv(scale=1.0):
    generator = torch.Generator().manual_seed(7)
    stream_T3NH = torch.randn(sum(LENGTHS), 3, NUM_HEADS, HEAD_DIM, generator=generator)
    stream_T3NH[:, :2] *= scale
    return stream_T3NH.unbind(1)


def _exact(q_TNH, k_TNH, v_TNH, slopes_N=None):
    pieces, start = [], 0
    for length in LENGTHS:
        q_NLH, k_NLH, v_NLH = (x[start : start + length].double().transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        scores_NLL = q_NLH @ k_NLH.mT / HEAD_DIM**0.5
        if slopes_N is not None:
            distance_LL = (torch.arange(length)[:, None] - torch.arange(length)).abs()
            scores_NLL -= slopes_N.double()[:, None, None] * distance_LL
        pieces.append((scores_NLL.softmax(-1) @ v_NLH).transpose(0, 1))
        start += length
    return torch.cat(pieces)


@pytest.fixture(scope="module", autouse=True)
def exact():
    assert exponentials_are_exact()


class InexactAtFirst:
    """Exponentials that are wrong by a relative 1.5e-4 in the first *calls* calls."""

    def __init__(self, calls, exp_):
        self.calls = calls
        self.exp_ = exp_

    def __call__(self, x):
        self.calls -= 1
        return self.exp_(x).mul_(1.00015 if self.calls >= 0 else 1.0)


@pytest.mark.parametrize(("wrong_calls", "found"), [(0, True), (1, True), (2, True), (3, False)])
def test_the_first_exponentials_of_a_process_are_tried_out_and_not_used(wrong_calls, found, monkeypatch):
    wrong = InexactAtFirst(wrong_calls, torch.Tensor.exp_)
    monkeypatch.setattr(torch.Tensor, "exp_", lambda x: wrong(x))  # noqa: PLW0108  a function becomes a method
    assert exponentials_are_exact() is found
    wrong.calls = wrong_calls
    chosen = choose_attention(torch.device("cpu"), torch.float32, head_dim=16)
    assert (chosen.kernel is exponential_attention) is found


@pytest.mark.parametrize("slopes_N", [None, SLOPES_N])
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0])
def test_equals_softmax_attention(scale, slopes_N):
    q_TNH, k_TNH, v_TNH = _qkv(scale)
    out_TNH = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS, slopes_N)
    torch.testing.assert_close(out_TNH.double(), _exact(q_TNH, k_TNH, v_TNH, slopes_N), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("scale", [-12.0, 12.0])
def test_scores_too_wide_for_plain_exponentials_are_computed_all_the_same(scale):
    q_TNH, k_TNH, v_TNH = _qkv()
    k_TNH = k_TNH + 40 * scale * q_TNH  # every token's score with itself is far out of exp's range
    out_TNH = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS)
    assert out_TNH.isfinite().all()
    torch.testing.assert_close(out_TNH.double(), _exact(q_TNH, k_TNH, v_TNH), atol=1e-3, rtol=1e-3)


def test_no_sequence_sees_another():
    q_TNH, k_TNH, v_TNH = (x.clone() for x in _qkv())
    before = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS)
    for x_TNH in (q_TNH, k_TNH, v_TNH):
        x_TNH[: LENGTHS[0]] = float("nan")
    after = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS)
    assert after[: LENGTHS[0]].isnan().all()
    assert torch.equal(after[LENGTHS[0] :], before[LENGTHS[0] :])


@pytest.mark.parametrize("cached", [100, 4096, 1 << 24])
@pytest.mark.parametrize("slopes_N", [None, SLOPES_N])
def test_pieces_of_any_size_give_the_same_rows(monkeypatch, cached, slopes_N):
    q_TNH, k_TNH, v_TNH = _qkv()
    whole = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS, slopes_N)
    monkeypatch.setattr(attention_kernels, "_CACHED_SCORES", cached)
    pieces = exponential_attention(q_TNH, k_TNH, v_TNH, torch.empty(0), LENGTHS, slopes_N)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-5)


def test_slopes_punish_distance_in_both_directions():
    bias_NLL = alibi_bias(torch.tensor([0.5, 2.0]), 3)
    assert bias_NLL[0].tolist() == [[0.0, -0.5, -1.0], [-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]
    assert torch.equal(bias_NLL[1], 4 * bias_NLL[0])
