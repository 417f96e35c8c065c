"""The public functions: dynamic-mask attention of separate, packed and variable-length inputs.

Each function makes a `Call` of its arguments and passes it to `attend`. scripts/write_stub.py writes interface.pyi, the
types of the results, from the signatures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from . import backends, checks, ops
from .arguments import check_cu_seqlens, require_given, require_max_seqlen, require_no_grad
from .attend import attend, autocast_is_on, kernels_for, require_device_with_kernels
from .backends import Backend
from .call import Call, Varlen
from .checks import AnyMask
from .kvcache import flash_dmattn_with_kvcache as flash_dmattn_with_kvcache
from .masks.choice import LIMITS, Sparse


def require_arguments_of(function: Callable, args: tuple, kwargs: dict) -> None:
    """Raises TypeError where the arguments do not fit the signature of a function."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {str(error).replace('too many', 'got too many')}") from None


def continued_by(function: Callable, first: str) -> Callable[[Callable], Callable]:
    """Puts the parameters of `function` from `first` on in place of *args and **kwargs, for help, type checkers and
    errors."""

    def decorate(packed: Callable) -> Callable:
        @functools.wraps(packed)
        def continued(*args, **kwargs):
            if torch.compiler.is_compiling():
                return packed(*args, **kwargs)
            try:
                return packed(*args, **kwargs)
            except TypeError:  # that of a wrong argument names `function`
                require_arguments_of(continued, args, kwargs)
                raise

        signature = inspect.signature(packed)
        own = [p for p in signature.parameters.values() if p.name not in ("args", "kwargs")]
        names, rest = zip(*inspect.signature(function).parameters.items())
        continued.__signature__ = signature.replace(parameters=[*own, *rest[names.index(first) :]])
        return continued

    return decorate


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool | None = False,
    softcap: float | None = 0.0,
    deterministic: bool | None = False,
    return_attn_probs: bool | None = False,
    *,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: Sparse = "auto",
    cache_seqlens: Tensor | int | None = None,
    relative_bias: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention with a mask and additive biases, differentiable in query, key, value and the biases.

    For query row i and key j of a batch element and head:

        s_ij = softmax_scale * <q_i, k_j>, then softcap * tanh(s_ij / softcap) where softcap > 0
        p_ij = softmax over the visible keys j of (s_ij + bias_ij + relative_bias[d_ij]),    d_ij = j - (i + Sk - Sq)
        o_i  = sum_j p_ij v_j

    A key is visible if attn_mask is True, causality allows it, and none of its biases masks it. A bias masks by -inf or
    by `finfo.min`, the most negative finite value of its dtype, which additive masks use. A row without visible keys
    has output 0 and zero gradients. CUDA tensors use the CUDA kernels, CPU tensors the CPU kernels.

    Args:
        query: (B, Sq, H, D), float16 or bfloat16; on the CPU also float32 or float64. D from 1 to 256.
        key: (B, Sk, Hkv, D) in query's dtype. H is a multiple of Hkv; query head h uses key/value head h // (H / Hkv).
        value: (B, Sk, Hkv, Dv) in query's dtype, Dv from 1 to 256. If Dv differs from D, the narrower tensors are
            copied and padded with zeros to the larger head dimension.
        attn_mask: bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), True = visible, never copied; or a KeyIntervalMask,
            which takes O(Sk) memory; or KeyLists, which are built once from either, or from the keys of an indexer, and
            reused. With a batch dimension of B/n, n consecutive batch elements share each entry.
        attn_bias: ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}) in query's dtype or float32, added to the scores without
            rounding. Its gradient has its shape and dtype, and is summed in float32 over broadcast and shared
            dimensions; on Hopper the gradient of a 16-bit dense bias that 2 to 8 batch elements share may be summed in
            its dtype (docs/semantics.md). On CUDA a key bias [.., 1, Sk] takes the same time in both dtypes; a float32
            bias [.., Sq, Sk] with a 16-bit query is slower, except for a pair bias on Hopper (docs/usage.md).
        softmax_scale: a number, by default 1 / sqrt(D); or a floating tensor () or (H), which is differentiable: query
            is multiplied by it in float32, and the product is rounded to query's dtype. Its values are not checked.
        is_causal: key j is visible to row i only if j <= i + (Sk - Sq): aligned to the bottom right corner.
        softcap: 0 for none, else the bound of the capped scores.
        deterministic: the same inputs produce bitwise identical gradients.
        return_attn_probs: also return lse and the probabilities. For tests: materializes (B, H, Sq, Sk).
            Not with cache_seqlens. With sinks the rows sum to less than 1.
        return_lse: also return lse. It is differentiable: `merge_attention` merges calls over disjoint keys exactly.
        window_size: causal top-k selection (KeyIntervalMask.topk), not a sliding window: row i sees the `window_size`
            keys of largest bias among the keys that causality allows. If biases are equal, the later key is selected.
            Requires is_causal, a key bias ({B|1}, {H|Hkv|1}, 1, Sk), and no attn_mask.
        sparse: "tiles" visits blocks of keys and skips fully masked ones; "lists" gathers the keys that a block of rows
            sees, at a cost proportional to their number, and requires a mask or window_size; "auto" selects the faster
            one as far as that is known without a synchronization.
        cache_seqlens: int32 (B), or an int for all: the number of valid keys of each batch element, of the Sk in a
            partly filled cache. Keys beyond are neither selected nor read, and the last query row is aligned with the
            last valid key. On CUDA only the device reads the values of a tensor, so that one CUDA graph serves all
            lengths. For inference: no gradients.
        relative_bias: ({B|1}, {H|Hkv|1}, 2R + 1), float32 or in query's dtype, added to the scores by the distance
            d = j - (i + Sk - Sq) of key j from row i's own key: entry R + clamp(d, -R, R). No Sq x Sk tensor is
            materialized. With cache_seqlens Sk is the number of valid keys. -inf and `finfo.min` mask. Blocks of keys
            that it masks are skipped, except with a grid or lists; on CUDA these are the blocks beyond the first
            and the last visible distance, for sequences of at least 1,024 keys. Its gradient is summed in float32.
            `flash_dmattn.relative` makes the tables of T5, ALiBi and others. window_size selects by attn_bias alone.
        grid: (h, w), for the tokens of an image in row-major order: Sq = Sk = h * w. relative_bias is
            ({B|1}, {H|Hkv|1}, 2h - 1, 2w - 1), and query row (y_i, x_i) and key (y_j, x_j) read its entry
            (y_i - y_j + h - 1, x_i - x_j + w - 1): the sign is opposite to that of d.
        sinks: ({H|1}), float32 or in query's dtype: one logit per head that the denominator of the softmax includes,
            differentiable. lse does not include it.
        scale: the former name of softmax_scale, deprecated.

    None for is_causal, softcap, deterministic or return_attn_probs means the default.

    Returns:
        out (B, Sq, H, Dv) in query's dtype;
        with return_lse (out, lse), lse (B, H, Sq) in natural logarithms, float32 (float64 for float64), -inf for a row
        without visible keys;
        with return_attn_probs (out, lse, probs), probs (B, H, Sq, Sk) in query's dtype, without a gradient.

    Raises:
        ValueError: an invalid shape or value; cache_seqlens with a tensor that requires grad while gradients are
            enabled; on the CPU a NaN in attn_bias with window_size. On CUDA this NaN fails a device-side assertion,
            which ends the CUDA context.
        TypeError: an invalid dtype or type.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    is_plain = relative_bias is None and grid is None and sinks is None and scale is None
    if is_plain and return_attn_probs is False and sparse == "auto":
        options = (softmax_scale, is_causal, softcap, deterministic, return_lse, window_size, cache_seqlens)
        result = ops.fast_path(query, key, value, attn_mask, attn_bias, *options, LIMITS)
        if result is not None:
            return result
    call = Call(
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, return_attn_probs),
        return_lse=return_lse,
        window_size=window_size,
        sparse=sparse,
        cache_seqlens=cache_seqlens,
        relative_bias=relative_bias,
        grid=grid,
        sinks=sinks,
        scale=scale,
    )
    return attend(kernels_for(query), call)


