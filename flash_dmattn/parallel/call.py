"""The arguments of `context_parallel_attention`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import checks
from ..arguments import check_cu_seqlens, is_host_readable, require_bool, require_count, require_tensor, shape_of
from ..attend import accumulated, apply_scale_tensor, autocast, kernels_for
from ..broadcast import is_one_of
from ..call import Call
from ..masks import KeyIntervalMask, as_mask
from ..masks.topk import refuse_nan
from ..ops.schema import NO_MASK
from ..sinks import check_sinks
from .layout import Layout, check_layout, zigzag_chunk_length

ShardedMask = Union[Tensor, KeyIntervalMask, None]


@dataclass(eq=False)
class ShardedCall(Call):
    """The arguments of one rank. After `check_call` packed sequences are one batch element, softmax_scale is a number,
    and attn_mask is 4-dimensional bool or a KeyIntervalMask, of variable length if the call is."""

    cu_seqlens: Tensor | None = None
    layout: Layout = "contiguous"
    fixed_shapes: bool | None = None

    def sliding_window(self) -> str:
        if self.cu_seqlens is None:
            return "attn_mask=shard(KeyIntervalMask.sliding_window(S, S, (left, right))) of all S keys"
        whole = "KeyIntervalMask.sliding_window_varlen(cu_seqlens, cu_seqlens, S, (left, right))"
        return f"attn_mask=shard({whole}) of all S keys"


def check_call(call: ShardedCall) -> ShardedCall:
    """Checks all that does not depend on other ranks. Applies autocast and defaults."""
    mask, cu_seqlens = call.attn_mask, call.cu_seqlens
    for name in ("query", "key", "value", "attn_mask", "attn_bias", "relative_bias", "sinks"):
        if isinstance(getattr(call, name), DTensor):
            raise TypeError(f"{name} must be this rank's shard as a plain tensor, got a DTensor: pass its to_local()")
    kernels_for(call.query)
    checks.check_options(call)
    check_layout(call.layout)
    if call.fixed_shapes is not None:
        require_bool("fixed_shapes", call.fixed_shapes)
    if mask is not None and not isinstance(mask, KeyIntervalMask):
        require_tensor("attn_mask", mask, "a bool torch.Tensor or a KeyIntervalMask")  # KeyLists serve one rank only
    # Whether a float32 bias is cast depends on its kind, which the ranks determine together.
    autocast(call, keeps_float32=True)
    query, key, value, bias = call.query, call.key, call.value, call.attn_bias
    is_varlen = cu_seqlens is not None
    if isinstance(mask, KeyIntervalMask) and mask.is_varlen != is_varlen:
        accepted = "(S_r, {H|Hkv|1}) with cu_seqlens" if is_varlen else "({B|1}, {H|Hkv|1}, S_r) without cu_seqlens"
        raise ValueError(f"attn_mask must be a KeyIntervalMask {accepted}, got shape {shape_of(mask)}")
    if is_varlen:
        check_cu_seqlens("cu_seqlens", cu_seqlens, query, "query")
        query, key, value, mask, bias = batched(query, key, value, mask, bias)
    check_shapes(query, key, value, mask, bias)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"a rank must have as many keys as rows, got {query.shape[1]} rows and {key.shape[1]} keys")
    if call.window_size is not None:
        checks.check_window(mask, bias, query, key, call.is_causal, is_varlen)
        refuse_nan(bias, name="attn_bias")
    if call.layout == "zigzag":
        contiguous_only = {
            "window_size": call.window_size is not None,
            "KeyIntervalMask": isinstance(mask, KeyIntervalMask),
            "cu_seqlens": is_varlen,
        }
        for name, is_given in contiguous_only.items():
            if is_given:
                raise ValueError(f"layout='zigzag' does not support {name}, got it: use layout='contiguous'")
    for name, x in (("attn_mask", mask), ("attn_bias", bias)):
        if is_varlen and isinstance(x, Tensor) and x.shape[3] != key.shape[1]:
            raise ValueError(f"{name} must have one value per key with cu_seqlens, got shape {shape_of(x)}")
    call = replace(call, query=query, key=key, value=value, attn_mask=mask, attn_bias=bias)
    if call.relative_bias is not None:
        call.relative_bias = checked_relative_bias(call)
    if call.sinks is not None:
        check_sinks(call.sinks, query)
    apply_scale_tensor(call)
    return replace(call, **call.options())


def checked_relative_bias(call: ShardedCall) -> Tensor:
    """relative_bias in the type in which the kernels compute."""
    require_tensor("relative_bias", call.relative_bias)
    if call.relative_bias.ndim == 4:
        raise ValueError(f"relative_bias of a grid is for one rank, got shape {shape_of(call.relative_bias)}")
    checks.check_relative_bias(call)
    for name in ("window_size", "cu_seqlens"):
        if getattr(call, name) is not None:
            raise ValueError(
                f"relative_bias is for calls that all-gather K and V, got {name}: the keys that a rank fetches for it "
                "have no common distance from its rows"
            )
    return accumulated(call.relative_bias, call.query)


def batched(query: Tensor, key: Tensor, value: Tensor, mask: ShardedMask, bias: Tensor | None) -> tuple:
    """Packed sequences as one batch element: (S_r, heads, ..) to (1, S_r, heads, ..)."""
    for name, rows in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, rows)
        if rows.ndim != 3:
            raise ValueError(f"{name} must be (S_r, heads, D) with cu_seqlens, got shape {shape_of(rows)}")

    per_key = []
    for name, x in (("attn_mask", mask), ("attn_bias", bias)):
        if isinstance(x, Tensor) and x.ndim != 2:
            raise ValueError(f"{name} must be (S_r, {{H|Hkv|1}}) with cu_seqlens, got shape {shape_of(x)}")
        per_key.append(x.T[None, :, None] if isinstance(x, Tensor) else x)
    return query[None], key[None], value[None], *per_key


def check_shapes(query: Tensor, key: Tensor, value: Tensor, mask: ShardedMask, bias: Tensor | None) -> None:
    """Checks all shapes but the last two dimensions of mask and bias, which depend on the other ranks' lengths."""
    checks.check_tensors(Call(query, key, value), NO_MASK, None)

    def check_beside(x: ShardedMask, mask: ShardedMask, bias: Tensor | None) -> None:
        keys = key
        if isinstance(x, Tensor) and x.ndim == 4 and not is_one_of(x.shape[3], 1, key.shape[1]):
            keys = key.new_empty(1).expand(key.shape[0], x.shape[3], *key.shape[2:])
        operands = NO_MASK if mask is None else as_mask(mask).operands()
        checks.check_tensors(Call(query, keys, keys), operands, bias)

    if isinstance(mask, KeyIntervalMask):
        mask = mask.sequence(0, mask.keys) if mask.is_varlen else mask
        if mask.keys != key.shape[1]:
            raise ValueError(
                f"attn_mask must be of this rank's {key.shape[1]} keys, got {mask.keys}: "
                "use flash_dmattn.parallel.shard on a mask of the whole sequence"
            )
    check_beside(mask, mask, None)
    check_beside(bias, None, bias)


