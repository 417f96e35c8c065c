"""Top-k selection over shards: the halo of `window_size` without the whole bias on any rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import KeyIntervalMask
from ..masks.topk import sequence_of_keys, topk_keys
from . import collectives
from .halo import HaloPlan, any_of_heads, earlier_capacities, local_mask, plan_exact, plan_fixed
from .shards import Shards, constants


def plan_for_topk(
    shards: Shards, bias: Tensor, window_size: int, cu_seqlens: Tensor | None, key_heads: int, fixed_shapes: bool
) -> tuple[HaloPlan, KeyIntervalMask]:
    """The halo plan of the causal top-k mask, and the mask of [fetched keys; local keys] for this rank's rows.

    1. Later rows see at most the `window_size` best keys of a rank, its candidates. The ranks all-gather their biases.
    2. Each rank selects for its own rows among the candidates of earlier ranks and its own keys. It needs the
       candidates that its first row sees.
    3. These are the best candidates, except masked ones, so the worst of them determines the set. The ranks all-gather
       the worst ones, and each owner derives which ranks need its keys.

    With `fixed_shapes` a rank sends all candidates without step 3. Exception: query heads that share a key/value head
    but not their bias select different keys, so that step 3 is required.

    Args:
        bias: ({B|1}, {H|Hkv|1}, 1, S_r), of the local keys.
        cu_seqlens: int32 (sequences + 1) of packed sequences, each with its own selection, or None.
        key_heads: Hkv.
        fixed_shapes: see `context_parallel_attention`.
    """
    bias = bias.detach()[:, :, 0]
    heads = min(bias.shape[1], key_heads)
    ratio = bias.shape[1] // heads  # query heads that select separately from one key/value head
    rank = shards.rank
    values, keys = candidates(shards, bias, window_size if ratio == 1 else max(shards.lengths), cu_seqlens)
    width = values.shape[2]
    earlier = collectives.all_gather(values, shards.group)[:rank].movedim(0, 2)
    if cu_seqlens is not None:
        earlier = earlier.masked_fill(~same_sequence(shards, cu_seqlens)[rank, :rank, None], -torch.inf)
    if fixed_shapes and ratio == 1:
        slots = [earlier[:, :, q, :count] for q, count in enumerate(earlier_capacities(shards, width)[:rank])]
        intervals = select_rows(shards, torch.cat([*slots, bias], dim=-1), window_size, cu_seqlens)
        return plan_fixed(shards, None, width, keys), local_mask(shards, intervals, window_size, unstructured=True)
    earlier = earlier.flatten(2)
    intervals = select_rows(shards, torch.cat([earlier, bias], dim=-1), window_size, cu_seqlens)

    needed = intervals[1, ..., : rank * width] > 0
    needed_by = candidates_needed_by(shards, values, earlier, needed, cu_seqlens)
    needed_by, needed = any_of_heads(needed_by, heads), any_of_heads(needed, heads)
    # How many candidates are needed before each candidate, and before each rank's first.
    count_before = pad(needed.cumsum(dim=-1), (1, 0))
    rank_starts = torch.arange(shards.size + 1, device=bias.device).clamp_(max=rank) * width
    rank_starts = count_before[..., rank_starts].movedim(-1, 0)
    slots = count_before[..., 1:] - 1
    if fixed_shapes:
        plan = plan_fixed(shards, needed_by, window_size * ratio, keys)
        shift = (plan.slot_starts - rank_starts[:-1])[:rank].movedim(0, -1)
        slots = slots + shift.repeat_interleave(width, dim=-1)
    else:
        plan = plan_exact(shards, needed_by, rank_starts.diff(dim=0), keys)
    fetched = fetched_intervals(intervals[..., : rank * width], needed, slots, plan.num_slots)
    intervals = torch.cat([fetched, intervals[..., rank * width :]], dim=-1)
    return plan, local_mask(shards, intervals, window_size, unstructured=True)


def candidates(shards: Shards, bias: Tensor, count: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The `count` best local keys, the only ones that later ranks can see, in ascending order of the keys.

    With cu_seqlens: of the sequence of the last row.

    Returns:
        biases (batches, heads, n), -inf for missing candidates; and the local keys, int64 (batches, heads, n).
    """
    length, width = shards.local_length, min(count, max(shards.lengths))
    if cu_seqlens is not None and length:
        last_row = constants((shards.local_start + length - 1,), bias.device)
        is_earlier = shards.local_positions(bias.device) < sequence_start(cu_seqlens, last_row)
        bias = bias.masked_fill(is_earlier, -torch.inf)
    if width >= length:
        keys = torch.arange(width, device=bias.device).clamp_(max=max(length - 1, 0))
        return pad(bias, (0, width - length), value=-torch.inf), keys.expand(*bias.shape[:2], -1)
    keys, is_valid = topk_keys(bias, width)
    return bias.gather(-1, keys).masked_fill_(~is_valid, -torch.inf), keys


