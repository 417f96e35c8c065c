"""Calls from several Python threads at once return bitwise what single calls return."""

from concurrent.futures import ThreadPoolExecutor

import torch

from flash_dmattn import KeyIntervalMask, flash_dmattn_func, flash_dmattn_varlen_func, flash_dmattn_with_kvcache

BATCH, SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 2, 70, 4, 2, 16
OFFSETS = torch.tensor([0, 30, 70], dtype=torch.int32)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def with_gradients(generator, call, *leading, biases=()):
    """[out, lse, gradients] of `call`, a function of query, key, value and the biases of the given shapes."""
    leaves = [normal(generator, *leading, n, HEAD_DIM).requires_grad_() for n in (HEADS, KV_HEADS, KV_HEADS)]
    leaves += [normal(generator, *shape).requires_grad_() for shape in biases]
    out, lse = call(*leaves)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)]


def causal(generator):
    def call(*tensors):
        return flash_dmattn_func(*tensors, is_causal=True, return_lse=True)

    return with_gradients(generator, call, BATCH, SEQLEN)


def window_size(generator):
    def call(*tensors):
        options = {"is_causal": True, "window_size": 9, "sparse": "lists", "return_lse": True}
        return flash_dmattn_func(*tensors[:3], attn_bias=tensors[3], **options)

    return with_gradients(generator, call, BATCH, SEQLEN, biases=[(BATCH, KV_HEADS, 1, SEQLEN)])


def bool_mask(generator):
    mask = torch.rand(BATCH, 1, SEQLEN, SEQLEN, generator=generator) < 0.3

    def call(*tensors):
        return flash_dmattn_func(*tensors[:3], mask, tensors[3], return_lse=True)

    return with_gradients(generator, call, BATCH, SEQLEN, biases=[(1, HEADS, SEQLEN, SEQLEN)])


def relative_bias(generator):
    mask = KeyIntervalMask.sliding_window(SEQLEN, SEQLEN, (20, 5))

    def call(*tensors):
        return flash_dmattn_func(*tensors[:3], mask, relative_bias=tensors[3], return_lse=True)

    return with_gradients(generator, call, BATCH, SEQLEN, biases=[(1, HEADS, 2 * 20 + 1)])


def variable_length(generator):
    def call(*tensors):
        lengths = (OFFSETS, OFFSETS, 40, 40)
        return flash_dmattn_varlen_func(*tensors[:3], None, tensors[3], *lengths, is_causal=True, return_lse=True)

    return with_gradients(generator, call, SEQLEN, biases=[(SEQLEN, KV_HEADS)])


def cache(generator):
    query, bias = normal(generator, BATCH, 1, HEADS, HEAD_DIM), normal(generator, BATCH, SEQLEN, KV_HEADS)
    caches = [normal(generator, BATCH, SEQLEN, KV_HEADS, HEAD_DIM) for _ in range(2)]
    new = [normal(generator, BATCH, 1, KV_HEADS, HEAD_DIM) for _ in range(2)]
    options = {"bias_cache": bias, "bias": normal(generator, BATCH, 1, KV_HEADS), "return_lse": True}
    return [*flash_dmattn_with_kvcache(query, *caches, *new, cache_seqlens=50, window_size=9, **options), *caches, bias]


def test_calls_from_several_threads():
    calls = [
        (function, seed)
        for seed in range(8)
        for function in (causal, window_size, bool_mask, relative_bias, variable_length, cache)
    ]

    def results(call):
        function, seed = call
        return function(torch.Generator().manual_seed(seed))

    expected = list(map(results, calls))
    with ThreadPoolExecutor(4) as threads:
        for (function, _), ours, single in zip(calls, threads.map(results, calls), expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(ours, single, strict=True)), function.__name__
