"""The dynamic tile scheduler of the sm90 forward: calls with several work tiles of different lengths for each SM."""

import pytest
import torch
from gpu_inputs import CAUSAL, captured, intervals, mask_of, on_gpu, randn
from helpers import check
from sequences import slices
from sm90 import biases_of, is_tall, offsets, result_and_names, sms

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

PAIRS = pytest.mark.parametrize("pairs", ["none", "key", "dense", "relative"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])


def many_heads():
    """So many that 512 rows have four m_blocks of 128 rows for each SM."""
    return sms() // 2 * 2 + 2


def scheduled(call):
    """What a call returns, the names of its kernels, and whether it zeros a counter."""
    out, names = result_and_names(call, of_kernels=False)
    assert "sm90" in names and "sm80" not in names
    return out, names, "emset" in names


def test_which_calls_are_dynamic():
    def dynamic(rows, mask=None, heads=None, **options):
        heads = heads or many_heads()
        tensors = on_gpu(1, rows, 264, heads, heads // 2, 64)
        return scheduled(lambda: flash_dmattn_func(*tensors, mask, sparse="tiles", **options))[2]

    assert dynamic(512, is_causal=True) and dynamic(512, mask_of(1, 1, 512, 264))
    assert not dynamic(512) and not dynamic(512, mask_of(1, 1, 1, 264))
    assert not dynamic(128, is_causal=True) and not dynamic(512, is_causal=True, heads=16)


@CAUSAL
@PAIRS
@HEAD_DIMS
def test_packed_sequences(head_dim, pairs, causal, poisoned_allocations):
    """Each sequence alone has few work tiles, and its schedule is static."""
    heads, rows = 8, [2200, *(1 + 211 * i % 2199 for i in range(30))]
    cu_seqlens, longest, total = offsets(rows), max(rows), sum(rows)
    tensors = [randn(total, h, head_dim) for h in (heads, 4, 4)]
    shapes = {"key": (total, heads), "dense": (total, heads, longest)}
    bias = randn(*shapes[pairs]) if pairs in shapes else None
    options = {"is_causal": causal, "relative_bias": biases_of(pairs, heads, 1, 1)[1]}
    limits = cu_seqlens, cu_seqlens, longest, longest
    out, names, is_dynamic = scheduled(lambda: flash_dmattn_varlen_func(*tensors, None, bias, *limits, **options))
    assert is_dynamic and is_tall(names) == (head_dim <= 64 or (head_dim == 128 and pairs == "none"))
    for row in slices(cu_seqlens):
        own = None
        if pairs == "key":
            own = bias[row].T[None, :, None]
        if pairs == "dense":
            own = bias[row].transpose(0, 1)[None, ..., : row.stop - row.start]
        expected = flash_dmattn_func(*(x[row][None] for x in tensors), None, own, **options)[0]
        torch.testing.assert_close(out[row], expected, rtol=2e-2, atol=2e-2)


@PAIRS
@HEAD_DIMS
def test_causal(head_dim, pairs, poisoned_allocations):
    heads = many_heads()
    tensors = on_gpu(1, 512, 536, heads, heads // 2, head_dim)
    bias, relative_bias = biases_of(pairs, heads, 512, 536)
    options = {"is_causal": True, "relative_bias": relative_bias}
    assert scheduled(lambda: flash_dmattn_func(*tensors, None, bias, **options))[2]
    check(tensors, None, bias, **options)


@PAIRS
@pytest.mark.parametrize("masks", ["bool", "intervals"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_masks(head_dim, masks, pairs, poisoned_allocations):
    heads = many_heads()
    tensors = on_gpu(1, 512, 264, heads, heads // 2, head_dim)
    mask = mask_of(1, 1, 512, 264) if masks == "bool" else intervals(1, 1, 264, rows=512)
    bias, relative_bias = biases_of(pairs, heads, 512, 264)
    options = {"sparse": "tiles", "relative_bias": relative_bias}
    is_dynamic = scheduled(lambda: flash_dmattn_func(*tensors, mask, bias, **options))[2]
    assert is_dynamic or masks == "intervals"  # the kernel that summarizes intervals zeros their counter
    check(tensors, mask, bias, **options)


def test_the_counter_restarts_at_every_replay():
    heads = many_heads()
    tensors = on_gpu(1, 512, 512, heads, heads // 2, 64)

    def attend():
        return flash_dmattn_func(*tensors, is_causal=True)

    expected = attend()
    graph, out = captured(attend)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
