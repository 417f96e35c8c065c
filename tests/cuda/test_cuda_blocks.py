"""The CUDA kernels against the float64 reference on the GPU."""

import functools
import itertools

import pytest
import torch
from gpu_inputs import randn, takes_gpu_memory
from helpers import BROADCASTS, LENGTHS, check, inputs, rand_mask, run, shaped, surrounded

import flash_dmattn
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, ops
from flash_dmattn.backends.compiled import FIXED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]

DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [8, 32, 40, 64, 80, 96, 128, 192, 256]


def on_gpu(*args, **kwargs):
    return inputs(*args, **kwargs, device="cuda")


def mask_of(*shape, visible=0.6):
    return rand_mask(*shape, visible=visible, device="cuda")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_lengths(seqlen_q, seqlen_k, causal):
    tensors = on_gpu(1, seqlen_q, seqlen_k, head_dim=64, dtype=torch.bfloat16)
    check(tensors, mask_of(1, 2, seqlen_q, seqlen_k), randn(1, 2, 1, seqlen_k), is_causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_rows", [1, 130])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 35])
def test_head_dims(head_dim, bias_rows, dtype):
    tensors = on_gpu(2, 130, 300, 4, 2, head_dim, dtype)
    bias = randn(2, 4, bias_rows, 300, dtype=dtype)
    check(tensors, mask_of(2, 1, 130, 300), bias, is_causal=True)
    check(tensors, None, bias, softcap=5.0)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (2, 1), (4, 2), (4, 1), (8, 1), (8, 2)])
def test_head_groups(heads, kv_heads):
    tensors = on_gpu(2, 100, 200, heads, kv_heads, 64, torch.bfloat16)
    for bias_heads in {heads, kv_heads, 1}:
        check(tensors, mask_of(2, kv_heads, 100, 200), randn(2, bias_heads, 1, 200))
        check(tensors, mask_of(2, heads, 1, 200), randn(1, bias_heads, 100, 200), is_causal=True)


@pytest.mark.parametrize("broadcast", BROADCASTS, ids=str)
def test_mask_broadcasts(broadcast):
    check(on_gpu(2, 140, 270, 4, 2, 64, torch.bfloat16), mask_of(*shaped(broadcast, 140, 270)))


@pytest.mark.parametrize("broadcast", BROADCASTS, ids=str)
def test_bias_broadcasts(broadcast):
    tensors = on_gpu(2, 140, 270, 4, 2, 64, torch.bfloat16)
    check(tensors, mask_of(2, 1, 140, 270), randn(*shaped(broadcast, 140, 270)), is_causal=True, softcap=3.0)


