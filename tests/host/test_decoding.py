"""Decoding: key selection in the call, and caches that are partly filled."""

import numpy as np
import pytest
import torch
from helpers import inputs, rand_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_with_kvcache,
    ops,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def problem(device, batch=2, seqlen_q=1, seqlen_k=300, heads=4, kv_heads=2, head_dim=64):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype, device)
    return tensors, torch.randn(batch, kv_heads, 1, seqlen_k, device=device).to(dtype)


def dense_of_topk(bias, window_size, seqlen_q):
    """bool ({B|1}, heads, Sq, Sk): the top-k mask, selected row by row by sorting."""
    keys = bias.shape[3]
    mask = torch.zeros(*bias.shape[:2], seqlen_q, keys, dtype=torch.bool, device=bias.device)
    for row in range(seqlen_q):
        end = max(keys - seqlen_q + row + 1, 0)
        # Reversed, a stable sort puts the later of equal keys first.
        best = end - 1 - bias[:, :, 0, :end].flip(-1).argsort(dim=-1, stable=True, descending=True)[..., :window_size]
        mask[:, :, row].scatter_(-1, best, True)
    return mask & (bias > torch.finfo(bias.dtype).min)


BIASES = {
    "normal": lambda b: b,
    "few values": lambda b: b.round(),
    "constant": torch.zeros_like,
    "rising": lambda b: b.sort(dim=-1).values,
    "falling": lambda b: b.sort(dim=-1, descending=True).values,
    "masked": lambda b: b.masked_fill(torch.rand_like(b.float()) < 0.8, -torch.inf),
    "least": lambda b: b.masked_fill(torch.rand_like(b.float()) < 0.8, torch.finfo(b.dtype).min),
}


@on_devices
@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("kind", BIASES)
def test_window_of_few_rows(device, seqlen_q, kind):
    for seqlen_k in (1, 5, 63, 64, 300, 5000):
        (query, key, value), bias = problem(device, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        bias = BIASES[kind](bias)
        for window_size in (0, 1, 20, 256, seqlen_k - 1, seqlen_k, seqlen_k + 9):
            mask = dense_of_topk(bias, max(window_size, 0), seqlen_q)
            expected = flash_dmattn_func(query, key, value, mask, bias, is_causal=True, return_lse=True, sparse="tiles")
            for sparse in ("auto", "tiles", "lists"):
                options = {"window_size": max(window_size, 0), "sparse": sparse, "return_lse": True}
                ours = flash_dmattn_func(query, key, value, None, bias, is_causal=True, **options)
                for x, y in zip(ours, expected):
                    torch.testing.assert_close(x, y, rtol=2e-2 if device == "cuda" else 1e-5, atol=1e-2)


@on_devices
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize("seqlen_q", [1, 5, 16])
def test_gradients_of_few_rows(device, seqlen_q, head_dim):
    tensors, bias = problem(device, seqlen_q=seqlen_q, seqlen_k=700, head_dim=head_dim)
    dout = torch.randn_like(tensors[0]) / 8

    def gradients(sparse):
        leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]
        out = flash_dmattn_func(*leaves[:3], None, leaves[3], is_causal=True, window_size=90, sparse=sparse)
        return torch.autograd.grad(out, leaves, dout)

    for x, y in zip(gradients("auto"), gradients("tiles")):
        torch.testing.assert_close(
            x, y, rtol=2e-2 if device == "cuda" else 1e-4, atol=5e-3 if device == "cuda" else 1e-5
        )