def check_lengths(lengths: Sequence[int], local_length: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    if not isinstance(lengths, (Sequence, torch.Size)):
        raise TypeError(f"shard_lengths must be a sequence of ints, one per rank, got {type(lengths).__name__}")
    lengths = tuple(require_count("shard_lengths", length, "ints") for length in lengths)
    if len(lengths) != group.size() or lengths[group.rank()] != local_length:
        raise ValueError(
            f"shard_lengths must be the rows of {group.size()} ranks, with {local_length} for rank {group.rank()}, "
            f"got {lengths}"
        )
    return lengths


def check_whole(call: ShardedCall, lengths: tuple[int, ...]) -> None:
    """Checks all that depends on the lengths of the shards. Every rank raises the same error."""
    seqlen = sum(lengths)
    if isinstance(call.attn_mask, KeyIntervalMask):
        call.attn_mask._require_rows("attn_mask", seqlen)
    if call.cu_seqlens is not None and is_host_readable(call.cu_seqlens):
        check_cu_seqlens("cu_seqlens", call.cu_seqlens, total=(seqlen, "the rows of all ranks"))
    if call.layout == "zigzag":
        zigzag_chunk_length(seqlen, len(lengths))
        if len(set(lengths)) > 1:
            raise ValueError(f"layout='zigzag' needs shards of the same length, got {list(lengths)}")
