"""The CUDA forward over key lists against the float64 reference on the GPU."""

import itertools

import pytest
import torch
from gpu_inputs import on_gpu, randn, takes_gpu_memory
from helpers import LENGTHS, assert_close, rand_mask, reference, surrounded

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops

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


@CAUSAL
@KINDS
@pytest.mark.parametrize("seqlen_q, seqlen_k", [*zip(LENGTHS, reversed(LENGTHS)), (129, 127), (255, 1000), (1000, 255)])
def test_lengths(seqlen_q, seqlen_k, kind, causal):
    tensors = on_gpu(2, seqlen_q, seqlen_k, 4, 2, 64)
    mask, bias = mask_of(kind, 2, 2, seqlen_q, seqlen_k), randn(2, 2, 1, seqlen_k)
    check(tensors, mask, bias, is_causal=causal)
    if causal:
        check(tensors, mask, bias, lists=KeyLists.build(mask, seqlen_q, seqlen_k, is_causal=True), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_rows", [None, 1, 200])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim, bias_rows, dtype):
    tensors = on_gpu(1, 200, 300, 4, 2, head_dim, dtype=dtype)
    bias = None if bias_rows is None else randn(1, 2, bias_rows, 300, dtype=dtype)
    check(tensors, mask_of("intervals", 1, 2, 200, 300), bias, is_causal=True)
    check(tensors, mask_of("bool", 1, 1, 200, 300), bias, softcap=5.0)


@KINDS
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 2), (4, 1), (4, 2), (6, 2), (8, 1)])
def test_head_groups(heads, kv_heads, kind):
    tensors = on_gpu(2, 300, 400, heads, kv_heads, 64)
    for mask_heads, bias_heads in itertools.product({heads, kv_heads, 1}, {heads, kv_heads, 1}):
        mask = mask_of(kind, 2, mask_heads, 300, 400)
        check(tensors, mask, randn(2, bias_heads, 1, 400), is_causal=True)
        check(tensors, mask, randn(1, bias_heads, 300, 400))


@KINDS
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_heads", [1, 2, 8])
@pytest.mark.parametrize("seqlen_q", [1, 3, 15, 40])
def test_decoding_splits_the_lists(seqlen_q, mask_heads, bias_dtype, kind):
    tensors = on_gpu(2, seqlen_q, 4000, 8, 2, 128)
    mask = mask_of(kind, 2, mask_heads, seqlen_q, 4000)
    check(tensors, mask, randn(2, 2, 1, 4000, dtype=bias_dtype), is_causal=True)


def test_batches_share_lists():
    tensors = on_gpu(3, 200, 300, 4, 2, 64)
    for kind in ("intervals", "bool", "rows alike"):
        check(tensors, mask_of(kind, 1, 2, 200, 300), randn(3, 2, 1, 300))


@pytest.mark.parametrize("bias_shape", [(2, 4, 1, 500), (2, 2, 1, 500), (1, 2, 300, 500)], ids=str)
def test_minus_infinity_in_the_bias_hides(bias_shape):
    tensors = on_gpu(2, 300, 500, 4, 2, 64)
    bias = randn(*bias_shape).masked_fill(rand_mask(*bias_shape, visible=0.4, device="cuda"), -torch.inf)
    for kind in ("intervals", "bool", "rows alike"):
        check(tensors, mask_of(kind, 2, 2, 300, 500), bias)


@pytest.mark.parametrize("seqlen_q", [2, 400])
@pytest.mark.parametrize("kind", ["intervals", "bool"])
def test_lists_and_rows_without_a_key(kind, seqlen_q):
    tensors = on_gpu(2, seqlen_q, 3000, 4, 2, 64)
    mask = rand_mask(2, 4, seqlen_q, 3000, visible=0.02, device="cuda")
    mask[0, 1] = False  # a head
    mask[1, :, 128:256] = False  # a list
    mask[:, :, 1] = False
    if kind == "intervals":
        start = torch.randint(0, seqlen_q, (2, 4, 3000), device="cuda", dtype=torch.int32)
        start[0, 1] = seqlen_q
        start[1] = torch.where(start[1] >= 128, start[1] % 100 + 256, start[1] % 20)
        mask = KeyIntervalMask(start, torch.where(start == 0, start + 1, start + 2).int())
    out, lse = check(tensors, mask, randn(2, 2, 1, 3000))
    dense = mask.to_dense(seqlen_q) if kind == "intervals" else mask
    hidden = ~dense.any(-1)
    assert hidden.any() and (lse[hidden] == -torch.inf).all() and (out.transpose(1, 2)[hidden] == 0).all()


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


def test_strides():
    query, key, value = on_gpu(2, 140, 270, 4, 4, 64)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = randn(2, 540, 4, 64)[:, ::2]
    value = randn(2, 270, 1, 64).expand(2, 270, 4, 64)
    mask = mask_of("intervals", 2, 4, 140, 270)
    for bias in (randn(270, 140).T.expand(2, 4, 140, 270), randn(270, 2).T[:, None, None].expand(2, 4, 1, 270)):
        check((query, key, value), mask, bias)
        check((query[..., 1:33], key[..., 1:33], value[..., 1:33]), mask, bias)


@CAUSAL
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("bias_rows", ["none", "key", "dense"])
@KINDS
@torch.no_grad()
def test_varlen(kind, bias_rows, heads, causal):
    lengths_q, lengths_k = [3, 0, 129, 1, 300], [5, 4, 65, 0, 600]
    ends_q, ends_k = ([0, *itertools.accumulate(n)] for n in (lengths_q, lengths_k))
    total_q, total_k = ends_q[-1], ends_k[-1]
    if kind == "intervals":
        mask = intervals(total_k, heads, rows=300)
    else:
        shape = (total_k, heads) if kind == "rows alike" else (total_q, heads, 600)
        mask = rand_mask(*shape, visible=0.2, device="cuda")
    query, key, value = (randn(n, h, 64) for n, h in ((total_q, 4), (total_k, 2), (total_k, 2)))
    bias = {"none": None, "key": randn(total_k, 4), "dense": randn(total_q, 2, 600)}[bias_rows]
    offsets = (torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in (ends_q, ends_k))
    options = {"is_causal": causal, "return_lse": True}
    out, lse = flash_dmattn_varlen_func(query, key, value, mask, bias, *offsets, 300, 600, sparse="lists", **options)

    def of_sequence(pairs, rows, keys):
        """The part of a mask or bias that is one sequence's, of fixed length."""
        if pairs is None or pairs.ndim == 3:
            return None if pairs is None else pairs[rows].transpose(0, 1)[None, :, :, : keys.stop - keys.start]
        return pairs[keys].T[None, :, None]

    for rows, keys in zip(*([slice(*pair) for pair in itertools.pairwise(ends)] for ends in (ends_q, ends_k))):
        if kind == "intervals":
            start, end = (of_sequence(x, rows, keys)[:, :, 0] for x in (mask.start, mask.end))
            visible = KeyIntervalMask(start, end).to_dense(rows.stop - rows.start)
        else:
            visible = of_sequence(mask, rows, keys)
        tensors = query[None, rows], key[None, keys], value[None, keys]
        pairs = of_sequence(bias, rows, keys)
        eager = reference(*tensors, visible, pairs, **options)
        double = (x.double() for x in tensors)
        exact = reference(*double, visible, None if pairs is None else pairs.double(), **options)
        assert_close((out[None, rows], lse[None, :, rows]), eager, exact, query.dtype)


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
