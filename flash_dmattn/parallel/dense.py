"""Context parallelism for masks whose rows see most keys: K and V are all-gathered, a few heads at a time.

The all-gather of the next head slice overlaps with attention over the current one. A rank holds at most two gathered
slices, and a third while zigzag shards are concatenated. The backward gathers K and V again and reduce-scatters their
gradients, one head slice at a time.

The rows of a rank are one range of the sequence, with zigzag shards two. A causal range sees the keys up to its own
end: there is one causal kernel call per range over these keys, in the order of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..attend import kernels_for, mask_operand
from ..call import Options
from ..masks import KeyIntervalMask, Problem, as_mask
from ..masks.choice import Sparse
from ..ops.conventions import accumulation_dtype
from ..ops.schema import Arguments, MaskTensors
from ..ops.transforms import savable
from . import collectives
from .layout import concat_zigzag, split_zigzag, zigzag_chunks
from .shards import Shards

# Bytes of K and V in a head slice; a slice has at least one head. Smaller kernel calls have too few work tiles to fill
# the GPU until their end.
HEAD_SLICE_BYTES = 128 << 20


@dataclass(frozen=True)
class RowRange:
    """A contiguous range of this rank's rows, for one kernel call."""

    rows: slice
    position: int  # of the first row in the sequence
    num_keys: int  # the rows see keys [0, num_keys) only
    mask: Tensor | KeyIntervalMask | None = None  # of these rows and keys

    @property
    def distance_shift(self) -> int:
        """Distance in the sequence minus distance in the call. A call aligns its last row with the last key."""
        return self.num_keys - (self.rows.stop - self.rows.start) - self.position

    def narrow(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class GatherPlan:
    """Attention of this rank's rows to the keys of all ranks."""

    shards: Shards
    zigzag: bool
    sequence_order: bool  # whether gathered zigzag shards are brought into the order of the sequence
    row_ranges: tuple[RowRange, ...]  # ordered by decreasing num_keys
    bias_is_sharded: bool  # a key bias, which is sharded like the keys
    sparse: Sparse
    options: Options
    unseen: Tensor | None = None  # bool ({B|1}, 1, {Hkv|1}, 1): keys that this rank's rows do not see; they may be NaN

    @property
    def num_keys(self) -> int:
        """No row of this rank sees a key from this one on."""
        return self.row_ranges[0].num_keys

    def pad(self, shard: Tensor, dim: int) -> Tensor:
        """Pads a shard to the length of the longest."""
        return collectives.pad_to(shard, max(self.shards.lengths), dim)

    def concat(self, gathered: Tensor, dim: int) -> Tensor:
        """The keys [0, num_keys) of gathered shards (R, ..)."""
        if self.sequence_order:
            return concat_zigzag(gathered, dim, self.num_keys)
        return collectives.concat_shards(gathered, self.shards.lengths, dim).narrow(dim, 0, self.num_keys)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        """The keys [0, num_keys) of all ranks."""
        return self.concat(collectives.all_gather(self.pad(shard, dim), self.shards.group), dim)

    def start_reduce_scatter(self, grad: Tensor, dim: int) -> collectives.PendingCollective:
        """Sends each rank the gradients of its keys; `grad` has the keys that `concat` returns."""
        shards = self.shards
        if self.sequence_order:
            grad = split_zigzag(grad, dim, shards.local_length, shards.size)
            send_counts = shards.lengths
        else:
            starts = [min(start, self.num_keys) for start in shards.starts]
            send_counts = [end - start for start, end in zip(starts, starts[1:])]
        # With causal contiguous shards, earlier ranks see no key of this rank.
        only_later = self.options["is_causal"] and not self.zigzag
        recv_counts = [0 if only_later and q < shards.rank else shards.local_length for q in range(shards.size)]
        return collectives.start_all_to_all(grad.movedim(dim, 0), send_counts, recv_counts, shards.group)

    def finish_reduce_scatter(self, pending: collectives.PendingCollective, dim: int, dtype: torch.dtype) -> Tensor:
        """Sums the received gradients in float32 or wider."""
        parts, length = pending.wait(), self.shards.local_length
        parts = parts.unflatten(0, (-1, length)) if length else parts[None]
        sum_dtype = accumulation_dtype(parts.dtype)
        return parts.sum(dim=0, dtype=sum_dtype).to(dtype).movedim(0, dim)


def head_slices(key: Tensor, num_keys: int, single: bool) -> list[slice]:
    """Slices of the key/value heads of about HEAD_SLICE_BYTES each; `single`: one slice."""
    batch, _, heads, head_dim = key.shape
    head_bytes = 2 * batch * num_keys * head_dim * key.element_size()
    width = heads if single else max(1, min(heads, HEAD_SLICE_BYTES // max(head_bytes, 1)))
    return [slice(start, min(start + width, heads)) for start in range(0, heads, width)]


@dataclass(frozen=True)
class CallSlice:
    """The parts of all tensors that one kernel call reads and writes: a row range and a slice of the KV heads."""

    row_range: RowRange
    kv: slice
    kv_heads: int  # Hkv

    def heads(self, x: Tensor, dim: int) -> Tensor:
        """The heads of a tensor with {H|Hkv|1} heads in `dim`."""
        if x.shape[dim] == 1:
            return x
        ratio = x.shape[dim] // self.kv_heads
        return x.narrow(dim, self.kv.start * ratio, (self.kv.stop - self.kv.start) * ratio)

    def rows(self, x: Tensor) -> Tensor:
        """The part of a tensor (B, S_r, H, D)."""
        return self.row_range.narrow(self.heads(x, 2), 1)

    def lse(self, x: Tensor | None) -> Tensor | None:
        """The part of a tensor (B, H, S_r)."""
        return None if x is None else self.row_range.narrow(self.heads(x, 1), 2)

    def bias(self, x: Tensor | None, is_key_bias: bool) -> Tensor | None:
        """The slice of a bias or of its gradient."""
        if x is None:
            return None
        x = self.heads(x, 1)[..., : self.row_range.num_keys]
        return x if is_key_bias else self.row_range.narrow(x, 2)

    def mask(self) -> Tensor | KeyIntervalMask | None:
        mask = self.row_range.mask
        if isinstance(mask, KeyIntervalMask):
            return mask._of_same_kind(self.heads(mask.intervals, 2))
        return None if mask is None else self.heads(mask, 1)


class GatheredAttention(torch.autograd.Function):
    """(plan, query, key, value, bias, *tables) -> (out, lse).

    query: (B, S_r, H, D); key, value: (B, S_r, Hkv, D); bias: a key bias of the local keys, or a dense bias of the
    local rows and the keys [0, plan.num_keys); tables: none, or a relative bias for each row range, whose distances are
    those of its calls. out: (B, S_r, H, D); lse: (B, H, S_r).
    """

    @staticmethod
    def forward(ctx, plan: GatherPlan, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *tables: Tensor):
        backend = kernels_for(query)
        batch, rows, heads, _ = query.shape
        kv_heads = key.shape[2]
        if plan.bias_is_sharded:
            bias = plan.all_gather(bias, 3)
        # The kernels sum the gradient of a dense bias that all heads share, within one call.
        single = bias is not None and not plan.bias_is_sharded and bias.shape[1] == 1
        kv_slices = head_slices(key, sum(plan.shards.lengths), single)
        masks_shared = all(r.mask is None or r.mask.shape[1] == 1 for r in plan.row_ranges)
        masks = []  # per head slice and row range; per row range if the heads share the masks
        out = query.new_empty(query.shape)
        lse = query.new_empty(batch, heads, rows, dtype=accumulation_dtype(query.dtype))
        for kv, keys, values in all_gather_kv(plan, key, value, kv_slices):
            for i, row_range in enumerate(plan.row_ranges):
                part = CallSlice(row_range, kv, kv_heads)
                q, k, v = part.rows(query), keys[:, : row_range.num_keys], values[:, : row_range.num_keys]
                if kv is kv_slices[0] or not masks_shared:
                    operand = mask_operand(
                        *(backend, as_mask(part.mask()), plan.sparse, q, k, bias),
                        Problem(q.shape[1], k.shape[1], plan.options["is_causal"]),
                        needs_grad=any(ctx.needs_input_grad),
                        deterministic=plan.options["deterministic"],
                    )
                    masks.append(operand or MaskTensors())
                table = part.heads(tables[i], 1) if tables else None
                tensors = (q, k, v, part.bias(bias, plan.bias_is_sharded), table, *masks[i if masks_shared else -1])
                part_out, part_lse = ops.attention_forward(*Arguments(*tensors, **plan.options))
                part.rows(out).copy_(part_out)
                part.lse(lse).copy_(part_lse)
        ctx.plan, ctx.kv_slices, ctx.num_tables = plan, kv_slices, len(tables)
        ctx.save_for_backward(query, key, value, bias, out, lse, *tables, *(savable(x) for mask in masks for x in mask))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        plan, kv_slices = ctx.plan, ctx.kv_slices
        query, key, value, bias, out, lse, *tensors = ctx.saved_tensors
        tables, tensors = tensors[: ctx.num_tables], tensors[ctx.num_tables :]
        mask_size = len(MaskTensors._fields)
        masks = [tensors[i : i + mask_size] for i in range(0, len(tensors), mask_size)]
        masks = iter(masks * (len(kv_slices) * len(plan.row_ranges) // len(masks)))
        kv_heads, needs_dbias = key.shape[2], bias is not None and ctx.needs_input_grad[4]
        dout = torch.zeros_like(out) if dout is None else dout
        dquery, dkey, dvalue = (torch.empty_like(x) for x in (query, key, value))
        needs_dtables = bool(tables) and ctx.needs_input_grad[5]
        dtables = [torch.zeros_like(table) if needs_dtables else None for table in tables]
        dbias = None
        if needs_dbias:
            # Calls add to the gradient of a key bias; each call has its own part of the gradient of a dense bias.
            dtype = accumulation_dtype(bias.dtype) if plan.bias_is_sharded else bias.dtype
            dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)

        def finish(kv: slice, pending: collectives.PendingCollective) -> None:
            dkey[:, :, kv], dvalue[:, :, kv] = plan.finish_reduce_scatter(pending, 1, dkey.dtype).unbind(2)

        in_flight = None
        for kv, keys, values in all_gather_kv(plan, key, value, kv_slices):
            dkeys = dvalues = None
            for i, row_range in enumerate(plan.row_ranges):
                part, num_keys = CallSlice(row_range, kv, kv_heads), row_range.num_keys
                part_bias = part.bias(bias, plan.bias_is_sharded)
                tensors = (part.rows(query), keys[:, :num_keys], values[:, :num_keys], part_bias)
                table = part.heads(tables[i], 1) if tables else None
                dq, dk, dv, part_dbias, dtable = ops.attention_backward(
                    *(part.rows(dout), part.lse(dlse), part.rows(out), part.lse(lse), needs_dbias, needs_dtables),
                    *Arguments(*tensors, table, *next(masks), **plan.options),
                )
                if needs_dtables:
                    part.heads(dtables[i], 1).add_(dtable)
                part.rows(dquery).copy_(dq)
                if needs_dbias:
                    part.bias(dbias, plan.bias_is_sharded).add_(part_dbias)
                if dkeys is None:  # the first row range sees all keys
                    dkeys, dvalues = dk, dv
                else:
                    dkeys[:, :num_keys].add_(dk)
                    dvalues[:, :num_keys].add_(dv)
            pending = plan.start_reduce_scatter(torch.stack((dkeys, dvalues), 2), 1)
            if in_flight is not None:
                finish(*in_flight)
            in_flight = kv, pending
        finish(*in_flight)
        if needs_dbias and plan.bias_is_sharded:
            dbias = plan.finish_reduce_scatter(plan.start_reduce_scatter(dbias, 3), 3, bias.dtype)
        return None, dquery, dkey, dvalue, dbias, *dtables


def all_gather_kv(
    plan: GatherPlan, key: Tensor, value: Tensor, kv_slices: Sequence[slice]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields (head slice, keys, values) of all ranks. The next slice is in flight meanwhile.

    K and V share one collective. It starts before the copies that concatenate the current slice, so that it gets its
    SMs before attention occupies all of them. A collective without free SMs would wait for attention on this rank and
    hold its SMs idle on the other ranks.
    """

    def start(kv: slice) -> collectives.PendingCollective:
        rows = torch.stack((key[:, :, kv], value[:, :, kv]), 2)
        return collectives.start_all_gather(plan.pad(rows, 1), plan.shards.group)

    in_flight = start(kv_slices[0])
    for i, kv in enumerate(kv_slices):
        gathered = in_flight.wait()
        in_flight = start(kv_slices[i + 1]) if i + 1 < len(kv_slices) else None
        keys, values = plan.concat(gathered, 1).unbind(2)
        del gathered
        if plan.unseen is not None:
            unseen = plan.unseen if plan.unseen.shape[2] == 1 else plan.unseen[:, :, kv]
            keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        yield kv, keys, values


def make_gather_plan(
    shards: Shards,
    zigzag: bool,
    mask: Tensor | KeyIntervalMask | None,
    mask_kind: str | None,
    bias: Tensor | None,
    bias_kind: str | None,
    sparse: Sparse,
    options: Options,
    by_distance: bool,
) -> tuple[GatherPlan, Tensor | None]:
    """The first and the last argument of `GatheredAttention`: the plan, and the bias without columns that no row sees.

    Gathers key masks and interval masks. The kinds are those of `agreement.KINDS`. by_distance: there is a relative
    bias, which needs ranges of consecutive rows and keys in the order of the sequence.
    """
    length, seqlen, is_causal = shards.local_length, sum(shards.lengths), options["is_causal"]
    in_chunks = is_causal or by_distance
    if zigzag and in_chunks:
        chunk = length // 2
        front, back = zigzag_chunks(shards.rank, shards.size)
        row_ranges = (
            RowRange(slice(chunk, length), back * chunk, (back + 1) * chunk if is_causal else seqlen),
            RowRange(slice(0, chunk), front * chunk, (front + 1) * chunk if is_causal else seqlen),
        )
    else:
        start = shards.local_start
        row_ranges = (RowRange(slice(0, length), start, start + length if is_causal else seqlen),)
    sequence_order = zigzag and (in_chunks or "dense" in (mask_kind, bias_kind))
    plan = GatherPlan(shards, zigzag, sequence_order, row_ranges, bias_kind == "key", sparse, options)
    if mask_kind == "key":
        mask = plan.all_gather(mask.to(torch.uint8), 3).bool()  # NCCL does not support bool
    elif mask_kind == "intervals":
        intervals = (plan.all_gather(mask.intervals, 3) - shards.local_start).clamp_(0, length)
        mask = KeyIntervalMask._of(intervals, mask.keys_per_row, mask.unstructured, length)
    if isinstance(mask, Tensor):
        masks = [r.narrow(mask, 2) if mask.shape[2] == length else mask for r in row_ranges]
        masks = [x if mask_kind == "row" else x[..., : r.num_keys] for x, r in zip(masks, row_ranges)]
    else:  # interval masks need contiguous shards, which have one range
        masks = [mask] * len(row_ranges)
    row_ranges = tuple(replace(r, mask=x) for r, x in zip(row_ranges, masks))
    return replace(plan, row_ranges=row_ranges), bias[..., : plan.num_keys] if bias_kind == "dense" else bias
