"""How the operators go over DTensors: sharded by batch elements or by heads, each rank with its own.

A rule lists, for one dimension of a mesh, the placements that an operator takes its arguments in and gives its results
in. DTensor chooses among them, and moves tensors where they lie otherwise.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import ops
from ..ops.list_sizes import has_row_bits
from ..ops.schema import Arguments, BackwardArguments

# (batch, heads): the dimensions of a tensor. Lists lie one after the other, each rank's in a part of their first
# dimension.
ROWS, SCORES, LISTS = (0, 2), (0, 1), (0, 0)
BEHIND_ONE = (1, 2)  # intervals (2, ..), spans (2, ..), tiles of a mask (9, ..)
# The arguments and results of the attention operators that have these dimensions. Any other tensor is whole on every
# rank.
DIMENSIONS = {
    **dict.fromkeys(("query", "key", "value", "dout", "out"), ROWS),
    **dict.fromkeys(("bias", "dlse", "lse", "mask"), SCORES),
    **dict.fromkeys(("mask_tiles", "intervals", "kv_indptr"), BEHIND_ONE),
    **dict.fromkeys(("kv_indices", "kv_row_bits"), LISTS),
}
OF_BATCH, OF_HEADS = 0, 1


def is_tensor(argument: object) -> bool:
    return hasattr(argument, "tensor_meta")


def whole(arguments) -> list:
    """That each tensor is whole on every rank; None of what is no tensor."""
    return [Replicate() if is_tensor(argument) else None for argument in arguments]


def own(argument: object, dims: tuple[int, int], which: int, shared=Replicate):
    """That each rank has its own batch elements or heads, or what they all share, as the argument has it."""
    if not is_tensor(argument):
        return None
    return shared() if argument.shape[dims[which]] == 1 else Shard(dims[which])


def own_arguments(arguments, which: int) -> list:
    """The placements of an operator's arguments where each rank has its own batch elements or heads."""
    spans = arguments.kv_indptr
    share_lists = is_tensor(spans) and spans.shape[BEHIND_ONE[which]] == 1

    def placed(name: str, argument: object):
        dims = DIMENSIONS.get(name)
        if name == "seqlens_k" and which == OF_BATCH:
            return own_list(argument)
        if dims is None or (dims is LISTS and share_lists):
            return whole([argument])[0]
        return own_list(argument) if dims is LISTS else own(argument, dims, which)

    return [placed(name, argument) for name, argument in zip(arguments._fields, arguments)]


def own_list(keys: object):
    """Keys, or which rows see them; the empty tensor of lists whose rows all see theirs cannot be sharded."""
    if not is_tensor(keys):
        return None
    return Shard(0) if keys.shape[0] else Replicate()


def require_lists_in_place(query, spans: object) -> None:
    """Lists say where in a rank's own keys they lie: they are made for how the rows are sharded, and never moved."""
    if not is_tensor(spans):
        return
    for of_query, of_lists in zip(query.placements, spans.placements):
        which = next((which for which in (OF_BATCH, OF_HEADS) if of_query.is_shard(ROWS[which])), None)
        wanted = Replicate() if which is None else own(spans, BEHIND_ONE, which)
        if of_lists != wanted:
            raise ValueError(
                f"the lists of keys of a query placed {query.placements} must be made of a mask or bias that is "
                f"sharded over the same ranks, by batch elements or heads, got lists placed {spans.placements}"
            )


def require_whole_groups(query, key) -> None:
    """Query heads go with the key/value head that they share."""
    for placement, ranks in zip(query.placements, query.mesh.shape):
        if placement.is_shard(2) and (key.shape[2] % ranks or query.shape[2] % ranks):
            raise ValueError(
                f"query's {query.shape[2]} heads are sharded over {ranks} ranks, which must divide them and the "
                f"{key.shape[2]} of key and value"
            )


def axes(arguments) -> tuple[int, ...]:
    """What a mesh dimension may shard: batch elements, where no rank splits those that share a bias or mask, and
    heads."""
    query = arguments.query
    tensors = {name: getattr(arguments, name) for name in ("bias", "mask", "kv_indptr")}
    batches = [x.shape[DIMENSIONS[name][OF_BATCH]] for name, x in tensors.items() if is_tensor(x)]
    shared = [size for size in batches if size not in (1, query.shape[0])]
    can_shard_batch = True
    for placement, ranks in zip(query.placements, query.mesh.shape):
        undivided = [size for size in shared if size % ranks or query.shape[0] % ranks]
        can_shard_batch &= not undivided
        if undivided and placement.is_shard(0):
            raise ValueError(
                f"query's {query.shape[0]} batch elements are sharded over {ranks} ranks, which must divide them "
                f"and the {undivided[0]} of a mask or bias that they share"
            )
    return (OF_BATCH, OF_HEADS) if can_shard_batch else (OF_HEADS,)


