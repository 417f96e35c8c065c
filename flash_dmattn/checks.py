"""What the public functions accept. Everything here raises before anything is launched; what tensors must be like is
checked by csrc/torch/checks.cpp.

ValueError speaks of shapes and values, TypeError of dtypes and types, RuntimeError of devices and backends; each
message names the argument, what came and what is accepted.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, Union

import torch
from torch import Tensor

from . import ops
from .arguments import require_bool, require_count, require_number, require_tensor, shape_of, values_at_hand
from .interval_mask import KeyIntervalMask
from .key_lists import SPARSE, KeyIndices, KeyLists

FLOAT32_MAX = torch.finfo(torch.float32).max
AnyMask = Union[Tensor, KeyIntervalMask, KeyLists, None]


class Varlen(NamedTuple):
    """Where the sequences of a packed batch begin and end."""

    cu_seqlens_q: Tensor  # int32 (B + 1)
    cu_seqlens_k: Tensor  # int32 (B + 1)
    max_seqlen_q: int
    max_seqlen_k: int


def check_inputs(check: str, query: object, key: object, value: object, mask: AnyMask, bias: object, *rest) -> None:
    """Types, dtypes, devices and shapes of the inputs: `check_fixed` or `check_varlen` of csrc/torch/module.cpp."""
    intervals = None
    if isinstance(mask, KeyIntervalMask):
        intervals, mask = mask.intervals, None
    elif mask is not None and not isinstance(mask, Tensor):
        raise TypeError(
            f"attn_mask must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got {type(mask).__name__}"
        )
    checker = ops.checker()
    if checker is not None:
        getattr(checker, check)(query, key, value, mask, intervals, bias, *rest)
        return
    for name, value_given in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, value_given)
    if bias is not None:
        require_tensor("attn_bias", bias)


def check_kernels(backend: ModuleType, query: Tensor) -> None:
    """What the compiled kernels take of the dtypes, before anything is selected for them."""
    checker = ops.checker()
    if backend.SPARSE_MASKS and checker is not None:
        checker.check_kernels(query)


def check_lists(lists: KeyLists, query: Tensor, key: Tensor, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    """What lists were built for; the mask that they were made from is checked as such."""
    heads, kv_heads = query.shape[-2], key.shape[-2]
    batches = query.shape[0] if lists.cu_seqlens_q is None else lists.batches
    shares = lists.batches == batches or (lists.batches > 0 and batches % lists.batches == 0)
    if isinstance(lists.mask, KeyIndices) and not (shares and lists.heads in (heads, kv_heads, 1)):
        raise ValueError(
            f"attn_mask must hold lists of {batches} batch elements, or a number that divides them, and of {heads}, "
            f"{kv_heads} or 1 heads, got {lists.batches} and {lists.heads}"
        )
    if lists.seqlen_k != seqlen_k or (lists.seqlen_q != seqlen_q and not lists.rows_alike):
        raise ValueError(
            f"attn_mask holds lists for {lists.seqlen_q} rows and {lists.seqlen_k} keys, "
            f"got {seqlen_q} rows and {seqlen_k} keys"
        )
    if lists.is_causal and not is_causal:
        raise ValueError("attn_mask holds lists that were built with is_causal=True, got a call with is_causal=False")
    if lists.device != query.device:
        raise RuntimeError(f"attn_mask must be on query's device {query.device}, got {lists.device}")


def check_window(mask: AnyMask, bias: Tensor | None, batch: int | None, keys: int, is_causal: bool) -> None:
    """What the causal dynamic mask is made from in the call; KeyIntervalMask.topk checks window_size itself.

    batch: the batch size of fixed length.
    """
    if mask is not None:
        raise ValueError("window_size makes a mask of its own, got attn_mask too; combine KeyIntervalMasks with &")
    if not is_causal:
        raise ValueError("window_size needs is_causal=True: each row chooses among the keys up to its own")
    one_a_key = bias is not None and ops.is_per_key(bias.shape)
    if one_a_key and bias.ndim == 4:
        one_a_key = bias.shape[3] == keys and bias.shape[0] in (batch, 1)
    if not one_a_key:
        got = "none" if bias is None else f"shape {shape_of(bias)}"
        layouts = "({B|1}, {H|Hkv|1}, 1, Sk) or (total_k, {H|Hkv|1})"
        raise ValueError(f"window_size needs attn_bias of one number a key, {layouts}, got {got}")


def check_cache(backend: ModuleType, return_attn_probs: bool) -> None:
    if not backend.SPARSE_MASKS:
        raise ValueError(f"cache_seqlens is for the backends 'cuda' and 'cpu', got the backend '{backend.NAME}'")
    if return_attn_probs:
        raise ValueError("return_attn_probs is for keys that are all there, got cache_seqlens")


def check_sparse(sparse: str, mask: AnyMask, window_size: int | None) -> None:
    if sparse not in SPARSE:
        raise ValueError(f"sparse must be one of {', '.join(SPARSE)}, got {sparse!r}")
    if sparse == "lists" and mask is None and window_size is None:
        raise ValueError("sparse='lists' needs attn_mask or window_size, got none")
    if sparse == "tiles" and isinstance(mask, KeyLists) and isinstance(mask.mask, KeyIndices):
        raise ValueError("sparse='tiles' needs a mask, got attn_mask of KeyLists that were made from indices")


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
    require_bool("is_causal", is_causal)
    require_bool("deterministic", deterministic)
    require_bool("return_attn_probs", return_attn_probs)
    require_bool("return_lse", return_lse)
    check_sparse(sparse, mask, window_size)


def check_scalars(softmax_scale: float | None, softcap: float) -> None:
    if softmax_scale is not None:
        check_finite("softmax_scale", softmax_scale)
    check_finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if 0 < softcap < 1 / FLOAT32_MAX:
        raise ValueError(f"softcap must be 0 (none) or have a finite inverse in float32, got {softcap}")


def check_finite(name: str, value: float) -> None:
    require_number(name, value)
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # the kernels compute with it in float32
        raise ValueError(f"{name} must be finite in float32, got {value}")


def check_fixed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    bias: Tensor | None,
    is_causal: bool,
    cache_seqlens: Tensor | None = None,
) -> None:
    """Inputs of fixed length: query (B, Sq, H, D), key and value (B, Sk, Hkv, D)."""
    if isinstance(mask, KeyLists):
        check_inputs("check_fixed", query, key, value, None, None, None)
        if mask.cu_seqlens_q is not None:
            raise ValueError("attn_mask holds lists of variable length, got inputs of fixed length")
        check_lists(mask, query, key, query.shape[1], key.shape[1], is_causal)
        mask = mask.checked_mask
    check_inputs("check_fixed", query, key, value, mask, bias, cache_seqlens)
    if isinstance(mask, KeyIntervalMask):
        mask.require_rows("attn_mask", query.shape[1])


def check_varlen(
    query: Tensor, key: Tensor, value: Tensor, mask: AnyMask, bias: Tensor | None, varlen: Varlen, is_causal: bool
) -> None:
    """Inputs of variable length: query (total_q, H, D), key and value (total_k, Hkv, D)."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = varlen
    require_count("max_seqlen_q", max_seqlen_q)
    require_count("max_seqlen_k", max_seqlen_k)
    sequences = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if isinstance(mask, KeyLists):
        check_inputs("check_varlen", query, key, value, None, None, *sequences)
        if mask.cu_seqlens_q is None:
            raise ValueError("attn_mask holds lists of fixed length, got inputs of variable length")
        check_lists(mask, query, key, max_seqlen_q, max_seqlen_k, is_causal)
        check_list_sequences(mask, varlen)
        mask = mask.checked_mask
    check_inputs("check_varlen", query, key, value, mask, bias, *sequences)


