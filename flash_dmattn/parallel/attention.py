"""Attention over a sequence that is sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from ..attend import add_row_bias, autocast_dtype, kernel_rows, split_row_bias, without_padding
from ..biases import cast_bias
from ..broadcast import expand_shared
from ..interface import flash_dmattn_func
from ..masks import KeyIntervalMask
from ..masks.choice import Sparse
from ..relative import shifted
from ..sinks import apply_sinks
from . import halo
from .agreement import EMPTY_SIGNATURE, agree, kinds_of, signature_of
from .call import ShardedCall, ShardedMask, check_call, check_lengths, check_whole
from .dense import GatheredAttention, make_gather_plan
from .groups import Group, exchange_on_host, resolve_group
from .layout import Layout
from .shards import Shards
from .topk import plan_for_topk

Function = TypeVar("Function", bound=Callable)


def uncompiled(function: Function) -> Function:
    """`torch.compiler.disable`, which has no types."""
    return torch.compiler.disable(function)


@uncompiled
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: ShardedMask = None,
    attn_bias: Tensor | None = None,
    *,
    group: Group = None,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool | None = False,
    softcap: float | None = 0.0,
    deterministic: bool | None = False,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: Sparse = "auto",
    cu_seqlens: Tensor | None = None,
    layout: Layout = "contiguous",
    fixed_shapes: bool | None = None,
    shard_lengths: Sequence[int] | None = None,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_dmattn_func` over a sequence of S rows and keys that is sharded over R ranks; rank r holds S_r of them.

    Each rank returns the output of its own rows. The gradients of key, value and bias are returned to the ranks that
    hold them. A replicated bias ({B|1}, {H|Hkv|1}, 1, 1) gets on each rank the gradient of that rank's rows.

    Every rank of the group must make the call and its backward, with equal arguments except the tensors. If a rank
    rejects its arguments, all ranks raise. If a rank fails later, for example out of memory, the others wait for the
    group's timeout.

    Calls with cu_seqlens, with `window_size` below S, or with a KeyIntervalMask (sliding windows, documents) and
    neither a dense bias nor `relative_bias`, fetch only the keys that the rows see. All other calls all-gather K and V,
    a few heads at a time (docs/parallel.md).

    Args:
        query: (B, S_r, H, D), in the dtypes of `flash_dmattn_func`. With cu_seqlens (S_r, H, D).
        key: (B, S_r, Hkv, D). With cu_seqlens (S_r, Hkv, D).
        value: (B, S_r, Hkv, Dv). With cu_seqlens (S_r, Hkv, Dv).
        attn_mask: a KeyIntervalMask ({B|1}, {H|Hkv|1}, S_r) of the local keys whose starts and ends count the rows of
            the whole sequence (`shard` creates it from a whole mask); or bool, True = visible: per key
            ({B|B/n|1}, {H|Hkv|1}, 1, S_r) of the local keys, dense ({B|B/n|1}, {H|Hkv|1}, S_r, S) of the local rows and
            all keys in the order of the sequence, or per row ({B|B/n|1}, {H|Hkv|1}, {S_r|1}, 1). With cu_seqlens
            bool (S_r, {H|Hkv|1}), or a KeyIntervalMask that counts the rows of each key's own sequence.
        attn_bias: the shapes of a bool mask, in query's dtype or float32.
        group: a torch.distributed.ProcessGroup, a one-dimensional DeviceMesh, or None: all processes.
        softmax_scale, is_causal, softcap, deterministic, sparse: as in `flash_dmattn_func`. A softmax_scale that is a
            tensor gets on each rank the gradient of that rank's rows.
        return_lse: also return lse, which is differentiable.
        window_size: causal top-k selection, as in `flash_dmattn_func`. Each rank selects for its own rows, among its
            own keys and the window_size best of each earlier rank. With cu_seqlens each sequence has its own selection.
        cu_seqlens: int32 (sequences + 1), from 0 to S: packed sequences, which may cross shard boundaries. The same on
            every rank; on the CPU the values are compared.
        layout: "contiguous": shards of any lengths in rank order; or "zigzag" (see `shard`, `unshard`, `positions`),
            which balances causal work, for calls without window_size, cu_seqlens and a KeyIntervalMask.
        fixed_shapes: with window_size, whether to send a fixed number of keys instead of the exact one, at most
            (R - 1) * window_size per head. Avoids synchronization and permits CUDA graphs. None: only with two ranks,
            where the fixed number is not larger.
        shard_lengths: S_r of every rank. None: the ranks exchange their lengths and compare their arguments on the
            hosts. If given, nothing is compared: arguments that do not fit are undefined behaviour, and a mask or bias
            (.., 1, 1) on a rank with one row is one per key.
        relative_bias: as in `flash_dmattn_func`, by distances in the whole sequence; the same on every rank. Each rank
            gets the gradient of its rows. Such calls all-gather K and V, and refuse window_size, cu_seqlens and grids.
        sinks: as in `flash_dmattn_func`; each rank gets the gradient of its rows.

    Returns:
        out (B, S_r, H, Dv), with cu_seqlens (S_r, H, Dv);
        with return_lse (out, lse), lse (B, H, S_r) or (H, S_r), float32 (float64 for float64), -inf for rows without a
        visible key.

    Raises:
        ValueError: a shape or value that does not fit, or that differs between ranks.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, kernels that were not built, torch.distributed not initialized;
            its subclass RankError if another rank rejected its arguments.
    """
    group = resolve_group(group)
    call = ShardedCall(
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic),
        return_lse=return_lse,
        window_size=window_size,
        sparse=sparse,
        cu_seqlens=cu_seqlens,
        layout=layout,
        fixed_shapes=fixed_shapes,
        relative_bias=relative_bias,
        sinks=sinks,
    )
    error, signature = None, EMPTY_SIGNATURE
    try:
        call = check_call(call)
        signature = signature_of(call)
    except Exception as caught:  # any error: the other ranks must not wait for this one
        if shard_lengths is not None:
            raise
        error = caught
    if shard_lengths is None:
        lengths, mask_kind, bias_kind = agree(exchange_on_host(group, signature, error))
    else:
        lengths = check_lengths(shard_lengths, signature.rows, group)
        mask_kind, bias_kind = kinds_of((signature,), sum(lengths))
    check_whole(call, lengths)
    if mask_kind == "intervals":  # sums and differences of bounds stay within 32 bits
        call.attn_mask = call.attn_mask._of_same_kind(call.attn_mask.intervals.clamp(0, sum(lengths)))
    if bias_kind == "dense" or (bias_kind == "row" and call.attn_bias.shape[2] == signature.rows):
        call.attn_bias = cast_bias(call.attn_bias, autocast_dtype(call.attn_bias))
    out, lse = attend(call, Shards(weakref.ref(group), lengths), mask_kind, bias_kind)
    if call.sinks is not None:
        out = apply_sinks(out, lse, call.sinks)
    if cu_seqlens is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def attend(call: ShardedCall, shards: Shards, mask_kind: str | None, bias_kind: str | None) -> tuple[Tensor, Tensor]:
    """(out (B, S_r, H, D), lse (B, H, S_r)) by the halo or the all-gather path."""
    is_varlen = call.cu_seqlens is not None
    if call.window_size is not None and not is_varlen and call.window_size >= sum(shards.lengths):
        call = replace(call, window_size=None)  # every row sees all its causal keys
    if shards.size == 1 and not is_varlen:
        return attend_locally(call, call.key, call.value, call.attn_mask, call.attn_bias, call.window_size)
    if call.query.shape[0] == 0 or call.query.shape[2] == 0:  # empty on every rank
        out, lse = attend_locally(call, call.key, call.value, None, None)
        # The gradient of the bias is zero, not None.
        return out if call.attn_bias is None else out + call.attn_bias[..., :0].sum().to(out.dtype), lse
    sees_few = mask_kind == "intervals" and bias_kind != "dense" and call.relative_bias is None
    if call.window_size is not None or is_varlen or sees_few:
        return attend_with_halo(call, shards, bias_kind)
    return attend_with_all_gather(call, shards, mask_kind, bias_kind)


