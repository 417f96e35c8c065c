"""What the public functions accept. Everything here raises before anything is launched.

ValueError speaks of shapes and values, TypeError of dtypes and types, RuntimeError of devices and backends; each
message names the argument, what came and what is accepted.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Union

import torch
from torch import Tensor

from .arguments import (
    check_cu_seqlens,
    check_same_sequences,
    names,
    require_bool,
    require_device,
    require_ndim,
    require_number,
    require_tensor,
    shape_of,
    values_at_hand,
)
from .interval_mask import KeyIntervalMask
from .key_lists import SPARSE, KeyLists
from .ops import is_per_key

MAX_HEAD_DIM = 256
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


AnyMask = Union[Tensor, KeyIntervalMask, KeyLists, None]


class Varlen(NamedTuple):
    """Where the sequences of a packed batch begin and end."""

    cu_seqlens_q: Tensor  # int32 (B + 1)
    cu_seqlens_k: Tensor  # int32 (B + 1)
    max_seqlen_q: int
    max_seqlen_k: int


def check_rows_of(name: str, tensor: object, layout: str) -> None:
    """A tensor of rows, whose last dimension is the head dimension."""
    require_tensor(name, tensor)
    require_ndim(name, tensor, layout)
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be one of {names(FLOAT_DTYPES)}, got {names([tensor.dtype])}")


def check_head_dim(name: str, tensor: Tensor) -> None:
    if not 1 <= tensor.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must have a head dimension from 1 to {MAX_HEAD_DIM}, got {tensor.shape[-1]}")


def check_beside_query(name: str, tensor: Tensor, query: Tensor, same_dtype: bool = True) -> None:
    """What keys and values have in common with query; the head dimension and the head count stand last."""
    if same_dtype and tensor.dtype != query.dtype:
        raise TypeError(f"{name} must have query's dtype {names([query.dtype])}, got {names([tensor.dtype])}")
    require_device(name, tensor, query.device, "query")
    (heads, head_dim), (kv_heads, key_head_dim) = query.shape[-2:], tensor.shape[-2:]
    if key_head_dim != head_dim:
        raise ValueError(f"{name} must have query's head dimension {head_dim}, got {key_head_dim}")
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"query's head count must be a multiple of {name}'s, got {heads} and {kv_heads}")


def check_batch(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.shape[0] != query.shape[0]:
        raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got {tensor.shape[0]}")


def check_rows(query: Tensor, key: Tensor, value: Tensor, layout_q: str, layout_k: str) -> None:
    """Dtypes, devices and shapes of query, key and value."""
    for name, tensor, layout in (("query", query, layout_q), ("key", key, layout_k), ("value", value, layout_k)):
        check_rows_of(name, tensor, layout)
    for name, tensor in (("key", key), ("value", value)):
        check_beside_query(name, tensor, query)
    check_head_dim("query", query)
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape, got {shape_of(key)} and {shape_of(value)}")


def check_pair_shape(name: str, tensor: Tensor, accepted: tuple[tuple[str, set[int]], ...]) -> None:
    """One dimension of a mask or bias after the other; `accepted` gives each its label and sizes."""
    layout = "(" + ", ".join(label for label, _ in accepted) + ")"
    require_ndim(name, tensor, layout)
    for dim, (_, sizes) in enumerate(accepted):
        if tensor.shape[dim] not in sizes:
            some = " or ".join(str(size) for size in sorted(sizes))
            raise ValueError(f"{name} must be {layout}: dimension {dim} must be {some}, got shape {shape_of(tensor)}")


def check_bool_mask(mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attn_mask must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got {type(mask).__name__}"
        )
    if mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool (True = visible), got {names([mask.dtype])}")


def check_intervals(mask: KeyIntervalMask, query: Tensor, accepted: tuple[tuple[str, set[int]], ...]) -> None:
    for name, tensor in (("attn_mask.start", mask.start), ("attn_mask.end", mask.end)):
        check_pair_shape(name, tensor, accepted)
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {names([tensor.dtype])}")
        require_device(name, tensor, query.device, "query")
    if mask.start.shape != mask.end.shape:
        raise ValueError(
            "attn_mask.start and attn_mask.end must have the same shape, "
            f"got {shape_of(mask.start)} and {shape_of(mask.end)}"
        )


def check_lists(lists: KeyLists, query: Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """What lists were built for; the mask that they were made from is checked as such."""
    if lists.seqlen_k != seqlen_k or (lists.seqlen_q != seqlen_q and not lists.rows_alike):
        raise ValueError(
            f"attn_mask holds lists for {lists.seqlen_q} rows and {lists.seqlen_k} keys, "
            f"got {seqlen_q} rows and {seqlen_k} keys"
        )
    if lists.is_causal and not is_causal:
        raise ValueError("attn_mask holds lists that were built with is_causal=True, got a call with is_causal=False")
    require_device("attn_mask", lists.keys, query.device, "query")


def check_window(mask: AnyMask, bias: Tensor | None, keys: int, is_causal: bool) -> None:
    """What the causal dynamic mask is made from in the call; KeyIntervalMask.topk checks window_size itself."""
    if mask is not None:
        raise ValueError("window_size makes a mask of its own, got attn_mask too; combine KeyIntervalMasks with &")
    if not is_causal:
        raise ValueError("window_size needs is_causal=True: each row chooses among the keys up to its own")
    one_a_key = bias is not None and is_per_key(bias.shape) and (bias.ndim == 2 or bias.shape[3] == keys)
    if not one_a_key:
        got = "none" if bias is None else f"shape {shape_of(bias)}"
        layouts = "({B|1}, {H|Hkv|1}, 1, Sk) or (total_k, {H|Hkv|1})"
        raise ValueError(f"window_size needs attn_bias of one number a key, {layouts}, got {got}")


def check_sparse(sparse: str, mask: AnyMask, window_size: int | None) -> None:
    if sparse not in SPARSE:
        raise ValueError(f"sparse must be one of {', '.join(SPARSE)}, got {sparse!r}")
    if sparse == "lists" and mask is None and window_size is None:
        raise ValueError("sparse='lists' needs attn_mask or window_size, got none")


def check_bias_dtype(bias: Tensor, query: Tensor) -> None:
    one_a_key = is_per_key(bias.shape)
    accepted = (query.dtype, torch.float32) if one_a_key and query.dtype != torch.float32 else (query.dtype,)
    if bias.dtype not in accepted:
        key_only = "" if one_a_key else " (float32 is accepted where the bias is one number a key)"
        raise TypeError(
            f"attn_bias must be {' or '.join(map(names, zip(accepted)))}{key_only}, got {names([bias.dtype])}"
        )


def check_options(
    mask: AnyMask,
    softmax_scale: float | None,
    is_causal: object,
    softcap: float,
    deterministic: object,
    return_attn_probs: object,
    return_lse: object,
    window_size: int | None,
    sparse: str,
) -> None:
    """What is accepted whatever the inputs' shapes."""
    check_scalars(softmax_scale, softcap)
    flags = {
        "is_causal": is_causal,
        "deterministic": deterministic,
        "return_attn_probs": return_attn_probs,
        "return_lse": return_lse,
    }
    for name, value in flags.items():
        require_bool(name, value)
    check_sparse(sparse, mask, window_size)


