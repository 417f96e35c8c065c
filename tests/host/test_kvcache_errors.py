"""Bad input of flash_dmattn_with_kvcache raises an error that names the argument, the value and what is accepted, and
writes nothing."""

import re

import pytest
import torch
from kvcaches import make_call, make_sequences

from flash_dmattn import flash_dmattn_with_kvcache, ops


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def fixed(**changes):
    """A call over a contiguous cache of 2 sequences of 3 rows."""
    return changed(make_call(make_sequences([(10, 3), (20, 3)]), room=30, permute=False, spare=0), changes)


def paged(**changes):
    """A call over 11 pages of 16 keys for 2 sequences of 3 rows."""
    torch.manual_seed(0)
    call = make_call(make_sequences([(10, 3), (20, 3)]), room=64, page_size=16, permute=False)
    call.arguments["block_table"] = int32([0, -1, 99, 7], [4, 5, -1, 7])
    return changed(call, changes)


def packed(**changes):
    """A call over the cache of `paged`, with 1 and 4 rows."""
    call = make_call(make_sequences([(10, 1), (20, 4)]), room=64, page_size=16, permute=False)
    return changed(call, changes)


def changed(call, changes):
    """Calls with some arguments changed: by a value, or by a function of the tensor. An error must write nothing."""
    caches = call.k_cache, call.v_cache, call.arguments["bias_cache"]
    before = [x.clone() for x in caches]
    arguments = {"query": call.query, "k_cache": call.k_cache, "v_cache": call.v_cache, **call.arguments}
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    try:
        return flash_dmattn_with_kvcache(**arguments)
    except Exception:
        for x, y in zip(caches, before):
            assert torch.equal(x.detach().nan_to_num(), y.nan_to_num()), "the cache was written"
        raise


def strided(cache):
    """The same values, whose last dimension is not contiguous."""
    return cache.transpose(2, 3).contiguous().transpose(2, 3)


def with_nan(bias, page=0):
    """The same with NaN for key 2 of a page or batch element."""
    bias = bias.clone()
    bias[page, 2, 1] = float("nan")
    return bias