@pytest.mark.parametrize("batch", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_dense_bias_that_batch_elements_share(head_dim, batch):
    tensors = on_gpu(batch, 300, 434, 4, 2, head_dim, torch.bfloat16)
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
def test_batches_that_share(head_dim, batch, batches, heads, sparse):
    """Masks and biases of B/n: gradients by clusters of 2 and 4, by sums of atomics, and by a kernel of their own."""
    function = functools.partial(flash_dmattn_func, sparse=sparse)
    tensors = on_gpu(batch, 200, 304, 4, 2, head_dim, torch.bfloat16)
    mask = mask_of(batch // batches, heads, 200, 304)
    mask[0, :, :, :130] = False
    bias = randn(batches, heads, 200, 304)
    check(tensors, mask, bias, function=function, is_causal=True)
    check(tensors, mask[:, :, :1], bias, function=function, softcap=3.0)
    check(tensors, mask, bias, function=function, deterministic=True)
    check(tensors, mask_of(batches, heads, 1, 304), randn(batches, heads, 1, 304), function=function)
    if sparse == "tiles":
        check(tensors, None, bias)


def test_decoding_with_batches_that_share():
    tensors = on_gpu(8, 1, 3000, 8, 2, 128, torch.bfloat16)
    check(tensors, mask_of(2, 1, 1, 3000), randn(4, 2, 1, 3000))
    check(on_gpu(8, 5, 3000, 8, 2, 64, torch.bfloat16), mask_of(4, 1, 5, 3000), randn(2, 8, 5, 3000))


@takes_gpu_memory(5)
@pytest.mark.parametrize("mask_shape", [(3, 1, 1, 2000), (3, 8, 900, 2000)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dense_bias_whose_gradient_is_too_large_for_the_cache(causal, mask_shape):
    mask = mask_of(*mask_shape)
    mask[1, :, :, :700] = False
    mask[:, 3:5, 200:500, 900:1500] = False
    check(on_gpu(3, 900, 2000, 8, 8, 64, torch.bfloat16), mask, randn(1, 8, 900, 2000), is_causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_tiles_and_heads_that_see_nothing(dtype):
    tensors = on_gpu(2, 300, 600, 4, 2, 64, dtype)
    mask = mask_of(2, 4, 300, 600)
    mask[0, 0, 5] = False
    mask[0, 1, :, :512] = False
    mask[0, 2, :256] = False
    mask[1, 3] = False
    out, lse, dq, *_ = check(tensors, mask, randn(1, 4, 300, 600, dtype=dtype))
    hidden = ~mask.any(-1)
    assert (lse[hidden] == -torch.inf).all()
    assert (out.transpose(1, 2)[hidden] == 0).all() and (dq.transpose(1, 2)[hidden] == 0).all()


@pytest.mark.parametrize("shape", [(1, 2, 1, 170), (2, 2, 150, 170), (1, 1, 150, 170)], ids=str)
def test_minus_infinity_in_the_bias_hides(shape):
    tensors = on_gpu(2, 150, 170, 2, 2, 64, torch.bfloat16)
    hidden = mask_of(*shape, visible=0.4)
    *_, dbias = check(tensors, None, randn(*shape).masked_fill(hidden, -torch.inf))
    assert (dbias[hidden] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 1, 170), (2, 2, 150, 170), (1, 1, 150, 170)], ids=str)
@pytest.mark.parametrize("sparse", ["tiles", "lists"])
def test_the_least_finite_number_hides(shape, sparse, dtype):
    """As -inf does, whatever scores are added to it: padding on the left, and rows that see nothing."""
    query, key, value = (x.requires_grad_() for x in on_gpu(2, 150, 170, 2, 2, 64, dtype))
    least = torch.finfo(dtype).min
    hidden = mask_of(*shape, visible=0.5)
    hidden[..., :20] = True
    if shape[2] > 1:
        hidden[..., 0, :] = True
    bias = randn(*shape, dtype=dtype).masked_fill(hidden, least).requires_grad_()
    infinite = bias.detach().masked_fill(hidden, -torch.inf).requires_grad_()
    mask = torch.ones(1, 1, 1, 170, dtype=torch.bool, device="cuda")
    dout = torch.randn_like(query)

    def run_with(bias):
        options = {"sparse": sparse, "return_lse": True, "deterministic": True}
        out, lse = flash_dmattn_func(query, key, value, mask, bias, **options)
        return out, lse, *torch.autograd.grad(out, [query, key, value, bias], dout)

    # Rows beside one of nothing but such numbers are rounded otherwise.
    for x, y in zip(run_with(bias), run_with(infinite)):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    out, lse, dq, *_ = run_with(torch.full_like(bias, least, requires_grad=True))
    assert (lse == -torch.inf).all() and (out == 0).all() and (dq == 0).all()


@pytest.mark.parametrize("bias_shape", [(2, 4, 1, 290), (1, 2, 300, 290), (2, 4, 300, 290)], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_nan_around_every_tensor_and_in_what_starts_unwritten(poisoned_allocations, head_dim, bias_shape):
    tensors = [surrounded(x) for x in on_gpu(2, 300, 290, 4, 2, head_dim, torch.bfloat16)]
    mask, bias = surrounded(mask_of(2, 2, 300, 290), fill=True), surrounded(randn(*bias_shape))
    check(tensors, mask, bias, dout=surrounded(torch.randn_like(tensors[0]) / 8), is_causal=True)


def test_garbage_in_padding_reaches_nothing():
    query, key, value = on_gpu(2, 300, 300, 4, 2, 64, torch.bfloat16)
    real = torch.arange(300, device="cuda") < torch.tensor([[170], [299]], device="cuda")
    mask = real[:, None, :, None] & real[:, None, None, :]
    bias, dout, dlse = randn(2, 4, 300, 300), torch.randn_like(query), torch.zeros(2, 4, 300, device="cuda")
    clean = run(flash_dmattn_func, (query, key, value), mask, bias, dout, dlse)
    padding = ~real[:, :, None, None]
    dirty = [x.masked_fill(padding, torch.nan) for x in (query, key, value)]
    ours = run(flash_dmattn_func, dirty, mask, bias, dout.masked_fill(padding, torch.nan), dlse)
    for x, y in zip(ours, clean):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_garbage_in_keys_that_their_bias_hides(head_dim):
    tensors = [x.requires_grad_() for x in on_gpu(2, 150, 300, 4, 2, head_dim, torch.bfloat16)]
    hidden = torch.rand(2, 2, 1, 300, device="cuda") < 0.3
    hidden[1, :, :, 200:] = True
    bias = randn(2, 2, 1, 300).masked_fill(hidden, -torch.inf).requires_grad_()
    garbage = hidden.all(dim=1)[:, 0, :, None, None]
    poisoned = [tensors[0], *(x.detach().masked_fill(garbage, torch.nan).requires_grad_() for x in tensors[1:])]
    dout = torch.randn_like(tensors[0])
    clean, dirty = (
        torch.autograd.grad(flash_dmattn_func(*x, attn_bias=bias), [*x, bias], dout) for x in (tensors, poisoned)
    )
    for x, y in zip(clean, dirty):
        torch.testing.assert_close(x, y)


def test_strides():
    query, key, value = on_gpu(2, 140, 270, 4, 4, 64, torch.bfloat16)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    key = randn(2, 540, 4, 64)[:, ::2]
    value = randn(2, 270, 1, 64).expand(2, 270, 4, 64)
    mask = mask_of(2, 270, 4, 140).permute(0, 2, 3, 1)
    bias = randn(270, 140).T.expand(2, 4, 140, 270)
    check((query, key, value), mask, bias, dout=randn(2, 4, 140, 64).transpose(1, 2) / 8)
    check((query[..., 1:33], key[..., 1:33], value[..., 1:33]), mask, bias)


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k, heads", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)])
def test_nothing_there_without_mask_and_bias(batch, seqlen_q, seqlen_k, heads):
    tensors = [x.requires_grad_() for x in on_gpu(batch, seqlen_q, seqlen_k, heads, heads, 64, torch.bfloat16)]
    out = flash_dmattn_func(*tensors)
    assert (out == 0).all()
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("batch, seqlen_q, seqlen_k, heads", [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2), (2, 5, 5, 0)])
@pytest.mark.parametrize("bias_rows", ["key", "dense"])
def test_nothing_there(batch, seqlen_q, seqlen_k, heads, bias_rows):
    tensors = [x.requires_grad_() for x in on_gpu(batch, seqlen_q, seqlen_k, heads, heads, 64, torch.bfloat16)]
    bias = randn(1, 1, 1 if bias_rows == "key" else seqlen_q, seqlen_k).requires_grad_()
    out, lse = flash_dmattn_func(*tensors, mask_of(1, 1, seqlen_q, seqlen_k), bias, return_lse=True)
    gradients = torch.autograd.grad([out, lse], [*tensors, bias], [torch.randn_like(out), torch.randn_like(lse)])
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("pairs", ["none", "key", "dense"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_varlen_is_as_on_the_cpu(causal, pairs):
    lengths_q, lengths_k = [3, 0, 129, 1, 300], [5, 4, 65, 0, 600]
    offsets = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k)]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    shape = {"none": None, "key": (total_k, 2), "dense": (total_q, 2, 600)}[pairs]
    tensors = [torch.randn(n, h, 64).bfloat16() for n, h in ((total_q, 4), (total_k, 2), (total_k, 2))]
    mask = None if shape is None else torch.rand(shape) < 0.6
    tensors += [] if shape is None else [torch.randn(shape).bfloat16()]
    dout, dlse = torch.randn(total_q, 4, 64) / 8, torch.randn(4, total_q) / 8
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in tensors]
        rows, bias = leaves[:3], leaves[3] if shape else None
        out, lse = flash_dmattn_varlen_func(
            *(*rows, None if mask is None else mask.to(device), bias),
            *(offsets[0].to(device), offsets[1].to(device), 300, 600),
            is_causal=causal,
            return_lse=True,
        )
        gradients = torch.autograd.grad([out, lse], leaves, [dout.to(out), dlse.to(lse)])
        results.append([x.cpu() for x in (out, lse, *gradients)])
    for ours, cpu in zip(results[1], results[0]):
        torch.testing.assert_close(ours, cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("bias_shape", [(2, 4, 1, 700), (1, 4, 500, 700), (1, 1, 500, 700), (2, 4, 500, 700)], ids=str)
def test_deterministic_is_bitwise_reproducible(bias_shape, head_dim):
    tensors = [x.requires_grad_() for x in on_gpu(2, 500, 700, 4, 2, head_dim, torch.bfloat16)]
    mask, bias = mask_of(2, 2, 500, 700), randn(*bias_shape).requires_grad_()
    dout = torch.randn_like(tensors[0])

    def gradients():
        out = flash_dmattn_func(*tensors, mask, bias, is_causal=True, deterministic=True)
        return torch.autograd.grad(out, [*tensors, bias], dout)

    first = gradients()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(gradients(), first))


def test_on_another_stream():
    tensors = on_gpu(2, 1000, 1000, 4, 2, 64, torch.bfloat16)
    mask, bias = mask_of(2, 2, 1000, 1000), randn(2, 2, 1, 1000)
    expected = flash_dmattn_func(*tensors, mask, bias)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        later = [x + 0 for x in tensors]  # a kernel on the default stream would read these too early
        out = flash_dmattn_func(*later, mask, bias)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_on_a_second_gpu():
    tensors = on_gpu(1, 300, 300, 4, 2, 64, torch.bfloat16)
    out = flash_dmattn_func(*(x.to("cuda:1") for x in tensors), is_causal=True)
    assert out.device.index == 1 and torch.equal(out.cpu(), flash_dmattn_func(*tensors, is_causal=True).cpu())


def test_graph_capture_and_replay():
    leaves = [x.requires_grad_() for x in on_gpu(2, 300, 300, 4, 2, 64, torch.bfloat16)]
    mask, bias = mask_of(2, 2, 300, 300), randn(2, 2, 1, 300).requires_grad_()
    dout = torch.randn_like(leaves[0])

    def step():
        out = flash_dmattn_func(*leaves, mask, bias, is_causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, [*leaves, bias], dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in (*leaves, bias):
        tensor.data.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


@pytest.mark.parametrize("pairs", ["none", "key", "dense"])
def test_opcheck(pairs):
    query, key, value = (x.requires_grad_() for x in on_gpu(2, 70, 90, 4, 2, 64, torch.bfloat16))
    mask = {"none": None, "key": mask_of(2, 1, 1, 90), "dense": mask_of(1, 2, 70, 90)}[pairs]
    bias = {"none": None, "key": randn(1, 2, 1, 90), "dense": randn(2, 4, 70, 90)}[pairs]
    packing = (mask, 70, 90, False, None, None)
    masks = ops.MaskTensors() if mask is None else ops.MaskTensors(*ops.pack_mask(*packing))
    forward = (query, key, value, bias, *masks, *FIXED, None, 0.3, 0.0, False, True)
    torch.library.opcheck(ops.attention_forward, forward, atol=1e-2, rtol=1e-1)
    if mask is not None:
        torch.library.opcheck(ops.pack_mask, packing)


def test_compile_fullgraph():
    def layer(query, key, value, mask, bias):
        return flash_dmattn_func(query * 2, key, value, mask, bias.exp(), is_causal=True).sin()

    tensors = on_gpu(2, 130, 130, 4, 2, 64, torch.bfloat16)
    mask, bias = mask_of(2, 2, 130, 130), randn(1, 2, 130, 130)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in (*tensors, bias)]
        out = function(*leaves[:3], mask, leaves[3])
        results.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@takes_gpu_memory(6)
def test_a_mask_of_more_than_32_bits_of_elements():
    seqlen = 46400
    query, key, value = on_gpu(1, seqlen, seqlen, 1, 1, 64, torch.float16)
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
def test_memory_beside_inputs_and_gradients():
    """O(B H S D) and the packed mask; nothing else of O(Sq Sk)."""
    tensors = [x.requires_grad_() for x in on_gpu(1, 8192, 8192, 4, 4, 64, torch.bfloat16)]
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
