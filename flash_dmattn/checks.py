"""What the public functions accept. Everything here raises before anything is launched.

ValueError speaks of shapes and values, TypeError of dtypes and types, RuntimeError of devices and backends; each
message names the argument, what came and what is accepted.
"""

from __future__ import annotations

import math
import numbers
from typing import NamedTuple

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Varlen(NamedTuple):
    """Where the sequences of a packed batch begin and end."""

    cu_seqlens_q: Tensor  # int32 (B + 1)
    cu_seqlens_k: Tensor  # int32 (B + 1)
    max_seqlen_q: int
    max_seqlen_k: int


def names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_ndim(name: str, tensor: Tensor, layout: str) -> None:
    ndim = layout.count(",") + 1
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {shape_of(tensor)}")


def require_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise RuntimeError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def check_rows(query: Tensor, key: Tensor, value: Tensor, layout_q: str, layout_k: str) -> None:
    """Dtypes, devices and shapes of query, key and value; the head dimension and the head count stand last."""
    for name, tensor, layout in (("query", query, layout_q), ("key", key, layout_k), ("value", value, layout_k)):
        require_tensor(name, tensor)
        require_ndim(name, tensor, layout)
        if tensor.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name} must be one of {names(FLOAT_DTYPES)}, got {names([tensor.dtype])}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {names([query.dtype])}, got {names([tensor.dtype])}")
        require_device(name, tensor, query)

    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape, got {shape_of(key)} and {shape_of(value)}")
    heads, head_dim = query.shape[-2:]
    kv_heads, key_head_dim = key.shape[-2:]
    if key_head_dim != head_dim:
        raise ValueError(f"key must have query's head dimension {head_dim}, got {key_head_dim}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"query must have a head dimension from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"query's head count must be a multiple of key's, got {heads} and {kv_heads}")


def check_pair_shape(name: str, tensor: Tensor, accepted: tuple[tuple[str, set[int]], ...]) -> None:
    """One dimension of a mask or bias after the other; `accepted` gives each its label and sizes."""
    layout = "(" + ", ".join(label for label, _ in accepted) + ")"
    require_ndim(name, tensor, layout)
    for dim, (_, sizes) in enumerate(accepted):
        if tensor.shape[dim] not in sizes:
            some = " or ".join(str(size) for size in sorted(sizes))
            raise ValueError(f"{name} must be {layout}: dimension {dim} must be {some}, got shape {shape_of(tensor)}")


def check_mask_dtype(mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool (True = visible), got {names([mask.dtype])}")


def check_bias_dtype(bias: Tensor, query: Tensor, one_row: bool) -> None:
    accepted = (query.dtype, torch.float32) if one_row and query.dtype != torch.float32 else (query.dtype,)
    if bias.dtype not in accepted:
        key_only = "" if one_row else " (float32 is accepted where the bias is one number a key)"
        raise TypeError(
            f"attn_bias must be {' or '.join(map(names, zip(accepted)))}{key_only}, got {names([bias.dtype])}"
        )


def check_scalars(softmax_scale: float | None, softcap: float) -> None:
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is None and name == "softmax_scale":
            continue
        if not isinstance(value, numbers.Real) and not isinstance(value, torch.SymFloat):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not -math.inf < value < math.inf:
            raise ValueError(f"{name} must be finite, got {value}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")


def check_fixed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> None:
    """Inputs of fixed length: query (B, Sq, H, D), key and value (B, Sk, Hkv, D)."""
    check_rows(query, key, value, "(B, Sq, H, D)", "(B, Sk, Hkv, D)")
    batch, seqlen_q, heads, _ = query.shape
    if key.shape[0] != batch:
        raise ValueError(f"key must have query's batch size {batch}, got {key.shape[0]}")
    seqlen_k, kv_heads = key.shape[1:3]

    accepted = (
        ("{B|1}", {batch, 1}),
        ("{H|Hkv|1}", {heads, kv_heads, 1}),
        ("{Sq|1}", {seqlen_q, 1}),
        ("{Sk|1}", {seqlen_k, 1}),
    )
    if mask is not None:
        require_tensor("attn_mask", mask)
        check_mask_dtype(mask)
        check_pair_shape("attn_mask", mask, accepted)
        require_device("attn_mask", mask, query)
    if bias is not None:
        require_tensor("attn_bias", bias)
        check_pair_shape("attn_bias", bias, accepted)
        check_bias_dtype(bias, query, one_row=bias.shape[2] == 1)
        require_device("attn_bias", bias, query)


def check_cu_seqlens(name: str, cu_seqlens: Tensor, total: int, max_seqlen: int, query: Tensor) -> None:
    require_tensor(name, cu_seqlens)
    require_ndim(name, cu_seqlens, "(B + 1)")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {names([cu_seqlens.dtype])}")
    require_device(name, cu_seqlens, query)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have B + 1 elements, at least 1, got {cu_seqlens.shape[0]}")
    longest = f"max_seqlen_{name[-1]}"
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"{longest} must be an int, got {type(max_seqlen).__name__}")
    if max_seqlen < 0:
        raise ValueError(f"{longest} must not be negative, got {max_seqlen}")
    # Looking at the values would make a GPU wait and cannot be traced; there the caller answers for them.
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    offsets = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(offsets, offsets[1:])]
    if offsets[0] != 0 or offsets[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must rise from 0 to the {total} rows given, got {offsets}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(f"{longest} must be at least the longest sequence {max(lengths)}, got {max_seqlen}")


def check_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, varlen: Varlen
) -> None:
    """Inputs of variable length: query (total_q, H, D), key and value (total_k, Hkv, D)."""
    check_rows(query, key, value, "(total_q, H, D)", "(total_k, Hkv, D)")
    total_q, heads, _ = query.shape
    total_k, kv_heads, _ = key.shape
    check_cu_seqlens("cu_seqlens_q", varlen.cu_seqlens_q, total_q, varlen.max_seqlen_q, query)
    check_cu_seqlens("cu_seqlens_k", varlen.cu_seqlens_k, total_k, varlen.max_seqlen_k, query)
    if varlen.cu_seqlens_q.shape != varlen.cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must both have B + 1 elements, "
            f"got {varlen.cu_seqlens_q.shape[0]} and {varlen.cu_seqlens_k.shape[0]}"
        )

    head_sizes = ("{H|Hkv|1}", {heads, kv_heads, 1})
    per_key = (("total_k", {total_k}), head_sizes)
    per_pair = (("total_q", {total_q}), head_sizes, ("max_seqlen_k", {varlen.max_seqlen_k}))
    for name, tensor in (("attn_mask", mask), ("attn_bias", bias)):
        if tensor is None:
            continue
        require_tensor(name, tensor)
        if name == "attn_mask":
            check_mask_dtype(tensor)
        if tensor.ndim not in (2, 3):
            raise ValueError(
                f"{name} must be (total_k, {{H|Hkv|1}}) or (total_q, {{H|Hkv|1}}, max_seqlen_k), "
                f"got shape {shape_of(tensor)}"
            )
        check_pair_shape(name, tensor, per_key if tensor.ndim == 2 else per_pair)
        if name == "attn_bias":
            check_bias_dtype(tensor, query, one_row=tensor.ndim == 2)
        require_device(name, tensor, query)


def check_packed(name: str, tensor: Tensor, layout: str, parts: int) -> None:
    """A tensor that holds query, key and value, or key and value, along its third dimension from the end."""
    require_tensor(name, tensor)
    require_ndim(name, tensor, layout)
    if tensor.shape[-3] != parts:
        raise ValueError(f"{name} must be {layout}, got shape {shape_of(tensor)}")
