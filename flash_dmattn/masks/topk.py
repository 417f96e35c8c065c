"""Selects the keys of the causal top-k mask from a bias: the operator topk_intervals, and its CPU kernel in PyTorch.

The kernel finds eviction positions in O(N log N) operations and O(N) memory. Key j is among the w best of the keys up
to row i while fewer than w of these keys are better. So the w-th better key evicts it, and it is never visible where
that key comes before j: its end is the w-th smallest position among all better keys. With the positions listed from the
best key to the worst, this is the w-th smallest value of every prefix of a permutation. A wavelet tree finds it for all
prefixes at once, one bit per level.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..arguments import assert_later, is_host_readable, require_count, require_floating, require_length, shape_of
from ..biases import is_masked
from ..ops.list_sizes import list_capacity

NEVER = 1 << 30  # beyond any position; the sum of two positions still fits in int32


def has_kernels(bias: Tensor) -> bool:
    """Whether CUDA kernels select from the bias."""
    return bias.device.type == "cuda" and ops.cuda_is_built()


def has_list_kernels(bias: Tensor) -> bool:
    """Whether compiled kernels select key lists from the bias."""
    return has_kernels(bias) or (bias.device.type == "cpu" and ops.topk_lists is not None)


def operator_for(bias: Tensor) -> Callable[..., Tensor]:
    """The operator topk_intervals, or without a compiled module its CPU kernel."""
    is_operator = has_kernels(bias) or (bias.device.type != "cuda" and ops.topk_intervals is not None)
    return ops.topk_intervals if is_operator else topk_intervals


def topk_intervals(
    bias: Tensor,
    window_size: int,
    seqlen_q: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_keys: int | None,
    name: str = "bias",
) -> Tensor:
    """int32 (2, ...): starts and ends of `KeyIntervalMask.topk`, or with cu_seqlens of `topk_varlen`.

    name: the bias's, in an error.
    """
    refuse_nan(bias, name=name)
    bias = bias.detach()
    if cu_seqlens_k is None:
        bias = bias.squeeze(2) if bias.ndim == 4 else bias
        end = topk_ends_of_last(bias.flatten(0, 1), window_size, seqlen_q).view(bias.shape).clamp_(min=0)
        start = own_rows(seqlen_q, bias.shape[-1], bias.device).clamp_(min=0)
        return torch.stack((start.expand(bias.shape), end))
    keys = bias.shape[0]
    sequence = sequence_of_keys(cu_seqlens_k, keys)
    first = cu_seqlens_k[sequence]
    end = topk_ends(bias.T, window_size, first).T
    position = torch.arange(keys, dtype=torch.int32, device=bias.device) - first
    lead = torch.nn.functional.pad((cu_seqlens_k - cu_seqlens_q).diff(), (0, 1))[sequence]
    start, end = (position - lead)[:, None].clamp_(min=0), (end - lead[:, None]).clamp_(min=0)
    return torch.stack((start.expand(end.shape), end))


if ops.topk_intervals is not None:
    torch.library.impl(f"{ops.NAMESPACE}::topk_intervals", "cpu")(topk_intervals)


def check_topk(name: str, layout: str, bias: object, window_size: object, ndims: tuple[int, ...], of_keys: str) -> int:
    """Returns window_size as an int. of_keys: the index that makes a bias (Sk) one of the layout."""
    window_size = require_count("window_size", window_size)
    require_floating(name, bias)
    if bias.ndim not in ndims or (bias.ndim == 4 and bias.shape[2] != 1):
        hint = f": pass {name}{of_keys}" if bias.ndim == 1 else ""
        raise ValueError(f"{name} must be {layout}, got shape {shape_of(bias)}{hint}")
    return window_size


def refuse_nan(bias: Tensor, seqused_k: Tensor | None = None, *, name: str) -> None:
    """Raises where a bias to select from is NaN. CUDA kernels check it themselves.

    seqused_k: int32 (B), for a bias (B, .., Sk): the number of each sequence's keys; those beyond may hold anything.
    """
    if has_kernels(bias):
        return
    bias, is_readable = bias.detach(), is_host_readable(bias)
    if is_readable and not math.isnan(bias.sum().item()):  # one pass; only NaN, or inf and -inf, have the sum NaN
        return
    is_nan = bias.isnan()
    if seqused_k is not None:
        number = torch.ones_like(is_nan, dtype=torch.int32).cumsum(dim=-1)  # unlike arange, a DTensor for DTensors
        is_nan = is_nan & (number <= seqused_k.view(-1, *(1,) * (bias.ndim - 1)))
    message = f"{name} must not be NaN where window_size selects by it"
    if not is_readable:
        assert_later(~is_nan, message)
    elif is_nan.any():
        raise ValueError(message)


def require_position(name: str, length: object) -> int:
    """A number of rows or keys whose positions are below NEVER."""
    length = require_length(name, length)
    if isinstance(length, int) and length > NEVER:
        raise ValueError(f"{name} must be at most 2^30 for a KeyIntervalMask, got {length}")
    return length


def own_rows(seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> Tensor:
    """int32 (1, 1, Sk): the row aligned with each key, j - (Sk - Sq). Negative before the first row."""
    seqlen_q, seqlen_k = require_position("seqlen_q", seqlen_q), require_position("seqlen_k", seqlen_k)
    return torch.arange(seqlen_q - seqlen_k, seqlen_q, dtype=torch.int32, device=device)[None, None]


def sequence_of_keys(cu_seqlens: Tensor, keys: int) -> Tensor:
    """int64 (keys): the number of each key's sequence; B for keys after the last sequence."""
    positions = torch.arange(keys, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), positions, right=True) - 1


