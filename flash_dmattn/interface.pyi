# Written by scripts/write_stub.py from the signatures in interface.py.
# fmt: off
from typing import Literal, Protocol, overload

from torch import Tensor

from .backends import Backend
from .checks import AnyMask
from .masks.choice import Sparse

@overload
def flash_dmattn_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *,
    bias_cache: Tensor | None = ..., bias: Tensor | None = ..., cache_seqlens: Tensor | int,
    cache_batch_idx: Tensor | None = ..., block_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int | Tensor | None = ..., window_size: int | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool = ..., softcap: float = ...,
    relative_bias: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[False] = ...,
    batch_invariant: bool = ...,
) -> Tensor: ...

@overload
def flash_dmattn_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *,
    bias_cache: Tensor | None = ..., bias: Tensor | None = ..., cache_seqlens: Tensor | int,
    cache_batch_idx: Tensor | None = ..., block_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int | Tensor | None = ..., window_size: int | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool = ..., softcap: float = ...,
    relative_bias: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: Literal[True],
    batch_invariant: bool = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_with_kvcache(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Tensor | None = ..., value: Tensor | None = ..., *,
    bias_cache: Tensor | None = ..., bias: Tensor | None = ..., cache_seqlens: Tensor | int,
    cache_batch_idx: Tensor | None = ..., block_table: Tensor | None = ..., cu_seqlens_q: Tensor | None = ...,
    max_seqlen_q: int | Tensor | None = ..., window_size: int | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool = ..., softcap: float = ...,
    relative_bias: Tensor | None = ..., sinks: Tensor | None = ..., return_lse: bool = ...,
    batch_invariant: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[False] = ..., window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[True], window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., *, return_attn_probs: Literal[True], return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: bool | None = ..., *, return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[False] = ..., window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[True], window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., *, return_attn_probs: Literal[True], return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: bool | None = ..., *, return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def flash_dmattn_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[False] = ..., window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
    return_lse: Literal[True], window_size: int | None = ..., sparse: Sparse = ...,
    cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., *, return_attn_probs: Literal[True], return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
    deterministic: bool | None = ..., return_attn_probs: bool | None = ..., *, return_lse: bool = ...,
    window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[False] = ...,
    window_size: int | None = ..., sparse: Sparse = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[True], window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ..., *,
    return_attn_probs: Literal[True], return_lse: bool = ..., window_size: int | None = ..., sparse: Sparse = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_func(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: bool | None = ..., *, return_lse: bool = ..., window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    max_seqlen: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[False] = ...,
    window_size: int | None = ..., sparse: Sparse = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    max_seqlen: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[True], window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    max_seqlen: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ..., *,
    return_attn_probs: Literal[True], return_lse: bool = ..., window_size: int | None = ..., sparse: Sparse = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ..., cu_seqlens: Tensor | None = ...,
    max_seqlen: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: bool | None = ..., *, return_lse: bool = ..., window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

@overload
def flash_dmattn_varlen_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[False] = ...,
    window_size: int | None = ..., sparse: Sparse = ..., relative_bias: Tensor | None = ...,
    grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor: ...

@overload
def flash_dmattn_varlen_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: Literal[False] | None = ..., *, return_lse: Literal[True], window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ..., *,
    return_attn_probs: Literal[True], return_lse: bool = ..., window_size: int | None = ..., sparse: Sparse = ...,
    relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
    scale: float | Tensor | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...

@overload
def flash_dmattn_varlen_kvpacked_func(
    query: Tensor, kv: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | Tensor | None = ...,
    max_seqlen_k: int | Tensor | None = ..., softmax_scale: float | Tensor | None = ...,
    is_causal: bool | None = ..., softcap: float | None = ..., deterministic: bool | None = ...,
    return_attn_probs: bool | None = ..., *, return_lse: bool = ..., window_size: int | None = ...,
    sparse: Sparse = ..., relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ...,
    sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
) -> Tensor | tuple[Tensor, ...]: ...

class FlashDmattnFunc(Protocol):
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
        softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
        deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
        return_lse: Literal[False] = ..., window_size: int | None = ..., sparse: Sparse = ...,
        cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
        grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
    ) -> Tensor: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
        softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
        deterministic: bool | None = ..., return_attn_probs: Literal[False] | None = ..., *,
        return_lse: Literal[True], window_size: int | None = ..., sparse: Sparse = ...,
        cache_seqlens: Tensor | int | None = ..., relative_bias: Tensor | None = ...,
        grid: tuple[int, int] | None = ..., sinks: Tensor | None = ..., scale: float | Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
        softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
        deterministic: bool | None = ..., *, return_attn_probs: Literal[True], return_lse: bool = ...,
        window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
        relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
        scale: float | Tensor | None = ...,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: AnyMask = ..., attn_bias: Tensor | None = ...,
        softmax_scale: float | Tensor | None = ..., is_causal: bool | None = ..., softcap: float | None = ...,
        deterministic: bool | None = ..., return_attn_probs: bool | None = ..., *, return_lse: bool = ...,
        window_size: int | None = ..., sparse: Sparse = ..., cache_seqlens: Tensor | int | None = ...,
        relative_bias: Tensor | None = ..., grid: tuple[int, int] | None = ..., sinks: Tensor | None = ...,
        scale: float | Tensor | None = ...,
    ) -> Tensor | tuple[Tensor, ...]: ...

def flash_dmattn_func_auto(backend: Backend | None = ...) -> FlashDmattnFunc: ...
