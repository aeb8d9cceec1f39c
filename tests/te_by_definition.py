"""
TransformerEngine's layer by its definition: parameters, layout and formulas of version 2.20.2, in plain PyTorch.

Read in transformer_engine/pytorch: transformer.py (both signatures, order of steps), attention/multi_head_attention.py
(split of the joined product), attention/rope.py, module/layernorm_linear.py and layernorm_mlp.py (names of parameters,
types that are refused), jit.py (GELU). What the program does not set must stay at the default that this follows.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

VERSION = "2.20.2"

_SET = {
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "hidden_dropout",
    "attention_dropout",
    "self_attn_mask_type",
    "params_dtype",
    "fuse_qkv_params",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "device",
    "attn_input_format",
}


class TransformerLayer(nn.Module):
    gelu = "tanh"
    """What ``torch.nn.functional.gelu`` calls it; a test that is about weights alone sets "none"."""

    def __init__(
        self,
        hidden_size,
        ffn_hidden_size,
        num_attention_heads,
        num_gqa_groups=None,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        init_method=None,
        output_layer_init_method=None,
        layer_number=None,
        kv_channels=None,
        self_attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        enc_dec_attn_mask_type="no_mask",
        enc_dec_bottom_right_diagonal=None,
        enc_dec_window_size=None,
        tp_group=None,
        tp_size=1,
        params_dtype=None,
        get_rng_state_tracker=None,
        fuse_wgrad_accumulation=False,
        seq_length=None,
        micro_batch_size=None,
        sequence_parallel=False,
        apply_residual_connection_post_layernorm=False,
        output_layernorm=False,
        parallel_attention_mlp=False,
        layer_type="encoder",
        drop_path_rate=0.0,
        set_parallel_mode=False,
        fuse_qkv_params=False,
        rotary_pos_interleaved=False,
        zero_centered_gamma=False,
        qkv_weight_interleaved=True,
        ub_tp_comm_overlap=False,
        ub_overlap_ag=True,
        ub_overlap_rs=True,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=True,
        ub_bulk_wgrad=True,
        bias=True,
        activation="gelu",
        activation_params=None,
        normalization="LayerNorm",
        device="cuda",
        attn_input_format="sbhd",
        name=None,
        qk_norm_type=None,
        qk_norm_eps=1e-6,
        qk_norm_before_rope=False,
        softmax_type="vanilla",
    ):
        given = dict(locals())
        for parameter in inspect.signature(TransformerLayer.__init__).parameters.values():
            if parameter.name not in {"self", *_SET}:
                assert given[parameter.name] == parameter.default, parameter.name
        super().__init__()
        assert fuse_qkv_params, "else queries, keys and values are parameters of their own, query_weight ..."
        self.num_heads = num_attention_heads
        self.qkv_weight_interleaved = qkv_weight_interleaved
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.dropouts = (hidden_dropout, attention_dropout)
        assert attn_input_format == "thd", "the others take padded sequences"
        assert "padding" in self_attn_mask_type, "TransformerEngine asserts it for thd"
        self.mask_type = self_attn_mask_type

        def parameters(**shapes):
            module = nn.Module()
            for own_name, shape in shapes.items():
                empty = torch.empty(shape, device=device, dtype=params_dtype)
                module.register_parameter(own_name, nn.Parameter(empty))
            return module

        norm = {"layer_norm_weight": hidden_size, "layer_norm_bias": hidden_size}
        self.self_attention = nn.Module()
        self.self_attention.layernorm_qkv = parameters(
            **norm, weight=(3 * hidden_size, hidden_size), bias=3 * hidden_size
        )
        self.self_attention.proj = parameters(weight=(hidden_size, hidden_size), bias=hidden_size)
        self.layernorm_mlp = parameters(
            **norm,
            fc1_weight=(ffn_hidden_size, hidden_size),
            fc1_bias=ffn_hidden_size,
            fc2_weight=(hidden_size, ffn_hidden_size),
            fc2_bias=hidden_size,
        )
        self.shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        self.calls = []

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        self_attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        encoder_output=None,
        enc_dec_attn_mask=None,
        enc_dec_attn_mask_type=None,
        enc_dec_window_size=None,
        enc_dec_bottom_right_diagonal=None,
        is_first_microbatch=None,
        checkpoint_core_attention=False,
        inference_params=None,
        rotary_pos_emb=None,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        fast_zero_fill=True,
        pad_between_seqs=None,
        thd_attention_policies=None,
        thd_attention_policy_dispatch="auto",
        softcap=None,
    ):
        given = dict(locals())
        for parameter in inspect.signature(TransformerLayer.forward).parameters.values():
            if parameter.name not in {"self", "hidden_states", "rotary_pos_emb"} and "_seqlen" not in parameter.name:
                assert given[parameter.name] == parameter.default, parameter.name
        assert (cu_seqlens_q_padded, cu_seqlens_kv_padded) == (None, None)
        for parameter in self.parameters():  # set_activation_dtype
            assert (parameter.dtype, parameter.device) == (hidden_states.dtype, hidden_states.device)
        assert {name: parameter.shape for name, parameter in self.named_parameters()} == self.shapes
        for bounds, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_kv, max_seqlen_kv)):
            assert (bounds.dtype, bounds.device) == (torch.int32, hidden_states.device)
            assert type(longest) is int, "else TransformerEngine waits for the device"
        head_dim = hidden_states.shape[1] // self.num_heads
        assert rotary_pos_emb.dtype is torch.float32
        assert (*rotary_pos_emb.shape,) == (max_seqlen_q, 1, 1, head_dim)
        assert not self.training or self.dropouts == (0.0, 0.0)
        assert self.mask_type == "padding", "a causal mask hides later residues"
        self.calls.append((hidden_states.dtype, max_seqlen_q))

        qkv, mlp = self.self_attention.layernorm_qkv, self.layernorm_mlp
        joined = functional.linear(_normalised(qkv, hidden_states), qkv.weight, qkv.bias)
        if self.qkv_weight_interleaved:
            q_TNH, k_TNH, v_TNH = joined.view(-1, self.num_heads, 3, head_dim).unbind(2)
        else:
            q_TNH, k_TNH, v_TNH = joined.view(-1, 3, self.num_heads, head_dim).unbind(1)
        if not is_fake(joined):
            q_TNH, k_TNH = (self._rotated(x_TNH, rotary_pos_emb, cu_seqlens_q) for x_TNH in (q_TNH, k_TNH))
        context = _attended(q_TNH, k_TNH, v_TNH, cu_seqlens_q, max_seqlen_q).flatten(1)
        proj = self.self_attention.proj
        hidden_states = hidden_states + functional.linear(context, proj.weight) + proj.bias
        inner = functional.linear(_normalised(mlp, hidden_states), mlp.fc1_weight).float() + mlp.fc1_bias
        inner = functional.gelu(inner, approximate=self.gelu).to(hidden_states.dtype)
        return hidden_states + functional.linear(inner, mlp.fc2_weight) + mlp.fc2_bias

    def _rotated(self, x_TNH, angles, bounds):
        """Rotate as rope.py does: by pairs of neighbours, or of the two halves of a head."""
        positions_T = torch.cat([torch.arange(length) for length in bounds.diff().tolist()])
        angles_TNH = angles[positions_T, 0]
        x_TNH = x_TNH.float()
        if self.rotary_pos_interleaved:
            turned = torch.stack((-x_TNH[..., 1::2], x_TNH[..., ::2]), dim=-1).flatten(-2)
        else:
            first, second = x_TNH.chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
        return (x_TNH * angles_TNH.cos() + turned * angles_TNH.sin()).to(self.self_attention.proj.weight.dtype)


def _normalised(module, x_TD):
    weight, bias = module.layer_norm_weight, module.layer_norm_bias
    return functional.layer_norm(x_TD, (x_TD.shape[1],), weight, bias, 1e-5)


def _attended(q_TNH, k_TNH, v_TNH, bounds, longest):
    if is_fake(q_TNH):
        return torch.empty_like(v_TNH, memory_format=torch.contiguous_format)
    lengths = bounds.diff().tolist()
    assert max(lengths) <= longest
    parts = []
    for q, k, v in zip(*(x_TNH.split(lengths) for x_TNH in (q_TNH, k_TNH, v_TNH)), strict=True):
        out_NQH = functional.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)))[0]
        parts.append(out_NQH.transpose(0, 1))
    return torch.cat(parts)


PACKAGE = SimpleNamespace(TransformerLayer=TransformerLayer)
