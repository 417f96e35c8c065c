"""DTensor sharding rules of the operators: each rank computes its own batch elements or its own heads.

A rule lists, for one mesh dimension, pairs of placements: those of the operator's results and those of its arguments.
DTensor chooses one pair and redistributes the arguments where needed.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import ops

# The (batch, heads) dimensions of arguments and results.
ROWS = (0, 2)  # query, key, value, out
SCORES = (0, 1)  # masks, biases, lse
STACKED = (1, 2)  # with one more dimension in front: intervals (2, ..), spans (2, ..), tiles of a mask (9, ..)
LISTS = (0, 0)  # concatenated key lists: each rank has its own, of any length
MASKS = ops.MaskTensors(SCORES, STACKED, STACKED, LISTS, STACKED, LISTS)
BATCH, HEADS = AXES = (0, 1)


def is_tensor(argument: object) -> bool:
    return hasattr(argument, "tensor_meta")


def replicated(arguments) -> list:
    """Replicate() for tensors, None for other arguments."""
    return [Replicate() if is_tensor(argument) else None for argument in arguments]


def sharded(argument: object, dims: tuple[int, int], axis: int, shared=Replicate):
    """Shard() along the axis, or `shared()` if the argument is broadcast along it; None if it is no tensor."""
    if not is_tensor(argument):
        return None
    return shared() if argument.shape[dims[axis]] == 1 else Shard(dims[axis])


def sharded_masks(masks: ops.MaskTensors, axis: int) -> list:
    """`sharded` for each tensor of a mask. Key lists are replicated if all elements along the axis share them."""
    is_shared = is_tensor(masks.list_spans) and masks.list_spans.shape[STACKED[axis]] == 1

    def placement(mask: object, dims: tuple[int, int]):
        if dims is not LISTS:
            return sharded(mask, dims, axis)
        return replicated([mask])[0] if is_shared else sharded_list(mask)

    return [placement(mask, dims) for mask, dims in zip(masks, MASKS)]


def sharded_list(values: object):
    """Shard(0); Replicate() for an empty tensor, which cannot be sharded; None if it is no tensor."""
    if not is_tensor(values):
        return None
    return Shard(0) if values.shape[0] else Replicate()


def require_local_lists(query, spans: object) -> None:
    """Requires key lists to be sharded as the query: spans index into the rank's own lists, so lists cannot move."""
    if not is_tensor(spans):
        return
    for of_query, of_lists in zip(query.placements, spans.placements):
        axis = next((axis for axis in AXES if of_query.is_shard(ROWS[axis])), None)
        expected = Replicate() if axis is None else sharded(spans, STACKED, axis)
        if of_lists != expected:
            raise ValueError(
                f"the lists of keys of a query placed {query.placements} must be made of a mask or bias that is "
                f"sharded over the same ranks, by batch elements or heads, got lists placed {spans.placements}"
            )


def require_whole_groups(query, key) -> None:
    """Requires query heads on the same rank as their key/value head (GQA)."""
    for placement, ranks in zip(query.placements, query.mesh.shape):
        if placement.is_shard(2) and (key.shape[2] % ranks or query.shape[2] % ranks):
            raise ValueError(
                f"query's {query.shape[2]} heads are sharded over {ranks} ranks, which must divide them and the "
                f"{key.shape[2]} of key and value"
            )


def shardable_axes(query, bias: object, masks: ops.MaskTensors) -> tuple[int, ...]:
    """BATCH, if no group of batch elements that shares a mask or bias would be split, and HEADS."""
    shared = [
        x.shape[dims[BATCH]]
        for x, dims in ((bias, SCORES), (masks.mask, SCORES), (masks.list_spans, STACKED))
        if is_tensor(x) and x.shape[dims[BATCH]] not in (1, query.shape[0])
    ]
    can_shard_batch = True
    for placement, ranks in zip(query.placements, query.mesh.shape):
        split = [batches for batches in shared if batches % ranks or query.shape[0] % ranks]
        can_shard_batch &= not split
        if split and placement.is_shard(0):
            raise ValueError(
                f"query's {query.shape[0]} batch elements are sharded over {ranks} ranks, which must divide them "
                f"and the {split[0]} of a mask or bias that they share"
            )
    return AXES if can_shard_batch else (HEADS,)


def forward_rule(query, key, value, bias, *rest):
    """attention_forward: (out, lse)"""
    masks, (cu_seqlens_q, _, _, _, seqlens_k, *_) = ops.MaskTensors(*rest[: len(MASKS)]), rest[len(MASKS) :]
    require_local_lists(query, masks.list_spans)
    accepted = [(replicated([query, query]), replicated([query, key, value, bias, *rest]))]
    if cu_seqlens_q is not None:
        return accepted
    require_whole_groups(query, key)
    for axis in shardable_axes(query, bias, masks):
        arguments = [
            *(sharded(x, ROWS, axis) for x in (query, key, value)),
            sharded(bias, SCORES, axis),
            *sharded_masks(masks, axis),
            *(None,) * 4,
            sharded_list(seqlens_k) if axis == BATCH else replicated([seqlens_k])[0],
            *(None,) * 4,
        ]
        accepted.append(([sharded(query, ROWS, axis), Shard(SCORES[axis])], arguments))
    return accepted


