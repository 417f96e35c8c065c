"""A dense bias in float32 beside 16-bit queries is read without rounding, and its gradient is float32."""

import pytest
import torch
from helpers import check_float32_bias, in_float64, reference
from paths import LISTS, both, case, cpu, triton
from sequences import Sequences, one_by_one

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

# Broadcasts of the bias, and (B, Sq, Sk, H, Hkv, D): groups of batch elements share it, as they share a pair bias.
SHAPES = {
    "own": ((6, 8, "Sq", "Sk"), (6, 70, 90, 8, 2, 32)),
    "pairs": ((2, 4, "Sq", "Sk"), (6, 130, 136, 4, 4, 64)),
    "small heads": ((2, 4, "Sq", "Sk"), (32, 130, 136, 4, 4, 32)),  # where sm90 has pair bias kernels
    "KV heads": ((1, 2, "Sq", "Sk"), (2, 65, 300, 8, 2, 128)),
    "one": ((1, 1, "Sq", "Sk"), (3, 200, 129, 2, 1, 256)),
    "few rows": ((1, 2, "Sq", "Sk"), (2, 3, 150, 4, 2, 96)),
}


def cases():
    paths = both("none", "bool", "key", "intervals", *LISTS)
    every = [case(path, shape, torch.bfloat16) for path in paths for shape in SHAPES]
    every += [case(path, "few rows", torch.bfloat16) for path in triton("bool")]
    return every + [case(path, shape, torch.float16) for path in both("bool") for shape in ("pairs", "small heads")]


def float32_bias(path, shape, rows, keys):
    """Numbers that 16 bits do not hold: rounded to bfloat16 they are up to 1 off."""
    *broadcast, _, _ = shape
    bias = path.randn(*broadcast, rows, keys, dtype=torch.float32) * 4 + 250
    bias[..., keys // 3] = -torch.inf
    bias[..., rows // 2, :] = torch.finfo(torch.float32).min
    return bias


def check(path, tensors, mask, bias, **options):
    """The CPU computes with a float32 bias as eager does, and meets its criterion."""
    if path.on_cpu:
        return path.check(tensors, mask, bias, **options)
    check_float32_bias(tensors, mask, bias, function=path.function, **options)


@pytest.mark.parametrize("path, shape, dtype", cases())
def test_a_dense_float32_bias(path, shape, dtype):
    shape, (batch, rows, keys, heads, kv_heads, head_dim) = SHAPES[shape]
    tensors = path.inputs(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype)
    mask = path.make_mask(1, 1, rows, keys)
    bias = float32_bias(path, shape, rows, keys)
    check(path, tensors, mask, bias, is_causal=heads == 8, softcap=2.0 if head_dim == 64 else 0.0)


@pytest.mark.parametrize("path", [case(path) for path in both("bool")])
def test_strides(path):
    """Keys that are not contiguous, and expanded heads."""
    tensors = path.inputs(4, 70, 80, 4, 2, 32, dtype=torch.bfloat16)
    bias = float32_bias(path, (2, 4, "Sq", "Sk"), 80, 70).mT
    check(path, tensors, path.make_mask(4, 1, 70, 80), bias)
    check(path, tensors, None, bias[:, :1].expand(2, 4, 70, 80))


@pytest.mark.parametrize("path", [case(path) for path in both("none", "bool")])
def test_deterministic(path):
    tensors = path.inputs(6, 140, 150, 4, 2, 64, dtype=torch.bfloat16)
    bias, mask = float32_bias(path, (2, 2, "Sq", "Sk"), 140, 150), path.make_mask(1, 1, 140, 150)
    check(path, tensors, mask, bias, deterministic=True)
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]

    def gradients():
        out = path.function(*leaves[:3], mask, leaves[3], deterministic=True)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    first = gradients()
    for _ in range(3):
        assert all(map(torch.equal, gradients(), first))


@pytest.mark.parametrize("path", [case(path) for path in cpu("none", "key", "bool")])
def test_variable_length_on_the_cpu(path):
    s = Sequences(path.device)
    tensors = [
        path.randn(n, heads, 16, dtype=torch.bfloat16) for n, heads in ((s.total_q, 4), (s.total_k, 2), (s.total_k, 2))
    ]
    mask = s.mask(path.mask, 2)
    bias = path.randn(*s.bias_shape("dense", 2), dtype=torch.float32) + 250
    s.fill_behind_keys(bias)
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias)]
    wide = [in_float64(x).requires_grad_() for x in (*tensors, bias)]
    out = path.varlen_function(*leaves[:3], mask, leaves[3], *s.lengths)
    exact, _ = one_by_one(reference, *wide[:3], mask, wide[3], s.cu_q, s.cu_k)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    dbias, exact_dbias = (torch.autograd.grad(x.square().sum(), y)[0] for x, y in ((out, leaves[3]), (exact, wide[3])))
    assert dbias.dtype == torch.float32
    torch.testing.assert_close(dbias.double(), exact_dbias, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_what_cuda_refuses():
    query, bias = torch.zeros(1, 64, 2, 32, device="cuda").bfloat16(), torch.zeros(1, 1, 64, 64, device="cuda")
    relative = torch.zeros(1, 1, 3, device="cuda")
    with pytest.raises(ValueError, match="attn_bias of one number per score in float32 .* combined with relative_bias"):
        flash_dmattn_func(query, query, query, None, bias, relative_bias=relative)
    rows, offsets = query[0], torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="attn_bias of one number per score in float32 .* is for fixed length on CUDA"):
        flash_dmattn_varlen_func(rows, rows, rows, None, bias[0, 0][:, None], offsets, offsets, 64, 64)
    long, wide = torch.zeros(1, 48000, 1, 32, device="cuda").bfloat16(), torch.zeros(1, 1, 48000, 48000, device="cuda")
    with pytest.raises(ValueError, match=r"one number per score .* \(Sq \+ 256\) \* \(Sk \+ 256\) below 2\^31 on CUDA"):
        flash_dmattn_func(long, long, long, None, wide)