def select_rows(shards: Shards, bias: Tensor, window_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """The top-k mask of [candidates of earlier ranks; local keys] for the local rows.

    bias: (batches, heads, n + S_r).

    Returns:
        intervals int32 (2, batches, heads, n + S_r).
    """
    length, num_earlier = shards.local_length, bias.shape[2] - shards.local_length
    if not length:
        return torch.zeros(2, *bias.shape, dtype=torch.int32, device=bias.device)
    if cu_seqlens is None:
        return KeyIntervalMask.topk(bias, window_size, length).intervals
    # The candidates belong to the sequence of the first local row.
    start = sequence_start(cu_seqlens, constants((shards.local_start,), bias.device))
    cu_rows = cu_seqlens.clamp(shards.local_start, shards.local_start + length) - shards.local_start
    cu_keys = torch.where(cu_seqlens > start, cu_rows + num_earlier, 0)
    mask = KeyIntervalMask.topk_varlen(bias[0].T, window_size, cu_keys, cu_seqlens_q=cu_rows)
    # The intervals count rows from the first local row of their sequence.
    sequence = sequence_of_keys(cu_keys, num_earlier + length)
    row_start, row_end = cu_rows[sequence], cu_rows[sequence + 1]
    intervals = torch.minimum(mask.intervals + row_start[:, None], row_end[:, None])
    return intervals.transpose(1, 2)[:, None]


def candidates_needed_by(
    shards: Shards, values: Tensor, earlier: Tensor, needed: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """bool (R, {B|1}, {H|Hkv|1}, n): whether each rank needs each of the n local candidates.

    Args:
        values: ({B|1}, {H|Hkv|1}, n): biases of the local candidates.
        earlier, needed: biases of all candidates of earlier ranks, and whether this rank needs them.
    """
    rank, width = shards.rank, values.shape[2]
    # The worst needed candidate has the smallest bias and, on ties, the smallest index. float64 is exact for both.
    worst = torch.full((2, *values.shape[:2]), torch.inf, dtype=torch.float64, device=values.device)
    if earlier.shape[2]:
        smallest = earlier.masked_fill(~needed, torch.inf).amin(dim=-1)
        is_worst = needed & (earlier == smallest[..., None])
        index = torch.arange(earlier.shape[2], dtype=torch.float64, device=values.device)
        worst = torch.stack((smallest.double(), torch.where(is_worst, index, torch.inf).amin(dim=-1)))
    worst_bias, worst_index = collectives.all_gather(worst, shards.group)[..., None].unbind(dim=1)

    index = torch.arange(rank * width, (rank + 1) * width, device=values.device)
    values = values.double()
    is_needed = (values > worst_bias) | ((values == worst_bias) & (index >= worst_index))
    if cu_seqlens is not None:
        is_needed = is_needed & same_sequence(shards, cu_seqlens)[:, rank, None, None, None]
    is_later = torch.arange(shards.size, device=values.device) > rank
    return is_needed & is_later[:, None, None, None]


def same_sequence(shards: Shards, cu_seqlens: Tensor) -> Tensor:
    """bool (R, R): whether the sequence of a rank's first row contains the last row of another, earlier rank."""
    starts = constants(shards.starts, cu_seqlens.device)
    return sequence_start(cu_seqlens, starts[:-1])[:, None] < starts[1:]


def sequence_start(cu_seqlens: Tensor, rows: Tensor) -> Tensor:
    """The first row of each row's sequence."""
    sequence = torch.searchsorted(cu_seqlens.contiguous(), rows.to(cu_seqlens.dtype), right=True) - 1
    return cu_seqlens[sequence]


def fetched_intervals(intervals: Tensor, needed: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """int32 (2, batches, Heads, num_slots): the intervals of the needed keys, by slot. Other slots are empty.

    Args:
        intervals: (2, batches, Heads, keys).
        needed: bool (batches, heads, keys).
        slots: int64 (batches, heads, keys): the slot of each needed key.
    """
    _, batches, all_heads, keys = intervals.shape
    heads = needed.shape[1]
    slots = slots.masked_fill(~needed, num_slots)
    slots = slots[None, :, :, None].expand(2, batches, heads, all_heads // heads, keys)
    # The last slot receives the intervals of keys that are not needed.
    result = intervals.new_zeros(2, batches, heads, all_heads // heads, num_slots + 1)
    return result.scatter_(-1, slots, intervals.unflatten(2, (heads, -1)))[..., :num_slots].flatten(2, 3)
