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

from .. import ops
from ..masks import KeyIntervalMask
from ..masks.topk import best_positions, has_kernels, sequence_of_keys
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


def plan_exact(shards: Shards, wanted_by: Tensor, receive_counts: Tensor, keys: Tensor | None = None) -> Plan:
    """Exactly the keys that are needed. The host waits for their numbers.

    wanted_by: bool (R, batches, heads, n): which of the own keys each rank needs.
    receive_counts: int64 (R, batches, heads): how many keys of each rank this one needs.
    keys: int64 (batches, heads, n): the own keys of which `wanted_by` speaks; None: all.
    """
    size, batches, heads, listed = wanted_by.shape
    send_counts = wanted_by.sum(dim=-1)
    on_host = torch.stack((send_counts, receive_counts)).cpu()
    to_send, to_receive = (tuple(counts) for counts in on_host.sum(dim=(2, 3)).tolist())
    fetched = int(on_host[1].sum(dim=0).max())

    sent = true_places(wanted_by, sum(to_send))
    send = (sent // (heads * listed) % batches, sent % listed, sent // listed % heads) if len(sent) else (sent,) * 3
    slots = ranks_in_order(receive_counts)
    return Plan(
        *(shards.group, batches, heads, shards.own, to_send, to_receive, listed_keys(send, keys)),
        *(received_places(receive_counts, slots, sum(to_receive)), fetched, slots),
    )


def plan_fixed(shards: Shards, wanted_by: Tensor | None, most: int, keys: Tensor) -> Plan:
    """Room for as many keys of each earlier rank as could be needed, at most `most` a head: nothing waits, and the
    shapes go by the arguments' shapes alone. Arguments as of `plan_exact`; wanted_by None: each later rank needs all
    of `keys`, as far as they are there."""
    batches, heads, listed = keys.shape if wanted_by is None else wanted_by.shape[1:]
    rank, device = shards.rank, keys.device
    rooms = rooms_of_earlier(shards, most)
    room_there = min(most, shards.own)
    later = shards.size - 1 - rank
    to_send = tuple(batches * heads * room_there if q > rank else 0 for q in range(shards.size))
    to_receive = tuple(batches * heads * room for room in rooms)

    number = torch.arange(room_there, device=device).expand(later, batches, heads, -1)
    if wanted_by is not None:  # room that is left over takes other keys, which nobody will see
        wanted = wanted_by[rank + 1 :]
        place = wanted.cumsum(dim=-1).sub_(1).masked_fill_(~wanted, room_there)
        places = torch.arange(listed, device=device).expand_as(place)
        number = torch.nn.functional.pad(number, (0, 1)).scatter_(-1, place, places)[..., :room_there]
    number = number.flatten()
    row = torch.arange(len(number), device=device)
    send = (row // (heads * room_there) % batches, number, row // room_there % heads) if len(row) else (row,) * 3

    counts = constants(rooms, device)[:, None, None].expand(shards.size, batches, heads)
    slots = ranks_in_order(counts)
    return Plan(
        *(shards.group, batches, heads, shards.own, to_send, to_receive, listed_keys(send, keys)),
        *(received_places(counts, slots, sum(to_receive)), sum(rooms), slots),
    )


def rooms_of_earlier(shards: Shards, most: int) -> tuple[int, ...]:
    """How many keys there can be of each rank before this one, at most `most` of each."""
    return tuple(min(most, length) if q < shards.rank else 0 for q, length in enumerate(shards.lengths))


def listed_keys(send: tuple[Tensor, Tensor, Tensor], keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Batch element, own key and head of each sent row, of which the second says where in a list the key stands."""
    batch, number, head = send
    return (batch, number if keys is None else keys[batch, head, number], head)


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
    """Adds the gradients of sent rows to those of their keys, in float32 and in the same order every time."""
    batch, own, head = plan.send
    # A key may have gone to several ranks: each has one number, under which its parts are summed.
    flat = (batch * plan.own + own) * plan.heads + head
    was_sent = flat.new_zeros(plan.batches * plan.own * plan.heads)
    number = was_sent.index_fill_(0, flat, 1).cumsum(0).sub_(1)[flat]
    total = rows.new_zeros(rows.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
    for numbers, part in zip(number.split(plan.to_send), rows.split(plan.to_send)):
        if len(part):
            total.index_add_(0, numbers, part.to(total.dtype))  # from one rank no key twice, or zeros
    keys = by_key(grad, plan.batches, plan.heads)
    keys[plan.send] = (keys[plan.send] + total[number]).to(grad.dtype)  # of the same key the same each time


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

    Of the keys of an earlier rank, rows can see none but its `window_size` best: the candidates, whose biases are
    gathered. Each rank selects among those of earlier ranks and its own keys, for its own rows. It needs the candidates
    that its first row sees. Those are the best, but for hidden ones, so the worst of them says which they are: the
    ranks exchange these, and then each owner knows who needs its keys. With fixed shapes there is room for all
    candidates, so all are sent, and nobody asks; unless query heads that share a key each have their own.
    """
    bias = bias.detach()[:, :, 0]
    heads = min(bias.shape[1], key_heads)
    heads_for_one = bias.shape[1] // heads  # which may all want other keys of their key/value head
    rank = shards.rank
    value, key = candidates(shards, bias, window_size if heads_for_one == 1 else max(shards.lengths), cu_seqlens)
    most = value.shape[2]
    before = collectives.all_gather(value, shards.group)[:rank].movedim(0, 2)
    if cu_seqlens is not None:
        before = before.masked_fill(~same_sequence(shards, cu_seqlens)[rank, :rank, None], -torch.inf)
    if fixed_shapes and heads_for_one == 1:
        there = [before[:, :, q, :room] for q, room in enumerate(rooms_of_earlier(shards, most)[:rank])]
        intervals = select_rows(shards, torch.cat([*there, bias], dim=-1), window_size, cu_seqlens)
        return plan_fixed(shards, None, most, key), local_mask(shards, intervals, window_size, scattered=True)
    before = before.flatten(2)
    intervals = select_rows(shards, torch.cat([before, bias], dim=-1), window_size, cu_seqlens)

    wanted = intervals[1, ..., : rank * most] > 0
    wanted_by = wanted_of_candidates(shards, value, before, wanted, cu_seqlens)
    wanted_by, wanted = of_plan_heads(wanted_by, heads), of_plan_heads(wanted, heads)
    # How many are wanted of the candidates before each rank's, and so of each rank's.
    up_to = torch.nn.functional.pad(wanted.cumsum(dim=-1), (1, 0))
    borders = torch.arange(shards.size + 1, device=bias.device).clamp_(max=rank) * most
    borders = up_to[..., borders].movedim(-1, 0)
    slots = up_to[..., 1:] - 1
    if fixed_shapes:
        plan = plan_fixed(shards, wanted_by, window_size * heads_for_one, key)
        shift = (plan.slots - borders[:-1])[:rank].movedim(0, -1)
        slots = slots + shift.repeat_interleave(most, dim=-1)
    else:
        plan = plan_exact(shards, wanted_by, borders.diff(dim=0), key)
    fetched = fetched_intervals(intervals[..., : rank * most], wanted, slots, plan.fetched)
    intervals = torch.cat([fetched, intervals[..., rank * most :]], dim=-1)
    return plan, local_mask(shards, intervals, window_size, scattered=True)


def candidates(shards: Shards, bias: Tensor, count: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The own keys that later ranks can see: the `count` best of them, with cu_seqlens of the sequence of the last row,
    in order. (batches, heads, n): their biases, -inf where there are fewer, and int64, which keys they are."""
    own, most = shards.own, min(count, max(shards.lengths))
    if cu_seqlens is not None and own:
        last = constants((shards.first + own - 1,), bias.device)
        place = torch.arange(shards.first, shards.first + own, device=bias.device)
        bias = bias.masked_fill(place < first_of_sequence(cu_seqlens, last), -torch.inf)
    if most >= own:
        keys = torch.arange(most, device=bias.device).clamp_(max=max(own - 1, 0))
        return torch.nn.functional.pad(bias, (0, most - own), value=-torch.inf), keys.expand(*bias.shape[:2], -1)
    keys, is_one = best_keys(bias, most)
    return bias.gather(-1, keys).masked_fill_(~is_one, -torch.inf), keys


def best_keys(bias: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """int64 (batches, heads, count), rising: the best of more keys; and bool, which of them are any: hidden ones may be
    left out."""
    batches, heads, _ = bias.shape
    if not has_kernels(bias):
        keys = best_positions(bias.flatten(0, 1), count).view(batches, heads, count)
        return keys, torch.ones_like(keys, dtype=torch.bool)
    keys, spans, _ = ops.topk_lists(bias, count, 1, None)
    begin, end = spans
    keys = keys.view(batches, heads, -1)[..., :count] if count else keys.view(batches, heads, 0)
    # A list ends in -1, up to a multiple of 64; what lies beyond is no list's.
    is_one = (torch.arange(count, device=bias.device) < end - begin) & (keys >= 0)
    return keys.long().masked_fill_(~is_one, 0), is_one


def select_rows(shards: Shards, bias: Tensor, window_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """int32 (2, batches, heads, n + own): the intervals of n candidates of earlier ranks and the own keys, for the own
    rows."""
    own, before = shards.own, bias.shape[2] - shards.own
    if not own:
        return torch.zeros(2, *bias.shape, dtype=torch.int32, device=bias.device)
    if cu_seqlens is None:
        return KeyIntervalMask.topk(bias, window_size, own).intervals
    # The candidates are of the sequence in which the own rows start.
    first = first_of_sequence(cu_seqlens, constants((shards.first,), bias.device))
    of_rows = cu_seqlens.clamp(shards.first, shards.first + own) - shards.first
    of_keys = torch.where(cu_seqlens > first, of_rows + before, 0)
    mask = KeyIntervalMask.topk_varlen(bias[0].T, window_size, of_keys, of_rows)
    # They count the rows of their sequence from the first that is here.
    sequence = sequence_of_keys(of_keys, before + own)
    offset, behind = of_rows[sequence], of_rows[sequence + 1]
    intervals = torch.minimum(mask.intervals + offset[:, None], behind[:, None])
    return intervals.transpose(1, 2)[:, None]


def wanted_of_candidates(
    shards: Shards, value: Tensor, before: Tensor, wanted: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """bool (R, {B|1}, {H|Hkv|1}, n): which of the own candidates each rank wants.

    value: ({B|1}, {H|Hkv|1}, n), of the own candidates; before, wanted: of all before them, and which of these this
    rank wants.
    """
    rank, most = shards.rank, value.shape[2]
    # The worst: the smallest bias, of equal ones the earliest key. float64 holds any bias and any place.
    worst = torch.full((2, *value.shape[:2]), torch.inf, dtype=torch.float64, device=value.device)
    if before.shape[2]:
        smallest = before.masked_fill(~wanted, torch.inf).amin(dim=-1)
        is_worst = wanted & (before == smallest[..., None])
        place = torch.arange(before.shape[2], dtype=torch.float64, device=value.device)
        worst = torch.stack((smallest.double(), torch.where(is_worst, place, torch.inf).amin(dim=-1)))
    of_ranks, place_of_ranks = collectives.all_gather(worst, shards.group)[..., None].unbind(dim=1)

    place = torch.arange(rank * most, (rank + 1) * most, device=value.device)
    value = value.double()
    better = (value > of_ranks) | ((value == of_ranks) & (place >= place_of_ranks))
    if cu_seqlens is not None:
        better = better & same_sequence(shards, cu_seqlens)[:, rank, None, None, None]
    later = torch.arange(shards.size, device=value.device) > rank
    return better & later[:, None, None, None]


def same_sequence(shards: Shards, cu_seqlens: Tensor) -> Tensor:
    """bool (R, R): whether the sequence in which a rank's rows start holds the last row of another, earlier one."""
    starts = constants(shards.starts, cu_seqlens.device)
    return first_of_sequence(cu_seqlens, starts[:-1])[:, None] < starts[1:]


def first_of_sequence(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """The first row of the sequence that each row is in."""
    sequence = torch.searchsorted(cu_seqlens.contiguous(), rows.to(cu_seqlens.dtype), right=True) - 1
    return cu_seqlens[sequence]


def local_mask(shards: Shards, intervals: Tensor, keys_per_row: int | None, scattered: bool) -> KeyIntervalMask:
    return KeyIntervalMask._of(intervals.contiguous(), keys_per_row, scattered, shards.own)


def fetched_intervals(intervals: Tensor, wanted: Tensor, slots: Tensor, fetched: int) -> Tensor:
    """int32 (2, batches, Heads, fetched): of the intervals (2, batches, Heads, keys) those of the wanted keys, in their
    slots; of the other slots empty ones."""
    _, batches, all_heads, keys = intervals.shape
    heads = wanted.shape[1]
    slots = slots.masked_fill(~wanted, fetched)
    slots = slots[None, :, :, None].expand(2, batches, heads, all_heads // heads, keys)
    room = intervals.new_zeros(2, batches, heads, all_heads // heads, fetched + 1)  # the last is for what is not wanted
    return room.scatter_(-1, slots, intervals.unflatten(2, (heads, -1)))[..., :fetched].flatten(2, 3)
