"""Every CUDA kernel on small shapes, for compute-sanitizer (docs/testing.md).

The reference is computed on the CPU, since cuBLAS does not run under every tool.
"""

import pytest
import torch
from gpu_inputs import NEEDS_CUDA
from helpers import check, inputs, rand_mask
from kvcaches import make_call, make_sequences

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = NEEDS_CUDA

KEYS = 200
# (rows, shape of the mask, shape of the bias, options) by name.
CASES = {
    "no mask, no bias": (100, None, None, {}),
    "one row, keys split": (1, (2, 2, 1, 600), (2, 2, 1, 600), {}),
    "few rows": (20, (2, 1, 20, KEYS), (2, 2, 1, KEYS), {"is_causal": True}),
    "key bias": (100, (2, 2, 100, KEYS), (2, 2, 1, KEYS), {"is_causal": True}),
    "key bias, deterministic": (100, (1, 4, 100, KEYS), (1, 4, 1, KEYS), {"deterministic": True}),
    "dense bias": (100, (2, 1, 1, KEYS), (2, 4, 100, KEYS), {"is_causal": True}),
    "dense bias, shared by batch elements": (100, (2, 4, 100, KEYS), (1, 4, 100, KEYS), {}),
    "dense bias, shared by heads": (100, None, (2, 2, 100, KEYS), {"is_causal": True}),
    "dense bias, shared": (100, (2, 4, 100, KEYS), (1, 2, 100, KEYS), {"softcap": 5.0}),
    "dense bias, shared by all, deterministic": (100, None, (1, 1, 100, KEYS), {"deterministic": True}),
}
# Head dimensions with different block sizes.
HEAD_DIMS = [64, 192]


@pytest.fixture(autouse=True)
def one_thread():
    """Computes the reference with one thread: waiting threads are slow under compute-sanitizer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randn(shape):
    return None if shape is None else torch.randn(*shape).bfloat16()


def check_on_gpu(rows, keys, head_dim, mask, bias, sparse="tiles", heads=4, **options):
    def function(*args, **kwargs):
        moved = [x if x is None else x.to("cuda") for x in args]
        options = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        return [x.cpu() for x in flash_dmattn_func(*moved, sparse=sparse, **options)]

    tensors = inputs(2, rows, keys, heads, heads // 2, head_dim, torch.bfloat16)
    check(tensors, mask, bias, function=function, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("grid", [None, (13, 16), (3, 64), (20, 10)])
def test_relative_biases(grid, head_dim):
    size = [399] if grid is None else [2 * n - 1 for n in grid]
    rows, keys = (100, KEYS) if grid is None else (grid[0] * grid[1],) * 2
    check_on_gpu(rows, keys, head_dim, None, None, relative_bias=torch.randn(1, 4, *size), grid=grid)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", CASES)
def test_tiles(case, head_dim):
    rows, mask_shape, bias_shape, options = CASES[case]
    mask = None if mask_shape is None else rand_mask(*mask_shape)
    keys = (bias_shape or mask_shape or (KEYS,))[-1]
    check_on_gpu(rows, keys, head_dim, mask, randn(bias_shape), **options)


@pytest.mark.parametrize("bias_rows", [None, 1, 192], ids=["no bias", "key bias", "dense bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_heads(head_dim, bias_rows):
    """The tall tiles of the sm90 forward."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 4 * 2
    bias = None if bias_rows is None else randn((1, heads, bias_rows, KEYS))
    check_on_gpu(192, KEYS, head_dim, None, bias, heads=heads)