CASES = {
    "query is no tensor": (fixed, {"query": [1.0]}, TypeError, "query must be a torch.Tensor, got list"),
    "quantized cache": (
        *(fixed, {"k_cache": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)}, TypeError),
        "k_cache must not be quantized, got qint8",
    ),
    "k_cache is None": (fixed, {"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got NoneType"),
    "bias_cache is no tensor": (fixed, {"bias_cache": 1}, TypeError, "bias_cache must be a torch.Tensor, got int"),
    "query of 3 dimensions": (
        *(fixed, {"query": lambda x: x[0]}, ValueError),
        r"query must have 4 dimensions \(B, Sq, H, D\), got shape \(3, 4, 16\)",
    ),
    "query of no dimensions": (
        *(fixed, {"query": torch.tensor(1.0), "cache_seqlens": 3, "sinks": torch.zeros(4)}, ValueError),
        r"query must have 4 dimensions \(B, Sq, H, D\), got shape \(\)",
    ),
    "packed query of 1 dimension": (
        *(packed, {"query": torch.zeros(16), "sinks": torch.zeros(4)}, ValueError),
        r"query must have 3 dimensions \(total_q, H, D\), got shape \(16,\)",
    ),
    "integer query": (
        *(fixed, {"query": lambda x: x.int(), "relative_bias": torch.zeros(1, 1, 5).int()}, TypeError),
        "query must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "packed query of 4 dimensions": (
        *(packed, {"query": lambda x: x[None]}, ValueError),
        r"query must have 3 dimensions \(total_q, H, D\), got shape \(1, 5, 4, 16\)",
    ),
    "cache of 3 dimensions": (
        *(fixed, {"k_cache": lambda x: x[0]}, ValueError),
        r"k_cache must have 4 dimensions \(B, Sk, Hkv, D\), got shape \(30, 2, 16\)",
    ),
    "pages of 3 dimensions": (
        *(paged, {"v_cache": lambda x: x[0]}, ValueError),
        r"v_cache must have 4 dimensions \(pages, page_size, Hkv, D\), got shape \(16, 2, 16\)",
    ),
    "cache in another dtype": (
        *(fixed, {"k_cache": lambda x: x.half()}, TypeError),
        "k_cache must have query's dtype float32, got float16",
    ),
    "integer cache": (
        *(fixed, {"v_cache": lambda x: x.int()}, TypeError),
        "v_cache must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "caches differ": (
        *(fixed, {"v_cache": lambda x: x[:, :-1]}, ValueError),
        r"k_cache and v_cache must have the same shape except for the head dimension, got \(2, 30, 2, 16\) and \(2, 29",
    ),
    "head dimensions differ": (
        *(fixed, {"query": lambda x: x[..., :8]}, ValueError),
        "k_cache must have query's head dimension 8, got 16",
    ),
    "heads that do not divide": (
        *(fixed, {"query": lambda x: x[:, :, :3]}, ValueError),
        "query's head count must be a multiple of k_cache's, got 3 and 2",
    ),
    "strided cache": (
        *(fixed, {"k_cache": strided}, ValueError),
        "k_cache must be contiguous in its last dimension, got strides",
    ),
    "batch of the cache": (
        *(fixed, {"query": lambda x: x[:1], "key": None, "value": None, "bias": None, "cache_seqlens": 3}, ValueError),
        r"k_cache must have query's batch size 1, without cache_batch_idx and block_table, got shape \(2,",
    ),
    "batch of the cache of packed rows": (
        *(packed, {"block_table": None}, ValueError),
        "k_cache must have as many batch elements as cu_seqlens_q has sequences, 2, without",
    ),
    "biases of other keys": (
        *(fixed, {"bias_cache": lambda x: x[:, 1:]}, ValueError),
        r"bias_cache must be \(B, Sk, Hkv\) = \(2, 30, 2\), got shape \(2, 29, 2\)",
    ),
    "biases of other pages": (
        *(paged, {"bias_cache": lambda x: x[..., None]}, ValueError),
        r"bias_cache must be \(pages, page_size, Hkv\) = \(11, 16, 2\), got shape \(11, 16, 2, 1\)",
    ),
    "bias_cache in another dtype": (
        *(fixed, {"bias_cache": lambda x: x.half()}, TypeError),
        "bias_cache must be float32 or have the cache's dtype float32, got float16",
    ),
    "key alone": (fixed, {"value": None}, ValueError, "key and value come together, got key alone"),
    "value alone": (fixed, {"key": None}, ValueError, "key and value come together, got value alone"),
    "no bias of the new tokens": (
        *(fixed, {"bias": None}, ValueError),
        "bias of the new tokens must be given with key and bias_cache, got none",
    ),
    "bias without key": (
        *(fixed, {"key": None, "value": None}, ValueError),
        "bias comes with key and bias_cache, got it without key",
    ),
    "bias without bias_cache": (
        *(fixed, {"bias_cache": None}, ValueError),
        "bias comes with key and bias_cache, got it without bias_cache",
    ),
    "keys of other rows": (
        *(fixed, {"key": lambda x: x[:, :2]}, ValueError),
        r"key must be \(B, Sq, Hkv, D\) = \(2, 3, 2, 16\), got shape \(2, 2, 2, 16\)",
    ),
    "packed values of other rows": (
        *(packed, {"value": lambda x: x[:2]}, ValueError),
        r"value must be \(total_q, Hkv, D\) = \(5, 2, 16\), got shape \(2, 2, 16\)",
    ),
    "biases of other rows": (
        *(fixed, {"bias": lambda x: x[:, :2]}, ValueError),
        r"bias must be \(B, Sq, Hkv\) = \(2, 3, 2\), got shape \(2, 2, 2\)",
    ),
    "bias in another dtype": (
        *(fixed, {"bias": lambda x: x.double()}, TypeError),
        "bias must have bias_cache's dtype float32, got float64",
    ),
    "cache_seqlens is a float": (
        *(fixed, {"cache_seqlens": 1.5}, TypeError),
        "cache_seqlens must be a torch.Tensor or an int, got float",
    ),
    "cache_seqlens is a list": (
        *(fixed, {"cache_seqlens": [1, 2]}, TypeError),
        r"must be a torch.Tensor or an int, got list: pass torch.as_tensor\(cache_seqlens, dtype=torch.int32\)",
    ),
    "cache_seqlens is None": (
        *(fixed, {"cache_seqlens": None}, TypeError),
        "cache_seqlens must be a torch.Tensor or an int, got NoneType",
    ),
    "a large int": (fixed, {"cache_seqlens": 2**31}, ValueError, "cache_seqlens must fit in 32 bits, got 2147483648"),
    "64-bit lengths": (
        *(fixed, {"cache_seqlens": lambda x: x.long()}, TypeError),
        "cache_seqlens must be int32, got int64",
    ),
    "lengths of other sequences": (
        *(fixed, {"cache_seqlens": int32(1, 2, 3)}, ValueError),
        r"cache_seqlens must be \(B\) for 2 sequences, got shape \(3,\)",
    ),
    "a negative length": (
        *(fixed, {"cache_seqlens": int32(3, -1)}, ValueError),
        "cache_seqlens must not be negative, got -1 for sequence 1",
    ),
    "no room for the new tokens": (
        *(fixed, {"cache_seqlens": int32(28, 0)}, ValueError),
        "cache_seqlens must be at most the capacity of 30 keys per sequence, with the new tokens, got 28 and 3 new",
    ),
    "a length beyond the cache": (
        *(fixed, {"key": None, "value": None, "bias": None, "cache_seqlens": 31}, ValueError),
        "cache_seqlens must be at most the capacity of 30 keys per sequence, got 31 for sequence 0",
    ),
    "a length beyond the table": (
        *(packed, {"cache_seqlens": int32(10, 61)}, ValueError),
        "cache_seqlens must be at most the capacity of 64 keys per sequence, with the new tokens, got 61 and 4 new",
    ),
    "a page outside the cache": (
        *(paged, {"block_table": int32([0, 1, 2, 3], [4, 11, 5, 6])}, ValueError),
        "block_table must be of pages from 0 to 10 of k_cache, got 11 for page 1 of sequence 1",
    ),
    "a negative page": (
        *(paged, {"block_table": int32([-1, 1, 2, 3], [4, 5, 6, 7])}, ValueError),
        "block_table must be of pages from 0 to 10 of k_cache, got -1 for page 0 of sequence 0",
    ),
    "overlapping pages": (
        *(paged, {"block_table": int32([5, 1, 2, 3], [4, 5, 6, 7]), "cache_seqlens": int32(5, 20)}, ValueError),
        "block_table must assign each new token its own slot, got two for slot 5 of page 5",
    ),
    "overlapping batch elements": (
        *(fixed, {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(10, 12)}, ValueError),
        "cache_batch_idx must assign each new token its own slot, got two for slot 12 of batch element 1",
    ),
    "a page of another sequence's new tokens": (
        *(paged, {"block_table": int32([0, 1, 2, 3], [0, 5, 6, 7]), "cache_seqlens": int32(5, 20)}, ValueError),
        "block_table must not give a key the slot of a new token, got key 5 of sequence 1 in the slot of the new key 5",
    ),
    "a page of the sequence's own new tokens": (
        *(paged, {"block_table": int32([0, 0, 2, 3], [4, 5, 6, 7]), "cache_seqlens": int32(17, 20)}, ValueError),
        "block_table must not give a key the slot of a new token, got key 1 of sequence 0 in the slot of the new",
    ),
    "a batch element of another sequence's new tokens": (
        *(fixed, {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(10, 20)}, ValueError),
        "cache_batch_idx must not give a key the slot of a new token, got key 10 of sequence 1 in the slot of the new",
    ),
    "a batch element outside the cache": (
        *(fixed, {"cache_batch_idx": int32(0, 2)}, ValueError),
        "cache_batch_idx must be from 0 to 1, got 2 for sequence 1",
    ),
    "batch elements of other sequences": (
        *(fixed, {"cache_batch_idx": int32(0)}, ValueError),
        r"cache_batch_idx must be \(B\) for 2 sequences, got shape \(1,\)",
    ),
    "batch elements and pages": (
        *(paged, {"cache_batch_idx": int32(0, 1)}, ValueError),
        "cache_batch_idx is for a contiguous cache, got block_table too",
    ),
    "table of other sequences": (
        *(paged, {"block_table": lambda x: x[:1]}, ValueError),
        r"block_table must be \(B, pages of a sequence\) for 2 sequences, got shape \(1, 4\)",
    ),
    "table in another dtype": (
        *(paged, {"block_table": lambda x: x.long()}, TypeError),
        "block_table must be int32, got int64",
    ),
    "small pages": (
        *(paged, {n: lambda x: x[:, :8] for n in ("k_cache", "v_cache", "bias_cache")}, ValueError),
        r"k_cache must have pages of 16 to 256 keys with block_table, got shape \(11, 8, 2, 16\)",
    ),
    "large pages": (
        *(paged, {n: lambda x: x.repeat_interleave(17, 1) for n in ("k_cache", "v_cache", "bias_cache")}, ValueError),
        r"k_cache must have pages of 16 to 256 keys with block_table, got shape \(11, 272, 2, 16\)",
    ),
    "no max_seqlen_q": (
        *(packed, {"max_seqlen_q": None}, ValueError),
        "cu_seqlens_q requires max_seqlen_q, got cu_seqlens_q alone",
    ),
    "max_seqlen_q alone": (
        *(fixed, {"max_seqlen_q": 3}, ValueError),
        "max_seqlen_q requires cu_seqlens_q, got max_seqlen_q alone",
    ),
    "small max_seqlen_q": (
        *(packed, {"max_seqlen_q": 3}, ValueError),
        "max_seqlen_q must be at least the longest sequence 4, got 3",
    ),
    "offsets of no dimensions": (
        *(packed, {"cu_seqlens_q": torch.tensor(5, dtype=torch.int32), "cache_seqlens": 3}, ValueError),
        r"cu_seqlens_q must be \(B \+ 1\) with at least 1 element, got shape \(\)",
    ),
    "no offsets": (
        *(packed, {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32), "cache_seqlens": 3}, ValueError),
        r"cu_seqlens_q must be \(B \+ 1\) with at least 1 element, got shape \(0,\)",
    ),
    "offsets beyond the rows": (
        *(packed, {"cu_seqlens_q": int32(0, 1, 6), "max_seqlen_q": 9}, ValueError),
        r"cu_seqlens_q must be non-decreasing from 0 to at most 5, the rows of query, got cu_seqlens_q\[-1\] = 6$",
    ),
    "expanded heads of the cache": (
        *(fixed, {"k_cache": lambda x: x[:, :, :1].expand_as(x)}, ValueError),
        r"k_cache must not be expanded where new tokens are written, got strides \[",
    ),
    "expanded biases": (
        *(fixed, {"bias_cache": lambda x: x[:1].expand_as(x)}, ValueError),
        r"bias_cache must not be expanded where new tokens are written, got strides \[0, ",
    ),
    "NaN in the biases of the cache": (
        *(fixed, {"window_size": 3, "bias_cache": with_nan}, ValueError),
        "bias_cache must not be NaN where window_size selects by it",
    ),
    "NaN in the biases of a window of no keys": (
        *(fixed, {"window_size": 0, "bias_cache": with_nan}, ValueError),
        "bias_cache must not be NaN where window_size selects by it",
    ),
    "NaN in the biases of the pages": (
        *(paged, {"window_size": 3, "bias_cache": lambda x: with_nan(x, page=4)}, ValueError),
        "bias_cache must not be NaN where window_size selects by it",
    ),
    "NaN in the biases of the new tokens": (
        *(fixed, {"window_size": 3, "bias": with_nan}, ValueError),
        "bias must not be NaN where window_size selects by it",
    ),
    "lengths that require grad": (
        *(fixed, {"cache_seqlens": lambda x: x.float().requires_grad_()}, ValueError),
        "cache_seqlens must not require grad",
    ),
    "window without biases": (
        *(fixed, {"window_size": 3, "bias": None, "bias_cache": None}, ValueError),
        "window_size selects by bias_cache, got none",
    ),
    "window without causality": (
        *(fixed, {"window_size": 3, "is_causal": False}, ValueError),
        "window_size selects among the keys up to a row: it needs is_causal=True, got False",
    ),
    "negative window": (fixed, {"window_size": -1}, ValueError, "window_size must not be negative, got -1"),
    "sliding window of flash-attn": (
        *(fixed, {"window_size": (3, 0)}, TypeError),
        r"window_size must be an int, got \(3, 0\): it is top-k selection; a sliding window is "
        r"relative_bias=flash_dmattn.relative.window\(capacity \+ 1, left, right, device=query.device\), with None for "
        "a side without a limit",
    ),
    "window is a float": (fixed, {"window_size": 1.0}, TypeError, "window_size must be an int, got float"),
    "scale is NaN": (
        *(fixed, {"softmax_scale": float("nan")}, ValueError),
        "softmax_scale must be finite in float32, got nan",
    ),
    "negative softcap": (
        *(fixed, {"softcap": -1.0}, ValueError),
        r"softcap must be 0 \(none\) or positive, got -1.0",
    ),
    "softcap is None": (fixed, {"softcap": None}, TypeError, "softcap must be a number, got NoneType"),
    "is_causal is None": (fixed, {"is_causal": None}, TypeError, "is_causal must be a bool, got NoneType"),
    "return_lse is a number": (fixed, {"return_lse": 1}, TypeError, "return_lse must be a bool, got int"),
    "batch_invariant is a number": (
        *(fixed, {"batch_invariant": 1}, TypeError),
        "batch_invariant must be a bool, got int",
    ),
    "relative bias of a grid": (
        *(fixed, {"relative_bias": torch.zeros(1, 1, 3, 3)}, ValueError),
        r"relative_bias must be \({B\|1}, {H\|Hkv\|1}, 2R \+ 1\), got shape \(1, 1, 3, 3\)",
    ),
    "relative bias without a batch": (
        *(fixed, {"relative_bias": torch.zeros(4, 5)}, ValueError),
        r"relative_bias must be \({B\|1}, {H\|Hkv\|1}, 2R \+ 1\), got shape \(4, 5\): pass relative_bias\[None\]",
    ),
    "relative bias of entries alone": (
        *(fixed, {"relative_bias": torch.zeros(5)}, ValueError),
        r"relative_bias must be .*, got shape \(5,\): pass relative_bias\[None, None\]",
    ),
    "relative bias of integers": (
        *(fixed, {"relative_bias": torch.zeros(1, 1, 5).int()}, TypeError),
        "relative_bias must be floating, got int32",
    ),
    "relative bias in float64": (
        *(fixed, {"relative_bias": torch.zeros(1, 1, 5).double()}, TypeError),
        "relative_bias must be float32, got float64",
    ),
    "relative bias in float16": (
        *(fixed, {"relative_bias": torch.zeros(1, 1, 5).half()}, TypeError),
        "relative_bias must be float32, got float16",
    ),
    "even relative bias": (
        *(fixed, {"relative_bias": torch.zeros(1, 1, 4)}, ValueError),
        "relative_bias must have an odd number of entries in dimension 2",
    ),
    "relative bias of other sequences": (
        *(packed, {"relative_bias": torch.zeros(3, 1, 5)}, ValueError),
        r"relative_bias must be .*: dimension 0 must be 1 or 2, got shape \(3, 1, 5\)",
    ),
    "sinks of other heads": (
        *(fixed, {"sinks": torch.zeros(3)}, ValueError),
        r"sinks must be \({H\|1}\) for H = 4 heads, got shape \(3,\)",
    ),
    "key on another device": (
        *(fixed, {"key": torch.zeros(2, 3, 2, 16, device="meta")}, RuntimeError),
        "key must be on query's device cpu, got meta",
    ),
    "table on another device": (
        *(paged, {"block_table": torch.zeros(2, 4, dtype=torch.int32, device="meta")}, RuntimeError),
        "block_table must be on query's device cpu, got meta",
    ),
}