def attend_locally(
    call: ShardedCall,
    key: Tensor,
    value: Tensor,
    mask: ShardedMask,
    bias: Tensor | None,
    window_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the local rows to keys on this rank."""
    has_mask = mask is not None or window_size is not None
    return flash_dmattn_func(
        *(call.query, key, value, mask, bias, call.softmax_scale, call.is_causal, call.softcap, call.deterministic),
        return_lse=True,
        window_size=window_size,
        sparse=call.sparse if has_mask else "auto",
        relative_bias=call.relative_bias,
    )


def attend_with_halo(call: ShardedCall, shards: Shards, bias_kind: str | None) -> tuple[Tensor, Tensor]:
    """For rows that see few keys of other ranks: fetches these keys."""
    bias, key_heads = call.attn_bias, call.key.shape[2]
    global_mask = mask = None
    if call.window_size is None:
        global_mask = global_intervals(call, shards)
        plan = halo.plan_for_intervals(shards, global_mask, key_heads)
    else:
        fixed_shapes = shards.size == 2 if call.fixed_shapes is None else call.fixed_shapes
        plan, mask = plan_for_topk(shards, bias, call.window_size, call.cu_seqlens, key_heads, fixed_shapes)
    rows = [call.key, call.value]
    if bias_kind == "key":
        # If batch elements or heads fetch different keys, the bias cannot be shared between them.
        sizes = max(bias.shape[0], plan.batches), max(bias.shape[1], plan.heads)
        bias = expand_shared(bias, *sizes).expand(*sizes, -1, -1)
        rows.append(bias[:, :, 0].transpose(1, 2))
    if global_mask is not None:
        rows.append(global_mask.intervals.permute(1, 3, 2, 0))  # (B, S, H, 2)
    key, value, *rest = halo.HaloExchange.apply(plan, *rows)
    if global_mask is not None:
        mask = halo.mask_from_rows(shards, rest.pop(), global_mask)
    if rest:
        bias = rest.pop().transpose(1, 2).unsqueeze(2).contiguous()
    return attend_locally(call, key, value, mask, bias)


def global_intervals(call: ShardedCall, shards: Shards) -> KeyIntervalMask:
    """The rows of the whole sequence that see each local key: mask, causality and packed sequences as intervals."""
    mask = call.attn_mask
    position = shards.local_positions(call.key.device, torch.int32)
    keys_per_row, unstructured = None, False
    if call.cu_seqlens is None:
        start, end = mask.intervals
    else:
        sequence = torch.searchsorted(call.cu_seqlens.contiguous(), position, right=True) - 1
        first_row, end_row = call.cu_seqlens[sequence][None, None], call.cu_seqlens[sequence + 1][None, None]
        start, end = first_row, end_row
        if isinstance(mask, KeyIntervalMask):
            start, end = (rows.T[None] + first_row for rows in mask.intervals)
            start, end = torch.maximum(start, first_row), torch.minimum(end, end_row)
        elif mask is not None:
            end = end.where(mask[:, :, 0], 0)
    if isinstance(mask, KeyIntervalMask):
        keys_per_row, unstructured = mask.keys_per_row, mask.unstructured
    start = torch.maximum(start, position) if call.is_causal else start
    return KeyIntervalMask._of(torch.stack(torch.broadcast_tensors(start, end)), keys_per_row, unstructured)


def attend_with_all_gather(
    call: ShardedCall, shards: Shards, mask_kind: str | None, bias_kind: str | None
) -> tuple[Tensor, Tensor]:
    """For rows that see most keys: all-gathers K and V."""
    query, bias, row_bias, unseen = call.query, call.attn_bias, None, None
    if bias_kind == "row":
        query, row_bias, masked_rows, unseen = split_row_bias(bias, query, call.key.shape[2])
        bias = bias_kind = None
    zigzag, options = call.layout == "zigzag", call.options()
    relative_bias = call.relative_bias
    plan, bias = make_gather_plan(
        *(shards, zigzag, call.attn_mask, mask_kind, bias, bias_kind, call.sparse, options),
        by_distance=relative_bias is not None,
    )
    plan = replace(plan, unseen=unseen)
    tables = [] if relative_bias is None else [shifted(relative_bias, r.distance_shift) for r in plan.row_ranges]
    out, lse = GatheredAttention.apply(plan, *kernel_rows(query, call.key, call.value), bias, *tables)
    out = without_padding(out, call.value.shape[-1])
    return (out, lse) if row_bias is None else add_row_bias(out, lse, row_bias, masked_rows)
