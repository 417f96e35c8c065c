"""Attention whose rows see most keys: keys and values are gathered from all ranks, a few heads at a time.

While the kernels go over some heads, the next are on their way; no rank ever holds more than two portions, but for a
third while zigzag shards are brought into order. They are gathered once more in the backward, which sends each rank the
gradients of its keys, again a portion at a time.

A rank's rows are one run of the sequence, or with zigzag shards two. Causality shows each run the keys up to its own
last: a call of the kernels for each run, over so many keys in the order of the sequence, as causal as one GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..attend import kernels_for, mask_operand
from ..masks import KeyIntervalMask, Problem, as_mask
from ..ops.schema import Arguments, MaskTensors
from . import collectives
from .layout import zigzag_by_rank, zigzag_chunks, zigzag_joined
from .shards import Shards

# A portion of keys and values is made this large where one head is smaller: a call over few heads has so few blocks of
# keys that the last ones leave much of a GPU idle.
PORTION_BYTES = 128 << 20


@dataclass(frozen=True)
class Run:
    """Rows of this rank that follow each other in the sequence, for one call of the kernels."""

    rows: slice
    seen: int  # how many keys, from the first, there are to see
    mask: Tensor | KeyIntervalMask | None  # of these rows and keys

    def of_rows(self, rows: Tensor, dim: int) -> Tensor:
        return rows.narrow(dim, self.rows.start, self.rows.stop - self.rows.start)


@dataclass(frozen=True)
class Dense:
    """Attention of this rank's rows to keys of all ranks."""

    shards: Shards
    zigzag: bool
    in_sequence: bool  # whether gathered keys of a zigzag layout are brought into the order of the sequence
    runs: tuple[Run, ...]  # those that see more keys first
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

    @property
    def options(self) -> dict[str, float | bool]:
        """The operators' arguments that are no tensors."""
        names = ("softmax_scale", "softcap", "is_causal", "deterministic")
        return {name: getattr(self, name) for name in names}

    @property
    def seen(self) -> int:
        """How many of the gathered keys, from the first, there are to see."""
        return self.runs[0].seen

    def whole(self, gathered: Tensor, dim: int) -> Tensor:
        """Of shards (R, ..) the keys that there are to see."""
        if self.in_sequence:
            return zigzag_joined(gathered, dim, self.seen)
        return collectives.joined(gathered, self.lengths, dim).narrow(dim, 0, self.seen)

    def start_reduce(self, grad: Tensor, dim: int) -> collectives.Pending:
        """Sends each rank its part of what `whole` gave a gradient for."""
        if self.in_sequence:
            grad = zigzag_by_rank(grad, dim, self.shards.own, self.shards.size)
            to_send = self.lengths
        else:
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


def mask_of_heads(mask: Tensor | KeyIntervalMask | None, kv: slice, kv_heads: int) -> Tensor | KeyIntervalMask | None:
    if isinstance(mask, KeyIntervalMask):
        return mask._of_same_kind(of_heads(mask.intervals, kv, kv_heads, dim=2))
    return None if mask is None else of_heads(mask, kv, kv_heads)


def bias_of(bias: Tensor | None, dense: Dense, run: Run, kv: slice, kv_heads: int) -> Tensor | None:
    """Of a bias, or its gradient, what a call takes or gives."""
    if bias is None:
        return None
    bias = of_heads(bias, kv, kv_heads)[..., : run.seen]
    return bias if dense.bias_is_sharded else run.of_rows(bias, 2)


