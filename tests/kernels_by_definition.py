"""
Variable-length attention by its definition, with the parameters of the kernels for GPUs: numbers on a CPU, and shapes.

``varlen_attn`` is of torch 2.13 (torch/nn/attention/varlen.py), ``flash_attn_varlen_func`` of flash-attn 2.8.3
(flash_attn/flash_attn_interface.py). Arguments that the program does not give are refused.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import is_fake


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert (return_aux, scale, window_size) == (None, None, (-1, -1))
    return _attend(query, key, value, (cu_seq_q, max_q), (cu_seq_k, max_k), None)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    others = (dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs, block_table)
    assert others == (0.0, None, False, (-1, -1), 0.0, False, False, None)
    return _attend(q, k, v, (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k), alibi_slopes)


def _attend(q_TNH, k_TNH, v_TNH, of_queries, of_keys, slopes_N):
    for bounds, longest in (of_queries, of_keys):
        assert bounds.dtype is torch.int32
        assert bounds.device == q_TNH.device
        assert type(longest) is int
    if is_fake(q_TNH):
        assert q_TNH.dtype in {torch.float16, torch.bfloat16}
        return torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    (query_bounds, longest_query), (key_bounds, longest_key) = of_queries, of_keys
    assert max(query_bounds.diff()) <= longest_query
    assert max(key_bounds.diff()) <= longest_key
    out_TNH = torch.empty_like(v_TNH, memory_format=torch.contiguous_format)
    for first, last in zip(query_bounds[:-1].tolist(), query_bounds[1:].tolist(), strict=True):
        q_NQH, k_NLH, v_NLH = (x_TNH[first:last].transpose(0, 1).double() for x_TNH in (q_TNH, k_TNH, v_TNH))
        scores_NQL = q_NQH @ k_NLH.mT * q_NQH.shape[-1] ** -0.5
        if slopes_N is not None:
            apart_QL = (torch.arange(last - first)[:, None] - torch.arange(last - first)).abs()
            scores_NQL -= slopes_N.double()[:, None, None] * apart_QL
        out_TNH[first:last] = (scores_NQL.softmax(-1) @ v_NLH).transpose(0, 1).to(v_TNH.dtype)
    return out_TNH
