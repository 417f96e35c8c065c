"""DTensor sharding rules of the operators: each rank computes its own batch elements or its own heads.

A rule lists, for one mesh dimension, pairs of placements: those of the operator's results and those of its arguments.
DTensor chooses one pair and redistributes the arguments where needed.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import ops
from ..broadcast import is_one_of
from ..ops.list_sizes import has_row_bits
from ..ops.schema import Arguments, BackwardArguments

# The (batch, heads) dimensions of arguments and results.
ROWS = (0, 2)  # query, key, value, out
SCORES = (0, 1)  # masks, biases, lse
STACKED = (1, 2)  # with one more dimension in front: intervals (2, ..), spans (2, ..), summaries of a mask (9, ..)
LISTS = (0, 0)  # concatenated key lists: each rank has its own, of any length
# The dimensions of the attention operators' arguments. Other tensors are replicated.
DIMENSIONS = {
    **dict.fromkeys(("query", "key", "value", "dout", "out"), ROWS),
    **dict.fromkeys(("bias", "relative_bias", "dlse", "lse", "mask"), SCORES),
    **dict.fromkeys(("mask_summaries", "intervals", "kv_indptr"), STACKED),
    **dict.fromkeys(("kv_indices", "kv_row_bits"), LISTS),
}
BATCH, HEADS = AXES = (0, 1)


def is_tensor(argument: object) -> bool:
    return hasattr(argument, "tensor_meta")


def replicated(arguments) -> list:
    """Replicate() for tensors, None for other arguments."""
    return [Replicate() if is_tensor(argument) else None for argument in arguments]


def sharded(argument: object, dims: tuple[int, int], axis: int, shared=Replicate):
    """Shard() along the axis, or `shared()` if the argument is broadcast along it; None if it is not a tensor."""
    if not is_tensor(argument):
        return None
    return shared() if argument.shape[dims[axis]] == 1 else Shard(dims[axis])


def sharded_arguments(arguments: Arguments | BackwardArguments, axis: int) -> list:
    """Placements of an operator's arguments. Key lists are replicated if all elements along the axis share them."""
    spans = arguments.kv_indptr
    lists_are_shared = is_tensor(spans) and spans.shape[STACKED[axis]] == 1

    def placement(name: str, argument: object):
        dims = DIMENSIONS.get(name)
        if name == "seqused_k" and axis == BATCH:
            return sharded_list(argument)
        if dims is None or (dims is LISTS and lists_are_shared):
            return replicated([argument])[0]
        return sharded_list(argument) if dims is LISTS else sharded(argument, dims, axis)

    return [placement(name, argument) for name, argument in zip(arguments._fields, arguments)]


def sharded_list(values: object):
    """Shard(0); Replicate() for an empty tensor, which cannot be sharded; None if it is not a tensor."""
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


def shardable_axes(arguments: Arguments | BackwardArguments) -> tuple[int, ...]:
    """BATCH, if no group of batch elements that shares a mask or bias would be split, and HEADS."""
    query = arguments.query
    tensors = {name: getattr(arguments, name) for name in ("bias", "mask", "kv_indptr")}
    batches = [x.shape[DIMENSIONS[name][BATCH]] for name, x in tensors.items() if is_tensor(x)]
    shared = [size for size in batches if not is_one_of(size, 1, query.shape[0])]
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


def attention_rule(arguments: Arguments | BackwardArguments, num_results: int, results) -> list:
    """The rule of an attention operator; `results(axis)` are the placements of its results."""
    require_local_lists(arguments.query, arguments.kv_indptr)
    accepted = [([Replicate()] * num_results, replicated(arguments))]
    if arguments.cu_seqlens_q is None:
        require_whole_groups(arguments.query, arguments.key)
        accepted += [(results(axis), sharded_arguments(arguments, axis)) for axis in shardable_axes(arguments)]
    return accepted


def forward_rule(*args):
    """attention_forward: (out, lse)"""
    arguments = Arguments(*args)
    return attention_rule(arguments, 2, lambda axis: [sharded(arguments.query, ROWS, axis), Shard(SCORES[axis])])


def backward_rule(*args):
    """attention_backward: (dquery, dkey, dvalue, dbias, drelative_bias)"""
    arguments = BackwardArguments(*args)

    def results(axis: int) -> list:
        # Each rank contributes to the gradient of a broadcast bias.
        biases = (arguments.bias, arguments.needs_dbias), (arguments.relative_bias, arguments.needs_drelative_bias)
        dbiases = [sharded(x, SCORES, axis, shared=Partial) if needed else Replicate() for x, needed in biases]
        return [*(sharded(x, ROWS, axis) for x in (arguments.query, arguments.key, arguments.value)), *dbiases]

    return attention_rule(arguments, 5, results)


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


def build_key_lists_rule(
    mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit
):
    """(keys, spans, rows)"""
    others = (seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit)
    source, dims = (intervals, STACKED) if mask is None else (mask, SCORES)
    by_axis = {
        axis: [sharded(mask, SCORES, axis), sharded(intervals, STACKED, axis)]
        for axis in AXES
        if cu_seqlens_q is None and source.shape[dims[axis]] != 1
    }
    return mask_rule([mask, intervals, *others], (LISTS, STACKED, LISTS), by_axis)


def index_key_lists_rule(indices, intervals, tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    """(keys, spans, rows)"""
    others = (tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
    by_axis = {}
    for axis in AXES:
        placements = [sharded(indices, SCORES, axis), sharded(intervals, STACKED, axis)]
        if cu_seqlens_q is None and any(p is not None and p.is_shard() for p in placements):
            by_axis[axis] = placements
    rows = LISTS if has_row_bits(tile_rows) else None
    return mask_rule([indices, intervals, *others], (LISTS, STACKED, rows), by_axis)


def pack_mask_rule(mask, *others):
    """(bits, summaries)"""
    by_axis = {axis: [Shard(axis)] for axis in AXES if len(mask.shape) == 4 and mask.shape[axis] != 1}
    return mask_rule([mask, *others], (SCORES, STACKED), by_axis)


def topk_intervals_rule(bias, window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, max_keys, name="bias"):
    """int32 (2, ..)"""
    others = (window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, max_keys, name)
    by_axis = {axis: [Shard(axis)] for axis in AXES if cu_seqlens_q is None and bias.shape[axis] != 1}
    return mask_rule([bias, *others], (STACKED,), by_axis)


def topk_lists_rule(bias, window_size, seqlen_q, seqused_k):
    """(keys, spans, rows)"""
    lengths = {BATCH: Shard(0), HEADS: Replicate()} if is_tensor(seqused_k) else {BATCH: None, HEADS: None}
    by_axis = {axis: [Shard(axis), None, None, lengths[axis]] for axis in AXES if bias.shape[axis] != 1}
    return mask_rule([bias, window_size, seqlen_q, seqused_k], (LISTS, STACKED, LISTS), by_axis)


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