def topk_mask(bias: Tensor, candidates: Tensor, window_size: int) -> Tensor:
    """bool (.., rows, Sk): the `window_size` largest biases among the candidates of each row, ties to the later key.

    A candidate has a bias that is not NaN and does not mask it.
    """
    bias, candidates = torch.broadcast_tensors(bias, candidates)
    window_size = min(window_size, bias.shape[-1])
    if window_size == 0:
        return torch.zeros_like(candidates)
    if is_host_readable(bias) and ops.topk_mask is not None:
        return ops.topk_mask(bias.flatten(0, -2), candidates.flatten(0, -2), window_size).view(bias.shape)
    bias = torch.where(candidates, bias, -torch.inf)
    threshold = bias.topk(window_size, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    selected = (bias >= threshold) & candidates
    excess = selected.sum(dim=-1, keepdim=True, dtype=torch.int32) - window_size
    ties = selected & (bias == threshold)
    number = ties.to(torch.int8).cumsum(dim=-1, dtype=torch.int32)  # far faster than of bool, or in int64
    return torch.where(ties, number > excess, selected)  # without the earliest ties


def topk_ends(bias: Tensor, window_size: int, first: Tensor | None = None) -> Tensor:
    """int32 (heads, N): for each key the first position at which it is no longer among the `window_size` best so far.

    Of equal keys the later is the better. The end of a key that is never visible, such as one that its bias masks, is
    at most its own position; the end of a key that is never evicted is NEVER. Positions count from the first key of the
    sequence.

    Args:
        bias: floating (heads, N), without NaN.
        window_size: at least 0.
        first: int32 (N), for packed sequences: the position of the first key of each key's sequence.
    """
    heads, keys = bias.shape
    own = torch.arange(keys, dtype=torch.int32, device=bias.device)
    own = own if first is None else own - first
    if window_size == 0 or bias.numel() == 0:
        return own.repeat(heads, 1)
    if window_size >= keys:
        ends = torch.full_like(bias, NEVER, dtype=torch.int32)
    else:
        ends = eviction_positions(bias, window_size, first)
    return torch.where(is_masked(bias), own, ends)


def topk_ends_of_last(bias: Tensor, window_size: int, rows: int) -> Tensor:
    """int32 (heads, N): `topk_ends` counted in rows, the last row aligned with the last key. May be negative.

    With few rows most keys are evicted before the first row: only the best keys up to there are candidates.
    """
    heads, keys = bias.shape
    lead = keys - rows  # the position of the first row
    if not 0 < window_size <= lead or rows == 0:
        return topk_ends(bias, window_size) - lead
    known, is_valid = (x[0] for x in topk_keys(bias[None, :, : lead + 1], window_size))
    later = torch.arange(lead + 1, keys, device=bias.device).expand(heads, rows - 1)
    biases = [bias.gather(-1, known).masked_fill_(~is_valid, -torch.inf), bias[:, lead + 1 :]]
    ends = topk_ends(torch.cat(biases, dim=-1), window_size) - (window_size - 1)
    candidates = torch.cat([known.masked_fill(~is_valid, keys), later], dim=-1)
    return ends.new_zeros(heads, keys + 1).scatter_(-1, candidates, ends)[:, :keys]  # the last column is dropped


def topk_keys(bias: Tensor, count: int, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The `count` best keys of biases (batches, heads, n), count <= n.

    lengths: int32 (batches): the number of keys to select from, which come first. Requires list kernels.

    Returns:
        keys int64 (batches, heads, count), ascending; and bool of the same shape, False for missing entries, whose key
        is 0. Masked keys may be omitted.
    """
    batches, heads, length = bias.shape
    if has_list_kernels(bias):
        keys, (begin, end), _ = ops.topk_lists(bias, count, 1, lengths)
        keys = keys.view(batches, heads, list_capacity(count, 1, length))[..., :count]
        # Lists are padded with -1 to a multiple of 64; memory beyond is uninitialized.
        is_valid = (torch.arange(count, device=bias.device) < end - begin) & (keys >= 0)
        return keys.long().masked_fill_(~is_valid, 0), is_valid
    assert lengths is None, "lengths need list kernels"
    is_best = topk_mask(bias, torch.ones_like(bias, dtype=torch.bool), count)
    positions = torch.arange(length, device=bias.device).expand(bias.shape)
    to = torch.where(is_best, is_best.cumsum(dim=-1) - 1, count)  # the last column is dropped
    keys = positions.new_empty(batches, heads, count + 1).scatter_(-1, to, positions)[..., :count]
    return keys, torch.ones_like(keys, dtype=torch.bool)


def eviction_positions(bias: Tensor, window_size: int, first: Tensor | None) -> Tensor:
    """`topk_ends` for 0 < window_size < N. Treats a bias that masks its key as any other."""
    heads, keys = bias.shape
    total = bias.numel()
    dtype = torch.int32 if total < NEVER else torch.int64
    # Heads are packed like sequences: together they are one permutation of `total` positions.
    start = torch.arange(0, total, keys, dtype=dtype, device=bias.device)[:, None]
    order = (best_to_worst(bias, first) + start).flatten()
    start = (start if first is None else start + first).expand(heads, keys).flatten()

    rank = torch.arange(total, dtype=dtype, device=bias.device)
    better = (rank - 1).clamp_(min=0)  # the rank of the last better key
    wanted = start + (window_size - 1)  # the index in the sequence's sorted positions
    enough = wanted < rank
    # A tree per sequence has fewer levels than one for all, but needs sequences of a power of 2.
    of_each = first is None and keys & (keys - 1) == 0
    levels = ((keys if of_each else total) - 1).bit_length()
    found = kth_smallest_of_prefixes(order.to(dtype), better, torch.minimum(wanted, better), levels)
    ends = torch.where(enough, found - start, NEVER).int()
    return torch.empty_like(ends).scatter_(0, order, ends).view(heads, keys)


def best_to_worst(bias: Tensor, first: Tensor | None) -> Tensor:
    """int64 (heads, N): positions from the best key to the worst, one sequence after the other."""
    # A reversed stable ascending order has the later of equal keys first.
    order = bias.argsort(dim=-1, stable=True).flip(-1)
    return order if first is None else order.gather(-1, first[order].argsort(dim=-1, stable=True))


def kth_smallest_of_prefixes(values: Tensor, last: Tensor, wanted: Tensor, levels: int) -> Tensor:
    """(queries): element `wanted` of the sorted values[: last + 1].

    A node of the tree holds the values that agree in their high bits, in their original order; the next bit splits it.
    As `values` is a permutation, the node of the values a to b occupies the positions a to b.

    Args:
        values: integers (n), a permutation of 0 .. n - 1.
        last: integers (queries), the last position of the prefix.
        wanted: integers (queries), an index into the sorted prefix: at most `last`.
        levels: the number of bits to find. A value and a query share the higher bits with their positions.
    """
    position = torch.arange(len(values), dtype=values.dtype, device=values.device)
    for level in reversed(range(levels)):
        bit = (values >> level).bitwise_and_(1)
        ones = bit.cumsum(0, dtype=values.dtype)
        ones_before_node = (position >> (level + 1)) << level  # half of the positions before it
        # The new positions of the node's last 0 and last 1 up to each position.
        zero_to = (position + ones_before_node).sub_(ones)
        one_to = ones.add_(ones_before_node).add_((1 << level) - 1)

        last_zero, last_one = zero_to.index_select(0, last), one_to.index_select(0, last)
        in_ones = wanted > last_zero  # the prefix has too few zeros
        wanted = torch.where(in_ones, wanted + last_one - last, wanted)
        last = torch.where(in_ones, last_one, last_zero)
        if level > 0:
            to = torch.where(bit.bool(), one_to, zero_to)
            values = torch.empty_like(values).scatter_(0, to.long(), values)
    return wanted
