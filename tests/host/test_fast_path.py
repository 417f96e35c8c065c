"""The fast path from Python to the operator, and the calls that must not take it."""

import pytest
import torch
from helpers import inputs, rand_mask
from kvcaches import make_call, make_sequences
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    flash_dmattn_with_kvcache,
    interface,
    kvcache,
    ops,
)
from flash_dmattn.masks.choice import CPU_MIN_KEYS


@pytest.fixture
def without_short_way(monkeypatch):
    """Runs a call without the fast path."""

    def run(call):
        with monkeypatch.context() as patch:
            for name in ("fast_path", "varlen_fast_path", "kvcache_fast_path"):
                patch.setattr(ops, name, lambda *arguments: None)
            return call()

    return run


@pytest.fixture
def long_ways(monkeypatch):
    """Counts the calls that took the slow path."""
    taken = []

    def count(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: taken.append(1) or function(*args))

    count(interface, "attend")
    count(kvcache, "kernels_for")
    return taken


def with_gradients(result, leaves):
    """The results of a call and their gradients."""
    results = result if isinstance(result, tuple) else (result,)
    return (*results, *torch.autograd.grad([x.sum() for x in results], leaves))


def error_of(call):
    """Type and message of the error that a call raises."""
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    return type(raised.value), str(raised.value).split("\nException raised")[0]


QUERY, KEY, VALUE = inputs(2, 9, 11, 4, 2, 16)
BIASES = {"none": None, "key": torch.randn(2, 2, 1, 11), "dense": torch.randn(1, 4, 9, 11)}
OPTIONS = [{}, {"is_causal": True, "softcap": 3.0}, {"softmax_scale": 0.3, "return_lse": True, "deterministic": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal, softcap", "scale, lse"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_the_fast_path_returns_the_same_bits(without_short_way, long_ways, bias, options):
    leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE, bias) if x is not None]

    def call():
        return with_gradients(flash_dmattn_func(*leaves[:3], None, *leaves[3:], **options), leaves)

    short = call()
    assert not long_ways
    long = without_short_way(call)
    assert len(long_ways) == 1 and len(short) == len(long)
    assert all(torch.equal(x, y) for x, y in zip(short, long))


ROW_BIAS = torch.randn(2, 2, 1, 11)
MASKED = {
    "bool": lambda rows: {"attn_mask": rand_mask(1, 1, rows, 11), "attn_bias": torch.randn(2, 4, rows, 11)},
    "bool of keys": lambda rows: {"attn_mask": rand_mask(2, 1, 1, 11)},
    "intervals": lambda rows: {"attn_mask": KeyIntervalMask.causal(rows, 11), "attn_bias": ROW_BIAS},
    "unstructured intervals": lambda rows: {
        "attn_mask": KeyIntervalMask.topk(ROW_BIAS, 3, rows),
        "attn_bias": ROW_BIAS,
        "is_causal": True,
    },
    "window_size": lambda rows: {"attn_bias": ROW_BIAS, "window_size": 3, "is_causal": True},
    "window_size 0": lambda rows: {"attn_bias": ROW_BIAS, "window_size": 0, "is_causal": True},
    "window_size of all keys": lambda rows: {"attn_bias": ROW_BIAS, "window_size": 11, "is_causal": True},
}


def leaves_of(*tensors):
    return [x.clone().requires_grad_() for x in tensors if x is not None]


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("masked", MASKED.values(), ids=MASKED.keys())
def test_masks_and_windows_take_the_fast_path(without_short_way, long_ways, masked, rows, needs_grad):
    options = masked(rows)
    bias = options.pop("attn_bias", None)
    leaves = leaves_of(QUERY[:, :rows], KEY, VALUE, bias)

    def call():
        with torch.set_grad_enabled(needs_grad):
            results = flash_dmattn_func(
                *leaves[:3], attn_bias=leaves[3] if leaves[3:] else None, **options, return_lse=True
            )
        return with_gradients(results, leaves) if needs_grad else results

    short = call()
    assert not long_ways
    long = without_short_way(call)
    assert len(long_ways) == 1 and len(short) == len(long)
    assert all(torch.equal(x, y) for x, y in zip(short, long))


