"""Every CUDA kernel once, on small shapes: what compute-sanitizer is run over (docs/testing.md)."""

from functools import partial

import pytest
import torch
from helpers import check, inputs, rand_mask

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]

KEYS = 200
# By name: rows, the shapes of mask and bias, options.
CASES = {
    "no mask, no bias": (100, None, None, {}),
    "one row, keys split": (1, (2, 2, 1, 600), (2, 2, 1, 600), {}),
    "few rows": (20, (2, 1, 20, KEYS), (2, 2, 1, KEYS), {"is_causal": True}),
    "key bias": (100, (2, 2, 100, KEYS), (2, 2, 1, KEYS), {"is_causal": True}),
    "key bias, deterministic": (100, (1, 4, 100, KEYS), (1, 4, 1, KEYS), {"deterministic": True}),
    "dense bias": (100, (2, 1, 1, KEYS), (2, 4, 100, KEYS), {"is_causal": True}),
    "dense bias, shared": (100, (2, 4, 100, KEYS), (1, 2, 100, KEYS), {"softcap": 5.0}),
    "dense bias, shared by all, deterministic": (100, None, (1, 1, 100, KEYS), {"deterministic": True}),
}
# Head dimensions with tiles of different kinds.
HEAD_DIMS = [64, 192]


def randn(shape):
    return None if shape is None else torch.randn(*shape, device="cuda").bfloat16()


def problem(rows, keys, head_dim):
    return inputs(2, rows, keys, 4, 2, head_dim, torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", CASES)
def test_tiles(case, head_dim):
    rows, mask_shape, bias_shape, options = CASES[case]
    mask = None if mask_shape is None else rand_mask(*mask_shape, device="cuda")
    keys = (bias_shape or mask_shape or (KEYS,))[-1]
    check(problem(rows, keys, head_dim), mask, randn(bias_shape), sparse="tiles", **options)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("bias_shape", [None, (2, 2, 1, KEYS), (1, 1, 150, KEYS), (2, 4, 150, KEYS)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lists(head_dim, bias_shape, deterministic):
    options = {"function": partial(flash_dmattn_func, sparse="lists"), "deterministic": deterministic}
    tensors, bias = problem(150, KEYS, head_dim), randn(bias_shape)
    check(tensors, rand_mask(2, 2, 150, KEYS, visible=0.2, device="cuda"), bias, **options)
    check(tensors, KeyIntervalMask.topk(randn((2, 2, KEYS)), 30, 150), bias, is_causal=True, **options)


@pytest.mark.parametrize("rows", [1, 100])
def test_intervals(rows):
    bias = randn((2, 2, 1, KEYS))
    mask = KeyIntervalMask.topk(bias, 30, rows)
    check(problem(rows, KEYS, 64), mask, bias, is_causal=True, sparse="tiles")
    check(problem(rows, KEYS, 64), mask, bias, is_causal=True, function=partial(flash_dmattn_func, sparse="lists"))


@pytest.mark.parametrize("pairs", ["key", "dense"])
def test_variable_length(pairs):
    lengths = torch.tensor([0, 70, 70, 171], dtype=torch.int32, device="cuda")
    query, key, value = (torch.randn(171, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2))
    shape = (171, 2) if pairs == "key" else (171, 4, 101)
    mask, bias = rand_mask(*shape, device="cuda"), randn(shape)
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    lists = KeyLists.build(mask, 101, 101, True, lengths, lengths)
    results = []
    for visible in (mask, lists):
        out = flash_dmattn_varlen_func(query, key, value, visible, bias, lengths, lengths, 101, 101, is_causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for by_tiles, by_lists in zip(*results):
        torch.testing.assert_close(by_tiles, by_lists, rtol=2e-2, atol=2e-2)