@continued_by(flash_dmattn_func, "attn_mask")
def flash_dmattn_qkvpacked_func(qkv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` of qkv (B, S, 3, H, D): query, key and value along the third dimension.

    qkv is in the dtypes of `flash_dmattn_func`. The other arguments and errors are those of `flash_dmattn_func` from
    attn_mask on, with Sq = Sk = S and Hkv = H: attn_mask and attn_bias ({B|B/n|1}, {H|1}, {S|1}, {S|1}). Returns
    out (B, S, H, D), lse (B, H, S), probs (B, H, S, S).
    """
    checks.compiled_check("check_packed", "qkv", qkv, "(B, S, 3, H, D)", 3)
    require_device_with_kernels("qkv", qkv)
    if kwargs.get("cache_seqlens") is not None:
        require_no_grad("qkv", qkv, "cache_seqlens")
    return flash_dmattn_func(*qkv.unbind(dim=2), *args, **kwargs)


@continued_by(flash_dmattn_func, "attn_mask")
def flash_dmattn_kvpacked_func(query: Tensor, kv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` of query (B, Sq, H, D) and kv (B, Sk, 2, Hkv, D): key and value along the third dimension.

    kv is in query's dtype. The other arguments and errors are those of `flash_dmattn_func` from attn_mask on: attn_mask
    and attn_bias ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}). Returns out (B, Sq, H, D), lse (B, H, Sq), probs
    (B, H, Sq, Sk).
    """
    checks.compiled_check("check_packed", "kv", kv, "(B, Sk, 2, Hkv, D)", 2)
    checks.compiled_check("check_kv", query, kv, "(B, Sq, H, D)", not autocast_is_on(kv.device))
    if kwargs.get("cache_seqlens") is not None:
        require_no_grad("kv", kv, "cache_seqlens")
    return flash_dmattn_func(query, *kv.unbind(dim=2), *args, **kwargs)


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool | None = False,
    softcap: float | None = 0.0,
    deterministic: bool | None = False,
    return_attn_probs: bool | None = False,
    *,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: Sparse = "auto",
    relative_bias: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` for packed sequences of different lengths.

    Args:
        query: (total_q, H, D); dtypes, D and H as in `flash_dmattn_func`.
        key: (total_k, Hkv, D) in query's dtype.
        value: (total_k, Hkv, Dv) in query's dtype.
        attn_mask: bool, True = visible: per key (total_k, {H|Hkv|1}), or per score
            (total_q, {H|Hkv|1}, max_seqlen_k), whose last dimension counts from the sequence's first key; or a
            KeyIntervalMask of (total_k, {H|Hkv|1}), whose rows count from the sequence's first; or KeyLists.
        attn_bias: in the same shapes, in query's dtype or float32; on CUDA a bias per score is in query's dtype.
        cu_seqlens_q: required, int32 (B + 1): sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. The
            values are not checked on CUDA, where that would need a synchronization.
        cu_seqlens_k: required, int32 (B + 1), the same for keys.
        max_seqlen_q: required, at least the longest sequence of rows: an int, or outside of compiled graphs an integer
            tensor () on the CPU.
        max_seqlen_k: required, at least the longest sequence of keys, the same.
        softmax_scale, is_causal, softcap, deterministic: as in `flash_dmattn_func`; causality holds in each sequence.
        return_attn_probs, return_lse, sparse, sinks, scale: as in `flash_dmattn_func`.
        window_size: as in `flash_dmattn_func`, in each sequence. Requires attn_bias per key, (total_k, {H|Hkv|1}).
        relative_bias: as in `flash_dmattn_func`; distances count from the sequence's own lengths. B sequences may have
            one table each.
        grid: must be None: a grid is for fixed length.

    Returns:
        out (total_q, H, Dv), or (out, lse) with lse (H, total_q), or (out, lse, probs) with probs
        (B, H, max_seqlen_q, max_seqlen_k), zero beyond a sequence's rows and keys.

    Raises:
        As `flash_dmattn_func`.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    is_masked = attn_mask is not None or window_size is not None
    is_plain = relative_bias is None and grid is None and sinks is None and scale is None
    if is_plain and not is_masked and return_attn_probs is False and sparse == "auto":
        options = (softmax_scale, is_causal, softcap, deterministic, return_lse)
        result = ops.varlen_fast_path(query, key, value, attn_bias, *lengths, *options)
        if result is not None:
            return result
    call = Call(
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, return_attn_probs),
        return_lse=return_lse,
        window_size=window_size,
        sparse=sparse,
        relative_bias=relative_bias,
        grid=grid,
        sinks=sinks,
        scale=scale,
    )
    call.varlen = Varlen(*lengths)
    return attend(kernels_for(query), call)


@continued_by(flash_dmattn_varlen_func, "softmax_scale")
def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
    *args,
    **kwargs,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_varlen_func` of qkv (total, 3, H, D): query, key and value along the second dimension.

    Args:
        qkv: (total, 3, H, D), in the dtypes of `flash_dmattn_func`.
        attn_mask, attn_bias: per key (total, {H|1}), or per score (total, {H|1}, max_seqlen).
        cu_seqlens: required, int32 (B + 1), the offsets of the sequences.
        max_seqlen: required, at least the longest sequence, as max_seqlen_q of `flash_dmattn_varlen_func`.

    The other arguments and errors are those of `flash_dmattn_varlen_func` from softmax_scale on. Returns
    out (total, H, D), lse (H, total), probs (B, H, max_seqlen, max_seqlen).
    """
    checks.compiled_check("check_packed", "qkv", qkv, "(total, 3, H, D)", 3)
    require_device_with_kernels("qkv", qkv)
    checks.refuse_offsets_as_mask(attn_mask)
    require_given(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    max_seqlen = require_max_seqlen("max_seqlen", max_seqlen)
    total = (qkv.shape[0], "the rows of qkv")
    check_cu_seqlens("cu_seqlens", cu_seqlens, qkv, "qkv", total, ("max_seqlen", max_seqlen))
    checks.check_scores_of_qkv(qkv, max_seqlen, {"attn_mask": attn_mask, "attn_bias": attn_bias})
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_dmattn_varlen_func(*qkv.unbind(dim=1), attn_mask, attn_bias, *lengths, *args, **kwargs)


@continued_by(flash_dmattn_varlen_func, "attn_mask")
def flash_dmattn_varlen_kvpacked_func(query: Tensor, kv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_varlen_func` of query (total_q, H, D) and kv (total_k, 2, Hkv, D): key and value along dimension 1.

    kv is in query's dtype. The other arguments and errors are those of `flash_dmattn_varlen_func` from attn_mask on:
    attn_mask and attn_bias (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k). Returns out (total_q, H, D),
    lse (H, total_q), probs (B, H, max_seqlen_q, max_seqlen_k).
    """
    checks.compiled_check("check_packed", "kv", kv, "(total_k, 2, Hkv, D)", 2)
    checks.compiled_check("check_kv", query, kv, "(total_q, H, D)", not autocast_is_on(kv.device))
    return flash_dmattn_varlen_func(query, *kv.unbind(dim=1), *args, **kwargs)


def flash_dmattn_func_auto(backend: Backend | None = None) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """`flash_dmattn_func` on a given backend: "cuda", "cpu", "triton", "flex" or "reference".

    Args:
        backend: its name; None selects the first available one now, not by the tensors of a call: "cuda" and "cpu" take
            tensors of their device only.

    Returns:
        A function with the arguments, results and errors of `flash_dmattn_func`. It raises an error for what its
        backend does not support, and never falls back to another. It can be pickled, with the backend that was selected
        for None; loading it where this backend is unavailable raises an error.

    Raises:
        ValueError: an unknown name.
        RuntimeError: an unavailable backend.
    """
    name = backend if backend is not None else next(filter(backends.is_available, backends.NAMES))
    return BackendFunction(backends.require(name))


class BackendFunction:
    # What functools.wraps sets, on the class: torch.compile of PyTorch 2.11 cannot trace it on an object.
    __wrapped__ = staticmethod(flash_dmattn_func)
    __name__, __doc__ = flash_dmattn_func.__name__, flash_dmattn_func.__doc__

    def __init__(self, backend: ModuleType):
        self.backend = backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackendFunction) and other.backend is self.backend

    def __hash__(self) -> int:
        return hash(BackendFunction)  # torch.compile of PyTorch 2.11 hashes an object before __init__

    def __call__(self, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
        try:
            call = Call(*args, **kwargs)
        except TypeError:  # its message names Call
            require_arguments_of(self, args, kwargs)
            raise
        return attend(self.backend, call)

    def __repr__(self) -> str:
        return f"flash_dmattn_func_auto({self.backend.NAME!r})"

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return flash_dmattn_func_auto, (self.backend.NAME,)