def cache(lengths):
    return {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[11, 4], [5, 7], [0, 0]], ids=str)
@pytest.mark.parametrize("window_size", [None, 0, 3, 7, 99])
@pytest.mark.parametrize("rows", [1, 9])
def test_caches_take_the_fast_path(without_short_way, long_ways, rows, window_size, lengths, device):
    tensors = (x.to(device, torch.bfloat16) for x in (QUERY[:, :rows], KEY, VALUE, ROW_BIAS))
    query, key, value, bias = tensors
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    options = {"is_causal": True, "window_size": window_size, "cache_seqlens": filled, "return_lse": True}

    def call():
        return flash_dmattn_func(query, key, value, None, bias, **options)

    def is_same(short, long):
        # On CUDA the fast path of one row selects and attends in one kernel, the slow path attends to lists.
        if device == "cuda" and rows == 1 and window_size is not None:
            return torch.allclose(short.float(), long.float(), rtol=0.02, atol=0.01)
        return torch.equal(short, long)

    short = call()
    assert not long_ways
    assert all(map(is_same, short, without_short_way(call)))
    assert len(long_ways) == 1


@pytest.mark.parametrize("filled, needs_grad", [(None, False), (None, True), ([20, 40], False)])
def test_windows_of_all_keys_of_many_rows_take_the_fast_path(without_short_way, long_ways, filled, needs_grad):
    leaves = leaves_of(*inputs(2, 40, 41, 4, 2, 16), torch.randn(2, 2, 1, 41))
    leaves[3].data[:, :, :, 2:5] = -torch.inf
    options = {"is_causal": True, "return_lse": True, **({} if filled is None else cache(filled))}

    def call(window_size=40 if filled else 41):
        with torch.set_grad_enabled(needs_grad):
            results = flash_dmattn_func(*leaves[:3], attn_bias=leaves[3], window_size=window_size, **options)
        return with_gradients(results, leaves) if needs_grad else results

    short = call()
    assert not long_ways
    assert all(map(torch.equal, short, without_short_way(call)))
    assert all(map(torch.equal, short, call(None)))


def sequences(offsets_q=(0, 4, 4, 9), offsets_k=(0, 5, 7, 11), max_seqlen_q=5, max_seqlen_k=5, device="cpu"):
    offsets = (torch.tensor(offsets, dtype=torch.int32, device=device) for offsets in (offsets_q, offsets_k))
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, (*offsets, max_seqlen_q, max_seqlen_k)))