@pytest.fixture(params=["fast path", "slow path"])
def path(request, monkeypatch):
    if request.param == "slow path":
        monkeypatch.setattr(ops, "kvcache_fast_path", lambda *arguments: None)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("function, changes, error, message", CASES.values(), ids=CASES)
def test_bad_input(function, changes, error, message):
    function()  # without the changes
    with pytest.raises(error, match=message):
        function(**changes)


OVERLAPPING = {
    "the same": lambda: [torch.zeros(2, 30, 2, 16)] * 2,
    "shifted by a sequence": lambda: (lambda x: (x[:2], x[1:]))(torch.zeros(3, 30, 2, 16)),
    "shifted by keys": lambda: (lambda x: (x[:, :30], x[:, 2:]))(torch.zeros(2, 32, 2, 16)),
    "shifted by a head": lambda: (lambda x: (x[:, :, :2], x[:, :, 1:]))(torch.zeros(2, 30, 3, 16)),
    "shifted by columns": lambda: (lambda x: (x[..., :16], x[..., 8:]))(torch.zeros(2, 30, 2, 24)),
}
ALTERNATING = {
    "sequence by sequence": lambda: torch.zeros(2, 2, 30, 2, 16).unbind(1),
    "key by key": lambda: torch.zeros(2, 30, 2, 2, 16).unbind(2),
    "head by head": lambda: torch.zeros(2, 30, 2, 2, 16).unbind(3),
    "in one row": lambda: torch.zeros(2, 30, 2, 32).chunk(2, dim=-1),
}