def check_scalars(softmax_scale: float | None, softcap: float) -> None:
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is None and name == "softmax_scale":
            continue
        require_number(name, value)
        if not -math.inf < value < math.inf:
            raise ValueError(f"{name} must be finite, got {value}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")


def check_fixed(query: Tensor, key: Tensor, value: Tensor, mask: AnyMask, bias: Tensor | None, is_causal: bool) -> None:
    """Inputs of fixed length: query (B, Sq, H, D), key and value (B, Sk, Hkv, D)."""
    check_rows(query, key, value, "(B, Sq, H, D)", "(B, Sk, Hkv, D)")
    check_batch("key", key, query)
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k, kv_heads = key.shape[1:3]

    accepted = (
        ("{B|1}", {batch, 1}),
        ("{H|Hkv|1}", {heads, kv_heads, 1}),
        ("{Sq|1}", {seqlen_q, 1}),
        ("{Sk|1}", {seqlen_k, 1}),
    )
    if isinstance(mask, KeyLists):
        if mask.cu_seqlens_q is not None:
            raise ValueError("attn_mask holds lists of variable length, got inputs of fixed length")
        check_lists(mask, query, seqlen_q, seqlen_k, is_causal)
        mask = mask.mask
    if isinstance(mask, KeyIntervalMask):
        check_intervals(mask, query, (*accepted[:2], ("Sk", {seqlen_k})))
    elif mask is not None:
        check_bool_mask(mask)
        check_pair_shape("attn_mask", mask, accepted)
        require_device("attn_mask", mask, query.device, "query")
    if bias is not None:
        require_tensor("attn_bias", bias)
        check_pair_shape("attn_bias", bias, accepted)
        check_bias_dtype(bias, query)
        require_device("attn_bias", bias, query.device, "query")


