"""Shapes and dtypes of the operators' results, for tracing graphs. Each function has its operator's name and
arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from .conventions import accumulation_dtype
from .list_sizes import (
    LIST_ALIGN,
    LIST_ROWS,
    count_causal_scores,
    has_row_bits,
    is_per_key,
    list_capacity,
    num_m_blocks,
)
from .schema import Arguments, BackwardArguments, KvCacheArguments


def empty_lists(like: Tensor, capacity, spans, has_bits: bool, rows: int = LIST_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, spans, row bits) of lists of `rows` rows."""
    return (
        like.new_empty((capacity,), dtype=torch.int32),
        like.new_empty((2, *spans), dtype=torch.int64),
        like.new_empty((capacity if has_bits else 0, rows // 32), dtype=torch.int32),
    )


def guard_free(size):
    """The size, or where it may be 1 in a traced graph, a size unknown to it: PyTorch makes separate graphs for 1.

    The size itself where unknown sizes are off, as in torch.compile without fullgraph=True: they would break the graph.
    """
    if isinstance(size, int) or not size.node.shape_env.allow_dynamic_output_shape_ops:
        return size
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return size if statically_known_true(size != 1) else torch.library.get_ctx().new_dynamic_size()


def attention_forward(*args):
    query = Arguments(*args).query
    *batch, seqlen_q, heads, _ = query.shape
    lse_dtype = accumulation_dtype(query.dtype)
    return query.new_empty(query.shape), query.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype)


def attention_backward(*args):
    given = BackwardArguments(*args)
    bias = given.bias if given.needs_dbias else None
    relative_bias = given.relative_bias if given.needs_drelative_bias else None
    inputs = (given.query, given.key, given.value, bias, relative_bias)
    return tuple(given.query.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def attention_with_kvcache(*args):
    given = KvCacheArguments(*args)
    *batch, seqlen_q, heads, _ = given.query.shape
    lse_dtype = accumulation_dtype(given.query.dtype)
    out = given.query.new_empty((*batch, seqlen_q, heads, given.v_cache.shape[3]))
    return out, given.query.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype)


compose_attention_with_kvcache = attention_with_kvcache


def attend_to_gathered_keys(query, *_):
    *batch, seqlen_q, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((*batch, heads, seqlen_q), dtype=torch.float32)


def build_key_lists(mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit):
    like = mask if mask is not None else intervals
    shape = like.shape if mask is not None else like.shape[1:]
    batches = shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    row_broadcast = mask is not None and is_per_key(mask.shape)
    m_blocks = 1 if row_broadcast else num_m_blocks(seqlen_q)
    if intervals is not None and keys_per_row is not None:
        capacity = batches * shape[1] * m_blocks * list_capacity(keys_per_row, seqlen_q, seqlen_k)
        if cu_seqlens_q is not None and like.device.type == "cpu":  # as in csrc/torch/lists.cpp
            capacity = torch.sym_min(capacity, shape[1] * m_blocks * (shape[0] + batches * (LIST_ALIGN - 1)))
    else:
        capacity = torch.library.get_ctx().new_dynamic_size()
    return empty_lists(
        like, capacity, (batches, shape[1], guard_free(m_blocks)), mask is not None and not row_broadcast
    )


def index_key_lists(indices, intervals, tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    # As plan_index_lists in csrc/index_params.h.
    has_bits = has_row_bits(tile_rows)
    list_rows = LIST_ROWS if has_bits or tile_rows % LIST_ROWS == 0 else LIST_ROWS // 2
    m_blocks = -(-seqlen_q // list_rows)
    groups = m_blocks if has_bits else -(-m_blocks // (tile_rows // list_rows))
    if not has_bits:
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
    spans = (batches, heads, guard_free(m_blocks))
    return empty_lists(indices, batches * heads * groups * stride, spans, has_bits, list_rows)


def pack_mask(mask, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    row_broadcast = is_per_key(mask.shape)
    batches = mask.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    heads, words = mask.shape[1], -(-seqlen_k // 128) * 4
    rows = (batches, heads, 1 if row_broadcast else seqlen_q)
    bits = (*(mask.shape[:2] if mask.ndim == 3 else rows), words)
    blocks = map(guard_free, (1 if row_broadcast else -(-seqlen_q // 64), -(-seqlen_k // 64)))
    summaries = (9, batches, heads, *blocks)
    return mask.new_empty(bits, dtype=torch.int32), mask.new_empty(summaries, dtype=torch.uint8)


def pack_and_list_mask(mask, seqlen_q, seqlen_k, is_causal, percent):
    batches, heads, m_blocks = *mask.shape[:2], num_m_blocks(seqlen_q)
    # As room_for_short_lists in csrc/cuda/mask/builders/list_builder.cu.
    walked = count_causal_scores(seqlen_q, seqlen_k, is_causal) // LIST_ROWS + seqlen_k
    capacity = batches * heads * (-(-(walked // 2) // LIST_ALIGN) + m_blocks) * LIST_ALIGN
    packed = pack_mask(mask, seqlen_q, seqlen_k, is_causal, None, None)
    return *packed, *empty_lists(mask, capacity, (batches, heads, m_blocks), True)


def topk_intervals(bias, window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, max_keys, name="bias"):
    shape = (*bias.shape[:2], bias.shape[3]) if bias.ndim == 4 else bias.shape
    return bias.new_empty((2, *shape), dtype=torch.int32)


def topk_lists(bias, window_size, seqlen_q, seqused_k):
    batches, heads = bias.shape[0] if seqused_k is None else seqused_k.shape[0], bias.shape[1]
    capacity = batches * heads * list_capacity(window_size, seqlen_q, bias.shape[-1])
    return empty_lists(bias, capacity, (batches, heads, 1), seqlen_q > 1)


def topk_mask(bias, candidates, window_size):
    return candidates.new_empty(bias.shape)
