"""The tall tile of the sm90 forward: m_blocks of 192 or 256 rows, where the SMs have enough of them."""

import pytest
import torch
from gpu_inputs import CAUSAL, mask_of, on_gpu, randn, takes_gpu_memory
from helpers import check
from sequences import slices
from sm90 import biases_of, check_masked_parts, is_tall, names_of, offsets, result_and_names, sms

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, flash_dmattn_with_kvcache

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]

WITHOUT_MASKS = [(d, pairs) for d in (24, 32, 64) for pairs in ("none", "key", "relative")]
WITHOUT_MASKS += [(104, "none"), (128, "none")]
# Kernels with a tall tile.
KERNELS = pytest.mark.parametrize("head_dim, pairs", [*WITHOUT_MASKS, (24, "dense"), (32, "dense"), (64, "dense")])


def check_tall(tensors, mask=None, bias=None, **options):
    assert is_tall(names_of(lambda: flash_dmattn_func(*tensors, mask, bias, **options)))
    check(tensors, mask, bias, **options)


def test_which_calls_use_it():
    def served(head_dim, rows, mask=None, bias=None, *, heads=None, **options):
        heads = heads or sms()
        tensors = on_gpu(1, rows, 264, heads, heads, head_dim)
        return is_tall(names_of(lambda: flash_dmattn_func(*tensors, mask, bias, **options)))

    key_bias, dense_bias = randn(1, 1, 1, 264), randn(1, 1, 256, 264)
    key_mask, row_mask = mask_of(1, 1, 1, 264), mask_of(1, 1, 256, 264)
    assert served(64, 256) and served(64, 256, bias=key_bias) and served(64, 256, bias=dense_bias)
    assert served(128, 192) and served(64, 192, relative_bias=randn(1, 1, 63)) and served(64, 256, softcap=4.0)
    assert served(64, 256, key_mask, dense_bias)
    # Few work tiles, or more rows beyond the sequence.
    assert not served(64, 256, heads=4) and not served(64, 128) and not served(128, 256)
    assert not served(64, 256, key_mask) and not served(64, 256, row_mask) and not served(64, 256, row_mask, dense_bias)
    assert not served(128, 192, bias=key_bias) and not served(192, 192)