OVERLAPPING_PAGES = {
    "the same": lambda: [torch.zeros(11, 16, 2, 16)] * 2,
    "shifted in a page": lambda: (lambda x: (x[:, :16], x[:, 4:]))(torch.zeros(11, 20, 2, 16)),
}
ALTERNATING_PAGES = {
    "page by page": lambda: torch.zeros(11, 2, 16, 2, 16).unbind(1),
    "shifted by a page": lambda: (lambda x: (x[:-1], x[1:]))(torch.zeros(12, 16, 2, 16)),  # as in transformers
}


@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
def test_caches_that_share_memory_are_not_written(make):
    k_cache, v_cache = make()
    with pytest.raises(ValueError, match="k_cache and v_cache must not share memory where new tokens are written, got"):
        fixed(k_cache=k_cache, v_cache=v_cache)
    fixed(k_cache=k_cache, v_cache=v_cache, key=None, value=None, bias=None)


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_a_query_in_the_cache_is_refused(cache):
    shared = torch.zeros(2, 30, 4, 16)
    first, query = shared[:, :, :2], shared[:, 10:13]
    message = f"query must not share memory with {cache}, into which new tokens are written: pass query.clone()"
    with pytest.raises(ValueError, match=re.escape(message)):
        fixed(**{cache: first, "query": query})
    # Without new tokens nothing is written.
    fixed(**{cache: first, "query": query, "key": None, "value": None, "bias": None})


