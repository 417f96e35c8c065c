"""Few rows beside many keys, as in decoding: the kernels split the keys."""

import pytest
import torch
from helpers import check
from paths import CAUSAL, DTYPES, case, cpu, cuda, with_common_keys


def cuda_cases():
    paths = cuda("intervals", "bool", "interval lists", "bool lists", "key lists")
    dtypes = (torch.bfloat16, torch.float32)
    return [case(p, rows, heads, d) for p in paths for rows in (1, 3, 15, 40) for heads in (1, 2, 8) for d in dtypes]


@pytest.mark.parametrize("path, rows, mask_heads, bias_dtype", cuda_cases())
def test_split_keys(path, rows, mask_heads, bias_dtype):
    tensors, bias = path.inputs(2, rows, 4000, 8, 2, 128), path.randn(2, 2, 1, 4000, dtype=bias_dtype)
    mask = path.make_mask(2, mask_heads, rows, 4000)
    path.check(tensors, mask, bias, is_causal=True)
    path.check(tensors, with_common_keys(mask, rows), bias, is_causal=True)


GROUPS = [(1, 4, 4), (1, 8, 1), (2, 6, 2), (5, 4, 2), (8, 2, 2), (9, 2, 2)]


@CAUSAL
@pytest.mark.parametrize("path, dtype", [case(path, dtype) for path in cpu("none") for dtype in DTYPES])
@pytest.mark.parametrize("rows, heads, kv_heads", GROUPS)
@pytest.mark.parametrize("keys, head_dim", [(1, 8), (129, 24), (777, 64), (1300, 40)])
def test_split_keys_on_the_cpu(keys, head_dim, rows, heads, kv_heads, path, dtype, causal):
    tensors = path.inputs(2, rows, keys, heads, kv_heads, head_dim, dtype=dtype)
    mask, key_bias = path.rand_mask(1, heads, rows, keys), path.randn(2, 1, 1, keys, dtype=dtype)
    check(tensors, mask, key_bias, is_causal=causal)
    check(tensors, None, path.randn(1, heads, rows, keys, dtype=dtype), is_causal=causal, softcap=5.0)


@pytest.mark.parametrize("path, head_dim", [case(path, head_dim) for path in cpu("none") for head_dim in (128, 256)])
def test_large_heads_on_the_cpu(path, head_dim):
    path.check(path.inputs(1, 3, 400, 4, 2, head_dim))
