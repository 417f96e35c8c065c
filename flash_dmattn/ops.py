"""The compiled kernels as torch.library custom ops, differentiable, with fake implementations.

One pair of ops serves the fixed and the variable length, on every device: `flash_dmattn::attention_forward` and
`flash_dmattn::attention_backward`. Sequences of variable length are given by all of cu_seqlens_q, cu_seqlens_k,
max_seqlen_q and max_seqlen_k, or by none.
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
    return not WHY_NOT_BUILT and _C.has_cuda()


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
) -> tuple[Tensor, Tensor]:
    kernels = compiled_module()
    if cu_seqlens_q is None:
        return kernels.mha_fwd(query, key, value, mask, bias, softmax_scale, softcap, is_causal)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernels.mha_varlen_fwd(query, key, value, mask, bias, *lengths, softmax_scale, softcap, is_causal)


@attention_forward.register_fake
def _(query, key, value, mask, bias, cu_seqlens_q, *_):
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    *batch, seqlen_q, heads, _ = query.shape
    return out, query.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype(query))


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
    """Gradients of query, key, value and bias; the last is empty where `needs_dbias` is False."""
    kernels = compiled_module()
    tensors = (dout, dlse, query, key, value, out, lse, mask, bias)
    options = (softmax_scale, softcap, is_causal, deterministic, needs_dbias)
    if cu_seqlens_q is None:
        return kernels.mha_bwd(*tensors, *options)
    return kernels.mha_varlen_bwd(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@attention_backward.register_fake
def _(dout, dlse, query, key, value, out, lse, mask, bias, *options):
    needs_dbias = options[-1]
    dquery, dkey, dvalue = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    if not needs_dbias:
        return dquery, dkey, dvalue, query.new_empty(0)
    return dquery, dkey, dvalue, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output):
    *tensors, max_seqlen_q, max_seqlen_k, softmax_scale, softcap, is_causal, deterministic = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.max_seqlens = (max_seqlen_q, max_seqlen_k)
    ctx.options = (softmax_scale, softcap, is_causal, deterministic)


def _backward(ctx, dout, dlse):
    query, key, value, mask, bias, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    needs_dbias = bias is not None and ctx.needs_input_grad[4]
    *grads, dbias = attention_backward(
        *(dout, dlse, query, key, value, out, lse, mask, bias, cu_seqlens_q, cu_seqlens_k),
        *(*ctx.max_seqlens, *ctx.options, needs_dbias),
    )
    return *grads, None, dbias if needs_dbias else None, *[None] * 8


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError("flash_dmattn does not support double backward; use the backend 'reference' for it")


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
attention_backward.register_autograd(_refuse_double_backward)