@KERNELS
@pytest.mark.parametrize("rows, keys", [(192, 264), (700, 136), (192, 8), (180, 520)])
def test_lengths(head_dim, pairs, rows, keys, poisoned_allocations):
    """Tiles that reach beyond the rows and the keys."""
    heads = sms()
    bias, relative_bias = biases_of(pairs, heads, rows, keys)
    check_tall(on_gpu(1, rows, keys, heads, heads // 2, head_dim), bias=bias, relative_bias=relative_bias)


@takes_gpu_memory(24)
@pytest.mark.parametrize(
    "head_dim, pairs", [(32, "none"), (64, "none"), (64, "key"), (64, "dense"), (64, "relative"), (128, "none")]
)
def test_causal(head_dim, pairs):
    rows, keys, heads = 960, 2104, sms() * 3 // 4 // 2 * 2
    bias, relative_bias = biases_of(pairs, 2, rows, keys)
    if relative_bias is not None:
        relative_bias[:, 0, 0] = -torch.inf  # n_blocks far from the diagonal are skipped
    check_tall(on_gpu(1, rows, keys, heads, 2, head_dim), bias=bias, relative_bias=relative_bias, is_causal=True)


@pytest.mark.parametrize("head_dim, pairs", WITHOUT_MASKS)
@pytest.mark.parametrize("rows, keys", [(500, 300), (700, 65), (380, 700)])
def test_causal_lengths(head_dim, pairs, rows, keys, poisoned_allocations):
    """Warpgroups that skip n_blocks, and warpgroups whose rows see no key."""
    heads = 2 * sms()
    bias, relative_bias = biases_of(pairs, heads, rows, keys)
    tensors = on_gpu(1, rows, keys, heads, heads // 2, head_dim)
    check_tall(tensors, bias=bias, relative_bias=relative_bias, is_causal=True)


@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("grid", [(12, 16), (3, 64), (4, 48)])
def test_grids(grid, head_dim):
    heads, tokens = sms(), grid[0] * grid[1]
    table = torch.randn(1, heads, 2 * grid[0] - 1, 2 * grid[1] - 1, device="cuda")
    check_tall(on_gpu(1, tokens, tokens, heads, heads, head_dim), relative_bias=table, grid=grid)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_dense_bias_with_key_mask(head_dim):
    heads = sms()
    mask = mask_of(2, 1, 1, 264)
    mask[1, ..., 64:200] = False
    bias = randn(1, heads, 256, 264)
    bias[:, :, 3] = bias[:, :, 100, ::3] = -torch.inf
    bias[:, :, 200] = torch.finfo(bias.dtype).min
    check_tall(on_gpu(2, 256, 264, heads, heads, head_dim), mask, bias)


@pytest.mark.parametrize("head_dim", [32, 64])
def test_masked_keys_may_hold_nan(head_dim):
    heads, keys = sms(), 264
    masked_keys = torch.zeros(1, keys, dtype=torch.bool, device="cuda")
    masked_keys[:, 120:130] = masked_keys[:, 200:] = masked_keys[:, ::9] = True
    bias = randn(1, 1, 1, keys).masked_fill(masked_keys[:, None, None], -torch.inf)
    tensors = on_gpu(1, 256, keys, heads, heads, head_dim)
    assert is_tall(names_of(lambda: flash_dmattn_func(*tensors, None, bias)))
    check_masked_parts(tensors, None, bias, torch.zeros(1, 256, dtype=torch.bool, device="cuda"), masked_keys)


@CAUSAL
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(head_dim, causal):
    """They use it if they have many work tiles, and do not read each other."""
    heads = 16

    def attend(rows, keys):
        tensors = [randn(sum(rows), heads, head_dim), *(randn(sum(keys), 4, head_dim) for _ in "kv")]
        limits = offsets(rows), offsets(keys), max(rows), max(keys)
        out, names = result_and_names(lambda: flash_dmattn_varlen_func(*tensors, None, None, *limits, is_causal=causal))
        return is_tall(names), tensors, limits, out

    assert not attend([700, 500], [700, 500])[0]
    tall, tensors, limits, out = attend([4000, 6000, 1, 5100], [3600, 6000, 65, 4097])
    assert tall
    for row, key in zip(slices(limits[0]), slices(limits[1])):
        alone = [x[part][None] for x, part in zip(tensors, (row, key, key))]
        expected = flash_dmattn_func(*alone, is_causal=causal)[0]
        torch.testing.assert_close(out[row], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("page_size", [None, 64])
def test_batch_invariant_calls_do_not_use_it(page_size):
    """Their tile may not depend on the other sequences."""
    batch, rows, heads, head_dim = 4, 2304, 32, 64
    query, key, value = on_gpu(batch, rows, rows, heads, 4, head_dim)
    lengths = torch.tensor([2304, 2304, 2100, 2304], dtype=torch.int32, device="cuda")

    def attend(of, invariant):
        caches, table = (key[of], value[of]), None
        if page_size is not None:
            caches = [x.unflatten(1, (-1, page_size)).flatten(0, 1) for x in caches]
            table = torch.arange(caches[0].shape[0], dtype=torch.int32, device="cuda").view(query[of].shape[0], -1)
        options = {"cache_seqlens": lengths[of], "block_table": table, "is_causal": True, "batch_invariant": invariant}
        out, names = result_and_names(lambda: flash_dmattn_with_kvcache(query[of], *caches, **options))
        return is_tall(names), out

    assert attend(slice(None), False)[0]
    tall, together = attend(slice(None), True)
    assert not tall
    for b in range(batch):
        assert torch.equal(attend(slice(b, b + 1), True)[1][0], together[b])
