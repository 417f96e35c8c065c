"""Packed sequences against the float64 reference of each sequence alone."""

import pytest
import torch
from helpers import assert_close, in_float64, reference, surrounded
from paths import CAUSAL, LISTS, both, case, cpu, cuda, on
from sequences import Sequences, gradients, offsets, one_by_one

CPU_DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def varlen_cases():
    """(path, head dimension, dtype, heads of the mask, heads of the bias, kind of bias)"""
    pairs = [(4, 2), (2, 4), (2, 2), (1, 1)]
    groups = [
        # A mask and a bias of the same shape.
        (cpu("none"), [16], CPU_DTYPES, [(1, 1)], ["none"]),
        (cpu("key"), [16], CPU_DTYPES, [(4, 4), (2, 2), (1, 1)], ["key"]),
        (cpu("bool"), [16], CPU_DTYPES, [(4, 4), (2, 2), (1, 1)], ["dense"]),
        (cpu("intervals", *LISTS), [16], CPU_DTYPES, [(4, 2), (2, 4), (1, 1)], ["none", "key", "dense"]),
        (cuda("none", "key", "bool", "intervals", *LISTS), [64], [torch.bfloat16], pairs, ["none", "key", "dense"]),
        (cuda("interval lists"), [192, 256], [torch.bfloat16], [(2, 4), (2, 2)], ["none", "key", "dense"]),
    ]
    return [
        case(path, head_dim, dtype, *heads, bias)
        for paths, head_dims, dtypes, numbers, biases in groups
        for path in paths
        for head_dim in head_dims
        for dtype in dtypes
        for heads in numbers
        for bias in biases
    ]


@CAUSAL
@pytest.mark.parametrize("path, head_dim, dtype, mask_heads, bias_heads, bias_kind", varlen_cases())
def test_every_sequence_equals_its_own_call(path, head_dim, dtype, mask_heads, bias_heads, bias_kind, causal):
    s = Sequences(path.device)
    sizes = ((s.total_q, 4), (s.total_k, 2), (s.total_k, 2))
    tensors = [surrounded(path.randn(n, heads, head_dim, dtype=dtype), margin=8) for n, heads in sizes]
    mask = s.mask(path.mask, mask_heads, visible=0.1 if path.by_lists else 0.6)
    shape = s.bias_shape(bias_kind, bias_heads)
    bias = None if shape is None else path.randn(*shape, dtype=dtype)
    if bias_kind == "dense":
        s.fill_behind_keys(bias)
    dout, dlse = path.randn(s.total_q, 4, head_dim, dtype=dtype) / 8, path.randn(4, s.total_q, dtype=torch.float32) / 8

    def alone(query, key, value, mask, bias):
        return one_by_one(reference, query, key, value, mask, bias, s.cu_q, s.cu_k, is_causal=causal)

    eager = gradients(alone, tensors, s.dense(mask), bias, dout, dlse)
    double = [x.double() for x in tensors], s.dense(mask), None if bias is None else in_float64(bias)
    exact = gradients(alone, *double, dout, dlse)
    for deterministic in (False, True) if path.on_cuda else (False,):
        options = {"is_causal": causal, "return_lse": True, "deterministic": deterministic}
        ours = gradients(path.varlen_function, tensors, mask, bias, dout, dlse, *s.lengths, **options)
        assert_close(ours, eager, exact, dtype)


@CAUSAL
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "key bias"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@on(*both("none"))
def test_the_bits_of_a_sequence_do_not_depend_on_the_next_one(path, head_dim, biased, causal):
    """They share a tile: the last rows of one and the first rows of the other."""
    rows, keys = [130, 70], [600, 500]
    query, key, value = (path.randn(n, h, head_dim) for n, h in ((sum(rows), 4), (sum(keys), 2), (sum(keys), 2)))
    bias = path.randn(sum(keys), 2) if biased else None
    lengths = (offsets(rows, path.device), offsets(keys, path.device), max(rows), max(keys))
    results = []
    for factor in (1, 50, -1000):
        query[130:] *= factor
        out, lse = path.varlen_function(
            query, key, value, None, bias, *lengths, is_causal=causal, return_lse=True, deterministic=True
        )
        results.append((out[:130], lse[:, :130]))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0]))
