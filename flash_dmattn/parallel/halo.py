"""Attention whose rows see few keys of other ranks: each rank fetches these alone, and sends their gradients back.

Every key has one interval of rows that may see it (KeyIntervalMask), so its owner, or whoever knows the interval, can
say which ranks need it. `Plan` says which keys go where, `Fetch` moves them and, backwards, their gradients. What a
rank then computes is attention of its rows over [fetched keys; own keys], under the same intervals counted from its own
first row. The own keys come last, so that causality, aligned to the bottom right corner, holds as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..interval_mask import KeyIntervalMask, sequence_of_keys
from . import collectives
from .shards import Shards, constants


@dataclass(frozen=True)
class Plan:
    """Which keys go where, for each of `batches` x `heads`: those of the mask, but no more heads than keys have."""

    group: dist.ProcessGroup
    batches: int
    heads: int
    own: int  # this rank's keys
    to_send: tuple[int, ...]  # how many rows go to each rank
    to_receive: tuple[int, ...]
    send: tuple[Tensor, Tensor, Tensor]  # int64: batch element, own key and head of each row that is sent
    place: tuple[Tensor, Tensor, Tensor]  # int64: batch element, slot and head that each received row gets
    fetched: int  # slots for keys of others: those that get no row see nobody
    slots: Tensor  # int64 (R, batches, heads): the first slot of each rank's keys


def by_key(rows: Tensor, batches: int, heads: int) -> Tensor:
    """A view (batches, S, heads, ..) of rows (B, S, Heads, ..): what belongs to one key of the plan in the last."""
    grouped = rows.unflatten(2, (heads, rows.shape[2] // heads)).unflatten(0, (batches, rows.shape[0] // batches))
    return grouped.movedim(1, 3)


def interval_rows(intervals: Tensor) -> Tensor:
    """Intervals (2, B, H, S) as rows (B, S, H, 2)."""
    return intervals.permute(1, 3, 2, 0)


def of_plan_heads(flags: Tensor, heads: int) -> Tensor:
    """bool (.., Heads, S) to (.., heads, S): a key/value head's key is needed where any of its query heads needs it."""
    return flags if flags.shape[-2] == heads else flags.unflatten(-2, (heads, -1)).any(dim=-2)


# Planning


def ranks_in_order(counts: Tensor) -> Tensor:
    """(R, ..): how many rows come from the ranks before each."""
    return counts.cumsum(0) - counts


def true_places(flags: Tensor, count: int) -> Tensor:
    """int64 (count): where a bool tensor is True, of which the number is known: nothing waits."""
    flags = flags.flatten()
    place = flags.cumsum(0).sub_(1).masked_fill_(~flags, count)
    found = place.new_empty(count + 1)  # the last takes what is False
    return found.scatter_(0, place, torch.arange(flags.numel(), device=flags.device))[:count]