def check_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask, bias: Tensor | None, varlen: Varlen, is_causal: bool
) -> None:
    """Inputs of variable length: query (total_q, H, D), key and value (total_k, Hkv, D)."""
    check_rows(query, key, value, "(total_q, H, D)", "(total_k, Hkv, D)")
    total_q, heads, _ = query.shape
    total_k, kv_heads, _ = key.shape
    for side, total in (("q", total_q), ("k", total_k)):
        name, longest = f"cu_seqlens_{side}", f"max_seqlen_{side}"
        bound = (longest, getattr(varlen, longest))
        check_cu_seqlens(name, getattr(varlen, name), query.device, "query", total, bound)
    check_same_sequences(varlen.cu_seqlens_q, varlen.cu_seqlens_k)

    head_sizes = ("{H|Hkv|1}", {heads, kv_heads, 1})
    per_key = (("total_k", {total_k}), head_sizes)
    per_pair = (("total_q", {total_q}), head_sizes, ("max_seqlen_k", {varlen.max_seqlen_k}))

    def check_pairs(name: str, tensor: Tensor) -> None:
        if tensor.ndim not in (2, 3):
            raise ValueError(
                f"{name} must be (total_k, {{H|Hkv|1}}) or (total_q, {{H|Hkv|1}}, max_seqlen_k), "
                f"got shape {shape_of(tensor)}"
            )
        check_pair_shape(name, tensor, per_key if tensor.ndim == 2 else per_pair)
        require_device(name, tensor, query.device, "query")

    if isinstance(mask, KeyLists):
        if mask.cu_seqlens_q is None:
            raise ValueError("attn_mask holds lists of fixed length, got inputs of variable length")
        check_lists(mask, query, varlen.max_seqlen_q, varlen.max_seqlen_k, is_causal)
        check_list_sequences(mask, varlen)
        mask = mask.mask
    if isinstance(mask, KeyIntervalMask):
        check_intervals(mask, query, per_key)
    elif mask is not None:
        check_bool_mask(mask)
        check_pairs("attn_mask", mask)
    if bias is not None:
        require_tensor("attn_bias", bias)
        check_pairs("attn_bias", bias)
        check_bias_dtype(bias, query)


def check_list_sequences(lists: KeyLists, varlen: Varlen) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        built, given = getattr(lists, name), getattr(varlen, name)
        if built.shape != given.shape:
            raise ValueError(f"attn_mask holds lists of {built.shape[0] - 1} sequences, got {given.shape[0] - 1}")
        # Where one list serves every row the lists were made of keys alone: any sequences of rows will do.
        matters = name == "cu_seqlens_k" or not lists.rows_alike
        if matters and values_at_hand(built) and not torch.equal(built, given):
            raise ValueError(f"attn_mask holds lists of other sequences: {name} differs")


def check_packed(name: str, tensor: Tensor, layout: str, parts: int) -> None:
    """A tensor that holds query, key and value, or key and value, along its third dimension from the end."""
    check_rows_of(name, tensor, layout)
    if tensor.shape[-3] != parts:
        raise ValueError(f"{name} must be {layout}, got shape {shape_of(tensor)}")
    check_head_dim(name, tensor)