class GatheredAttention(torch.autograd.Function):
    """(dense, query, key, value, bias) -> (out, lse), with query (B, S_r, H, D) and the own shards of key and value."""

    @staticmethod
    def forward(ctx, dense: Dense, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None):
        backend = kernels_for(query)
        batch, own, heads, _ = query.shape
        kv_heads = key.shape[2]
        if dense.bias_is_sharded:
            bias = dense.whole(collectives.all_gather(padded(bias, dense, 3), dense.group), 3)
        # The gradient of a bias of pairs that all heads share is summed by the kernels, in one call.
        one_call = bias is not None and not dense.bias_is_sharded and bias.shape[1] == 1
        parts = portions(key, sum(dense.lengths), one_call)
        same_for_heads = all(run.mask is None or run.mask.shape[1] == 1 for run in dense.runs)
        masks = []  # of each portion's runs; where heads share them, of the first portion's
        out = query.new_empty(query.shape)
        lse = query.new_empty(batch, heads, own, dtype=torch.promote_types(query.dtype, torch.float32))
        for kv, (keys, values) in gathered(dense, key, value, parts):
            for i, run in enumerate(dense.runs):
                rows = run.of_rows(of_heads(query, kv, kv_heads, dim=2), 1)
                some_keys, some_values = keys[:, : run.seen], values[:, : run.seen]
                if kv is parts[0] or not same_for_heads:
                    mask = mask_of_heads(run.mask, kv, kv_heads)
                    operand = mask_operand(
                        *(backend, as_mask(mask), dense.sparse, rows, some_keys, bias),
                        Problem(rows.shape[1], run.seen, dense.is_causal),
                        needs_grad=any(ctx.needs_input_grad),
                        deterministic=dense.deterministic,
                    )
                    masks.append(operand or MaskTensors())
                some_bias = bias_of(bias, dense, run, kv, kv_heads)
                tensors = (rows, some_keys, some_values, some_bias, *masks[i if same_for_heads else -1])
                some_out, some_lse = ops.attention_forward(*Arguments(*tensors, **dense.options))
                run.of_rows(of_heads(out, kv, kv_heads, dim=2), 1).copy_(some_out)
                run.of_rows(of_heads(lse, kv, kv_heads), 2).copy_(some_lse)
        ctx.dense, ctx.parts = dense, parts
        ctx.save_for_backward(query, key, value, bias, out, lse, *(x for mask in masks for x in mask))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        dense, parts = ctx.dense, ctx.parts
        query, key, value, bias, out, lse, *tensors = ctx.saved_tensors
        of_one = len(MaskTensors._fields)
        masks = [tensors[i : i + of_one] for i in range(0, len(tensors), of_one)]
        masks = iter(masks * (len(parts) * len(dense.runs) // len(masks)))
        kv_heads, needs_dbias = key.shape[2], bias is not None and ctx.needs_input_grad[4]
        dout = torch.zeros_like(out) if dout is None else dout
        dquery, dkey, dvalue = (torch.empty_like(x) for x in (query, key, value))
        dbias = None
        if needs_dbias:
            # Of one number a key the calls' parts are summed; of one a pair each call has its own.
            dtype = torch.promote_types(bias.dtype, torch.float32) if dense.bias_is_sharded else bias.dtype
            dbias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)

        def finish(kv: slice, sent: collectives.Pending) -> None:
            dkey[:, :, kv], dvalue[:, :, kv] = dense.reduced(sent, 1, dkey.dtype).unbind(2)

        under_way = None
        for kv, (keys, values) in gathered(dense, key, value, parts):
            dkeys = dvalues = None
            for run in dense.runs:
                of_rows = (run.of_rows(of_heads(x, kv, kv_heads, dim=2), 1) for x in (dout, query, out, dquery))
                of_lse = (None if x is None else run.of_rows(of_heads(x, kv, kv_heads), 2) for x in (dlse, lse))
                (some_dout, rows, some_out, some_dquery), (some_dlse, some_lse) = of_rows, of_lse
                some_bias = bias_of(bias, dense, run, kv, kv_heads)
                tensors = (rows, keys[:, : run.seen], values[:, : run.seen], some_bias, *next(masks))
                drows, some_dkeys, some_dvalues, some_dbias = ops.attention_backward(
                    *(some_dout, some_dlse, some_out, some_lse, needs_dbias),
                    *Arguments(*tensors, **dense.options),
                )
                some_dquery.copy_(drows)
                if needs_dbias:
                    bias_of(dbias, dense, run, kv, kv_heads).add_(some_dbias)
                if dkeys is None:  # of all keys
                    dkeys, dvalues = some_dkeys, some_dvalues
                else:
                    dkeys[:, : run.seen].add_(some_dkeys)
                    dvalues[:, : run.seen].add_(some_dvalues)
            sent = dense.start_reduce(torch.stack((dkeys, dvalues), 2), 1)
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
    """Keys and values of all ranks, portion by portion; the next is on its way while one is worked on.

    Both go in one collective, started before the copies that join the portion at hand: so it has its multiprocessors
    before attention takes all. One that found none would start on one rank behind attention, and keep those that it
    has on another until then.
    """

    def start(kv: slice) -> collectives.Pending:
        rows = torch.stack((key[:, :, kv], value[:, :, kv]), 2)
        return collectives.start_all_gather(padded(rows, dense, 1), dense.group)

    under_way = start(parts[0])
    for i, kv in enumerate(parts):
        shards = under_way.wait()
        under_way = start(parts[i + 1]) if i + 1 < len(parts) else None
        keys, values = dense.whole(shards, 1).unbind(2)
        del shards
        yield kv, (keys, values)


def padded(shard: Tensor, dense: Dense, dim: int) -> Tensor:
    """A shard as long as the longest."""
    return collectives.padded(shard, max(dense.lengths), dim)


# The problem of a call


def dense_problem(
    shards: Shards,
    zigzag: bool,
    mask: Tensor | KeyIntervalMask | None,
    mask_kind: str | None,
    bias: Tensor | None,
    bias_kind: str | None,
    is_causal: bool,
    **options,
) -> tuple[Dense, Tensor | None]:
    """What `GatheredAttention` takes: the problem, and the bias without the columns that nobody sees."""
    own, seqlen = shards.own, sum(shards.lengths)
    if zigzag and is_causal:
        chunk = own // 2
        front, back = zigzag_chunks(shards.rank, shards.size)
        runs = Run(slice(chunk, own), (back + 1) * chunk, None), Run(slice(0, chunk), (front + 1) * chunk, None)
    else:
        runs = (Run(slice(0, own), shards.first + own if is_causal else seqlen, None),)
    in_sequence = zigzag and (is_causal or "pair" in (mask_kind, bias_kind))
    dense = Dense(shards, zigzag, in_sequence, runs, bias_kind == "key", is_causal, **options)
    if mask_kind == "key":
        flags = mask.to(torch.uint8)  # NCCL has no bool
        mask = dense.whole(collectives.all_gather(padded(flags, dense, 3), dense.group), 3).bool()
    elif mask_kind == "intervals":
        whole = dense.whole(collectives.all_gather(padded(mask.intervals, dense, 3), dense.group), 3)
        intervals = (whole - shards.first).clamp_(0, own)
        mask = KeyIntervalMask._of(intervals, mask.keys_per_row, mask.scattered, own)
    runs = tuple(replace(run, mask=mask_of_run(mask, mask_kind, run, own)) for run in runs)
    return replace(dense, runs=runs), bias[..., : dense.seen] if bias_kind == "pair" else bias


def mask_of_run(
    mask: Tensor | KeyIntervalMask | None, mask_kind: str | None, run: Run, own: int
) -> Tensor | KeyIntervalMask | None:
    if not isinstance(mask, Tensor):  # intervals are of contiguous shards, which are one run
        return mask
    mask = run.of_rows(mask, 2) if mask.shape[2] == own else mask
    return mask if mask_kind == "row" else mask[..., : run.seen]
