"""Biases that depend on the distance of a key from its row, against the materialized bias in float64."""

import functools

import pytest
import torch
from helpers import assert_close, eager, in_float64, run
from paths import CAUSAL, HALVES, LISTS, both, case, cpu, cuda
from sequences import Sequences, slices

from flash_dmattn import KeyIntervalMask, flash_dmattn_func, relative

ALL = ("none", "bool", "key", "intervals", *LISTS)
TABLES = [(batch, heads) for batch in (2, 1) for heads in (4, 2, 1)]


def head_dim(path):
    return 64 if path.on_cuda else 16


def table(path, *shape, dtype=torch.float32):
    return path.randn(*shape, dtype=dtype)


LENGTHS = [(1, 1), (1, 300), (300, 1), (65, 65), (129, 255), (255, 129), (600, 1000)]
RADII = {
    "0": lambda rows, keys: 0,
    "9": lambda rows, keys: 9,
    "all": max,
    "beyond": lambda rows, keys: rows + keys + 70,
}


@CAUSAL
@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("rows, keys", LENGTHS)
def test_lengths_and_radii(path, rows, keys, radius, causal):
    size = 2 * RADII[radius](rows, keys) + 1
    tensors = path.inputs(2, rows, keys, 4, 2, head_dim(path))
    path.check(tensors, relative_bias=table(path, 1, 4, size), is_causal=causal)


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("shape", TABLES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_broadcasts(path, shape, softcap):
    tensors = path.inputs(2, 140, 200, 4, 2, head_dim(path))
    path.check(tensors, relative_bias=table(path, *shape, 2 * 60 + 1), softcap=softcap)


@CAUSAL
@pytest.mark.parametrize("path", [case(path) for path in both(*ALL)])
@pytest.mark.parametrize("bias_shape", [None, (2, 2, 1), (1, 4, "Sq"), (1, 1, "Sq")], ids=str)
def test_masks_and_biases(path, bias_shape, causal):
    rows, keys = 300, 500
    bias = None
    if bias_shape is not None:
        bias = path.randn(*(rows if size == "Sq" else size for size in bias_shape), keys)
    for heads in (4, 1):
        mask = path.make_mask(2, heads, rows, keys)
        options = {"relative_bias": table(path, 1, heads, 2 * 130 + 1), "is_causal": causal}
        path.check(path.inputs(2, rows, keys, 4, 2, head_dim(path)), mask, bias, **options)


@pytest.mark.parametrize("path, dtype", [case(path, dtype) for path in both("none") for dtype in HALVES])
@pytest.mark.parametrize("size", [32, 96, 128, 192, 256])
def test_head_dimensions(path, dtype, size):
    tensors = path.inputs(2, 150, 200, 4, 2, size if path.on_cuda else size // 4, dtype=dtype)
    path.check(tensors, relative_bias=table(path, 1, 4, 2 * 90 + 1), is_causal=True)


@pytest.mark.parametrize("path, dtype", [case(path, dtype) for path in both("none") for dtype in HALVES])
def test_tables_in_the_dtype_of_query(path, dtype):
    bias = table(path, 1, 4, 2 * 40 + 1, dtype=dtype)
    bias[..., :9] = torch.finfo(dtype).min
    path.check(path.inputs(2, 90, 90, 4, 2, head_dim(path), dtype=dtype), relative_bias=bias)


@pytest.mark.parametrize("path", [case(path) for path in both("none", "bool", "interval lists")])
@pytest.mark.parametrize("by", [-torch.inf, torch.finfo(torch.float32).min])
def test_masked_distances(path, by):
    """A window of keys, far from the diagonal for head 1, and a head that sees nothing."""
    rows, keys, radius = 700, 900, 400
    distance = relative.distances(radius, path.device)
    bias = table(path, 1, 4, 2 * radius + 1)
    bias[:, 0, distance.abs() > 50] = by
    bias[:, 1, (distance > -300) | (distance < -350)] = by
    bias[:, 2, distance % 3 == 0] = by
    bias[:, 3] = by
    mask = path.make_mask(2, 4, rows, keys)
    out, lse, dq, *_, drelative = path.check(path.inputs(2, rows, keys, 4, 4, head_dim(path)), mask, relative_bias=bias)
    assert (out[:, :, 3] == 0).all() and (lse[:, 3] == -torch.inf).all() and (dq[:, :, 3] == 0).all()
    assert (drelative[bias == by] == 0).all()


@pytest.mark.parametrize("path", [case(path) for path in cpu("none")])
def test_masked_keys_may_hold_nan(path):
    query, key, value = path.inputs(1, 300, 300, 2, 2, head_dim(path))
    key[:, 200:], value[:, 200:] = torch.nan, torch.nan
    bias = table(path, 1, 2, 2 * 500 + 1)
    bias[..., 400:] = -torch.inf  # keys less than 101 before a row
    out, *gradients = run(
        flash_dmattn_func, (query, key, value), None, None, query, query[..., 0].transpose(1, 2), relative_bias=bias
    )
    assert out.isfinite().all() and all(x.isfinite().all() for x in gradients[1:])


@pytest.mark.parametrize("path", [case(path) for path in both("none", "bool")])
@pytest.mark.parametrize("rows, keys", [(150, 200), (200, 150)])
@pytest.mark.parametrize("by", [torch.nan, torch.inf])
def test_entries_that_no_score_reads_may_be_anything(path, rows, keys, by):
    bias = table(path, 1, 4, 2 * 400 + 1)
    bias[..., : 400 - keys + 1] = bias[..., 400 + keys :] = by
    mask = path.make_mask(2, 2, rows, keys)
    ours = path.check(path.inputs(2, rows, keys, 4, 2, head_dim(path)), mask, relative_bias=bias, is_causal=True)
    assert all(x.isfinite().all() for x in ours[2:])


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("grid", [None, (8, 32)], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1 - 2**-25, 1.0, 3.0])
def test_scales_and_the_least_number(path, scale, grid):
    """Kernels may divide the entries by the scale: what masks must mask, and nothing else."""
    bias = table(path, 1, 4, *((2 * 70 + 1,) if grid is None else (15, 63)))
    bias[:, :2, ..., ::3] = torch.finfo(torch.float32).min
    bias[:, 2:, ..., ::3] = -1e30
    query, key, value = path.inputs(2, 256, 256, 4, 2, head_dim(path))
    path.check((query / max(scale, 1), key, value), relative_bias=bias, softmax_scale=scale, grid=grid)


@pytest.mark.parametrize("path", [case(path) for path in cuda("none")])
def test_more_blocks_than_a_gpu_runs_at_once(path):
    bias = table(path, 4, 8, 31, 127)
    path.check(path.inputs(4, 1024, 1024, 8, 4, head_dim(path)), relative_bias=bias, grid=(16, 64))


@pytest.mark.parametrize("path, dtype", [case(path, dtype) for path in both("none", "intervals") for dtype in HALVES])
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("height, width", [(5, 48), (7, 32)])
def test_grids_whose_rows_are_runs(path, dtype, heads, height, width):
    """Query heads that share a table; a row of the grid that sees nothing."""
    tokens = height * width
    bias = table(path, 1, heads, 2 * height - 1, 2 * width - 1)
    bias[:, 0, height + 1 :] = -torch.inf
    mask = path.make_mask(2, 2, tokens, tokens)
    if mask is not None:
        mask = KeyIntervalMask(mask.start.clamp(min=width), mask.end)
    tensors = path.inputs(2, tokens, tokens, 4, 2, 96 if path.on_cuda else 24, dtype=dtype)
    path.check(tensors, mask, relative_bias=bias, grid=(height, width))


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("height, width", [(7, 7), (1, 40), (40, 1), (5, 9), (16, 20), (1, 1)])
@pytest.mark.parametrize("shape", [(1, 4), (2, 1)], ids=str)
def test_grids(path, height, width, shape):
    tokens = height * width
    tensors = path.inputs(2, tokens, tokens, 4, 4, head_dim(path))
    bias = table(path, *shape, 2 * height - 1, 2 * width - 1)
    path.check(tensors, relative_bias=bias, grid=(height, width))


@pytest.mark.parametrize("path", [case(path) for path in both("bool", "intervals", "bool lists", "interval lists")])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_grids_with_masks(path, softcap):
    mask, dense_bias = path.make_mask(2, 2, 240, 240), path.randn(1, 4, 240, 240)
    bias = table(path, 1, 4, 23, 39)
    bias[..., 3, :] = -torch.inf
    tensors = path.inputs(2, 240, 240, 4, 2, head_dim(path))
    path.check(tensors, mask, dense_bias, relative_bias=bias, grid=(12, 20), softcap=softcap)


@CAUSAL
@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_few_rows(path, rows, causal, softcap):
    bias = table(path, 1, 8, 2 * 700 + 1)
    bias[:, 0, :650] = -torch.inf
    tensors = path.inputs(2, rows, 1300, 8, 2, head_dim(path))
    path.check(tensors, None, path.randn(2, 2, 1, 1300), relative_bias=bias, is_causal=causal, softcap=softcap)


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
@pytest.mark.parametrize("rows", [1, 4])
def test_caches_count_from_the_last_valid_key(path, rows):
    query, key, value = path.inputs(3, rows, 700, 4, 2, head_dim(path))
    lengths, bias = [700, 0, 257], table(path, 3, 4, 2 * 90 + 1)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=path.device)
    ours = flash_dmattn_func(
        query, key, value, relative_bias=bias, cache_seqlens=seqlens, is_causal=True, return_lse=True
    )
    for b, length in enumerate(lengths):
        own = [x[b : b + 1, :length] for x in (key, value)]
        expected = flash_dmattn_func(
            query[b : b + 1], *own, relative_bias=bias[b : b + 1], is_causal=True, return_lse=True
        )
        for x, y in zip(ours, expected):
            torch.testing.assert_close(x[b : b + 1], y, rtol=1e-2 if path.on_cuda else 1e-5, atol=1e-2)


