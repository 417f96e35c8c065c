"""Lists of the keys that an indexer has chosen, on the GPU: beside the CPU's, and the attention against float64."""

import os
import subprocess
import sys

import pytest
import torch
from gpu_inputs import intervals, on_gpu, randn
from helpers import assert_close, in_float64, reference, run
from indices import dense_of, rand_indices

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]

TILE_ROWS = pytest.mark.parametrize("tile_rows", [1, 3, 64, 96, 128, 192, 256, 1000])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def assert_same_lists(ours, cpu):
    """Where one list ends room may follow, which holds anything."""
    assert torch.equal(ours.spans.cpu(), cpu.spans) and ours.rows.shape == cpu.rows.shape
    for begin, end in cpu.spans.flatten(1).T.tolist():
        assert torch.equal(ours.keys[begin:end].cpu(), cpu.keys[begin:end])
        if cpu.rows.shape[0]:
            assert torch.equal(ours.rows[begin:end].cpu(), cpu.rows[begin:end])


@CAUSAL
@TILE_ROWS
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, count", [(1, 65, 9), (300, 200, 70), (513, 1000, 30), (256, 300_000, 900)]
)
def test_lists_are_those_of_the_cpu(seqlen_q, seqlen_k, count, tile_rows, causal):
    indices = rand_indices(2, 2, -(-seqlen_q // tile_rows), count, keys=seqlen_k)
    start = torch.randint(-5, seqlen_q, (1, 4, seqlen_k), dtype=torch.int32)
    mask = KeyIntervalMask(start, start + torch.randint(0, 200, start.shape, dtype=torch.int32))
    for shown in (None, mask):
        on_cpu, on_gpu = (
            KeyLists.from_indices(
                indices.to(device), seqlen_q, seqlen_k, causal, tile_rows=tile_rows, mask=shown and shown.to(device)
            )
            for device in ("cpu", "cuda")
        )
        assert_same_lists(on_gpu, on_cpu)


@TILE_ROWS
def test_of_variable_length(tile_rows):
    rows, keys = [3, 0, 129, 1, 300], [5, 4, 65, 0, 200]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (rows, keys))
    indices = torch.full((5, 2, -(-300 // tile_rows), 12), -1, dtype=torch.int32)
    for b in range(5):
        indices[b, :, : -(-rows[b] // tile_rows)] = rand_indices(2, -(-rows[b] // tile_rows), 12, keys=keys[b])
    # The longest sequence of rows is one of seqlen_q: on the CPU and on the GPU there are as many lists.
    on_cpu, on_gpu = (
        KeyLists.from_indices(indices.to(device), 300, 200, True, cu_q.to(device), cu_k.to(device), tile_rows=tile_rows)
        for device in ("cpu", "cuda")
    )
    assert_same_lists(on_gpu, on_cpu)
    tensors = [torch.randn(n, h, 64) for n, h in ((sum(rows), 4), (sum(keys), 2), (sum(keys), 2))]
    expected = flash_dmattn_varlen_func(*tensors, on_cpu, None, cu_q, cu_k, 300, 200, is_causal=True)
    tensors = [x.cuda().bfloat16() for x in tensors]
    ours = flash_dmattn_varlen_func(*tensors, on_gpu, None, cu_q.cuda(), cu_k.cuda(), 300, 200, is_causal=True)
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=0.05, atol=0.05)


def test_indices_out_of_range_name_nothing():
    indices = torch.tensor([0, 5, 7, 8, 2**31 - 1, -2, -(2**31), 5], dtype=torch.int32, device="cuda")
    for tile_rows in (1, 64):
        given = indices.expand(1, 1, -(-100 // tile_rows), 8)
        lists = KeyLists.from_indices(given, 100, 8, tile_rows=tile_rows)
        for begin, end in lists.spans.flatten(1).T.tolist():
            assert lists.keys[begin:end].tolist() == [0, 5, 7] + [-1] * 61
        tensors = on_gpu(1, 100, 8)
        named = tensors[1][:, [0, 5, 7]], tensors[2][:, [0, 5, 7]]
        expected = flash_dmattn_func(tensors[0], *named)
        torch.testing.assert_close(flash_dmattn_func(*tensors, lists), expected, rtol=0.02, atol=0.02)


def check(tensors, indices, bias=None, *, tile_rows, mask=None, **options):
    """Compares out, lse and every gradient with the reference; returns ours."""
    query, key = tensors[:2]
    seqlen_q, seqlen_k = query.shape[1], key.shape[1]
    dense = dense_of(indices, tile_rows, seqlen_q, seqlen_k, mask)
    lists = KeyLists.from_indices(indices, seqlen_q, seqlen_k, tile_rows=tile_rows, mask=mask)
    dout, dlse = torch.randn_like(query) / 8, torch.randn_like(query[..., 0].transpose(1, 2)) / 8
    ours = run(flash_dmattn_func, tensors, lists, bias, dout, dlse, **options)
    options.pop("deterministic", None)
    eager = run(reference, tensors, dense, bias, dout, dlse, **options)
    double = [x.double() for x in tensors], dense, None if bias is None else in_float64(bias)
    assert_close(ours, eager, run(reference, *double, dout.double(), dlse.double(), **options), query.dtype)
    return ours


@CAUSAL
@TILE_ROWS
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 65), (65, 300), (500, 333), (333, 500)])
def test_lengths(seqlen_q, seqlen_k, tile_rows, causal):
    indices = rand_indices(2, 2, -(-seqlen_q // tile_rows), 40, keys=seqlen_k, device="cuda")
    indices[:, :, : indices.shape[2] // 3] = -1
    tensors = on_gpu(2, seqlen_q, seqlen_k, 4, 2, 64)
    check(tensors, indices, randn(2, 2, 1, seqlen_k), tile_rows=tile_rows, is_causal=causal)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("tile_rows", [1, 64, 128])
def test_head_dims(tile_rows, head_dim, deterministic):
    tensors = on_gpu(1, 300, 400, 4, 2, head_dim)
    options = {"tile_rows": tile_rows, "softcap": 5.0, "deterministic": deterministic}
    for shape in (None, (1, 2, 1, 400), (1, 4, 1, 400), (1, 4, 300, 400), (1, 1, 300, 400)):
        bias = None if shape is None else randn(*shape)
        indices = rand_indices(1, 2, -(-300 // tile_rows), 60, keys=400, device="cuda")
        torch.manual_seed(0)
        first = check(tensors, indices, bias, **options)
        torch.manual_seed(0)
        if deterministic:
            for x, y in zip(first, check(tensors, indices, bias, **options)):
                assert torch.equal(x, y)


@pytest.mark.parametrize("tile_rows", [1, 64, 128])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 1), (4, 2), (6, 2), (4, 4)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_head_groups(head_dim, heads, kv_heads, tile_rows):
    tensors = on_gpu(2, 200, 150, heads, kv_heads, head_dim)
    for of_indices in {heads, kv_heads, 1}:
        for batch in (2, 1):
            indices = rand_indices(batch, of_indices, -(-200 // tile_rows), 12, keys=150, device="cuda")
            check(tensors, indices, randn(1, heads, 1, 150), tile_rows=tile_rows)
            mask = intervals(2, kv_heads, 150, rows=200)
            check(tensors, indices, randn(1, kv_heads, 1, 150), tile_rows=tile_rows, mask=mask, is_causal=True)


@pytest.mark.parametrize("tile_rows", [1, 64])
@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_what_nobody_sees_may_hold_anything(head_dim, tile_rows):
    query, key, value = tensors = on_gpu(1, 256, 300, 2, 2, head_dim)
    indices = rand_indices(1, 1, -(-256 // tile_rows), 20, keys=150, device="cuda")
    indices[:, :, 64 // tile_rows : 128 // tile_rows] = -1
    lists = KeyLists.from_indices(indices, 256, 300, tile_rows=tile_rows)

    def gradients():
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = flash_dmattn_func(*leaves, lists)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    clean = gradients()
    key[:, 150:], value[:, 150:], query[:, 64:128] = torch.nan, torch.inf, torch.nan
    for x, y in zip(gradients(), clean):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


def test_nothing_waits():
    """A graph can be captured of making the lists and going by them."""
    tensors = on_gpu(1, 512, 512, 4, 2, 64)
    indices = rand_indices(1, 2, 512, 16, keys=512, device="cuda")

    def call():
        return flash_dmattn_func(*tensors, KeyLists.from_indices(indices, 512, 512))

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.testing.assert_close(out, expected)


def test_indices_on_the_gpu_are_looked_at_where_that_is_asked_for():
    program = """
import torch
from flash_dmattn import KeyLists
for wrong in (-2, 8, 1 << 30):
    indices = torch.tensor([3, -1, wrong], device="cuda", dtype=torch.int32).expand(1, 1, 5, 3)
    try:
        KeyLists.from_indices(indices, 5, 8)
    except ValueError as error:
        assert f"indices must be from 0 to 7, or -1 for none, got {wrong}" in str(error), error
        print("refused")
"""
    environment = {**os.environ, "FLASH_DMATTN_CHECK": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["refused"] * 3, ran.stderr
