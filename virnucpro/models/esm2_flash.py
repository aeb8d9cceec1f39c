"""
ESM-2 over packed sequences: fair-esm's weights, one stream of tokens, no padding.

The model equals fair-esm's own forward pass within 1e-5 in fp32, for any batch; in bf16 and fp16 the weights are cast,
while rotary positions and pooling stay in float32. Short sequences, in which little of the rounding averages out, are
computed in a wider format than the rest, except in fp16, which needs none. On a GPU in bf16 and fp16, Triton kernels
rotate, add and normalise, where Triton runs. Legend: T packed tokens, S sequences, N heads, H head width, D model
width.
"""

from __future__ import annotations

import importlib
from collections import deque
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn import functional

from virnucpro.choices import Precision
from virnucpro.models.attention import choose_attention
from virnucpro.models.encoders.esm2_checkpoint import ROTARY_NAME, ProteinTokenizer, open_checkpoint
from virnucpro.models.encoders.fused_linear import FusedLinear, by_rows, fill_up, normalised, pack_layers
from virnucpro.models.encoders.loading import filled, own_tensors
from virnucpro.models.pooling import mean_over_residues
from virnucpro.models.registry import locate_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from virnucpro.models.attention import AttentionKernel
    from virnucpro.models.encoders.esm2_checkpoint import Architecture

TRAINING_MASK_SHARE = 0.15 * 0.8
"""Share of tokens that were masked in training; token dropout scales every embedding by the rest (0.88)."""

SHORT_SEQUENCES = {torch.float32: (32, torch.float64), torch.bfloat16: (64, torch.float32)}
"""By the model's dtype: tokens up to which a sequence is short, and the dtype that it is computed in on a CPU, as few
residues average little of the rounding out. In packed fp32 products, windows of real proteins of up to 30
residues were up to 3.8e-5 from fair-esm (8M checkpoint), which itself moves by up to 4.7e-5 between one at a time
and batched; in float64 only fair-esm's own rounding remains. In bf16, one in twenty windows of up to 28 residues
had a cosine below 0.999 to fp32, down to 0.9983; computed in float32 with the bf16 weights, none of 372 is below
0.9992 (8M checkpoint). On a GPU float16 takes the place of float32, as tensor cores compute its products, and
540 windows of up to 62 residues came as close to fp32 (lowest cosine 0.9987 either way; all in bf16 0.9972)."""

TRITON_KERNELS = "virnucpro.models.encoders.triton_kernels"
TRITON_CAPABILITY = (8, 0)
"""Least compute capability that Triton supports in bf16."""

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def load_esm2_model(
    model_name: str | Path, device: torch.device | str, *, precision: Precision | str = Precision.FP32
) -> tuple[PackedESM2, ProteinTokenizer]:
    """
    Open an ESM-2 with weights that are on this machine, and its tokenizer; nothing is downloaded.

    Args:
        model_name: Name in the registry, or path of a ``.pt`` or ``.safetensors`` file.
        precision: Number format of the weights and the forward pass.

    Raises:
        UnknownModelError: Neither a registered name nor a path.
        WeightsError: The weights are absent, damaged or not those of an ESM-2.
    """
    tokenizer = ProteinTokenizer()
    weights_path = locate_weights(model_name)
    architecture, tensors = open_checkpoint(weights_path, vocabulary=len(tokenizer.alphabet))
    model = packed_esm2(
        architecture, tensors, torch.device(device), DTYPES[Precision(precision)], mask_idx=tokenizer.alphabet.mask_idx
    )
    own_tensors(model, weights_path)
    return model, tokenizer


def packed_esm2(
    architecture: Architecture,
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    *,
    mask_idx: int,
) -> PackedESM2:
    """Return the model of a checkpoint's *tensors*, ready for inference; they are taken out of the dictionary."""
    kept_dtypes = {ROTARY_NAME: torch.float32}
    model = filled(
        lambda: PackedESM2(architecture, mask_idx=mask_idx),
        ((name, x.to(device, kept_dtypes.get(name, dtype))) for name, x in _joined_tensors(tensors, architecture)),
    )
    model.prepare_for_inference()
    return model