def check_lists(bias, window_size, rows):
    """Compares the lists of few rows with a row-by-row selection."""
    mask = dense_of_topk(bias, window_size, rows).flatten(0, 1)
    list_keys, spans, list_rows = ops.topk_lists(bias, window_size, rows, None)
    for index, (begin, end) in enumerate(spans.flatten(1).T.tolist()):
        expected = mask[index].any(dim=0).nonzero().flatten().int()
        size = expected.numel()
        assert end - begin == -(-size // 64) * 64
        assert torch.equal(list_keys[begin : begin + size], expected) and (list_keys[begin + size : end] == -1).all()
        if rows > 1:
            seen = list_rows[begin : begin + size, :1] >> torch.arange(rows, device=bias.device) & 1
            assert torch.equal(seen.bool(), mask[index][:, expected.long()].T)
            assert (list_rows[begin + size : end] == 0).all()


each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@on_devices
@each_dtype
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("keys", [1, 64, 1000, 70_001])
def test_lists_of_few_rows_are_exact(device, keys, rows, dtype):
    bias = torch.randn(3, 2, 1, keys, device=device).to(dtype)
    bias[0].masked_fill_(torch.rand_like(bias[0].float()) < 0.5, -torch.inf)
    bias[1] = bias[1].round()
    for window_size in (0, 1, 77, 2048):
        check_lists(bias, window_size, rows)


@on_devices
@each_dtype
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keys", [16_384, 16_387, 131_000])
@pytest.mark.parametrize("visible, lowest", [(0, 0), (10, 0), (10, 100), (0, 100), (3000, 100)])
def test_lists_of_fewer_visible_keys_than_the_window(device, visible, lowest, keys, rows, dtype):
    """Biases that mask are finfo.min or -inf: neither is listed, also where the window has room for them."""
    bias = torch.full((1, 2, 1, keys), -torch.inf, device=device, dtype=dtype)
    for head in bias[0]:
        at = torch.randperm(keys, device=device)[: visible + lowest]
        head[0, at[:visible]] = torch.randn(visible, device=device).to(dtype)
        head[0, at[visible:]] = torch.finfo(dtype).min
    check_lists(bias, 2048, rows)


@on_devices
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_opcheck(device, seqlen_q):
    bias = torch.randn(2, 2, 1, 500, device=device, dtype=torch.bfloat16)
    torch.library.opcheck(ops.topk_intervals, (bias, 30, seqlen_q, None, None, None))
    filled = torch.tensor([300, 500], dtype=torch.int32, device=device)
    for lengths in (None, filled):
        # The memory behind the lists may hold anything, so results are not compared.
        what = ("test_schema", "test_faketensor")
        torch.library.opcheck(ops.topk_lists, (bias, 30, seqlen_q, lengths), test_utils=what)


def masks_of(kind, batch, seqlen_q, seqlen_k, device):
    documents = KeyIntervalMask.documents(ids=torch.arange(seqlen_k, device=device) // 50)
    return {
        "none": None,
        "key mask": rand_mask(batch, 1, 1, seqlen_k, device=device),
        "bool": rand_mask(1, 2, seqlen_q, seqlen_k, device=device),
        "intervals": KeyIntervalMask(documents.start, documents.end),  # for any number of rows
    }[kind]


def part_of(mask, batch, length):
    """A mask of one batch element and its first keys."""
    if isinstance(mask, KeyIntervalMask):
        return KeyIntervalMask(mask.start[..., :length], mask.end[..., :length])
    return None if mask is None else mask[batch if mask.shape[0] > 1 else 0][None, ..., :length]


@on_devices
@pytest.mark.parametrize("seqlen_q", [1, 5, 40, 130])
@pytest.mark.parametrize("kind", ["none", "key mask", "bool", "intervals", "window", "window of all", "lists"])
def test_a_cache_filled_in_part_is_its_first_keys(device, seqlen_q, kind):
    lengths, windows = [0, 1, 64, 299, 300], {"window": 30, "window of all": 300}
    tensors, bias = problem(device, batch=len(lengths), seqlen_q=seqlen_q)
    dense = torch.randn(len(lengths), 1, seqlen_q, 300, device=device).to(bias.dtype)
    mask = masks_of(
        {"lists": "bool"}.get(kind, "none" if kind in windows else kind), len(lengths), seqlen_q, 300, device
    )
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    for batch, length in enumerate(lengths):  # the rest of the cache may hold anything
        for tensor in tensors[1:]:
            tensor[batch, length:] = torch.nan
        bias[batch, :, :, length:] = torch.nan
        dense[batch, ..., length:] = torch.nan
    for a_bias in (bias, dense) if kind not in windows else (bias,):
        options = {"is_causal": True, "return_lse": True, "window_size": windows.get(kind)}
        given = KeyLists.build(mask, seqlen_q, 300) if kind == "lists" else mask
        together = flash_dmattn_func(*tensors, given, a_bias, cache_seqlens=filled, **options)
        for batch, length in enumerate(lengths):
            query, key, value = (x[batch : batch + 1] for x in tensors)
            alone = flash_dmattn_func(
                *(query, key[:, :length], value[:, :length], part_of(mask, batch, length)),
                *(a_bias[batch : batch + 1, ..., :length],),
                **options,
            )
            for x, y in zip(together, alone):
                torch.testing.assert_close(x[batch], y[0], rtol=2e-2 if device == "cuda" else 1e-4, atol=1e-2)


@on_devices
@pytest.mark.parametrize("window_size", [None, 30])
def test_lengths_that_are_a_view(device, window_size):
    tensors, bias = problem(device)
    options = {"attn_bias": bias, "is_causal": True, "window_size": window_size}
    for filled in (torch.tensor([[100, -1], [300, -1]], device=device).int()[:, 0], torch.tensor(70).int().expand(2)):
        filled = filled.to(device)
        ours = flash_dmattn_func(*tensors, **options, cache_seqlens=filled)
        assert torch.equal(ours, flash_dmattn_func(*tensors, **options, cache_seqlens=filled.clone()))


@pytest.mark.parametrize("window_size", [30, 200, 1000])
@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
def test_nan_in_a_cache_is_refused_where_it_is_filled(seqlen_q, window_size):
    (query, key, value), bias = problem("cpu", seqlen_q=seqlen_q)
    filled = torch.tensor([120, 60], dtype=torch.int32)
    options = {"is_causal": True, "window_size": window_size, "cache_seqlens": filled}
    bias[1, 0, 0, 60] = torch.nan  # beyond the second sequence, before the end of the first
    assert flash_dmattn_func(query, key, value, None, bias, **options).isfinite().all()
    bias[1, 0, 0, 59] = torch.nan
    with pytest.raises(ValueError, match="attn_bias must not be NaN where window_size selects by it"):
        flash_dmattn_func(query, key, value, None, bias, **options)


class Visits(TorchDispatchMode):
    """Records the operators that are called, with the shapes of the tensors that they read."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if not is_view:
            tensors = (x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor))
            self.calls.append((str(function), [tuple(x.shape) for x in tensors]))
        return result


@pytest.mark.parametrize("window_size", [None, 30, 250, 100_000])
@pytest.mark.parametrize("seqlen_q", [1, 2, 40])
def test_the_room_of_a_cache_costs_nothing(seqlen_q, window_size):
    """The same operators read the same numbers of elements for any room."""
    visits = []
    for room in (400, 50_000):
        (query, key, value), bias = problem("cpu", seqlen_q=seqlen_q, seqlen_k=room, heads=2, kv_heads=1, head_dim=8)
        filled = torch.tensor([300, 170], dtype=torch.int32)
        options = {"is_causal": True, "window_size": window_size, "cache_seqlens": filled}
        with Visits() as seen:
            flash_dmattn_func(query, key, value, None, bias, **options)
        visits.append(seen.calls)
    assert visits[0] == visits[1] and any("attention_forward" in name for name, _ in visits[0])


def test_a_window_of_all_keys_calls_what_no_window_calls():
    """But for the check of the bias."""
    (query, key, value), bias = problem("cpu")
    filled = torch.tensor([300, 170], dtype=torch.int32)
    names = []
    for window_size in (None, 300):
        with Visits() as seen:
            options = {"is_causal": True, "window_size": window_size, "cache_seqlens": filled}
            flash_dmattn_func(query, key, value, None, bias, **options)
        names.append([name for name, _ in seen.calls if name.startswith("flash_dmattn.")])
    assert names[0] == names[1] == ["flash_dmattn.attention_forward.default"]


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_one_graph_serves_growing_lengths(seqlen_q):
    (query, key, value), bias = problem("cuda", seqlen_q=seqlen_q, seqlen_k=3000, head_dim=128)
    filled = torch.full((2,), 3000, dtype=torch.int32, device="cuda")

    def step():
        options = {"is_causal": True, "window_size": 200, "cache_seqlens": filled, "return_lse": True}
        return flash_dmattn_func(query, key, value, None, bias, **options)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 3000], [1, 2], [130, 131], [3000, 2999], [777, 64]):
        filled.copy_(torch.tensor(lengths))
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        for batch, length in enumerate(lengths):
            one = (x[batch : batch + 1, :length] for x in (key, value))
            alone = flash_dmattn_func(
                *(query[batch : batch + 1], *one, None, bias[batch : batch + 1, ..., :length]),
                **{"is_causal": True, "window_size": 200, "return_lse": True},
            )
            for x, y in zip(captured, alone):
                torch.testing.assert_close(x[batch], y[0], rtol=2e-2, atol=1e-2)


@on_devices
def test_an_int_is_the_length_of_all_caches(device):
    (query, key, value), bias = problem(device)
    lengths = torch.full((2,), 77, dtype=torch.int32, device=device)
    for options in ({"window_size": 20, "is_causal": True}, {}):
        one, each = (
            flash_dmattn_func(query, key, value, None, bias, cache_seqlens=given, **options) for given in (77, lengths)
        )
        assert torch.equal(one, each)


def test_a_numpy_int_is_a_length():
    query, key = torch.randn(2, 1, 2, 16), torch.randn(2, 10, 2, 16)
    for function in (flash_dmattn_func, flash_dmattn_with_kvcache):
        ours, expected = (function(query, key, key, cache_seqlens=length) for length in (np.int64(3), 3))
        assert torch.equal(ours, expected)


def test_an_int_length_may_change_in_a_compiled_graph():
    query, key = torch.randn(2, 1, 2, 16), torch.randn(2, 10, 2, 16)

    def of_func(length):
        return flash_dmattn_func(query, key, key, cache_seqlens=length)

    def of_cache(length):
        return flash_dmattn_with_kvcache(query, key, key, cache_seqlens=length)

    for function in (of_func, of_cache):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
        for length in (3, 5, 10):
            torch.testing.assert_close(compiled(length), function(length))


@on_devices
def test_cache_errors(device):
    (query, key, value), bias = problem(device)
    filled = torch.tensor([5, 300], dtype=torch.int32, device=device)

    def call(cache_seqlens, function=flash_dmattn_func, **options):
        return function(query, key, value, None, bias, is_causal=True, cache_seqlens=cache_seqlens, **options)

    with pytest.raises(TypeError, match=r"cache_seqlens must be a torch.Tensor or an int, got list: pass torch.as_ten"):
        call([5, 300])
    with pytest.raises(ValueError, match="cache_seqlens must not be negative, got -1"):
        call(-1)
    with pytest.raises(TypeError, match="cache_seqlens must be int32, got int64"):
        call(filled.long())
    with pytest.raises(ValueError, match=r"cache_seqlens must have 1 dimension \(B\), got shape \(1, 2\)"):
        call(filled[None])
    with pytest.raises(ValueError, match="cache_seqlens must have query's batch size 2, got 1"):
        call(filled[:1])
    with pytest.raises(RuntimeError, match="cache_seqlens must be on query's device .*, got meta"):
        call(filled.to("meta"))
    with pytest.raises(ValueError, match="return_attn_probs does not support cache_seqlens, got both"):
        call(filled, return_attn_probs=True)
    with pytest.raises(ValueError, match="cache_seqlens is for the backends .*, got the backend 'reference'"):
        call(filled, flash_dmattn_func_auto("reference"))
    if device == "cpu":
        with pytest.raises(ValueError, match="cache_seqlens must be from 0 to 300, the number of keys, got 301"):
            call(filled + 1)
    query.requires_grad_()
    with pytest.raises(ValueError, match="query must not require grad: cache_seqlens is for inference"):
        call(filled)
    with torch.no_grad():
        call(filled)


@on_devices
@pytest.mark.parametrize("name", ["sinks", "attn_bias", "relative_bias"])
def test_other_tensors_have_no_gradient_either(device, name):
    """attn_bias: constant along the keys."""
    (query, key, value), _ = problem(device)
    shapes = {"sinks": query.shape[2], "attn_bias": (1, 1, query.shape[1], 1), "relative_bias": (1, 1, 9)}
    tensor = torch.zeros(shapes[name], device=device)
    options = {name: tensor.requires_grad_(), "cache_seqlens": torch.full((2,), 7, dtype=torch.int32, device=device)}
    with pytest.raises(ValueError, match=f"{name} must not require grad: cache_seqlens is for inference"):
        flash_dmattn_func(query, key, value, **options)
    with torch.no_grad():
        flash_dmattn_func(query, key, value, **options)
