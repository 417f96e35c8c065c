"""window_size: the causal dynamic mask of a call, in the form that is fastest for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..arguments import statically_true
from ..ops.list_sizes import MAX_TOPK_LIST_ROWS
from ..ops.schema import MaskTensors
from .base import Mask, PackedMask, Problem
from .interval import KeyIntervalMask
from .topk import has_list_kernels, refuse_nan

NAME = "attn_bias"  # of the bias in errors


def select(
    bias: Tensor,
    window_size: int,
    problem: Problem,
    cache_seqlens: Tensor | None = None,
    *,
    as_lists: bool = False,
    must_mask: bool = False,
) -> Mask | None:
    """The top-k mask of a call; None where window_size covers all keys, so that causality and the bias suffice.

    Args:
        bias: ({B|1}, {H|Hkv|1}, 1, Sk) or (total_k, {H|Hkv|1}), checked.
        cache_seqlens: int32 (B), for fixed length.
        as_lists: allows the kernel that selects lists for few rows.
        must_mask: never returns None.
    """
    seqlen_q, seqlen_k, _, cu_seqlens_q, cu_seqlens_k = problem
    if statically_true(window_size >= seqlen_k) and not must_mask:
        refuse_nan(bias, cache_seqlens, name=NAME)
        return None
    if cu_seqlens_k is not None:
        return KeyIntervalMask._topk_varlen(NAME, bias, window_size, cu_seqlens_k, cu_seqlens_q, seqlen_k)
    if as_lists and has_list_kernels(bias) and statically_true(seqlen_q <= MAX_TOPK_LIST_ROWS):
        keys, spans, rows = ops.topk_lists(bias, min(window_size, seqlen_k), seqlen_q, cache_seqlens)
        row_bits = rows if seqlen_q > 1 else None
        return PackedMask(MaskTensors(kv_indices=keys, kv_indptr=spans, kv_row_bits=row_bits))
    if cache_seqlens is None:
        return KeyIntervalMask._topk(NAME, bias, window_size, seqlen_q)
    return topk_of_cache(bias.squeeze(2), window_size, seqlen_q, cache_seqlens)


@torch.no_grad()
def topk_of_cache(bias: Tensor, window_size: int, seqlen_q: int, cache_seqlens: Tensor) -> KeyIntervalMask:
    """The top-k mask of a partly filled cache: the last row is aligned with key cache_seqlens - 1."""
    keys = cache_seqlens[:, None, None]
    beyond = torch.arange(bias.shape[2], device=bias.device) >= keys
    bias = bias.masked_fill(beyond, -torch.inf)
    if statically_true(seqlen_q == 1):  # the row sees the best of all keys
        return KeyIntervalMask._topk(NAME, bias, window_size, 1)
    # The ends of a square mask are key positions; shifting turns them into rows.
    square = KeyIntervalMask._topk(NAME, bias, window_size)
    intervals = (square.intervals - (keys - seqlen_q)).clamp_(min=0)
    return KeyIntervalMask._of(intervals, square.keys_per_row, square.unstructured, seqlen_q)
