"""Context parallelism for masks whose rows see few keys of other ranks: each rank fetches only these keys, its halo.

Every key has one interval of rows that may see it (KeyIntervalMask), so a rank that knows the interval knows which
ranks need the key. `HaloPlan` lists the keys to exchange, `HaloExchange` moves them in the forward and their gradients
in the backward. A rank then computes attention of its rows over [fetched keys; local keys] under the same intervals,
counted from its own first row. The local keys come last, so that the causal mask stays aligned to the bottom right.

In shapes, Heads are the heads of a tensor and `heads` those of a plan, of which one may serve several Heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ..masks import KeyIntervalMask
from ..ops.conventions import accumulation_dtype
from . import collectives
from .shards import Shards, constants


@dataclass(frozen=True)
class HaloPlan:
    """The keys to exchange for each of `batches` x `heads`: those of the mask, but at most Hkv heads."""

    shards: Shards
    batches: int
    heads: int
    send_counts: tuple[int, ...]  # key rows sent to each rank
    recv_counts: tuple[int, ...]
    send_index: tuple[Tensor, Tensor, Tensor]  # int64: batch element, local key and head of each sent row
    recv_index: tuple[Tensor, Tensor, Tensor]  # int64: batch element, slot and head of each received row
    num_slots: int  # slots for fetched keys; no row sees a slot that receives none
    slot_starts: Tensor  # int64 (R, batches, heads): the first slot of each rank's keys


def view_by_key(rows: Tensor, batches: int, heads: int) -> Tensor:
    """A view (batches, S, heads, ..) of rows (B, S, Heads, ..); trailing dimensions hold all data of a plan's key."""
    grouped = rows.unflatten(2, (heads, rows.shape[2] // heads)).unflatten(0, (batches, rows.shape[0] // batches))
    return grouped.movedim(1, 3)


def any_of_heads(flags: Tensor, heads: int) -> Tensor:
    """bool (.., Heads, S) to (.., heads, S): a key is needed if any query head of its key/value head needs it."""
    return flags if flags.shape[-2] == heads else flags.unflatten(-2, (heads, -1)).any(dim=-2)


# Plans


def exclusive_cumsum(counts: Tensor) -> Tensor:
    """(R, ..): the sum over the ranks before each."""
    return counts.cumsum(0) - counts


def nonzero_index(flags: Tensor, count: int) -> Tensor:
    """int64 (count): the flat indices of True in a bool tensor with `count` of them. Does not synchronize."""
    flags = flags.flatten()
    target = flags.cumsum(0).sub_(1).masked_fill_(~flags, count)
    index = target.new_empty(count + 1)  # the last element receives the indices of False
    return index.scatter_(0, target, torch.arange(flags.numel(), device=flags.device))[:count]


def plan_exact(shards: Shards, needed_by: Tensor, recv_counts: Tensor, keys: Tensor | None = None) -> HaloPlan:
    """A plan that exchanges only the needed keys. Synchronizes the host to read their counts.

    Args:
        needed_by: bool (R, batches, heads, n): whether each rank needs each of the n local keys listed in `keys`.
        recv_counts: int64 (R, batches, heads): how many keys of each rank this rank needs.
        keys: int64 (batches, heads, n): local keys; None: all of them.
    """
    _, batches, heads, listed = needed_by.shape
    send_counts = needed_by.sum(dim=-1)
    on_host = torch.stack((send_counts, recv_counts)).cpu()
    send_totals, recv_totals = (tuple(counts) for counts in on_host.sum(dim=(2, 3)).tolist())
    num_slots = int(on_host[1].sum(dim=0).max())

    sent = nonzero_index(needed_by, sum(send_totals))
    send = (sent // (heads * listed) % batches, sent % listed, sent // listed % heads) if len(sent) else (sent,) * 3
    return make_plan(shards, send_totals, recv_totals, send, keys, recv_counts, num_slots)


def plan_fixed(shards: Shards, needed_by: Tensor | None, capacity: int, keys: Tensor) -> HaloPlan:
    """A plan with `capacity` slots per head for each earlier rank. Shapes depend on the arguments' shapes only.

    Does not synchronize. Arguments as in `plan_exact`; needed_by=None: each later rank needs the first `capacity` of
    `keys`.
    """
    batches, heads, listed = keys.shape if needed_by is None else needed_by.shape[1:]
    rank, device = shards.rank, keys.device
    capacities = earlier_capacities(shards, capacity)
    local_capacity = min(capacity, shards.local_length)
    num_later = shards.size - 1 - rank
    send_totals = tuple(batches * heads * local_capacity if q > rank else 0 for q in range(shards.size))
    recv_totals = tuple(batches * heads * count for count in capacities)

    position = torch.arange(local_capacity, device=device).expand(num_later, batches, heads, -1)
    if needed_by is not None:  # spare slots send other keys, which no row sees
        needed = needed_by[rank + 1 :]
        target = needed.cumsum(dim=-1).sub_(1).masked_fill_(~needed, local_capacity)
        source = torch.arange(listed, device=device).expand_as(target)
        position = pad(position, (0, 1)).scatter_(-1, target, source)[..., :local_capacity]
    position = position.flatten()
    row = torch.arange(len(position), device=device)
    batch_head = row // max(local_capacity, 1)
    send = (batch_head // heads % batches, position, batch_head % heads)

    recv_counts = constants(capacities, device)[:, None, None].expand(shards.size, batches, heads)
    return make_plan(shards, send_totals, recv_totals, send, keys, recv_counts, sum(capacities))


def earlier_capacities(shards: Shards, capacity: int) -> tuple[int, ...]:
    """The number of slots for each rank: at most `capacity` for earlier ranks, else 0."""
    return tuple(min(capacity, length) if q < shards.rank else 0 for q, length in enumerate(shards.lengths))


def make_plan(
    shards: Shards,
    send_totals: tuple[int, ...],
    recv_totals: tuple[int, ...],
    send: tuple[Tensor, Tensor, Tensor],
    keys: Tensor | None,
    recv_counts: Tensor,
    num_slots: int,
) -> HaloPlan:
    """A plan from (batch element, position in `keys`, head) of each sent row and the counts of received rows."""
    batch, position, head = send
    send_index = (batch, position if keys is None else keys[batch, head, position], head)
    slot_starts = exclusive_cumsum(recv_counts)
    return HaloPlan(
        *(shards, *recv_counts.shape[1:], send_totals, recv_totals, send_index),
        *(received_rows(recv_counts, slot_starts, sum(recv_totals)), num_slots, slot_starts),
    )


def received_rows(counts: Tensor, slot_starts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Batch element, slot and head of each received row; rows arrive ordered by rank, batch element, head and key."""
    _, batches, heads = counts.shape
    counts = counts.flatten()
    segment = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts, output_size=total)
    offset = slot_starts.flatten() - exclusive_cumsum(counts)
    slot = torch.arange(total, device=counts.device) + offset[segment]
    return segment // heads % batches, slot, segment % heads


# The exchange


def pack(parts: Sequence[Tensor]) -> Tensor:
    """uint8 (n, bytes): parts (n, ..) of any dtypes side by side, for one collective."""
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack(rows: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `pack`; `likes` define dtypes and trailing dimensions."""
    widths = [like.shape[1:].numel() * like.element_size() for like in likes]
    # Copies: `contiguous` returns a part of one row or none as it is, at any offset.
    return [
        part.clone(memory_format=torch.contiguous_format).view(-1).view(like.dtype).view(rows.shape[0], *like.shape[1:])
        for part, like in zip(rows.split(widths, dim=1), likes)
    ]


class HaloExchange(torch.autograd.Function):
    """(plan, tensors..) -> each tensor (B, S, Heads, ..) with fetched rows prepended: (B, num_slots + S, Heads, ..).

    Slots that receive no row are zero.
    """

    @staticmethod
    def forward(ctx, plan: HaloPlan, *local: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        batch, key, head = plan.send_index
        parts = [view_by_key(rows, plan.batches, plan.heads)[batch, key, head] for rows in local]
        received = collectives.all_to_all(pack(parts), plan.send_counts, plan.recv_counts, plan.shards.group)

        batch, slot, head = plan.recv_index
        results = []
        for rows, part in zip(local, unpack(received, parts)):
            result = rows.new_empty(rows.shape[0], plan.num_slots + plan.shards.local_length, *rows.shape[2:])
            result[:, : plan.num_slots].zero_()
            result[:, plan.num_slots :] = rows
            view_by_key(result, plan.batches, plan.heads)[batch, slot, head] = part
            results.append(result)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs_grad = ctx.plan, ctx.needs_input_grad[1:]
        grads = [grad for grad, is_needed in zip(grads, needs_grad) if is_needed]
        batch, slot, head = plan.recv_index
        parts = [view_by_key(grad, plan.batches, plan.heads)[batch, slot, head] for grad in grads]
        received = collectives.all_to_all(pack(parts), plan.recv_counts, plan.send_counts, plan.shards.group)
        local = [grad[:, plan.num_slots :] for grad in grads]
        for grad, rows in zip(local, unpack(received, parts)):
            add_received_grads(plan, grad, rows)
        local = iter(local)
        return None, *(next(local) if is_needed else None for is_needed in needs_grad)


def add_received_grads(plan: HaloPlan, grad: Tensor, rows: Tensor) -> None:
    """Adds the received gradients to those of the local keys, in float32 and in a deterministic order."""
    batch, key, head = plan.send_index
    # A key that went to several ranks has one number, under which its gradients are summed.
    flat = (batch * plan.shards.local_length + key) * plan.heads + head
    was_sent = flat.new_zeros(plan.batches * plan.shards.local_length * plan.heads)
    number = was_sent.index_fill_(0, flat, 1).cumsum(0).sub_(1)[flat]
    total = rows.new_zeros(rows.shape, dtype=accumulation_dtype(rows.dtype))
    for numbers, part in zip(number.split(plan.send_counts), rows.split(plan.send_counts)):
        if len(part):
            total.index_add_(0, numbers, part.to(total.dtype))  # one rank has each key once, or repeats with zeros
    keys = view_by_key(grad, plan.batches, plan.heads)
    keys[plan.send_index] = (keys[plan.send_index] + total[number]).to(grad.dtype)  # repeated keys: the same value


# Interval masks


def mask_from_rows(shards: Shards, rows: Tensor, mask: KeyIntervalMask) -> KeyIntervalMask:
    """The mask of [fetched keys; local keys] from the exchanged rows (B, num_slots + S, H, 2) of `mask`."""
    intervals = rows.permute(3, 0, 2, 1) - shards.local_start
    return local_mask(shards, intervals.clamp_(0, shards.local_length), mask.keys_per_row, mask.unstructured)


def local_mask(shards: Shards, intervals: Tensor, keys_per_row: int | None, unstructured: bool) -> KeyIntervalMask:
    return KeyIntervalMask._of(intervals.contiguous(), keys_per_row, unstructured, shards.local_length)


def plan_for_intervals(shards: Shards, mask: KeyIntervalMask, key_heads: int) -> HaloPlan:
    """The plan for a mask of the local keys that counts the rows of the whole sequence.

    Each owner determines which ranks need its keys. An all-to-all sends the counts to the receivers.
    """
    start, end = mask.intervals
    starts = constants(shards.starts, mask.device)
    rank_start, rank_end = (bounds[:, None, None, None] for bounds in (starts[:-1], starts[1:]))
    is_seen = (start < rank_end) & (end > rank_start) & (end > start)
    is_seen[shards.rank] = False
    needed_by = any_of_heads(is_seen, min(mask.heads, key_heads))
    one_each = (1,) * shards.size
    recv_counts = collectives.all_to_all(needed_by.sum(dim=-1), one_each, one_each, shards.group)
    return plan_exact(shards, needed_by, recv_counts)