@CAUSAL
@pytest.mark.parametrize("path", [case(path) for path in both("none", "key", "interval lists")])
@pytest.mark.parametrize("batch, heads", [(1, 4), (5, 2), (1, 1)])
def test_variable_length(path, batch, heads, causal):
    """Every sequence counts distances from its own lengths."""
    s = Sequences(path.device)
    tensors = [path.randn(n, h, head_dim(path)) for n, h in ((s.total_q, 4), (s.total_k, 2), (s.total_k, 2))]
    mask = s.mask(path.mask, 2, visible=0.6)
    bias = table(path, batch, heads, 2 * 80 + 1)
    dout = path.randn(s.total_q, 4, head_dim(path)) / 8
    dlse = path.randn(4, s.total_q, dtype=torch.float32) / 8

    def alone(query, key, value, mask, _, relative_bias, return_lse):
        outs, lses = [], []
        for b, (rows, keys) in enumerate(zip(slices(s.cu_q), slices(s.cu_k))):
            own = relative_bias[b : b + 1] if batch > 1 else relative_bias
            seen = None
            if mask is not None:
                seen = mask[keys].T[None, :, None] if mask.ndim == 2 else mask[rows, :, : keys.stop - keys.start]
                seen = seen if mask.ndim == 2 else seen.transpose(0, 1)[None]
            one = (query[None, rows], key[None, keys], value[None, keys], seen, None)
            out, lse = eager(*one, relative_bias=own, is_causal=causal, return_lse=True)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, dim=1)

    def packed(query, key, value, mask, bias, **options):
        return path.varlen_function(query, key, value, mask, bias, *s.lengths, is_causal=causal, **options)

    rounded = run(alone, tensors, s.dense(mask), None, dout, dlse, relative_bias=bias)
    double = [in_float64(x) for x in (*tensors, bias)]
    exact = run(alone, double[:3], s.dense(mask), None, dout.double(), dlse.double(), relative_bias=double[3])
    ours = run(packed, tensors, mask, None, dout, dlse, relative_bias=bias)
    assert_close(ours, rounded, exact, path.dtype, ("out", "lse", "dq", "dk", "dv", "drelative_bias"))


