"""`flash_dmattn_with_kvcache`: attention of new tokens over a cache of keys, contiguous or in pages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from . import checks, ops
from . import kvcache_composed as kvcache_composed  # implements an operator
from .arguments import (
    lengths_of,
    names,
    require_bool,
    require_device,
    require_float32_or,
    require_length,
    require_max_seqlen,
    require_no_grad,
    require_tensor,
    shape_of,
)
from .attend import accumulated, autocast_is_on, is_half, kernels_for, scaled_query
from .biases import cast_bias
from .ops.conventions import accumulation_dtype, default_scale
from .sinks import check_sinks


def flash_dmattn_with_kvcache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    bias_cache: Tensor | None = None,
    bias: Tensor | None = None,
    cache_seqlens: Tensor | int,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    window_size: int | None = None,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool = True,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new tokens over a cache of keys, values and biases, for inference: decoding, a few rows, chunks of
    prefill, and batches that mix them.

    The formula is that of `flash_dmattn_func`. A sequence has cache_seqlens keys in the cache. If key is given, each
    query row brings a new key, value and bias, which the call writes into the cache in place, after the others. query
    must not share memory with the cache. key, value and bias may be views of the slots to which they are written, and
    must not share other memory with the cache. The last row is aligned with the last key, the row before it with the
    key before: causality is aligned to the bottom right corner, and with is_causal row i sees the keys in the cache and
    the new keys of the rows up to i.

    The cache is contiguous, or it consists of pages that the sequences share: page block_table[b, j] holds the keys
    j * page_size to (j + 1) * page_size - 1 of sequence b.

    Args:
        query: (B, Sq, H, D), or with cu_seqlens_q (total_q, H, D); float16 or bfloat16, on the CPU float32 and float64
            too. D is 1 to 256, H a multiple of Hkv.
        k_cache: (B, Sk, Hkv, D) in query's dtype, with cache_batch_idx any number of elements in place of B; or with
            block_table (pages, page_size, Hkv, D). The last dimension is contiguous; on CUDA D is a multiple of 8, and
            storage and other strides are aligned to 16 bytes.
        v_cache: in k_cache's shape; on the CPU its head dimension may differ.
        key, value: of the new tokens, (B, Sq, Hkv, D), with cu_seqlens_q (total_q, Hkv, D), in query's dtype; both or
            neither. value has v_cache's head dimension.
        bias_cache: as k_cache without D, (B, Sk, Hkv) or (pages, page_size, Hkv); float32 or in the cache's dtype: one
            number per key and key/value head, added to the scores. -inf and `finfo.min` mask the key.
        bias: of the new tokens, (B, Sq, Hkv) or (total_q, Hkv), in bias_cache's dtype; with key and bias_cache.
        cache_seqlens: int32 (B), or an int for all: the keys in the cache, without the new ones. On CUDA only the
            device reads the values, so that one CUDA graph serves all lengths.
        cache_batch_idx: int32 (B), for a contiguous cache: the cache's batch element of each sequence.
        block_table: int32 (B, pages of a sequence): the pages of each sequence, of 16 to 256 keys. Entries beyond a
            sequence's keys may have any value.
        cu_seqlens_q: int32 (B + 1): query, key, value and bias are packed, and sequence b has the rows cu_seqlens_q[b]
            to cu_seqlens_q[b + 1] - 1. Sequences may have different numbers of rows, or none. Rows after the last
            sequence are padding: they write nothing, and their outputs have no meaning.
        max_seqlen_q: with cu_seqlens_q, at least the most rows of a sequence: an int, or outside of compiled graphs an
            integer tensor () on the CPU.
        window_size: top-k selection: each row sees the `window_size` keys of largest bias among the keys up to its own,
            ties to the later key. Needs bias_cache and is_causal.
        softmax_scale: a number, by default 1 / sqrt(D); or a tensor () or (H), as in `flash_dmattn_func`.
        is_causal: a row sees the keys up to its own, else all of the sequence. Unlike in `flash_dmattn_func` the
            default is True, and None is not accepted.
        softcap: 0 for none, else the bound of the capped scores.
        relative_bias: ({B|1}, {H|Hkv|1}, 2R + 1), as in `flash_dmattn_func`; distances are those in the sequence.
        sinks: ({H|1}), as in `flash_dmattn_func`.
        return_lse: also return lse, without sinks.
        batch_invariant: a sequence gets bitwise the same output alone and in any batch, at any position in it, with any
            order of pages.

    Bad lengths, pages and batch elements, and two new tokens for one slot of the cache, are errors on the CPU, and on
    CUDA under FLASH_DMATTN_CHECK=1. Else CUDA never reads or writes outside the tensors, and drops new tokens that have
    no slot; the output of such a sequence is undefined.

    Returns:
        out in query's shape (with v_cache's head dimension) and dtype, or with return_lse (out, lse), lse (B, H, Sq) or
        (H, total_q) in natural logarithms, float32 (float64 for float64), -inf for a row without visible keys.

    Raises:
        ValueError: an invalid shape or value; an input that requires grad while gradients are enabled (there is no
            backward); on the CPU a NaN among a sequence's biases with window_size. On CUDA this NaN fails a device-side
            assertion, which ends the CUDA context.
        TypeError: an invalid dtype or type.
        RuntimeError: tensors on different devices, or kernels that were not built.
        NotImplementedError: a tensor of a torch.func transform.
    """
    if relative_bias is None and sinks is None:
        result = ops.kvcache_fast_path(
            *(query, k_cache, v_cache, key, value, bias_cache, bias, cache_seqlens, cache_batch_idx, block_table),
            *(cu_seqlens_q, max_seqlen_q, window_size, softmax_scale, is_causal, softcap, return_lse, batch_invariant),
        )
        if result is not None:
            return result
    kernels_for(query)
    tensors = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "key": key, "value": value}
    tensors |= {"bias_cache": bias_cache, "bias": bias, "cache_batch_idx": cache_batch_idx, "block_table": block_table}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "relative_bias": relative_bias, "sinks": sinks}
    given = {"cache_seqlens": cache_seqlens, "softmax_scale": softmax_scale}  # tensors or numbers
    tensors |= {name: x for name, x in given.items() if isinstance(x, Tensor)}
    check_tensors(tensors)
    refuse_transforms(tensors)
    check_query(query, cu_seqlens_q)
    if autocast_is_on(query.device):  # the cache cannot be copied
        query, key, value = (x if x is None else x.to(k_cache.dtype) for x in (query, key, value))
        bias = bias if bias is None or bias_cache is None else cast_bias(bias, bias_cache.dtype)
        relative_bias = cast_bias(relative_bias, k_cache.dtype) if is_half(relative_bias) else relative_bias
        sinks = sinks.to(k_cache.dtype) if is_half(sinks) else sinks
    if isinstance(softmax_scale, Tensor):
        query, softmax_scale = scaled_query(query, softmax_scale), 1.0
    check_options(softmax_scale, softcap, is_causal, return_lse, batch_invariant)
    checks.refuse_sliding_window(
        window_size,
        "relative_bias=flash_dmattn.relative.window(capacity + 1, left, right, device=query.device), with None for a "
        "side without a limit",
    )
    if window_size is not None:
        window_size = require_length("window_size", window_size)
    if max_seqlen_q is not None:
        max_seqlen_q = require_max_seqlen("max_seqlen_q", max_seqlen_q)
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache_seqlens = lengths_of(cache_seqlens, batch, query.device).contiguous()
    cache_batch_idx, block_table, cu_seqlens_q = (
        x if x is None else x.contiguous() for x in (cache_batch_idx, block_table, cu_seqlens_q)
    )
    if relative_bias is not None:
        require_float32_or(query.dtype, "relative_bias", relative_bias)
        relative_bias = accumulated(relative_bias, query)
    if sinks is not None:
        check_sinks(sinks, query)
        sinks = sinks.to(accumulation_dtype(query.dtype))
    # The operator checks the head dimension.
    scale = default_scale(max(query.shape[-1], 1)) if softmax_scale is None else float(softmax_scale)
    out, lse = ops.attention_with_kvcache(
        *(query, k_cache, v_cache, key, value, bias_cache, bias, cache_seqlens, cache_batch_idx, block_table),
        *(cu_seqlens_q, max_seqlen_q, window_size, scale, bool(is_causal), float(softcap), relative_bias, sinks),
        bool(batch_invariant),
    )
    return (out, lse) if return_lse else out


