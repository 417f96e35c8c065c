"""The backward of sequences of at most 64 rows and keys (csrc/cuda/sm80/short_bwd)."""

import pytest
import torch
from gpu_inputs import CAUSAL, mask_of, on_gpu
from helpers import check, check_float32_bias

from flash_dmattn import flash_dmattn_func

pytestmark = pytest.mark.gpu
HEAD_DIMS = pytest.mark.parametrize("head_dim", [8, 32, 48, 64])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("rows", [1, 17, 49, 64])
@pytest.mark.parametrize("keys", [1, 16, 49, 64])
def test_lengths(keys, rows, head_dim, causal):
    check(on_gpu(3, rows, keys, 4, 4, head_dim), is_causal=causal)


@DTYPES
@HEAD_DIMS
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batch", [3, 700])  # 700: a CTA has several batch elements
def test_relative_bias_of_a_grid(batch, heads, head_dim, dtype):
    tensors = on_gpu(batch, 49, 49, 4, 4, head_dim, dtype=dtype)
    check(tensors, relative_bias=torch.randn(1, heads, 13, 13, device="cuda"), grid=(7, 7))


@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("radius", [0, 5, 100])
@pytest.mark.parametrize("lengths", [(40, 64), (64, 30)], ids=str)
def test_relative_bias_of_distances(lengths, radius, head_dim, causal):
    bias = torch.randn(1, 4, 2 * radius + 1, device="cuda")
    check(on_gpu(300, *lengths, 4, 4, head_dim), relative_bias=bias, is_causal=causal)


def test_relative_bias_that_masks():
    bias = torch.randn(1, 4, 61, device="cuda")
    bias[:, 0] = -torch.inf
    bias[:, 1, :20] = -torch.inf
    bias[:, 2, 35:] = torch.finfo(torch.float32).min
    check(on_gpu(5, 60, 50, 4, 4, 32), relative_bias=bias)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("batches", [1, 300])
def test_dense_float32_bias(batches, heads):
    check_float32_bias(on_gpu(300, 49, 60, 4, 4, 32), None, torch.randn(batches, heads, 49, 60, device="cuda"))


@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize("shape", [(6, 4, 49, 60), (3, 1, 49, 60), (1, 4, 1, 60), (6, 1, 49, 1)], ids=str)
def test_masks(shape, head_dim, causal):
    check(on_gpu(6, 49, 60, 4, 4, head_dim), mask_of(*shape), is_causal=causal)


@pytest.mark.parametrize("grid", [None, (7, 7)])
def test_masked_rows_and_keys_may_be_nan(grid):
    """Rows that see no key, and keys that no row sees, also as the entries of a bias that no score reads."""
    query, key, value = tensors = [x.requires_grad_() for x in on_gpu(4, 49, 49, 4, 4, 32)]
    mask = mask_of(4, 1, 49, 49)
    mask[:, :, 5], mask[:, :, :, 11] = False, False
    bias = None if grid is None else torch.randn(1, 4, 13, 13, device="cuda", requires_grad=True)
    leaves = tensors if bias is None else [*tensors, bias]
    dout = torch.randn_like(query)

    def gradients():
        out = flash_dmattn_func(query, key, value, mask, relative_bias=bias, grid=grid, sparse="tiles")
        return torch.autograd.grad(out, leaves, dout)

    expected = gradients()
    with torch.no_grad():
        query[:, 5] = dout[:, 5] = key[:, 11] = value[:, 11] = torch.nan
    for ours, before in zip(gradients()[:3], expected[:3], strict=True):
        assert torch.equal(ours, before)


def test_deterministic():
    query, key, value = (x.requires_grad_() for x in on_gpu(1000, 49, 49, 4, 4, 32))
    bias = torch.randn(1, 4, 13, 13, device="cuda", requires_grad=True)
    dout = torch.randn_like(query)

    def gradients():
        out = flash_dmattn_func(query, key, value, relative_bias=bias, grid=(7, 7), deterministic=True)
        return torch.autograd.grad(out, [query, key, value, bias], dout)

    first = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), first))
