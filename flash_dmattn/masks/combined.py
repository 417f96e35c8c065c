"""Intersections and unions of a KeyIntervalMask and another mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import assert_later, is_host_readable, names, require_dense, require_device, shape_of
from ..broadcast import expand_shared, is_one_of

if TYPE_CHECKING:
    from .interval import KeyIntervalMask

FIXED, VARLEN = "({B|1}, {H|Hkv|1}, Sk)", "(total_k, {H|Hkv|1})"


def intersection(a: KeyIntervalMask, b: KeyIntervalMask) -> KeyIntervalMask:
    (start, end), (others_start, others_end) = expand_bounds(a, b, "&")
    bounds = [mask.keys_per_row for mask in (a, b) if mask.keys_per_row is not None]
    return type(a)(
        torch.maximum(start, others_start),
        torch.minimum(end, others_end),
        keys_per_row=min(bounds) if bounds else None,
        unstructured=a.unstructured or b.unstructured,
        rows=b.rows if a.rows is None else a.rows,
    )


def intersection_with_bool(a: KeyIntervalMask, b: Tensor) -> Tensor:
    name = "the tensor of mask & tensor"
    require_dense(name, b)
    if b.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, got {names([b.dtype])}")
    if b.ndim == 4 and not a.is_varlen:
        rows = a.rows if a.rows is not None else b.shape[2] if b.shape[2] != 1 else a.keys
        heads = max(a.heads, b.shape[1])
        fits = (
            (a.batches == b.shape[0] or is_one_of(1, a.batches, b.shape[0]))
            and divide(heads, a.heads, b.shape[1])
            and is_one_of(b.shape[2], rows, 1)
            and is_one_of(b.shape[3], a.keys, 1)
        )
        if fits:
            require_device(name, b, a.device, "the mask")
            dense = a.to_dense(rows)
            return expand_shared(dense, len(dense), heads) & expand_shared(b, len(b), heads)
    if a.is_varlen:
        raise ValueError(f"mask & tensor needs a mask of fixed length {FIXED}, got shape {shape_of(a)}")
    sq = "Sq" if a.rows is None else a.rows
    hint = f": pass x[{', '.join(['None'] * (4 - b.ndim))}]" if b.ndim in (2, 3) else ""
    raise ValueError(
        f"{name} must be ({{B|1}}, {{H|Hkv|1}}, {{{sq}|1}}, {{{a.keys}|1}}), got shape {shape_of(b)} with a mask of "
        f"{a.batches} batch elements and {a.heads} heads{hint}"
    )


def union(a: KeyIntervalMask, b: KeyIntervalMask) -> KeyIntervalMask:
    rows = b.rows if a.rows is None else a.rows
    # Rows that do not exist leave no gap, and belong to no interval.
    (start, end), (others_start, others_end) = [
        [bound.clamp(min=0, max=rows) for bound in bounds] for bounds in expand_bounds(a, b, "|")
    ]
    is_empty, others_empty = end <= start, others_end <= others_start
    gap = ~is_empty & ~others_empty & (torch.maximum(start, others_start) > torch.minimum(end, others_end))
    reads_values = is_host_readable(gap) or (gap.is_cuda and type(gap) is Tensor and not torch.compiler.is_compiling())
    accepted = "a | b is a KeyIntervalMask only where the intervals of each key overlap or touch"
    if not reads_values:
        assert_later(~gap, f"{accepted}: use a.to_dense() | b.to_dense()")
    elif gap.any():
        raise ValueError(f"{accepted}, got {int(gap.sum())} keys with a gap: use a.to_dense() | b.to_dense()")

    def united(own: Tensor, others: Tensor, both: Tensor) -> Tensor:
        return torch.where(others_empty, own, torch.where(is_empty, others, both))

    start = united(start, others_start, torch.minimum(start, others_start))
    end = united(end, others_end, torch.maximum(end, others_end))
    is_bounded = None not in (a.keys_per_row, b.keys_per_row, rows)
    keys_per_row = count_keys_per_row(start, end, rows) if is_bounded and reads_values and not a.is_varlen else None
    return type(a)(start, end, keys_per_row=keys_per_row, unstructured=a.unstructured and b.unstructured, rows=rows)


def count_keys_per_row(start: Tensor, end: Tensor, rows: int) -> int:
    """The smallest valid keys_per_row of intervals (B, H, Sk) in [0, rows]. Waits for the device."""
    if rows == 0 or start.numel() == 0:
        return 0
    shown = (start < end).int()

    def count_up_to(bounds: Tensor) -> Tensor:
        """For each row the visible keys whose bound is at most that row."""
        return shown.new_zeros(*bounds.shape[:2], rows + 1).scatter_add_(2, bounds.long(), shown)[..., :rows].cumsum(2)

    # Rows i to j see the keys that start at j or before, but for those that end at i or before. The last of them counts
    # j - i less: keys_per_row is the largest difference between a later and an earlier row.
    row = torch.arange(rows, device=start.device)
    started, ended = count_up_to(start) - row, count_up_to(end) - row
    return int((started.flip(2).cummax(2).values.flip(2) - ended).max())


def expand_bounds(a: KeyIntervalMask, b: KeyIntervalMask, symbol: str) -> list[tuple[Tensor, Tensor]]:
    """(start, end) of both masks, expanded to the same number of heads. Raises an error if the masks do not fit."""
    heads = max(a.heads, b.heads)
    fit = (
        a.is_varlen == b.is_varlen
        and a.keys == b.keys
        and (a.batches == b.batches or is_one_of(1, a.batches, b.batches))
        and divide(heads, a.heads, b.heads)
    )
    if not fit:
        raise ValueError(
            f"a {symbol} b needs masks {FIXED}, or {VARLEN}, with the same keys, with the same batch size or 1, "
            f"and with head counts of which one divides the other, got {shape_of(a)} and {shape_of(b)}"
        )
    if a.device != b.device:
        raise RuntimeError(f"a {symbol} b needs masks on the same device, got {a.device} and {b.device}")
    if None not in (a.rows, b.rows) and a.rows != b.rows:
        raise ValueError(f"a {symbol} b needs masks of the same rows, got {a.rows} and {b.rows}")
    return [tuple(expand_shared(bound, bound.shape[0], heads) for bound in mask.intervals) for mask in (a, b)]


def divide(heads: int, *counts: int) -> bool:
    """Whether each head count divides `heads`."""
    return all(count == heads or (count and heads % count == 0) for count in counts)
