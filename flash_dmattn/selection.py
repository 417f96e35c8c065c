"""window_size: the causal dynamic mask that is made in the call, in the form by which the kernels go fastest."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops, prefix_topk
from .arguments import is_known, require_count
from .interval_mask import KeyIntervalMask, refuse_nan


def select(
    bias: Tensor,
    window_size: int,
    seqlen_q: int,
    seqlen_k: int,
    cache_seqlens: Tensor | None = None,
    as_lists: bool = False,
    must_mask: bool = False,
) -> KeyIntervalMask | ops.MaskTensors | None:
    """What the rows see of fixed length; None where causality and the bias alone say it, since no row has more keys.

    bias: ({B|1}, {H|Hkv|1}, 1, Sk), checked.
    as_lists: whether few rows may be given straight as lists of keys, which their kernel alone can make.
    must_mask: whether None will not do.
    """
    require_count("window_size", window_size)
    if is_known(window_size >= seqlen_k) and not must_mask:
        refuse_nan(bias)
        return None
    if as_lists and prefix_topk.has_kernels(bias) and is_known(seqlen_q <= ops.MOST_SELECTED_ROWS):
        keys, spans, rows = ops.topk_lists(bias, min(window_size, seqlen_k), seqlen_q, cache_seqlens)
        return ops.MaskTensors(list_keys=keys, list_spans=spans, list_rows=rows if seqlen_q > 1 else None)
    if cache_seqlens is None:
        return KeyIntervalMask.topk(bias, window_size, seqlen_q)
    return topk_of_cache(bias.squeeze(2), window_size, seqlen_q, cache_seqlens)


def select_varlen(
    bias: Tensor, window_size: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, must_mask: bool
) -> KeyIntervalMask | None:
    """The same of variable length; bias (total_k, {H|Hkv|1})."""
    require_count("window_size", window_size)
    if is_known(window_size >= max_seqlen_k) and not must_mask:
        refuse_nan(bias)
        return None
    return KeyIntervalMask.topk_varlen(bias, window_size, cu_seqlens_k, cu_seqlens_q, max_seqlen_k)


@torch.no_grad()
def topk_of_cache(bias: Tensor, window_size: int, seqlen_q: int, cache_seqlens: Tensor) -> KeyIntervalMask:
    """The last row of each batch element stands at the last of its keys, of which there are cache_seqlens (B)."""
    keys = cache_seqlens[:, None, None]
    beyond = torch.arange(bias.shape[2], device=bias.device) >= keys
    bias = bias.masked_fill(beyond, -torch.inf)
    if is_known(seqlen_q == 1):  # it sees the best of all
        return KeyIntervalMask.topk(bias, window_size, 1)
    by_place = KeyIntervalMask.topk(bias, window_size)  # with a row for every key, places are rows
    intervals = (by_place.intervals - (keys - seqlen_q)).clamp_(min=0)
    return KeyIntervalMask._of(intervals, by_place.keys_per_row, by_place.scattered, seqlen_q)
