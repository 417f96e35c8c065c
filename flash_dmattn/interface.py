"""The public functions: dynamic-mask attention of separate, packed and variable-length inputs.

Every form comes down to `attend` (fixed length) or `attend_varlen`, which check the inputs, bring them into the form
that the backends take, call one, and undo what was done to them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import backends, checks, key_lists, ops, selection
from .arguments import check_cu_seqlens, require_tensor
from .backends import cpu, cuda, reference
from .biases import hides
from .checks import AnyMask, Varlen
from .interval_mask import KeyIntervalMask
from .key_lists import KeyIndices, KeyLists, dense_mask
from .ops import is_per_key

HEAD_DIM_MULTIPLE = 8  # the kernels read rows in pieces of 16 bytes


def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: str = "auto",
    cache_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention with a mask and an additive bias, differentiable in query, key, value and bias.

    For row i and key j of a batch element and head:

        s_ij = softmax_scale * <q_i, k_j>, then softcap * tanh(s_ij / softcap) where softcap > 0
        p_ij = softmax over the visible keys j of (s_ij + bias_ij)
        o_i  = sum_j p_ij v_j

    A key is visible where attn_mask is True, causality allows it, and its bias is above the least finite number of the
    bias's dtype, of which additive masks are made: that hides as -inf does. A row that sees no key gives 0 and zero
    gradients. CUDA tensors go to the CUDA kernels, CPU tensors to the CPU kernels.

    Args:
        query: (B, Sq, H, D), float16 or bfloat16; on the CPU float32 and float64 too. D from 1 to 256.
        key: (B, Sk, Hkv, D) in query's dtype. H is a multiple of Hkv; query head h uses key/value head h // (H / Hkv).
        value: (B, Sk, Hkv, D) in query's dtype.
        attn_mask: bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), True = visible, never copied; or a KeyIntervalMask,
            which costs O(Sk) memory; or KeyLists, made once of either, or of the keys that an indexer chose, and used
            often. Of a batch dimension of B/n each entry serves n batch elements that follow each other.
        attn_bias: ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}) in query's dtype, added to the scores; where it is the same
            for every row, [.., 1, Sk], float32 is accepted too. Its gradient comes in its own shape and dtype, summed
            in float32 over what was broadcast or shared.
        softmax_scale: 1 / sqrt(D) by default.
        is_causal: key j is visible to row i only where j <= i + (Sk - Sq): aligned to the bottom right corner.
        softcap: 0 for none, else the bound of the capped scores.
        deterministic: the same inputs give bitwise the same gradients.
        return_attn_probs: also return lse and the probabilities. For tests: materializes (B, H, Sq, Sk).
        return_lse: also return lse. It is differentiable: two calls over disjoint keys merge exactly.
        window_size: the causal dynamic mask, made in the call (KeyIntervalMask.topk): row i sees the `window_size` keys
            of largest bias among those that causality allows, ties to the later key. Needs is_causal, a bias of one
            number a key ({B|1}, {H|Hkv|1}, 1, Sk), and no attn_mask.
        sparse: "tiles" walks over all keys in tiles and skips what no row sees; "lists" gathers the keys that a tile of
            rows sees, at the cost of these alone, and needs a mask or window_size; "auto" takes the faster where that
            is known without waiting.
        cache_seqlens: int32 (B): how many of the Sk keys of each batch element there are, as in a cache that is filled
            in part. Keys beyond are neither chosen nor read, and the last query row stands at the last key. On CUDA
            the values are read on the device alone, so that one CUDA graph serves all lengths. For inference: no
            gradients.

    Returns:
        out (B, Sq, H, D) in query's dtype;
        with return_lse (out, lse), lse (B, H, Sq) in natural logarithms, float32 (float64 for float64), -inf where a
        row sees nothing;
        with return_attn_probs (out, lse, probs), probs (B, H, Sq, Sk) in query's dtype, without a gradient.

    Raises:
        ValueError: a shape or value that does not fit.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, or kernels that were not built.
    """
    nothing_else = attn_mask is None and window_size is None and cache_seqlens is None and return_attn_probs is False
    if nothing_else and sparse == "auto":
        result = ops.attend_plainly(
            query, key, value, attn_bias, softmax_scale, is_causal, softcap, deterministic, return_lse
        )
        if result is not None:
            return result
    return attend(
        kernels_for(query),
        *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap),
        *(deterministic, return_attn_probs, return_lse, window_size, sparse, cache_seqlens),
    )