@pytest.mark.parametrize("mask_shape", [None, (2, 1, 200, KEYS)], ids=["no mask", "mask"])
def test_many_work_tiles(mask_shape):
    """The dynamic scheduler of the sm90 forward: an SM takes several work tiles."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2 + 2
    mask = None if mask_shape is None else rand_mask(*mask_shape)
    check_on_gpu(200, KEYS, 64, mask, None, heads=heads, is_causal=True)


@pytest.mark.parametrize("mask_shape", [None, (32, 1, 1, KEYS)], ids=["no mask", "mask"])
def test_pair_bias(mask_shape):
    tensors = inputs(32, 100, KEYS, 2, 2, 32, torch.bfloat16)
    mask = None if mask_shape is None else rand_mask(*mask_shape)

    def function(*args, **kwargs):
        return [x.cpu() for x in flash_dmattn_func(*(x if x is None else x.to("cuda") for x in args), **kwargs)]

    check(tensors, mask, randn((2, 2, 100, KEYS)), function=function)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("bias_shape", [None, (2, 2, 1, KEYS), (1, 1, 150, KEYS), (2, 4, 150, KEYS)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lists(head_dim, bias_shape, deterministic):
    options = {"sparse": "lists", "deterministic": deterministic}
    bool_mask, intervals = rand_mask(2, 2, 150, KEYS, visible=0.2), KeyIntervalMask.topk(randn((2, 2, KEYS)), 30, 150)
    check_on_gpu(150, KEYS, head_dim, bool_mask, randn(bias_shape), **options)
    check_on_gpu(150, KEYS, head_dim, intervals, randn(bias_shape), is_causal=True, **options)


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("rows", [1, 100])
def test_intervals(rows, sparse):
    bias = randn((2, 2, 1, KEYS))
    check_on_gpu(rows, KEYS, 64, KeyIntervalMask.topk(bias, 30, rows), bias, is_causal=True, sparse=sparse)


@pytest.mark.parametrize("keys", [300, 6000, 20_000], ids=["one block", "chunks", "many blocks"])
def test_topk(keys):
    bias = randn((2, 2, keys))
    on_cpu, on_cuda = (KeyIntervalMask.topk(x, 300) for x in (bias, bias.cuda()))
    assert torch.equal(on_cpu.end.maximum(on_cpu.start), on_cuda.end.maximum(on_cuda.start).cpu())
    lists = [KeyLists.build(mask, keys, is_causal=True) for mask in (on_cpu, on_cuda)]
    assert torch.equal(lists[0].lengths(), lists[1].lengths().cpu())


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("keys", [200, 20_000], ids=["one block", "a cluster"])
def test_decoding(keys, rows):
    """Split-KV over selected keys, combined by the last CTA, with partly filled caches."""
    query, key, value = inputs(2, rows, keys, 4, 2, 64, torch.bfloat16)
    bias, filled = randn((2, 2, 1, keys)), torch.tensor([keys // 3, keys], dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        tensors = [x.to(device) for x in (query, key, value)]
        options = {"attn_bias": bias.to(device), "is_causal": True, "cache_seqlens": filled.to(device)}
        results.append([flash_dmattn_func(*tensors, **options, window_size=w).cpu() for w in (100, keys)])
    for on_cpu, on_cuda in zip(*results):
        torch.testing.assert_close(on_cuda, on_cpu, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("window_size", [None, 30])
@pytest.mark.parametrize("packed", [False, True], ids=["fixed length", "packed"])
def test_cache(packed, window_size):
    """Gathered keys and written tokens; in a packed batch the decoding kernel serves the sequence of one row."""
    lengths = [(90, 70), (130, 70)] if not packed else [(90, 70), (5, 0), (130, 1), (0, 64)]
    sequences = make_sequences(lengths, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        call = make_call(sequences, page_size=16, packed=packed).to(device)
        results.append([x.cpu() for x in (call(window_size=window_size), *call.caches())])
    (on_cpu, *written), (on_cuda, *written_on_cuda) = results
    torch.testing.assert_close(on_cuda, on_cpu, rtol=2e-2, atol=2e-2)
    for ours, expected in zip(written_on_cuda, written):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("page_size", [None, 16])
def test_cache_of_single_rows(page_size):
    """Selection among candidates; the second sequence has too many, and all of its keys are counted."""
    sequences = make_sequences([(3000, 1), (2000, 1)], dtype=torch.bfloat16)
    sequences[1].biases.zero_()
    call = make_call(sequences, page_size=page_size)
    call.put_heads_first()
    on_cpu, on_cuda = (call.to(device)(window_size=30).cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(on_cuda, on_cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pairs", ["key", "dense"])
def test_variable_length(pairs):
    lengths = torch.tensor([0, 70, 70, 171], dtype=torch.int32).cuda()
    shape = (171, 2) if pairs == "key" else (171, 4, 101)
    mask = rand_mask(*shape).cuda()
    leaves = [randn((171, heads, 64)).cuda().requires_grad_() for heads in (4, 2, 2)]
    leaves.append(randn(shape).cuda().requires_grad_())
    results = []
    for visible in (mask, KeyLists.build(mask, 101, 101, True, lengths, lengths)):
        out = flash_dmattn_varlen_func(*(*leaves[:3], visible, leaves[3], lengths, lengths, 101, 101), is_causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for by_tiles, by_lists in zip(*results):
        torch.testing.assert_close(by_tiles, by_lists, rtol=2e-2, atol=2e-2)
