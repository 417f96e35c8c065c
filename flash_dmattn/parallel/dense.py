"""Attention whose rows see most keys: keys and values are gathered from all ranks, a few heads at a time.

While the kernels go over some heads, the next are on their way; no rank ever holds more than two portions. They are
gathered once more in the backward, which sends each rank the gradients of its keys, again a portion at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..backends.compiled import FIXED, mask_tensors
from ..interface import kernels_for, mask_for
from ..interval_mask import KeyIntervalMask
from . import collectives
from .layout import zigzag_chunks, zigzag_order
from .shards import Shards

# A portion of keys and values is made this large where one head is smaller: enough for collectives at full speed.
PORTION_BYTES = 32 << 20


@dataclass(frozen=True)
class Dense:
    """Attention of this rank's rows to keys of all ranks."""

    shards: Shards
    zigzag: bool
    by_sequence: bool  # whether gathered keys of a zigzag layout are brought into the order of the sequence
    seen: int  # how many of the gathered keys, from the first, there are to see
    mask: Tensor | KeyIntervalMask | None  # of this rank's rows and the keys that there are to see
    bias_is_sharded: bool  # whether the bias is one number a key, as yet of the own keys
    is_causal: bool
    softmax_scale: float
    softcap: float
    deterministic: bool
    sparse: str

    @property
    def group(self) -> dist.ProcessGroup:
        return self.shards.group

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.shards.lengths

    def order(self, device: torch.device) -> Tensor:
        return zigzag_order(sum(self.lengths), self.group, device)

    def whole(self, gathered: Tensor, dim: int) -> Tensor:
        """Of shards (R, ..) the keys that there are to see."""
        keys = collectives.joined(gathered, self.lengths, dim)
        if self.by_sequence:
            keys = keys.index_select(dim, self.order(keys.device))
        return keys.narrow(dim, 0, self.seen)

    def start_reduce(self, grad: Tensor, dim: int) -> collectives.Pending:
        """Sends each rank its part of what `whole` gave a gradient for."""
        if self.by_sequence:
            grad = torch.empty_like(grad).index_copy_(dim, self.order(grad.device), grad)
        starts = [min(start, self.seen) for start in self.shards.starts]
        to_send = [behind - first for first, behind in zip(starts, starts[1:])]
        # A rank whose rows end before this rank's keys sends nothing.
        sends = [
            self.shards.own if q >= self.shards.rank or not self.sees_prefix else 0 for q in range(self.shards.size)
        ]
        return collectives.start_all_to_all(grad.movedim(dim, 0), to_send, sends, self.group)

    def reduced(self, pending: collectives.Pending, dim: int, dtype: torch.dtype) -> Tensor:
        """The sum of what came, in float32 or wider."""
        parts = pending.wait()
        parts = parts.unflatten(0, (-1, self.shards.own)) if self.shards.own else parts[None]
        wide = torch.promote_types(parts.dtype, torch.float32)
        return parts.sum(dim=0, dtype=wide).to(dtype).movedim(0, dim)

    @property
    def sees_prefix(self) -> bool:
        """Whether each rank sees the keys up to its own last alone."""
        return self.is_causal and not self.zigzag


