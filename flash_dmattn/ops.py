"""The compiled kernels as torch.library custom ops, differentiable, with fake implementations.

One pair of ops serves the fixed and the variable length, on every device: `flash_dmattn::attention_forward` and
`flash_dmattn::attention_backward`. Sequences of variable length are given by all of cu_seqlens_q, cu_seqlens_k,
max_seqlen_q and max_seqlen_k, or by none.

Which pairs see each other is given by the seven arguments of `MaskTensors`. On CUDA the forward packs a bool mask to
bits, and hands the packed mask to the backward in its place. `flash_dmattn::build_key_lists` makes lists of keys.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .loading import load_compiled

_C, WHY_NOT_BUILT = load_compiled()


def compiled_module():
    """The compiled module, or a RuntimeError that says why there is none."""
    if WHY_NOT_BUILT:
        raise RuntimeError(WHY_NOT_BUILT)
    return _C


def cuda_is_built() -> bool:
    return not WHY_NOT_BUILT and _C.has_cuda


class MaskTensors(NamedTuple):
    """Which pairs see each other, as the ops take it: by at most one of mask and intervals, or by lists of keys.

    Where there are lists, the keys are gathered by them (KeyListsView of csrc/params.h): `intervals` then says which
    rows see a key of a list, else `list_rows` does, else every row does.
    """

    mask: Optional[Tensor] = None  # bool ({B|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), or (total_k, heads), (total_q, heads, Sk)
    intervals: Optional[Tensor] = None  # int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends, or (2, total_k, heads)
    list_keys: Optional[Tensor] = None  # int32 (capacity), -1 in the padding
    list_starts: Optional[Tensor] = None  # int64 (lists + 1)
    list_rows: Optional[Tensor] = None  # int32 (capacity, 4), a bit for each of 128 rows
    list_batches: Optional[int] = None
    list_heads: Optional[int] = None


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("flash_dmattn::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    intervals: Optional[Tensor],
    list_keys: Optional[Tensor],
    list_starts: Optional[Tensor],
    list_rows: Optional[Tensor],
    list_batches: Optional[int],
    list_heads: Optional[int],
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
    masks = kernels.MaskTensors(mask, intervals, list_keys, list_starts, list_rows, list_batches, list_heads)
    if cu_seqlens_q is None:
        return kernels.mha_fwd(query, key, value, masks, bias, softmax_scale, softcap, is_causal)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return kernels.mha_varlen_fwd(query, key, value, masks, bias, *lengths, softmax_scale, softcap, is_causal)


@attention_forward.register_fake
def _(query, key, value, *masks_and_options):
    masks = MaskTensors(*masks_and_options[: len(MaskTensors._fields)])
    _, cu_seqlens_q, _, max_seqlen_q, max_seqlen_k, *_ = masks_and_options[len(MaskTensors._fields) :]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    *batch, seqlen_q, heads, _ = query.shape
    lse = query.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype(query))
    bits = tiles = (0,)
    if masks.mask is not None and query.device.type != "cpu":
        if cu_seqlens_q is None:
            lengths = query.shape[1], key.shape[1]
        else:
            lengths = max_seqlen_q, max_seqlen_k, query.shape[0], cu_seqlens_q.shape[0] - 1
        bits, tiles = packed_mask_shapes(masks.mask.shape, *lengths)
    return out, lse, query.new_empty(bits, dtype=torch.int32), query.new_empty(tiles, dtype=torch.uint8)


def is_per_key(shape) -> bool:
    """Whether a mask or bias of this shape, of fixed or variable length, is one number a key, alike for all rows."""
    return len(shape) == 2 or (len(shape) == 4 and shape[2] == 1)


def packed_mask_shapes(shape, seqlen_q, seqlen_k, total_q=None, batch=None):
    """The shapes of a packed mask: of bits, 32 keys a word, and of what is known of every tile of 64 x 64 pairs."""
    rows_alike = is_per_key(shape)
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
    intervals: Optional[Tensor],
    list_keys: Optional[Tensor],
    list_starts: Optional[Tensor],
    list_rows: Optional[Tensor],
    list_batches: Optional[int],
    list_heads: Optional[int],
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
    masks = kernels.MaskTensors(mask, intervals, list_keys, list_starts, list_rows, list_batches, list_heads)
    tensors = (dout, dlse, query, key, value, out, lse, masks, mask_tiles, bias)
    options = (softmax_scale, softcap, is_causal, deterministic, needs_dbias)
    if cu_seqlens_q is None:
        return kernels.mha_bwd(*tensors, *options)
    return kernels.mha_varlen_bwd(*tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@attention_backward.register_fake
def _(dout, dlse, query, key, value, out, lse, *masks_and_options):
    _, bias, *options = masks_and_options[len(MaskTensors._fields) :]
    needs_dbias = options[-1]
    dquery, dkey, dvalue = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))
    if not needs_dbias:
        return dquery, dkey, dvalue, query.new_empty(0)
    return dquery, dkey, dvalue, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _save_for_backward(ctx, inputs, output):
    query, key, value, *masks_and_options = inputs
    masks = MaskTensors(*masks_and_options[: len(MaskTensors._fields)])
    bias, cu_seqlens_q, cu_seqlens_k, *lengths_and_options = masks_and_options[len(MaskTensors._fields) :]
    out, lse, mask_bits, mask_tiles = output
    ctx.mark_non_differentiable(mask_bits, mask_tiles)
    ctx.set_materialize_grads(False)  # else the packed mask would get zeros of its own size
    if masks.mask is None or query.device.type == "cpu":
        mask_tiles = None
    else:
        masks = masks._replace(mask=mask_bits)
    *mask_tensors, list_batches, list_heads = masks
    ctx.save_for_backward(query, key, value, out, lse, *mask_tensors, mask_tiles, bias, cu_seqlens_q, cu_seqlens_k)
    ctx.list_sizes = list_batches, list_heads
    ctx.lengths_and_options = lengths_and_options


def _backward(ctx, dout, dlse, *_):
    query, key, value, out, lse, *mask_tensors, mask_tiles, bias, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    bias_index = 3 + len(MaskTensors._fields)
    needs_dbias = bias is not None and ctx.needs_input_grad[bias_index]
    *grads, dbias = attention_backward(
        *(dout, dlse, query, key, value, out, lse, *mask_tensors, *ctx.list_sizes, mask_tiles),
        *(bias, cu_seqlens_q, cu_seqlens_k, *ctx.lengths_and_options, needs_dbias),
    )
    no_gradients = [None] * len(MaskTensors._fields)
    return *grads, *no_gradients, dbias if needs_dbias else None, *[None] * 8


def refuse_double_backward(ctx, *grads):
    raise RuntimeError("flash_dmattn does not support double backward; use the backend 'reference' for it")


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
attention_backward.register_autograd(refuse_double_backward)


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = attention_forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def attention(*inputs):
    """`attention_forward` for eager mode, too: the autograd that PyTorch gives an op goes through its schema in every
    call, which takes longer than the kernels do on a short sequence.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return attention_forward(*inputs)
    needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return _EagerAttention.apply(*inputs) if needs_grad else attention_forward(*inputs)


