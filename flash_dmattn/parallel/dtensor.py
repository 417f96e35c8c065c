"""How the operators go over DTensors: sharded by batch elements or by heads, each rank with its own.

A rule lists, for one dimension of a mesh, the placements that an operator takes its arguments in and gives its results
in. DTensor chooses among them, and moves tensors where they lie otherwise.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .. import ops

# (batch, heads): the dimensions of each argument and result. Lists of keys lie one after the other, so that each rank's
# are its own, which is all that is asked of them.
ROWS, PAIRS, LISTS = (0, 2), (0, 1), (0, 0)
BEHIND_ONE = (1, 2)  # with a dimension in front: intervals (2, ..), spans (2, ..), tiles of a mask (9, ..)
MASKS = ops.MaskTensors(PAIRS, BEHIND_ONE, BEHIND_ONE, LISTS, BEHIND_ONE, LISTS)
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


def own_masks(masks: ops.MaskTensors, which: int) -> list:
    """The same of what a mask is made of; lists are shared where there is one for all."""
    shares = is_tensor(masks.list_spans) and masks.list_spans.shape[BEHIND_ONE[which]] == 1

    def placed(mask: object, dims: tuple[int, int]):
        return own(mask, dims, which) if dims is not LISTS else whole([mask])[0] if shares else own_list(mask)

    return [placed(mask, dims) for mask, dims in zip(masks, MASKS)]


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


def axes(query, bias: object, masks: ops.MaskTensors) -> tuple[int, ...]:
    """What the ranks of a mesh can share out: batch elements, which go with the bias and the mask that they share, and
    heads."""
    shared = [
        pairs.shape[dims[OF_BATCH]]
        for pairs, dims in ((bias, PAIRS), (masks.mask, PAIRS), (masks.list_spans, BEHIND_ONE))
        if is_tensor(pairs) and pairs.shape[dims[OF_BATCH]] not in (1, query.shape[0])
    ]
    can_part_batch = True
    for placement, ranks in zip(query.placements, query.mesh.shape):
        undivided = [batches for batches in shared if batches % ranks or query.shape[0] % ranks]
        can_part_batch &= not undivided
        if undivided and placement.is_shard(0):
            raise ValueError(
                f"query's {query.shape[0]} batch elements are sharded over {ranks} ranks, which must divide them "
                f"and the {undivided[0]} of a mask or bias that they share"
            )
    return (OF_BATCH, OF_HEADS) if can_part_batch else (OF_HEADS,)


def forward_rule(query, key, value, bias, *rest):
    """(out, lse) of attention_forward."""
    masks, (cu_seqlens_q, _, _, _, seqlens_k, *_) = ops.MaskTensors(*rest[: len(MASKS)]), rest[len(MASKS) :]
    require_lists_in_place(query, masks.list_spans)
    accepted = [(whole([query, query]), whole([query, key, value, bias, *rest]))]
    if cu_seqlens_q is not None:
        return accepted
    require_whole_groups(query, key)
    for which in axes(query, bias, masks):
        lengths = own_list(seqlens_k) if which == OF_BATCH else whole([seqlens_k])[0]
        taken = [
            *(own(rows, ROWS, which) for rows in (query, key, value)),
            own(bias, PAIRS, which),
            *own_masks(masks, which),
            *(None,) * 4,
            lengths,
            *(None,) * 4,
        ]
        accepted.append(([own(query, ROWS, which), Shard(PAIRS[which])], taken))
    return accepted


def backward_rule(dout, dlse, query, key, value, bias, out, lse, *rest):
    """(dquery, dkey, dvalue, dbias) of attention_backward."""
    masks, cu_seqlens_q, needs_dbias = ops.MaskTensors(*rest[: len(MASKS)]), rest[len(MASKS)], rest[-1]
    require_lists_in_place(query, masks.list_spans)
    rows = (query, key, value)
    taken = whole([dout, dlse, *rows, bias, out, lse, *rest])
    accepted = [(whole([*rows, query]), taken)]
    if cu_seqlens_q is not None:
        return accepted
    require_whole_groups(query, key)
    for which in axes(query, bias, masks):
        grads = [own(x, ROWS, which) for x in rows]
        # What the ranks share gets a part of its gradient from each.
        grads.append(own(bias, PAIRS, which, shared=Partial) if needs_dbias else Replicate())
        taken = [
            *(own(dout, ROWS, which), own(dlse, PAIRS, which)),
            *(own(x, ROWS, which) for x in rows),
            *(own(bias, PAIRS, which), own(out, ROWS, which), own(lse, PAIRS, which)),
            *own_masks(masks, which),
            *(None,) * 9,
        ]
        accepted.append((grads, taken))
    return accepted


def build_key_lists_rule(mask, intervals, *rest):
    """(keys, spans, rows)"""
    given, dims = (intervals, BEHIND_ONE) if mask is None else (mask, PAIRS)
    results = (LISTS, BEHIND_ONE, LISTS)
    accepted = [([Replicate()] * 3, whole([mask, intervals, *rest]))]
    for which in (OF_BATCH, OF_HEADS):
        if rest[3] is None and given.shape[dims[which]] != 1:
            placements = [own(mask, PAIRS, which), own(intervals, BEHIND_ONE, which), *(None,) * len(rest)]
            accepted.append(([Shard(dim[which]) for dim in results], placements))
    return accepted


def index_key_lists_rule(indices, intervals, *rest):
    """(keys, spans, rows)"""
    tile_rows, *_, cu_seqlens_q, _ = rest
    accepted = [([Replicate()] * 3, whole([indices, intervals, *rest]))]
    for which in (OF_BATCH, OF_HEADS):
        parts = [own(indices, PAIRS, which), own(intervals, BEHIND_ONE, which)]
        if cu_seqlens_q is None and any(part is not None and part.is_shard() for part in parts):
            rows = Shard(0) if ops.has_list_rows(tile_rows) else Replicate()
            accepted.append(([Shard(0), Shard(BEHIND_ONE[which]), rows], [*parts, *(None,) * len(rest)]))
    return accepted


def pack_mask_rule(mask, *rest):
    """(bits, tiles)"""
    accepted = [([Replicate()] * 2, whole([mask, *rest]))]
    for which in (OF_BATCH, OF_HEADS):
        if len(mask.shape) == 4 and mask.shape[which] != 1:
            accepted.append(([Shard(PAIRS[which]), Shard(BEHIND_ONE[which])], [Shard(which), *(None,) * len(rest)]))
    return accepted


def topk_intervals_rule(bias, *rest):
    """int32 (2, ..)"""
    accepted = [([Replicate()], whole([bias, *rest]))]
    for which in (OF_BATCH, OF_HEADS):
        if rest[2] is None and bias.shape[which] != 1:
            accepted.append(([Shard(BEHIND_ONE[which])], [Shard(which), *(None,) * len(rest)]))
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