def held_lengths(query: Tensor, key: Tensor, mask: AnyMask, bias: Tensor | None, varlen: Varlen) -> Varlen:
    """With lengths that no sequence can exceed: those that are given may lie far above, and cost nothing then."""
    mask = mask.checked_mask if isinstance(mask, KeyLists) else mask
    # A mask or bias with a column for every key has max_seqlen_k of them.
    by_pair = any(pairs is not None and len(pairs.shape) == 3 for pairs in (mask, bias))
    return varlen._replace(
        max_seqlen_q=min(varlen.max_seqlen_q, query.shape[0]),
        max_seqlen_k=varlen.max_seqlen_k if by_pair else min(varlen.max_seqlen_k, key.shape[0]),
    )


def check_list_sequences(lists: KeyLists, varlen: Varlen) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        built, given = getattr(lists, name), getattr(varlen, name)
        if built.shape != given.shape:
            raise ValueError(f"attn_mask holds lists of {built.shape[0] - 1} sequences, got {given.shape[0] - 1}")
        # Where one list serves every row the lists were made of keys alone: any sequences of rows will do.
        matters = name == "cu_seqlens_k" or not lists.rows_alike
        if matters and values_at_hand(built) and not torch.equal(built, given):
            raise ValueError(f"attn_mask holds lists of other sequences: {name} differs")


def check_packed(name: str, tensor: object, layout: str, parts: int) -> None:
    """A tensor that holds query, key and value, or key and value, along its third dimension from the end."""
    checker = ops.checker()
    if checker is not None:
        checker.check_packed(name, tensor, layout, parts)


def check_kv(query: object, kv: Tensor, layout_q: str, same_dtype: bool) -> None:
    """Packed keys and values beside query."""
    checker = ops.checker()
    if checker is not None:
        checker.check_kv(query, kv, layout_q, same_dtype)
