"""With deterministic=True the same inputs give bitwise the same outputs and gradients."""

import pytest
import torch
from helpers import run
from paths import LISTS, case, cpu, cuda

REPEATS = 50


def determinism_cases():
    """(path, Sq, Sk, head dimension, shape of the bias)"""
    by_key, dense = [(2, 4, 1), (1, 2, 1)], [(2, 4, "Sq"), (1, 4, "Sq"), (2, 2, "Sq"), (1, 1, "Sq")]
    groups = [
        (cpu("intervals", *LISTS), 400, 500, [32], [(1, 2, 1), (1, 1, "Sq")]),
        (cuda("bool"), 500, 700, [64, 128], [*by_key, *dense]),
        (cuda("interval lists", "bool lists"), 300, 500, [64, 128, 256], [*by_key, *dense]),
    ]
    return [
        case(path, rows, keys, head_dim, tuple(rows if size == "Sq" else size for size in shape))
        for paths, rows, keys, head_dims, shapes in groups
        for path in paths
        for head_dim in head_dims
        for shape in shapes
    ]


@pytest.mark.parametrize("path, rows, keys, head_dim, bias_shape", determinism_cases())
def test_results_are_bitwise_reproducible(path, rows, keys, head_dim, bias_shape):
    """On the CPU for any number of threads."""
    tensors, bias = path.inputs(2, rows, keys, 4, 2, head_dim), path.randn(*bias_shape, keys)
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(2, 4, rows, device=path.device)
    masks = [
        path.make_mask(batch, heads, rows, keys) for batch, heads in ([(2, 2), (1, 4)] if path.on_cuda else [(1, 2)])
    ]
    threads = torch.get_num_threads()
    try:
        for mask in masks:
            first = None
            for count in range(REPEATS) if path.on_cuda else (1, 2, 3):
                if path.on_cpu:
                    torch.set_num_threads(count)
                again = run(path.function, tensors, mask, bias, dout, dlse, is_causal=path.on_cuda, deterministic=True)
                first = first or again
                assert all(torch.equal(a, b) for a, b in zip(again, first))
    finally:
        torch.set_num_threads(threads)