PACKED = [x[0] for x in (QUERY, KEY, VALUE)]  # nine rows and eleven keys
PACKED_BIASES = {"none": None, "key": torch.randn(11, 2), "dense": torch.randn(9, 4, 5)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("longest", [5, 2**40], ids=["exact bound", "loose bound"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal, softcap", "scale, lse"])
@pytest.mark.parametrize("bias", PACKED_BIASES.values(), ids=PACKED_BIASES.keys())
def test_packed_sequences_take_the_fast_path(without_short_way, long_ways, bias, options, longest, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    leaves = leaves_of(*(None if x is None else x.to(device, dtype) for x in (*PACKED, bias)))
    columns = 5 if bias is not None and bias.ndim == 3 else longest
    lengths = sequences(max_seqlen_q=longest, max_seqlen_k=columns, device=device)
    options = {**options, "deterministic": True}

    def call():
        return with_gradients(flash_dmattn_varlen_func(*leaves[:3], None, *leaves[3:], **lengths, **options), leaves)

    short = call()
    assert not long_ways
    long = without_short_way(call)
    assert len(long_ways) == 1 and len(short) == len(long)
    assert all(map(torch.equal, short, long))


# (keys before the new rows, new rows) of each sequence
CACHES = {
    "decoding": ([(10, 1), (20, 1)], {}),
    "rows": ([(10, 3), (20, 3)], {"permute": False, "spare": 0}),
    "packed pages": ([(10, 1), (20, 4)], {"page_size": 16}),
    "nothing new": ([(10, 3), (20, 3)], {"page_size": 16, "appends": False}),
    "no biases": ([(10, 1), (20, 1)], {"biased": False}),
}
CACHE_OPTIONS = {
    "plain": {},
    "scale, lse": {"softmax_scale": 0.3, "return_lse": True},
    "softcap, all keys": {"softcap": 3.0, "is_causal": False},
    "window": {"window_size": 7, "batch_invariant": True},
    "one length": {"cache_seqlens": 9},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", CACHE_OPTIONS.values(), ids=CACHE_OPTIONS)
@pytest.mark.parametrize("lengths, layout", CACHES.values(), ids=CACHES)
def test_caches_of_keys_take_the_fast_path(without_short_way, long_ways, lengths, layout, options, device):
    if "window_size" in options and not layout.get("biased", True):
        pytest.skip("nothing to select by")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = make_call(make_sequences(lengths, device=device, dtype=dtype), **layout)

    def run():
        call = given.to(device)
        call.k_cache, call.v_cache = call.k_cache.nan_to_num(), call.v_cache.nan_to_num()
        results = call(**options)
        return [*(results if isinstance(results, tuple) else [results]), call.k_cache, call.v_cache]

    short = run()
    assert not long_ways
    long = without_short_way(run)
    assert long_ways and len(short) == len(long)
    assert all(torch.equal(x, y) for x, y in zip(short, long))


OTHER_CACHES = {
    "sinks": lambda: {"sinks": torch.zeros(4)},
    "relative bias": lambda: {"relative_bias": torch.zeros(1, 1, 5)},
    "a tensor as scale": lambda: {"softmax_scale": torch.tensor(0.3)},
    "whole number as scale": lambda: {"softmax_scale": 1},
    "a number of NumPy": lambda: {"window_size": torch.tensor(7).numpy()[()]},
}


@pytest.mark.parametrize("change", OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_other_caches_take_the_slow_path(long_ways, change):
    call = make_call(make_sequences([(10, 3), (20, 3)]))
    call(**change())
    assert long_ways


def test_caches_under_autocast_take_the_slow_path(long_ways):
    call = make_call(make_sequences([(10, 3), (20, 3)], dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_dmattn_with_kvcache(call.query.float(), call.k_cache, call.v_cache, **call.arguments)
    assert out.dtype == torch.bfloat16 and long_ways


def test_lengths_that_are_views_take_the_fast_path(long_ways):
    lengths = sequences()
    expected = flash_dmattn_varlen_func(*PACKED, **lengths)
    lengths["cu_seqlens_q"] = torch.stack((lengths["cu_seqlens_q"], lengths["cu_seqlens_k"]), 1)[:, 0]
    assert torch.equal(flash_dmattn_varlen_func(*PACKED, **lengths), expected)
    query, key, value = inputs(2, 1, 11, 2, 1, 8)
    for filled in (torch.tensor([[5, -1], [9, -1]]).int()[:, 0], torch.tensor(7).int().expand(2)):
        expected = flash_dmattn_func(query, key, value, cache_seqlens=filled.clone())
        assert torch.equal(flash_dmattn_func(query, key, value, cache_seqlens=filled), expected)
    assert not long_ways


def test_a_smaller_window_of_many_rows_of_a_cache_takes_the_slow_path(long_ways):
    query, key, value = inputs(1, 17, 40, 2, 1, 8)
    options = {"is_causal": True, "attn_bias": torch.randn(1, 1, 1, 40)}
    for number, window_size in enumerate((30, 29)):
        flash_dmattn_func(query, key, value, **options, window_size=window_size, **cache([30]))
        assert len(long_ways) == number


def test_lengths_that_may_use_lists_take_the_slow_path(long_ways):
    keys = torch.randn(1, CPU_MIN_KEYS, 1, 8)
    for number, (length, taken) in enumerate([(CPU_MIN_KEYS - 1, 0), (CPU_MIN_KEYS, 1)]):
        few = keys[:, :length]
        for mask in (rand_mask(1, 1, 4, length), KeyIntervalMask.causal(4, length)):
            flash_dmattn_func(keys[:, :4], few, few, mask)
        assert len(long_ways) == 2 * taken, number


LONG = {
    "expanded mask": lambda: flash_dmattn_func(QUERY, KEY, VALUE, rand_mask(1, 1, 9, 11).expand(2, 4, 9, 11)),
    "key lists": lambda: flash_dmattn_func(QUERY, KEY, VALUE, KeyLists.build(KeyIntervalMask.causal(9, 11), 9)),
    "a window for more rows than topk_lists takes": lambda: flash_dmattn_func(
        *(x.repeat(1, 2, 1, 1) for x in (QUERY, KEY, VALUE)),
        attn_bias=torch.randn(1, 1, 1, 22),
        window_size=3,
        is_causal=True,
    ),
    "a mask of a cache": lambda: flash_dmattn_func(
        QUERY, KEY, VALUE, rand_mask(1, 1, 9, 11), cache_seqlens=torch.tensor([3, 11], dtype=torch.int32)
    ),
    "tiles": lambda: flash_dmattn_func(QUERY, KEY, VALUE, rand_mask(1, 1, 9, 11), sparse="tiles"),
    "probs": lambda: flash_dmattn_func(QUERY, KEY, VALUE, return_attn_probs=True),
    "head dimension of 12": lambda: flash_dmattn_func(QUERY[..., :12], KEY[..., :12], VALUE[..., :12]),
    "rows that are not contiguous": lambda: flash_dmattn_func(QUERY.transpose(2, 3).contiguous().mT, KEY, VALUE),
    "bias of rows": lambda: flash_dmattn_func(QUERY, KEY, VALUE, None, torch.randn(1, 1, 9, 1)),
    "whole number as scale": lambda: flash_dmattn_func(QUERY, KEY, VALUE, softmax_scale=1),
    "packed, a mask": lambda: flash_dmattn_varlen_func(*PACKED, rand_mask(11, 1), **sequences()),
    "packed, a window": lambda: flash_dmattn_varlen_func(
        *PACKED, attn_bias=torch.randn(11, 1), window_size=3, is_causal=True, **sequences()
    ),
    "packed, tiles": lambda: flash_dmattn_varlen_func(*PACKED, **sequences(), sparse="tiles"),
    "packed, head dimension of 12": lambda: flash_dmattn_varlen_func(*(x[..., :12] for x in PACKED), **sequences()),
    "vmap": lambda: torch.vmap(flash_dmattn_func)(*(x[None] for x in (QUERY, KEY, VALUE))),
}


@pytest.mark.parametrize("call", LONG.values(), ids=LONG.keys())
def test_other_calls_take_the_slow_path(long_ways, call):
    call()
    assert long_ways


def test_autocast_takes_the_slow_path(long_ways):
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_dmattn_func(QUERY, KEY, VALUE).dtype == torch.bfloat16
    assert long_ways


def test_modes_and_subclasses_see_the_operator():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    for mode in (Functions, Dispatched):
        seen.clear()
        with mode():
            flash_dmattn_func(QUERY, KEY, VALUE)
        assert ops.attention_forward in seen, mode
    seen.clear()
    flash_dmattn_func(QUERY, KEY.as_subclass(Subclass), VALUE)
    assert ops.attention_forward in seen


def nan_at(key):
    bias = torch.zeros(2, 2, 1, 11)
    bias[1, 1, 0, key] = torch.nan
    return bias


@pytest.mark.parametrize("keys", [2500, 20000], ids=["one thread", "several threads"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_nan_in_a_window_of_all_keys_is_refused_among_infinities(dtype, keys):
    """In any dtype, of any strides, and at any key of more than one chunk; beyond a cache's end it may stay."""
    query, key, value = inputs(2, 1, keys, 2, 2, 8, dtype)
    infinite = torch.zeros(2, 2, 1, keys, dtype=dtype)
    infinite[..., ::7], infinite[..., 5] = -torch.inf, torch.inf
    strided = infinite.repeat_interleave(2, dim=3)[..., ::2]
    for bias in (infinite, strided):
        options = {"attn_bias": bias, "is_causal": True, "window_size": keys}
        flash_dmattn_func(query, key, value, **options)
        for at in (0, 1023, 1024, keys - 1):
            before, bias[1, 1, 0, at] = bias[1, 1, 0, at].clone(), torch.nan
            with pytest.raises(ValueError, match="attn_bias must not be NaN where window_size selects by it"):
                flash_dmattn_func(query, key, value, **options)
            flash_dmattn_func(query, key, value, **options, **cache([keys, at]))
            bias[1, 1, 0, at] = before


def test_invalid_masks_and_windows_raise_the_errors_of_the_slow_path(without_short_way):
    calls = {
        "int mask": {"attn_mask": torch.ones(1, 1, 9, 11, dtype=torch.int32)},
        "array": {"attn_mask": [[1]]},
        "shape": {"attn_mask": rand_mask(1, 1, 9, 12)},
        "rows": {"attn_mask": KeyIntervalMask.causal(8, 11)},
        "keys": {"attn_mask": KeyIntervalMask.causal(9, 12)},
        "window without causality": {"attn_bias": ROW_BIAS, "window_size": 3},
        "window and mask": {
            "attn_mask": rand_mask(1, 1, 9, 11),
            "attn_bias": ROW_BIAS,
            "window_size": 3,
            "is_causal": True,
        },
        "window without bias": {"window_size": 3, "is_causal": True},
        "window of a dense bias": {"attn_bias": torch.randn(1, 1, 9, 11), "window_size": 3, "is_causal": True},
        "negative window": {"attn_bias": ROW_BIAS, "window_size": -1, "is_causal": True},
        "bool window": {"attn_bias": ROW_BIAS, "window_size": True, "is_causal": True},
        "NaN": {"attn_bias": nan_at(1), "window_size": 3, "is_causal": True},
        "NaN in a window of all keys": {"attn_bias": nan_at(10), "window_size": 11, "is_causal": True},
        "NaN in a cache": {"attn_bias": nan_at(3), "window_size": 2, "is_causal": True, **cache([4, 4])},
        "NaN in a full window": {"attn_bias": nan_at(3), "window_size": 4, "is_causal": True, **cache([4, 4])},
        "list of lengths": {"cache_seqlens": [4, 4]},
        "int64 lengths": {"cache_seqlens": torch.tensor([4, 4])},
        "shape of lengths": cache([[4, 4]]),
        "number of lengths": cache([4]),
        "long length": cache([4, 12]),
        "negative length": {"attn_bias": ROW_BIAS, "window_size": 3, "is_causal": True, **cache([-1, -2])},
        "gradient of a cache": {"attn_bias": ROW_BIAS.clone().requires_grad_(), **cache([4, 4])},
        "cache and dense window": {"attn_bias": torch.randn(1, 1, 9, 11), "window_size": 3, **cache([4, 4])},
        "bias and mask": {"attn_mask": rand_mask(1, 3, 9, 11), "attn_bias": torch.randn(1, 3, 9, 11)},
    }

    def error(options):
        return error_of(lambda: flash_dmattn_func(QUERY, KEY, VALUE, **options))

    for name, options in calls.items():
        short = error(options)
        assert without_short_way(lambda options=options: error(options)) == short, name


def test_invalid_packed_sequences_raise_the_errors_of_the_slow_path(without_short_way):
    offsets = torch.tensor([0, 4, 4, 9])
    calls = {
        "no offsets": {"cu_seqlens_q": None},
        "list": {"cu_seqlens_q": [0, 4, 4, 9]},
        "int64 offsets": {"cu_seqlens_q": offsets},
        "two dimensions": {"cu_seqlens_q": offsets.int()[None]},
        "descending offsets": sequences(offsets_q=(0, 4, 3, 9)),
        "end before the last row": sequences(offsets_q=(0, 4, 4, 8)),
        "other number of sequences": sequences(offsets_k=(0, 11)),
        "longer sequence": {"max_seqlen_q": 4},
        "negative bound": {"max_seqlen_k": -1},
        "huge bound": {"max_seqlen_k": 2**70},
        "bool bound": {"max_seqlen_q": True},
        "float bound": {"max_seqlen_q": 5.0},
        "bias of other keys": {"attn_bias": torch.randn(10, 2)},
        "bias of fixed length": {"attn_bias": ROW_BIAS},
        "dense bias with fewer columns": {"attn_bias": torch.randn(9, 4, 4)},
        "dtype of the bias": {"attn_bias": torch.randn(11, 2).half()},
        "fixed length": {"query": QUERY},
        "key heads": {"key": PACKED[1].repeat(1, 2, 1)[:, :3], "value": PACKED[2].repeat(1, 2, 1)[:, :3]},
        "softcap": {"softcap": -1.0},
        "flag": {"is_causal": 1},
    }

    def error(options):
        arguments = dict(zip(("query", "key", "value"), PACKED)) | sequences() | options
        return error_of(lambda: flash_dmattn_varlen_func(**arguments))

    for name, options in calls.items():
        short = error(options)
        assert without_short_way(lambda options=options: error(options)) == short, name


def test_the_node_in_the_graph():
    leaves = leaves_of(QUERY, KEY, VALUE, torch.randn(1, 4, 9, 11))
    out = flash_dmattn_func(*leaves[:3], attn_bias=leaves[3])
    assert out.grad_fn.name() == "FlashDmattnBackward"
    assert [edge is None for edge, _ in out.grad_fn.next_functions] == [False] * 4 + [True]
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out.sum(), leaves)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), leaves)
    out = flash_dmattn_func(*leaves[:3], attn_bias=leaves[3])
    with torch.no_grad():
        leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd(backend):
    leaves = leaves_of(QUERY, KEY, VALUE, ROW_BIAS)

    def gradients():
        out, lse = flash_dmattn_func(*leaves[:3], attn_bias=leaves[3], is_causal=True, window_size=5, return_lse=True)
        return torch.autograd.grad((out * out).sum() + lse[..., -1].sum(), leaves)

    expected = gradients()
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            assert all(map(torch.equal, gradients(), expected))


@pytest.mark.gpu
@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("keys", [128, 512])
@pytest.mark.parametrize("masked", ["bool", "row", "intervals", "topk", "window_size", "few rows", "all keys"])
def test_the_fast_path_on_cuda(without_short_way, long_ways, masked, keys, needs_grad):
    rows = 4 if masked == "few rows" else keys
    query, key, value = (x.to("cuda", torch.bfloat16) for x in inputs(2, rows, keys, 4, 2, 64))
    bias = torch.randn(2, 2, 1, keys, device="cuda", dtype=torch.bfloat16)
    if masked == "bool":
        mask, bias = rand_mask(2, 4, rows, keys).cuda(), torch.randn(1, 4, rows, keys, device="cuda").bfloat16()
    elif masked == "row":
        mask = rand_mask(2, 1, 1, keys).cuda()
    elif masked == "intervals":
        mask = KeyIntervalMask.causal(rows, keys, device="cuda")
    else:
        mask = KeyIntervalMask.topk(bias, 32, rows) if masked == "topk" else None
    window = {"window_size": 32, "few rows": 32, "all keys": keys}.get(masked)
    leaves = leaves_of(query, key, value, bias)

    def call():
        with torch.set_grad_enabled(needs_grad):
            options = {"attn_bias": leaves[3], "is_causal": True, "window_size": window, "deterministic": True}
            results = flash_dmattn_func(*leaves[:3], mask, **options, return_lse=True)
        return with_gradients(results, leaves) if needs_grad else results

    short = call()
    assert not long_ways
    long = without_short_way(call)
    assert len(long_ways) == 1 and all(torch.equal(x, y) for x, y in zip(short, long))


def test_a_bias_whose_negation_is_yet_to_be_done():
    query, key, value = torch.randn(1, 1, 1, 8), torch.randn(1, 40, 1, 8), torch.randn(1, 40, 1, 8)
    bias = torch.randn(1, 1, 1, 40, dtype=torch.complex64).conj().imag
    assert bias.is_neg()
    options = {"is_causal": True, "window_size": 4}
    expected = flash_dmattn_func(query, key, value, attn_bias=bias.resolve_neg(), **options)
    assert torch.equal(flash_dmattn_func(query, key, value, attn_bias=bias, **options), expected)
