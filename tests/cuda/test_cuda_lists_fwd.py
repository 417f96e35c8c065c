"""The CUDA forward over key lists against the float64 reference on the GPU."""

import pytest
import torch
from gpu_inputs import on_gpu, randn, takes_gpu_memory
from helpers import assert_close, rand_mask, reference, surrounded

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
KINDS = pytest.mark.parametrize("kind", ["intervals", "bool", "rows alike"])


def intervals(*shape, rows):
    """Random ones: some empty, some that begin before the first row or end behind the last, some that see all."""
    start = torch.randint(-10, rows + 10, shape, device="cuda", dtype=torch.int32)
    end = start + torch.randint(-5, rows // 2 + 2, shape, device="cuda", dtype=torch.int32)
    start[..., ::5], end[..., ::5] = 0, rows + 3
    return KeyIntervalMask(start, end)


def mask_of(kind, batches, heads, seqlen_q, seqlen_k):
    if kind == "intervals":
        return intervals(batches, heads, seqlen_k, rows=seqlen_q)
    rows = 1 if kind == "rows alike" else seqlen_q
    mask = rand_mask(batches, heads, rows, seqlen_k, visible=0.1, device="cuda")
    mask[..., ::5] = True  # keys that every row sees
    return mask


@torch.no_grad()
def check(tensors, mask, bias=None, *, lists=None, **options):
    """Compares out and lse of the lists with the reference; returns ours."""
    query = tensors[0]
    lists = KeyLists.build(mask, query.shape[1], tensors[1].shape[1]) if lists is None else lists
    dense = mask.to_dense(query.shape[1]) if isinstance(mask, KeyIntervalMask) else mask
    ours = flash_dmattn_func(*tensors, lists, bias, return_lse=True, **options)
    eager = reference(*tensors, dense, bias, return_lse=True, **options)
    double = [x.double() for x in tensors], dense, None if bias is None else bias.double()
    exact = reference(*double[0], *double[1:], return_lse=True, **options)
    assert_close(ours, eager, exact, query.dtype)
    return ours


@KINDS
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_heads", [1, 2, 8])
@pytest.mark.parametrize("seqlen_q", [1, 3, 15, 40])
def test_decoding_splits_the_lists(seqlen_q, mask_heads, bias_dtype, kind):
    tensors = on_gpu(2, seqlen_q, 4000, 8, 2, 128)
    mask = mask_of(kind, 2, mask_heads, seqlen_q, 4000)
    check(tensors, mask, randn(2, 2, 1, 4000, dtype=bias_dtype), is_causal=True)


@takes_gpu_memory(4)
def test_top_keys_of_a_bias():
    tensors = on_gpu(2, 1500, 1500, 8, 2, 64)
    bias = randn(2, 2, 1, 1500)
    check(tensors, KeyIntervalMask.topk(bias, 100), bias, is_causal=True)


@KINDS
def test_garbage_in_keys_that_nobody_sees(kind):
    """And around every tensor."""
    query, key, value = on_gpu(2, 200, 500, 4, 2, 64)
    mask, bias = mask_of(kind, 2, 2, 200, 500), randn(2, 2, 1, 500)
    hidden = torch.rand(2, 2, 500, device="cuda") < 0.5
    if kind == "intervals":
        mask = KeyIntervalMask(mask.start, mask.end.masked_fill(hidden, -1))
    else:
        mask = mask.expand(2, 2, -1, 500) & ~hidden[:, :, None]
    # Named by the lists all the same: -inf in the bias, seen by rows of which there are none.
    bias[:, :, 0, ::7] = -torch.inf
    hidden[:, :, ::7] = True
    lists = KeyLists.build(mask, 200, 500)
    expected = flash_dmattn_func(query, key, value, lists, bias, return_lse=True)
    hidden = hidden.transpose(1, 2)[..., None]
    dirty = [surrounded(x) for x in (query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.nan))]
    ours = flash_dmattn_func(*dirty, lists, surrounded(bias), return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected))


def test_graph_capture_and_replay():
    tensors, bias = on_gpu(2, 300, 300, 4, 2, 64), randn(2, 2, 1, 300)
    lists = KeyLists.build(mask_of("intervals", 2, 2, 300, 300), 300)
    flash_dmattn_func(*tensors, lists, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_dmattn_func(*tensors, lists, bias)
    for tensor in (*tensors, bias):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(captured, flash_dmattn_func(*tensors, lists, bias))
