"""Which rows of a sequence each rank holds."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from ..arguments import require_count, require_tensor, shape_of
from ..masks import KeyIntervalMask
from . import collectives
from .groups import Group, exchange_statements, resolve
from .shards import starts_of

LAYOUTS = ("contiguous", "zigzag")
Sharded = TypeVar("Sharded", Tensor, KeyIntervalMask)


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def even_lengths(seqlen: int, size: int) -> tuple[int, ...]:
    """The lengths of contiguous shards of a sequence: no two differ by more than 1, the longer ones come first."""
    return tuple(seqlen // size + (rank < seqlen % size) for rank in range(size))


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Of 2 R chunks of a sequence the two that a rank holds: one from the front, and its mirror image from the back."""
    return rank, 2 * size - 1 - rank


def zigzag_chunk_length(seqlen: int, size: int) -> int:
    if seqlen % (2 * size):
        raise ValueError(
            f"layout='zigzag' needs a sequence that 2 x {size} ranks divide into equal chunks, got one of {seqlen}"
        )
    return seqlen // (2 * size)


def zigzag_positions(seqlen: int, rank: int, size: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (S / R): where in the sequence the rows of a rank are."""
    chunk = zigzag_chunk_length(seqlen, size)
    first, last = (torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in zigzag_chunks(rank, size))
    return torch.cat([first, last])


def positions(
    seqlen: int, *, group: Group = None, layout: str = "contiguous", device: torch.device | str | None = None
) -> Tensor:
    """Where in the sequence this rank's rows are, as rotary embeddings need to know.

    Args:
        seqlen: S, the length of the whole sequence.
        group: as of `context_parallel_attention`.
        layout: "contiguous", as even as S allows, the longer shards first; or "zigzag": chunks r and 2 R - 1 - r of
            2 R equal ones.
        device: where to make it.

    Returns:
        int64 (S_r), rising.

    Raises:
        As `shard`.
    """
    group = resolve(group)
    check_layout(layout)
    require_count("seqlen", seqlen)
    rank, size = group.rank(), group.size()
    if layout == "zigzag":
        return zigzag_positions(seqlen, rank, size, device)
    starts = starts_of(even_lengths(seqlen, size))
    return torch.arange(starts[rank], starts[rank + 1], device=device)


def shard(whole: Sharded, dim: int = 1, *, group: Group = None, layout: str = "contiguous") -> Sharded:
    """This rank's part of what every rank has whole. Differentiable.

    Args:
        whole: a tensor with the sequence in dimension `dim`; or a KeyIntervalMask, of which the keys are taken, while
            starts and ends go on counting rows of the whole sequence.
        dim: the dimension of the sequence.
        group, layout: as of `positions`.

    Returns:
        The part: a view where the layout is contiguous.

    Raises:
        TypeError: neither a tensor nor a KeyIntervalMask.
        ValueError: an unknown layout; a zigzag layout of a length that 2 R does not divide, or of a KeyIntervalMask.
    """
    group = resolve(group)
    check_layout(layout)
    if isinstance(whole, KeyIntervalMask):
        if layout != "contiguous":
            raise ValueError(f"a KeyIntervalMask is for contiguous shards, got layout={layout!r}")
        intervals = shard(whole.intervals, 1 if whole.is_varlen else 3, group=group)
        return whole._of_same_kind(intervals)
    require_tensor("whole", whole)
    if layout == "zigzag":
        place = zigzag_positions(whole.shape[dim], group.rank(), group.size(), whole.device)
        return whole.index_select(dim, place)
    return whole.split(even_lengths(whole.shape[dim], group.size()), dim)[group.rank()]


@torch.no_grad()
def unshard(part: Tensor, dim: int = 1, *, group: Group = None, layout: str = "contiguous") -> Tensor:
    """The whole of which every rank has a part: the inverse of `shard`, of uneven contiguous parts too. No gradients.

    Args:
        part: this rank's part, with its part of the sequence in dimension `dim`.
        dim: the dimension of the sequence.
        group, layout: as of `positions`.

    Raises:
        TypeError: no tensor.
        ValueError: an unknown layout; zigzag parts of different lengths; parts of which other dimensions differ.
    """
    group = resolve(group)
    error = None
    try:
        check_layout(layout)
        require_tensor("part", part)
        dim = range(part.ndim)[dim]
        others = (*part.shape[:dim], *part.shape[dim + 1 :])
        statement = (part.shape[dim], part.ndim, hash(others), part.element_size())
    except (TypeError, ValueError, IndexError) as caught:
        error, statement = caught, (0,) * 4
    stated = exchange_statements(group, statement, error)
    if len({rest[1:] for rest in stated}) > 1:
        raise ValueError(f"part must be alike on every rank but in dimension {dim}, got shape {shape_of(part)} here")
    lengths = [length for length, *_ in stated]
    if layout == "contiguous":
        return collectives.gather_along(part, lengths, dim, group)
    if len(set(lengths)) > 1:
        raise ValueError(f"layout='zigzag' needs parts of the same length, got {lengths}")
    zigzag_chunk_length(sum(lengths), group.size())
    return zigzag_joined(collectives.all_gather(part, group), dim, sum(lengths))


def zigzag_joined(shards: Tensor, dim: int, length: int) -> Tensor:
    """Of zigzag shards (R, ..) the first `length`, whole chunks, of the sequence, in the shard's dimension `dim`."""
    front, back = shards.chunk(2, dim + 1)
    chunk = front.shape[dim + 1]
    chunks = [*front, *reversed(back.unbind())]
    return torch.cat(chunks[: length // chunk] if chunk else chunks, dim)


def zigzag_by_rank(rows: Tensor, dim: int, own: int, size: int) -> Tensor:
    """Of `size` ranks with `own` rows each, one shard after the other: the inverse of `zigzag_joined`, with zeros for
    the chunks that it left out."""
    chunk = own // 2
    chunks = rows.split(chunk, dim) if chunk else (rows,) * (2 * size)
    zeros = rows.new_zeros(*rows.shape[:dim], chunk, *rows.shape[dim + 1 :]) if len(chunks) < 2 * size else None
    numbers = [number for rank in range(size) for number in zigzag_chunks(rank, size)]
    return torch.cat([chunks[number] if number < len(chunks) else zeros for number in numbers], dim)
