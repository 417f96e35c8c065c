"""Masks and biases whose batch elements, heads or rows share entries."""

from __future__ import annotations

from einops import repeat
from torch import Tensor


def is_one_of(size: int, *accepted: int | None) -> bool:
    """`size in accepted`, which torch.compile computes wrongly for a constant and a symbol of the same value."""
    return any(size == x for x in accepted)


def shares_batch(size: int, batch: int) -> bool:
    """Whether `size` batch elements of a mask or bias fit `batch`: equally many, or each is shared by B / size."""
    return size == batch or (size > 0 and batch % size == 0)


def expand_shared(scores: Tensor, batch: int, heads: int) -> Tensor:
    """({B|B/n|1}, {H|Hkv|1}, ..) to ({B|1}, {H|1}, ..): repeats what batch elements and heads share."""
    n, group = (1 if shared in (1, size) else size // shared for shared, size in zip(scores.shape, (batch, heads)))
    return repeat(scores, "b h ... -> (b n) (h group) ...", n=n, group=group)


def scores_of_sequence(scores: Tensor, rows: slice, keys: slice) -> Tensor:
    """One sequence of a mask or bias of variable length: (1, heads, {rows|1}, keys)."""
    if scores.ndim == 2:
        return scores[keys].T[None, :, None, :]
    return scores[rows, :, : keys.stop - keys.start].transpose(0, 1)[None]
