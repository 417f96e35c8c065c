"""Every ratio of query heads to KV heads (GQA), and every broadcast of mask and bias, against the float64 reference."""

import itertools

import pytest
import torch
from helpers import BROADCASTS, shaped
from paths import DTYPES, LISTS, both, case, cpu, cuda

CPU_GROUPS = [(1, 1), (2, 1), (4, 2), (4, 1), (8, 1), (3, 3), (8, 2)]
CUDA_GROUPS = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 1), (6, 2), (8, 1), (8, 2), (8, 8)]


def group_cases():
    groups = [
        (cpu("bool"), CPU_GROUPS, DTYPES),
        (cpu("intervals", *LISTS), [(1, 1), (4, 2), (8, 1), (3, 3)], [torch.float32]),
        (cuda("bool", "key", "intervals", *LISTS), CUDA_GROUPS, [torch.bfloat16]),
    ]
    return [
        case(path, *heads, dtype, bias)
        for paths, ratios, dtypes in groups
        for path in paths
        for heads in ratios
        for dtype in dtypes
        for bias in ("key", "dense")
    ]


def sizes_of(path):
    """(Sq, Sk, D). A list has 128 rows, on the CPU too; on sm90 TMA needs bias rows of a multiple of 16 bytes."""
    if path.on_cuda:
        return (300, 400, 64) if path.by_lists else (200, 264, 64)
    return (33, 65, 16) if path.mask == "bool" and not path.by_lists else (140, 150, 8)


@pytest.mark.parametrize("path, heads, kv_heads, dtype, bias", group_cases())
def test_head_groups(path, heads, kv_heads, dtype, bias):
    """Masks and biases of every number of heads and batch elements beside each other."""
    rows, keys, head_dim = sizes_of(path)
    tensors = path.inputs(2, rows, keys, heads, kv_heads, head_dim, dtype=dtype)
    numbers = sorted({heads, kv_heads, 1})
    for i, (mask_heads, bias_heads) in enumerate(itertools.product(numbers, repeat=2)):
        # The numbers of batch elements alternate; lists and blocks of CUDA see all of them.
        for j in range(2 if path.on_cuda else 1):
            mask = path.make_mask(1 + (i + j) % 2, mask_heads, rows, keys)
            given = path.randn(1 + (i // 2 + j) % 2, bias_heads, 1 if bias == "key" else rows, keys, dtype=dtype)
            path.check(tensors, mask, given, is_causal=(bias == "key") == (j == 0))


def broadcast_cases():
    halves = [case(path, broadcast, torch.bfloat16) for path in both("bool") for broadcast in BROADCASTS]
    return halves + [case(path, broadcast, torch.float32) for path in cpu("bool") for broadcast in BROADCASTS]


def broadcast_sizes_of(path):
    return (140, 270, 64) if path.on_cuda else (40, 70, 8)


@pytest.mark.parametrize("path, broadcast, dtype", broadcast_cases())
def test_mask_broadcasts(path, broadcast, dtype):
    rows, keys, head_dim = broadcast_sizes_of(path)
    path.check(path.inputs(2, rows, keys, 4, 2, head_dim, dtype=dtype), path.rand_mask(*shaped(broadcast, rows, keys)))


@pytest.mark.parametrize("path, broadcast, dtype", broadcast_cases())
def test_bias_broadcasts(path, broadcast, dtype):
    rows, keys, head_dim = broadcast_sizes_of(path)
    tensors, bias = path.inputs(2, rows, keys, 4, 2, head_dim, dtype=dtype), path.randn(*shaped(broadcast, rows, keys))
    path.check(tensors, path.rand_mask(2, 1, rows, keys), bias.to(dtype), is_causal=True, softcap=3.0)


SHAPES = [None, (2, 4, 1, 600), (1, 2, 300, 600), (2, 1, 300, 1), (1, 4, 300, 600), (1, 1, 300, 600)]
BLOCKS = [
    *(case(path, dtype) for path in cpu("intervals", *LISTS) for dtype in DTYPES),
    *(case(path, dtype) for path in cpu("none", "bool") for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.mark.parametrize("path, dtype", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_blocks(shape, path, dtype):
    """More rows and keys than a block has, and bias gradients summed over batch elements and heads."""
    tensors, bias = path.inputs(2, 300, 600, 4, 2, 16, dtype=dtype), shape and path.randn(*shape, dtype=dtype)
    path.check(tensors, path.make_mask(2, 2, 300, 600), bias, is_causal=True, softcap=3.0)