def portions(key: Tensor, keys: int, one_only: bool) -> list[slice]:
    """Key/value heads that are gathered together."""
    batch, _, heads, head_dim = key.shape
    of_a_head = 2 * batch * keys * head_dim * key.element_size()
    together = heads if one_only else max(1, min(heads, PORTION_BYTES // max(of_a_head, 1)))
    return [slice(first, min(first + together, heads)) for first in range(0, heads, together)]


def of_heads(pairs: Tensor, kv: slice, kv_heads: int, dim: int = 1) -> Tensor:
    """Of a mask or bias with {H|Hkv|1} heads those of some key/value heads."""
    if pairs.shape[dim] == 1:
        return pairs
    group = pairs.shape[dim] // kv_heads
    return pairs.narrow(dim, kv.start * group, (kv.stop - kv.start) * group)


def same_for_heads(mask: Tensor | KeyIntervalMask | None) -> bool:
    return mask is None or mask.shape[1] == 1


def mask_of_heads(mask: Tensor | KeyIntervalMask | None, kv: slice, kv_heads: int) -> Tensor | KeyIntervalMask | None:
    if isinstance(mask, KeyIntervalMask):
        return mask._of_same_kind(of_heads(mask.intervals, kv, kv_heads, dim=2))
    return None if mask is None else of_heads(mask, kv, kv_heads)


class GatheredAttention(torch.autograd.Function):
    """(dense, query, key, value, bias) -> (out, lse), with query (B, S_r, H, D) and the own shards of key and value."""

    @staticmethod
    def forward(ctx, dense: Dense, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None):
        backend = kernels_for(query)
        kv_heads = key.shape[2]
        if dense.bias_is_sharded:
            bias = dense.whole(collectives.all_gather(padded(bias, dense, 3), dense.group), 3)
        # The gradient of a bias of pairs that all heads share is summed by the kernels, in one call.
        one_call = bias is not None and not dense.bias_is_sharded and bias.shape[1] == 1
        parts = portions(key, sum(dense.lengths), one_call)
        tensors, results = [], []
        for kv, (keys, values) in gathered(dense, key, value, parts):
            rows = of_heads(query, kv, kv_heads, dim=2)
            some_bias = None if bias is None else of_heads(bias, kv, kv_heads)
            if not tensors or not same_for_heads(dense.mask):
                mask = mask_of_heads(dense.mask, kv, kv_heads)
                sizes = (rows.shape[1], keys.shape[1], dense.is_causal)
                mask = mask_for(backend, mask, dense.sparse, (), *sizes)
                tensors.append(mask_tensors(mask, rows, keys, dense.is_causal, None))
            masks = tensors[-1]
            results.append(
                ops.attention_forward(
                    *(rows, keys, values, some_bias, *masks, *FIXED, None),
                    *(dense.softmax_scale, dense.softcap, dense.is_causal, dense.deterministic),
                )
            )
        out, lse = (x[0] if len(x) == 1 else torch.cat(x, dim) for x, dim in zip(zip(*results), (2, 1)))
        ctx.dense, ctx.parts = dense, parts
        ctx.save_for_backward(query, key, value, bias, out, lse, *(x for masks in tensors for x in masks))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        dense, parts = ctx.dense, ctx.parts
        query, key, value, bias, out, lse, *tensors = ctx.saved_tensors
        of_one = len(ops.MaskTensors._fields)
        masks = [tensors[i : i + of_one] for i in range(0, len(tensors), of_one)]
        masks = iter(masks if len(masks) == len(parts) else masks * len(parts))
        kv_heads, needs_dbias = key.shape[2], bias is not None and ctx.needs_input_grad[4]
        dout = torch.zeros_like(out) if dout is None else dout
        dquery, dkey, dvalue = (torch.empty_like(x) for x in (query, key, value))
        dbias = None
        if needs_dbias:
            # Of one number a key the portions' parts are summed, of one a pair there is one portion to a head.
            dtype = torch.promote_types(bias.dtype, torch.float32) if dense.bias_is_sharded else bias.dtype
            dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)

        def finish(kv: slice, sent: Sequence[collectives.Pending]) -> None:
            for grad, pending in zip((dkey, dvalue), sent):
                grad[:, :, kv] = dense.reduced(pending, 1, grad.dtype)

        under_way = None
        for kv, (keys, values) in gathered(dense, key, value, parts):
            rows, some_out, some_dout = (of_heads(x, kv, kv_heads, dim=2) for x in (query, out, dout))
            some_lse, some_dlse = (None if x is None else of_heads(x, kv, kv_heads) for x in (lse, dlse))
            some_bias = None if bias is None else of_heads(bias, kv, kv_heads)
            drows, dkeys, dvalues, some_dbias = ops.attention_backward(
                *(some_dout, some_dlse, rows, keys, values, some_bias, some_out, some_lse, *next(masks), *FIXED),
                *(dense.softmax_scale, dense.softcap, dense.is_causal, dense.deterministic, needs_dbias),
            )
            of_heads(dquery, kv, kv_heads, dim=2).copy_(drows)
            if needs_dbias:
                of_heads(dbias, kv, kv_heads).add_(some_dbias)
            sent = [dense.start_reduce(grad, 1) for grad in (dkeys, dvalues)]
            if under_way is not None:
                finish(*under_way)
            under_way = kv, sent
        finish(*under_way)
        if needs_dbias and dense.bias_is_sharded:
            dbias = dense.reduced(dense.start_reduce(dbias, 3), 3, bias.dtype)
        return None, dquery, dkey, dvalue, dbias


def gathered(
    dense: Dense, key: Tensor, value: Tensor, parts: Sequence[slice]
) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """Keys and values of all ranks, portion by portion; the next is on its way while one is worked on."""

    def start(kv: slice) -> list[collectives.Pending]:
        return [collectives.start_all_gather(padded(rows[:, :, kv], dense, 1), dense.group) for rows in (key, value)]

    under_way = start(parts[0])
    for i, kv in enumerate(parts):
        keys, values = (dense.whole(pending.wait(), 1) for pending in under_way)
        under_way = start(parts[i + 1]) if i + 1 < len(parts) else None
        yield kv, (keys, values)


def padded(shard: Tensor, dense: Dense, dim: int) -> Tensor:
    """A shard as long as the longest."""
    return collectives.padded(shard, max(dense.lengths), dim)


# Masks, of the rows that this rank has and the keys that there are to see


def dense_problem(
    shards: Shards,
    zigzag: bool,
    mask: Tensor | KeyIntervalMask | None,
    mask_kind: str | None,
    bias: Tensor | None,
    bias_kind: str | None,
    is_causal: bool,
    device: torch.device,
    **options,
) -> tuple[Dense, Tensor | None]:
    """What `GatheredAttention` takes: the problem, and the bias without the columns that nobody sees."""
    seqlen = sum(shards.lengths)
    by_sequence = zigzag and "pair" in (mask_kind, bias_kind)
    seen = shards.first + shards.own if is_causal and not zigzag else seqlen
    dense = Dense(
        *(shards, zigzag, by_sequence, seen, None, bias_kind == "key", is_causal),
        **options,
    )
    if mask_kind == "key":
        own = mask.to(torch.uint8)  # NCCL has no bool
        mask = dense.whole(collectives.all_gather(padded(own, dense, 3), dense.group), 3).bool()
    elif mask_kind == "pair":
        mask = mask[..., :seen]
    elif mask_kind == "intervals":
        whole = dense.whole(collectives.all_gather(padded(mask.intervals, dense, 3), dense.group), 3)
        intervals = (whole - shards.first).clamp_(0, shards.own)
        mask = KeyIntervalMask._of(intervals, mask.keys_per_row, mask.scattered, shards.own)
    if is_causal and zigzag:
        mask, is_causal = zigzag_causal(dense, mask, mask_kind, device), False
    bias = bias[..., :seen] if bias_kind == "pair" else bias
    return replace(dense, mask=mask, is_causal=is_causal), bias


def zigzag_causal(
    dense: Dense, mask: Tensor | None, mask_kind: str | None, device: torch.device
) -> Tensor | KeyIntervalMask:
    """Causality among zigzag shards, together with a bool mask: whatever the order of the keys, the rows that come at
    or after a key are the last ones of each chunk, and those of both chunks follow each other but where the key is in
    or before the first: an interval of the rows that this rank has."""
    size, rank, own = dense.shards.size, dense.shards.rank, dense.shards.own
    chunk = own // 2
    place = torch.arange(dense.seen, dtype=torch.int32, device=device)
    if not dense.by_sequence:  # the keys lie by rank
        of_rank, offset = place // own, place % own
        number = torch.where(offset < chunk, of_rank, 2 * size - 1 - of_rank)
        place = number * chunk + offset % chunk
    front, back = (number * chunk for number in zigzag_chunks(rank, size))
    start = (place - front).clamp(0, chunk) + (place - back).clamp(0, chunk)
    end = torch.full_like(start, own)
    if mask_kind in ("pair", "row"):
        return mask & (start <= torch.arange(own, device=device)[:, None])
    start, end = start[None, None], end[None, None]
    if mask_kind == "key":
        end = end.where(mask[:, :, 0], 0)
        start = start.expand_as(end)
    return KeyIntervalMask(start, end, rows=own)
