"""Every head dimension and dtype against the float64 reference."""

import pytest
import torch
from generate_kernels import HEAD_DIMS
from paths import DTYPES, HALVES, LISTS, case, cpu, cuda, triton

CPU_HEAD_DIMS = [1, 8, 12, 32, 35, 40, 64, 80, 96, 128, 192, 256]
# Those that the CUDA kernels are built for, some that they pad, and one that is not a multiple of 8.
CUDA_HEAD_DIMS = sorted({8, 35, 80, *HEAD_DIMS, *(d + 8 for d in HEAD_DIMS[:-1])})
TRITON_HEAD_DIMS = [8, 40, 96, 128, 192, 256] if torch.cuda.is_available() else [8, 40]  # its interpreter is slow


def head_dim_cases():
    groups = [
        (cpu("bool"), CPU_HEAD_DIMS, DTYPES, ["dense"]),
        (cpu("intervals", *LISTS), [1, 40, 64, 256], DTYPES, ["key"]),
        (cuda("none", "bool", "intervals"), CUDA_HEAD_DIMS, HALVES, ["none", "key", "dense"]),
        (cuda("interval lists", "bool lists"), CUDA_HEAD_DIMS, HALVES, ["none", "key", "dense"]),
        (triton("none"), TRITON_HEAD_DIMS, [torch.float32, torch.bfloat16], ["dense"]),
        (triton("none"), [64], [torch.float32, *HALVES], ["none"]),
    ]
    return [
        case(path, head_dim, dtype, bias)
        for paths, head_dims, dtypes, biases in groups
        for path in paths
        for head_dim in head_dims
        for dtype in dtypes
        for bias in biases
    ]


def sizes_of(path):
    """(B, Sq, Sk, H, Hkv): of several blocks. On sm90 TMA reads a dense bias whose rows are multiples of 16 bytes."""
    if path.backend == "triton":
        return (1, 300, 417, 2, 1) if path.device == "cuda" else (1, 70, 93, 2, 1)
    if path.on_cuda:
        return 2, 200, 264 if path.kernels == "sm90" else 300, 4, 2
    return (1, 65, 130, 2, 1) if path.mask == "bool" and not path.by_lists else (1, 140, 130, 2, 1)


@pytest.mark.parametrize("path, head_dim, dtype, bias", head_dim_cases())
def test_head_dims(path, head_dim, dtype, bias):
    batch, rows, keys, heads, kv_heads = sizes_of(path)
    tensors = path.inputs(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype)
    mask = path.make_mask(batch, kv_heads, rows, keys)
    bias = None if bias == "none" else path.randn(batch, heads, 1 if bias == "key" else rows, keys, dtype=dtype)
    path.check(tensors, mask, bias, is_causal=True)
    if path.backend == "triton" and bias is None:
        path.check(tensors, mask, bias)
    if path.on_cuda:
        path.check(tensors, mask, bias, softcap=5.0, deterministic=path.mask != "none")
        path.check(tensors, mask, bias, softmax_scale=-0.3)


def value_dim_cases():
    groups = [
        (cpu("none", "bool", "interval lists"), [(64, 128), (12, 35), (40, 8)], [torch.float64, torch.float32]),
        (cuda("none", "intervals", "interval lists"), [(64, 128), (192, 128), (36, 20), (16, 256)], [torch.bfloat16]),
        (triton("none"), [(16, 40), (40, 16)], [torch.float32]),
    ]
    return [
        case(path, *head_dims, dtype)
        for paths, all_head_dims, dtypes in groups
        for path in paths
        for head_dims in all_head_dims
        for dtype in dtypes
    ]


@pytest.mark.parametrize("path, head_dim, value_dim, dtype", value_dim_cases())
def test_a_value_of_another_head_dimension(path, head_dim, value_dim, dtype):
    batch, rows, keys, heads, kv_heads = sizes_of(path)
    query, key, _ = path.inputs(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype)
    value = path.randn(batch, keys, kv_heads, value_dim, dtype=dtype)
    mask = path.make_mask(batch, kv_heads, rows, keys)
    bias = path.randn(batch, heads, 1, keys, dtype=dtype)
    out, _, dq, _, dv, _ = path.check((query, key, value), mask, bias, is_causal=True)
    assert out.shape == (batch, rows, heads, value_dim)
    assert dq.shape == query.shape and dv.shape == value.shape


@pytest.mark.parametrize("path, scale", [case(path, scale) for path in cpu("none") for scale in (0.0, -0.3, 1.0)])
def test_softmax_scale(path, scale):
    path.check(path.inputs(), softmax_scale=scale)


def softcap_cases():
    groups = [(cpu("none"), [0.3, 30.0], DTYPES), (triton("none"), [0.5, 1000.0], [torch.float32])]
    return [
        case(path, softcap, dtype)
        for paths, caps, dtypes in groups
        for path in paths
        for softcap in caps
        for dtype in dtypes
    ]


@pytest.mark.parametrize("path, softcap, dtype", softcap_cases())
def test_softcap(path, softcap, dtype):
    """0.3, which float32 rounds, and 0.5 saturate tanh; 1000 leaves it near zero, and multiplies its error."""
    tensors = path.inputs(dtype=dtype) if path.on_cpu else path.inputs(*sizes_of(path), 16)
    seqlen_q, seqlen_k = tensors[0].shape[1], tensors[1].shape[1]
    bias = path.randn(1, 2, seqlen_q, seqlen_k, dtype=dtype) if path.on_cpu else None
    path.check(tensors, bias=bias, softcap=softcap)
