"""The CUDA kernels over key lists."""

import functools

import pytest
import torch
from gpu_inputs import CAUSAL, NEEDS_CUDA, intervals, on_gpu, randn
from helpers import check as check_function
from helpers import rand_mask, run, surrounded

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func

pytestmark = NEEDS_CUDA

by_lists = functools.partial(flash_dmattn_func, sparse="lists")
check = functools.partial(check_function, function=by_lists)


def bool_mask(*shape, visible=0.3):
    """An unstructured mask; no row sees some keys, and some rows see nothing."""
    mask = rand_mask(*shape, visible=visible, device="cuda")
    mask[..., torch.rand(shape[-1], device="cuda") < 0.4] = False
    if shape[-2] > 1:
        mask[..., shape[-2] // 3, :] = False
    return mask


def gradients_of(tensors, mask, bias, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]
    out = by_lists(*leaves[:3], mask, leaves[3], **options)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (6, 2), (2, 2)])
@pytest.mark.parametrize("head_dim", [64, 128, 136, 192, 200, 256])
def test_lists_shared_by_the_heads_of_a_group(head_dim, heads, kv_heads, dtype):
    tensors, bias = on_gpu(2, 300, 700, heads, kv_heads, head_dim, dtype=dtype), randn(1, kv_heads, 1, 700, dtype=dtype)
    check(tensors, intervals(1, kv_heads, 700, rows=300), bias, is_causal=True)
    check(tensors, bool_mask(2, 1, 300, 700), bias, softcap=5.0)
    check(tensors, bool_mask(1, kv_heads, 1, 700), is_causal=True)


