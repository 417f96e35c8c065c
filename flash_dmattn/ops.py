"""The compiled kernels as torch.library custom ops, differentiable, with fake implementations.

One pair of ops serves the fixed and the variable length, on every device: `flash_dmattn::attention_forward` and
`flash_dmattn::attention_backward`. Sequences of variable length are given by all of cu_seqlens_q, cu_seqlens_k,
max_seqlen_q and max_seqlen_k, or by none.

On CUDA the forward packs a bool mask to bits, and hands the packed mask to the backward in its place.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

try:
    from . import _C
except ImportError as error:
    _C = None
    WHY_NOT_BUILT = f"flash_dmattn's compiled module is missing ({error}); run `pip install .` in its source tree"
else:
    WHY_NOT_BUILT = _C.why_not_usable()


def compiled_module():
    """The compiled module, or a RuntimeError that says why there is none."""
    if WHY_NOT_BUILT:
        raise RuntimeError(WHY_NOT_BUILT)
    return _C


def cuda_is_built() -> bool:
    return not WHY_NOT_BUILT and _C.has_cuda


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("flash_dmattn::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    bias: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse, and the packed mask: its bits (int32) and its tiles (uint8), empty on the CPU and without a mask."""
    kernels = compiled_module()
    if cu_seqlens_q is None:
        return kernels.mha_fwd(query, key, value, mask, bias, softmax_scale, softcap, is_causal)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernels.mha_varlen_fwd(query, key, value, mask, bias, *lengths, softmax_scale, softcap, is_causal)


@attention_forward.register_fake
def _(query, key, value, mask, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *_):
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    *batch, seqlen_q, heads, _ = query.shape
    lse = query.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype(query))
    bits = tiles = (0,)
    if mask is not None and query.device.type != "cpu":
        if cu_seqlens_q is None:
            lengths = query.shape[1], key.shape[1]
        else:
            lengths = max_seqlen_q, max_seqlen_k, query.shape[0], cu_seqlens_q.shape[0] - 1
        bits, tiles = packed_mask_shapes(mask.shape, *lengths)
    return out, lse, query.new_empty(bits, dtype=torch.int32), query.new_empty(tiles, dtype=torch.uint8)


def packed_mask_shapes(shape, seqlen_q, seqlen_k, total_q=None, batch=None):
    """The shapes of a packed mask: of bits, 32 keys a word, and of what is known of every tile of 64 x 64 pairs."""
    rows_alike = len(shape) == 2 or (len(shape) == 4 and shape[2] == 1)
    batches, heads = shape[0] if batch is None else batch, shape[1]
    rows, words = 1 if rows_alike else seqlen_q, -(-seqlen_k // 128) * 4
    bits = (total_q, heads, words) if len(shape) == 3 else (batches, heads, rows, words)
    return bits, (9, batches, heads, 1 if rows_alike else -(-seqlen_q // 64), -(-seqlen_k // 64))


@torch.library.custom_op("flash_dmattn::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Optional[Tensor],
    mask_tiles: Optional[Tensor],
    bias: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_k: Optional[int],
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    deterministic: bool,
    needs_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias; the last is empty where `needs_dbias` is False.

    mask: bool on the CPU; on CUDA the bits that the forward packed it to, `mask_tiles` beside them.
    """
    kernels = compiled_module()
    tensors = (dout, dlse, query, key, value, out, lse, mask, mask_tiles, bias)
    options = (softmax_scale, softcap, is_causal, deterministic, needs_dbias)
    if cu_seqlens_q is None:
        return kernels.mha_bwd(*tensors, *options)
    return kernels.mha_varlen_bwd(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@attention_backward.register_fake
def _(dout, dlse, query, key, value, out, lse, mask, mask_tiles, bias, *options):
    needs_dbias = options[-1]
    dquery, dkey, dvalue = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    if not needs_dbias:
        return dquery, dkey, dvalue, query.new_empty(0)
    return dquery, dkey, dvalue, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output):
    query, key, value, mask, bias, cu_seqlens_q, cu_seqlens_k, *lengths_and_options = inputs
    out, lse, mask_bits, mask_tiles = output
    ctx.mark_non_differentiable(mask_bits, mask_tiles)
    ctx.set_materialize_grads(False)  # else the packed mask would get zeros of its own size
    if mask is None or query.device.type == "cpu":
        mask_tiles = None
    else:
        mask = mask_bits
    ctx.save_for_backward(query, key, value, out, lse, mask, mask_tiles, bias, cu_seqlens_q, cu_seqlens_k)
    ctx.lengths_and_options = lengths_and_options


def _backward(ctx, dout, dlse, *_):
    query, key, value, out, lse, mask, mask_tiles, bias, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    needs_dbias = bias is not None and ctx.needs_input_grad[4]
    *grads, dbias = attention_backward(
        *(dout, dlse, query, key, value, out, lse, mask, mask_tiles, bias, cu_seqlens_q, cu_seqlens_k),
        *(*ctx.lengths_and_options, needs_dbias),
    )
    return *grads, None, dbias if needs_dbias else None, *[None] * 8


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError("flash_dmattn does not support double backward; use the backend 'reference' for it")


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
attention_backward.register_autograd(_refuse_double_backward)