@pytest.mark.parametrize("path", [case(path) for path in both("none", "interval lists", "bool lists")])
@pytest.mark.parametrize("shape", [(1, 4), (1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("grid", [None, (10, 48)], ids=str)
def test_gradients_are_bitwise_reproducible(path, shape, grid):
    """On the CPU for any number of threads."""
    rows, keys = (400, 700) if grid is None else (480, 480)
    sizes = (2 * 300 + 1,) if grid is None else (19, 95)
    tensors, bias = path.inputs(3, rows, keys, 4, 2, head_dim(path)), table(path, *shape, *sizes)
    mask = path.make_mask(3, 2, rows, keys)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(3, 4, rows, device=path.device)
    function = functools.partial(path.function, deterministic=True, grid=grid)
    threads, first = torch.get_num_threads(), None
    try:
        for count in (1, 2, 3) if path.on_cpu else range(20):
            if path.on_cpu:
                torch.set_num_threads(count)
            again = run(function, tensors, mask, None, dout, dlse, relative_bias=bias)
            first = first or again
            assert all(torch.equal(a, b) for a, b in zip(again, first))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
def test_many_batch_elements_share_a_table(path):
    """More groups of batch elements than tasks with partial sums."""
    tensors = path.inputs(150, 20, 20, 2, 2, head_dim(path))
    path.check(tensors, relative_bias=table(path, 1, 2, 2 * 15 + 1))


@pytest.mark.parametrize("path", [case(path) for path in both("none")])
def test_window_size_selects_by_the_bias_alone(path):
    query, key, value = path.inputs(2, 200, 200, 4, 2, head_dim(path))
    key_bias, bias = path.randn(2, 2, 1, 200), table(path, 1, 4, 2 * 200 + 1) * 9
    options = {"is_causal": True, "relative_bias": bias, "return_lse": True}
    ours = flash_dmattn_func(query, key, value, None, key_bias, window_size=30, **options)
    expected = flash_dmattn_func(query, key, value, KeyIntervalMask.topk(key_bias, 30), key_bias, **options)
    for x, y in zip(ours, expected):
        torch.testing.assert_close(x, y, rtol=1e-2 if path.on_cuda else 1e-4, atol=1e-2 if path.on_cuda else 1e-4)
