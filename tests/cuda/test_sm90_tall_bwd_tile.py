"""The tall tile of the sm90 backward: m_blocks of 80 rows at head dimension 128, without masks and softcap."""

import re

import pytest
import torch
from gpu_inputs import CAUSAL, mask_of, on_gpu, randn
from helpers import check
from sequences import slices
from sm90 import check_masked_parts, kernels_of, names_of, offsets

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

HEAD_DIMS = pytest.mark.parametrize("head_dim", [104, 128])
KEY_BIAS = pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "key bias"])


def is_tall(names):
    return re.search("BwdKernelTraits<[^>]*, 128, 80, ", names) is not None


def test_which_calls_use_it():
    def served(rows, bias=None, mask=None, head_dim=128, **options):
        return is_tall(kernels_of(on_gpu(2, rows, 264, 4, 2, head_dim), mask, bias, **options)[1])

    assert served(240) and served(240, head_dim=104) and served(240, deterministic=True)
    assert served(240, randn(2, 4, 1, 264)) and served(240, randn(1, 1, 1, 264).float())
    assert served(1000) and served(8192, is_causal=True)
    assert not served(192) and not served(256) and not served(512)  # more rows beyond the sequence
    assert not served(1024, is_causal=True)
    assert not served(240, head_dim=64) and not served(240, head_dim=136) and not served(240, softcap=4.0)
    assert not served(240, randn(2, 4, 240, 264)) and not served(240, mask=mask_of(2, 1, 1, 264))
    assert not served(240, relative_bias=randn(1, 4, 63))


def test_packed_sequences_use_it_by_their_mean_length():
    def served(lengths):
        cu_seqlens, total = offsets(lengths), sum(lengths)
        tensors = [randn(total, 2, 128).requires_grad_() for _ in range(3)]
        out = flash_dmattn_varlen_func(*tensors, None, None, cu_seqlens, cu_seqlens, max(lengths), max(lengths))
        return is_tall(names_of(lambda: torch.autograd.grad(out, tensors, torch.randn_like(out))))

    assert served([240, 240]) and served([80, 400]) and not served([192, 192])


@CAUSAL
@KEY_BIAS
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows, keys", [(80, 128), (240, 1), (70, 65), (300, 440), (1000, 777), (1040, 129)])
@HEAD_DIMS
def test_lengths(head_dim, rows, keys, deterministic, has_bias, causal):
    """Tiles that reach beyond the rows and the keys, and rows that causality leaves no key."""
    bias = randn(1, 4, 1, keys) if has_bias else None
    check(on_gpu(2, rows, keys, 4, 2, head_dim), None, bias, is_causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (1, 1)], ids=str)
def test_key_biases(shape, bias_dtype, dtype):
    """Biases of query heads, of KV heads and shared ones; some mask their key."""
    bias = randn(*shape, 1, 440, dtype=bias_dtype or dtype)
    bias[..., ::7], bias[..., 1::7] = -torch.inf, torch.finfo(bias.dtype).min
    check(on_gpu(2, 400, 440, 4, 2, 128, dtype=dtype), None, bias)


@HEAD_DIMS
def test_masked_rows_and_keys_may_hold_nan(head_dim, poisoned_allocations):
    """Rows that causality leaves no key, and keys that a key bias masks."""
    rows, keys = 400, 264
    masked_rows = (torch.arange(rows, device="cuda") < rows - keys).expand(2, rows)
    masked_keys = torch.zeros(2, keys, dtype=torch.bool, device="cuda")
    tensors = on_gpu(2, rows, keys, 4, 2, head_dim)
    check_masked_parts(tensors, None, None, masked_rows, masked_keys, is_causal=True)
    masked_keys[0, 120:130] = masked_keys[1, 200:] = masked_keys[:, ::9] = True
    bias = randn(2, 1, 1, keys).masked_fill(masked_keys[:, None, None], -torch.inf)
    check_masked_parts(tensors, None, bias, torch.zeros_like(masked_rows), masked_keys)


@CAUSAL
@pytest.mark.parametrize("deterministic", [False, True])
@HEAD_DIMS
def test_packed_sequences(head_dim, deterministic, causal, poisoned_allocations):
    """Sequences do not read each other, and those without rows or keys have zero gradients."""
    rows, keys = [80, 0, 4000, 79, 1, 81, 3500], [128, 200, 3600, 0, 65, 81, 3500]
    shapes = (sum(rows), 4), (sum(keys), 2), (sum(keys), 2)
    leaves = [randn(total, heads, head_dim).requires_grad_() for total, heads in shapes]
    limits = offsets(rows), offsets(keys), max(rows), max(keys)
    options = {"is_causal": causal, "deterministic": deterministic}
    out = flash_dmattn_varlen_func(*leaves, None, None, *limits, **options)
    dout = randn(*out.shape)
    assert is_tall(names_of(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)))
    gradients = torch.autograd.grad(out, leaves, dout)
    for i, (row, key) in enumerate(zip(slices(limits[0]), slices(limits[1]))):
        parts = row, key, key
        if rows[i] == 0 or keys[i] == 0:
            assert not any(x[part].any() for x, part in zip(gradients, parts))
            continue
        alone = [x[part].detach()[None].requires_grad_() for x, part in zip(leaves, parts)]
        result = flash_dmattn_func(*alone, **options)
        expected = torch.autograd.grad(result, alone, dout[None, row])
        for name, x, y, part in zip("qkv", gradients, expected, parts):
            torch.testing.assert_close(x[part], y[0], rtol=2e-2, atol=2e-2, msg=f"{name} of sequence {i}")