@torch.library.custom_op("flash_dmattn::search_prefixes", mutates_args=(), device_types="cuda")
def search_prefixes(values: Tensor, last: Tensor, wanted: Tensor, levels: int) -> Tensor:
    """`prefix_topk.kth_smallest_of_prefixes` of int32 tensors in a few launches."""
    return compiled_module().search_prefixes(values, last, wanted, levels)


@search_prefixes.register_fake
def _(values, last, wanted, levels):
    return torch.empty_like(wanted)


LIST_ALIGN = 64  # of KeyListsView in csrc/params.h
LIST_ROWS = 128


@torch.library.custom_op("flash_dmattn::build_key_lists", mutates_args=())
def build_key_lists(
    mask: Optional[Tensor],
    intervals: Optional[Tensor],
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    capacity: Optional[int],
    limit: Optional[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """keys, starts and rows of the lists of a mask's keys, rows being empty but for a bool mask whose rows differ.

    capacity: room for all lists, where the caller knows a bound; else their total length is read back from the device.
        A bound that is too small is an error on the CPU; elsewhere, where looking would make the device wait, it cuts
        lists short.
    limit: without a capacity, the total length beyond which the lists are of no use: they then come back empty.
    """
    kernels = compiled_module()
    problem = (kernels.MaskTensors(mask, intervals), seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
    lengths, plan = kernels.list_lengths(*problem)
    starts = lengths.cumsum(0)
    if capacity is None:
        capacity = int(starts[-1])
        capacity = 0 if limit is not None and capacity > limit else capacity
    elif starts.device.type == "cpu" and int(starts[-1]) > capacity:
        raise ValueError(
            "keys_per_row of the mask must bound the keys that n successive rows see, at most keys_per_row + n - 1, "
            f"got one with room for {capacity} keys in all lists together, which hold {int(starts[-1])}"
        )
    # Elsewhere a bound that is wrong cuts lists short, and never makes a kernel read beyond their memory.
    starts = starts.clamp_(max=capacity)
    keys, rows = kernels.list_fill(*problem, starts, plan, capacity)
    return keys, starts, rows


@build_key_lists.register_fake
def _(mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, capacity, limit):
    like = mask if mask is not None else intervals
    shape = like.shape if mask is not None else like.shape[1:]
    batches = shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows_alike = mask is not None and is_per_key(mask.shape)
    row_tiles = 1 if rows_alike else -(-seqlen_q // LIST_ROWS)
    if capacity is None:
        capacity = torch.library.get_ctx().new_dynamic_size()
    with_rows = mask is not None and not rows_alike
    return (
        like.new_empty(capacity, dtype=torch.int32),
        like.new_empty(batches * shape[1] * row_tiles + 1, dtype=torch.int64),
        like.new_empty((capacity if with_rows else 0, LIST_ROWS // 32), dtype=torch.int32),
    )