def check_tensors(tensors: dict[str, Tensor | None]) -> None:
    """Types, devices and gradients. csrc/torch/kvcache.cpp checks shapes, dtypes and values."""
    for name, tensor in tensors.items():
        if tensor is None and name not in ("query", "k_cache", "v_cache"):
            continue
        require_tensor(name, tensor)
        if tensor.is_quantized:
            raise TypeError(f"{name} must not be quantized, got {names([tensor.dtype])}")
        if name != "softmax_scale":  # a number on the CPU serves every device: checks.check_scale
            require_device(name, tensor, tensors["query"].device, "query")
        if name in ("k_cache", "v_cache", "bias_cache") and not torch.compiler.is_compiling() and tensor.is_neg():
            raise ValueError(
                f"{name} must not be a view whose negation is yet to be done (is_neg()), since new tokens are written "
                f"into it: pass {name}.resolve_neg()"
            )
        require_no_grad(name, tensor, "flash_dmattn_with_kvcache")


def refuse_transforms(tensors: dict[str, Tensor | None]) -> None:
    """No transform of torch.func has a rule for a call that writes to its arguments."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor is not None and is_functorch_wrapped_tensor(tensor):
            raise NotImplementedError(
                f"flash_dmattn_with_kvcache is for inference and has no rule for transforms of torch.func, got {name} "
                "of a transform"
            )


def check_query(query: Tensor, cu_seqlens_q: Tensor | None) -> None:
    """What the other checks read of query and of its sequences."""
    layout = "(B, Sq, H, D)" if cu_seqlens_q is None else "(total_q, H, D)"
    checks.compiled_check("check_rows", "query", query, layout)
    dimensions = layout.count(",") + 1
    if query.ndim != dimensions:
        raise ValueError(f"query must have {dimensions} dimensions {layout}, got shape {shape_of(query)}")
    if cu_seqlens_q is not None and (cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape[0] == 0):
        raise ValueError(f"cu_seqlens_q must be (B + 1) with at least 1 element, got shape {shape_of(cu_seqlens_q)}")


def check_options(
    softmax_scale: object, softcap: object, is_causal: object, return_lse: object, batch_invariant: object
) -> None:
    if softmax_scale is not None:
        checks.check_finite("softmax_scale", softmax_scale, or_tensor=True)
    checks.check_softcap(softcap)
    for name, flag in (("is_causal", is_causal), ("return_lse", return_lse), ("batch_invariant", batch_invariant)):
        require_bool(name, flag)