@CAUSAL
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 7), (2, 1), (64, 65), (129, 127), (255, 1000), (1000, 255)])
@pytest.mark.parametrize("kind", ["none", "key"])
@pytest.mark.parametrize("head_dim", [128, 192, 256])
def test_lengths_of_lists_shared_by_the_heads_of_a_group(head_dim, seqlen_q, seqlen_k, kind, causal):
    tensors = on_gpu(2, seqlen_q, seqlen_k, 4, 2, head_dim)
    bias = None if kind == "none" else randn(2, 2, 1, seqlen_k)
    for mask in (intervals(2, 2, seqlen_k, rows=seqlen_q), bool_mask(2, 2, seqlen_q, seqlen_k)):
        check(tensors, mask, bias, is_causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_long_lists_of_different_lengths(head_dim):
    tensors = on_gpu(1, 2000, 2000, 4, 2, head_dim)
    bias = randn(1, 2, 1, 2000)
    check(tensors, KeyIntervalMask.topk(bias, 500), bias, is_causal=True)
    documents = torch.tensor([0, 1, 700, 1500, 2000], device="cuda", dtype=torch.int32)
    check(tensors, KeyIntervalMask.documents(documents, 2000), bias, is_causal=True)


def test_a_key_mask_under_causality():
    """All rows share one list; each row block stops at the causal bound."""
    tensors = on_gpu(2, 700, 900, 4, 2, 64)
    for visible in (0.05, 1.0):
        mask = rand_mask(2, 2, 1, 900, visible=visible, device="cuda")
        check(tensors, mask, randn(2, 2, 1, 900), is_causal=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_keys_masked_by_their_bias(head_dim):
    tensors = on_gpu(2, 300, 500, 4, 2, head_dim)
    for bias_shape in ((2, 4, 1, 500), (2, 2, 1, 500), (2, 4, 300, 500)):
        bias = randn(*bias_shape).masked_fill(rand_mask(*bias_shape, visible=0.3, device="cuda"), -torch.inf)
        check(tensors, intervals(2, 2, 500, rows=300), bias)
    check(tensors, intervals(2, 2, 500, rows=300), randn(1, 2, 1, 500, dtype=torch.float32))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_empty_lists_give_zero(head_dim):
    tensors = on_gpu(2, 300, 500, 4, 2, head_dim)
    end = torch.zeros(2, 2, 500, device="cuda", dtype=torch.int32)
    bias, dout = randn(2, 2, 1, 500), torch.randn_like(tensors[0])
    for deterministic in (False, True):
        mask = KeyIntervalMask(end, end)
        assert all((x == 0).all() for x in gradients_of(tensors, mask, bias, dout, deterministic=deterministic))


def test_a_bias_without_a_gradient():
    query, key, value = (x.requires_grad_() for x in on_gpu(1, 300, 500, 4, 2, 64))
    mask, bias, dout = intervals(1, 2, 500, rows=300), randn(1, 4, 300, 500), randn(1, 300, 4, 64)
    out = by_lists(query, key, value, mask, bias)
    alone = torch.autograd.grad(out, (query, key, value), dout)
    for x, y in zip(alone, gradients_of((query, key, value), mask, bias, dout)):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


def test_deterministic_where_many_tiles_add_to_the_same_keys():
    tensors, bias = on_gpu(1, 4096, 4096, 8, 2, 64), randn(1, 2, 1, 4096)
    mask, dout = KeyIntervalMask.topk(bias, 512), torch.randn_like(tensors[0])
    lists = KeyLists.build(mask, 4096, is_causal=True)
    first = gradients_of(tensors, lists, bias, dout, is_causal=True, deterministic=True)
    for _ in range(20):
        again = gradients_of(tensors, lists, bias, dout, is_causal=True, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(again, first))
    for ours, unordered in zip(first, gradients_of(tensors, lists, bias, dout, is_causal=True)):
        torch.testing.assert_close(ours, unordered, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("bias_rows", [1, 300])
@pytest.mark.parametrize("head_dim", [40, 128, 192, 256])
def test_nan_around_every_tensor_and_in_masked_rows_and_keys(head_dim, bias_rows):
    query, key, value = on_gpu(2, 300, 500, 4, 2, head_dim)
    mask, bias, dout = bool_mask(2, 2, 300, 500), randn(2, 2, bias_rows, 500), randn(2, 300, 4, head_dim) / 8
    seen = mask.tril(200)
    rows, keys = seen.any(3).repeat_interleave(2, 1).mT[..., None], seen.any(2).mT[..., None]
    clean = run(flash_dmattn_func, (query, key, value), mask, bias, dout, torch.zeros(2, 4, 300).cuda(), is_causal=True)
    dirty = [query.where(rows, torch.nan), key.where(keys, torch.nan), value.where(keys, torch.nan)]
    dirty = [surrounded(x) for x in (*dirty, bias, dout.where(rows, torch.nan))]
    ours = run(by_lists, dirty[:3], mask, *dirty[3:], torch.zeros(2, 4, 300).cuda(), is_causal=True)
    for x, y in zip(ours, clean):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=1e-2)


def mask_with_common_keys(kind, rows, keys):
    """A mask (2, 2, rows, keys) with every fifth key visible to all rows."""
    if kind == "intervals":
        mask = intervals(2, 2, keys, rows=rows, longest=rows // 2 + 2)
        start, end = mask.start.clone(), mask.end.clone()
        start[..., ::5], end[..., ::5] = 0, rows + 3
        return KeyIntervalMask(start, end)
    mask = rand_mask(2, 2, 1 if kind == "rows alike" else rows, keys, visible=0.1, device="cuda")
    mask[..., ::5] = True
    return mask


@pytest.mark.parametrize("kind", ["intervals", "bool", "rows alike"])
def test_masked_keys_in_lists_may_hold_nan(kind):
    """Lists hold keys that their bias masks; NaN surrounds every tensor."""
    query, key, value = on_gpu(2, 200, 500, 4, 2, 64)
    mask, bias = mask_with_common_keys(kind, 200, 500), randn(2, 2, 1, 500)
    masked = torch.rand(2, 2, 500, device="cuda") < 0.5
    if kind == "intervals":
        mask = KeyIntervalMask(mask.start, mask.end.masked_fill(masked, -1))
    else:
        mask = mask.expand(2, 2, -1, 500) & ~masked[:, :, None]
    bias[:, :, 0, ::7] = -torch.inf
    masked[:, :, ::7] = True
    lists = KeyLists.build(mask, 200, 500)
    expected = flash_dmattn_func(query, key, value, lists, bias, return_lse=True)
    masked = masked.transpose(1, 2)[..., None]
    dirty = [surrounded(x) for x in (query, key.masked_fill(masked, torch.nan), value.masked_fill(masked, torch.nan))]
    ours = flash_dmattn_func(*dirty, lists, surrounded(bias), return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(ours, expected))


def test_graph_capture_and_replay():
    tensors, bias = on_gpu(2, 300, 300, 4, 2, 64), randn(2, 2, 1, 300)
    lists = KeyLists.build(mask_with_common_keys("intervals", 300, 300), 300)
    flash_dmattn_func(*tensors, lists, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_dmattn_func(*tensors, lists, bias)
    for tensor in (*tensors, bias):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert torch.equal(captured, flash_dmattn_func(*tensors, lists, bias))
