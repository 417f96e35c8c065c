"""The operators of the compiled module, as the dispatcher knows them (csrc/torch/library.cpp), with fakes by which
graphs are traced.

One pair of operators serves the fixed and the variable length, on every device: `attention_forward` and
`attention_backward`. Sequences of variable length are given by all of cu_seqlens_q, cu_seqlens_k, max_seqlen_q and
max_seqlen_k, or by none. Which pairs see each other is given by the six tensors of `MaskTensors`.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .loading import NAMESPACE, load_compiled

_C, WHY_NOT_BUILT = load_compiled()

LIST_ALIGN = 64  # of KeyListsView in csrc/params.h
LIST_ROWS = 128
MOST_SELECTED_ROWS = 16  # of topk_lists


def compiled_module():
    """The compiled module, or a RuntimeError that says why there is none."""
    if WHY_NOT_BUILT:
        raise RuntimeError(WHY_NOT_BUILT)
    return _C


def checker():
    """The compiled module, where it is to check arguments: those of a graph being traced are checked by its operators,
    and where there is no module the backends in Python alone are left.
    """
    return None if WHY_NOT_BUILT or torch.compiler.is_compiling() else _C


def attend_plainly(*arguments):
    """The result of a call that needs no mask and nothing but the operator; None of any other."""
    return None if WHY_NOT_BUILT or torch.compiler.is_compiling() else _C.attend_plainly(*arguments)


def cuda_is_built() -> bool:
    return not WHY_NOT_BUILT and _C.has_cuda


class MaskTensors(NamedTuple):
    """Which pairs see each other, as the operators take it: by at most one of mask and intervals, or by lists of keys.

    Where there are lists, the keys are gathered by them (KeyListsView of csrc/params.h): `intervals` then says which
    rows see a key of a list, else `list_rows` does, else every row does. On CUDA `pack_mask` turns a bool mask into
    `mask` and `mask_tiles`; `pack_and_list_mask` makes lists beside them, where these are short, and the device then
    goes by what there is.
    """

    mask: Optional[Tensor] = None  # bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), (total_k, heads), (total_q, heads, Sk)
    mask_tiles: Optional[Tensor] = None
    intervals: Optional[Tensor] = None  # int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends, or (2, total_k, heads)
    list_keys: Optional[Tensor] = None  # int32 (capacity), -1 in the padding
    list_spans: Optional[Tensor] = None  # int64 (2, {B|B/n|1}, {H|Hkv|1}, row tiles): where lists begin and end
    # int32 (capacity, 4), a bit for each of the 128 rows of a list. Or (0, 4) or (0, 2), where every one of the 128 or
    # 64 rows of a list sees its keys.
    list_rows: Optional[Tensor] = None


def is_per_key(shape) -> bool:
    """Whether a mask or bias of this shape, of fixed or variable length, is one number a key, alike for all rows."""
    return len(shape) == 2 or (len(shape) == 4 and shape[2] == 1)


def row_tiles(rows) -> int:
    """How many lists a head has."""
    return -(-rows // LIST_ROWS)


def count_visible_pairs(rows, keys, is_causal: bool):
    """How many pairs of one head and sequence causality leaves, without a mask."""
    if not is_causal:
        return rows * keys
    seeing = torch.sym_min(rows, keys)  # the rows that see a key
    return seeing * keys - seeing * (seeing - 1) // 2


def list_room(keys_per_row, rows, keys) -> int:
    """Room for the longest list, where no n rows that follow each other see more than keys_per_row + n - 1 keys."""
    if rows == 0:
        return 0
    # torch.sym_min, unlike min, makes no graph of its own for lengths on either side.
    longest = torch.sym_min(keys_per_row + torch.sym_min(rows, LIST_ROWS) - 1, keys)
    return -(-longest // LIST_ALIGN) * LIST_ALIGN


def has_list_rows(tile_rows: int) -> bool:
    """Whether the rows of a list differ in what they see, where `tile_rows` query rows share a row of indices."""
    return tile_rows % (LIST_ROWS // 2) != 0


def _empty(like: Tensor, shape, dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _forward_fake(query, *others):
    *batch, seqlen_q, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _empty(query, query.shape, query.dtype), _empty(query, (*batch, heads, seqlen_q), lse_dtype)


def _backward_fake(dout, dlse, query, key, value, bias, *others):
    needs_dbias = others[-1]
    *grads, dbias = (
        query.new_empty(0) if x is None else _empty(x, x.shape, x.dtype)
        for x in (query, key, value, bias if needs_dbias else None)
    )
    return *grads, dbias


def _build_key_lists_fake(
    mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit
):
    like = mask if mask is not None else intervals
    shape = like.shape if mask is not None else like.shape[1:]
    batches = shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows_alike = mask is not None and is_per_key(mask.shape)
    tiles = 1 if rows_alike else row_tiles(seqlen_q)
    if intervals is not None and keys_per_row is not None:
        capacity = batches * shape[1] * tiles * list_room(keys_per_row, seqlen_q, seqlen_k)
        if cu_seqlens_q is not None and like.device.type == "cpu":  # as csrc/torch/lists.cpp has it
            capacity = torch.sym_min(capacity, shape[1] * tiles * (shape[0] + batches * (LIST_ALIGN - 1)))
    else:
        capacity = torch.library.get_ctx().new_dynamic_size()
    with_rows = mask is not None and not rows_alike
    return (
        _empty(like, (capacity,), torch.int32),
        _empty(like, (2, batches, shape[1], tiles), torch.int64),
        _empty(like, (capacity if with_rows else 0, LIST_ROWS // 32), torch.int32),
    )


def _index_key_lists_fake(indices, intervals, tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    # As plan_index_lists in csrc/index_params.h.
    has_rows = has_list_rows(tile_rows)
    list_rows = LIST_ROWS if has_rows or tile_rows % LIST_ROWS == 0 else LIST_ROWS // 2
    tiles = -(-seqlen_q // list_rows)
    groups = tiles if has_rows else -(-tiles // (tile_rows // list_rows))
    if not has_rows:
        across = 1
    else:
        across = LIST_ROWS // tile_rows if LIST_ROWS % tile_rows == 0 else (LIST_ROWS - 2) // tile_rows + 2
    across = torch.sym_min(across, -(-seqlen_q // tile_rows))
    stride = -(-torch.sym_min(across * indices.shape[-1], seqlen_k) // LIST_ALIGN) * LIST_ALIGN
    heads, batches = indices.shape[1], indices.shape[0]
    if intervals is not None:
        heads = max(heads, intervals.shape[2])
        batches = intervals.shape[1] if batches == 1 else batches
    if cu_seqlens_q is not None:
        batches = cu_seqlens_q.shape[0] - 1
    capacity = batches * heads * groups * stride
    return (
        _empty(indices, (capacity,), torch.int32),
        _empty(indices, (2, batches, heads, tiles), torch.int64),
        _empty(indices, (capacity if has_rows else 0, list_rows // 32), torch.int32),
    )


def _pack_mask_fake(mask, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    rows_alike = is_per_key(mask.shape)
    batches = mask.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    heads, words = mask.shape[1], -(-seqlen_k // 128) * 4
    rows = (batches, heads, 1 if rows_alike else seqlen_q)
    bits = (*(mask.shape[:2] if mask.ndim == 3 else rows), words)
    tiles = (9, batches, heads, 1 if rows_alike else -(-seqlen_q // 64), -(-seqlen_k // 64))
    return _empty(mask, bits, torch.int32), _empty(mask, tiles, torch.uint8)


def _pack_and_list_mask_fake(mask, seqlen_q, seqlen_k, is_causal, percent):
    batches, heads, tiles = *mask.shape[:2], row_tiles(seqlen_q)
    # As room_for_short_lists in csrc/cuda/mask/build/list_builder.cu.
    walked = count_visible_pairs(seqlen_q, seqlen_k, is_causal) // LIST_ROWS + seqlen_k
    capacity = batches * heads * (-(-(walked // 2) // LIST_ALIGN) + tiles) * LIST_ALIGN
    return (
        *_pack_mask_fake(mask, seqlen_q, seqlen_k, is_causal, None, None),
        _empty(mask, (capacity,), torch.int32),
        _empty(mask, (2, batches, heads, tiles), torch.int64),
        _empty(mask, (capacity, LIST_ROWS // 32), torch.int32),
    )


def _topk_intervals_fake(bias, window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, longest):
    shape = (*bias.shape[:2], bias.shape[3]) if bias.ndim == 4 else bias.shape
    return _empty(bias, (2, *shape), torch.int32)


def _topk_lists_fake(bias, window_size, seqlen_q, seqlens_k):
    lists = (bias.shape[0] if seqlens_k is None else seqlens_k.shape[0]), bias.shape[1]
    capacity = lists[0] * lists[1] * list_room(window_size, seqlen_q, bias.shape[-1])
    return (
        _empty(bias, (capacity,), torch.int32),
        _empty(bias, (2, *lists, 1), torch.int64),
        _empty(bias, (capacity if seqlen_q > 1 else 0, LIST_ROWS // 32), torch.int32),
    )


def _operator(name: str, fake):
    """The operator of that name; None where there is no compiled module."""
    if _C is None:
        return None
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


# csrc/torch/operators.h, lists.h and cuda.h say what they take and give.
attention_forward = _operator("attention_forward", _forward_fake)
attention_backward = _operator("attention_backward", _backward_fake)
build_key_lists = _operator("build_key_lists", _build_key_lists_fake)
index_key_lists = _operator("index_key_lists", _index_key_lists_fake)
pack_mask = _operator("pack_mask", _pack_mask_fake)
pack_and_list_mask = _operator("pack_and_list_mask", _pack_and_list_mask_fake)
topk_intervals = _operator("topk_intervals", _topk_intervals_fake)
topk_lists = _operator("topk_lists", _topk_lists_fake)
