"""The dense CUDA kernels: shared biases, streams, CUDA graphs, memory, large tensors."""

import functools

import pytest
import torch
from generate_kernels import HEAD_DIMS
from gpu_inputs import NEEDS_CUDA, captured, mask_of, on_gpu, randn, takes_gpu_memory
from helpers import check

import flash_dmattn
from flash_dmattn import flash_dmattn_func

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("batch", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_dense_bias_shared_by_batch_elements(head_dim, batch):
    tensors = on_gpu(batch, 300, 434, 4, 2, head_dim)
    mask = mask_of(batch, 2, 300, 434)
    mask[0, :, :, :130] = False
    mask[:, 1, 120:260] = False
    bias = randn(1, 4, 300, 434)
    check(tensors, mask, bias, is_causal=True)
    check([x[:, :293] for x in tensors], None, bias[:, :, :293, :293].contiguous())
    check([x[:, :256] for x in tensors], mask_of(batch, 1, 1, 256), bias[:, :, :256, :256])
    check(tensors, mask, bias, softcap=3.0)
    check(tensors, mask, bias, is_causal=True, deterministic=True)


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("batch, batches", [(4, 2), (8, 2), (6, 2), (6, 3), (12, 3), (10, 2)])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_masks_and_biases_shared_by_batch_elements(head_dim, batch, batches, heads, sparse):
    """Bias gradients are reduced serially, in clusters (sm80), by atomics, and by a second kernel."""
    function = functools.partial(flash_dmattn_func, sparse=sparse)
    tensors = on_gpu(batch, 200, 304, 4, 2, head_dim)
    mask = mask_of(batch // batches, heads, 200, 304)
    mask[0, :, :, :130] = False
    bias = randn(batches, heads, 200, 304)
    check(tensors, mask, bias, function=function, is_causal=True)
    check(tensors, mask[:, :, :1], bias, function=function, softcap=3.0)
    check(tensors, mask, bias, function=function, deterministic=True)
    check(tensors, mask_of(batches, heads, 1, 304), randn(batches, heads, 1, 304), function=function)
    if sparse == "tiles":
        check(tensors, None, bias)


def test_decoding_with_shared_masks_and_biases():
    tensors = on_gpu(8, 1, 3000, 8, 2, 128)
    check(tensors, mask_of(2, 1, 1, 3000), randn(4, 2, 1, 3000))
    check(on_gpu(8, 5, 3000, 8, 2, 64), mask_of(4, 1, 5, 3000), randn(2, 8, 5, 3000))


@takes_gpu_memory(5)
@pytest.mark.parametrize("mask_shape", [(3, 1, 1, 2000), (3, 8, 900, 2000)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_dense_bias_whose_gradient_exceeds_the_l2_cache(causal, mask_shape):
    mask = mask_of(*mask_shape)
    mask[1, :, :, :700] = False
    mask[:, 3:5, 200:500, 900:1500] = False
    check(on_gpu(3, 900, 2000, 8, 8, 64), mask, randn(1, 8, 900, 2000), is_causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_their_bias_masks_may_hold_nan(head_dim):
    tensors = [x.requires_grad_() for x in on_gpu(2, 150, 300, 4, 2, head_dim)]
    masked = torch.rand(2, 2, 1, 300, device="cuda") < 0.3
    masked[1, :, :, 200:] = True
    bias = randn(2, 2, 1, 300).masked_fill(masked, -torch.inf).requires_grad_()
    garbage = masked.all(dim=1)[:, 0, :, None, None]
    poisoned = [tensors[0], *(x.detach().masked_fill(garbage, torch.nan).requires_grad_() for x in tensors[1:])]
    dout = torch.randn_like(tensors[0])
    clean, dirty = (
        torch.autograd.grad(flash_dmattn_func(*x, attn_bias=bias), [*x, bias], dout) for x in (tensors, poisoned)
    )
    for x, y in zip(clean, dirty):
        torch.testing.assert_close(x, y)


def test_on_another_stream():
    tensors = on_gpu(2, 1000, 1000, 4, 2, 64)
    mask, bias = mask_of(2, 2, 1000, 1000), randn(2, 2, 1, 1000)
    expected = flash_dmattn_func(*tensors, mask, bias)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        later = [x + 0 for x in tensors]  # a kernel on the default stream would read these too early
        out = flash_dmattn_func(*later, mask, bias)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "batch, head_dim, bias", [(2, 64, (2, 2, 1, 304)), (10, 128, (1, 1, 304, 304)), (2, 128, None)]
)
def test_graph_capture_and_replay(batch, head_dim, bias):
    """A key bias and a mask, a dense bias that heads and batch elements share, and neither."""
    tensors = on_gpu(batch, 304, 304, 4, 2, head_dim)
    leaves = [x.requires_grad_() for x in (*tensors, *([] if bias is None else [randn(*bias)]))]
    mask = mask_of(2, 2, 304, 304) if head_dim == 64 else None
    dout = torch.randn_like(leaves[0])

    def step():
        biases = {"attn_bias": leaves[3]} if len(leaves) > 3 else {}
        out = flash_dmattn_func(*leaves[:3], mask, is_causal=mask is not None, deterministic=True, **biases)
        return out, *torch.autograd.grad(out, leaves, dout)

    graph, replayed = captured(step)
    for tensor in leaves:
        tensor.data.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, step()))


def test_compile_fullgraph():
    def layer(query, key, value, mask, bias):
        return flash_dmattn_func(query * 2, key, value, mask, bias.exp(), is_causal=True).sin()

    tensors = on_gpu(2, 130, 130, 4, 2, 64)
    mask, bias = mask_of(2, 2, 130, 130), randn(1, 2, 130, 130)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, bias)]
        out = function(*leaves[:3], mask, leaves[3])
        results.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@takes_gpu_memory(6)