def backward_rule(dout, dlse, query, key, value, bias, out, lse, *rest):
    """attention_backward: (dquery, dkey, dvalue, dbias)"""
    masks, cu_seqlens_q, needs_dbias = ops.MaskTensors(*rest[: len(MASKS)]), rest[len(MASKS)], rest[-1]
    require_local_lists(query, masks.list_spans)
    rows = (query, key, value)
    accepted = [(replicated([*rows, query]), replicated([dout, dlse, *rows, bias, out, lse, *rest]))]
    if cu_seqlens_q is not None:
        return accepted
    require_whole_groups(query, key)
    for axis in shardable_axes(query, bias, masks):
        grads = [sharded(x, ROWS, axis) for x in rows]
        # Each rank contributes to the gradient of a broadcast bias.
        grads.append(sharded(bias, SCORES, axis, shared=Partial) if needs_dbias else Replicate())
        arguments = [
            *(sharded(dout, ROWS, axis), sharded(dlse, SCORES, axis)),
            *(sharded(x, ROWS, axis) for x in rows),
            *(sharded(bias, SCORES, axis), sharded(out, ROWS, axis), sharded(lse, SCORES, axis)),
            *sharded_masks(masks, axis),
            *(None,) * 9,
        ]
        accepted.append((grads, arguments))
    return accepted


def mask_rule(arguments: list, results: tuple, by_axis: dict[int, list]) -> list:
    """The rule of an operator that makes masks or key lists.

    Args:
        arguments: all arguments.
        results: (batch, heads) dimensions of each result; None: replicated.
        by_axis: placements of the first arguments for each axis that can be sharded; the others are no tensors.
    """
    accepted = [([Replicate()] * len(results), replicated(arguments))]
    for axis, placements in by_axis.items():
        of_results = [Replicate() if dims is None else Shard(dims[axis]) for dims in results]
        accepted.append((of_results, [*placements, *(None,) * (len(arguments) - len(placements))]))
    return accepted


def build_key_lists_rule(mask, intervals, *rest):
    """(keys, spans, rows)"""
    source, dims = (intervals, STACKED) if mask is None else (mask, SCORES)
    by_axis = {
        axis: [sharded(mask, SCORES, axis), sharded(intervals, STACKED, axis)]
        for axis in AXES
        if rest[3] is None and source.shape[dims[axis]] != 1
    }
    return mask_rule([mask, intervals, *rest], (LISTS, STACKED, LISTS), by_axis)


def index_key_lists_rule(indices, intervals, *rest):
    """(keys, spans, rows)"""
    tile_rows, *_, cu_seqlens_q, _ = rest
    by_axis = {}
    for axis in AXES:
        placements = [sharded(indices, SCORES, axis), sharded(intervals, STACKED, axis)]
        if cu_seqlens_q is None and any(p is not None and p.is_shard() for p in placements):
            by_axis[axis] = placements
    rows = LISTS if ops.has_list_rows(tile_rows) else None
    return mask_rule([indices, intervals, *rest], (LISTS, STACKED, rows), by_axis)


def pack_mask_rule(mask, *rest):
    """(bits, tiles)"""
    by_axis = {axis: [Shard(axis)] for axis in AXES if len(mask.shape) == 4 and mask.shape[axis] != 1}
    return mask_rule([mask, *rest], (SCORES, STACKED), by_axis)


def topk_intervals_rule(bias, *rest):
    """int32 (2, ..)"""
    by_axis = {axis: [Shard(axis)] for axis in AXES if rest[2] is None and bias.shape[axis] != 1}
    return mask_rule([bias, *rest], (STACKED,), by_axis)


def topk_lists_rule(bias, window_size, seqlen_q, seqlens_k):
    """(keys, spans, rows)"""
    lengths = {BATCH: Shard(0), HEADS: Replicate()} if is_tensor(seqlens_k) else {BATCH: None, HEADS: None}
    by_axis = {axis: [Shard(axis), None, None, lengths[axis]] for axis in AXES if bias.shape[axis] != 1}
    return mask_rule([bias, window_size, seqlen_q, seqlens_k], (LISTS, STACKED, LISTS), by_axis)


for operator, rule in (
    (ops.attention_forward, forward_rule),
    (ops.attention_backward, backward_rule),
    (ops.build_key_lists, build_key_lists_rule),
    (ops.index_key_lists, index_key_lists_rule),
    (ops.pack_mask, pack_mask_rule),
    (ops.topk_intervals, topk_intervals_rule),
    (ops.topk_lists, topk_lists_rule),
):
    if operator is not None:
        register_sharding(operator)(rule)
