"""The dynamic tile scheduler of the sm90 forward: calls with several work tiles of different lengths for each SM."""

import pytest
import torch
from gpu_inputs import CAUSAL, intervals, mask_of, on_gpu, randn
from helpers import check
from sequences import slices
from sm90 import bias_of, offsets

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

PAIRS = pytest.mark.parametrize("pairs", ["none", "key", "dense", "relative"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])


def many_heads():
    """So many that 512 rows have four m_blocks of 128 rows for each SM."""
    return torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2 + 2


def relative(pairs, heads):
    return torch.randn(1, heads, 2 * 30 + 1, device="cuda") if pairs == "relative" else None


def bias(pairs, heads, rows, keys):
    return None if pairs == "relative" else bias_of(pairs, 1, heads, rows, keys)


@CAUSAL
@PAIRS
@HEAD_DIMS
def test_packed_sequences(head_dim, pairs, causal, poisoned_allocations):
    """Each sequence alone has few work tiles, and its schedule is static."""
    heads, rows = 16, [296, *(1 + 53 * i % 296 for i in range(40))]
    cu_seqlens, longest = offsets(rows), max(rows)
    tensors = [randn(sum(rows), h, head_dim) for h in (heads, 4, 4)]
    table = relative(pairs, heads)
    biases = {"none": None, "relative": None, "key": randn(sum(rows), heads), "dense": randn(sum(rows), heads, longest)}[
        pairs
    ]
    limits = cu_seqlens, cu_seqlens, longest, longest
    options = {"is_causal": causal, "relative_bias": table}
    out = flash_dmattn_varlen_func(*tensors, None, biases, *limits, **options)
    for row in slices(cu_seqlens):
        own = None
        if pairs == "key":
            own = biases[row].T[None, :, None]
        if pairs == "dense":
            own = biases[row].transpose(0, 1)[None, ..., : row.stop - row.start]
        expected = flash_dmattn_func(*(x[row][None] for x in tensors), None, own, **options)[0]
        torch.testing.assert_close(out[row], expected, rtol=2e-2, atol=2e-2)


@PAIRS
@HEAD_DIMS
def test_causal(head_dim, pairs, poisoned_allocations):
    heads = many_heads()
    tensors = on_gpu(1, 512, 530, heads, heads // 2, head_dim)
    check(tensors, None, bias(pairs, heads, 512, 530), is_causal=True, relative_bias=relative(pairs, heads))


@PAIRS
@pytest.mark.parametrize("masks", ["bool", "intervals"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks(head_dim, masks, pairs, poisoned_allocations):
    heads = many_heads()
    tensors = on_gpu(1, 512, 264, heads, heads // 2, head_dim)
    mask = mask_of(1, 1, 512, 264) if masks == "bool" else intervals(1, 1, 264, rows=512)
    mask_options = {"sparse": "tiles", "relative_bias": relative(pairs, heads)}
    check(tensors, mask, bias(pairs, heads, 512, 264), **mask_options)