def plan_exact(shards: Shards, wanted_by: Tensor, receive_counts: Tensor) -> Plan:
    """Exactly the keys that are needed. The host waits for their numbers.

    wanted_by: bool (R, batches, heads, own): which of the own keys each rank needs.
    receive_counts: int64 (R, batches, heads): how many keys of each rank this one needs.
    """
    size, batches, heads, own = wanted_by.shape
    send_counts = wanted_by.sum(dim=-1)
    on_host = torch.stack((send_counts, receive_counts)).cpu()
    to_send, to_receive = (tuple(counts) for counts in on_host.sum(dim=(2, 3)).tolist())
    fetched = int(on_host[1].sum(dim=0).max())

    sent = true_places(wanted_by, sum(to_send))
    send = (sent // (heads * own) % batches, sent % own, sent // own % heads) if len(sent) else (sent,) * 3
    slots = ranks_in_order(receive_counts)
    return Plan(
        *(shards.group, batches, heads, own, to_send, to_receive, send),
        *(received_places(receive_counts, slots, sum(to_receive)), fetched, slots),
    )


def plan_fixed(shards: Shards, wanted_by: Tensor, most: int) -> Plan:
    """Room for as many keys of each earlier rank as could be needed, at most `most` a head: nothing waits, and the
    shapes go by the arguments' shapes alone. Arguments as of `plan_exact`."""
    size, batches, heads, own = wanted_by.shape
    rank = shards.rank
    room_there = min(most, own)
    rooms = tuple(min(most, length) if q < rank else 0 for q, length in enumerate(shards.lengths))
    later = size - 1 - rank
    to_send = tuple(batches * heads * room_there if q > rank else 0 for q in range(size))
    to_receive = tuple(batches * heads * room for room in rooms)

    # Room that is left over takes other keys, which nobody will see, and each of them once.
    wanted = wanted_by[rank + 1 :]
    place = wanted.cumsum(dim=-1).sub_(1).masked_fill_(~wanted, room_there)
    places = torch.arange(own, device=wanted.device).expand_as(place)
    spare = torch.arange(room_there + 1, device=wanted.device).expand(later, batches, heads, -1)
    key = spare.clone().scatter_(-1, place, places)[..., :room_there].flatten()
    row = torch.arange(len(key), device=key.device)
    send = (row // (heads * room_there) % batches, key, row // room_there % heads) if len(key) else (key,) * 3

    counts = constants(rooms, wanted.device)[:, None, None].expand(size, batches, heads)
    slots = ranks_in_order(counts)
    return Plan(
        *(shards.group, batches, heads, own, to_send, to_receive, send),
        *(received_places(counts, slots, sum(to_receive)), sum(rooms), slots),
    )


def received_places(counts: Tensor, slots: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The batch element, slot and head of each received row, which come by rank, batch element, head and key."""
    _, batches, heads = counts.shape
    first = counts.flatten().cumsum(0) - counts.flatten()
    numbers = torch.arange(counts.numel(), device=counts.device)
    run = torch.repeat_interleave(numbers, counts.flatten(), output_size=total)
    slot = torch.arange(total, device=counts.device) - first[run] + slots.flatten()[run]
    return run // heads % batches, slot, run % heads


# Moving


def packed(parts: Sequence[Tensor]) -> Tensor:
    """uint8 (n, bytes): parts (n, ..) of any dtypes side by side, so that one collective moves all."""
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], dim=1)


def unpacked(rows: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, n rows each of the dtypes and other sizes of `likes`."""
    widths = [like.shape[1:].numel() * like.element_size() for like in likes]
    return [
        part.contiguous().view(like.dtype).view(rows.shape[0], *like.shape[1:])
        for part, like in zip(rows.split(widths, dim=1), likes)
    ]


class Fetch(torch.autograd.Function):
    """(plan, rows..) -> each with the fetched keys' rows in front of the own: (B, S, Heads, ..) to
    (B, fetched + S, Heads, ..). Slots without a row hold zeros."""

    @staticmethod
    def forward(ctx, plan: Plan, *own_rows: Tensor) -> tuple[Tensor, ...]:
        ctx.plan = plan
        batch, key, head = plan.send
        parts = [by_key(rows, plan.batches, plan.heads)[batch, key, head] for rows in own_rows]
        received = collectives.all_to_all(packed(parts), plan.to_send, plan.to_receive, plan.group)

        batch, slot, head = plan.place
        results = []
        for rows, part in zip(own_rows, unpacked(received, parts)):
            result = rows.new_empty(rows.shape[0], plan.fetched + plan.own, *rows.shape[2:])
            result[:, : plan.fetched].zero_()
            result[:, plan.fetched :] = rows
            by_key(result, plan.batches, plan.heads)[batch, slot, head] = part
            results.append(result)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, needed = ctx.plan, ctx.needs_input_grad[1:]
        grads = [grad for grad, is_needed in zip(grads, needed) if is_needed]
        batch, slot, head = plan.place
        parts = [by_key(grad, plan.batches, plan.heads)[batch, slot, head] for grad in grads]
        received = collectives.all_to_all(packed(parts), plan.to_receive, plan.to_send, plan.group)
        own = [grad[:, plan.fetched :] for grad in grads]
        for mine, theirs in zip(own, unpacked(received, parts)):
            add_rows(plan, mine, theirs)
        own = iter(own)
        return None, *(next(own) if is_needed else None for is_needed in needed)


def add_rows(plan: Plan, grad: Tensor, rows: Tensor) -> None:
    """Adds the gradients of sent rows to those of their keys, in the same order every time."""
    key = plan.send
    if sum(count > 0 for count in plan.to_send) > 1:
        # A key that went to several ranks: their parts are summed in float32 first.
        batch, own, head = key
        flat = (batch * plan.own + own) * plan.heads + head
        asked_for = flat.new_zeros(plan.batches * plan.own * plan.heads)
        number = asked_for.index_fill_(0, flat, 1).cumsum(0).sub_(1)[flat]
        total = rows.new_zeros(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
        for of_rank, part in zip(number.split(plan.to_send), rows.split(plan.to_send)):
            if len(part):
                total.index_add_(0, of_rank, part.to(total.dtype))  # no key twice from one rank
        # What stands beyond the number of different keys is zero, and may be added to any.
        key = tuple(index.scatter(0, number, index) for index in key)
        rows = total.to(rows.dtype)
    by_key(grad, plan.batches, plan.heads).index_put_(key, rows, accumulate=True)


# Who needs which keys


def plan_of_intervals(shards: Shards, mask: KeyIntervalMask, key_heads: int) -> Plan:
    """The plan for a mask of the own keys, which counts the rows of the whole sequence: each owner knows who needs its
    keys, and one small exchange tells the others how many come."""
    start, end = mask.intervals
    starts = constants(shards.starts, mask.device)
    first, behind = (bounds[:, None, None, None] for bounds in (starts[:-1], starts[1:]))
    seen = (start < behind) & (end > first) & (end > start)
    seen[shards.rank] = False
    wanted_by = of_plan_heads(seen, min(mask.heads, key_heads))
    one_each = (1,) * shards.size
    receive_counts = collectives.all_to_all(wanted_by.sum(dim=-1), one_each, one_each, shards.group)
    return plan_exact(shards, wanted_by, receive_counts)


def mask_of_rows(shards: Shards, rows: Tensor, own: KeyIntervalMask) -> KeyIntervalMask:
    """The mask of the fetched and the own keys, of which the interval rows (B, fetched + S, H, 2) came with them."""
    intervals = rows.permute(3, 0, 2, 1) - shards.first
    return local_mask(shards, intervals.clamp_(0, shards.own), own.keys_per_row, own.scattered)


def plan_of_selection(
    shards: Shards, bias: Tensor, window_size: int, cu_seqlens: Tensor | None, key_heads: int, fixed_shapes: bool
) -> tuple[Plan, KeyIntervalMask]:
    """The plan for the causal top-w mask of a bias ({B|1}, {H|Hkv|1}, 1, own), with cu_seqlens in each sequence; and
    the mask of the fetched and the own keys, which counts this rank's rows.

    The bias alone is gathered whole, and each rank selects for its own rows. Of the keys before them it needs those
    that its first row sees. These are the best of the keys that row could see, but for hidden ones, so the worst of
    them says which they are: the ranks exchange these, and then each owner knows who needs its keys.
    """
    bias = bias.detach()
    first, own = shards.first, shards.own
    whole = collectives.gather_along(bias, shards.lengths, 3, shards.group)[..., : first + own]
    if cu_seqlens is None:
        intervals = KeyIntervalMask.topk(whole, window_size, own).intervals
    else:
        intervals = select_varlen_rows(whole, window_size, cu_seqlens, first)
    before = whole[:, :, 0, :first]
    wanted = intervals[1, ..., :first] > 0 if own else torch.zeros_like(before, dtype=torch.bool)

    wanted_by = wanted_of_own_keys(shards, bias[:, :, 0], before, wanted, cu_seqlens)
    wanted_by = of_plan_heads(wanted_by, min(bias.shape[1], key_heads))
    wanted = of_plan_heads(wanted, wanted_by.shape[2])
    # How many are wanted of the keys before each shard, and so of each shard.
    up_to = torch.nn.functional.pad(wanted.cumsum(dim=-1), (1, 0))
    borders = up_to[..., constants(shards.starts, bias.device).clamp(max=first)].movedim(-1, 0)
    slots = up_to[..., 1:] - 1
    if fixed_shapes:
        heads_for_one = bias.shape[1] // wanted.shape[1]  # which may all want other keys of their key/value head
        plan = plan_fixed(shards, wanted_by, window_size * heads_for_one)
        slots = slots + shift_of_each(shards, plan.slots - borders[:-1], first)
    else:
        plan = plan_exact(shards, wanted_by, borders.diff(dim=0))
    fetched = fetched_intervals(intervals[..., :first], wanted, slots, plan.fetched)
    intervals = torch.cat([fetched, intervals[..., first:]], dim=-1)
    return plan, local_mask(shards, intervals, window_size, scattered=True)


def local_mask(shards: Shards, intervals: Tensor, keys_per_row: int | None, scattered: bool) -> KeyIntervalMask:
    return KeyIntervalMask._of(intervals.contiguous(), keys_per_row, scattered, shards.own)


def select_varlen_rows(bias: Tensor, window_size: int, cu_seqlens: Tensor, first: int) -> Tensor:
    """int32 (2, 1, heads, n): the intervals of a bias (1, heads, 1, n) of packed sequences, for the rows from `first`
    on and counted from it."""
    keys = bias.shape[3]
    of_keys = cu_seqlens.clamp(max=keys)
    of_rows = cu_seqlens.clamp(first, max(first, keys)) - first
    mask = KeyIntervalMask.topk_varlen(bias[0, :, 0].T, window_size, of_keys, of_rows)
    # They count the rows of their sequence from the first that is here.
    sequence = sequence_of_keys(of_keys, keys)
    offset, behind = of_rows[sequence], of_rows[sequence + 1]
    intervals = torch.minimum(mask.intervals + offset[:, None], behind[:, None])
    return intervals.transpose(1, 2)[:, None]


def wanted_of_own_keys(
    shards: Shards, bias: Tensor, before: Tensor, wanted: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """bool (R, {B|1}, {H|Hkv|1}, own): which of the own keys each rank wants.

    bias: ({B|1}, {H|Hkv|1}, own); before, wanted: of all keys before them, and which of these this rank wants.
    """
    first, own = shards.first, shards.own
    # The worst: the smallest bias, of equal ones the earliest key. float64 holds any bias and any place.
    infinite = torch.finfo(torch.float64).max
    least = torch.full((2, *bias.shape[:2]), torch.inf, dtype=torch.float64, device=bias.device)
    if first:
        value = before.masked_fill(~wanted, torch.inf).amin(dim=-1)
        is_least = wanted & (before == value[..., None])
        place = torch.arange(first, dtype=torch.float64, device=bias.device)
        least = torch.stack((value.double(), torch.where(is_least, place, infinite).amin(dim=-1)))
    value, place = collectives.all_gather(least, shards.group).unbind(dim=1)
    value, place = value[..., None], place[..., None]

    starts = constants(shards.starts[:-1], bias.device)
    key = torch.arange(first, first + own, device=bias.device)
    reaches = torch.zeros_like(starts) if cu_seqlens is None else first_of_sequence(cu_seqlens, starts)
    later = (key < starts[:, None]) & (key >= reaches[:, None])
    better = (bias.double() > value) | ((bias.double() == value) & (key >= place))
    return better & later[:, None, None]


def first_of_sequence(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """The first row of the sequence that each row is in."""
    sequence = torch.searchsorted(cu_seqlens.contiguous(), rows.to(cu_seqlens.dtype), right=True) - 1
    return cu_seqlens[sequence.clamp(max=len(cu_seqlens) - 1)]


def shift_of_each(shards: Shards, shift: Tensor, keys: int) -> Tensor:
    """(batches, heads, keys): of a number for each rank (R, batches, heads) that of the owner of each key."""
    ends = constants(shards.starts[1:], shift.device)
    owner = torch.searchsorted(ends, torch.arange(keys, device=shift.device), right=True)
    return shift[owner].movedim(0, -1)


def fetched_intervals(intervals: Tensor, wanted: Tensor, slots: Tensor, fetched: int) -> Tensor:
    """int32 (2, batches, Heads, fetched): of the intervals (2, batches, Heads, keys) those of the wanted keys, in their
    slots; of the other slots empty ones."""
    _, batches, all_heads, keys = intervals.shape
    heads = wanted.shape[1]
    slots = slots.masked_fill(~wanted, fetched)
    slots = slots[None, :, :, None].expand(2, batches, heads, all_heads // heads, keys)
    room = intervals.new_zeros(2, batches, heads, all_heads // heads, fetched + 1)  # the last is for what is not wanted
    return room.scatter_(-1, slots, intervals.unflatten(2, (heads, -1)))[..., :fetched].flatten(2, 3)