def flash_dmattn_qkvpacked_func(qkv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` of qkv (B, S, 3, H, D): query, key and value along the third dimension.

    The other arguments and errors are those of `flash_dmattn_func` from attn_mask on, with Sq = Sk = S and Hkv = H:
    attn_mask and attn_bias ({B|B/n|1}, {H|1}, {S|1}, {S|1}). Returns out (B, S, H, D), lse (B, H, S), probs
    (B, H, S, S).
    """
    checks.check_packed("qkv", qkv, "(B, S, 3, H, D)", 3)
    require_kernels("qkv", qkv)
    return flash_dmattn_func(*qkv.unbind(dim=2), *args, **kwargs)


def flash_dmattn_kvpacked_func(query: Tensor, kv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` of query (B, Sq, H, D) and kv (B, Sk, 2, Hkv, D): key and value along the third dimension.

    The other arguments and errors are those of `flash_dmattn_func` from attn_mask on: attn_mask and attn_bias
    ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}). Returns out (B, Sq, H, D), lse (B, H, Sq), probs (B, H, Sq, Sk).
    """
    checks.check_packed("kv", kv, "(B, Sk, 2, Hkv, D)", 2)
    checks.check_kv(query, kv, "(B, Sq, H, D)", not autocast_is_on(kv.device))
    return flash_dmattn_func(query, *kv.unbind(dim=2), *args, **kwargs)


def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AnyMask,
    attn_bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_func` of sequences of different lengths, packed one after the other.

    Args:
        query: (total_q, H, D).
        key: (total_k, Hkv, D) in query's dtype.
        value: (total_k, Hkv, D) in query's dtype.
        attn_mask: bool, True = visible: one a key (total_k, {H|Hkv|1}), or one a pair
            (total_q, {H|Hkv|1}, max_seqlen_k), whose last dimension counts from the sequence's first key; or a
            KeyIntervalMask of (total_k, {H|Hkv|1}), whose rows count from the sequence's first; or KeyLists.
        attn_bias: in the same shapes in query's dtype; one number a key may be float32.
        cu_seqlens_q: int32 (B + 1): sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]. On CUDA the
            values are the caller's to get right: looking at them would make the GPU wait.
        cu_seqlens_k: int32 (B + 1), the same for keys.
        max_seqlen_q: at least the longest sequence of rows.
        max_seqlen_k: at least the longest sequence of keys.
        softmax_scale, is_causal, softcap, deterministic: as in `flash_dmattn_func`; causality holds in each sequence.
        return_attn_probs, return_lse, window_size, sparse: as in `flash_dmattn_func`.

    Returns:
        out (total_q, H, D), or (out, lse) with lse (H, total_q), or (out, lse, probs) with probs
        (B, H, max_seqlen_q, max_seqlen_k), zero beyond a sequence's rows and keys.

    Raises:
        As `flash_dmattn_func`.
    """
    return attend_varlen(
        kernels_for(query),
        *(query, key, value, attn_mask, attn_bias, Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)),
        *(softmax_scale, is_causal, softcap, deterministic, return_attn_probs, return_lse, window_size, sparse),
    )


