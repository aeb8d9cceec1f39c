"""Every attention kernel that runs without a GPU against the plain formula; the choice on a GPU, by what is there."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from virnucpro.models.attention import _choose_on_gpu, choose_attention
from virnucpro.models.encoders.attention_kernels import (
    PaddedAttention,
    equal_length_attention,
    padded_attention,
    padded_groups,
)

LENGTHS = (40, 40, 37, 36, 36, 17, 16, 5, 3, 3, 1)
NOT_SORTED = (3, 90, 4, 17, 17, 1, 60)


def packed(lengths, *, heads=4, width=16, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, sum(lengths), heads, width, dtype=dtype).unbind(0)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, cu_seqlens, lengths


def plain_attention(q_TNH, k_TNH, v_TNH, cu_seqlens, lengths, slopes_N=None):
    """The formula, one sequence and one head at a time, in float64."""
    out = torch.empty(v_TNH.shape, dtype=torch.float64)
    starts = cu_seqlens.tolist()
    for start, length in zip(starts, lengths, strict=False):
        for head in range(q_TNH.shape[1]):
            q, k, v = (x[start : start + length, head].double() for x in (q_TNH, k_TNH, v_TNH))
            scores = q @ k.T / math.sqrt(q.shape[-1])
            if slopes_N is not None:
                distance = torch.tensor([[abs(i - j) for j in range(length)] for i in range(length)])
                scores = scores - slopes_N[head].double() * distance
            out[start : start + length, head] = scores.softmax(-1) @ v
    return out


@pytest.mark.parametrize("kernel", [equal_length_attention, padded_attention])
@pytest.mark.parametrize("lengths", [LENGTHS, NOT_SORTED, (1,)])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)]
)
def test_a_kernel_is_the_formula(kernel, lengths, alibi, dtype, tolerance):
    batch = packed(lengths, dtype=dtype)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    out = kernel(*batch, slopes)
    expected = plain_attention(*batch, slopes)
    assert out.dtype is dtype
    assert (out.double() - expected).abs().max() < tolerance
    assert expected.abs().max() > 0.5
    if alibi and max(lengths) > 1:
        without = plain_attention(*batch)
        assert (expected - without).abs().max() > 10 * tolerance or dtype is torch.bfloat16


def test_padding_is_never_attended_to():
    q, k, v, cu_seqlens, lengths = packed((33, 20, 18), width=8)
    alone = [
        padded_attention(q[a:b], k[a:b], v[a:b], torch.tensor([0, b - a]), (b - a,))
        for a, b in ((0, 33), (33, 53), (53, 71))
    ]
    together = padded_attention(q, k, v, cu_seqlens, lengths)
    assert (torch.cat(alone) - together).abs().max() < 1e-6


def test_numbers_that_are_not_finite_stay_in_their_sequence():
    q, k, v, cu_seqlens, lengths = packed(NOT_SORTED)
    for x in (q, k, v):
        x[3:93] = torch.nan
    out = padded_attention(q, k, v, cu_seqlens, lengths, torch.ones(4))
    assert out.isfinite().all(dim=(1, 2)).tolist() == [not 3 <= token < 93 for token in range(sum(lengths))]


@pytest.mark.parametrize(("alibi", "kept"), [(False, 0), (False, 1 << 28), (True, 2 * 4 * 96**2), (True, 1 << 28)])
def test_the_layers_of_a_forward_pass_share_what_the_lengths_decide(monkeypatch, alibi, kept):
    monkeypatch.setattr("virnucpro.models.encoders.attention_kernels._KEPT_BIAS_ELEMENTS", kept)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    q, k, v, *bounds = packed(NOT_SORTED)
    kernel = PaddedAttention()
    for layer in range(3):
        inputs = (q + layer, k * layer, v - layer)
        assert torch.equal(kernel(*inputs, *bounds, slopes), padded_attention(*inputs, *bounds, slopes))
    biases = [group.bias for group in kernel._groups if group.bias is not None]
    assert sum(bias.numel() for bias in biases) <= kept
    assert len(kernel._groups) > 1
    assert (len(biases) == len(kernel._groups)) == (kept == 1 << 28)
    assert bool(biases) == (kept > 0)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.booleans(), st.sampled_from([1, 12]))
def test_padded_groups_cover_the_batch_and_bound_the_padding(lengths, alibi, num_heads):
    groups = list(padded_groups(lengths, num_heads=num_heads, alibi=alibi))
    sequences = [number for part, _, _ in groups for number in range(len(lengths))[part]]
    assert sequences == list(range(len(lengths)))
    token = 0
    for part, tokens, width in groups:
        inside = lengths[part]
        assert (tokens.start, tokens.stop) == (token, token + sum(inside))
        token = tokens.stop
        assert width % 16 == 0
        assert 0 <= width - max(inside) < 16
        assert width * len(inside) <= 1.25 * sum(-(-length // 16) * 16 for length in inside)


def test_the_bias_of_a_padded_group_is_bounded():
    lengths = [4000] * 9
    parts = [range(len(lengths))[part] for part, _, _ in padded_groups(lengths, num_heads=12, alibi=True)]
    assert [len(part) for part in parts] == [1] * 9  # 12 * 4000**2 is more than 2**27
    assert len(list(padded_groups(lengths, num_heads=12, alibi=False))) == 1


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and nobody has dropped yet."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in tree_leaves(made) if isinstance(x, torch.Tensor)}:
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._dropped, storage._cdata, storage.nbytes())
        return made

    def _dropped(self, key, num_bytes):
        self._seen.discard(key)
        self.now -= num_bytes


def test_making_the_bias_of_a_padded_group_takes_little_more_memory_than_the_bias():
    heads, length = 12, 1600
    batch = packed((length,), heads=heads, width=8, dtype=torch.bfloat16)
    with _LiveBytes() as live, torch.inference_mode():
        padded_attention(*batch, torch.full((heads,), 0.5))
    print(f"{live.most / 1e6:.0f} MB at most, the bias is {2 * heads * length**2 / 1e6:.0f} MB")
    assert 2 * heads * length**2 < live.most < 1.6 * 2 * heads * length**2


def test_a_sequence_whose_own_bias_is_too_large_is_attended_some_queries_at_a_time(monkeypatch):
    monkeypatch.setattr("virnucpro.models.encoders.attention_kernels._GROUP_BIAS_ELEMENTS", 4 * 48**2)
    monkeypatch.setattr("virnucpro.models.encoders.attention_kernels._BIAS_ELEMENTS", 4 * 60 * 7)
    batch = packed(NOT_SORTED)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    assert (padded_attention(*batch, slopes).double() - plain_attention(*batch, slopes)).abs().max() < 1e-5


@pytest.mark.parametrize("alibi", [False, True])
def test_the_padded_kernel_never_asks_the_device_for_a_number(alibi):
    # on the meta device there are no numbers: a shape that depended on one, or a copy to the host, would raise
    q, k, v, cu_seqlens, lengths = packed(NOT_SORTED, dtype=torch.bfloat16)
    slopes = torch.ones(4, device="meta") if alibi else None
    out = padded_attention(q.to("meta"), k.to("meta"), v.to("meta"), cu_seqlens.to("meta"), lengths, slopes)
    assert out.shape == v.shape


H200 = {"capability": (9, 0), "has_varlen": True, "flash_attn_version": None, "head_dim": 64, "alibi": False}


@pytest.mark.parametrize(
    ("dtype", "changes", "name", "reason"),
    [
        (torch.bfloat16, {}, "varlen_attn", "heads of 64 in bfloat16"),
        (torch.float16, {"head_dim": 16}, "varlen_attn", "heads of 16 in float16"),
        (torch.bfloat16, {"flash_attn_version": "2.8.3"}, "varlen_attn", "own"),
        (torch.bfloat16, {"alibi": True}, "sdpa-padded", "no ALiBi slopes"),
        (torch.bfloat16, {"alibi": True, "flash_attn_version": "2.8.3"}, "flash-attn 2.8.3", "takes ALiBi"),
        (torch.bfloat16, {"has_varlen": False, "flash_attn_version": "2.8.3"}, "flash-attn 2.8.3", "no varlen_attn"),
        (torch.bfloat16, {"has_varlen": False}, "sdpa-padded", "not installed"),
        (torch.float32, {"flash_attn_version": "2.8.3"}, "sdpa-padded", "not float32"),
        (torch.bfloat16, {"head_dim": 20}, "sdpa-padded", "not 20"),
        (torch.bfloat16, {"head_dim": 264}, "sdpa-padded", "not 264"),
        (torch.float16, {"capability": (7, 5), "flash_attn_version": "2.8.3"}, "sdpa-padded", "this GPU has 7.5"),
    ],
)
def test_the_choice_on_a_gpu_follows_from_what_is_there(dtype, changes, name, reason):
    choice = _choose_on_gpu(dtype, **{**H200, **changes})
    assert choice.name == name
    assert reason in choice.reason


def test_a_cpu_gets_equal_lengths_whatever_is_installed():
    choice = choose_attention(torch.device("cpu"), torch.bfloat16, head_dim=64, alibi=True)
    assert choice.kernel is equal_length_attention
    assert "with ALiBi" in choice.reason
