"""Sequence layouts: the rows of the sequence that each rank holds."""

from __future__ import annotations

import zlib
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from ..arguments import require_count, require_dimension, require_tensor, shape_of
from ..masks import KeyIntervalMask
from . import collectives
from .groups import Group, exchange_on_host, resolve_group
from .shards import starts_of

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = get_args(Layout)
Sharded = TypeVar("Sharded", Tensor, KeyIntervalMask)


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def even_lengths(seqlen: int, size: int) -> tuple[int, ...]:
    """Lengths of contiguous shards that differ by at most 1, the longer ones first."""
    return tuple(seqlen // size + (rank < seqlen % size) for rank in range(size))


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """The two of 2 R chunks that a rank holds: one from the front and its mirror image from the back."""
    return rank, 2 * size - 1 - rank


def zigzag_chunk_length(seqlen: int, size: int) -> int:
    if seqlen % (2 * size):
        raise ValueError(
            f"layout='zigzag' needs a sequence length that is a multiple of 2 x {size} ranks, got {seqlen}"
        )
    return seqlen // (2 * size)


def zigzag_positions(seqlen: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (S / R): positions of a rank's rows in the sequence."""
    chunk = zigzag_chunk_length(seqlen, size)
    first, last = (torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in zigzag_chunks(rank, size))
    return torch.cat([first, last])


def positions(
    seqlen: int, *, group: Group = None, layout: Layout = "contiguous", device: torch.device | str | None = None
) -> Tensor:
    """Positions of this rank's rows in the sequence, for example for rotary embeddings.

    Args:
        seqlen: S, the length of the whole sequence.
        group: as in `context_parallel_attention`.
        layout: "contiguous": lengths differ by at most 1, longer shards first; or "zigzag": rank r holds chunks r and
            2 R - 1 - r of 2 R equal chunks.
        device: device of the result.

    Returns:
        int64 (S_r), ascending.

    Raises:
        ValueError: an unknown layout; a negative seqlen; a zigzag layout of a length that is not a multiple of 2 R.
        TypeError: a seqlen that is not an int.
        RuntimeError: torch.distributed is not initialized.
    """
    group = resolve_group(group)
    check_layout(layout)
    seqlen = require_count("seqlen", seqlen)
    rank, size = group.rank(), group.size()
    if layout == "zigzag":
        return zigzag_positions(seqlen, rank, size, device)
    starts = starts_of(even_lengths(seqlen, size))
    return torch.arange(starts[rank], starts[rank + 1], device=device)


def shard(whole: Sharded, dim: int = 1, *, group: Group = None, layout: Layout = "contiguous") -> Sharded:
    """This rank's shard of a tensor that every rank has whole. Differentiable.

    Args:
        whole: a tensor with the sequence in dimension `dim`; or a KeyIntervalMask: its keys are sharded, its starts and
            ends still count rows of the whole sequence.
        dim: the sequence dimension of a tensor.
        group, layout: as in `positions`.

    Returns:
        The shard; with the contiguous layout a view.

    Raises:
        TypeError: `whole` is neither a tensor nor a KeyIntervalMask; `dim` is not an int.
        IndexError: `dim` is not a dimension of `whole`.
        ValueError: an unknown layout; a zigzag layout of a length that is not a multiple of 2 R, or of a
            KeyIntervalMask.
        RuntimeError: torch.distributed is not initialized.
    """
    group = resolve_group(group)
    check_layout(layout)
    if isinstance(whole, KeyIntervalMask):
        if layout != "contiguous":
            raise ValueError(f"a KeyIntervalMask needs layout='contiguous', got layout={layout!r}")
        intervals = shard(whole.intervals, 1 if whole.is_varlen else 3, group=group)
        return whole._of_same_kind(intervals)
    require_tensor("whole", whole, "a torch.Tensor or a KeyIntervalMask")
    dim = require_dimension("whole", whole, dim)
    if layout == "zigzag":
        index = zigzag_positions(whole.shape[dim], group.rank(), group.size(), whole.device)
        return whole.index_select(dim, index)
    return whole.split(even_lengths(whole.shape[dim], group.size()), dim)[group.rank()]


@torch.no_grad()
def unshard(part: Tensor, dim: int = 1, *, group: Group = None, layout: Layout = "contiguous") -> Tensor:
    """All-gathers the shards of a sequence: the inverse of `shard`. Contiguous shards may be uneven. No gradients.

    Args:
        part: this rank's shard.
        dim: the sequence dimension.
        group, layout: as in `positions`.

    Returns:
        The whole tensor, on every rank.

    Raises:
        TypeError: `part` is not a tensor; `dim` is not an int.
        IndexError: `dim` is not a dimension of `part`.
        ValueError: an unknown layout; zigzag shards of different lengths; shards whose dtype or other dimensions
            differ.
        RuntimeError: torch.distributed is not initialized; its subclass RankError if another rank rejected its
            arguments.
    """
    group = resolve_group(group)
    error = None
    try:
        check_layout(layout)
        require_tensor("part", part)
        dim = require_dimension("part", part, dim)
        others = (*part.shape[:dim], *part.shape[dim + 1 :])
        numbers = (part.shape[dim], part.ndim, hash(others), zlib.crc32(str(part.dtype).encode()))
    except (TypeError, ValueError, IndexError) as caught:
        error, numbers = caught, (0,) * 4
    gathered = exchange_on_host(group, numbers, error)
    if len({rest[1:] for rest in gathered}) > 1:
        raise ValueError(
            f"part must have the same dtype and shape on every rank except in dimension {dim}, got {part.dtype} and "
            f"shape {shape_of(part)}"
        )
    lengths = [length for length, *_ in gathered]
    if layout == "contiguous":
        padded = collectives.pad_to(part, max(lengths), dim)
        return collectives.concat_shards(collectives.all_gather(padded, group), lengths, dim)
    if len(set(lengths)) > 1:
        raise ValueError(f"layout='zigzag' needs parts of the same length, got {lengths}")
    zigzag_chunk_length(sum(lengths), group.size())
    return concat_zigzag(collectives.all_gather(part, group), dim, sum(lengths))


def concat_zigzag(shards: Tensor, dim: int, length: int) -> Tensor:
    """The first `length` elements, whole chunks, of the sequence of zigzag shards (R, ..), along the shard's `dim`."""
    front, back = shards.chunk(2, dim + 1)
    chunk = front.shape[dim + 1]
    chunks = [*front, *reversed(back.unbind())]
    return torch.cat(chunks[: length // chunk] if chunk else chunks, dim)


def split_zigzag(rows: Tensor, dim: int, shard_length: int, size: int) -> Tensor:
    """The zigzag shards of `size` ranks, concatenated along `dim`: the inverse of `concat_zigzag`.

    Chunks that `rows` does not contain become zeros.
    """
    chunk = shard_length // 2
    chunks = rows.split(chunk, dim) if chunk else (rows,) * (2 * size)
    zeros = rows.new_zeros(*rows.shape[:dim], chunk, *rows.shape[dim + 1 :]) if len(chunks) < 2 * size else None
    order = [index for rank in range(size) for index in zigzag_chunks(rank, size)]
    return torch.cat([chunks[index] if index < len(chunks) else zeros for index in order], dim)