def flash_dmattn_varlen_qkvpacked_func(
    qkv: Tensor,
    attn_mask: AnyMask,
    attn_bias: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *args,
    **kwargs,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_varlen_func` of qkv (total, 3, H, D): query, key and value along the second dimension.

    Args:
        qkv: (total, 3, H, D).
        attn_mask, attn_bias: one a key (total, {H|1}), or one a pair (total, {H|1}, max_seqlen).
        cu_seqlens: int32 (B + 1), where each sequence begins and ends.
        max_seqlen: at least the longest sequence.

    The other arguments and errors are those of `flash_dmattn_varlen_func` from softmax_scale on. Returns
    out (total, H, D), lse (H, total), probs (B, H, max_seqlen, max_seqlen).
    """
    checks.check_packed("qkv", qkv, "(total, 3, H, D)", 3)
    require_kernels("qkv", qkv)
    check_cu_seqlens("cu_seqlens", cu_seqlens, qkv, "qkv", qkv.shape[0], ("max_seqlen", max_seqlen))
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_dmattn_varlen_func(*qkv.unbind(dim=1), attn_mask, attn_bias, *lengths, *args, **kwargs)


def flash_dmattn_varlen_kvpacked_func(query: Tensor, kv: Tensor, *args, **kwargs) -> Tensor | tuple[Tensor, ...]:
    """`flash_dmattn_varlen_func` of query (total_q, H, D) and kv (total_k, 2, Hkv, D): key and value along dimension 1.

    The other arguments and errors are those of `flash_dmattn_varlen_func` from attn_mask on: attn_mask and attn_bias
    (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k). Returns out (total_q, H, D), lse (H, total_q),
    probs (B, H, max_seqlen_q, max_seqlen_k).
    """
    checks.check_packed("kv", kv, "(total_k, 2, Hkv, D)", 2)
    checks.check_kv(query, kv, "(total_q, H, D)", not autocast_is_on(kv.device))
    return flash_dmattn_varlen_func(query, *kv.unbind(dim=1), *args, **kwargs)


def flash_dmattn_func_auto(backend: str | None = None) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """`flash_dmattn_func` on a backend of one's choice: "cuda", "cpu", "triton", "flex" or "reference".

    Args:
        backend: its name; None takes the best that is available here.

    Returns:
        A function with the arguments, results and errors of `flash_dmattn_func`. What its backend cannot do it
        refuses; it never falls back to another.

    Raises:
        ValueError: an unknown name.
        RuntimeError: a backend that is not available here.
    """
    name = backend if backend is not None else next(filter(backends.is_available, backends.NAMES))
    module = backends.require(name)

    @functools.wraps(flash_dmattn_func)
    def function(
        query,
        key,
        value,
        attn_mask=None,
        attn_bias=None,
        softmax_scale=None,
        is_causal=False,
        softcap=0.0,
        deterministic=False,
        return_attn_probs=False,
        *,
        return_lse=False,
        window_size=None,
        sparse="auto",
        cache_seqlens=None,
    ):
        return attend(
            module,
            *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap),
            *(deterministic, return_attn_probs, return_lse, window_size, sparse, cache_seqlens),
        )

    return function


def require_kernels(name: str, tensor: Tensor) -> str:
    """The type of the device that a tensor is on, where there are kernels for it."""
    device_type = tensor.device.type
    if device_type not in ("cpu", "cuda"):
        raise RuntimeError(f"{name} must be on a cpu or cuda device, got {tensor.device}")
    return device_type


def kernels_for(query: Tensor) -> ModuleType:
    """The compiled backend of the tensors' device; it says itself where it was not built."""
    require_tensor("query", query)
    device_type = require_kernels("query", query)
    ops.compiled_module()
    return cuda if device_type == "cuda" else cpu


def attend(
    backend: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    bias: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    return_lse: bool,
    window_size: int | None,
    sparse: str,
    cache_seqlens: Tensor | None,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of fixed length through a backend."""
    checks.check_options(
        *(mask, softmax_scale, is_causal, softcap, deterministic, return_attn_probs, return_lse, window_size, sparse)
    )
    query, key, value, bias = autocast(query, key, value, bias)
    checks.check_fixed(query, key, value, mask, bias, is_causal, cache_seqlens)
    checks.check_kernels(backend, query)
    if cache_seqlens is not None:
        checks.check_cache(backend, return_attn_probs)
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    if window_size is not None:
        checks.check_window(mask, bias, query.shape[0], seqlen_k, is_causal)
        as_lists = backend.SPARSE_MASKS and sparse != "tiles" and not return_attn_probs
        mask = selection.select(
            *(bias, window_size, seqlen_q, seqlen_k, cache_seqlens), as_lists=as_lists, must_mask=sparse == "lists"
        )
    row_bias = None
    if bias is not None and bias.shape[3] == 1 and seqlen_k != 1:  # the softmax does not see it
        row_bias, bias = reference.expand_shared(bias, query.shape[0], query.shape[2]), None
        hidden_rows = hides(row_bias)
        # Their outputs are replaced after the kernels; until then NaN in them must not reach the keys' gradients.
        query = query.masked_fill(hidden_rows.transpose(1, 2), 0)
    options = {
        "softmax_scale": default_scale(softmax_scale, query),
        "is_causal": bool(is_causal),
        "softcap": softcap,
    }
    cache = {} if cache_seqlens is None else {"cache_seqlens": cache_seqlens}
    learns = needs_gradients(query, key, value, bias)
    out, lse = backend.attention(
        *(kernel_rows(query), kernel_rows(key), kernel_rows(value)),
        mask_for(
            *(backend, mask, sparse, query, key, bias, learns, deterministic), seqlen_q, seqlen_k, bool(is_causal)
        ),
        bias,
        **options,
        **cache,
        deterministic=bool(deterministic),
    )
    out = without_padding(out, query.shape[-1])
    if row_bias is not None:
        out, lse = add_row_bias(out, lse, row_bias, hidden_rows)

    if return_attn_probs:
        with torch.no_grad():
            probs, *_ = reference.probabilities(query, key, dense_mask(mask, seqlen_q), bias, **options)
            probs = probs if row_bias is None else probs.masked_fill(hidden_rows, 0)
        return out, lse, probs.to(query.dtype)
    return (out, lse) if return_lse else out


def attend_varlen(
    backend: ModuleType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask,
    bias: Tensor | None,
    varlen: Varlen,
    softmax_scale: float | None,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    return_lse: bool,
    window_size: int | None,
    sparse: str,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of variable length through a compiled backend."""
    checks.check_options(
        *(mask, softmax_scale, is_causal, softcap, deterministic, return_attn_probs, return_lse, window_size, sparse)
    )
    query, key, value, bias = autocast(query, key, value, bias)
    checks.check_varlen(query, key, value, mask, bias, varlen, is_causal)
    checks.check_kernels(backend, query)
    if window_size is not None:
        checks.check_window(mask, bias, None, key.shape[0], is_causal)
        cu_seqlens_q, cu_seqlens_k, _, max_seqlen_k = varlen
        mask = selection.select_varlen(bias, window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, sparse == "lists")
    options = {
        "softmax_scale": default_scale(softmax_scale, query),
        "is_causal": bool(is_causal),
        "softcap": softcap,
    }
    held = checks.held_lengths(query, key, mask, bias, varlen)
    cu_seqlens_q, cu_seqlens_k, *lengths = held
    learns = needs_gradients(query, key, value, bias)
    out, lse = backend.attention(
        *map(kernel_rows, (query, key, value)),
        mask_for(
            *(backend, mask, sparse, query, key, bias, learns, deterministic),
            *(*lengths, bool(is_causal), cu_seqlens_q, cu_seqlens_k),
        ),
        bias,
        **options,
        deterministic=bool(deterministic),
        varlen=held,
    )
    out = without_padding(out, query.shape[-1])
    if return_attn_probs:
        return out, lse, varlen_probabilities(query, key, mask, bias, varlen, **options)
    return (out, lse) if return_lse else out


def needs_gradients(*leaves: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)


def mask_for(
    backend: ModuleType,
    mask: AnyMask | ops.MaskTensors,
    sparse: str,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    learns: bool,
    deterministic: bool,
    *problem,
) -> AnyMask | ops.MaskTensors:
    """The mask in a form that the backend takes. learns: whether gradients will be asked for."""
    if mask is None or isinstance(mask, ops.MaskTensors):
        return mask
    mask = without_repeats(mask) if isinstance(mask, Tensor) else mask
    if backend.SPARSE_MASKS:
        chosen = key_lists.choose(mask, sparse, learns, *problem)
        if sparse == "auto" and not deterministic and key_lists.may_be_short(chosen, bias, *problem):
            return key_lists.where_short(chosen, query, key, bias, learns, is_causal=problem[2])
        return chosen
    if sparse == "lists":
        raise ValueError(f"sparse='lists' is for the backends 'cuda' and 'cpu', got the backend '{backend.NAME}'")
    return dense_mask(mask, problem[0])


def without_repeats(mask: Tensor) -> Tensor:
    """A bool mask with size 1 in place of an expanded batch, head or row dimension: the kernels then read it once."""
    # Of variable length batch elements and rows lie in one dimension with the keys or before them.
    for dim in (0, 1, 2) if mask.ndim == 4 else (1,):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def autocast_is_on(device: torch.device) -> bool:
    # Of a device that knows no autocast, such as meta, the question whether it is on is an error.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The inputs as torch.autocast wants them: in its dtype, but for a bias of one number a key in float32."""
    require_tensor("query", query)
    if not autocast_is_on(query.device):
        return query, key, value, bias
    for name, tensor in (("key", key), ("value", value)):
        require_tensor(name, tensor)
    dtype = torch.get_autocast_dtype(query.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    if isinstance(bias, Tensor):
        bias = bias if is_per_key(bias.shape) and bias.dtype == torch.float32 else cast(bias)
    return cast(query), cast(key), cast(value), bias


def default_scale(softmax_scale: float | None, query: Tensor) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if softmax_scale is None else softmax_scale


def kernel_rows(rows: Tensor) -> Tensor:
    """Rows as the kernels read them: D contiguous and padded with zeros to a multiple of 8."""
    padding = -rows.shape[-1] % HEAD_DIM_MULTIPLE
    if padding:
        rows = pad(rows, (0, padding))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def without_padding(out: Tensor, head_dim: int) -> Tensor:
    """Undoes what kernel_rows padded."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def add_row_bias(out: Tensor, lse: Tensor, row_bias: Tensor, hidden_rows: Tensor) -> tuple[Tensor, Tensor]:
    """A bias ({B|1}, {H|1}, {Sq|1}, 1) shifts lse (B, H, Sq) and nothing else, or hides its whole row."""
    # A zero that comes of the bias, so that its gradient is zero, not None, where lse is not used.
    zero = row_bias[..., :0].sum()
    row_bias, hidden = row_bias[..., 0].to(lse.dtype), hidden_rows[..., 0]
    empty = hidden | (lse == -torch.inf)  # no gradient there, whatever that of lse is
    lse = (lse + row_bias.masked_fill(empty, 0)).masked_fill(hidden, -torch.inf)
    return out.masked_fill(hidden.transpose(1, 2)[..., None], zero), lse


@torch.no_grad()
def varlen_probabilities(
    query: Tensor, key: Tensor, mask: AnyMask, bias: Tensor | None, varlen: Varlen, **options
) -> Tensor:
    """probs (B, H, max_seqlen_q, max_seqlen_k) in query's dtype, a sequence at a time, zero beyond its ends."""
    offsets_q, offsets_k = varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist()
    batch = len(offsets_q) - 1
    probs = query.new_zeros(batch, query.shape[1], varlen.max_seqlen_q, varlen.max_seqlen_k)

    mask = mask.mask if isinstance(mask, KeyLists) else mask

    def pairs_of(pairs: Tensor | KeyIntervalMask | KeyIndices | None, rows: slice, keys: slice) -> Tensor | None:
        if pairs is None:
            return None
        if isinstance(pairs, KeyIndices):
            return pairs.sequence(b, rows, keys).to_dense(rows.stop - rows.start, keys.stop - keys.start)
        if isinstance(pairs, KeyIntervalMask):
            return pairs.sequence(keys.start, keys.stop).to_dense(rows.stop - rows.start)
        if pairs.ndim == 2:
            return pairs[keys].T[None, :, None, :]
        return pairs[rows, :, : keys.stop - keys.start].transpose(0, 1)[None]

    for b in range(batch):
        rows, keys = slice(*offsets_q[b : b + 2]), slice(*offsets_k[b : b + 2])
        pairs = (pairs_of(mask, rows, keys), pairs_of(bias, rows, keys))
        one, *_ = reference.probabilities(query[None, rows], key[None, keys], *pairs, **options)
        probs[b, :, : one.shape[2], : one.shape[3]] = one[0]
    return probs
