"""Lists of the keys that an indexer selects, against the float64 reference with the dense mask of the same keys."""

import helpers
import pytest
import torch
from generate_kernels import HEAD_DIMS
from helpers import NAMES, run
from indices import dense_of, rand_indices
from paths import CAUSAL, DTYPES, both, case, cpu, cuda, on

from flash_dmattn import KeyLists, flash_dmattn_func

TILE_ROWS = (1, 3, 32, 64, 96, 128, 192, 256, 1000)


def tiles(rows, tile_rows):
    return -(-rows // tile_rows)


def check(tensors, indices, bias=None, *, tile_rows=1, mask=None, causal_lists=False, **options):
    """Compares out, lse and every gradient with the reference; returns ours."""
    seqlen_q, seqlen_k = tensors[0].shape[1], tensors[1].shape[1]
    lists = KeyLists.from_indices(indices, seqlen_q, seqlen_k, causal_lists, tile_rows=tile_rows, mask=mask)
    return helpers.check(tensors, lists, bias, dense=dense_of(indices, tile_rows, seqlen_q, seqlen_k, mask), **options)


def length_cases():
    lengths_of = {"cpu": [(1, 65), (129, 127), (255, 1000), (1000, 255)]}
    lengths_of["cuda"] = [*lengths_of["cpu"], (65, 300), (500, 333), (333, 500)]
    return [case(path, *lengths) for path in both("none") for lengths in lengths_of["cuda" if path.on_cuda else "cpu"]]


@CAUSAL
@pytest.mark.parametrize("tile_rows", TILE_ROWS)
@pytest.mark.parametrize("path, seqlen_q, seqlen_k", length_cases())
def test_lengths(path, seqlen_q, seqlen_k, tile_rows, causal):
    rows, keys_per_row = tiles(seqlen_q, tile_rows), 40 if path.on_cuda else 20
    indices = rand_indices(2, 2, rows, keys_per_row, keys=seqlen_k, device=path.device)
    if path.on_cuda:
        indices[:, :, : rows // 3] = -1
    tensors = path.inputs(2, seqlen_q, seqlen_k, 4, 2, 64 if path.on_cuda else 16)
    for causal_lists in {False, causal} if path.on_cuda else {causal and tile_rows % 2 == 0}:
        options = {"tile_rows": tile_rows, "is_causal": causal, "causal_lists": causal_lists}
        check(tensors, indices, path.randn(2, 2, 1, seqlen_k), **options)


def head_dim_cases():
    head_dims = [(path, head_dim, torch.bfloat16) for path in cuda("none") for head_dim in HEAD_DIMS]
    return [case(*values) for values in [*((path, 40, dtype) for path in cpu("none") for dtype in DTYPES), *head_dims]]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("tile_rows", [1, 40, 64, 128])
@pytest.mark.parametrize("path, head_dim, dtype", head_dim_cases())
def test_head_dims(path, head_dim, dtype, tile_rows, deterministic):
    """Indices in another order, or named twice, change no bit of a deterministic call."""
    tensors = path.inputs(1, 300, 400, 4, 2, head_dim, dtype=dtype)
    options = {"tile_rows": tile_rows, "is_causal": path.on_cpu, "softcap": 5.0, "deterministic": deterministic}
    shapes = (None, (1, 2, 1), (1, 4, 1), (1, 4, 300), (1, 1, 300)) if path.on_cuda else ((1, 4, 300),)
    for shape in shapes:
        bias = None if shape is None else path.randn(*shape, 400, dtype=dtype)
        if path.on_cpu:
            bias.masked_fill_(torch.rand(bias.shape) < 0.2, -torch.inf)
        indices = rand_indices(1, 2, tiles(300, tile_rows), 60, keys=400, device=path.device)
        torch.manual_seed(1)
        first = check(tensors, indices, bias, **options)
        if deterministic:
            torch.manual_seed(1)
            again = check(tensors, indices.flip(-1).repeat(1, 1, 1, 2), bias, **options)
            for name, x, y in zip(NAMES, first, again):
                assert torch.equal(x, y), name


def group_cases():
    ratios = [(1, 1), (4, 1), (4, 2), (6, 2), (4, 4)]
    return [case(p, *heads, d) for p in both("none") for heads in ratios for d in ((64, 256) if p.on_cuda else (16,))]


@pytest.mark.parametrize("tile_rows", [1, 64, 128])
@pytest.mark.parametrize("path, heads, kv_heads, head_dim", group_cases())
def test_head_groups(path, heads, kv_heads, head_dim, tile_rows):
    """Indices of every number of heads and batch elements, alone and beside an interval mask."""
    batch = 2 if path.on_cuda else 4
    tensors = path.inputs(batch, 200, 150, heads, kv_heads, head_dim)
    for of_indices in sorted({heads, kv_heads, 1}):
        for batches in (2, 1) if path.on_cuda else (4, 2, 1):
            indices = rand_indices(batches, of_indices, tiles(200, tile_rows), 12, keys=150, device=path.device)
            check(tensors, indices, path.randn(1, heads, 1, 150), tile_rows=tile_rows)
            mask = helpers.rand_intervals(
                1 if batches == 2 and path.on_cpu else batch, kv_heads, 150, rows=200, device=path.device
            )
            bias = path.randn(1, kv_heads, 1 if path.on_cuda else 200, 150)
            check(tensors, indices, bias, tile_rows=tile_rows, mask=mask, is_causal=path.on_cuda)


@on(*both("none"))
@pytest.mark.parametrize("tile_rows", [1, 64, 256])
def test_rows_without_keys_are_zero(path, tile_rows):
    tensors, rows = path.inputs(2, 300, 100, 4, 2, 64 if path.on_cuda else 16), tiles(300, tile_rows)
    indices = rand_indices(2, 2, rows, 9, keys=100, device=path.device)
    indices[0] = -1
    indices[1, 1, rows // 2] = -1
    out, lse, dq, dk, dv = check(tensors, indices, tile_rows=tile_rows, is_causal=True)
    for x in (out[0], dq[0], dk[0], dv[0]):
        assert torch.equal(x, torch.zeros_like(x))
    assert (lse[0] == -torch.inf).all()
    nothing = torch.full((1, 1, rows, 0), 3, dtype=torch.int32, device=path.device)
    assert (check(tensors, nothing, tile_rows=tile_rows)[0] == 0).all()


def garbage_cases():
    return [case(path, head_dim) for path in both("none") for head_dim in ((64, 192, 256) if path.on_cuda else (16,))]


@pytest.mark.parametrize("tile_rows", [1, 64])
@pytest.mark.parametrize("path, head_dim", garbage_cases())
def test_masked_keys_and_rows_without_keys_may_hold_garbage(path, head_dim, tile_rows):
    query, key, value = tensors = path.inputs(1, 256, 300, 2, 2, head_dim)
    indices = rand_indices(1, 1, tiles(256, tile_rows), 20, keys=150, device=path.device)
    indices[:, :, 64 // tile_rows : 128 // tile_rows] = -1
    lists = KeyLists.from_indices(indices, 256, 300, tile_rows=tile_rows)
    dout, dlse = torch.ones_like(query), torch.zeros(1, 2, 256, device=path.device)
    clean = run(flash_dmattn_func, tensors, lists, None, dout, dlse)
    key[:, 150:], value[:, 150:], query[:, 64:128] = torch.nan, torch.inf, torch.nan
    tolerance = {"rtol": 0.02, "atol": 0.02} if path.on_cuda else {}
    for name, x, y in zip(NAMES, run(flash_dmattn_func, tensors, lists, None, dout, dlse), clean):
        torch.testing.assert_close(x, y, **tolerance, msg=name)