def test_new_tokens_that_are_in_their_slots():
    call = make_call(make_sequences([(10, 3), (10, 3)]), room=30, permute=False, spare=0)
    expected = call().clone()
    call.arguments |= {"key": call.k_cache[:, 10:13], "value": call.v_cache[:, 10:13]}
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("make", ALTERNATING.values(), ids=ALTERNATING)
def test_caches_that_alternate_in_memory_are_written(make):
    k_cache, v_cache = make()
    fixed(k_cache=k_cache, v_cache=v_cache)
    assert k_cache.any() and v_cache.any()


@pytest.mark.parametrize("make", OVERLAPPING_PAGES.values(), ids=OVERLAPPING_PAGES)
def test_pages_that_share_memory_are_not_written(make):
    k_cache, v_cache = make()
    with pytest.raises(ValueError, match="k_cache and v_cache must not share memory where new tokens are written, got"):
        paged(k_cache=k_cache, v_cache=v_cache)


@pytest.mark.parametrize("make", ALTERNATING_PAGES.values(), ids=ALTERNATING_PAGES)
def test_pages_that_alternate_in_memory_are_written(make):
    k_cache, v_cache = make()
    paged(k_cache=k_cache, v_cache=v_cache)
    assert k_cache.any() and v_cache.any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "bias_cache"])
def test_negated_views_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} must not be a view whose negation .*: pass {name}.resolve_neg\(\)"):
        fixed(**{name: lambda x: torch.complex(x, x).conj().imag})


@pytest.mark.parametrize("name", ["query", "k_cache", "v_cache", "key", "value", "bias_cache", "bias", "sinks"])
def test_gradients_are_refused(name):
    changes = {name: torch.zeros(4, requires_grad=True) if name == "sinks" else lambda x: x.requires_grad_()}
    message = f"{name} must not require grad: flash_dmattn_with_kvcache is for inference, and has no gradients; make"
    with pytest.raises(ValueError, match=message):
        fixed(**changes)
    with torch.no_grad():
        fixed(**changes)