def test_a_mask_of_more_than_2_31_elements():
    seqlen = 46400
    query, key, value = on_gpu(1, seqlen, seqlen, 1, 1, 64, dtype=torch.float16)
    mask = torch.zeros(1, 1, seqlen, seqlen, dtype=torch.bool, device="cuda")
    mask[..., -70:, ::3] = True
    assert mask.numel() > 2**31
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = flash_dmattn_func(*leaves, mask, return_lse=True)
    out.backward(torch.ones_like(out))
    assert (lse[..., :-70] == -torch.inf).all() and (query.grad[:, :-70] == 0).all()
    tail = [x.detach().double() for x in (query[:, -70:], key, value)]
    exact = flash_dmattn.flash_dmattn_func_auto("reference")(*tail, mask[..., -70:, :])
    torch.testing.assert_close(out[:, -70:].double(), exact, rtol=1e-2, atol=1e-3)


@takes_gpu_memory(3)
def test_memory_beyond_inputs_and_gradients_is_linear():
    """O(B H S D) and the packed mask; nothing else of O(Sq Sk)."""
    tensors = [x.requires_grad_() for x in on_gpu(1, 8192, 8192, 4, 4, 64)]
    mask, bias = mask_of(1, 4, 8192, 8192), randn(1, 4, 1, 8192).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flash_dmattn_func(*tensors, mask, bias).sum().backward()
    added = torch.cuda.max_memory_allocated() - before
    rows = tensors[0].numel() * 2
    room = 20 / 128 / 2  # for lists of half of all keys: a key and its 128 rows take 20 bytes
    assert added < mask.numel() * (1 / 8 + room) * 1.05 + 12 * rows


def test_float32_is_refused():
    tensors = on_gpu(1, 5, 5, dtype=torch.float32)
    with pytest.raises(TypeError, match="query must be float16 or bfloat16 on CUDA .*'triton'.*, got float32"):
        flash_dmattn_func(*tensors)
