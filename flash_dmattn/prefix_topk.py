"""How long a key stays among the w best of the keys so far: the causal top-w mask in O(N log N), without N x N memory.

Key j is one of the w best of the keys up to row i as long as fewer than w keys up to i are better. So it drops out with
the w-th of the better keys, and never was in where that one stands before j: its end is the w-th smallest place among
all better keys. With the places written down from the best key to the worst, this is the w-th smallest value of every
prefix of a permutation, which a wavelet tree finds for all prefixes at once, one bit of the answer after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .biases import hides
from .masks import topk_mask

NEVER = 1 << 30  # beyond any place, and far enough from 2^31 that places may be added


def has_kernels(bias: Tensor) -> bool:
    """Whether kernels select from it, and not this file."""
    return bias.device.type == "cuda" and ops.cuda_is_built()


def topk_ends(bias: Tensor, window_size: int, first: Tensor | None = None) -> Tensor:
    """int32 (heads, N): for each key the first place at which it is no longer among the `window_size` best so far.

    Of equal keys the later is the better. A key that never was in has an end that is not after its own place, as has a
    key that its bias hides; a key that never drops out has NEVER. Places count from the first key of the sequence.

    Args:
        bias: floating (heads, N), without NaN.
        window_size: at least 0.
        first: int32 (N), where several sequences lie one after the other: the place of the first key of its sequence.
    """
    heads, keys = bias.shape
    own = torch.arange(keys, dtype=torch.int32, device=bias.device)
    own = own if first is None else own - first
    if window_size == 0 or bias.numel() == 0:
        return own.repeat(heads, 1)
    if window_size >= keys:
        ends = torch.full_like(bias, NEVER, dtype=torch.int32)
    else:
        ends = drop_out_places(bias, window_size, first)
    return torch.where(hides(bias), own, ends)


def topk_ends_of_last(bias: Tensor, window_size: int, rows: int) -> Tensor:
    """int32 (heads, N): `topk_ends` counted in rows, of which the last stands at the last place; it may be below 0.

    Where rows are few, most keys have dropped out before the first: only the best up to there are looked at.
    """
    heads, keys = bias.shape
    lead = keys - rows  # the place of the first row
    if not 0 < window_size <= lead or rows == 0:
        return topk_ends(bias, window_size) - lead
    known = best_places(bias[:, : lead + 1], window_size)
    later = torch.arange(lead + 1, keys, device=bias.device).expand(heads, rows - 1)
    looked_at = torch.cat([known, later], dim=-1)
    ends = topk_ends(bias.gather(-1, looked_at), window_size) - (window_size - 1)
    return ends.new_zeros(heads, keys).scatter_(-1, looked_at, ends)


def best_places(bias: Tensor, count: int) -> Tensor:
    """int64 (heads, count): the places of the best keys, rising; all of them need not be sorted for that."""
    heads, keys = bias.shape
    is_best = topk_mask(bias, torch.ones_like(bias, dtype=torch.bool), count)
    places = torch.arange(keys, device=bias.device).expand(heads, keys)
    to = torch.where(is_best, is_best.cumsum(dim=-1) - 1, count)  # behind the best, where nobody reads
    return places.new_empty(heads, count + 1).scatter_(-1, to, places)[:, :count]


def drop_out_places(bias: Tensor, window_size: int, first: Tensor | None) -> Tensor:
    """`topk_ends` where it takes work: 0 < window_size < N, and a bias that hides is one like any other."""
    heads, keys = bias.shape
    total = bias.numel()
    dtype = torch.int32 if total < NEVER else torch.int64
    # The heads are sequences one after the other, too: all together are one permutation of `total` places.
    start = torch.arange(0, total, keys, dtype=dtype, device=bias.device)[:, None]
    order = (best_to_worst(bias, first) + start).flatten()
    start = (start if first is None else start + first).expand(heads, keys).flatten()

    place = torch.arange(total, dtype=dtype, device=bias.device)
    better = (place - 1).clamp_(min=0)  # where the better keys of a place in the order end
    wanted = start + (window_size - 1)  # of the sequence's places, were they sorted
    enough = wanted < place
    # A tree for each sequence has fewer levels than one for all, but its nodes must be full.
    of_each = first is None and keys & (keys - 1) == 0
    levels = ((keys if of_each else total) - 1).bit_length()
    found = kth_smallest_of_prefixes(order.to(dtype), better, torch.minimum(wanted, better), levels)
    ends = torch.where(enough, found - start, NEVER).int()
    return torch.empty_like(ends).scatter_(0, order, ends).view(heads, keys)


def best_to_worst(bias: Tensor, first: Tensor | None) -> Tensor:
    """int64 (heads, N): the places of the first sequence's keys from the best to the worst, then the second's, ..."""
    # Read backwards, a stable ascending order has the later of equal keys first.
    order = bias.argsort(dim=-1, stable=True).flip(-1)
    return order if first is None else order.gather(-1, first[order].argsort(dim=-1, stable=True))


def kth_smallest_of_prefixes(values: Tensor, last: Tensor, wanted: Tensor, levels: int) -> Tensor:
    """(queries): the number that would stand at `wanted` if values[: last + 1] were sorted.

    A node of the tree holds the values that agree in all but their lowest bits, in the order in which they came; its
    next bit splits it in two. `values` being a permutation, the node of the values a to b lies at the places a to b.

    Args:
        values: integers (n), a permutation of 0 .. n - 1.
        last: integers (queries), the last place of the prefix.
        wanted: integers (queries), a place of the sorted prefix: at most `last`.
        levels: how many of their bits are to be found; the higher ones are those of the place, both of a value and of
            a query.
    """
    place = torch.arange(len(values), dtype=values.dtype, device=values.device)
    for level in reversed(range(levels)):
        bit = (values >> level).bitwise_and_(1)
        ones = bit.cumsum(0, dtype=values.dtype)
        ones_before_node = (place >> (level + 1)) << level  # half of what lies there
        # Where the last 0 of the node up to a place goes, and where the last 1.
        zero_to = (place + ones_before_node).sub_(ones)
        one_to = ones.add_(ones_before_node).add_((1 << level) - 1)

        last_zero, last_one = zero_to.index_select(0, last), one_to.index_select(0, last)
        in_ones = wanted > last_zero  # the prefix has too few zeros
        wanted = torch.where(in_ones, wanted + last_one - last, wanted)
        last = torch.where(in_ones, last_one, last_zero)
        if level > 0:
            to = torch.where(bit.bool(), one_to, zero_to)
            values = torch.empty_like(values).scatter_(0, to.long(), values)
    return wanted