@dataclass(frozen=True)
class StepKernels:
    """Kernels that rotate, add and normalise between matrix products; None: PyTorch's operators."""

    kernels: ModuleType | None
    reason: str


def choose_step_kernels(device: torch.device, dtype: torch.dtype, architecture: Architecture) -> StepKernels:
    """Return Triton's kernels where they compile and run for tensors of *dtype* on *device*, with the reason."""
    if device.type != "cuda" or dtype not in {torch.float16, torch.bfloat16}:
        return StepKernels(None, "Triton kernels are for GPUs, in float16 and bfloat16")
    if torch.cuda.get_device_capability(device) < TRITON_CAPABILITY:
        return StepKernels(None, "Triton kernels need compute capability 8.0")
    try:
        kernels = importlib.import_module(TRITON_KERNELS)
        kernels.try_out(device, dtype, num_heads=architecture.attention_heads, head_dim=architecture.head_dim)
    except torch.OutOfMemoryError:  # the device is full, whether or not Triton works
        raise
    except Exception as error:  # noqa: BLE001  no triton, no C compiler, no folder for its cache: plain operators work
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        return StepKernels(None, f"Triton kernels do not run here ({cause[:200]})")
    return StepKernels(kernels, "Triton kernels do it in one pass each")


class PackedESM2(nn.Module):
    """ESM-2's encoder, without its heads, over packed tokens; *attention* is the kernel in use, with the reason."""

    rotary_frequencies: torch.Tensor

    def __init__(self, architecture: Architecture, *, mask_idx: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.hidden_dim = architecture.hidden_dim
        self.mask_idx = mask_idx
        self.embed_tokens = nn.Embedding(architecture.vocabulary, architecture.hidden_dim)
        self.layers = nn.ModuleList(PackedLayer(architecture) for _ in range(architecture.num_layers))
        self.emb_layer_norm_after = nn.LayerNorm(architecture.hidden_dim)
        self.register_buffer(ROTARY_NAME, torch.empty(architecture.head_dim // 2))
        self.choose_kernel()

    def choose_kernel(self) -> None:
        weight = self.embed_tokens.weight
        own, is_on_gpu = weight.dtype, weight.device.type == "cuda"
        self._short_tokens, self._wide = SHORT_SEQUENCES.get(own, (0, own))
        if own is torch.bfloat16 and is_on_gpu:
            self._wide = torch.float16
        # float64 of an fp32 model goes through the kernel of fp32
        wider = () if own is torch.float32 else {self._wide, torch.float32} - {own}
        head_dim = self.architecture.head_dim
        self.attention = choose_attention(weight.device, own, head_dim=head_dim)
        self._wider = {dtype: choose_attention(weight.device, dtype, head_dim=head_dim) for dtype in wider}
        self.steps = choose_step_kernels(weight.device, weight.dtype, self.architecture)
        if is_on_gpu:
            reason = f"{self.attention.reason}; rotary positions, sums and norms: {self.steps.reason}"
            # the name is part of a run's identity, as rounding differs
            name = f"{self.attention.name}{', triton' if self.steps.kernels else ''}"
            self.attention = replace(self.attention, name=name, reason=reason)

    def prepare_for_inference(self) -> None:
        """Fix kernel and layout for the current device; the weights must not be moved or trained afterwards."""
        self.eval().requires_grad_(requires_grad=False)
        self.choose_kernel()
        pack_layers(self)

    @torch.inference_mode()
    def forward(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """
        Return ``embeddings_SD``, float32: the mean over each sequence's residues of the last layer.

        Args:
            input_ids_T: Token ids, each sequence between BOS and EOS, int64, shape (T,).
            cu_seqlens: First token of each sequence and, last, T; int32, shape (S+1,), on the model's device.
            lengths: Tokens of each sequence, on the host.
        """
        own = self.embed_tokens.weight.dtype
        pooled, sequence, token = [], 0, 0
        # neighbours of one kind are a slice: in a length-sorted batch two, and the host need not ask the device for one
        for is_short, neighbours in groupby(lengths, lambda length: length <= self._short_tokens):
            some = list(neighbours)
            starts = cu_seqlens[sequence : sequence + len(some) + 1] - token
            tokens = slice(token, token + sum(some))
            pooled.append(self._pooled(input_ids_T[tokens], starts, some, self._wide if is_short else own))
            sequence, token = sequence + len(some), tokens.stop
        return torch.cat(pooled)

    @torch.inference_mode()
    def in_float32(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Return what ``forward`` does, computed in float32 with the same weights: nothing of it overflows."""
        return self._pooled(input_ids_T, cu_seqlens, lengths, torch.float32)

    def _pooled(
        self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        # not *_: that would keep every layer's states until the last is there
        (x_TD,) = deque(self._states(input_ids_T, cu_seqlens, lengths, dtype), maxlen=1)
        return mean_over_residues(x_TD, cu_seqlens, lengths)

    def _states(
        self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, lengths: Sequence[int], dtype: torch.dtype
    ) -> Iterator[torch.Tensor]:
        """Yield the embedded tokens and each layer's states, computed in *dtype*; valid until the next is computed."""
        num_tokens = input_ids_T.shape[0]
        input_ids_T, cu_seqlens, lengths = fill_up(input_ids_T, cu_seqlens, lengths)
        kernel = self._wider.get(dtype, self.attention).for_forward_pass()
        x_TD = self._embed(input_ids_T, cu_seqlens, dtype)
        rotation_TH = self._rotation(cu_seqlens, input_ids_T.shape[0], max(lengths))
        yield x_TD[:num_tokens]
        if self.steps.kernels is None:
            for layer in self.layers[:-1]:
                x_TD = layer(x_TD, rotation_TH, kernel, cu_seqlens, lengths)
                yield x_TD[:num_tokens]
            x_TD = self.layers[-1](x_TD, rotation_TH, kernel, cu_seqlens, lengths)
            yield normalised(self.emb_layer_norm_after, x_TD)[:num_tokens]
            return
        # every sum together with the norm that reads it, which may be the next layer's
        layers = cast("list[PackedLayer]", [*self.layers])
        norms = [*(layer.self_attn_layer_norm for layer in layers), self.emb_layer_norm_after]
        normed_TD = normalised(norms[0], x_TD)
        for layer, norm in zip(layers, norms[1:], strict=True):
            normed_TD = layer.add_in_place(
                x_TD, normed_TD, norm, self.steps.kernels, rotation_TH, kernel, cu_seqlens, lengths
            )
            yield (normed_TD if layer is layers[-1] else x_TD)[:num_tokens]

    def _embed(self, input_ids_T: torch.Tensor, cu_seqlens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Look tokens up; with token dropout, masks are 0 and the rest is scaled as in training."""
        x_TD: torch.Tensor = self.embed_tokens(input_ids_T).to(dtype)
        if not self.architecture.token_dropout:
            return x_TD
        is_mask_T = input_ids_T == self.mask_idx
        # int64 prefix sums are exact, so that no sequence depends on what is packed before it
        masks_before = functional.pad(is_mask_T.cumsum(0), (1, 0))
        lengths_S = cu_seqlens.diff()
        masked_share_S = masks_before[cu_seqlens.long()].diff() / lengths_S
        scale_S = (1 - TRAINING_MASK_SHARE) / (1 - masked_share_S)
        scale_T = scale_S.repeat_interleave(lengths_S, output_size=input_ids_T.shape[0])
        return x_TD * (scale_T * ~is_mask_T).to(x_TD.dtype)[:, None]

    def _rotation(self, cu_seqlens: torch.Tensor, num_tokens: int, longest: int) -> torch.Tensor:
        """Return each token's rotary turn, positions restarting at each sequence: complex64, (T, 1, H/2)."""
        device = cu_seqlens.device
        positions_L = torch.arange(longest, device=device, dtype=torch.float32)
        angles_LH = torch.outer(positions_L, self.rotary_frequencies)
        turns_LH = torch.polar(torch.ones_like(angles_LH), angles_LH)
        starts_T = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
        return turns_LH[torch.arange(num_tokens, device=device) - starts_T][:, None, :]


class PackedLayer(nn.Module):
    """One pre-layer-norm transformer layer over the token stream; queries, keys and values in one product."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden_dim = architecture.hidden_dim
        self.heads = (architecture.attention_heads, architecture.head_dim)
        self.self_attn_layer_norm = nn.LayerNorm(hidden_dim)
        self.qkv_proj = FusedLinear(hidden_dim, 3 * hidden_dim)
        self.out_proj = FusedLinear(hidden_dim, hidden_dim)
        self.final_layer_norm = nn.LayerNorm(hidden_dim)
        self.fc1 = FusedLinear(hidden_dim, 4 * hidden_dim)
        self.fc2 = FusedLinear(4 * hidden_dim, hidden_dim)

    def forward(
        self,
        x_TD: torch.Tensor,
        rotation_TH: torch.Tensor,
        kernel: AttentionKernel,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        normed_TD = normalised(self.self_attn_layer_norm, x_TD)
        attended_TD = self._attended(normed_TD, _rotate, rotation_TH, kernel, cu_seqlens, lengths)
        x_TD = self.out_proj.add_to(x_TD, attended_TD)
        return by_rows(self._feed_forward, x_TD)

    def add_in_place(
        self,
        x_TD: torch.Tensor,
        normed_TD: torch.Tensor,
        next_norm: nn.LayerNorm,
        steps: ModuleType,
        rotation_TH: torch.Tensor,
        kernel: AttentionKernel,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """Make *x_TD*, given with its norm, what ``forward`` returns, and return it through *next_norm*."""
        attended_TD = self._attended(normed_TD, steps.rotate, rotation_TH, kernel, cu_seqlens, lengths)
        normed_TD = steps.add_and_normalise(x_TD, self.out_proj(attended_TD), self.final_layer_norm)
        out_TD: torch.Tensor = steps.add_and_normalise(x_TD, self.fc2(self.fc1.gelu(normed_TD)), next_norm)
        return out_TD

    def _attended(
        self,
        normed_TD: torch.Tensor,
        rotate: Callable[[torch.Tensor, torch.Tensor], None],
        rotation_TH: torch.Tensor,
        kernel: AttentionKernel,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        qkv_T3NH = self.qkv_proj(normed_TD).view(-1, 3, *self.heads)
        rotate(qkv_T3NH, rotation_TH)
        q_TNH, k_TNH, v_TNH = qkv_T3NH.unbind(1)
        return kernel(q_TNH, k_TNH, v_TNH, cu_seqlens, lengths).flatten(1)

    def _feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.fc2.add_to(x_TD, self.fc1.gelu(normalised(self.final_layer_norm, x_TD)))


def _rotate(qkv_T3NH: torch.Tensor, rotation_TH: torch.Tensor) -> None:
    """Rotate each pair of q's and k's neighbouring channels by its token's angle, in place, in float32 or better."""
    x_TNH = qkv_T3NH[:, :2].flatten(1, 2)
    pairs_TNH = x_TNH.view(*x_TNH.shape[:2], -1, 2)
    if x_TNH.dtype in {torch.float32, torch.float64}:
        torch.view_as_complex(pairs_TNH).mul_(rotation_TH)
    else:
        pairs_TNH.copy_(torch.view_as_real(torch.view_as_complex(pairs_TNH.float()).mul_(rotation_TH)))


def _joined_tensors(tensors: dict[str, torch.Tensor], architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Take fair-esm's tensors out of *tensors*, by the names of ``PackedESM2``, queries, keys and values joined.

    fair-esm rotates channel i of a head together with channel i + H/2. Here such pairs are made neighbours, for one
    complex product; queries and keys are permuted alike, so that their dot products stay the same.
    """
    for name in list(tensors):
        if ".self_attn." not in name:
            yield name, tensors.pop(name)
        elif ".out_proj." in name:
            yield name.replace(".self_attn.", "."), tensors.pop(name)
        elif ".q_proj." in name:
            query, key, value = (tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv")
            neighbours = [_pairs_as_neighbours(x, architecture) for x in (query, key)]
            yield name.replace(".self_attn.q_proj.", ".qkv_proj."), torch.cat([*neighbours, value])


def _pairs_as_neighbours(tensor: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """Reorder the D output channels of a projection's weight or bias within each head: 0, H/2, 1, H/2 + 1, ..."""
    channels_first = tensor.view(architecture.attention_heads, 2, architecture.head_dim // 2, -1)
    return channels_first.transpose(1, 2).reshape(tensor.shape)