def accepted_placements(arguments, whole_results: list, own_results) -> list[tuple[list, list]]:
    """(results, arguments) for each way of sharding; `own_results(which)` has the results of batch elements or
    heads."""
    require_lists_in_place(arguments.query, arguments.kv_indptr)
    accepted = [(whole_results, whole(arguments))]
    if arguments.cu_seqlens_q is None:
        require_whole_groups(arguments.query, arguments.key)
        accepted += [(own_results(which), own_arguments(arguments, which)) for which in axes(arguments)]
    return accepted


def forward_rule(*args):
    """(out, lse) of attention_forward."""
    arguments = Arguments(*args)
    return accepted_placements(
        arguments,
        [Replicate()] * 2,
        lambda which: [own(arguments.query, ROWS, which), Shard(SCORES[which])],
    )


def backward_rule(*args):
    """(dquery, dkey, dvalue, dbias) of attention_backward."""
    arguments = BackwardArguments(*args)
    rows = (arguments.query, arguments.key, arguments.value)

    def own_results(which: int) -> list:
        # Each rank has a part of the gradient of a shared bias.
        dbias = own(arguments.bias, SCORES, which, shared=Partial) if arguments.needs_dbias else Replicate()
        return [*(own(x, ROWS, which) for x in rows), dbias]

    return accepted_placements(arguments, [Replicate()] * 4, own_results)


def build_key_lists_rule(
    mask, intervals, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit
):
    """(keys, spans, rows)"""
    others = (seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, keys_per_row, limit)
    given, dims = (intervals, BEHIND_ONE) if mask is None else (mask, SCORES)
    results = (LISTS, BEHIND_ONE, LISTS)
    accepted = [([Replicate()] * 3, whole([mask, intervals, *others]))]
    for which in (OF_BATCH, OF_HEADS):
        if cu_seqlens_q is None and given.shape[dims[which]] != 1:
            placements = [own(mask, SCORES, which), own(intervals, BEHIND_ONE, which), *whole(others)]
            accepted.append(([Shard(dim[which]) for dim in results], placements))
    return accepted


def index_key_lists_rule(indices, intervals, tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k):
    """(keys, spans, rows)"""
    others = (tile_rows, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
    accepted = [([Replicate()] * 3, whole([indices, intervals, *others]))]
    for which in (OF_BATCH, OF_HEADS):
        parts = [own(indices, SCORES, which), own(intervals, BEHIND_ONE, which)]
        if cu_seqlens_q is None and any(part is not None and part.is_shard() for part in parts):
            rows = Shard(0) if has_row_bits(tile_rows) else Replicate()
            accepted.append(([Shard(0), Shard(BEHIND_ONE[which]), rows], [*parts, *whole(others)]))
    return accepted


def pack_mask_rule(mask, *others):
    """(bits, tiles)"""
    accepted = [([Replicate()] * 2, whole([mask, *others]))]
    for which in (OF_BATCH, OF_HEADS):
        if len(mask.shape) == 4 and mask.shape[which] != 1:
            results = [Shard(SCORES[which]), Shard(BEHIND_ONE[which])]
            accepted.append((results, [Shard(which), *whole(others)]))
    return accepted


def topk_intervals_rule(bias, window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, longest):
    """int32 (2, ..)"""
    others = (window_size, seqlen_q, cu_seqlens_q, cu_seqlens_k, longest)
    accepted = [([Replicate()], whole([bias, *others]))]
    for which in (OF_BATCH, OF_HEADS):
        if cu_seqlens_q is None and bias.shape[which] != 1:
            accepted.append(([Shard(BEHIND_ONE[which])], [Shard(which), *whole(others)]))
    return accepted


def topk_lists_rule(bias, window_size, seqlen_q, seqlens_k):
    """(keys, spans, rows)"""
    accepted = [([Replicate()] * 3, whole([bias, window_size, seqlen_q, seqlens_k]))]
    results = (LISTS, BEHIND_ONE, LISTS)
    if bias.shape[OF_HEADS] != 1:
        placements = [Shard(OF_HEADS), None, None, *whole([seqlens_k])]
        accepted.append(([Shard(dims[OF_HEADS]) for dims in results], placements))
    if bias.shape[OF_BATCH] != 1:
        placements = [Shard(OF_BATCH), None, None, Shard(0) if is_tensor(seqlens_k) else None]
        accepted.append(([Shard(dims[OF_BATCH]) for dims in results], placements))
    return accepted


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
